"""The replay of memory plans: it accepts what the planner makes, and names what is wrong with a plan that is broken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from relaxlite.errors import PassError
from relaxlite.ir.expr import Function
from relaxlite.ir.module import IRModule
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.memory.lower_dps import lower_dps
from relaxlite.passes.memory.plan_memory import plan_memory
from relaxlite.passes.memory.replay_plan import replay_plan
from relaxlite.target import Target
from tests.support import tiers
from tests.support.ir_text import module
from tests.support.random_graphs import graphs

COPY = """
k = symbol("k")
@program(symbols=(k,), outputs=1)
def copy(x: f32[k], out: f32[k]):
    for i in serial(k):
        out[i] = x[i]
"""


def planned(statements: str, result: str, size: str = "1024", helper: str = "") -> IRModule:
    """main(x: f32[n], c: bool[]) with an arena.

    `NAME at OFFSET` makes a tensor there, `NAME = SOURCE` copies into it, `LOOP x` begins a loop w over p = x.
    """
    for start in "xa":
        head = f"@loop(c, {start})\ndef w(p: f32[n]) -> Tuple(f32[n]):"
        statements = statements.replace(f"LOOP {start}", head)
    lines = [f"arena: Object = memory.alloc_arena(shape({size}))"]
    for line in statements.strip().split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        words = line.split()
        if words[1:2] == ["at"]:
            view = f"memory.view(arena, shape({' '.join(words[2:])}), shape(n), dtype='float32')"
            lines.append(f"{indent}{words[0]}: f32[n] = {view}")
        elif words[1:2] == ["="] and len(words) == 3 and words[0] not in ("r", "q"):
            lines.append(f"{indent}call(copy, {words[2]}, {words[0]}, sym=(n,))")
        else:
            lines.append(line)
    body = "\n".join(f"    {line}" for line in lines)
    head = 'n = symbol("n", upper=16)\n@function\ndef main(x: f32[n], c: bool[]):\n'
    made = module(f"{head}{body}\n    return {result}\n{COPY}{helper}")
    verify(made, "dps")
    return made


def replay(made: IRModule) -> None:
    main = made["main"]
    assert isinstance(main, Function)
    replay_plan("main", main, made)


OUT = "out: f32[n] = memory.alloc_tensor(shape(n), dtype='float32')\nout = {}"
GOOD = {
    "one after the other": f"a at 0\na = x\nb at 64\nb = a\nd at 0\nd = b\n{OUT.format('d')}",
    "room for the largest size only": f"a at 0\na = x\nb at 64\nb = a\n{OUT.format('a')}",
    "by what is needed": f"a at 0\na = x\nb at n*4\nb = a\n{OUT.format('a')}",
    "in branches": "a at 0\na = x\nr: f32[n]\nif c:\n    b at 64\n    b = a\n    r = b\nelse:\n    d at 64\n    d = a\n"
    f"    r = d\n{OUT.format('r')}",
    "in a loop": "a at 0\na = x\nLOOP x\n    b at 64\n    b = p\n    e at 128\n"
    "    e = b\n    own: f32[n] = memory.alloc_tensor(shape(n), dtype='float32')\n    own = e\n    return (c, own)\n"
    f"q: f32[n] = w[0]\n{OUT.format('q')}",
    "sizes that are refused": (  # with n > 4 the match fails: what follows never runs, and n stays what it is
        "a at 0\na = x\nlow: f32[min(n, 4)] = memory.alloc_tensor(shape(min(n, 4)), dtype='float32')\n"
        f"m: f32[n] = match_shape(low, (n,))\nb at n*4\nb = m\nd at 16\nd = m\n{OUT.format('a')}"
    ),
    "written again": f"a at 0\na = x\nb at 0\nb = x\na = x\n{OUT.format('a')}",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_sound_plan_is_accepted(name: str) -> None:
    replay(planned(GOOD[name], "out"))


BROKEN = {
    "overwritten": (
        f"a at 0\na = x\nb at 0\nb = x\n{OUT.format('a')}",
        r"the memory plan of main is wrong: step 7 \(copy\): a is read, but b in step 5 has overwritten it, at n=16",
    ),
    "overwritten in part": (
        f"a at 0\na = x\nb at 32\nb = x\n{OUT.format('a')}",
        "a is read, but b in step 5 has overwritten it, at n=16",
    ),
    "too near for some sizes": (
        f"a at 0\na = x\nb at 8\nb = x\n{OUT.format('a')}",
        "a is read, but b in step 5 has overwritten it",
    ),
    "read under another name": (
        f"a at 0\na = x\nr: f32[n, 1] = reshape(a, shape(n, 1))\nb at 0\nb = x\nq: f32[n] = reshape(r, shape(n))\n"
        f"{OUT.format('q')}",
        "a is read, but b in step 6 has overwritten it",
    ),
    "outside of the arena": ("a at 1000\na = x\n" + OUT.format("a"), "a, 64 bytes at 1000, leaves the arena of 1024"),
    "before the arena": ("a at 0 - 64\na = x\n" + OUT.format("a"), "a, 64 bytes at -64, leaves the arena"),
    "onto an operand": (f"a at 0\na = x\nb at 0\nb = a\n{OUT.format('b')}", "b is written where a lies, in one call"),
    "in the first branch": (
        f"a at 0\na = x\nr: f32[n]\nif c:\n    b at 0\n    b = x\n    r = b\nelse:\n    r = x\n{OUT.format('a')}",
        "a is read, but b in step 6",
    ),
    "in the other branch": (
        f"a at 0\na = x\nr: f32[n]\nif c:\n    r = x\nelse:\n    b at 0\n    b = x\n    r = b\n{OUT.format('a')}",
        "a is read, but b in step 6",
    ),
    "what a branch gives": (
        f"r: f32[n]\nif c:\n    a at 0\n    a = x\n    r = a\nelse:\n    r = x\nb at 0\nb = x\n{OUT.format('r')}",
        "a is read, but b in step 6",
    ),
    "what a loop captures": (
        f"a at 0\na = x\nLOOP x\n    b at 64\n    b = a\n    d at 0\n    d = b\n    return (c, x)\n{OUT.format('x')}",
        r"step 10 \(copy\): a is read, but d in step 8",
    ),
    "what a loop carries": (
        "LOOP x\n    a at 0\n    a = x\n    b at 64\n    b = p\n"
        f"    return (c, a)\nq: f32[n] = w[0]\n{OUT.format('q')}",
        r"a is read, but a in step 8",
    ),
    "after no iteration": (
        f"a at 0\na = x\nLOOP a\n    return (c, x)\nb at 0\nb = x\nq: f32[n] = w[0]\n{OUT.format('q')}",
        "a is read, but b in step 6",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_found_and_named(name: str) -> None:
    statements, message = BROKEN[name]
    with pytest.raises(PassError, match=message):
        replay(planned(statements, "out"))


GROWING = """
n = symbol("n", upper=16)
length = symbol("length")
j = symbol("j")
@function
def main(x: f32[n], c: bool[]):
    arena: Object = memory.alloc_arena(shape(1024))
    @loop(c, x)
    def w(p: f32[length]) -> Tuple(Tensor(rank=1, dtype="float32")):
        y: f32[j] = match_shape(p, (j,))
        a: f32[j*2] = memory.view(arena, shape(PLACE), shape(j*2), dtype='float32')
        call(fill, a, sym=(j*2,))
        b: f32[j] = memory.alloc_tensor(shape(j), dtype='float32')
        call(copy, y, b, sym=(j,))
        return (c, a)
    q: Tensor(rank=1, dtype="float32") = w[0]
    return q
