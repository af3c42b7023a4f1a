"""Alias sets: which values may share memory, and how long each piece of memory is in use."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Function, GlobalVar, Loop, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import bodies
from relaxlite.passes.memory.aliases import Aliases, find_aliases
from tests.support.ir_text import module

PROGRAMS = """
k = symbol("k")
@program(symbols=(k,), outputs=1)
def copy(x: f32[k], out: f32[k]):
    for i in serial(k):
        out[i] = x[i]

j = symbol("j")
@function
def helper(v: f32[j], w: f32[j]):
    return v
"""
NEW = "{0}: f32[n] = memory.alloc_tensor(shape(n), dtype='float32')\ncall(copy, {1}, {0}, sym=(n,))"


NL = "\n"


def new(name: str, source: str = "x", indent: str = "") -> str:
    """Statements that allocate a tensor and fill it."""
    return "\n".join(indent + line for line in NEW.format(name, source).split("\n"))


def inner(name: str, source: str = "x") -> str:
    return new(name, source, "    ")


def loop(body: str, yields: str, start: str = "x", param: str = "p") -> str:
    """A loop w over one value."""
    return f"@loop(c, {start})\ndef w({param}: f32[n]) -> Tuple(f32[n]):\n{body}\n    return (c, {yields})"


def analyzed(statements: str, result: str) -> tuple[Aliases, dict[str, Var]]:
    """The alias sets of main(x: f32[n], y: f32[n], c: bool[]), and its variables by name."""
    body = "\n".join(f"    {line}" for line in statements.split("\n"))
    text = f'n = symbol("n")\n@function\ndef main(x: f32[n], y: f32[n], c: bool[]):\n{body}\n    return {result}\n'
    made: IRModule = module(PROGRAMS + text)
    main = made["main"]
    assert isinstance(main, Function)
    variables = {param.name: param for param in main.params}
    for body_ in bodies(main):
        for binding in body_.bindings():
            variables[binding.var.name] = binding.var
            if isinstance(value := getattr(binding, "value", None), Loop):
                variables.update({param.name: param for param in value.params})
    return find_aliases(main, made), variables


def names(aliases: Aliases, var: Var) -> set[str]:
    return {"a constant" if isinstance(root, Constant) else root.name for root in aliases.roots(var)}


IF = "v: f32[n]\nif c:\n    v = {}\nelse:\n    v = {}"
ROOTS = {
    "new memory": (new("v"), {"v"}),
    "a parameter": ("v: f32[n] = x", {"x"}),
    "a view": (f"{new('a')}\nv: f32[n, 1] = reshape(a, shape(n, 1))", {"a"}),
    "a matched shape": (f"{new('a')}\nm = symbol('m')\nv: f32[m] = match_shape(a, (m,))", {"a"}),
    "a copy": (f"{new('a')}\nv: f32[n] = memory.copy(a)", {"v"}),
    "a field of a tuple": (f"{new('a')}\nt: Tuple(f32[n], f32[n]) = (x, a)\nv: f32[n] = t[1]", {"a"}),
    "a tuple": (f"{new('a')}\nv: Tuple(f32[n], f32[n]) = (x, a)", {"x", "a"}),
    "a program by value": ("v: f32[n] = call(copy, x, sym=(n,))", {"v"}),
    "a function's result": (f"{new('a')}\nv: f32[n] = call(helper, a, y)", {"a", "y"}),
    "a branch's": (f"{new('a')}\n{IF.format('a', 'y')}", {"a", "y"}),
    "a branch's own": (
        f"v: f32[n]\nif c:\n{new('a', indent='    ')}\n    v = a\nelse:\n    v = x",
        {"a", "x"},
    ),
    "a loop's": (
        f"{new('a')}\n@loop(c, a)\ndef w(p: f32[n]) -> Tuple(f32[n]):\n    return (c, y)\nv: f32[n] = w[0]",
        {"a", "y"},
    ),
    "what changes places in a loop": (
        f"{new('a')}\n@loop(c, a, y)\ndef w(p: f32[n], q: f32[n]) -> Tuple(f32[n], f32[n]):\n    return (c, q, p)\n"
        "v: f32[n] = w[0]",
        {"a", "y"},
    ),
    "what stands still beside it": (
        f"{new('a')}\n@loop(c, a, y)\ndef w(p: f32[n], q: f32[n]) -> Tuple(f32[n], f32[n]):\n    return (c, p, p)\n"
        "v: f32[n] = w[0]",
        {"a"},
    ),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_value_lies_in_the_memory_of_its_roots(name: str) -> None:
    statements, expected = ROOTS[name]
    aliases, variables = analyzed(statements, "c")
    assert names(aliases, variables["v"]) == expected


def test_a_constant_is_a_root() -> None:
    aliases, variables = analyzed(
        "v: f32[]\nif c:\n    v = const(1.0, 'float32')\nelse:\n    v = const(2.0, 'float32')", "v"
    )
    assert names(aliases, variables["v"]) == {"a constant"}
    assert len(aliases.roots(variables["v"])) == 2


def test_a_function_that_is_called_may_give_back_a_constant() -> None:
    """And also one that calls such a function."""
    bb, ty = BlockBuilder(), TensorType.of((3,), "float32")
    with bb.function("inner", p=ty) as (_,):
        bb.result(Constant.of(np.arange(3, dtype=np.float32)))
    with bb.function("outer", p=ty) as (p,):
        bb.result(bb.emit(Call(GlobalVar("inner"), (p,), ty=ty)))
    with bb.function("main", x=ty) as (x,):
        found = bb.emit(Call(GlobalVar("outer"), (x,), ty=ty))
        bb.result(bb.emit(ops.exp(found)))
    module = bb.module()
    main = module["main"]
    assert isinstance(main, Function)
    assert names(find_aliases(main, module), found) == {"x", "a constant"}


def test_two_values_may_share_memory_where_they_have_a_root_in_common() -> None:
    view = "r: f32[n, 1] = reshape(a, shape(n, 1))\nq: f32[n] = reshape(r, shape(n))"
    aliases, v = analyzed(f"{new('a')}\n{new('b')}\n{view}\n{IF.format('q', 'b')}", "c")
    assert aliases.may_alias(v["a"], v["r"]) and aliases.may_alias(v["v"], v["a"]) and aliases.may_alias(v["v"], v["b"])
    assert not aliases.may_alias(v["a"], v["b"]) and not aliases.may_alias(v["r"], v["x"])


VIEWS = "r: f32[n, 1] = reshape(a, shape(n, 1))\nq: f32[n, 1] = reshape(r, shape(n, 1))"
BRANCH = f"r: f32[n]\nif c:\n{inner('b', 'a')}\n    r = b\nelse:\n    r = x"
LAST = {
    "its call": (new("a"), "copy"),
    "its view's use": (f"{new('a')}\n{VIEWS}", "q"),
    "a use in a branch": (f"{new('a')}\n{BRANCH}", "b's copy"),
    "a use in a loop: its end": (f"{new('a')}\n{loop(inner('b', 'a') + NL + inner('d', 'b'), 'x')}", "w's end"),
    "what a loop starts with: its end": (f"{new('a')}\n{loop(inner('b'), 'x', start='a')}", "w's end"),
    "the result": (f"{new('a')}\nv: f32[n] = a", "the function's end"),
}


@pytest.mark.parametrize("name", LAST)
def test_memory_is_used_last(name: str) -> None:
    statements, expected = LAST[name]
    aliases, v = analyzed(statements, "v" if "v:" in statements else "c")
    ends = {binding.var.name: step for step, binding in enumerate(aliases.steps)}
    at = {
        "copy": aliases.step(v["a"]) + 1,
        "q": ends.get("q"),
        "b's copy": aliases.step(v["b"]) + 1 if "b" in v else None,
        "w's end": ends.get("w"),
        "the function's end": aliases.end,
    }
    assert aliases.last_use(v["a"]) == at[expected]


def test_a_loop_uses_what_an_inner_loop_gives_on() -> None:
    """a is read again in the next iteration of the outer loop, though nothing there names it."""
    aliases, v = analyzed(
        f"""{new("a")}
