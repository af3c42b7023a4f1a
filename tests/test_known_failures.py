"""What has gone wrong in other compilers with symbolic shapes, each class as a model that is compiled and run at many
sizes against the interpreter, and the property of the IR that rules it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import RelaxliteError
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Body, Call, Constant, Function, GlobalVar, If, Let, MatchShape, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Select, TensorProgram
from relaxlite.ir.program_visitor import all_values, loads, stores, walk_stmts
from relaxlite.ir.types import TensorType, type_symbols
from relaxlite.ir.visitor import bodies, expr_symbols
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target
from tests.support.ir_text import module
from tests.support.random_graphs import assert_same_results

SIZES = [(1, 1), (0, 3), (3, 0), (2, 3), (5, 16), (7, 33), (16, 64), (33, 5)]


def lowered_to(given: IRModule, last: str) -> tuple[IRModule, PassContext]:
    """The module after the pass of this name, every pass verified."""
    context, steps = PassContext(Target.host(), verify=True), []
    for step in default_pipeline():
        steps.append(step)
        if step.name == last:
            return run_passes(given, steps, context), context
    raise AssertionError(f"no pass {last}")


def kernels(given: IRModule) -> list[str]:
    """The programs that "main" calls after fusion, those of nested bodies included."""
    made, _ = lowered_to(given, "drop_unused")
    function = made["main"]
    assert isinstance(function, Function)
    return [name for body in bodies(function) for name in called(body)]


def called(body: Body) -> Iterator[str]:
    for binding in body.bindings():
        value = binding.value if isinstance(binding, Let) else None
        if isinstance(value, Call) and isinstance(value.callee, GlobalVar):
            yield value.callee.name


def assert_runs(given: IRModule, make: Callable[[np.random.Generator, int, int], Sequence[Any]]) -> None:
    """Compiled once, it gives at every size what the interpreter gives."""
    exe, rng = rl.compile(given), np.random.default_rng(0)
    for n, m in SIZES:
        args = make(rng, n, m)
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype("f4")


# A symbol used before the MatchShape that defines it


MATCHED = """
n = symbol("n")
m = symbol("m")
k = symbol("k")
@function
def main(x: f32[n, m], y: f32[m]):
    a: f32[n, m] = tanh(x)
    p: f32[m] = exp(y)
    b: f32[k, m] = match_shape(a, (k, m))
    d: f32[k, m] = add(b, p)
    e: f32[k, 1] = sum(b, axes=(1,), keepdims=True)
    f: f32[k, m] = multiply(d, e)
    return (f, a)
"""


def assert_symbols_are_defined_first(given: IRModule) -> None:
    function = given["main"]
    assert isinstance(function, Function)
    defined = {s for p in function.params for s in type_symbols(p.ty)}
    for binding in function.body.bindings():
        if isinstance(binding, MatchShape):
            defined.update(s for d in binding.shape for s in d.free_vars())
        else:
            used = {*expr_symbols(binding.value), *type_symbols(binding.var.ty)}
            assert used <= defined, f"{binding.var.name} uses {[s.name for s in used - defined]}"


def test_symbol_used_before_match_shape_defines_it() -> None:
    given = module(MATCHED)
    for step in ("fuse_ops", "drop_unused", "lower_dps"):
        made, context = lowered_to(given, step)
        assert_symbols_are_defined_first(made)
    assert any(d.step == "resolve_matches" and d.taken for d in context.decisions)
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m), normal(rng, m)))


def test_a_match_shape_between_two_calls_does_not_keep_them_apart() -> None:
    given = module("""
n = symbol("n")
m = symbol("m")
k = symbol("k")
@function
def main(x: f32[n, m]):
    a: f32[n, m] = tanh(x)
    b: f32[k, m] = match_shape(a, (k, m))
    d: f32[k, m] = relu(b)
    e: f32[k] = sum(d, axes=(1,))
    return e
""")
    assert kernels(given) == ["fused_tanh_relu_sum"]
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m),))


def test_the_check_of_a_match_shape_that_fusion_passed_stays() -> None:
    """k is bound by the first match; the second one demands that y has as many rows."""
    given = module("""
n = symbol("n")
m = symbol("m")
k = symbol("k", upper=6)
@function
def main(x: f32[n, 4], y: f32[m, 4]):
    a: f32[n, 4] = tanh(x)
    b: f32[k, 4] = match_shape(a, (k, 4))
    d: f32[m, 4] = exp(y)
    e: f32[k, 4] = match_shape(d, (k, 4))
    f: f32[k, 4] = add(b, e)
    return f
""")
    exe = rl.compile(given)
    x = np.ones((3, 4), "f4")
    assert_same_results(exe(x, x), Interpreter(given).run("main", x, x))
    for rows, others in ((3, 2), (7, 7)):  # another size; more than the bound
        with pytest.raises(RelaxliteError):
            exe(np.ones((rows, 4), "f4"), np.ones((others, 4), "f4"))


def test_sizes_from_data_that_a_match_shape_binds_stay_behind_it() -> None:
    given = module("""
