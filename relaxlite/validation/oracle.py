"""What a module computes, and how far rounding may move each element of it.

No fixed tolerance fits every model: sums of thousands of terms, differences of nearly equal numbers and divisions by
what is left of them differ in the last digits that they have, and a comparison or an argmax that hangs on such a digit
gives another result altogether. So the bound is measured. The module runs again some times, with every float that goes
in, and every float that an operator computes, nudged at random by a few units in its last place (Monte Carlo
arithmetic: Parker, "Monte Carlo Arithmetic", 1997). How far that moves an element is how little it is determined; an
integer, a shape or a NaN that it changes is not determined at all. An op of several roundings (a norm, a product) gets
nudged operands too, for the roundings inside; a sum is added up in another order, or moves by the more the more terms
it has (long_sums.py). What only moves elements (reshape, gather, relu) is not nudged, so that equal elements stay
equal, nor are whole numbers that no rounding made so: they count something. In some runs of many, numbers move onto a
grid instead, where those that are nearly equal meet.

A nudge brings back no digits that a rounding dropped altogether: erf(-4) in float32 is -1, so that 1 + erf(-4) is 0,
and a pass that makes one op (gelu) of the chain computes what was lost, rightly. So the module also runs once with
every intermediate in float64: an op that rounds less often than the chain that it stands for lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import RelaxliteError
from relaxlite.ir.module import IRModule
from relaxlite.records import dataclass
from relaxlite.validation.rounding import Nudge, Widen

Externs = Mapping[str, Callable[..., Any]]

RUNS = 2
TIES = 4  # one of so many runs makes equal what is nearly so


@dataclass(frozen=True, slots=True)
class Expected:
    """Results, and for each element how far it may be off: 0 for an integer that is determined, else inf."""

    values: tuple[Any, ...]
    spread: tuple[Any, ...]  # float64, of the shapes of `values`


@dataclass(frozen=True, slots=True)
class Failed:
    """The module stops with an error: of its own run-time checks, or (`is_check` false) because the interpreter has no
    meaning for what it does. As what is expected: nothing is, as other roundings stop the run or change shapes."""

    error: Exception
    is_check: bool


def flat(result: Any) -> tuple[Any, ...]:
    """The tensors of a result, those of nested tuples included."""
    if isinstance(result, tuple):
        return tuple(leaf for item in result for leaf in flat(item))
    return (np.asarray(result),)


def spread_of(
    module: IRModule,
    args: Sequence[Any],
    values: tuple[Any, ...],
    externs: Externs,
    seed: int,
    runs: int = RUNS,
    entry: str = "main",
    is_enough: Callable[[tuple[Any, ...]], bool] = lambda spread: False,
) -> tuple[Any, ...] | Failed:
    """How far rounding moves each element of `values`, which function `entry` gives for `args`; Failed when it changes
    shapes or stops the run. `is_enough` ends the runs early: more of them move elements further only."""
    spread = [np.zeros(v.shape) for v in values]
    rngs = [np.random.default_rng((seed, run)) for run in range(runs)]
    changes: list[Nudge | Widen] = [Nudge(rng, module, ties=run % TIES == TIES - 1) for run, rng in enumerate(rngs)]
    for change in (*changes, Widen()):
        interpreter = Interpreter(module, externs, around_call=change.call, program_runner=change.run_program)
        try:
            result = flat(interpreter.run(entry, *map(change.value, args)))
        except (RelaxliteError, ValueError, IndexError, ArithmeticError) as error:
            return Failed(error, is_check=False)
        for k, (got, want) in enumerate(zip(result, values, strict=True)):
            if got.shape != want.shape:
                problem = f"result {k} is of shape {want.shape}, and of {got.shape} if rounded otherwise"
                return Failed(RelaxliteError(problem), is_check=False)
        for most, got, want in zip(spread, result, values, strict=True):
            np.maximum(most, distance(got, want), out=most)
        if is_enough(tuple(spread)):
            break
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