@loop(c, x)
def w(p: f32[n]) -> Tuple(f32[n]):
    @loop(c, p)
    def u(q: f32[n]) -> Tuple(f32[n]):
        return (c, a)
{new("b", indent="    ")}
    return (c, x)""",
        "c",
    )
    ends = {binding.var.name: step for step, binding in enumerate(aliases.steps)}
    assert aliases.last_use(v["a"]) == ends["w"] > aliases.step(v["b"])


CONSTANTS = "a: f32[]\nif c:\n    a = const(1.0, 'float32')\nelse:\n    a = const(2.0, 'float32')"
DIES = {
    "read for the last time": (f"{new('a')}\n{new('b', 'a')}", True),
    "read again": (f"{new('a')}\n{new('b', 'a')}\n{new('d', 'a')}", False),
    "its view read again": (f"{new('a')}\nr: f32[n] = reshape(a, shape(n))\n{new('b', 'a')}\n{new('d', 'r')}", False),
    "a parameter": (f"a: f32[n] = x\n{new('b', 'a')}", False),
    "a constant perhaps": (f"{CONSTANTS}\n{new('b')}", False),
    "carried round": (loop(inner("b", "a"), "b", param="a"), False),
    "from outside a loop": (f"{new('a')}\n{loop(inner('b', 'a'), 'x')}", False),
    "in a loop": (loop(inner("a", "p") + NL + inner("b", "a"), "x"), True),
}


@pytest.mark.parametrize("name", DIES)
def test_an_operand_dies_at_a_call(name: str) -> None:
    statements, expected = DIES[name]
    aliases, v = analyzed(statements, "c")
    call = aliases.steps[aliases.step(v["b"]) + 1].var
    assert aliases.dies_at(v["a"], call) is expected


def test_what_is_made_in_an_iteration_and_lives_on_is_carried() -> None:
    aliases, v = analyzed(loop(inner("a", "p") + NL + inner("b", "a"), "b"), "c")
    assert aliases.is_carried(v["b"]) and not aliases.is_carried(v["a"]) and not aliases.is_carried(v["x"])


def test_variables_of_different_branches_are_exclusive() -> None:
    aliases, v = analyzed(
        f"{new('a')}\nr: f32[n]\nif c:\n{new('b', indent='    ')}\n{new('d', indent='    ')}\n    r = b\nelse:\n"
        f"{new('e', indent='    ')}\n    r = e",
        "c",
    )
    assert aliases.are_exclusive(v["b"], v["e"]) and aliases.are_exclusive(v["e"], v["d"])
    assert not aliases.are_exclusive(v["b"], v["d"]) and not aliases.are_exclusive(v["a"], v["e"])
