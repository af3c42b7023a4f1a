"""Products of one operand as one kernel: which are joined or paired, which are not and why; the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, GlobalVar, If, Let, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Buffer, For, IfThenElse, Stmt, compute
from relaxlite.ir.program_visitor import stores, walk_stmts
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.join_parallel import join_parallel_loops, read_only_by_writers
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.winograd_products import MIN_DEPTH
from relaxlite.target import Target
from tests.support import tiers

Body = Callable[["Layer", Expr], Expr]
SIZES = [(0, 3), (1, 1), (1, 6), (2, 7), (3, 67)]
AVX2 = Target.parse("llvm -mcpu=x86-64-v3")


class Layer:
    """A function main(x: f32[b, n, depth], y: f32[b, n, depth]) in the making."""

    def __init__(self, depth: int, seed: int = 0) -> None:
        self.bb, self.depth, self.rng = BlockBuilder(), depth, np.random.default_rng(seed)
        self.b, self.n = self.bb.symbol("b"), self.bb.symbol("n")
        self.weights: dict[int, Constant] = {}

    def module(self, body: Body) -> IRModule:
        ty = TensorType.of((self.b, self.n, self.depth), "float32")
        with self.bb.function("main", x=ty, y=ty) as (x, self.y):
            self.bb.result(body(self, x))
        return self.bb.module()

    def op(self, name: str, *args: Any, **attrs: Any) -> Var:
        return self.bb.emit(get_op(name)(*args, **attrs))

    def vector(self, width: int) -> np.ndarray:
        return self.rng.standard_normal(width).astype(np.float32)

    def linear(self, x: Expr, width: int, *, shared: bool = False) -> Var:
        """x @ w; `shared`: with the weights that every other such product of this width has."""
        w = Constant.of((self.rng.standard_normal((self.depth, width)) * self.depth**-0.5).astype(np.float32))
        return self.op("matmul", x, self.weights.setdefault(width, w) if shared else w)

    def narrow(self, x: Expr, width: int, dtype: str) -> Var:
        """x @ w with weights in half precision."""
        w = Constant.of(self.rng.standard_normal((self.depth, width)) * self.depth**-0.5, dtype)
        return self.op("matmul", x, self.op("cast", w, dtype="float32"))

    def dense(self, x: Expr, width: int) -> Var:
        return self.op("add", self.linear(x, width), self.vector(width))

    def heads(self, x: Expr, count: int, width: int) -> Var:
        return self.op("transpose", self.op("reshape", x, (self.b, self.n, count, width)), axes=(0, 2, 1, 3))


def attention_inputs(layer: Layer, x: Expr) -> Expr:
    """Of different widths, with biases and without, in layouts of their own; one of them scaled."""
    q, k, v = layer.dense(x, 40), layer.dense(x, 16), layer.linear(x, 16)
    q = layer.op("multiply", q, np.float32(0.25))
    return Tuple((layer.heads(q, 5, 8), layer.heads(k, 2, 8), v))


def gated(layer: Layer, x: Expr) -> Expr:
    return layer.op("multiply", layer.op("silu", layer.linear(x, 70)), layer.linear(x, 70))


def gated_with_biases(layer: Layer, x: Expr) -> Expr:
    up, gate = layer.dense(x, 33), layer.dense(x, 33)
    return layer.op("multiply", up, layer.op("gelu", gate))


def lowered(module: IRModule, target: Target = AVX2, precision: str = "float32") -> tuple[IRModule, PassContext]:
    """The module before scheduling."""
    context = PassContext(target, precision=precision, verify=True)
    names = [step.name for step in default_pipeline()]
    return run_passes(module, default_pipeline()[: names.index("winograd")], context), context


def calls(module: IRModule) -> list[str]:
    found = [b.value for f in module.functions().values() for b in f.body.bindings() if isinstance(b, Let)]
    return [v.callee.name for v in found if isinstance(v, Call) and isinstance(v.callee, GlobalVar)]


def run_at_all_sizes(module: IRModule, depth: int, tolerance: float = 1e-4, **options: Any) -> None:
    exe = rl.compile(module, context=PassContext(Target.host(), verify=True), **options)
    for size in SIZES:
        assert_right(exe, module, (*size, depth), tolerance)


def assert_right(exe: rl.Executable, module: IRModule, shape: tuple[int, ...], tolerance: float) -> None:
    x, y = np.random.default_rng(shape[1]).standard_normal((2, *shape)).astype(np.float32)
    got, want = exe(x, y), Interpreter(module).run("main", x, y)
    expected = want if isinstance(want, tuple) else (want,)
    for a, b in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_products_of_one_operand_become_one_call() -> None:
    made, context = lowered(Layer(24).module(attention_inputs))
    (name,) = [name for name in calls(made) if "matmul" in name]
    assert made.programs()[name].num_outputs == 3
    (decision,) = [d for d in context.decisions if d.step == "join_calls" and d.taken and "matmul" in d.subject]
    assert str(decision.figures["kernels saved"]) == "2"


@pytest.mark.each_value
@pytest.mark.parametrize("depth", [1, 24, 65])
@pytest.mark.parametrize("body", [attention_inputs, gated, gated_with_biases])
def test_right_at_every_size(body: Body, depth: int) -> None:
    run_at_all_sizes(Layer(depth).module(body), depth)


@pytest.mark.parametrize("body", [gated, gated_with_biases])
def test_a_gated_layer_is_one_call(body: Body) -> None:
    made, context = lowered(Layer(24).module(body))
    assert len(calls(made)) == 1
    (decision,) = [d for d in context.decisions if d.step == "pair_products"]
    assert decision.taken and "bytes not moved" in decision.figures


def test_long_sums_are_paired_in_parts() -> None:
    """More terms than one register may sum up."""
    run_at_all_sizes(Layer(4100).module(gated), 4100, 1e-3)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_every_vector_width_has_tiles_for_pairs(level: int) -> None:
    """The interpreter runs what would be compiled."""
    given = Layer(12).module(gated_with_biases)
    steps = default_pipeline()
    names = [step.name for step in steps]
    context = PassContext(
        Target.parse(f"llvm -mcpu=x86-64-v{level}" if level > 1 else "llvm -mcpu=x86-64"), verify=True
    )
    made = run_passes(given, steps[: names.index("pack_constants") + 1], context)
    for b, n in SIZES[:4]:
        x, y = np.random.default_rng(n).standard_normal((2, b, n, 12)).astype(np.float32)
        want = Interpreter(given).run("main", x, y)
        np.testing.assert_allclose(Interpreter(made).run("main", x, y), want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not Target.host().has("avx512bf16"), reason="this processor has no bfloat16 dot products")
@pytest.mark.parametrize("body", [attention_inputs, gated_with_biases])
def test_bfloat16_goes_along(body: Body) -> None:
    module = Layer(64).module(body)
    made, _ = lowered(module, Target.host(), "bf16")
    assert len([name for name in calls(made) if "matmul" in name]) == 1
    run_at_all_sizes(module, 64, 0.05, precision="bf16")


def half_precision(layer: Layer, x: Expr) -> Expr:
    """Projections and a gated layer with weights of both kinds."""
    parts = [layer.narrow(x, width, "bfloat16") for width in (130, 64, 64)]
    gate, up = layer.narrow(layer.y, 90, "bfloat16"), layer.narrow(layer.y, 90, "float16")
    return Tuple((*parts, layer.op("multiply", layer.op("silu", gate), up)))


@pytest.mark.each_value
@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3", "znver4 -mattr=-sse4a"])
@pytest.mark.parametrize("depth", [20, 300])
def test_weights_in_half_precision_are_joined_and_paired_too(cpu: str, depth: int) -> None:
    """On processors that widen them again for each tile, and on those that widen them once."""
    target, module = Target.parse(f"llvm -mcpu={cpu} -l2-bytes=1024"), Layer(depth).module(half_precision)
    made, _ = lowered(module, target)
    are_apart = target.cpu_facts.adds_beside_fmas and depth > MIN_DEPTH  # which is faster then (pair_products.py)
    assert sorted(name for name in calls(made) if "matmul" in name) == sorted(calls(made))
    assert len(calls(made)) == 2 + are_apart
    if not target.runs_here:
        pytest.skip(f"this processor has not what {cpu} has")
    exe = rl.compile(module, target)
    for size in [*SIZES, (4, 64)]:
        assert_right(exe, module, (*size, depth), 1e-4)


def test_products_with_a_variant_for_few_rows_are_joined_in_both_variants() -> None:
    target = Target.parse("llvm -mcpu=x86-64-v4 -l2-bytes=1024")
    made = run_passes(Layer(20).module(half_precision), default_pipeline(), PassContext(target))
    (program,) = [p for name, p in made.programs().items() if name.startswith("joined_3")]
    parallel = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.kind == "parallel"]
    assert isinstance(program.body, IfThenElse) and [loop.var.name for loop in parallel] == ["part", "part"]


def test_weights_that_another_product_uses_too() -> None:
    def body(layer: Layer, x: Expr) -> Expr:
        first, second = layer.linear(x, 48, shared=True), layer.linear(x, 20)
        return Tuple((first, second, layer.linear(layer.y, 48, shared=True)))

    run_at_all_sizes(Layer(16).module(body), 16)


def test_a_product_of_another_result_stays_apart_and_says_why() -> None:
    """k needs q here: its bias is a sum over q."""

    def body(layer: Layer, x: Expr) -> Expr:
        q = layer.linear(x, 24)
        k = layer.op("add", layer.linear(x, 24), layer.op("sum", q, axes=(2,), keepdims=True))
        return Tuple((q, k))

    module = Layer(16).module(body)
    made, context = lowered(module)
    assert len([name for name in calls(made) if "matmul" in name]) == 2
    assert any("it needs a value made in between, or is needed there" in note for note in context.notes)
    run_at_all_sizes(module, 16)


def test_products_that_many_others_stand_between_are_not_held_at_once() -> None:
    """Keys and values of each layer, all of one memory."""

    def body(layer: Layer, x: Expr) -> Expr:
        for _ in range(3):
            x = layer.op("attention", x, layer.linear(layer.y, 16), layer.linear(layer.y, 16))
            for _ in range(4):
                x = layer.op("tanh", layer.linear(x, 16))
        return x

    made, context = lowered(Layer(16).module(body))
    assert [made.programs()[name].num_outputs for name in calls(made) if "joined" in name] == [2, 2, 2]
    assert any("reductions in between" in note for note in context.notes)


@pytest.mark.parametrize(
    ("cpu", "precision", "joined"),
    [("znver4", "bf16", [2]), ("znver4", "float32", [3]), ("x86-64-v3", "float32", [3])],
)
def test_products_that_words_take_are_not_joined_to_what_they_do_not(
    cpu: str, precision: str, joined: list[int]
) -> None:
    """As to a mixture's gate of one column: together neither would be computed in words."""

    def body(layer: Layer, x: Expr) -> Expr:
        return Tuple((layer.linear(x, 80), layer.linear(x, 1), layer.linear(x, 96)))

    made, _ = lowered(Layer(128).module(body), Target.parse(f"llvm -mcpu={cpu}"), precision)
    assert [made.programs()[name].num_outputs for name in calls(made) if "joined" in name] == joined