n = symbol("n")
count = symbol("count")
@function
def main(x: f32[n]):
    r: f32[n] = relu(x)
    s: f32[n] = tanh(x)
    found: Tensor(rank=2, dtype="int64") = non_zero(r)
    places: i64[1, count] = match_shape(found, (1, count))
    flat: i64[count] = reshape(places, shape(count))
    picked: f32[count] = gather(s, flat, axis=0)
    out: f32[count] = exp(picked)
    return out
""")
    assert_symbols_are_defined_first(lowered_to(given, "drop_unused")[0])
    assert_runs(given, lambda rng, n, m: (normal(rng, n),))


# Storage


def test_storage_reused_across_an_alias() -> None:
    """A reshape is the memory of what it reshapes: that must not be given to others while the view is read."""
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m]):
    a: f32[n, m] = cumsum(x, axis=1)
    view: f32[n*m] = reshape(a, shape(n*m))
    b: f32[n, m] = cumsum(x, axis=0)
    d: f32[n, m] = cumsum(b, axis=1)
    e: f32[n*m] = cumsum(view, axis=0)
    f: f32[n*m] = reshape(d, shape(n*m))
    g: f32[n*m] = add(e, f)
    return (g, view)
""")
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m),))


def test_storage_reused_across_an_alias_of_a_kernel_of_several_outputs() -> None:
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m]):
    s: f32[n, m] = sin(x)
    c: f32[n, m] = cos(x)
    view: f32[n*m] = reshape(s, shape(n*m))
    a: f32[n, m] = cumsum(c, axis=1)
    b: f32[n, m] = cumsum(a, axis=0)
    e: f32[n*m] = cumsum(view, axis=0)
    f: f32[n*m] = reshape(b, shape(n*m))
    g: f32[n*m] = add(e, f)
    return g
""")
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m),))


def test_storage_not_dominating_an_else_branch() -> None:
    """Values of both branches, values that only one of them needs, and values from before the If that outlive it."""
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m], y: f32[n, m], flag: bool[]):
    a: f32[n, m] = tanh(x)
    b: f32[n, m] = exp(y)
    both: f32[n, m] = cumsum(a, axis=1)
    r: f32[n, m]
    if flag:
        d: f32[n, m] = cumsum(a, axis=0)
        e: f32[n, m] = add(d, both)
        r = e
    else:
        f: f32[n, m] = neg(b)
        g: f32[n, m] = cumsum(f, axis=1)
        h: f32[n, m] = multiply(g, both)
        r = h
    s: f32[n, m] = cumsum(r, axis=0)
    t: f32[n, m] = add(s, both)
    return t
""")
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m), normal(rng, n, m), np.array(rng.random() < 0.5)))
    exe = rl.compile(given)
    for flag in (True, False):
        args = (np.ones((3, 4), "f4"), np.full((3, 4), 0.5, "f4"), np.array(flag))
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))


def test_what_one_branch_uses_is_computed_there() -> None:
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m], y: f32[n, m], flag: bool[]):
    a: f32[n, m] = tanh(x)
    b: f32[n, m] = exp(a)
    d: f32[n, m] = sin(y)
    r: f32[n, m]
    if flag:
        e: f32[n, m] = neg(b)
        r = e
    else:
        f: f32[n, m] = relu(d)
        r = f
    return r
""")
    made, context = lowered_to(given, "drop_unused")
    function = made["main"]
    assert isinstance(function, Function)
    assert not list(called(function.body))
    (branch,) = (b.value for b in function.body.bindings() if isinstance(b, Let) and isinstance(b.value, If))
    assert list(called(branch.then_body)) == ["fused_tanh_exp_neg"]
    assert list(called(branch.else_body)) == ["fused_sin_relu"]
    assert sum(d.step == "sink_into_branches" for d in context.decisions) == 3
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m), normal(rng, n, m), np.array(n % 2 == 1)))


def test_a_call_that_may_fail_stays_before_the_branch() -> None:
    """The index is out of range whichever branch is taken."""
    given = module(
        """
n = symbol("n")
@function
def main(x: f32[n], places: i64[2], flag: bool[]):
    a: f32[2] = gather(x, places, axis=0)
    r: f32[2]
    if flag:
        b: f32[2] = neg(a)
        r = b
    else:
        d: f32[2] = slice(x, shape(0), shape(2))
        r = d
    return r
