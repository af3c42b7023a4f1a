"""The fuzzer: what it found once, fresh modules, and the tool itself (`python -m tests.fuzz`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from relaxlite.codegen.llvm import machine_code
from relaxlite.ir.equality import first_difference
from relaxlite.ir.expr import Call, Expr, Function, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes import pipeline
from relaxlite.passes.manager import Pass
from tests.fuzz import runner
from tests.fuzz.case import check, parse_case, random_case
from tests.fuzz.shrink import shrunk
from tests.support import tiers

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
MODULES, PER_TEST = 300, 30


@pytest.fixture
def unoptimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LLVM leaves out its own optimizations, which takes a tenth of the time."""
    monkeypatch.setattr(machine_code, "to_object", machine_code.to_object)  # which puts it back afterwards
    runner.quick(True)
    yield


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_what_was_found_once_stays_fixed(path: Path) -> None:
    problem = check(parse_case(path.read_text()))
    assert problem is None, problem.text


@pytest.mark.usefixtures("unoptimized")
@pytest.mark.parametrize("first", tiers.few(range(0, MODULES, PER_TEST)))
def test_fresh_modules(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        problem = check(random_case(seed))
        assert problem is None, f"python -m tests.fuzz --seed {seed} --count 1\n{problem.text}"


@pytest.mark.parametrize("seed", range(40))
def test_a_case_is_its_text(seed: int) -> None:
    case = random_case(seed)
    again = parse_case(str(case))
    assert first_difference(case.module, again.module) is None
    assert replace(again, module=case.module) == case
    assert str(random_case(seed)) == str(case), "a seed gives the same case"


# Shrinking


class Forgets(Rewriter):
    """Leaves out each tanh."""

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and value.callee.name == "tanh":
            return value.args[0]
        return None


def forget(module: IRModule) -> IRModule:
    return map_functions(module, lambda f: Forgets().function(f))


TO_SHRINK = """
# case: a tanh among other things
# passes: fold_shapes, fold_constants, decompose, legalize, fuse_ops, fuse_programs, lower_dps, lower_shapes
# styles: one, odd
# seed: 1
# each pass: yes
n = symbol("n", upper=64)
@function
def main(x: Tensor((n, 4), "float32"), flag: Tensor((), "bool"), y: Tensor((4,), "float32")):
    with dataflow():
        a: Tensor((n, 4), "float32") = add(x, y)
        b: Tensor((n, 4), "float32") = tanh(a)
    c: Tensor((n, 4), "float32")
    if flag:
        with dataflow():
            d: Tensor((n, 4), "float32") = multiply(b, x)
        c = d
    else:
        c = b
    with dataflow():
        e: Tensor((4,), "float32") = sum(c, axes=(0,), keepdims=False)
    return (e, a, y)
"""


@pytest.mark.usefixtures("unoptimized")
def test_a_failure_shrinks_to_the_op_that_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Pass("fold_constants", lambda module, _: forget(module), "graph")
    monkeypatch.setitem(pipeline.PASSES, "fold_constants", broken)
    case = parse_case(TO_SHRINK)
    problem = check(case)
    assert problem is not None and problem.kind == "pass fold_constants: differs"
    small, found = shrunk(case, problem.kind, seconds=600)
    assert found is not None and found.kind == problem.kind
    main = small.module["main"]
    assert isinstance(main, Function) and len(main.params) == 1 and len(small.styles) == 1 and small.passes is None
    (binding,) = main.body.bindings()
    assert isinstance(binding, Let) and isinstance(binding.value, Call) and binding.value.callee.name == "tanh"
    assert check(parse_case(str(small))) == found, "what is written down fails in the same way"


# Processes


def stumbles(pipe: Connection) -> None:
    """Dies at seed 3, finds something wrong with 5 and 6."""
    while (seed := pipe.recv()) is not None:
        if seed == 3:
            os._exit(7)
        pipe.send((seed, "odd", f"it is {seed}") if seed in (5, 6) else (seed, None, None))


def test_a_process_that_dies_is_reported_and_replaced() -> None:
    tally, first = runner.Tally(10, None), []
    runner.run_many(itertools.count(), 2, tally, lambda *what: first.append(what), lambda line: None, stumbles)
    assert tally.done == 10 and tally.failures == 3
    assert {kind: sorted(seeds) for kind, seeds in tally.kinds.items()} == {"process died": [3], "odd": [5, 6]}
    assert sorted(first)[0] == (3, "process died", "the process ended with status 7")
    assert len(first) == 2 and first[1][1:2] in (("odd",), ("process died",))


def test_the_tally_says_how_far_it_is() -> None:
    tally = runner.Tally(200, None, done=50)
    tally.note(3, "odd")
    assert tally.line().startswith("[#####...............] 50/200 modules, ")
    assert tally.line().endswith("/s, 1 failures of 1 kinds")
    assert tally.is_over(200) and not tally.is_over(199)