def test_narrow_products_are_joined_where_all_together_are_wide_enough_for_another_way() -> None:
    """Keys and values beside queries."""

    def body(layer: Layer, x: Expr) -> Expr:
        return Tuple((layer.linear(x, 128), layer.linear(x, 16), layer.linear(x, 16)))

    target = Target.parse("llvm -mcpu=znver4")
    made, _ = lowered(Layer(128).module(body), target)
    assert [made.programs()[name].num_outputs for name in calls(made)] == [3]
    context = PassContext(target)
    run_passes(made, default_pipeline(), context)
    assert any(d.step == "inner_products" and d.taken for d in context.decisions)


def test_products_of_different_operands_stay_apart() -> None:
    made, _ = lowered(Layer(16).module(lambda layer, x: Tuple((layer.linear(x, 24), layer.linear(layer.y, 24)))))
    assert len(calls(made)) == 2


def test_gates_that_are_used_elsewhere_too_are_stored() -> None:
    def body(layer: Layer, x: Expr) -> Expr:
        gate, up = layer.op("silu", layer.linear(x, 40)), layer.linear(x, 40)
        return Tuple((layer.op("multiply", gate, up), gate, up))

    module = Layer(16).module(body)
    _, context = lowered(module)
    assert not any(d.taken for d in context.decisions if d.step == "pair_products")
    run_at_all_sizes(module, 16)