"""
FILL = """
k = symbol("k")
@program(symbols=(k,), outputs=1)
def fill(out: f32[k]):
    for i in serial(k):
        out[i] = float32(1.0)
"""


@pytest.mark.parametrize("place", ["0", "j*8"])
def test_what_a_loop_carries_is_followed_as_it_grows(place: str) -> None:
    """Behind a match in its body, which no other size of a later iteration could pass."""
    made = module(GROWING.replace("PLACE", place) + COPY + FILL)
    verify(made, "dps")
    if place == "0":
        with pytest.raises(PassError, match="a is read, but a in step"):
            replay(made)
    else:
        replay(made)


@settings(max_examples=tiers.examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(size=12, control=True))
def test_what_the_planner_makes_is_sound(given: IRModule) -> None:
    context = PassContext(Target.parse("llvm"), verify=True)  # replays
    verify(plan_memory(lower_dps(legalize(decompose(given))), context), "dps")


def test_the_pass_replays_where_passes_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a packer that puts everything in one place."""
    from relaxlite.passes.memory import plan_memory as planner

    pack = planner.pack

    def in_one_place(tenants: Any) -> Any:
        packing = pack(tenants)
        packing.offsets = [packing.offsets[0]] * len(tenants)
        return packing

    monkeypatch.setattr(planner, "pack", in_one_place)
    text = "a: f32[n] = cumsum(x, axis=0)\n    b: f32[n] = cumsum(a, axis=0)\n    d: f32[n] = cumsum(b, axis=0)"
    given = lower_dps(legalize(module(f'n = symbol("n")\n@function\ndef main(x: f32[n]):\n    {text}\n    return d\n')))
    with pytest.raises(PassError, match=r"the memory plan of main is wrong: step .*: b is written where a lies"):
        plan_memory(given, PassContext(Target.parse("llvm"), verify=True))


def test_each_result_of_a_function_may_be_any_argument() -> None:
    statements = "a at 0\na = x\nt: Tuple(f32[n], f32[n]) = call(both, a)\ny: f32[n] = t[1]\n"
    helper = "\nj = symbol('j')\n@function\ndef both(v: f32[j]):\n    return (v, v)\n"
    for rest, is_sound in ((OUT.format("y"), True), (f"b at 32\nb = x\n{OUT.format('y')}", False)):
        made = planned(statements + rest, "out", helper=helper)
        if is_sound:
            replay(made)
        else:
            with pytest.raises(PassError, match=r"a is read, but b in step . has overwritten it"):
                replay(made)
