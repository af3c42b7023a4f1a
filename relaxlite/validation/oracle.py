"""What a module computes, and how far rounding may move each element of it.

No fixed tolerance fits every model: sums of thousands of terms, differences of nearly equal numbers and divisions by
what is left of them differ in the last digits that they have, and a comparison or an argmax that hangs on such a digit
gives another result altogether. So the bound is measured. The module runs again some times, with every float that goes
in, and every float that an operator computes, nudged at random by a few units in its last place (Monte Carlo
arithmetic: Parker, "Monte Carlo Arithmetic", 1997). How far that moves an element is how little it is determined; an
integer, a shape or a NaN that it changes is not determined at all. An op of several roundings (a norm, a product) gets
nudged operands too, for the roundings inside. What only moves elements (reshape, gather, relu) is not nudged, so that
equal elements stay equal.

A nudge brings back no digits that a rounding dropped altogether: erf(-4) in float32 is -1, so that 1 + erf(-4) is 0,
and a pass that makes one op (gelu) of the chain computes what was lost, rightly. So the module also runs once with
every intermediate in float64: an op that rounds less often than the chain that it stands for lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import RelaxliteError
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Call
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.types import TensorType, Type

Externs = Mapping[str, Callable[..., Any]]

NUDGE = {"float16": 1.0, "bfloat16": 1.0, "float32": 4.0, "float64": 4.0}  # units in the last place
RUNS = 2
_ROUNDED_ONCE = frozenset((
    "add", "subtract", "multiply", "divide", "sqrt", "cast", "fmod", "floor", "ceil", "round", "sign",
))  # fmt: skip


def epsilon(dtype: str) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


@dataclass(frozen=True, slots=True)
class Expected:
    """Results, and for each element how far it may be off: 0 for an integer that is determined, else inf."""

    values: tuple[Any, ...]
    spread: tuple[Any, ...]  # float64, of the shapes of `values`


@dataclass(frozen=True, slots=True)
class Failed:
    """The module stops with an error: of its own run-time checks, or (`is_check` false) because the interpreter has no
    meaning for what it does."""

    error: Exception
    is_check: bool


def flat(result: Any) -> tuple[Any, ...]:
    """The tensors of a result, those of nested tuples included."""
    if isinstance(result, tuple):
        return tuple(leaf for item in result for leaf in flat(item))
    return (np.asarray(result),)


def spread_of(
    module: IRModule, args: Sequence[Any], values: tuple[Any, ...], externs: Externs, seed: int, runs: int = RUNS
) -> tuple[Any, ...] | None:
    """How far rounding moves each element of `values`; None when it changes shapes or stops the run."""
    spread = [np.zeros(v.shape) for v in values]
    changes: list[_Nudge | _Widen] = [_Nudge(np.random.default_rng((seed, run))) for run in range(runs)]
    for change in (*changes, _Widen()):
        try:
            found = flat(Interpreter(module, externs, around_call=change.call).run("main", *map(change.value, args)))
        except (RelaxliteError, ValueError, IndexError, ArithmeticError):  # which hangs on the last digit of a number
            return None
        if any(a.shape != b.shape for a, b in zip(found, values, strict=True)):
            return None
        for most, got, want in zip(spread, found, values, strict=True):
            np.maximum(most, distance(got, want), out=most)
    return tuple(spread)


def distance(got: Any, want: Any) -> Any:
    """|got - want| as float64; inf where only one is NaN, where infinities differ, and for integers that differ."""
    if not dtypes.is_float(str(dtypes.from_numpy(want.dtype))):
        return np.where(got == want, 0.0, np.inf)
    wide_got, wide_want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(all="ignore"):
        off = np.abs(wide_got - wide_want)
    same = (wide_got == wide_want) | (np.isnan(wide_got) & np.isnan(wide_want))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


class _Nudge:
    """Moves floats by a few units in their last place."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        result = run(args)
        if not any(map(_float_dtype, result if isinstance(result, tuple) else (result,))):
            return result
        nudged = [self.value(arg) for arg in args]
        moved = run(nudged)
        if _only_moves(nudged, moved):
            return result
        if isinstance(call.callee, Op) and call.callee.name in _ROUNDED_ONCE:
            return self._moved(result, 0.0)
        results = result if isinstance(result, tuple) else (result,)
        floor = _magnitude([*args, *results])
        if not isinstance(result, tuple):
            return self._moved(moved, floor)
        return tuple(self._moved(m, floor) if _float_dtype(r) else r for m, r in zip(moved, result, strict=True))

    def value(self, value: Any) -> Any:
        """A floating argument, relative to itself."""
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        return value if _float_dtype(value) is None else self._moved(value, 0.0)

    def _moved(self, value: Any, floor: float) -> Any:
        """`floor`: what a unit in the last place is at least relative to, as approximations have absolute errors."""
        dtype = dtypes.from_numpy(value.dtype) or ""
        wide = np.asarray(value, np.float64)
        unit = NUDGE[dtype] * epsilon(dtype) * np.maximum(np.abs(wide), floor)
        with np.errstate(all="ignore"):
            moved = wide + unit * self._rng.uniform(-1, 1, wide.shape)
            moved = np.where(np.isfinite(wide), moved, wide)
            moved = np.where((wide == 0) & (floor == 0) & (self._rng.random(wide.shape) < 0.5), -wide, moved)
            return moved.astype(value.dtype)