def test_a_gate_of_another_operand_is_no_pair_and_says_why() -> None:
    def body(layer: Layer, x: Expr) -> Expr:
        return layer.op("multiply", layer.op("silu", layer.linear(x, 40)), layer.linear(layer.y, 40))

    _, context = lowered(Layer(16).module(body))
    assert any("their sums share no operand" in note for note in context.notes)


def test_products_in_branches_are_joined_there() -> None:
    def body(layer: Layer, x: Expr) -> Expr:
        cond = layer.op("greater", layer.op("sum", x, axes=None, keepdims=False), np.float32(0))
        bodies = []
        for width in (24, 40):
            with layer.bb.body() as scope:
                parts = layer.linear(x, width), layer.dense(x, width)
                both = layer.op("concat", *parts, axis=2)
                layer.bb.result(layer.op("sum", both, axes=(2,), keepdims=True))
            bodies.append(layer.bb.finish(scope))
        return layer.bb.emit(If(cond, bodies[0], bodies[1], bodies[0].result.ty))

    module = Layer(16).module(body)
    made, _ = lowered(module)
    joined = [p for p in made.programs().values() if p.num_outputs == 2]
    assert len(joined) == 2
    run_at_all_sizes(module, 16, 1e-3)


@st.composite
def layers(draw: Any) -> tuple[IRModule, int]:
    """Products of x and y with epilogues that read each other's results."""
    depth = draw(st.sampled_from([1, 3, 16, 33]))
    layer = Layer(depth, draw(st.integers(0, 3)))

    def body(layer: Layer, x: Expr) -> Expr:
        made: list[Expr] = []
        for _ in range(draw(st.integers(2, 5))):
            width = draw(st.sampled_from([1, 8, 17, 64]))
            y = layer.linear(draw(st.sampled_from([x, x, layer.y])), width, shared=draw(st.booleans()))
            kind = draw(st.sampled_from(["none", "bias", "silu", "turn", "gate", "gate", "sum"]))
            same = [z for z in made if z.ty == y.ty]
            if kind == "bias":
                y = layer.op("add", y, layer.vector(width))
            elif kind == "silu":
                y = layer.op("silu", y)
            elif kind == "turn":
                y = layer.op("transpose", y, axes=draw(st.permutations(range(3))))
            elif kind == "gate" and same:
                y = layer.op("multiply", layer.op("tanh", y), draw(st.sampled_from(same)))
            elif kind == "sum" and made:
                y = layer.op("add", y, layer.op("sum", draw(st.sampled_from(made)), axes=None, keepdims=False))
            made.append(y)
        return Tuple(tuple(made[-draw(st.integers(1, len(made))) :]))

    return layer.module(body), depth


