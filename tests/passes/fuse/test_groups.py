"""Kernels of several outputs, concatenations and reshapes inside of kernels: which come about, and that they compute
the same as what they were made of at many sizes, zero and one included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Allocate, TensorProgram
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target
from tests.support.random_graphs import assert_same_results

SIZES = [(1, 1), (0, 5), (5, 0), (2, 3), (4, 16), (7, 17), (3, 64), (1, 130)]
Emit = Callable[..., Any]


def build(make: Callable[..., Expr | Sequence[Expr]], *shapes: Sequence[object]) -> IRModule:
    """main of tensors of these shapes, in which "n" and "m" are symbols; `make(emit, n, m, *tensors)` gives results."""
    bb = BlockBuilder()
    symbols = {name: bb.symbol(name) for name in ("n", "m")}
    types = {f"x{k}": TensorType.of(tuple(symbols.get(d, d) for d in s), "float32") for k, s in enumerate(shapes)}  # type: ignore[call-overload]
    with bb.function("main", **types) as params:
        found = make(lambda name, *args, **attrs: bb.emit(get_op(name)(*args, **attrs)), *symbols.values(), *params)
        bb.result(Tuple(tuple(found)) if isinstance(found, tuple) else found)
    return bb.module()


def scheduled(given: IRModule) -> list[TensorProgram]:
    steps = default_pipeline()
    last = next(k for k, step in enumerate(steps) if step.name == "schedule")
    return list(run_passes(given, steps[: last + 1], PassContext(Target.host())).programs().values())


def kernel_names(given: IRModule) -> list[str]:
    return [name for name in rl.compile(given).data.kernels if not name.startswith("main_shapes")]


def assert_runs_as(given: IRModule, kernels: int, *shapes: Sequence[object], tolerance: float = 1e-5) -> PassContext:
    """Compiled to so many kernels, it computes what the interpreter does at many sizes."""
    context = PassContext(Target.host())
    exe = rl.compile(given, context=context)
    calls = [d for d in context.decisions if d.step == "fuse_ops"]
    names = [name for name in exe.data.kernels if not name.startswith("main_shapes")]
    assert len(names) == kernels, (names, "\n".join(map(str, calls)))
    rng = np.random.default_rng(0)
    for n, m in SIZES:
        sizes = {"n": n, "m": m}
        args = [rng.standard_normal(tuple(sizes.get(d, d) for d in s)).astype("f4") for s in shapes]  # type: ignore[call-overload]
        got, expected = exe(*args), Interpreter(given).run("main", *args)
        assert_same_results(got, expected)
    return context


def test_a_rotary_embedding_is_one_kernel() -> None:
    """Halves of a row change places, one negated: slices, a concat and products, after a transpose to heads."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, cos: Expr, sin: Expr) -> Expr:
        x = emit("transpose", emit("reshape", x, (n, m, 3, 8)), axes=(0, 2, 1, 3))
        first, second = (emit("slice", x, (0, 0, 0, begin), (n, 3, m, 4)) for begin in (0, 4))
        turned = emit("concat", emit("neg", second), first, axis=3)
        return emit("add", emit("multiply", x, cos), emit("multiply", turned, sin))

    shapes = (("n", "m", 24), ("m", 8), ("m", 8))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_cache_is_extended_by_what_is_computed_in_place() -> None:
    """The second part of a concat is computed where it is stored; the concat is a result and read on."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, past: Expr, x: Expr) -> Sequence[Expr]:
        both = emit("concat", past, emit("transpose", emit("tanh", x), axes=(1, 0)), axis=1)
        return both, emit("sum", both, axes=(1,))

    shapes = (("n", "m"), (3, "n"))
    assert_runs_as(build(make, *shapes), 2, *shapes)


@pytest.mark.parametrize("axis", [0, 1])
def test_what_follows_a_concat_element_by_element_runs_part_by_part(axis: int) -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        both = emit("concat", emit("sqrt", emit("abs", x)), y, axis=axis)
        return emit("neg", emit("add", emit("tanh", both), emit("abs", both)))

    shapes = (("n", "m"), ("n", "m"))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_concat_of_concats_runs_in_three_parts() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        return emit("tanh", emit("concat", emit("concat", x, y, axis=1), emit("neg", x), axis=1))

    shapes = (("n", "m"), ("n", 5))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_concat_that_is_read_across_its_parts_is_stored() -> None:
    """A slice begins inside of the first part: no loop over one part alone."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        return emit("slice", emit("concat", x, y, axis=0), (1, 0), (n * 2 - 1, m))

    context = PassContext(Target.host())
    given = build(make, ("n", "m"), ("n", "m"))
    exe = rl.compile(given, context=context)
    assert len([name for name in exe.data.kernels if not name.startswith("main_shapes")]) == 2
    assert any("joined of parts" in d.reason for d in context.decisions if not d.taken)
    args = [np.ones((3, 2), "f4"), np.zeros((3, 2), "f4")]
    assert_same_results(exe(*args), Interpreter(given).run("main", *args))


