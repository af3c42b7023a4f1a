"""Record of each pass: its time, the number of calls and programs after it, and the changed lines of the IR."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from relaxlite.ir.attributes import COMPOSITE
from relaxlite.ir.expr import ExternFunction, Function
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.printer import print_function, print_program
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.visitor import bodies
from relaxlite.passes.manager import Pass
from relaxlite.records import dataclass

CONTEXT = 2  # unchanged lines around changed ones
MAX_LINES = 6000  # per pass; further lines are only counted


@dataclass(slots=True)
class Snapshot:
    """One run of a pass. Modules are immutable and share unchanged definitions."""

    step: Pass
    before: IRModule
    after: IRModule
    seconds: float

    @property
    def changed(self) -> list[str]:
        """Names of definitions that are new, changed or removed."""
        names = dict.fromkeys([*self.before, *self.after])
        return [name for name in names if self.before.get(name) is not self.after.get(name)]

    def summary(self) -> dict[str, Any]:
        """The snapshot as JSON data."""
        return {
            "name": self.step.name,
            "stage": self.step.stage,
            "doc": self.step.doc or (self.step.run.__doc__ or "").strip().split("\n")[0],
            "ms": round(self.seconds * 1e3, 3),
            "bindings": [num_bindings(self.before), num_bindings(self.after)],
            "programs": [len(self.before.programs()), len(self.after.programs())],
            "changed": self.changed,
        }


@dataclass(slots=True)
class Snapshots:
    """Observer for PassContext.observers that records the modules before and after every pass."""

    taken: list[Snapshot] = field(default_factory=list)

    def __call__(self, step: Pass, before: IRModule, after: IRModule, seconds: float) -> None:
        self.taken.append(Snapshot(step, before, after, seconds))

    def last(self, stage: str) -> IRModule | None:
        """The module after the last pass of a stage; None without one."""
        return next((s.after for s in reversed(self.taken) if s.step.stage == stage), None)


def num_bindings(module: IRModule) -> int:
    """Bindings of all graph-level functions, without composite functions."""
    functions = [f for f in module.functions().values() if not f.attrs.get(COMPOSITE)]
    return sum(len(body.bindings()) for f in functions for body in bodies(f))


class Differences:
    """Differences of modules as text; caches the text of definitions."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], tuple[Definition, list[str]]] = {}

    def of(self, snapshot: Snapshot) -> str:
        """Diff of a pass: lines with "-" or "+" below "@@ name" per definition; "" if nothing changed."""
        lines: list[str] = []
        for name in snapshot.changed:
            old, new = snapshot.before.get(name), snapshot.after.get(name)
            lines += self._definition(name, old, new)
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"@@ {len(lines) - MAX_LINES} more lines are left out"]
        return "\n".join(lines)

    def _definition(self, name: str, old: Definition | None, new: Definition | None) -> Iterator[str]:
        before, after = self._text(name, old), self._text(name, new)
        body = [line for line in _changes(before, after)]
        if body:
            yield f"@@ {name}{', new' if old is None else ', removed' if new is None else ''}"
            yield from body

    def _text(self, name: str, definition: Definition | None) -> list[str]:
        if definition is None:
            return []
        key = (name, id(definition))
        if key not in self._lines:  # the entry keeps the definition alive, so that its id stays unique
            self._lines[key] = definition, print_definition(name, definition).splitlines()
        return self._lines[key][1]


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    if not before or not after:
        yield from (f"-{line}" for line in before)
        yield from (f"+{line}" for line in after)
        return
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT)):
        if number:
            yield "  ..."
        for tag, i, i_end, j, j_end in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[i:i_end])
                continue
            yield from (f"-{line}" for line in before[i:i_end])
            yield from (f"+{line}" for line in after[j:j_end])


_PRINT: dict[type, Callable[[str, Any], str]] = {Function: print_function, TensorProgram: print_program}


def print_definition(name: str, definition: Definition) -> str:
    """A definition as text; large constants by names and hashes only."""
    if isinstance(definition, ExternFunction):
        return f"extern {name}: {definition.symbol}"
    return _PRINT[type(definition)](name, definition)
