"""Attention: recognised in graphs as exporters write them, and right at every size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.attributes import SCHEDULE
from relaxlite.ir.expr import Call, Expr, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.graph.fuse_attention import fuse_attention
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target

Make = Callable[[rl.BlockBuilder, Var, Var, Var, Var], Expr]
HEADS, WIDTH = 3, 8
SWAP = (0, 2, 1, 3)
rng = np.random.default_rng(7)


def decomposed(
    bb: rl.BlockBuilder, q: Expr, k: Expr, v: Expr, score: Callable[[Expr], Expr] = lambda scores: scores
) -> Expr:
    """matmul, what `score` makes of the scores, softmax, matmul on (batch, heads, length, width)."""
    scores = score(bb.emit(ops.matmul(q, bb.emit(ops.transpose(k, axes=(0, 1, 3, 2))))))
    return bb.emit(ops.matmul(bb.emit(ops.softmax(scores, axis=-1)), v))


def module_of(make: Make, bias: tuple[str | int, ...] = ("b", 1, 1, "n"), swapped: bool = False) -> IRModule:
    """main(q, k, v, bias) on m queries and n keys; `swapped`: heads stand after the lengths."""
    bb = rl.BlockBuilder()
    symbols = {name: bb.symbol(name) for name in "bmn"}

    def tensor(*dims: str | int) -> rl.TensorType:
        return rl.TensorType.of(tuple(symbols[d] if isinstance(d, str) else d for d in dims), "float32")

    shapes = [("b", x, HEADS, WIDTH) if swapped else ("b", HEADS, x, WIDTH) for x in "mnn"]
    types = dict(zip("qkv", (tensor(*s) for s in shapes), strict=True))
    with bb.function("main", **types, bias=tensor(*bias)) as (q, k, v, mask):
        bb.result(make(bb, q, k, v, mask))
    return bb.module()


def op_names(module: IRModule) -> list[str]:
    """The ops that the result needs."""
    main = module["main"]
    values = {b.var: b.value for b in main.body.bindings() if isinstance(b, Let)}  # type: ignore[union-attr]
    found: list[str] = []
    stack = [main.body.result]  # type: ignore[union-attr]
    while stack:
        value = values.get(stack.pop())  # type: ignore[call-overload]
        if isinstance(value, Call) and isinstance(value.callee, Op):
            found.append(value.callee.name)
            stack.extend(value.args)
    return sorted(found)


def fused(module: IRModule) -> tuple[IRModule, str]:
    """The module after the pass, and its notes."""
    context = PassContext(Target.host())
    return fuse_attention(module, context), "\n".join(context.notes)


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, scale: float) -> np.ndarray:
    reference = get_op("attention").reference
    wide = [x.astype(np.float64) for x in (q, k, v, bias)]
    axes = dict.fromkeys(("q_axes", "k_axes", "v_axes", "out_axes"))
    return reference(*wide, scale=scale, **axes)  # type: ignore[no-any-return]


def plain(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    def score(s: Expr) -> Expr:
        return bb.emit(ops.add(bb.emit(ops.divide(s, np.float32(2.5))), mask))

    return decomposed(bb, q, k, v, score)


def swapped(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    """Heads after lengths, as a projection leaves them: everything is transposed."""
    turned = [bb.emit(ops.transpose(x, axes=SWAP)) for x in (q, k, v)]

    def score(s: Expr) -> Expr:
        return bb.emit(ops.add(mask, bb.emit(ops.multiply(np.float32(0.4), s))))

    return bb.emit(ops.transpose(decomposed(bb, *turned, score), axes=SWAP))  # type: ignore[arg-type]


AVX512 = Target.parse("llvm -mcpu=x86-64-v4")


def steps_until(name: str) -> list[Pass]:
    names = [step.name for step in default_pipeline()]
    return list(default_pipeline()[: names.index(name) + 1])


def test_a_decomposed_graph_becomes_one_op() -> None:
    made, _ = fused(module_of(plain))
    assert op_names(made) == ["attention"]


def test_transposes_become_attributes() -> None:
    made, _ = fused(module_of(swapped, swapped=True))
    assert op_names(made) == ["attention"]
    (call,) = [
        b.value for b in made["main"].body.bindings() if isinstance(b, Let) and b.var is made["main"].body.result
    ]  # type: ignore[union-attr]
    assert isinstance(call, Call)
    assert call.attrs["scale"] == pytest.approx(0.4)
    assert {call.attrs[name] for name in ("q_axes", "k_axes", "v_axes", "out_axes")} == {SWAP}


@pytest.mark.each_value
@pytest.mark.parametrize("bias", [("b", 1, 1, "n"), ("m", "n"), (1, HEADS, "m", "n"), ("n",), (1,)])
@pytest.mark.parametrize("make", [plain, swapped])
def test_right_at_every_size(make: Make, bias: tuple[str | int, ...]) -> None:
    is_swapped = make is swapped
    exe = rl.compile(module_of(make, bias, swapped=is_swapped))
    assert "attention" in str(exe.data.kernels)
    for b, m, n in [
        (1, 1, 1),
        (2, 7, 3),
        (1, 16, 48),
        (1, 65, 49),
        (2, 4, 300),
        (1, 68, 9),
        (1, 69, 9),
        (3, 130, 97),
        (1, 5, 300),
        (0, 3, 4),
        (2, 0, 5),
        (1, 81, 0),
    ]:
        q, k, v = (rng.standard_normal((b, HEADS, x, WIDTH)).astype(np.float32) for x in (m, n, n))
        sizes = {"b": b, "m": m, "n": n}
        mask = rng.standard_normal([sizes.get(d, d) for d in bias]).astype(np.float32)  # type: ignore[arg-type,misc]
        given = [np.ascontiguousarray(x.transpose(SWAP)) for x in (q, k, v)] if is_swapped else [q, k, v]
        got = exe(*given, mask)
        got = got.transpose(SWAP) if is_swapped else got
        with np.errstate(all="ignore"):
            want = expected(q, k, v, mask, 0.4) if n else np.zeros(q.shape)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_masked_keys_large_scores_and_nan() -> None:
    exe = rl.compile(module_of(plain))
    q, k, v = (rng.standard_normal((1, HEADS, x, WIDTH)).astype(np.float32) for x in (20, 100, 100))
    mask = np.zeros((1, 1, 1, 100), np.float32)
    mask[..., :60] = -np.inf  # a whole block of keys has no finite score
    np.testing.assert_allclose(exe(q, k, v, mask), expected(q, k, v, mask, 0.4), rtol=2e-5, atol=2e-6)
    huge = exe(q * 1e4, k, v, mask)
    np.testing.assert_allclose(huge, expected(q * np.float32(1e4), k, v, mask, 0.4), rtol=1e-3, atol=1e-3)
    assert np.isnan(exe(q, k, v, np.full_like(mask, -np.inf))).all()  # as softmax of nothing but -inf
    lowest = np.full_like(mask, np.finfo(np.float32).min)  # as exporters mask: a row without keys weighs all the same
    np.testing.assert_allclose(exe(q, k, v, lowest)[0, :, :1], v.mean(axis=2)[0][:, None], rtol=1e-4, atol=1e-5)
    q[0, 1, 3, 2] = np.nan
    got = np.isnan(exe(q, k, v, mask)).any(axis=-1)
    assert got[0, 1, 3] and got.sum() == 1


def twice(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    scores = bb.emit(ops.matmul(q, bb.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
    weights = bb.emit(ops.softmax(scores, axis=-1))
    return bb.emit(ops.matmul(weights, bb.emit(ops.matmul(bb.emit(ops.transpose(weights, axes=(0, 1, 3, 2))), q))))


def other_axis(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    scores = bb.emit(ops.matmul(q, bb.emit(ops.transpose(k, axes=(0, 1, 3, 2)))))
    return bb.emit(ops.matmul(bb.emit(ops.softmax(scores, axis=-2)), v))


def no_constant(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    return decomposed(bb, q, k, v, lambda s: bb.emit(ops.multiply(s, bb.emit(ops.sqrt(mask)))))


def scaled_bias(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    return decomposed(bb, q, k, v, lambda s: bb.emit(ops.multiply(bb.emit(ops.add(s, mask)), np.float32(2))))


def rectified(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    return decomposed(bb, q, k, v, lambda s: bb.emit(ops.relu(s)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (twice, "weights are used elsewhere"),
        (other_axis, "not over the last axis"),
        (no_constant, "the scale is no constant"),
        (scaled_bias, "scaled after the bias or the mask"),
        (rectified, "computed by relu"),
    ],
)
def test_what_is_no_attention_stays_and_says_why(make: Make, reason: str) -> None:
    module = module_of(make)
    made, notes = fused(module)
    assert "attention" not in op_names(made)
    assert reason in notes


def test_widths_that_only_run_time_knows_take_the_long_way() -> None:
    bb = rl.BlockBuilder()
    n, d = bb.symbol("n"), bb.symbol("d")
    with bb.function("main", x=rl.TensorType.of((n, d), "float32")) as (x,):
        bb.result(bb.emit(get_op("attention")(x, x, x, scale=0.5)))
    exe = rl.compile(bb.module())
    for shape in [(5, 3), (33, 70), (0, 4)]:
        x = rng.standard_normal(shape).astype(np.float32)
        scores = np.exp(x @ x.T * np.float32(0.5))
        np.testing.assert_allclose(exe(x), scores / scores.sum(-1, keepdims=True) @ x, rtol=1e-4, atol=1e-5)


KV_HEADS, GROUP = 2, 3


def broadcast(bb: rl.BlockBuilder, x: Var) -> Expr:
    b, h, n, d = x.ty.shape  # type: ignore[union-attr, misc]
    wide = bb.emit(ops.broadcast_to(bb.emit(ops.expand_dims(x, axes=(2,))), (b, h, GROUP, n, d)))
    return bb.emit(ops.reshape(wide, (b, h * GROUP, n, d)))


def tiled(bb: rl.BlockBuilder, x: Var) -> Expr:
    b, h, n, d = x.ty.shape  # type: ignore[union-attr, misc]
    wide = bb.emit(ops.tile(bb.emit(ops.expand_dims(x, axes=(2,))), (1, 1, GROUP, 1, 1)))
    return bb.emit(ops.reshape(wide, (b, h * GROUP, n, d)))


def stacked(bb: rl.BlockBuilder, x: Var) -> Expr:
    b, h, n, d = x.ty.shape  # type: ignore[union-attr, misc]
    part = bb.emit(ops.reshape(x, (b, h, 1, n, d)))
    return bb.emit(ops.reshape(bb.emit(ops.concat(*[part] * GROUP, axis=2)), (b, h * GROUP, n, d)))


def gathered(bb: rl.BlockBuilder, x: Var) -> Expr:
    return bb.emit(ops.gather(x, np.repeat(np.arange(KV_HEADS), GROUP), axis=1))


def other_order(bb: rl.BlockBuilder, x: Var) -> Expr:
    """0, 1, 0, 1, ..: heads of a group do not stand in a row."""
    return bb.emit(ops.gather(x, np.tile(np.arange(KV_HEADS), GROUP), axis=1))


def other_axis_repeated(bb: rl.BlockBuilder, x: Var) -> Expr:
    """Along the batch, and back to the shape that repeated heads have."""
    b, h, n, d = x.ty.shape  # type: ignore[union-attr, misc]
    wide = bb.emit(ops.broadcast_to(bb.emit(ops.expand_dims(x, axes=(1,))), (b, GROUP, h, n, d)))
    return bb.emit(ops.reshape(wide, (b, h * GROUP, n, d)))


Repeat = Callable[[rl.BlockBuilder, Var], Expr]


def grouped(repeat_k: Repeat, repeat_v: Repeat, *, swapped: bool = False) -> IRModule:
    """main(q, k, v), with more heads of q; `swapped`: k and v have their heads after the lengths."""
    bb = rl.BlockBuilder()
    b, m, n = (bb.symbol(name) for name in "bmn")
    q_type = rl.TensorType.of((b, KV_HEADS * GROUP, m, WIDTH), "float32")
    kv_type = rl.TensorType.of((b, n, KV_HEADS, WIDTH) if swapped else (b, KV_HEADS, n, WIDTH), "float32")
    with bb.function("main", q=q_type, k=kv_type, v=kv_type) as (q, k, v):
        keys, values = (bb.emit(ops.transpose(x, axes=SWAP)) if swapped else x for x in (k, v))
        bb.result(decomposed(bb, q, repeat_k(bb, keys), repeat_v(bb, values)))
    return bb.module()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("repeat", [broadcast, tiled, stacked, gathered])
def test_repeated_heads_of_keys_and_values_become_groups(repeat: Repeat, swapped: bool) -> None:
    module = grouped(repeat, repeat, swapped=swapped)
    made, notes = fused(module)
    assert op_names(made) == ["attention"], notes
    exe = rl.compile(module)
    for b, m, n in [(1, 1, 1), (2, 7, 3), (1, 66, 50), (0, 2, 2), (2, 0, 3)]:
        shapes = [(b, KV_HEADS * GROUP, m, WIDTH), *[(b, KV_HEADS, n, WIDTH)] * 2]
        q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
        given = [q, *(np.ascontiguousarray(x.transpose(SWAP)) if swapped else x for x in (k, v))]
        want = expected(q, *(np.repeat(x, GROUP, 1) for x in (k, v)), np.zeros(1), 1.0)
        np.testing.assert_allclose(exe(*given), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("repeat_k", "repeat_v"), [(broadcast, other_order), (other_order, other_order), (other_axis_repeated, broadcast)]
)
def test_heads_that_are_repeated_otherwise_stay_repeated(repeat_k: Repeat, repeat_v: Repeat) -> None:
    module = grouped(repeat_k, repeat_v)
    made, _ = fused(module)
    assert "attention" in op_names(made) and len(op_names(made)) > 2
    exe, given = rl.compile(module), [rng.standard_normal((2, h, 5, WIDTH)).astype(np.float32) for h in (6, 2, 2)]
    np.testing.assert_allclose(exe(*given), rl.compile(made)(*given), rtol=1e-5, atol=1e-6)
    want = Interpreter(module).run("main", *given)
    np.testing.assert_allclose(exe(*given), want, rtol=1e-4, atol=1e-5)


def seen(bb: rl.BlockBuilder, mask: Expr) -> Expr:
    return bb.emit(ops.greater(mask, np.float32(0)))


Masked = Callable[[rl.BlockBuilder, Expr, Expr, np.float32], Expr]


def keeps(bb: rl.BlockBuilder, scores: Expr, mask: Expr, low: np.float32) -> Expr:
    return bb.emit(ops.where(seen(bb, mask), scores, low))


def fills(bb: rl.BlockBuilder, scores: Expr, mask: Expr, low: np.float32) -> Expr:
    return bb.emit(ops.where(seen(bb, mask), low, scores))


def keeps_then_adds(bb: rl.BlockBuilder, scores: Expr, mask: Expr, low: np.float32) -> Expr:
    return bb.emit(ops.add(mask, keeps(bb, scores, mask, low)))


def adds_then_keeps(bb: rl.BlockBuilder, scores: Expr, mask: Expr, low: np.float32) -> Expr:
    return keeps(bb, bb.emit(ops.add(scores, mask)), mask, low)


def chooses_another(bb: rl.BlockBuilder, scores: Expr, mask: Expr, low: np.float32) -> Expr:
    return bb.emit(ops.where(seen(bb, mask), scores, mask))


def masked_module(make: Masked, low: float, bias: tuple[str | int, ...]) -> IRModule:
    def form(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
        return decomposed(bb, q, k, v, lambda s: make(bb, bb.emit(ops.divide(s, np.float32(2))), mask, np.float32(low)))

    return module_of(form, bias)


@pytest.mark.each_value
@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min), -2.0])
@pytest.mark.parametrize("bias", [("m", "n"), ("b", 1, 1, "n")])
@pytest.mark.parametrize("make", [keeps, fills, keeps_then_adds])
def test_masks_that_choose_are_operands(make: Masked, bias: tuple[str | int, ...], low: float) -> None:
    module = masked_module(make, low, bias)
    made, notes = fused(module)
    assert "attention" in op_names(made) and "softmax" not in op_names(made), notes
    exe = rl.compile(module)
    for b, m, n in [(1, 1, 1), (2, 7, 3), (1, 67, 50), (1, 3, 300), (0, 2, 2), (2, 0, 3)]:
        q, k, v = (rng.standard_normal((b, HEADS, x, WIDTH)).astype(np.float32) for x in (m, n, n))
        sizes = {"b": b, "m": m, "n": n}
        mask = rng.standard_normal([sizes.get(d, d) for d in bias]).astype(np.float32)  # type: ignore[arg-type,misc]
        mask[..., :1, : n // 2] = -1  # some queries see nothing, or all
        np.testing.assert_allclose(exe(q, k, v, mask), Interpreter(module).run("main", q, k, v, mask), 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("make", "reason"), [(adds_then_keeps, "masked after the bias"), (chooses_another, "does not choose between")]
)
def test_masks_of_other_kinds_stay_and_say_why(make: Masked, reason: str) -> None:
    made, notes = fused(masked_module(make, -1e9, ("m", "n")))
    assert "attention" not in op_names(made)
    assert reason in notes


def test_sums_over_a_block_of_queries_are_register_tiles() -> None:
    """Scores and weighted values, maxima and totals, in blocks of 64 and of 16 queries."""
    (program,) = run_passes(module_of(plain), steps_until("schedule"), PassContext(AVX512)).programs().values()
    steps = program.attrs[SCHEDULE]
    assert isinstance(steps, tuple)
    assert sum(str(step).startswith("register_tile") for step in steps) == 4


def as_torch_writes_it(bb: rl.BlockBuilder, q: Var, k: Var, v: Var, mask: Var) -> Expr:
    """Scaled operands; weights of queries that see nothing become 0."""
    root = np.float32(0.4**0.5)
    keys = bb.emit(ops.multiply(bb.emit(ops.transpose(k, axes=(0, 1, 3, 2))), root))
    scores = bb.emit(ops.add(bb.emit(ops.matmul(bb.emit(ops.multiply(root, q)), keys)), mask))
    weights = bb.emit(ops.softmax(scores, axis=-1))
    weights = bb.emit(ops.where(bb.emit(ops.isnan(weights)), np.float32(0), weights))
    return bb.emit(ops.matmul(weights, v))


def test_queries_that_see_nothing_get_zeros_where_the_graph_says_so() -> None:
    module = module_of(as_torch_writes_it, ("m", "n"))
    made, notes = fused(module)
    assert op_names(made) == ["attention"], notes
    exe = rl.compile(module)
    for m, n in [(7, 5), (67, 50), (3, 300)]:
        q, k, v = (rng.standard_normal((2, HEADS, x, WIDTH)).astype(np.float32) for x in (m, n, n))
        mask = np.where(rng.random((m, n)) < 0.3, -np.inf, 0).astype(np.float32)
        mask[1] = -np.inf
        mask[2, 0] = np.nan
        with np.errstate(invalid="ignore"):
            want = Interpreter(module).run("main", q, k, v, mask)
        got = exe(q, k, v, mask)
        assert not got[:, :, 1:3].any()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_transposes_and_repeats_before_an_attention_op_become_attributes(is_repeated: bool) -> None:
    bb = rl.BlockBuilder()
    b, m = bb.symbol("b"), bb.symbol("m")
    heads = 2 if is_repeated else 4
    types = {"q": TensorType.of((b, m, 4, 8), "float32")}
    types |= {name: TensorType.of((b, m, heads, 8), "float32") for name in "kv"}
    with bb.function("main", **types) as params:
        q, k, v = (bb.emit(ops.transpose(x, axes=(0, 2, 1, 3))) for x in params)
        if is_repeated:
            k, v = (
                bb.emit(
                    ops.reshape(
                        bb.emit(ops.broadcast_to(bb.emit(ops.expand_dims(x, axes=(2,))), (b, 2, 2, m, 8))), (b, 4, m, 8)
                    )
                )
                for x in (k, v)
            )
        out = bb.emit(ops.attention(q, k, v, scale=0.5))
        bb.result(bb.emit(ops.transpose(out, axes=(0, 2, 1, 3))))
    module = bb.module()
    result = fuse_attention(module, PassContext(Target.parse("llvm")))
    assert op_names(eliminate_dead(result)) == ["attention"]
    exe, rng = rl.compile(module), np.random.default_rng(0)
    for size in (1, 3, 17):
        arrays = [rng.standard_normal((2, size, h, 8)).astype(np.float32) for h in (4, heads, heads)]
        q, k, v = (np.repeat(x.transpose(0, 2, 1, 3), 4 // x.shape[2], axis=1) for x in arrays)
        scores = q @ k.transpose(0, 1, 3, 2) * 0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(exe(*arrays), wanted, atol=1e-5)
