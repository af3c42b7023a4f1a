"""Explicit memory and run-time shapes: destination-passing style, the arena plan, and slots in place of symbols."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite import config
from relaxlite.codegen import interpreter
from relaxlite.codegen.host_plan import plan_host
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError, InputError, PassError, RelaxliteError, ShapeMismatchError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, ExternFunction, Function, GlobalVar, Let, ShapeValue, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, sym
from relaxlite.ir.types import TensorType, TupleType
from relaxlite.ir.verifier import verify
from relaxlite.ir.visitor import bodies
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.memory.lower_dps import lower_dps
from relaxlite.passes.memory.lower_shapes import lower_shapes
from relaxlite.passes.memory.plan import MemoryPlan, PlannedTensor
from relaxlite.passes.memory.plan_memory import ALIGNMENT
from relaxlite.passes.memory.plan_memory import plan_memory as plan_memory_pass
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import assert_becomes, assert_stays, module
from tests.support.random_graphs import arguments, assert_same_results, graphs


def plan_memory(given: IRModule) -> IRModule:
    return plan_memory_pass(given, PassContext(Target.parse("llvm")))


def memory_plan(given: IRModule) -> MemoryPlan:
    """The record of what was planned for main."""
    context = PassContext(Target.parse("llvm"))
    plan_memory_pass(given, context)
    return context.memory_plans["main"]


COPY = """
k = symbol("k")
@program(symbols=(k,), outputs=1)
def copy(x: f32[k], out: f32[k]):
    for i in serial(k):
        out[i] = x[i]
"""
TWO = """
k = symbol("k")
@program(symbols=(k,), outputs=2)
def two(x: f32[k], out: f32[k], more: i64[2]):
    for i in serial(k):
        out[i] = x[i]
    more[0] = index(k)
    more[1] = index(k)
"""


def main(statements: str, result: str, params: str = "x: f32[n], y: f32[m], c: bool[]") -> str:
    body = "\n".join(f"    {line}" for line in statements.strip().split("\n") if line.strip())
    return f'n = symbol("n")\nm = symbol("m")\n@function\ndef main({params}):\n{body}\n    return {result}\n'


def allocated(statements: str, result: str, params: str = "x: f32[n], y: f32[m], c: bool[]") -> IRModule:
    """Ops as calls with explicit outputs."""
    given = module(main(statements, result, params))
    verify(given)
    made = lower_dps(legalize(decompose(given)))
    verify(made, "dps")
    return made


# lower_dps


def test_every_call_is_given_its_output() -> None:
    assert_becomes(
        lower_dps,
        main("a: f32[n] = call(copy, x, sym=(n,))\nb: f32[n] = call(copy, a, sym=(n,))", "b") + COPY,
        main(
            """
a: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
call(copy, x, a, sym=(n,))
b: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
call(copy, a, b, sym=(n,))
""",
            "b",
        )
        + COPY,
        stage="lowered",
        result_stage="dps",
    )


def test_several_outputs_are_allocated_one_by_one() -> None:
    assert_becomes(
        lower_dps,
        main("t: Tuple(f32[n], i64[2]) = call(two, x, sym=(n,))\na: i64[2] = t[1]", "(a, a)") + TWO,
        main(
            """
t0: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")
t1: i64[2] = memory.alloc_tensor(shape(2), dtype="int64")
call(two, x, t0, t1, sym=(n,))
t: Tuple(f32[n], i64[2]) = (t0, t1)
""",
            "(t1, t1)",
        )
        + TWO,
        stage="lowered",
        result_stage="dps",
    )


def test_a_branch_and_a_loop_allocate_for_themselves() -> None:
    inside = "{}a: f32[n] = memory.alloc_tensor(shape(n), dtype='float32')\n    call(copy, x, {}a, sym=(n,))"
    assert_becomes(
        lower_dps,
        main(
            """
r: f32[n]
if c:
    a: f32[n] = call(copy, x, sym=(n,))
    r = a
else:
    r = x
@loop(c, r)
def last(v: f32[n]) -> Tuple(f32[n]):
    la: f32[n] = call(copy, x, sym=(n,))
    return (c, la)
""",
            "last",
        )
        + COPY,
        main(
            f"""
r: f32[n]
if c:
    {inside.format("", "")}
    r = a
else:
    r = x
@loop(c, r)
def last(v: f32[n]) -> Tuple(f32[n]):
    {inside.format("l", "l")}
    return (c, la)
