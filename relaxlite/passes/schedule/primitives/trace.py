"""The steps of a schedule as text: one call per line, valid Python, which a Schedule can run again.

A scheduled program carries its steps as the attribute `schedule`, a tuple of such lines, printed above its loops. The
rules of programs.py leave the same form: what they did by primitives, and larger steps by names of their own
(`register_tile`), which can be read but not run again.
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
    """A call of a primitive, `split("i", 6, tail="cut")`, and the names of the loops or buffers that it gave."""

    name: str
    args: tuple[Argument, ...] = ()
    options: tuple[tuple[str, Argument], ...] = ()
    results: tuple[str, ...] = ()

    def __str__(self) -> str:
        items = [*map(_text, self.args), *(f"{name}={_text(value)}" for name, value in self.options)]
        given = f"  # {', '.join(self.results)}" if self.results else ""
        return f"{self.name}({', '.join(items)}){given}"


def _text(value: Argument) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def parse_step(line: str) -> Step:
    """The step of a line; ScheduleError for what is no call with literal arguments."""
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
    """The lines of a program's schedule; none for a program that has not been scheduled."""
    found = program.attrs.get(SCHEDULE, ())
    return tuple(map(str, found)) if isinstance(found, tuple) else ()


def with_steps(attrs: Attrs, steps: Iterable[Step]) -> Attrs:
    """The attributes with these steps after those that stand there already."""
    before = attrs.get(SCHEDULE, ())
    assert isinstance(before, tuple)
    lines = (*before, *map(str, steps))
    return Attrs({**attrs, SCHEDULE: lines}) if lines else attrs