def test_siblings_that_read_the_same_operand_are_one_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        angles = emit("multiply", x, np.float32(0.5))
        return emit("cos", angles), emit("sin", angles)

    context = assert_runs_as(build(make, ("n", "m")), 1, ("n", "m"))
    (why,) = (d for d in context.decisions if d.subject == "cos with sin")
    assert why.taken and str(why.figures["bytes saved"]) == "m*n*4"


def test_a_residual_sum_and_its_norm_are_one_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr, w: Expr) -> Sequence[Expr]:
        total = emit("add", emit("tanh", x), y)
        normed = emit("layer_norm", total, w, axis=-1)
        return total, emit("add", normed, total)

    shapes = (("n", "m"), ("n", "m"), ("m",))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_product_that_is_used_before_and_after_its_activation_is_one_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, w: Expr, b: Expr) -> Sequence[Expr]:
        before = emit("add", emit("matmul", x, w), b)
        return before, emit("gelu", before)

    shapes = (("n", 24), (24, 40), (40,))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_an_output_that_another_call_needs_in_between_is_refused() -> None:
    """b needs the running sum of a, which is no kernel's part: a and b cannot be one call."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        a = emit("tanh", x)
        running = emit("cumsum", a, axis=1)
        return a, emit("add", a, running)

    context = assert_runs_as(build(make, ("n", "m")), 3, ("n", "m"))
    assert any("needed in between" in d.reason for d in context.decisions if not d.taken)


def test_a_kernel_of_several_outputs_stands_before_what_uses_any_of_them() -> None:
    """b comes after a use of a that is no part of the kernel, and needs nothing of that: it moves up."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        a = emit("tanh", x)
        running = emit("cumsum", a, axis=1)
        return emit("neg", running), a, emit("relu", a)

    assert_runs_as(build(make, ("n", "m")), 3, ("n", "m"))


def test_a_reshape_inside_of_a_kernel_costs_no_division() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        wide = emit("expand_dims", emit("tanh", x), axes=(1,))
        return emit("subtract", y, wide)

    shapes = (("n", "m"), ("n", 1, "m"))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_reshape_whose_elements_take_a_division_is_no_part_of_a_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        flat = emit("reshape", emit("add", x, y), (n * m,))
        return emit("neg", flat)

    shapes = (("n", "m"), ("m",))
    context = assert_runs_as(build(make, *shapes), 2, *shapes)
    assert any("division" in d.reason for d in context.decisions if not d.taken)


def test_a_product_whose_bias_follows_a_reshape_is_one_kernel() -> None:
    """The elements in another shape: rows of 24 as (3, 8), and (n, m) as one dimension."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, w: Expr, b: Expr) -> Expr:
        heads = emit("reshape", emit("matmul", x, w), (n * m, 3, 8))
        return emit("gelu", emit("add", heads, b))

    shapes = (("n", "m", 5), (5, 24), (3, 8))
    given = build(make, *shapes)
    assert_runs_as(given, 1, *shapes)
    steps = [step for program in scheduled(given) for step in program.attrs.get("schedule") or ()]
    assert any("register_tile" in str(step) for step in steps), steps


@pytest.mark.parametrize("keeps", [True, False])
def test_a_convolution_whose_bias_follows_a_reshape_keeps_its_tile(keeps: bool) -> None:
    """A dimension of one is gone or stays: either way the loops over it must not hide that elements are independent."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, w: Expr, b: Expr) -> Expr:
        found = emit("conv", x, w, (0, 0, 0, 0))
        return emit("relu", emit("add", found if keeps else emit("squeeze", found, axes=(3,)), b))

    shapes = (("n", 16, 40, 1), (32, 16, 5, 1), (32, 36, 1) if keeps else (32, 36))
    given = build(make, *shapes)
    steps = [str(step) for program in scheduled(given) for step in program.attrs.get("schedule") or ()]
    assert not any("split_reduction" in step for step in steps), steps
    assert len(kernel_names(given)) <= 3, kernel_names(given)


def test_a_sum_whose_square_root_follows_expanded_dimensions_is_one_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        total = emit("sum", emit("abs", x), axes=(1,))
        wide = emit("expand_dims", total, axes=(1,))
        return emit("sqrt", wide)

    assert_runs_as(build(make, ("n", "m")), 1, ("n", "m"))


