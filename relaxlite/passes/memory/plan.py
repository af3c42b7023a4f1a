"""Memory plan as plain data in terms of the symbols, for display, checks and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.passes.memory.arena_order import nearest_legal_value
from relaxlite.records import dataclass

_EXAMPLES = (1, 16, 128, 1024)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """Tensor of `nbytes` bytes at `offset` of the arena, live from step `first` to step `last`, both included.

    `inside` names the tensor whose memory this tensor shares: it is a view, an in-place result, or the counterpart in
    the other branch of an If. In the steps of `pauses` a branch runs that excludes the tensor.
    """

    name: str
    nbytes: SymExpr
    offset: SymExpr
    first: int
    last: int
    inside: str | None = None
    pauses: tuple[tuple[int, int], ...] = ()

    def steps(self) -> Iterator[int]:
        """Steps in which the tensor is live."""
        for step in range(self.first, self.last + 1):
            if not any(first <= step <= last for first, last in self.pauses):
                yield step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Arena of one function: `steps` describes the bindings in order, `tensors` the tensors in the arena.

    `max_bytes`: its upper bound in bytes, None where a symbol in its size has none. `outside`: names of
    intermediates with memory of their own, as their size or lifetime is known only later.
    """

    function: str
    steps: tuple[str, ...]
    arena: SymExpr  # bytes
    tensors: tuple[PlannedTensor, ...]
    max_bytes: int | None = None
    outside: tuple[str, ...] = ()

    def arena_bytes(self, at: Mapping[SymVar, int]) -> int:
        """Size of the arena in bytes at these sizes."""
        return evaluate(self.arena, at)

    def live_bytes(self, at: Mapping[SymVar, int]) -> list[int]:
        """Bytes of the live tensors in each step. Tensors inside others are not counted again."""
        totals = [0] * len(self.steps)
        for tensor in self.tensors:
            if tensor.inside is None:
                size = evaluate(tensor.nbytes, at)
                for step in tensor.steps():
                    totals[step] += size
        return totals

    def lower_bound(self, at: Mapping[SymVar, int]) -> int:
        """Lower bound in bytes of any plan: the largest sum of tensors live at once."""
        return max(self.live_bytes(at), default=0)

    def summary(self) -> dict[str, Any]:
        """Metadata for an executable: the arena as text, its upper bound, and bytes at example sizes."""
        sizes = (self.arena, *(tensor.nbytes for tensor in self.tensors))
        variables = tuple(dict.fromkeys(v for size in sizes for v in size.free_vars()))
        samples = dict.fromkeys(
            tuple(nearest_legal_value(v, size) for v in variables) for size in _EXAMPLES if variables
        )
        examples = []
        for values in samples:
            at = dict(zip(variables, values, strict=True))
            named = {v.name: size for v, size in at.items()}
            with suppress(ZeroDivisionError):  # these sizes are illegal
                examples.append({"sizes": named, "bytes": self.arena_bytes(at), "least": self.lower_bound(at)})
        result = {"arena_bytes": str(self.arena), "at_most": self.max_bytes, "outside": len(self.outside)}
        return {**result, "examples": examples}
