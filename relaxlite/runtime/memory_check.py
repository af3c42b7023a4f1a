"""Run-time validation of the memory plan (RELAXLITE_CHECK_MEMORY=1), in the bytecode interpreter.

A tensor created in an arena is poisoned, as earlier contents of its bytes must be dead. After each step, checksums of
the operands are recorded. A step that reads a tensor whose contents have changed since, by a step that did not have it
as an operand, is an error that names both steps. So two live tensors with common bytes are detected at the first wrong
read, whatever the values. A view counts as a tensor of its own: writing it invalidates the contents of the whole.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from relaxlite import dtypes
from relaxlite.errors import ExecutionError
from relaxlite.records import dataclass
from relaxlite.runtime.executable import Call, Reg, VMFunction, instruction_text
from relaxlite.runtime.memory import POISON, Block
from relaxlite.runtime.tensor import Tensor

_READERS = ("builtin:copy", "builtin:tensor_to_shape")
_NEW = ("builtin:alloc_tensor", "builtin:view", "builtin:copy")


@dataclass(slots=True, eq=False)
class _Region:
    """Memory of a tensor created in this call, with its state at its last use as an operand."""

    tensor: Tensor
    name: str
    nbytes: int
    parent: _Region | None
    checksum: int | None = None  # None: not used yet
    used_step: int = -1  # step number of the last use
    used_at: int = -1  # instruction of the last use
    created_step: int = -1  # step number of the creation
    created_at: int = -1  # instruction of the creation

    def overlaps(self, other: _Region) -> bool:
        start, other_start = self.tensor.ptr, other.tensor.ptr
        return max(start, other_start) < min(start + self.nbytes, other_start + other.nbytes)

    def is_part_of(self, other: _Region) -> bool:
        return self is other or (self.parent is not None and self.parent.is_part_of(other))

    def sum(self) -> int:
        return zlib.crc32((ctypes.c_char * self.nbytes).from_address(self.tensor.ptr))


class WatchedArenas(list[Block]):
    """Arenas of one activation of a function, and the tracked regions in them."""

    def __init__(self, function: VMFunction) -> None:
        self._function = function
        self._regions: dict[int, _Region] = {}  # by id of the tensor
        self._tensors: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self._steps = 0

    def before(self, call: Call, at: int, values: list[Any]) -> None:
        """Check the operands of an instruction: contents unchanged since their last use, unrelated operands
        disjoint."""
        self._steps += 1
        if call.callee.startswith("builtin:") and call.callee not in _READERS:
            return
        regions = list(self._regions_of(values))
        for k, region in enumerate(regions):
            self._verify(region, at)
            for other in regions[:k]:
                if region.overlaps(other) and not (region.is_part_of(other) or other.is_part_of(region)):
                    raise self._error(at, f"the operands {region.name} and {other.name} overlap")

    def after(self, call: Call, at: int, values: list[Any], result: Any) -> None:
        """Track the result of an instruction, and record the checksums of its operands."""
        if call.callee == "builtin:reshape" and id(values[0]) in self._regions:
            self._track(result, self._regions[id(values[0])])
        elif call.callee in _NEW:
            self._create(call, at, values, result)
        if not call.callee.startswith("builtin:"):
            self._record_checksums(list(self._regions_of(values)), at)

    def _record_checksums(self, regions: list[_Region], at: int) -> None:
        """Record the operands' checksums, except of a tensor with a view of it among the operands, which may not
        change."""
        for region in regions:
            if not any(other is not region and other.is_part_of(region) for other in regions):
                region.checksum, region.used_step, region.used_at = region.sum(), self._steps, at

    def verify_result(self, value: Any) -> None:
        """Check that the returned tensors are unchanged since their last use."""
        for region in self._regions_of([value]):
            self._verify(region, len(self._function.instructions) - 1)

    def _create(self, call: Call, at: int, values: list[Any], tensor: Tensor) -> None:
        parent = None
        if call.callee == "builtin:view":
            parent = self._regions.get(id(values[0])) if isinstance(values[0], Tensor) else None
            if isinstance(values[0], Tensor) and parent is None:
                return  # a view of a tensor of the caller
        nbytes = math.prod(tensor.shape) * dtypes.itemsize(tensor.dtype)
        region = _Region(tensor, f"r{call.dst}", nbytes, parent, created_step=self._steps, created_at=at)
        if call.callee == "builtin:copy":
            region.checksum, region.used_step, region.used_at = region.sum(), self._steps, at
        elif parent is None:
            ctypes.memset(tensor.ptr, POISON, nbytes)
        self._track(tensor, region)

    def _track(self, tensor: Tensor, region: _Region) -> None:
        self._regions[id(tensor)] = region
        self._tensors.append(tensor)

    def _regions_of(self, values: list[Any] | tuple[Any, ...]) -> Iterator[_Region]:
        for value in values:
            if isinstance(value, tuple):
                yield from self._regions_of(value)
            elif id(value) in self._regions:
                yield self._regions[id(value)]

    def _verify(self, region: _Region, at: int) -> None:
        if region.checksum is None or region.sum() == region.checksum:
            return
        overlapping = [p for p in self._regions.values() if p is not region and p.overlaps(region)]
        last = max(overlapping, key=lambda p: max(p.used_step, p.created_step), default=None)
        culprit = "somebody else"
        if last is not None:
            culprit = (
                f"{last.name} in {self._text(last.used_at if last.used_step > last.created_step else last.created_at)}"
            )
        raise self._error(
            at, f"{region.name}, last used by {self._text(region.used_at)}, has been overwritten by {culprit}"
        )

    def _error(self, at: int, message: str) -> ExecutionError:
        return ExecutionError(
            f"the memory plan is wrong: function '{self._function.name}', {self._text(at)}: {message}"
        )

    def _text(self, at: int) -> str:
        return f"{at}: {instruction_text(self._function.instructions[at])}"


def watched(step: Callable[[list[Any], Any], None], call: Call, at: int) -> Callable[[list[Any], Any], None]:
    """Wrap the step of an instruction in checks before and after it."""
    slots = [operand.index for operand in call.operands if isinstance(operand, Reg)]

    def run(registers: list[Any], arenas: WatchedArenas) -> None:
        values = [registers[slot] for slot in slots]
        arenas.before(call, at, values)
        step(registers, arenas)
        arenas.after(call, at, values, registers[call.dst] if call.dst >= 0 else None)

    return run