@settings(max_examples=tiers.examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(layers(), st.sampled_from(SIZES))
def test_random_layers(given_layer: tuple[IRModule, int], size: tuple[int, int]) -> None:
    module, depth = given_layer
    exe = rl.compile(module, context=PassContext(Target.host(), verify=True))
    assert_right(exe, module, (*size, depth), 1e-3)


def copies(count: int, sources: int) -> tuple[list[Stmt], list[Buffer], list[Buffer]]:
    """out_k[i, j] = x_k[i, j], the operands taken in turn."""
    n = SymVar("n")
    xs = [Buffer.of(f"x{k}", (n, 4), "float32") for k in range(sources)]
    outs = [Buffer.of(f"out{k}", (n, 4), "float32") for k in range(count)]
    stages = [compute(out, lambda *i, k=k: xs[k % sources][i]) for k, out in enumerate(outs)]
    return [replace(s, kind="parallel") for s in stages if isinstance(s, For)], xs, outs


def test_independent_parallel_loops_become_one() -> None:
    stages, _, outs = copies(3, 1)
    (joined,) = join_parallel_loops(stages)
    assert isinstance(joined, For) and joined.kind == "parallel"
    assert {store.buffer for store in stores(joined)} == set(outs)


def test_a_loop_that_reads_what_another_writes_stays_behind_it() -> None:
    stages, _, outs = copies(2, 1)
    after = compute(Buffer.of("last", outs[0].shape, "float32"), lambda *i: outs[0][i])
    assert isinstance(after, For)
    assert len(join_parallel_loops([*stages, replace(after, kind="parallel")])) == 2
    assert len(join_parallel_loops([stages[0], after])) == 2, "a serial loop is not joined"


def test_memory_is_taken_over_only_where_no_joined_stage_still_reads_it() -> None:
    stages, xs, outs = copies(2, 1)
    assert not read_only_by_writers(stages, xs[0], outs[1])
    stages, xs, outs = copies(2, 2)
    assert read_only_by_writers(stages, xs[1], outs[1])


def test_joined_copies_larger_than_the_cache_are_stored_past_it() -> None:
    """Where one of them has that variant, it is asked for first; the interpreter runs what would be compiled."""

    def body(layer: Layer, x: Expr) -> Expr:
        turned = [layer.op("rotary", z, layer.vector(16), layer.vector(16)) for z in (x, layer.y)]
        return Tuple((layer.op("attention", *turned, x), *turned))

    given = Layer(16).module(body)
    context = PassContext(replace(Target.parse("llvm -mcpu=x86-64-v4"), l3_bytes=1024), verify=True)
    steps = default_pipeline()
    names = [step.name for step in steps]
    made = run_passes(given, steps[: names.index("schedule") + 1], context)
    (program,) = [p for p in made.programs().values() if p.num_outputs == 2]
    assert any(isinstance(s, For) and s.var.name == "part" for s in walk_stmts(program.body))
    assert any(store.nontemporal for store in stores(program.body))
    for b, n in [(0, 2), (1, 1), (1, 7), (2, 40)]:
        x, y = np.random.default_rng(n).standard_normal((2, b, n, 16)).astype(np.float32)
        for got, want in zip(Interpreter(made).run("main", x, y), Interpreter(given).run("main", x, y), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