class _Widen:
    """Keeps what ops compute in float64. The interpreter, which checks types, sees it rounded; a cast does round."""

    def __init__(self) -> None:
        self._wide: dict[int, tuple[Any, Any]] = {}  # (rounded, wide) by the id of `rounded`, which stays alive with it

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        if not isinstance(call.callee, Op):  # a tensor program has buffers of its own types
            return run(args)
        result = run([self._widened(arg) for arg in args])
        if not isinstance(result, tuple):
            return self._rounded(result, call.ty)
        types = result_types(call.ty)
        return tuple(map(self._rounded, result, types)) if len(types) == len(result) else result

    def value(self, value: Any) -> Any:
        return value

    def _widened(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._widened, value))
        if _float_dtype(value) is None:
            return value
        known = self._wide.get(id(value))
        return value.astype(np.float64) if known is None else known[1]

    def _rounded(self, wide: Any, ty: Type) -> Any:
        """`wide` as the dtype that the module gives it."""
        dtype = _float_dtype(wide)
        if dtype is None or not isinstance(ty, TensorType) or ty.dtype == dtype:
            return wide
        with np.errstate(all="ignore"):
            rounded = wide.astype(dtypes.to_numpy(ty.dtype))
        self._wide[id(rounded)] = (rounded, wide)
        return rounded


def _float_dtype(value: Any) -> str | None:
    dtype = dtypes.from_numpy(value.dtype) if isinstance(value, np.ndarray) else None
    return dtype if dtype is not None and dtypes.is_float(dtype) else None


def _magnitude(values: Sequence[Any]) -> float:
    """The largest finite magnitude of the floats, up to 1."""
    found = 0.0
    for value in values:
        if _float_dtype(value) is not None:
            wide = np.abs(np.asarray(value, np.float64))
            found = max(found, float(wide[np.isfinite(wide)].max(initial=0.0)))
    return min(found, 1.0)


def _only_moves(args: Sequence[Any], result: Any) -> bool:
    """Whether each element is one of the operands', 0 or 1, perhaps negated."""
    if isinstance(result, tuple):
        return all(_only_moves(args, item) for item in result)
    if _float_dtype(result) is None:
        return True
    same = [
        np.asarray(a, np.float64).reshape(-1) for a in args if isinstance(a, np.ndarray) and a.dtype == result.dtype
    ]
    known = np.abs(np.concatenate([*same, np.array([0.0, 1.0])]))
    magnitudes = np.abs(np.asarray(result, np.float64))
    return bool(np.isin(magnitudes[~np.isnan(magnitudes)], known).all())