""",
            "last",
        )
        + COPY,
        stage="lowered",
        result_stage="dps",
    )


def test_a_library_routine_is_given_its_output_too() -> None:
    bb = BlockBuilder()
    n = bb.symbol("n")
    ty = TensorType.of((n,), "float32")
    square = bb.define("square", ExternFunction("lib_square", (ty, ty)))
    with bb.function("main", x=ty) as (x,):
        bb.result(bb.emit(ops.neg(bb.emit(Call(square, (x,), ty=ty)))))
    made = lower_dps(legalize(bb.module()))
    verify(made, "dps")
    run = Interpreter(made, {"lib_square": lambda a, out: np.multiply(a, a, out=out)}).run
    assert run("main", np.array([3], "f4")).tolist() == [-9]


def test_calls_that_fill_their_operands_and_calls_of_functions_stay() -> None:
    assert_stays(
        lower_dps,
        main('a: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")\ncall(copy, x, a, sym=(n,))', "a") + COPY,
        stage="dps",
    )
    helper = 'j = symbol("j")\n@function\ndef helper(v: f32[j]):\n    return v\n\n'
    assert_stays(lower_dps, helper + main("a: f32[n] = call(helper, x)", "a"), stage="lowered")


def test_a_result_of_unknown_shape_cannot_be_allocated() -> None:
    bb = BlockBuilder()
    copy = bb.define("copy", module(COPY)["copy"])
    n = bb.symbol("n")
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        bb.result(bb.emit(Call(copy, (x,), sym_args=(n,), ty=TensorType(None, "float32", 1)), "y"))
    with pytest.raises(PassError, match="y: a result of unknown shape cannot be allocated"):
        lower_dps(bb.module())


# plan_memory: who shares


def places(given: IRModule) -> dict[str, str]:
    """The offset in the arena of every tensor of the plan, "own" for one that has memory of its own."""
    made = plan_memory(given)
    verify(made, "dps")
    found = {}
    function = made["main"]
    assert isinstance(function, Function)
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else None
            if not isinstance(value, Call) or not isinstance(value.callee, Op):
                continue
            if value.callee.name == "memory.view":
                offset = value.args[1]
                assert isinstance(offset, ShapeValue)
                found[binding.var.name] = str(offset.values[0])
            elif value.callee.name == "memory.alloc_tensor":
                found[binding.var.name] = "own"
    return found


def shares(statements: str, result: str, first: str, second: str, params: str = "") -> bool:
    """Whether the plan gives two tensors the same place."""
    found = places(allocated(statements, result, params or "x: f32[n], y: f32[m], c: bool[]"))
    assert {first, second} <= set(found), found
    return found[first] != "own" and found[first] == found[second]


def test_dead_memory_is_used_again_and_results_have_their_own() -> None:
    chain = "\n".join(f"{b}: f32[n] = cumsum({a}, axis=0)" for a, b in zip("xabde", "abdef", strict=True))
    found = places(allocated(chain, "f"))
    assert found["a"] == found["d"] == "0"
    assert found["b"] == found["e"] != "0"
    assert found["f"] == "own"


def test_an_operand_outlives_the_call_that_reads_it() -> None:
    """In place is not planned: the output of a call never shares with its inputs."""
    assert not shares("a: f32[n] = cumsum(x, axis=0)\nb: f32[n] = cumsum(a, axis=0)\nd: f32[n] = exp(b)", "d", "a", "b")


ARENAS = {
    "the same size": ("f32[n]", "f32[n]", "((n + 15) // 16)*64"),
    "another dtype of the same size": ("i64[n]", "f32[2*n]", "((n + 7) // 8)*64"),
    "half the size": ("f32[2*n]", "f32[n]", "((n + 7) // 8)*64"),
    "twice the size": ("f32[n]", "f32[2*n]", "((n + 7) // 8)*64"),
    "a wider dtype": ("f32[n]", "i64[n]", "((n + 7) // 8)*64"),
    "one element more": ("f32[n]", "f32[n + 1]", "(n // 16)*64 + 64"),
    "another symbol": ("f32[n]", "f32[m]", "max(((m + 15) // 16)*64, ((n + 15) // 16)*64)"),
    "a constant": ("f32[80]", "f32[40]", "320"),
    "a symbol that a constant bounds": ("f32[16]", "f32[few]", "64"),
    "a constant and a symbol of at least that": ("f32[many]", "f32[4]", "((many + 15) // 16)*64"),
    "a product that may be 0": ("f32[n*m]", "f32[n]", "max(((m*n + 15) // 16)*64, ((n + 15) // 16)*64)"),
    "a product with a size of at least one": ("f32[n*many]", "f32[n]", "((many*n + 15) // 16)*64"),
}


@pytest.mark.parametrize("name", ARENAS)
def test_tensors_that_never_live_at_once_share_whatever_their_sizes(name: str) -> None:
    """The arena is the larger of the two, and where it is proven which one that is, only that one is computed."""
    before, after, arena = ARENAS[name]
    statements = f"""
a: {before} = {filled(before)}
a1: {before[:3]}[] = sum(a)
b: {after} = {filled(after)}
b1: {after[:3]}[] = sum(b)
"""
    text = main(statements, "(a1, b1)", "x: f32[n], y: f32[m], z: f32[few], w: f32[many]")
    text = 'few = symbol("few", upper=16)\nmany = symbol("many", lower=4)\n' + text
    made = lower_dps(legalize(module(text)))
    found = places(made)
    assert found["b"] == found["a"] == "0"
    assert str(memory_plan(made).arena) == arena


def filled(ty: str) -> str:
    """A call that makes a tensor of a type as f32[n]."""
    zero = "const(0.0, 'float32')" if ty.startswith("f32") else "const(0, 'int64')"
    return f"full(shape({ty[4:-1]}), {zero})"


def test_an_offset_is_the_largest_end_of_those_below() -> None:
    """d lies on a or on b, which follow each other; d itself outlives both."""
    made = allocated(
        """
