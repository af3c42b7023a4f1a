"""Schedule traces: the steps of a schedule as text, one Python call per line, which a Schedule can replay.

A scheduled program has its steps as the attribute `schedule`, a tuple of lines, printed above its loops. The rules of
programs.py record primitives, and composite steps under names of their own (`register_tile`), which cannot be replayed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from relaxlite.errors import ScheduleError
from relaxlite.ir.attributes import SCHEDULE
from relaxlite.ir.expr import Attrs, AttrValue
from relaxlite.ir.program import TensorProgram
from relaxlite.records import dataclass

Argument = AttrValue


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a primitive, `split("i", 6, tail="cut")`, and the names of the loops or buffers that it returned."""

    name: str
    args: tuple[Argument, ...] = ()
    options: tuple[tuple[str, Argument], ...] = ()
    results: tuple[str, ...] = ()

    def __str__(self) -> str:
        items = [*map(_text, self.args), *(f"{name}={_text(value)}" for name, value in self.options)]
        results = f"  # {', '.join(self.results)}" if self.results else ""
        return f"{self.name}({', '.join(items)}){results}"


def _text(value: Argument) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def parse_step(line: str) -> Step:
    """Parse one line of a trace. Raises ScheduleError for anything but a call with literal arguments."""
    try:
        call = ast.parse(line.strip(), mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        options = tuple((str(option.arg), ast.literal_eval(option.value)) for option in call.keywords)
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ScheduleError(f'{line!r} is no step of a schedule; one is written split("i", 6)') from error
    results = line.partition("  # ")[2]
    return Step(call.func.id, args, options, tuple(results.split(", ")) if results else ())


def steps_of(program: TensorProgram) -> tuple[str, ...]:
    """The trace of a program, one line per step; empty for an unscheduled program."""
    lines = program.attrs.get(SCHEDULE, ())
    return tuple(map(str, lines)) if isinstance(lines, tuple) else ()


def with_steps(attrs: Attrs, steps: Iterable[Step]) -> Attrs:
    """Append steps to the schedule trace in a program's attributes."""
    before = attrs.get(SCHEDULE, ())
    assert isinstance(before, tuple)
    lines = (*before, *map(str, steps))
    return Attrs({**attrs, SCHEDULE: lines}) if lines else attrs