""".replace("broadcast_to(zero, shape(2))", "slice(x, shape(0), shape(2))")
    )
    exe = rl.compile(given)
    x = np.arange(3, dtype="f4")
    for flag in (True, False):
        with pytest.raises(RelaxliteError):
            exe(x, np.array([0, 3]), np.array(flag))
        args = (x, np.array([2, 1]), np.array(flag))
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))


# Work


def evaluations(program: TensorProgram, op: str) -> set[str]:
    """The dtypes of the operands of an operation in a program; empty: it does not compute that."""
    return {v.dtype for v in all_values(program.body) if getattr(v, "op", None) == op}


def test_expensive_producer_recomputed_by_a_broadcast_consumer() -> None:
    """exp of a row of m is computed m times, not n * m times: it stays a kernel of its own."""
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m], y: f32[m]):
    a: f32[m] = exp(y)
    b: f32[n, m] = add(x, a)
    d: f32[n, m] = relu(b)
    return d
""")
    made, context = lowered_to(given, "drop_unused")
    holders = [p for p in made.programs().values() if evaluations(p, "exp")]
    assert len(holders) == 1 and len(stores(holders[0].body).__next__().indices) == 1
    (why,) = (d for d in context.decisions if d.subject == "a into b")
    assert not why.taken and str(why.figures["flops added"]) == "-m*16 + m*n*16"
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m), normal(rng, m)))


def test_expensive_producer_recomputed_where_a_bound_keeps_the_rows_few() -> None:
    """With at most one row nothing is computed again, and the bound says so."""
    given = module("""
n = symbol("n", upper=1)
m = symbol("m")
@function
def main(x: f32[n, m], y: f32[m]):
    a: f32[m] = exp(y)
    b: f32[n, m] = add(x, a)
    return b
""")
    assert kernels(given) == ["fused_exp_add"]


def test_runtime_reshape_target() -> None:
    """The target of the reshape is data: the shape is read, checked and bound, and calls on both sides stay right."""
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    x, target = Var("x", TensorType.of((n, m), "float32")), Var("target", TensorType.of((2,), "int64"))
    with bb.function_with_params("main", (x, target)):
        a = bb.emit(get_op("tanh")(x))
        shape = bb.emit(get_op("tensor_to_shape")(target))
        rows, columns = bb.symbol("rows"), bb.symbol("columns")
        known = bb.match_shape(shape, (rows, columns))
        b = bb.emit(get_op("reshape")(a, known))
        d = bb.emit(get_op("exp")(b))
        bb.result(Tuple((d, bb.emit(get_op("sum")(d, axes=(1,))))))
    given = bb.module()
    exe = rl.compile(given)
    rng = np.random.default_rng(0)
    for size, wanted in [((6, 4), (3, 8)), ((6, 4), (24, 1)), ((5, 0), (0, 7)), ((1, 1), (1, 1)), ((9, 7), (7, 9))]:
        args = (normal(rng, *size), np.array(wanted))
        assert_same_results(exe(*args), Interpreter(given).run("main", *args))
    with pytest.raises(RelaxliteError, match="elements"):
        exe(normal(rng, 2, 3), np.array([4, 2]))


def test_product_symbol_from_weight_pre_computation() -> None:
    """Weights that are folded or packed at compile time beside a dimension n*m: no symbol stands for the product, so
    sizes with equal products stay apart and n*m = 0 works."""
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    x = Var("x", TensorType.of((n, m, 6), "float32"))
    rng = np.random.default_rng(0)
    weight, more = Constant.of(normal(rng, 6, 40)), Constant.of(normal(rng, 6, 40))
    with bb.function_with_params("main", (x,)):
        both = bb.emit(get_op("multiply")(bb.emit(get_op("add")(weight, more)), np.float32(0.5)))
        flat = bb.emit(get_op("reshape")(x, (n * m, 6)))
        product = bb.emit(get_op("gelu")(bb.emit(get_op("matmul")(flat, both))))
        back = bb.emit(get_op("reshape")(product, (m, n * 40)))
        bb.result(Tuple((bb.emit(get_op("tanh")(back)), product)))
    given = bb.module()
    made, _ = lowered_to(given, "drop_unused")
    names = {s.name for program in made.programs().values() for s in program.symbols}
    assert names <= {"n", "m"}
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m, 6),))


def test_no_element_is_read_that_a_select_guards() -> None:
    """Property: what fusion inlines under a condition is still read under it (loads outside of a buffer else)."""
    given = module("""
n = symbol("n")
m = symbol("m")
@function
def main(x: f32[n, m]):
    a: f32[n, m] = exp(x)
    b: f32[n + 3, m + 2] = pad(a, shape(1, 2), shape(2, 0))
    d: f32[n + 3, m + 2] = neg(b)
    return d
""")
    made, _ = lowered_to(given, "drop_unused")
    (program,) = made.programs().values()
    guarded = [v for v in all_values(program.body) if isinstance(v, Select)]
    assert guarded and len(list(loads(program.body))) == 1 and len(list(walk_stmts(program.body))) == 3
    assert_runs(given, lambda rng, n, m: (normal(rng, n, m),))