d: f32[3*n] = full(shape(3*n), const(1.0, "float32"))
a: f32[n] = full(shape(n), const(1.0, "float32"))
s: f32[] = sum(a)
b: f32[m] = full(shape(m), const(1.0, "float32"))
t: f32[] = sum(b)
u: f32[] = sum(d)
""",
        "(s, t, u)",
    )
    plan = memory_plan(made)
    symbols = {s.name: s for s in plan.arena.free_vars()}
    for n, m in ((1, 1), (100, 1), (1, 1000), (0, 5), (33, 0)):
        at = {symbols["n"]: n, symbols["m"]: m}
        rooms = [-(-4 * size // 64) * 64 for size in (3 * n, max(n, m))]
        assert plan.arena_bytes(at) == sum(rooms)


ALIASES = {
    "a reshape": "v: f32[n, 1] = reshape(a, shape(n, 1))\nb: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(v)",
    "a match_shape": "v: f32[m] = match_shape(a, (m,))\nb: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(v)",
    "a tuple": "v: Tuple(f32[n], f32[n]) = (x, a)\nb: f32[n] = cumsum(x, axis=0)\nw: f32[n] = v[1]\ns: f32[] = sum(w)",
    "a reshape of a tuple's field": (
        "v: Tuple(f32[n]) = (a,)\nw: f32[n] = v[0]\nu: f32[1, n] = reshape(w, shape(1, n))\n"
        "b: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(u)"
    ),
    "what a branch gives": (
        "v: f32[n]\nif c:\n    v = x\nelse:\n    v = a\nb: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(v)"
    ),
    "a view that a branch makes": (
        "v: f32[n]\nif c:\n    w: f32[n] = reshape(a, shape(n))\n    v = w\nelse:\n    v = x\n"
        "b: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(v)"
    ),
    "what a branch uses": (
        "b: f32[n] = cumsum(x, axis=0)\ns: f32[]\nif c:\n    s = const(0.0, 'float32')\n"
        "else:\n    u: f32[] = sum(a)\n    s = u"
    ),
    "what a loop starts with": (
        "@loop(c, a)\ndef v(p: f32[n]) -> Tuple(f32[n]):\n    return (c, p)\n"
        "b: f32[n] = cumsum(x, axis=0)\nw: f32[n] = v[0]\ns: f32[] = sum(w)"
    ),
    "what a loop's body gives": (
        "@loop(c, x)\ndef v(p: f32[n]) -> Tuple(f32[n]):\n    return (c, a)\n"
        "b: f32[n] = cumsum(x, axis=0)\nw: f32[n] = v[0]\ns: f32[] = sum(w)"
    ),
    "what a loop's body uses": (
        "b: f32[n] = cumsum(x, axis=0)\n@loop(c, x)\ndef v(p: f32[n]) -> Tuple(f32[n]):\n"
        "    q: f32[n] = cumsum(a, axis=0)\n    return (c, q)\nw: f32[n] = v[0]\ns: f32[] = sum(w)"
    ),
    "what a function gives back": ("v: f32[n] = call(helper, a)\nb: f32[n] = cumsum(x, axis=0)\ns: f32[] = sum(v)"),
}
HELPER = 'j = symbol("j")\n@function\ndef helper(v: f32[j]):\n    return v\n\n'


@pytest.mark.parametrize("name", ALIASES)
def test_memory_lives_as_long_as_what_may_alias_it(name: str) -> None:
    rest = "t: f32[] = neg(s)\nd: f32[n] = cumsum(b, axis=0)\ne: f32[n] = exp(d)"
    statements = f"a: f32[n] = cumsum(x, axis=0)\n{ALIASES[name]}\n{rest}"
    text = (HELPER if "helper" in statements else "") + main(statements, "(t, e)")
    found = places(lower_dps(legalize(module(text))))
    assert found["a"] != found["b"], found  # a lives on: b is elsewhere
    assert found["d"] == found["a"], found  # and is dead at last


ESCAPES = {
    "the result": ("a: f32[n] = cumsum(x, axis=0)", "a"),
    "one of several": ("a: f32[n] = cumsum(x, axis=0)", "(x, a)"),
    "a view of it": ("a: f32[n] = cumsum(x, axis=0)\nv: f32[n, 1] = reshape(a, shape(n, 1))", "v"),
    "a tuple with it": ("a: f32[n] = cumsum(x, axis=0)\nt: Tuple(f32[n]) = (a,)", "t"),
    "what a branch gives": (
        "a: f32[n] = cumsum(x, axis=0)\nv: f32[n]\nif c:\n    v = x\nelse:\n    v = a",
        "v",
    ),
    "what a loop gives": (
        "a: f32[n] = cumsum(x, axis=0)\n@loop(c, a)\ndef v(p: f32[n]) -> Tuple(f32[n]):\n    return (c, p)",
        "v",
    ),
    "a matched shape": ("a: f32[n] = cumsum(x, axis=0)\nv: f32[m] = match_shape(a, (m,))", "v"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_what_leaves_the_function_has_memory_of_its_own(name: str) -> None:
    statements, result = ESCAPES[name]
    other = "\nz: f32[n] = cumsum(x, axis=0)\nz1: f32[n] = cumsum(z, axis=0)\nz2: f32[] = sum(z1)"
    result = result.removesuffix(")").removeprefix("(")
    found = places(allocated(statements + other, f"({result}, z2)"))
    assert found["a"] == "own" and found["z"] != "own"


DATA = """
z: f32[n] = cumsum(x, axis=0)
z1: f32[] = sum(z)
s: Shape(rank=1) = tensor_to_shape(count)
k = symbol("k")
t: Shape((k,)) = match_shape(s, (k,))
a: f32[k] = full(shape(k), const(1.0, "float32"))
r: f32[k]
if c:
    b: f32[k] = cumsum(a, axis=0)
    d: f32[k] = cumsum(b, axis=0)
    r = d
else:
    r = a
e: f32[] = sum(r)
"""
DATA_PARAMS = "x: f32[n], count: i64[1], c: bool[]"


def test_sizes_that_data_tells_have_an_arena_where_they_are_known() -> None:
    made = plan_memory(allocated(DATA, "(z1, e)", DATA_PARAMS))
    text = str(made)
    assert text.count("alloc_arena") == 2 and text.index('symbol("k")') < text.rindex("alloc_arena")
    assert text.index("match_shape(s,") < text.rindex("alloc_arena") < text.index("full")
    found = places(allocated(DATA, "(z1, e)", DATA_PARAMS))
    assert found["z"] == "0" and "own" not in (found["a"], found["b"]) and len({found[x] for x in "abd"}) == 3
    context = PassContext(Target.parse("llvm"))
    plan_memory_pass(allocated(DATA, "(z1, e)", DATA_PARAMS), context)
    assert [*context.memory_plans] == ["main", "main behind t"]
    assert [t.name for t in context.memory_plans["main behind t"].tensors] == ["a", "b", "d"]
    assert context.memory_plans["main"].outside == ("a", "b", "d")


@pytest.mark.parametrize("interpret", [False, True])
def test_an_arena_of_a_size_that_data_tells_runs(interpret: bool) -> None:
    made = module(main(DATA, "(z1, e)", DATA_PARAMS))
    with config.override(interpret=interpret):
        exe = rl.compile(made)
    assert interpret or not exe.data.host.reason.startswith("it allocates")
    for n, k in ((3, 5), (0, 0), (1, 3000), (2000, 1)):
        for flag in (True, False):
            args = np.ones(n, "f4"), np.array([k]), np.array(flag)
            np.testing.assert_allclose(exe(*args), Interpreter(made).run("main", *args), rtol=1e-5)


def test_an_arena_of_a_size_that_data_tells_is_free_after_its_last_use() -> None:
    """The host function gives it back behind the sum; the arena that the caller provides is not its own to give."""
    function = rl.compile(module(main(DATA, "(z1, e)", DATA_PARAMS))).data.functions["main"]
    callees = [getattr(instruction, "callee", "") for instruction in function.instructions]
    first, second = (at for at, callee in enumerate(callees) if callee == "builtin:alloc_arena")
    released = {site: at for at, sites in plan_host(function, 2).releases.items() for site in sites}
    assert first not in released
    assert released[second] == max(at for at, callee in enumerate(callees) if callee.startswith("kernel:"))


def test_a_size_that_data_tells_within_a_bound_lies_in_the_arena_of_the_call() -> None:
    bounded = DATA.replace('symbol("k")', 'symbol("k", upper=100)')
    context = PassContext(Target.parse("llvm"))
    plan_memory_pass(allocated(bounded, "(z1, e)", DATA_PARAMS), context)
    (plan,) = context.memory_plans.values()
    assert [t.name for t in plan.tensors] == ["z", "a", "b", "d"] and plan.outside == ()
    exe = rl.compile(module(main(bounded, "(z1, e)", DATA_PARAMS)))
    for n, k in ((3, 5), (0, 0), (1, 100), (2000, 99)):
        args = np.ones(n, "f4"), np.array([k]), np.array(True)
        np.testing.assert_allclose(exe(*args)[1], k * (k + 1) * (k + 2) / 6, rtol=1e-4)
    with pytest.raises(ShapeMismatchError, match=r"k.* 101.*100"):
        exe(np.ones(3, "f4"), np.array([101]), np.array(True))


def test_hundreds_of_sizes_that_data_tells_do_not_nest() -> None:
    """They were a maximum of maxima, too deep to go through."""
    bb = BlockBuilder()
    count = 300
    with bb.function("main", counts=TensorType.of((count,), "int64")) as (counts,):
        sizes = [bb.symbol(f"k{k}", upper=50) for k in range(count)]
        bb.match_shape(bb.emit(ops.tensor_to_shape(counts)), sizes)
        total = bb.emit(ops.full((1,), np.float32(0)))
        for size in sizes:
            rising = bb.emit(ops.cumsum(bb.emit(ops.full((size,), np.float32(1))), axis=0))
            total = bb.emit(ops.add(total, bb.emit(ops.sum(rising, keepdims=True))))
        bb.result(total)
    exe = rl.compile(bb.module())
    given = np.arange(count) % 51
    np.testing.assert_allclose(exe(given), [(given * (given + 1) / 2).sum()], rtol=1e-5)


def test_one_tensor_of_a_size_that_data_tells_needs_no_arena() -> None:
    text = """
