"""Oracle of validation: the results of a module, and how far rounding may move each element.

No fixed tolerance fits every model: sums of thousands of terms, differences of nearly equal numbers, and quotients of
such differences keep few correct digits, and a comparison or an argmax of such numbers may give another result
altogether. So the tolerance is measured. The module runs several times with every floating input, and every floating
result of an op, perturbed at random by a few units in its last place (Monte Carlo arithmetic: Parker, "Monte Carlo
Arithmetic", 1997). The movement of an element is its rounding error; an integer, a shape or a NaN that changes is
undetermined. An op with several roundings (a norm, a product) also gets perturbed operands, for the roundings inside. A
sum is computed in another order, or perturbed in proportion to its number of terms (sum_lengths.py). Data movement
(reshape, gather, relu) is not perturbed, so that equal elements stay equal. Whole numbers that are exact are not
perturbed either, as they are counts. In some of many runs, numbers are rounded to a common grid instead, on which
nearly equal numbers meet.

A perturbation does not restore digits that a rounding has dropped: erf(-4) in float32 is -1, so that 1 + erf(-4) is 0,
and a pass that fuses the chain into one op (gelu) correctly computes a nonzero result. So the module also runs once
with every intermediate in float64: an op with fewer roundings than the chain that it replaces lies between the two
results.
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
from relaxlite.validation.rounding import Perturb, Widen

Externs = Mapping[str, Callable[..., Any]]

NUM_RUNS = 2
TIE_INTERVAL = 4  # one run in this many rounds nearly equal numbers to equal ones


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected results, and the rounding error of each element: inf if undetermined, 0 for determined integers."""

    values: tuple[Any, ...]
    rounding_error: tuple[Any, ...]  # float64, of the shapes of `values`


@dataclass(frozen=True, slots=True)
class FailedRun:
    """Execution that stopped with an error.

    `is_check`: a run-time check of the module failed; otherwise the interpreter cannot execute the module. As an
    expectation: other roundings stop the run or change shapes, so that nothing is expected.
    """

    error: Exception
    is_check: bool


def flatten(result: Any) -> tuple[Any, ...]:
    """Flatten a result to its tensors, those of nested tuples included."""
    if isinstance(result, tuple):
        return tuple(leaf for item in result for leaf in flatten(item))
    return (np.asarray(result),)


def measure_rounding_error(
    module: IRModule,
    args: Sequence[Any],
    values: tuple[Any, ...],
    externs: Externs,
    seed: int,
    runs: int = NUM_RUNS,
    entry: str = "main",
    is_enough: Callable[[tuple[Any, ...]], bool] = lambda deviations: False,
) -> tuple[Any, ...] | FailedRun:
    """Measure how far rounding moves each element of `values`, the results of function `entry` for `args`.

    Returns FailedRun if other roundings change shapes or stop the run. `is_enough` ends the runs early; more runs can
    only increase the errors.
    """
    deviations = [np.zeros(v.shape) for v in values]
    rngs = [np.random.default_rng((seed, run)) for run in range(runs)]
    perturbations: list[Perturb | Widen] = [
        Perturb(rng, module, ties=run % TIE_INTERVAL == TIE_INTERVAL - 1) for run, rng in enumerate(rngs)
    ]
    for perturbation in (*perturbations, Widen()):
        interpreter = Interpreter(
            module, externs, around_call=perturbation.call, program_runner=perturbation.run_program
        )
        try:
            outputs = flatten(interpreter.run(entry, *map(perturbation.value, args)))
        except (RelaxliteError, ValueError, IndexError, ArithmeticError) as error:
            return FailedRun(error, is_check=False)
        for k, (got, want) in enumerate(zip(outputs, values, strict=True)):
            if got.shape != want.shape:
                problem = f"result {k} is of shape {want.shape}, and of {got.shape} if rounded otherwise"
                return FailedRun(RelaxliteError(problem), is_check=False)
        for deviation, got, want in zip(deviations, outputs, values, strict=True):
            np.maximum(deviation, absolute_error(got, want), out=deviation)
        if is_enough(tuple(deviations)):
            break
    return tuple(deviations)


def absolute_error(got: Any, want: Any) -> Any:
    """Absolute difference |got - want| as float64.

    It is inf where only one is NaN, where infinities differ, and for integers that differ.
    """
    if not dtypes.is_float(str(dtypes.from_numpy(want.dtype))):
        return np.where(got == want, 0.0, np.inf)
    wide_got, wide_want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(all="ignore"):
        difference = np.abs(wide_got - wide_want)
    same = (wide_got == wide_want) | (np.isnan(wide_got) & np.isnan(wide_want))
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
