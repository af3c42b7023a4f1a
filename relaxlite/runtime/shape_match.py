"""The builtin match_shape: binds symbols in the heap to sizes of a tensor, and checks the other sizes."""

from __future__ import annotations

from typing import Any

from relaxlite.errors import ExecutionError, InputError, ShapeMismatchError
from relaxlite.runtime.executable import bound_problem

_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1


def _int64_bounds(slot: int, name: str, lower: int | None, upper: int | None, divisor: int) -> tuple[Any, ...]:
    return slot, name, _I64_MIN if lower is None else lower, _I64_MAX if upper is None else upper, divisor


class ShapeMatch:
    """A decoded match_shape: binds symbols in the heap first, then checks the other dimensions."""

    def __init__(self, spec: tuple[Any, ...], what: str) -> None:
        self.what, self.rank = what, len(spec)
        text_at = {"bind": 2, "check": 2, "const": 1, "any": 0}
        self.expected = ", ".join(str(item[text_at[item[0]]]) for item in spec)
        items = list(enumerate(spec))
        self.binds = [(axis, *_int64_bounds(*item[1:])) for axis, item in items if item[0] == "bind"]
        self.checks = [(axis, item[1], item[2]) for axis, item in items if item[0] == "check"]
        self.consts = [(axis, item[1]) for axis, item in items if item[0] == "const"]

    def check(self, shape: tuple[int, ...], values: Any) -> None:
        if len(shape) != self.rank:
            raise self._error(f"expects shape ({self.expected}) of rank {self.rank}, got {shape} of rank {len(shape)}")
        for axis, slot, name, lower, upper, divisor in self.binds:
            size = shape[axis]
            if not lower <= size <= upper or size % divisor:
                raise self._dim_error(axis, shape, bound_problem(name, (lower, upper, divisor), size) or "")
            values[slot] = size
        for axis, size in self.consts:
            if shape[axis] != size:
                raise self._dim_error(axis, shape, f"expects {size}, got {shape[axis]}")
        for axis, slot, text in self.checks:
            if shape[axis] != values[slot]:
                raise self._dim_error(axis, shape, f"expects {text} = {values[slot]}, got {shape[axis]}")

    def _dim_error(self, axis: int, shape: tuple[int, ...], problem: str) -> ExecutionError:
        return self._error(f"dimension {axis} of shape {shape}: {problem}")

    def _error(self, problem: str) -> ExecutionError:
        kind = InputError if self.what.startswith("argument ") else ShapeMismatchError
        return kind(f"{self.what}: {problem}")