s: Shape(rank=1) = tensor_to_shape(count)
k = symbol("k")
t: Shape((k,)) = match_shape(s, (k,))
a: f32[k] = full(shape(k), const(1.0, "float32"))
d: f32[] = sum(a)
"""
    assert places(allocated(text, "d", DATA_PARAMS)) == {"a": "own", "d": "own"}


BRANCHES = """
r: f32[n]
if c:
    a: f32[n] = cumsum(x, axis=0)
    b: f32[n] = cumsum(a, axis=0)
    r = b
else:
    d: f32[n] = exp(x)
    e: f32[n] = cumsum(d, axis=0)
    r = e
s: f32[] = sum(r)
"""


def test_branches_share_space_and_what_they_give_back() -> None:
    plan = memory_plan(allocated(BRANCHES, "s"))
    found = {tensor.name: tensor for tensor in plan.tensors}
    assert found["b"].offset is found["e"].offset and found["e"].inside == "b"
    assert found["a"].offset is found["d"].offset is not found["b"].offset
    (n,) = plan.arena.free_vars()
    assert plan.arena_bytes({n: 16}) == 2 * 64 == plan.lower_bound({n: 16})


def test_what_one_branch_makes_is_not_alive_in_the_other() -> None:
    """b lives on behind the If, but while the other branch runs there is no b."""
    text = BRANCHES.replace("r = e", "e1: f32[] = sum(e)\n    r = x")
    plan = memory_plan(allocated(text, "s"))
    found = {tensor.name: tensor for tensor in plan.tensors}
    assert len(found["b"].pauses) == 1 and not set(found["b"].steps()) & set(found["d"].steps())
    (n,) = plan.arena.free_vars()
    assert plan.lower_bound({n: 160}) == 2 * 640
    assert plan.arena_bytes({n: 160}) in (2 * 640, 2 * 640 + 64)


def test_a_loop_uses_its_space_again_and_spares_what_it_carries() -> None:
    text = """
a: f32[n] = cumsum(x, axis=0)
@loop(c, a)
def w(p: f32[n]) -> Tuple(f32[n]):
    b: f32[n] = cumsum(p, axis=0)
    d: f32[n] = cumsum(b, axis=0)
    e: f32[n] = cumsum(d, axis=0)
    return (c, e)
v: f32[n] = w[0]
z: f32[n] = cumsum(v, axis=0)
s: f32[] = sum(z)
"""
    found = places(allocated(text, "s"))
    assert found["e"] == "own"  # carried
    assert len({found["a"], found["b"], found["d"]}) == 3  # a is what the loop starts with


def test_what_keeps_memory_of_its_own_is_explained() -> None:
    context = PassContext(Target.parse("llvm"))
    text = """
s: Shape(rank=1) = tensor_to_shape(count)
k = symbol("k")
t: Shape((k,)) = match_shape(s, (k,))
a: f32[k] = full(shape(k), const(1.0, "float32"))
@loop(c, x)
def w(p: f32[n]) -> Tuple(f32[n]):
    b: f32[n] = cumsum(p, axis=0)
    return (c, b)
