"""The memory plan put to the test while a model runs (RELAXLITE_CHECK_MEMORY=1): the interpreter watches all memory.

What is made in an arena is poisoned first, for what lay there before must be dead. After each step the contents of its
operands are known by a checksum; a step that reads a tensor whose contents have changed since, through no step that had
it as an operand, is an error that names both. So a plan in which two living tensors share bytes is found at the first
wrong read, whatever the values are. A part of a tensor (a view of it) counts as a tensor of its own: writing a part of
what had contents makes those wrong, as a result in place does.
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
from relaxlite.runtime.memory import POISON, Memory
from relaxlite.runtime.tensor import Tensor

_READERS = ("builtin:copy", "builtin:tensor_to_shape")
_NEW = ("builtin:alloc_tensor", "builtin:view", "builtin:copy")


@dataclass(slots=True, eq=False)
class _Piece:
    """The memory of a tensor that the call has made; known since it was last an operand."""

    tensor: Tensor
    name: str
    nbytes: int
    whole: _Piece | None
    checksum: int | None = None  # None: nobody has used it yet
    used: int = -1  # when, counted in steps that have run
    at: int = -1  # the instruction that did
    made: int = -1  # when, and by which instruction
    made_at: int = -1

    def overlaps(self, other: _Piece) -> bool:
        mine, others = self.tensor.ptr, other.tensor.ptr
        return max(mine, others) < min(mine + self.nbytes, others + other.nbytes)

    def is_part_of(self, other: _Piece) -> bool:
        return self is other or (self.whole is not None and self.whole.is_part_of(other))

    def sum(self) -> int:
        return zlib.crc32((ctypes.c_char * self.nbytes).from_address(self.tensor.ptr))


class WatchedArenas(list[Memory]):
    """The arenas of one activation of a function, and all that lies in them."""

    def __init__(self, function: VMFunction) -> None:
        self._function = function
        self._pieces: dict[int, _Piece] = {}  # by id of the tensor
        self._kept: list[Tensor] = []  # so that ids stay theirs
        self._steps = 0

    def before(self, call: Call, at: int, values: list[Any]) -> None:
        """Operands must be as they were left, and unrelated ones apart."""
        self._steps += 1
        if call.callee.startswith("builtin:") and call.callee not in _READERS:
            return
        pieces = list(self._pieces_of(values))
        for k, piece in enumerate(pieces):
            self._verify(piece, at)
            for other in pieces[:k]:
                if piece.overlaps(other) and not (piece.is_part_of(other) or other.is_part_of(piece)):
                    raise self._error(at, f"the operands {piece.name} and {other.name} overlap")

    def after(self, call: Call, at: int, values: list[Any], result: Any) -> None:
        if call.callee == "builtin:reshape" and id(values[0]) in self._pieces:
            self._know(result, self._pieces[id(values[0])])
        elif call.callee in _NEW:
            self._make(call, at, values, result)
        if not call.callee.startswith("builtin:"):
            self._learn(list(self._pieces_of(values)), at)

    def _learn(self, pieces: list[_Piece], at: int) -> None:
        """What the operands hold now; but a whole beside its part is to hold what it held, or not to be read again."""
        for piece in pieces:
            if not any(other is not piece and other.is_part_of(piece) for other in pieces):
                piece.checksum, piece.used, piece.at = piece.sum(), self._steps, at

    def verify_result(self, value: Any) -> None:
        """What the function returns must be as it was left."""
        for piece in self._pieces_of([value]):
            self._verify(piece, len(self._function.instructions) - 1)

    def _make(self, call: Call, at: int, values: list[Any], tensor: Tensor) -> None:
        whole = None
        if call.callee == "builtin:view":
            whole = self._pieces.get(id(values[0])) if isinstance(values[0], Tensor) else None
            if isinstance(values[0], Tensor) and whole is None:
                return  # a part of what the caller owns
        nbytes = math.prod(tensor.shape) * dtypes.itemsize(tensor.dtype)
        piece = _Piece(tensor, f"r{call.dst}", nbytes, whole, made=self._steps, made_at=at)
        if call.callee == "builtin:copy":
            piece.checksum, piece.used, piece.at = piece.sum(), self._steps, at
        elif whole is None:
            ctypes.memset(tensor.ptr, POISON, nbytes)
        self._know(tensor, piece)

    def _know(self, tensor: Tensor, piece: _Piece) -> None:
        self._pieces[id(tensor)] = piece
        self._kept.append(tensor)

    def _pieces_of(self, values: list[Any] | tuple[Any, ...]) -> Iterator[_Piece]:
        for value in values:
            if isinstance(value, tuple):
                yield from self._pieces_of(value)
            elif id(value) in self._pieces:
                yield self._pieces[id(value)]

    def _verify(self, piece: _Piece, at: int) -> None:
        if piece.checksum is None or piece.sum() == piece.checksum:
            return
        others = [p for p in self._pieces.values() if p is not piece and p.overlaps(piece)]
        other = max(others, key=lambda p: max(p.used, p.made), default=None)
        culprit = "somebody else"
        if other is not None:
            culprit = f"{other.name} in {self._text(other.at if other.used > other.made else other.made_at)}"
        raise self._error(at, f"{piece.name}, last used by {self._text(piece.at)}, has been overwritten by {culprit}")

    def _error(self, at: int, message: str) -> ExecutionError:
        return ExecutionError(
            f"the memory plan is wrong: function '{self._function.name}', {self._text(at)}: {message}"
        )

    def _text(self, at: int) -> str:
        return f"{at}: {instruction_text(self._function.instructions[at])}"


def watched(step: Callable[[list[Any], Any], None], call: Call, at: int) -> Callable[[list[Any], Any], None]:
    """The step of an instruction with checks before and after it."""
    slots = [operand.index for operand in call.operands if isinstance(operand, Reg)]

    def run(registers: list[Any], arenas: WatchedArenas) -> None:
        values = [registers[slot] for slot in slots]
        arenas.before(call, at, values)
        step(registers, arenas)
        arenas.after(call, at, values, registers[call.dst] if call.dst >= 0 else None)

    return run
