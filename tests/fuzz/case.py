"""A case: a module, the passes that compile it, and how its inputs are drawn; as text, and run.

The text of a case is that of its module, below a header of comments:

    # case: a sum over no rows
    # passes: default                     or names of passes
    # styles: least, one, odd             of the sizes (relaxlite/validation/samples.py)
    # seed: 7                             of the inputs
    # each pass: yes                      the interpreter runs after each pass
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from relaxlite import config
from relaxlite.driver import build
from relaxlite.errors import PassError, ValidationError
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.runtime.module import Executable
from relaxlite.runtime.vm import register_extern
from relaxlite.target import Target
from relaxlite.validation import Validator
from relaxlite.validation.validator import FailedRun, outcome_of
from tests.fuzz import steps_structure
from tests.fuzz.generator import Generator
from tests.fuzz.pipelines import default_names, passes_of, random_pipeline

STYLES = ("least", "one", "odd", "mixed", "same", "mixed", "larger")
SMALL = ("least", "one", "odd", "mixed")  # loops run in Python, one scalar at a time
EACH_PASS = 15  # percent of the cases whose passes are checked one by one
HOST = Target.parse("llvm")
# What sizes come to by facts known to the compiler, or an op that does not take them: no run can succeed
IMPOSSIBLE = ("is the negative constant", "an op has the operands and attributes that it declares")

for _symbol, _routine in steps_structure.EXTERNS.items():
    register_extern(_symbol, _routine)


@dataclass(frozen=True)
class Case:
    module: IRModule
    passes: tuple[str, ...] | None = None  # None: the default pipeline
    styles: tuple[str, ...] = STYLES
    seed: int = 0
    each_pass: bool = False
    title: str = ""

    def __str__(self) -> str:
        return (
            f"# case: {self.title}\n"
            f"# passes: {'default' if self.passes is None else ', '.join(self.passes)}\n"
            f"# styles: {', '.join(self.styles)}\n"
            f"# seed: {self.seed}\n"
            f"# each pass: {'yes' if self.each_pass else 'no'}\n"
            f"{print_module(self.module, embed=True)}"
        )


def parse_case(text: str) -> Case:
    header = dict(re.findall(r"^# ([\w ]+): (.*)$", text, re.MULTILINE))

    def names(key: str) -> tuple[str, ...]:
        return tuple(name.strip() for name in header[key].split(","))

    return Case(
        parse_module(text),
        None if header["passes"] == "default" else names("passes"),
        names("styles"),
        int(header["seed"]),
        header["each pass"] == "yes",
        header["case"],
    )


def random_case(seed: int) -> Case:
    generator = Generator(seed)
    roll = generator.roll
    module = generator.module(roll.pick((1, 2, 3, 4, 5, 6, 8, 10, 14)))
    passes = tuple(random_pipeline(roll)) if roll.chance(40) else None
    each_pass = roll.chance(EACH_PASS)
    return Case(module, passes, SMALL if each_pass else STYLES, seed, each_pass, f"seed {seed}")


@dataclass(frozen=True)
class Problem:
    """Why a case fails. `kind` says it in few words, the same for cases that fail in the same way."""

    kind: str
    text: str


def check(case: Case) -> Problem | None:
    """Run a case: compile once, call at every size, natively and in the interpreter of bytecode."""
    try:
        verify(case.module, "graph")
    except Exception as error:
        return Problem(f"illegal: {_kind_of(error)}", str(error))
    try:
        _run(case)
    except ValidationError as error:
        what = str(error).split(" changes what", 1)[0]
        problem = str(error).partition(": ")[2]
        return Problem(f"{what}: {_family(problem)}", str(error))
    except Exception as error:
        return Problem(_kind_of(error), f"{type(error).__name__}: {error}{_notes(error)}")
    return None


def _run(case: Case) -> None:
    context = PassContext(HOST, verify=True, dump_dir=None)
    validator = Validator(case.module, externs=steps_structure.EXTERNS, styles=case.styles, seed=case.seed)
    if case.each_pass:
        context.observers.append(validator.check)
    names = default_names() if case.passes is None else case.passes
    try:
        data = build(case.module, HOST, passes=passes_of(names), context=context)
    except PassError as error:
        fails = all(isinstance(one.outcome, FailedRun) for one in validator.cases)
        if fails and any(text in str(error) for text in IMPOSSIBLE):
            return  # told before any run what every run would tell
        raise
    exe = Executable(data)
    validator.check_compiled(exe)
    with config.override(interpret=True):
        slow = Executable(data)
    for one in validator.cases:
        fast, plain = (outcome_of(partial(e, *one.sample.args)) for e in (exe, slow))
        if not same_outcome(fast, plain):
            raise ValidationError(f"the host function changes what bytecode does, at {one.sample}: {fast}, {plain}")


def same_outcome(a: Any, b: Any) -> bool:
    """Results to the last bit, or both an error."""
    if isinstance(a, FailedRun) or isinstance(b, FailedRun):
        return isinstance(a, FailedRun) and isinstance(b, FailedRun)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


def _kind_of(error: Exception) -> str:
    """The error's class and its words without names and numbers."""
    words = re.sub(r"[\d'\"`]\S*|\(.*?\)", "#", str(error).split("\n", 1)[0])
    return f"{type(error).__name__}: {words[:90]}"


def _family(problem: str) -> str:
    if "check" in problem.split(":", 1)[0]:
        return "check"
    return "fails" if "the run fails" in problem else "differs"


def _notes(error: Exception) -> str:
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