v: f32[n] = w[0]
d: f32[] = sum(a)
e: f32[] = sum(v)
"""
    plan_memory_pass(allocated(text, "(d, e)", "x: f32[n], count: i64[1], c: bool[]"), context)
    own = "it keeps memory of its own"
    assert context.notes == [
        f"plan_memory: main: b: no, a loop carries it on: {own} (size n*4)",
        f"plan_memory: main: a: no, only 't' tells its size: {own} (size k*4)",
    ]


def test_a_matched_symbol_is_the_size_that_it_was_matched_with() -> None:
    text = "v: f32[k] = match_shape(x, (k,))\na: f32[k] = cumsum(v, axis=0)\ns: f32[] = sum(a)"
    found = places(allocated('k = symbol("k")\n' + text, "s"))
    assert found["a"] == "0"


def test_constant_plans_take_the_upper_bounds() -> None:
    """n <= 100: rooms of 448 bytes; m <= 7: one of 64, which needs no place beside those."""
    text = BRANCHES + "y1: f32[m] = exp(y)\ny2: f32[] = sum(y1)\nt: f32[] = add(s, y2)"
    given = allocated(text, "t")
    bounds = {'symbol("n")': 'symbol("n", upper=100)', 'symbol("m")': 'symbol("m", upper=7)'}
    bounded = str(given)
    for old, new in bounds.items():
        bounded = bounded.replace(old, new)
    context = PassContext(Target.parse("llvm"), constant_memory=True)
    made = plan_memory_pass(module(bounded), context)
    verify(made, "dps")
    plan = context.memory_plans["main"]
    assert plan.arena == plan.max_bytes == 2 * 448
    assert all(tensor.offset.is_const for tensor in plan.tensors) and not context.notes
    args = np.arange(3, dtype="f4"), np.zeros(2, "f4"), np.array(False)
    np.testing.assert_allclose(Interpreter(made).run("main", *args), Interpreter(given).run("main", *args))
    context = PassContext(Target.parse("llvm"), constant_memory=True)
    plan_memory_pass(given, context)
    assert context.notes[0] == "plan_memory: main: n*4 bytes: no, no constant plan: give n an upper bound"


@pytest.mark.parametrize(
    ("statements", "result"),
    [
        ("a: f32[n] = cumsum(x, axis=0)", "a"),  # nothing dies inside
        ("v: f32[n, 1] = reshape(x, shape(n, 1))", "v"),
        ("a: f32[0] = full(shape(0), const(1.0, 'float32'))\nb: f32[0] = cumsum(a, axis=0)", "b"),  # no bytes
    ],
)
def test_no_arena_without_need(statements: str, result: str) -> None:
    given = allocated(statements, result)
    assert plan_memory(given) is given


def test_the_plan_is_kept_with_its_lower_bound() -> None:
    """a and b live at once; d takes the place of a."""
    text = "a: f32[n] = cumsum(x, axis=0)\nb: f32[n] = cumsum(a, axis=0)\nd: f32[n] = cumsum(b, axis=0)"
    plan = memory_plan(allocated(text + "\ne: f32[n] = cumsum(d, axis=0)", "e"))
    (n,) = plan.tensors[0].nbytes.free_vars()
    assert [t.name for t in plan.tensors] == ["a", "b", "d"]
    assert plan.arena_bytes({n: 100}) == 2 * 448 and plan.lower_bound({n: 100}) == 2 * 400
    assert plan.tensors[0].offset is plan.tensors[2].offset is not plan.tensors[1].offset
    assert all(t.last < len(plan.steps) for t in plan.tensors)


def test_planning_twice_changes_nothing_more() -> None:
    once = plan_memory(allocated("a: f32[n] = cumsum(x, axis=0)\nb: f32[n] = cumsum(a, axis=0)", "b"))
    assert plan_memory(once) is once


def test_sizes_with_divisions_by_symbols_are_compared() -> None:
    """A trial value that makes a divisor 0 tells nothing."""
    statements = """