def test_a_softmax_in_another_shape_is_one_kernel_with_what_follows() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        wide = emit("expand_dims", emit("softmax", x, axis=-1), axes=(1,))
        return emit("multiply", wide, y)

    shapes = (("n", "m"), ("n", 1, "m"))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_transposed_product_is_stored_as_it_is_computed() -> None:
    """Column after column it would be stored element by element: the transpose stays a kernel of its own."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, w: Expr) -> Expr:
        return emit("transpose", emit("matmul", x, w), axes=(1, 0))

    shapes = (("n", 5), (5, 24))
    context = assert_runs_as(build(make, *shapes), 2, *shapes)
    assert any("side by side" in d.reason for d in context.decisions if not d.taken)


# Row programs of reductions and what is read along their rows


def test_deviations_from_a_mean_over_their_greatest_are_one_kernel() -> None:
    """Two reductions of a row, the second of what the first one gives, and a row that is read twice."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        shifted = emit("subtract", x, emit("mean", x, axes=(1,), keepdims=True))
        sines = emit("sin", shifted)
        most = emit("expand_dims", emit("sum", emit("abs", sines), axes=(1,)), axes=(1,))
        return emit("add", emit("divide", sines, emit("add", most, np.float32(1))), y)

    shapes = (("n", "m"), ("m",))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_norm_whose_sum_is_used_elsewhere_keeps_the_sum_apart() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        total = emit("sum", emit("abs", x), axes=(1,), keepdims=True)
        return emit("subtract", x, total), total

    assert_runs_as(build(make, ("n", "m")), 2, ("n", "m"))


def test_a_variance_by_squares_is_one_kernel_with_its_norm() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Expr:
        mean = emit("mean", x, axes=(2,))
        square = emit("mean", emit("multiply", x, x), axes=(2,))
        variance = emit("maximum", emit("subtract", square, emit("multiply", mean, mean)), np.float32(0))
        scale = emit("reciprocal", emit("sqrt", emit("add", variance, np.float32(0.5))))
        centred = emit("subtract", x, emit("reshape", mean, (n, 3, 1)))
        return emit("multiply", centred, emit("reshape", scale, (n, 3, 1)))

    assert_runs_as(build(make, ("n", 3, "m")), 1, ("n", 3, "m"))


def test_reductions_along_another_dimension_than_the_rows_stay_apart() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Expr:
        return emit("subtract", x, emit("sin", emit("sum", x, axes=(0,), keepdims=True)))

    assert_runs_as(build(make, ("n", "m")), 2, ("n", "m"))


def test_one_row_is_not_worth_a_kernel_without_threads() -> None:
    """With a single row of any length there is nothing to share among threads in a row program."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Expr:
        return emit("tanh", emit("subtract", x, emit("max", x, axes=(1,), keepdims=True)))

    context = assert_runs_as(build(make, (1, "m")), 2, (1, "m"))
    assert any("slower" in d.reason for d in context.decisions if not d.taken)


def test_a_softmax_and_what_is_summed_over_it_are_one_kernel() -> None:
    """A row program and a reduction that reads its rows, then both."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        weights = emit("softmax", x, axis=-1)
        total = emit("sum", emit("multiply", weights, weights), axes=(1,), keepdims=True)
        return emit("add", emit("subtract", weights, emit("sqrt", total)), y)

    shapes = (("n", "m"), ("n", "m"))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_two_norms_one_after_the_other_are_one_kernel() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, w: Expr) -> Expr:
        once = emit("layer_norm", x, w, axis=-1)
        return emit("softmax", emit("tanh", once), axis=-1)

    shapes = (("n", "m"), ("m",))
    assert_runs_as(build(make, *shapes), 1, *shapes)


def test_a_transpose_into_a_part_of_a_concat_goes_through_tiles() -> None:
    """A transposed part is stored in square tiles like a transpose of its own, not element by element."""

    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr, y: Expr) -> Expr:
        return emit("concat", y, emit("transpose", x, axes=(1, 0)), axis=1)

    shapes = (("n", "m"), ("m", 5))
    given = build(make, *shapes)
    assert_runs_as(given, 1, *shapes)
    (program,) = scheduled(given)
    tiles = {s.buffer.name for s in walk_stmts(program.body) if isinstance(s, Allocate)}
    assert any(name.endswith("_tile") for name in tiles), tiles


def test_siblings_of_a_transpose_leave_it_its_tiles() -> None:
    def make(emit: Emit, n: SymExpr, m: SymExpr, x: Expr) -> Sequence[Expr]:
        turned = emit("transpose", x, axes=(1, 0))
        return emit("cos", turned), emit("sin", turned)

    context = assert_runs_as(build(make, ("n", "m")), 2, ("n", "m"))
    assert any("across its rows" in d.reason for d in context.decisions if not d.taken)
