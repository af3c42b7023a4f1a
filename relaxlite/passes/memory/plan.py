"""Memory plans as plain data in terms of symbols, for display, checks and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.passes.memory.arena_order import nearest
from relaxlite.records import dataclass

_EXAMPLES = (1, 16, 128, 1024)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of `nbytes` bytes at `offset` of the arena, live from step `first` to step `last`, both included.

    `inside` names the tensor whose memory this one is part of or takes over (a view, a result computed in place, the
    result of another branch of an If). In the steps of `pauses` another branch runs than the one that defines the
    tensor.
    """

    name: str
    nbytes: SymExpr
    offset: SymExpr
    first: int
    last: int
    inside: str | None = None
    pauses: tuple[tuple[int, int], ...] = ()

    def steps(self) -> Iterator[int]:
        """Yield the steps in which the tensor is live."""
        for step in range(self.first, self.last + 1):
            if not any(first <= step <= last for first, last in self.pauses):
                yield step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The arena of one function: `steps`: texts of the steps in order; `tensors`: the tensors in the arena.

    `most`: upper bound of the arena in bytes, None where a symbol that it depends on has no upper bound.
    `outside`: names of intermediates outside the arena, as their sizes or live ranges are known only later.
    """

    function: str
    steps: tuple[str, ...]
    arena: SymExpr  # bytes
    tensors: tuple[PlannedTensor, ...]
    most: int | None = None
    outside: tuple[str, ...] = ()

    def arena_bytes(self, at: Mapping[SymVar, int]) -> int:
        """Return the bytes of the arena at values of the symbols."""
        return evaluate(self.arena, at)

    def live_bytes(self, at: Mapping[SymVar, int]) -> list[int]:
        """Return, for each step, the bytes of its live tensors; tensors inside others count with these."""
        totals = [0] * len(self.steps)
        for tensor in self.tensors:
            if tensor.inside is None:
                size = evaluate(tensor.nbytes, at)
                for step in tensor.steps():
                    totals[step] += size
        return totals

    def lower_bound(self, at: Mapping[SymVar, int]) -> int:
        """Return the bytes that any plan needs: the largest sum of tensors live at once."""
        return max(self.live_bytes(at), default=0)

    def summary(self) -> dict[str, Any]:
        """Return the summary stored in an executable: arena size as text, its bound, and bytes at example sizes."""
        sizes = (self.arena, *(tensor.nbytes for tensor in self.tensors))
        variables = tuple(dict.fromkeys(v for size in sizes for v in size.free_vars()))
        samples = dict.fromkeys(tuple(nearest(v, size) for v in variables) for size in _EXAMPLES if variables)
        examples = []
        for values in samples:
            at = dict(zip(variables, values, strict=True))
            named = {v.name: size for v, size in at.items()}
            with suppress(ZeroDivisionError):  # no sizes
                examples.append({"sizes": named, "bytes": self.arena_bytes(at), "least": self.lower_bound(at)})
        result = {"arena_bytes": str(self.arena), "at_most": self.most, "outside": len(self.outside)}
        return {**result, "examples": examples}