a: f32[n//(m - 1)] = slice(x, shape(0), shape(n//(m - 1)))
a1: f32[n//(m - 1)] = cumsum(a, axis=0)
a2: f32[] = sum(a1)
b: f32[n//(m + 1)] = slice(x, shape(0), shape(n//(m + 1)))
b1: f32[n//(m + 1)] = cumsum(b, axis=0)
b2: f32[] = sum(b1)
"""
    assert places(allocated(statements, "(a2, b2)"))["a"] == "0"


def test_a_constant_plan_holds_up_to_the_bound_and_refuses_what_is_beyond() -> None:
    text = str(module(main(BRANCHES, "s"))).replace('symbol("n")', 'symbol("n", upper=33)')
    exe = rl.compile(module(text), constant_memory=True)
    plan = exe.data.metadata.memory_plan
    assert plan["arena_bytes"] == str(plan["at_most"]) and 192 <= plan["at_most"] <= 2 * 192
    for n in (0, 1, 32, 33):
        for flag in (True, False):
            args = np.arange(n, dtype="f4") / 64, np.zeros(2, "f4"), np.array(flag)
            np.testing.assert_allclose(exe(*args), Interpreter(module(text)).run("main", *args), rtol=1e-5)
    with pytest.raises(InputError, match="n = 34 exceeds its upper bound 33"):
        exe(np.zeros(34, "f4"), np.zeros(2, "f4"), np.array(True))


@settings(max_examples=tiers.examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=12, control=True), st.booleans())
def test_compiled_code_runs_in_the_arena(given: IRModule, flag: bool) -> None:
    """Branches and loops too, at sizes of 0 and 1 and such that change which tensor is the largest."""
    exe, run = rl.compile(given), Interpreter(given).run
    for n, m in ((4, 3), (1, 1), (0, 3), (2, 40)):
        args: Any = arguments(n, m, flag=flag)
        assert_same_results(exe(*args), run("main", *args))


def test_storage_reused_across_an_alias() -> None:
    """A view keeps what it views alive: the memory of a is not free while r, another name of it, will be read."""
    text = """
a: f32[n] = cumsum(x, axis=0)
r: f32[n, 1] = reshape(a, shape(n, 1))
b: f32[n] = cumsum(x, axis=0)
d: f32[n] = cumsum(b, axis=0)
e: f32[n] = cumsum(d, axis=0)
q: f32[n] = reshape(r, shape(n))
f: f32[2*n] = concat(e, q, axis=0)
"""
    given = module(main(text, "f"))
    exe = rl.compile(given)
    for n in (0, 1, 7, 64, 129):
        args = np.linspace(0, 1, n, dtype="f4"), np.zeros(2, "f4"), np.array(True)
        np.testing.assert_allclose(exe(*args), Interpreter(given).run("main", *args), rtol=1e-5)


def test_storage_not_dominating_an_else_branch() -> None:
    """Both branches use the arena, nested too, and what either of them makes is read behind it."""
    text = """
r: f32[n]
if c:
    a: f32[n] = cumsum(x, axis=0)
    b: f32[n] = cumsum(a, axis=0)
    r = b
else:
    r2: f32[n]
    if c:
        r2 = x
    else:
        d: f32[n] = cumsum(x, axis=0)
        e: f32[n] = cumsum(d, axis=0)
        f: f32[n] = cumsum(e, axis=0)
        r2 = f
    g: f32[n] = cumsum(r2, axis=0)
    r = g
h: f32[n] = cumsum(r, axis=0)
i: f32[n] = cumsum(h, axis=0)
"""
    given = module(main(text, "i"))
    exe = rl.compile(given)
    assert "own" not in {place for name, place in places(allocated(text, "i")).items() if name != "i"}
    for n in (0, 1, 7, 64):
        for flag in (False, True):
            args = np.linspace(0, 1, n, dtype="f4"), np.zeros(2, "f4"), np.array(flag)
            np.testing.assert_allclose(exe(*args), Interpreter(given).run("main", *args), rtol=1e-5)


# plan_memory: what it computes


def offsets_and_sizes(given: IRModule, values: dict[str, int]) -> tuple[int, list[tuple[int, int]]]:
    """The arena's size and the views in it, in bytes, at these values of the symbols."""
    function = given["main"]
    assert isinstance(function, Function)
    symbols: dict[SymVar, int] = {}
    for param in function.params:
        for dim in param.ty.shape or ():  # type: ignore[union-attr]
            symbols.update({v: values[v.name] for v in dim.free_vars()})
    total, views = 0, []
    for binding in function.body.bindings():
        if not isinstance(binding, Let):
            assert isinstance(binding.source, ShapeValue)  # names of sizes
            pairs = zip(binding.shape, binding.source.values, strict=True)
            symbols.update({s: evaluate(e, symbols) for s, e in pairs if isinstance(s, SymVar)})
            continue
        value = binding.value
        name = value.callee.name if isinstance(value, Call) else ""
        if name == "memory.alloc_arena":
            total = first_value(value.args[0], symbols)  # type: ignore[union-attr]
        elif name == "memory.view":
            shape = value.args[2]  # type: ignore[union-attr]
            assert isinstance(shape, ShapeValue)
            size = 4 * int(np.prod([evaluate(d, symbols) for d in shape.values]))
            views.append((first_value(value.args[1], symbols), size))  # type: ignore[union-attr]
    return total, views


def first_value(shape: Any, symbols: dict[SymVar, int]) -> int:
    values: tuple[SymExpr, ...] = shape.values
    return evaluate(values[0], symbols)


def test_offsets_are_aligned_and_inside_the_arena() -> None:
    text = """
a: f32[n + 1] = full(shape(n + 1), const(1.0, "float32"))
b: f32[n*m + 3*n] = full(shape(n*m + 3*n), const(1.0, "float32"))
d: f32[m] = cumsum(y, axis=0)
s: f32[] = sum(a)
t: f32[] = sum(b)
u: f32[] = sum(d)
v: f32[] = add(s, t)
w: f32[] = add(v, u)
"""
    planned = plan_memory(allocated(text, "w"))
    for n in (0, 1, 7, 15, 16, 33):
        for m in (0, 1, 100):
            total, views = offsets_and_sizes(planned, {"n": n, "m": m})
            assert len(views) == 7
            assert all(offset % ALIGNMENT == 0 and offset + size <= total for offset, size in views)


@pytest.fixture
def poisoned_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view overwrites what lies there the moment it is made: if anything was still alive, results change."""
    view = interpreter._MEMORY["memory.view"]

    def poisoned(*args: Any, **attrs: Any) -> Any:
        made = view(*args, **attrs)
        made.reshape(-1).view(np.uint8).fill(0xFF)
        return made

    monkeypatch.setitem(interpreter._MEMORY, "memory.view", poisoned)


@settings(max_examples=tiers.examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=12, control=True), st.sampled_from([(1, 1), (4, 3), (2, 9), (0, 3), (5, 0)]), st.booleans())
def test_replaying_the_plan_finds_nothing_overwritten(
    poisoned_views: None, given: IRModule, sizes: tuple[int, int], flag: bool
) -> None:
    args: Any = arguments(*sizes, flag=flag)
    planned = plan_memory(lower_dps(legalize(decompose(given))))
    verify(planned, "dps")
    assert_same_results(Interpreter(planned).run("main", *args), Interpreter(given).run("main", *args))


def test_the_replay_would_find_a_plan_that_is_wrong(poisoned_views: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one place: the checker above sees it."""
    given = allocated("a: f32[n] = cumsum(x, axis=0)\nb: f32[n] = cumsum(a, axis=0)\nd: f32[n] = add(a, b)", "d")
    broken = module(str(plan_memory(given)).replace("shape(((n + 15) // 16)*64), shape(n)", "shape(0), shape(n)"))
    got = Interpreter(broken).run("main", np.ones(3, "f4"), np.ones(1, "f4"), np.array(True))
    assert not np.array_equal(got, [2, 5, 9])


# lower_shapes


def lowered(text: str) -> IRModule:
    made = lower_shapes(plan_memory(lower_dps(legalize(decompose(module(text))))))
    verify(made, "vm")
    return made


def specs(made: IRModule, name: str = "main") -> list[tuple[str, tuple[Any, ...]]]:
    """(what, spec) of every match_shape, in order, those of nested bodies after their function's."""
    function = made[name]
    assert isinstance(function, Function)
    values = [b.value for body in bodies(function) for b in body.bindings() if isinstance(b, Let)]
    return [
        (str(v.attrs["what"]), v.attrs["spec"])  # type: ignore[misc]
        for v in values
        if isinstance(v, Call) and isinstance(v.callee, Op) and v.callee.name == "vm.match_shape"
    ]


def test_symbols_become_slots() -> None:
    given = """
        n = symbol("n", upper=9)
        @function
        def main(x: f32[n, 4], y: f32[n]):
            a: f32[n*4] = memory.alloc_tensor(shape(n*4), dtype="float32")
            call(copy, x, a, sym=(n*4, n))
            return a

        k = symbol("k")
        j = symbol("j", upper=9)
        @program(symbols=(k, j), outputs=1)
        def copy(x: f32[j, 4], out: f32[k]):
            for i in serial(j):
                out[i] = x[i, 0]
        """
    expected = """
        n = symbol("n", upper=9)
        @function
        def main(x: f32[n, 4], y: f32[n]):
            heap: i64[4] = vm.alloc_heap(slots=4)
            vm.match_shape(x, heap, spec=(("bind", 0, "n", 0, 9, 1), ("const", 4)), what="argument 'x'")
            vm.match_shape(y, heap, spec=(("check", 0, "n"),), what="argument 'y'")
            call(main_shapes_0, heap)
            a: f32[n*4] = vm.alloc_tensor(heap, dims=(-2,), dtype="float32")
            call(copy, x, a, first_slot=2)
            return a

        k = symbol("k")
        j = symbol("j", upper=9)
        @program(symbols=(k, j), outputs=1)
        def copy(x: f32[j, 4], out: f32[k]):
            for i in serial(j):
                out[i] = x[i, 0]

        @program(symbols=(), outputs=1, checked=True, scheduled=True)
        def main_shapes_0(heap: i64[4]):
            with let_index(heap[0], upper=9) as n:
                heap[1] = index(n*4)
                heap[2] = index(n*4)
                heap[3] = index(n)
        """
    assert_becomes(lower_shapes, given, expected, stage="dps", result_stage="vm")


def test_a_compound_dimension_is_checked_once_its_symbols_are_bound() -> None:
    made = lowered(main("a: f32[n*2] = cumsum(x, axis=0)", "a", "x: f32[n*2], y: f32[n, n, m + n], z: f32[m]"))
    assert specs(made) == [
        ("argument 'x'", (("any",),)),
        ("argument 'y'", (("bind", 1, "n", 0, None, 1), ("check", 1, "n"), ("any",))),
        ("argument 'z'", (("bind", 3, "m", 0, None, 1),)),
        ("argument 'x'", (("check", 0, "n*2"),)),
        ("argument 'y'", (("any",), ("any",), ("check", 2, "m + n"))),
    ]


def test_a_match_shape_binds_what_is_new_and_checks_the_rest() -> None:
    made = lowered(
        main(
            "k = symbol('k', lower=2)\na: f32[k, n] = match_shape(z, (k, n), loc='Loop_7')",
            "a",
            "x: f32[n], z: f32[m, m]",
        )
    )
    assert specs(made)[2:] == [("Loop_7", (("bind", 2, "k", 2, None, 1), ("check", 0, "n")))]


def test_the_fields_of_a_tuple_bind_their_symbols() -> None:
    made = lowered(
        """
        j = symbol("j")
        @function
        def helper(p: Tuple(f32[j], Tuple(f32[j*2], bool[]))):
            a: f32[j] = p[0]
            b: f32[j, 1] = reshape(a, shape(j, 1))
            return b

        n = symbol("n")
        @function
        def main(x: f32[n], y: f32[n*2], c: bool[]):
            t: Tuple(f32[n*2], bool[]) = (y, c)
            u: Tuple(f32[n], Tuple(f32[n*2], bool[])) = (x, t)
            a: f32[n, 1] = call(helper, u)
            return a
        """
    )
    assert specs(made, "helper") == [
        ("argument 'p', field 0", (("bind", 0, "j", 0, None, 1),)),
        ("argument 'p', field 1, field 0", (("any",),)),
        ("argument 'p', field 1, field 1", ()),
        ("argument 'p', field 1, field 0", (("check", 1, "j*2"),)),
    ]


def test_each_branch_binds_its_own_symbols() -> None:
    text = main(
        """
r: f32[]
if c:
    k0 = symbol("k0")
    a0: f32[k0] = match_shape(z, (k0,))
    b0: f32[] = sum(a0)
    r = b0
else:
    k1 = symbol("k1")
    a1: f32[k1] = match_shape(z, (k1,))
    b1: f32[] = sum(a1)
    r = b1
""",
        "r",
        "c: bool[], z: Tensor(rank=1, dtype='float32')",
    )
    found = specs(lowered(text))
    assert [spec for what, spec in found if "MatchShape" in what] == [
        (("bind", 0, "k0", 0, None, 1),),
        (("bind", 2, "k1", 0, None, 1),),
    ]
    exe = rl.compile(module(text))
    for flag, size in ((True, 3), (False, 5)):
        assert exe(np.array(flag), np.ones(size, "f4")) == size


def test_a_loop_binds_its_symbols_anew_in_each_iteration() -> None:
    text = main(
        """
@loop(c, x, const(0, "int64"))
def last(v: f32[k], count: i64[]) -> Tuple(Tensor(rank=1, dtype="float32"), i64[]):
    w: f32[k*2] = concat(v, v, axis=0)
    u: f32[k*2] = cumsum(w, axis=0)
    more: i64[] = add(count, const(1, "int64"))
    again: bool[] = less(more, const(3, "int64"))
    return (again, u, more)
y: Tensor(rank=1, dtype="float32") = last[0]
""",
        "y",
        "x: f32[n], c: bool[]",
    )
    text = 'k = symbol("k")\n' + text
    made = lowered(text)
    assert ("loop value 'v'", (("bind", 1, "k", 0, None, 1),)) in specs(made)
    x = np.array([1, 2], "f4")
    exe = rl.compile(module(text))
    for flag in (True, False):
        np.testing.assert_allclose(exe(x, np.array(flag)), Interpreter(module(text)).run("main", x, np.array(flag)))


def test_a_negative_size_is_refused_while_compiling() -> None:
    bb = BlockBuilder()
    with bb.function("main"):
        bb.result(bb.emit(ops.get_op("memory.alloc_tensor")(ShapeValue((SymVar("n") * 0 - 3,)), dtype="float32")))
    with pytest.raises(PassError, match="main: a dimension or size is the negative constant -3"):
        lower_shapes(bb.module())


# What match_shape says at run time


def matcher(dims: Any, bounds: dict[str, int] | None = None, loc: str | None = None) -> rl.Executable:
    """main(x of unknown size, y: n) = x as the shape dims(n, k)."""
    bb = BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k", **(bounds or {}))
    with bb.function("main", x=TensorType(None, "float32", 2), y=TensorType.of((n,), "float32")) as (x, _):
        bb.loc = loc
        matched = bb.match_shape(x, dims(n, k), "matched")
        bb.loc = None
        bb.result(bb.emit(ops.neg(matched)))
    return rl.compile(bb.module())


MATCH_ERRORS: dict[str, tuple[Any, dict[str, int], str]] = {
    "a constant": (lambda n, k: (4, k), {}, "dimension 0 of shape (3, 2): expects 4, got 3"),
    "a symbol": (lambda n, k: (k, n), {}, "dimension 1 of shape (3, 2): expects n = 5, got 2"),
    "an expression": (lambda n, k: (k, k * n + 1), {}, "dimension 1 of shape (3, 2): expects k*n + 1 = 16, got 2"),
    "a symbol twice": (lambda n, k: (k, k), {}, "dimension 1 of shape (3, 2): expects k = 3, got 2"),
    "a bound": (lambda n, k: (k, 2), {"lower": 4}, "dimension 0 of shape (3, 2): k = 3 is below its lower bound 4"),
    "a limit": (lambda n, k: (k, 2), {"upper": 2}, "dimension 0 of shape (3, 2): k = 3 exceeds its upper bound 2"),
    "a divisor": (lambda n, k: (k, 2), {"divisor": 2}, "dimension 0 of shape (3, 2): k = 3 is not a multiple of 2"),
}


@pytest.mark.parametrize("name", MATCH_ERRORS)
def test_a_failed_match_names_tensor_dimension_expected_and_got(name: str) -> None:
    dims, bounds, message = MATCH_ERRORS[name]
    with pytest.raises(ShapeMismatchError) as caught:
        matcher(dims, bounds)(np.zeros((3, 2), "f4"), np.zeros(5, "f4"))
    assert str(caught.value) == f"MatchShape of 'matched': {message}"


def test_a_failed_match_names_its_place_in_the_source() -> None:
    with pytest.raises(ShapeMismatchError, match=r"^Reshape_12: dimension 0 of shape \(3, 2\): expects 4, got 3$"):
        matcher(lambda n, k: (4, k), loc="Reshape_12")(np.zeros((3, 2), "f4"), np.zeros(5, "f4"))


def test_a_wrong_argument_is_an_input_error() -> None:
    exe = rl.compile(module(main("a: f32[n*2 + 1] = neg(x)", "a", "x: f32[n*2 + 1], y: f32[n]")))
    exe(np.zeros(5, "f4"), np.zeros(2, "f4"))
    with pytest.raises(InputError, match=r"argument 'x': dimension 0 of shape \(4,\): expects n\*2 \+ 1 = 5, got 4"):
        exe(np.zeros(4, "f4"), np.zeros(2, "f4"))


def test_a_shape_from_data_is_checked() -> None:
    bb = BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k")
    with bb.function("main", x=TensorType.of((n,), "float32"), s=TensorType.of((2,), "int64")) as (x, s):
        shape = bb.match_shape(bb.emit(ops.tensor_to_shape(s)), (k, 2), "target")
        bb.result(bb.emit(ops.reshape(x, shape)))
    exe = rl.compile(bb.module())
    assert exe(np.zeros(6, "f4"), np.array([3, 2])).shape == (3, 2)
    with pytest.raises(
        ShapeMismatchError, match=r"MatchShape of 'target': dimension 1 of shape \(2, 3\): expects 2, got 3"
    ):
        exe(np.zeros(6, "f4"), np.array([2, 3]))
    with pytest.raises(ShapeMismatchError, match=r"cannot reshape \[6\] to \[4, 2\]: the sizes differ"):
        exe(np.zeros(6, "f4"), np.array([4, 2]))
    with pytest.raises(RelaxliteError, match="k = -3 is below its lower bound 0"):
        exe(np.zeros(6, "f4"), np.array([-3, 2]))


def test_a_negative_size_of_an_intermediate_is_an_error_and_touches_no_memory() -> None:
    bb = BlockBuilder()
    n = bb.symbol("n")
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        part = bb.emit(ops.cumsum(bb.emit(ops.slice(x, (5,), (n - 5,))), axis=0))
        bb.result(bb.emit(ops.sum(bb.emit(ops.cumsum(part, axis=0)))))
    exe = rl.compile(bb.module())
    assert exe(np.ones(7, "f4")) == 4
    with pytest.raises(ShapeMismatchError, match=r"the shape \(-2,\) has a negative dimension"):
        exe(np.ones(3, "f4"))


def test_a_library_routine_runs_compiled() -> None:
    from relaxlite.runtime import vm

    vm.register_extern("test_pass_memory_square", lambda a, out: np.multiply(a, a, out=out))
    bb = BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k")
    square = ExternFunction("test_pass_memory_square", (TensorType.of((k,), "float32"),) * 2)
    name = bb.define("square", square)
    with bb.function("main", x=TensorType.of((n,), "float32")) as (x,):
        bb.result(bb.emit(ops.add(bb.emit(Call(name, (x,), ty=x.ty)), x)))
    assert rl.compile(bb.module())(np.array([2, 3], "f4")).tolist() == [6, 12]


def test_a_tuple_as_an_argument_runs_compiled() -> None:
    bb = BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k")
    pair = Var("pair", TupleType((TensorType.of((k,), "float32"), TensorType.of((k, 2), "float32"))))
    with bb.function_with_params("helper", (pair,)):
        first, second = (bb.emit(TupleGetItem(pair, i)) for i in range(2))
        bb.result(bb.emit(ops.add(bb.emit(ops.reshape(first, (k, 1))), second)))
    with bb.function("main", x=TensorType.of((n,), "float32"), y=TensorType.of((n, 2), "float32")) as (x, y):
        both = bb.emit(rl.ir.Tuple((x, y)))
        bb.result(bb.emit(Call(GlobalVar("helper"), (both,), ty=y.ty)))
    got = rl.compile(bb.module())(np.array([1, 2], "f4"), np.ones((2, 2), "f4"))
    assert got.tolist() == [[2, 2], [3, 3]]
    assert issubclass(ShapeMismatchError, ExecutionError)


def test_a_summary_knows_sizes_that_the_arena_does_not_depend_on() -> None:
    n, m = SymVar("n"), SymVar("m", upper=4)
    tensors = (PlannedTensor("x", n * 64 + 64, sym(0), 0, 0), PlannedTensor("y", m * 16, sym(0), 1, 1))
    plan = MemoryPlan("main", ("f", "g"), n * 64 + 64, tensors)
    sizes = [example["sizes"] for example in plan.summary()["examples"]]
    assert sizes and all(set(at) == {"n", "m"} and at["m"] <= 4 for at in sizes)
