"""Row programs: what is fused into them, how their loops are arranged, and that they compute what they did before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.codegen.llvm import emit_program
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.ir.program import Prefetch, TensorProgram
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import SymVar, as_int, evaluate
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.fuse_ops import fuse_ops
from relaxlite.passes.fuse.fuse_programs import fuse_programs
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.reachable import drop_unused
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.loops.pattern import LoopPattern, analyze, top_stages
from relaxlite.passes.loops.row_program import match_row_program
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.support import tiers
from tests.support.native_kernel import NativeKernel

Make = Callable[..., Call]
TARGET = Target.parse("llvm -mcpu=x86-64-v4")
SIZES = (
    0,
    1,
    7,
    16,
    17,
    33,
    64,
    65,
    130,
)  # of a row: no vector, one, a few, several steps; each with and without a tail


def build(
    shapes: Sequence[tuple[int | str, ...]], make: Callable[..., Sequence[Expr] | Expr], dtype: str = "float32"
) -> IRModule:
    """main(x0, x1, ...) of what `make(emit, x0, x1, ...)` emits. Dims are ints or names of symbols."""
    bb = BlockBuilder()
    symbols = {d: bb.symbol(d) for shape in shapes for d in shape if isinstance(d, str)}
    types = {
        f"x{k}": TensorType.of(tuple(symbols[d] if isinstance(d, str) else d for d in shape), dtype)
        for k, shape in enumerate(shapes)
    }
    with bb.function("main", **types) as params:
        made = make(bb.emit, *params)
        bb.result(Tuple(tuple(made)) if isinstance(made, Sequence) else made)
    return bb.module()


def number(value: float, like: Var) -> Constant:
    assert isinstance(like.ty, TensorType)
    return Constant.of(value, like.ty.dtype)


def fused(given: IRModule) -> dict[str, TensorProgram]:
    context = PassContext(TARGET)
    return dict(drop_unused(fuse_programs(fuse_ops(legalize(decompose(given)), context))).programs())


def softmax_of_scores(emit: Any, x: Var, mask: Var) -> Var:
    return emit(ops.softmax(emit(ops.add(emit(ops.multiply(x, number(0.125, x))), mask)), axis=-1))


def added_layer_norm(emit: Any, x: Var, y: Var, w: Var) -> Var:
    return emit(ops.layer_norm(emit(ops.add(x, y)), w, w, axis=-1))


def costly_layer_norm(emit: Any, x: Var, w: Var) -> Var:
    return emit(ops.layer_norm(emit(ops.gelu(x)), w, axis=-1))


def scaled_softmax(emit: Any, x: Var, y: Var) -> Var:
    return emit(ops.relu(emit(ops.multiply(emit(ops.softmax(x, axis=-1)), y))))


def rms_norm_between(emit: Any, x: Var, w: Var) -> Var:
    normal = emit(ops.rms_norm(emit(ops.exp(x)), w, axis=-1))
    return emit(ops.silu(emit(ops.subtract(normal, number(1.0, x)))))


def log_softmax_of_sums(emit: Any, x: Var, y: Var) -> Var:
    return emit(ops.log_softmax(emit(ops.add(x, y)), axis=-1))


FUSED: dict[str, tuple[tuple[tuple[int | str, ...], ...], Callable[..., Expr]]] = {
    "scores and mask into softmax": ((("n", 3, "m"), ("n", 1, "m")), softmax_of_scores),
    "a sum into layer norm": ((("n", "m"), ("n", "m"), ("m",)), added_layer_norm),
    "gelu into layer norm": ((("n", "m"), ("m",)), costly_layer_norm),
    "softmax into what follows": ((("n", "m"), ("n", "m")), scaled_softmax),
    "rms norm, before and after": ((("n", "m"), ("m",)), rms_norm_between),
    "log softmax": ((("n", "m"), ("m",)), log_softmax_of_sums),
}


@pytest.mark.pairwise("name", "dtype")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", ["m", 5, 16, 48, 40, 200])
@pytest.mark.parametrize("name", FUSED)
def test_fused_rows_compute_what_the_ops_do(name: str, size: int | str, dtype: str) -> None:
    shapes, make = FUSED[name]
    shapes = tuple(tuple(size if d == "m" else d for d in shape) for shape in shapes)
    given = build(shapes, make, dtype)
    assert len(fused(given)) == 1
    (made,) = fused(given).values()
    assert analyze(made) == LoopPattern.ROW
    exe, oracle = rl.compile(given), Interpreter(decompose(given))
    rng = np.random.default_rng(0)
    for m in SIZES if size == "m" else (size,):
        values = {"n": 5, "m": m}
        args = [
            rng.standard_normal([values[d] if isinstance(d, str) else d for d in shape]).astype(dtype)
            for shape in shapes
        ]
        got, wanted = exe(*args), oracle.run("main", *args)
        tolerance = 2e-5 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def text_of(given: IRModule) -> str:
    (made,) = fused(given).values()
    return print_module(IRModule({"kernel": made}))


def test_costly_value_is_computed_once_per_element() -> None:
    text = text_of(build(*FUSED["gelu into layer norm"]))
    assert text.count("gelu(") == 1 and text.count("_row[") > 2


def test_cheap_value_is_computed_by_each_stage() -> None:
    text = text_of(build((("n", "m"), ("m",)), lambda emit, x, w: emit(ops.softmax(emit(ops.neg(x)), axis=-1))))
    assert text.count("-x") == 2 and "_row" not in text


def test_costly_value_of_another_shape_stays_apart() -> None:
    """It would be computed for each of the n rows, where it was computed once."""
    made = fused(
        build((("n", "m"), ("m",)), lambda emit, x, w: emit(ops.softmax(emit(ops.add(x, emit(ops.gelu(w)))), axis=-1)))
    )
    assert len(made) == 2


def test_sum_that_is_used_elsewhere_is_a_second_output() -> None:
    """One kernel stores x + y row by row and reads it again for the norm."""

    def make(emit: Any, x: Var, y: Var, w: Var) -> Sequence[Expr]:
        total = emit(ops.add(x, y))
        return total, emit(ops.layer_norm(total, w, axis=-1))

    (made,) = fused(build((("n", "m"), ("n", "m"), ("m",)), make)).values()
    assert made.num_outputs == 2 and match_row_program(top_stages(made)[-1]) is not None


def test_stages_share_loops_where_totals_allow_it() -> None:
    """Softmax passes over a row three times: maximum; exponentials and their sum; scale."""
    (made,) = fused(build(((8, 4096),), lambda emit, x: emit(ops.softmax(x, axis=-1)))).values()
    text = print_module(IRModule({"softmax": schedule_program(made, TARGET)}))
    assert text.count("in serial(64)") == 3 and text.count("exp2(") == 1


def test_short_rows_have_no_loop() -> None:
    (made,) = fused(build((("n", 32),), lambda emit, x: emit(ops.softmax(x, axis=-1)))).values()
    text = print_module(IRModule({"softmax": schedule_program(made, TARGET)}))
    assert "serial" not in text and "in parallel(n)" in text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_spreads_over_its_row_only(value: float) -> None:
    exe = rl.compile(build((("n", "m"),), lambda emit, x: emit(ops.softmax(x, axis=-1))))
    for m in (3, 16, 40, 200):
        x = np.zeros((3, m), np.float32)
        x[1, m // 2] = value
        got = exe(x)
        assert np.isnan(got[1]).all() if np.isnan(value) else np.isnan(got[1]).any()
        np.testing.assert_allclose(got[::2], 1 / m, rtol=1e-6)


def test_masked_rows_keep_their_distribution() -> None:
    """A row of lowest values only is uniform; one of -inf beside numbers gives them all the weight."""
    exe = rl.compile(build((("n", "m"),), lambda emit, x: emit(ops.softmax(x, axis=-1))))
    for m in (3, 40, 200):
        x = np.full((2, m), np.finfo(np.float32).min)
        x[1] = -np.inf
        x[1, 1:3] = 1.0
        got = exe(x)
        np.testing.assert_allclose(got[0], 1 / m, rtol=1e-6)
        np.testing.assert_array_equal(got[1, 1:3], 0.5)
        assert got[1].sum() == 1.0


# Results larger than the caches

SMALL_CACHE = replace(Target.host(), l3_bytes=4096)


@pytest.mark.parametrize(
    "make",
    [
        lambda emit, x: emit(ops.softmax(x, axis=-1)),
        lambda emit, x: emit(ops.layer_norm(x, axis=-1)),
        lambda emit, x: emit(ops.relu(x)),
    ],
    ids=["softmax", "layer norm", "relu"],
)
@pytest.mark.parametrize("offset", [0, 1])
def test_large_results_go_past_the_caches(make: Callable[..., Expr], offset: int) -> None:
    """... where their addresses are aligned, which is known when the kernel runs: `offset` shifts them."""
    given = build((("n", "m"),), make)
    (made,) = fused(given).values()
    program = schedule_program(made, SMALL_CACHE)
    assert "nontemporal(" in print_module(IRModule({"kernel": program}))
    assert "!nontemporal" in emit_program("kernel", program, SMALL_CACHE)
    kernel = NativeKernel(program, target=SMALL_CACHE)
    rng = np.random.default_rng(0)
    for n, m in ((3, 5), (1, 2000), (40, 128), (7, 333), (2, 5000)):
        x = rng.standard_normal((n, m)).astype(np.float32)
        room = np.zeros(n * m + 32, np.float32)
        start = (-room.ctypes.data % 64) // 4 + offset
        out = room[start : start + n * m].reshape(n, m)
        values = {"n": n, "m": m}
        assert kernel([x, out], [values[s.name] for s in program.symbols]) == 0
        np.testing.assert_allclose(out, Interpreter(given).run("main", x), rtol=2e-5, atol=1e-6)
        assert not room[:start].any() and not room[start + n * m :].any()


def test_results_that_fit_stay_in_the_caches() -> None:
    (made,) = fused(build(((64, 64),), lambda emit, x: emit(ops.relu(x)))).values()
    assert "nontemporal" not in print_module(IRModule({"relu": schedule_program(made, TARGET)}))


# Rows that are asked for in time


ZEN = Target.parse("llvm -mcpu=znver4 -mtriple=x86_64-unknown-linux-gnu")
INTEL = Target.parse("llvm -mcpu=icelake-server -mtriple=x86_64-unknown-linux-gnu")


def requests_in(make: Callable[..., Expr], shapes: Sequence[tuple[int | str, ...]], target: Target) -> list[Prefetch]:
    programs = fused(build(shapes, make)).values()
    scheduled = [schedule_program(made, target) for made in programs]
    return [s for program in scheduled for s in walk_stmts(program.body) if isinstance(s, Prefetch)]


def scaled_sum(emit: Any, x: Var, scale: Var, y: Var) -> Var:
    return emit(ops.add(emit(ops.multiply(x, scale)), y))


def test_loops_over_two_arrays_from_memory_ask_for_both_ahead() -> None:
    shapes = (("n", 1024), (1024,), ("n", 1024))
    found = requests_in(scaled_sum, shapes, ZEN)
    assert sorted(request.buffer.name for request in found) == ["x0", "x2"]  # the scale stays in the first cache
    for request in found:
        known = {v: {"i": 3, "j": 5}.get(v.name[0], 0) for index in request.indices for v in index.free_vars()}
        row, column = (evaluate(index, known) for index in request.indices)
        assert (row, column) == (3, (5 + 16) * 16) and request.cache == 2
    assert not requests_in(lambda emit, x: emit(ops.relu(x)), shapes[:1], ZEN)  # one stream gains nothing
    assert not requests_in(scaled_sum, shapes, INTEL)


@pytest.mark.parametrize("m", [1024, 37, "m"])
def test_sums_of_arrays_from_memory_are_right(m: int | str) -> None:
    given = build((("n", m), (m,), ("n", m)), scaled_sum)
    assert len(fused(given)) == 1
    for l3_bytes in (4096, 1 << 25):
        target = replace(Target.host(), l3_bytes=l3_bytes)
        exe = rl.compile(given, target)
        for n, size in ((0, 5), (1, 1), (3, 1000), (50, 1024)):
            size = size if m == "m" else m
            rng = np.random.default_rng(n)
            x, scale, y = (rng.standard_normal(s).astype(np.float32) for s in ((n, size), (size,), (n, size)))
            np.testing.assert_allclose(exe(x, scale, y), x * scale + y, rtol=1e-6, atol=1e-6)


def masked_softmax(emit: Any, x: Var, mask: Var) -> Var:
    return emit(ops.softmax(emit(ops.add(x, mask)), axis=-1))


@pytest.mark.parametrize("m", ["m", 1024, 1000, 96])
def test_the_second_loop_over_a_row_asks_for_the_next_row_where_the_target_gains_by_that(m: int | str) -> None:
    for make in (lambda emit, x: emit(ops.softmax(x, axis=-1)), lambda emit, x: emit(ops.layer_norm(x, axis=-1))):
        found = [request for request in requests_in(make, (("n", m),), INTEL) if request.buffer.name == "x"]
        assert found and {request.cache for request in found} == {1}
        for request in found:
            names = {v.name: v for v in request.indices[0].free_vars()}
            for size, ahead in ((1, 1), (4096, 1), (4097, 0)) if m == "m" else ((1024, 1),):
                known = {names["i"]: 7} | ({names["m"]: size} if m == "m" else {})
                assert evaluate(request.indices[0], known) == 7 + ahead
        assert requests_in(make, ((3, "n", m),), INTEL)
    assert not requests_in(make, (("n", m),), ZEN)  # of layer norm: memory is not waited for


def test_the_row_of_the_result_is_asked_for_where_a_later_loop_writes_it_to_the_caches() -> None:
    def of_result(make: Callable[..., Expr], target: Target, m: int) -> list[Prefetch]:
        return [request for request in requests_in(make, (("n", m),), target) if request.buffer.name != "x"]

    found = of_result(lambda emit, x: emit(ops.layer_norm(x, axis=-1)), INTEL, 1024)
    assert found and {request.cache for request in found} == {1}
    assert all(isinstance(request.indices[0], SymVar) for request in found)  # this row
    assert not of_result(lambda emit, x: emit(ops.softmax(x, axis=-1)), INTEL, 1024)  # its second loop writes it
    (made,) = fused(build(((4096, 1024),), lambda emit, x: emit(ops.layer_norm(x, axis=-1)))).values()
    past_caches = schedule_program(made, replace(INTEL, l3_bytes=4096))  # the result is larger than that
    assert "nontemporal(" in print_module(IRModule({"kernel": past_caches}))
    names = {s.buffer.name for s in walk_stmts(past_caches.body) if isinstance(s, Prefetch)}
    assert names == {"x"}


def test_what_does_not_move_along_the_rows_is_not_asked_for() -> None:
    found = requests_in(masked_softmax, (("n", 512), (512,)), INTEL)
    assert found and {request.buffer.name for request in found} == {"x0"}
    for shape in ((512,), ("n", 5000)):  # one row, and long ones
        assert not requests_in(lambda emit, x: emit(ops.softmax(x, axis=-1)), (shape,), INTEL)


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 16), ("float16", 32)])
def test_each_line_of_the_next_row_is_asked_for_once(dtype: str, apart: int) -> None:
    (made,) = fused(build((("n", 128),), lambda emit, x: emit(ops.softmax(x, axis=-1)), dtype)).values()
    found = [s for s in walk_stmts(schedule_program(made, INTEL).body) if isinstance(s, Prefetch)]
    asked = Counter(as_int(request.indices[1]) for request in found)
    assert set(asked) == set(range(0, 128, apart)) and len(set(asked.values())) == 1  # by each variant


@pytest.mark.parametrize("m", tiers.few([0, 16, 144, 1040, 48, 128, 192, 208, 1024, 5000], 4))
def test_rows_of_known_length_are_what_they_were(m: int) -> None:
    """... where the exponentials lie in registers, in the result's row or on the stack; of 16 bits and 32."""
    rng = np.random.default_rng(m)
    for dtype, tolerance in (("float32", 1e-6), ("float16", 2e-3)):
        exe = rl.compile(build((("n", m),), lambda emit, x: emit(ops.softmax(x, axis=-1)), dtype))
        for n in (0, 1, 3, 50):
            x = (4 * rng.standard_normal((n, m))).astype(dtype)
            e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True, initial=-100.0))
            np.testing.assert_allclose(exe(x), e / e.sum(-1, keepdims=True), rtol=10 * tolerance, atol=tolerance)
