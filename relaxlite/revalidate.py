"""Command `python -m relaxlite.revalidate FILE.before.py`: rerun a mismatch that `compile(validate=True)` has recorded.

Where the file names a pass of the pipeline, the present version of the pass runs on the module before; otherwise the
recorded module after is compared. The exit status is 1 while the two differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relaxlite.driver import compile as compile_module
from relaxlite.errors import ValidationError
from relaxlite.ir import ops  # noqa: F401  (the parser looks them up)
from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import PASSES
from relaxlite.passes.schedule.tuning import Tuning
from relaxlite.target import Target
from relaxlite.validation.record import read_record
from relaxlite.validation.validator import ENTRY, Validator


def rerun(path: str) -> str | None:
    """Rerun the recorded check; returns the mismatch as text, or None."""
    what, before, after, args = read_record(path)
    what, _, entry = what.partition(" in ")
    validator = Validator(before, inputs=[args], folder=str(Path(path).parent), entry=entry or ENTRY)
    try:
        if not what.startswith("pass "):
            validator.check_compiled(compile_module(before).entry(validator.entry), after)
            return None
        name = what.removeprefix("pass ")
        step = PASSES.get(name) or Pass(name, lambda module, _: _present(after), "graph")
        result = step.run(before, PassContext(Target.parse("llvm"), tuning=Tuning.of_knob()))
        validator.check(step, before, result)
    except ValidationError as error:
        return str(error)
    return None


def _present(module: IRModule | None) -> IRModule:
    """The module after the pass, which must be recorded."""
    assert module is not None, "the module after the pass was not kept"
    return module


if __name__ == "__main__":
    problem = rerun(sys.argv[1]) if len(sys.argv) == 2 else "usage: python -m relaxlite.revalidate FILE.before.py"
    print(problem or "both compute the same now")
    sys.exit(problem is not None)
