"""Validation of each pass: the module computes the same before and after it.

The interpreter executes the module at sizes within the bounds and divisors of the symbols, 0 and 1 among them. A
run-time check that fails must fail on both sides; a check in dead code may disappear with it.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from relaxlite.codegen.interpreter import Interpreter, bind
from relaxlite.errors import InvalidArgumentError, OutOfBoundsError, RelaxliteError, ValidationError
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Function
from relaxlite.ir.module import IRModule
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.graph.fold_shapes import fold_shapes
from relaxlite.passes.manager import Pass
from relaxlite.passes.memory.donate import donated_params
from relaxlite.records import dataclass
from relaxlite.validation.coverage import MAX_UNDETERMINED, Coverage, coverage_of
from relaxlite.validation.difference import Difference, compare
from relaxlite.validation.oracle import Expected, Externs, FailedRun, flatten, measure_rounding_error
from relaxlite.validation.record import write_record
from relaxlite.validation.running import CachedRunner
from relaxlite.validation.samples import EXTRA_STYLES, STYLES, Sample, Symbols, draw_sample, symbol_values

ENTRY = "main"
INTEGER_MAGNITUDES = (10, 3, 2)  # of random integers
MAX_SECONDS = 4.0  # per run of the module; larger sizes would take minutes per pass and are skipped
CONFIRMATION_RUNS = 24  # runs of the oracle that confirm a difference

_HINT = (
    "validation compares hardly anything; give example inputs, `validate=[(array, ...)]` or `--validate --input "
    "NAME=FILE`, or bounds that the model needs"
)
_ELEMENT_CHECK = re.compile(r"index -?\d* ?is out of (range|bounds) for axis|lies outside of")
_NUMPY_CHECK = re.compile(r"could not be broadcast|out of bounds for axis \d+ with size [1-9]")  # 0: nothing is read

Outcome = Expected | FailedRun


@dataclass(slots=True)
class ValidationCase:
    """One sample, with the expected results and the results after the previous pass."""

    sample: Sample
    outcome: Outcome
    before: tuple[Any, ...] | FailedRun  # results after the previous pass


class Validator:
    """Checks of the passes on a module, and of the compiled model, by execution on samples.

    `inputs`: example arguments of function `entry`, each a sequence in its order; by default random arguments at sizes
    of all kinds. `externs`: Python functions that implement the library routines, by symbol. `program_runner` runs
    tensor programs in place of running.py. `folder`: where mismatches are written. `styles`: styles of sizes
    (samples.py).
    """

    def __init__(
        self,
        module: IRModule,
        *,
        inputs: Sequence[Sequence[Any]] | None = None,
        externs: Externs | None = None,
        program_runner: Callable[..., list[Any]] | None = None,
        folder: str | None = None,
        styles: Sequence[str] = STYLES,
        seed: int = 0,
        entry: str = ENTRY,
    ) -> None:
        main = module.get(entry)
        if not isinstance(main, Function):
            raise InvalidArgumentError(f"the module has no function {entry!r}")
        self.entry = entry
        self._externs, self._runner = dict(externs or {}), program_runner or CachedRunner()
        self._folder, self._seed = folder, seed
        self._original = module
        self._earlier_doubt: str | None = None
        donated = donated_params(main)
        self._donated_numbers = tuple(main.params.index(param) for param in donated)
        self._num_results = len(result_types(main.body.result.ty))
        if inputs is not None:
            self.cases = [
                self._case(sample, self._run(module, sample.args)) for sample in _example_samples(entry, main, inputs)
            ]
        else:
            drawn = [
                self._draw_case(main, v, k) for k, v in enumerate(symbol_values(main, random.Random(seed), styles))
            ]
            if styles is STYLES and 2 * sum(_has_elements(outcome) for _, outcome, _ in drawn) <= len(drawn):
                sizes = symbol_values(main, random.Random(seed), EXTRA_STYLES)
                drawn += [self._draw_case(main, values, len(drawn) + k) for k, values in enumerate(sizes)]
            fastest = min((seconds for _, outcome, seconds in drawn if _has_elements(outcome)), default=0.0)
            limit = max(MAX_SECONDS, fastest)
            self.cases = [self._case(sample, outcome) for sample, outcome, seconds in drawn if seconds <= limit]

    def doubt(self) -> str | None:
        """Reason why the validation says little: no elements, only undetermined ones, or no expected results.

        None otherwise.
        """
        if self._earlier_doubt is not None:
            return self._earlier_doubt
        coverage, with_elements = self.coverage(), [case for case in self.cases if _has_elements(case.before)]
        subject = "the model" if self.entry == ENTRY else repr(self.entry)
        if coverage.undetermined < coverage.elements:
            share = coverage.share_undetermined
            if share > MAX_UNDETERMINED:
                return f"rounding decides {share:.0%} of what {subject} gives, so {_HINT}"
            share = coverage.share_not_finite
            is_most = share > MAX_UNDETERMINED
            return f"{share:.0%} of what {subject} gives is NaN or infinite, so {_HINT}" if is_most else None
        failed = next(
            (case.outcome for case in with_elements or self.cases if isinstance(case.outcome, FailedRun)), None
        )
        if failed is None:
            reason = "gives nothing but what rounding decides" if with_elements else "gives no elements"
        else:
            reason = (
                f"stops{', if numbers are rounded otherwise,' if with_elements else ''} ({_error_text(failed.error)})"
            )
        return f"{subject} {reason} at all sizes that were tried, so {_HINT}"

    def coverage(self) -> Coverage:
        """Coverage of the samples; after a pass that rounds, of the passes behind it."""
        return coverage_of(self.entry, [(case.before, case.outcome) for case in self.cases])

    def check(self, step: Pass, before: IRModule, after: IRModule, seconds: float = 0.0) -> None:
        """Raise ValidationError, with the pass and the sizes, unless both modules compute the same."""
        if after is before or step.stage == "vm":  # the lowest stage is checked as machine code
            return
        if step.rounds:
            self._check_rounding(step, before, after)
            return
        for case in self.cases:
            result = self._run(after, case.sample.args)
            problem = self._problem(case, case.before, result, before)
            if problem is not None:
                self._fail(f"pass {step.name}", case.sample, problem, before, after)
            case.before = result

    def _check_rounding(self, step: Pass, before: IRModule, after: IRModule) -> None:
        """Check a pass that may round: shapes, types and checks stay the same.

        Later passes are compared with its result.
        """
        self._earlier_doubt = self.doubt()  # about the passes so far
        result = [self._run(after, case.sample.args) for case in self.cases]
        for case, now in zip(self.cases, result, strict=True):
            if isinstance(case.outcome, Expected):
                unbounded = tuple(np.full(np.shape(value), np.inf) for value in case.outcome.values)
                case.outcome = replace(case.outcome, rounding_error=unbounded)
            problem = self._problem(case, case.before, now, before)
            if problem is not None:
                self._fail(f"pass {step.name}", case.sample, problem, before, after)
        self._original = after
        self.cases = [self._case(case.sample, now) for case, now in zip(self.cases, result, strict=True)]

    def check_compiled(self, run: Callable[..., Any], lowered: IRModule | None = None) -> None:
        """Raise ValidationError unless the compiled model gives the results of the module.

        `lowered`: the module after all passes, recorded next to the original on a mismatch.
        """
        for case in self.cases:
            result = self._outcome(run, case.sample.args)
            problem = self._problem(case, case.before, result, self._original)
            if problem is not None:
                self._fail("the compiled code", case.sample, problem, self._original, lowered)

    # one sample

    def _draw_case(
        self, main: Function, values: Symbols, number: int
    ) -> tuple[Sample, tuple[Any, ...] | FailedRun, float]:
        """A random sample, the results of the module, and the seconds that the run took.

        Where large integers stop the run, as invalid indices do, smaller ones are drawn.
        """
        attempts: list[tuple[Sample, tuple[Any, ...] | FailedRun, float]] = []
        for magnitude in INTEGER_MAGNITUDES:
            sample = draw_sample(main, values, np.random.default_rng((self._seed, number)), magnitude)
            start = time.perf_counter()
            attempts.append((sample, self._run(self._original, sample.args), time.perf_counter() - start))
            if not isinstance(attempts[-1][1], FailedRun):
                return attempts[-1]
        return attempts[0]

    def _case(self, sample: Sample, result: tuple[Any, ...] | FailedRun) -> ValidationCase:
        if isinstance(result, FailedRun):
            return ValidationCase(sample, result, result)
        error = measure_rounding_error(self._original, sample.args, result, self._externs, self._seed, entry=self.entry)
        return ValidationCase(sample, error if isinstance(error, FailedRun) else Expected(result, error), result)

    def _run(self, module: IRModule, args: Sequence[Any]) -> tuple[Any, ...] | FailedRun:
        interpreter = Interpreter(module, self._externs, program_runner=self._runner)
        return self._outcome(partial(interpreter.run, self.entry), args)

    def _outcome(self, run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...] | FailedRun:
        """Results of a run, then the new contents of donated arguments, whether returned or stored in their arrays."""
        if not self._donated_numbers:
            return outcome_of(lambda: run(*args))
        copies = [arg.copy() if k in self._donated_numbers else arg for k, arg in enumerate(args)]
        outcome = outcome_of(lambda: run(*copies))
        if isinstance(outcome, FailedRun) or len(outcome) == self._num_results:
            return outcome
        return (*outcome, *(copies[k] for k in self._donated_numbers))

    def _problem(
        self,
        case: ValidationCase,
        before: tuple[Any, ...] | FailedRun,
        result: tuple[Any, ...] | FailedRun,
        module: IRModule,
    ) -> str | None:
        """Error text for `result`, or None; `before` is the result of `module`."""
        if isinstance(result, FailedRun) and isinstance(result.error, OutOfBoundsError):
            is_new = not (isinstance(before, FailedRun) and isinstance(before.error, OutOfBoundsError))
            return f"a run-time check is missing: {result.error}" if is_new else None
        if isinstance(before, FailedRun):
            if _ELEMENT_CHECK.search(str(before.error)) and not isinstance(result, FailedRun):
                return None  # of unused elements; the interpreter detects reads of missing elements
            if (
                isinstance(result, FailedRun)
                or not before.is_check
                or not self._fails_without_dead_code(module, case.sample.args)
            ):
                return None
            return f"a run-time check is lost: before, the run stops with {_error_text(before.error)}"
        if isinstance(result, FailedRun):
            return f"the run fails with {_error_text(result.error)}"
        if not isinstance(case.outcome, Expected):
            return None
        difference = compare(result, case.outcome)
        return None if difference is None else self._confirm(case, result, difference)

    def _confirm(self, case: ValidationCase, result: tuple[Any, ...], difference: Difference) -> str | None:
        """The difference as text if it remains after many more runs of the oracle."""
        assert isinstance(case.outcome, Expected)
        values, known_errors = case.outcome.values, case.outcome.rounding_error

        def allowing(errors: tuple[Any, ...]) -> Expected:
            """The expectation with enlarged errors."""
            return Expected(values, tuple(map(np.maximum, known_errors, errors)))

        errors = measure_rounding_error(
            self._original, case.sample.args, values, self._externs, self._seed + 1, CONFIRMATION_RUNS, self.entry,
            is_enough=lambda errors: compare(result, allowing(errors)) is None,
        )  # fmt: skip
        case.outcome = errors if isinstance(errors, FailedRun) else allowing(errors)
        confirmed = compare(result, case.outcome) if isinstance(case.outcome, Expected) else None
        return None if confirmed is None else str(confirmed)

    def _fails_without_dead_code(self, module: IRModule, args: Sequence[Any]) -> bool:
        """Whether checks stop the run also after dead code elimination, which may remove checks."""
        try:
            simplified = (eliminate_dead(module), eliminate_dead(fold_shapes(module)))
        except Exception:  # the pass at hand is not to blame
            return False
        result = [self._run(live, args) for live in simplified]
        return all(isinstance(outcome, FailedRun) and outcome.is_check for outcome in result)

    def _fail(self, check: str, sample: Sample, problem: str, before: IRModule, after: IRModule | None) -> None:
        check = check if self.entry == ENTRY else f"{check} in {self.entry}"
        path = write_record(check, sample, problem, before, after, self._folder)
        raise ValidationError(
            f"{check} changes what the module computes, at {sample}: {problem}\n"
            f"  hint: `python -m relaxlite.revalidate {path}` runs it again"
        )


def outcome_of(run: Callable[[], Any]) -> tuple[Any, ...] | FailedRun:
    """Run a function: its tensors, or the error."""
    try:
        with np.errstate(all="ignore"):
            return flatten(run())
    except RelaxliteError as error:
        return FailedRun(error, is_check=True)
    except Exception as error:  # checks of NumPy, or undefined results such as the maximum of no elements
        return FailedRun(error, is_check=_NUMPY_CHECK.search(str(error)) is not None)


def _has_elements(outcome: tuple[Any, ...] | FailedRun) -> bool:
    """Whether a run ended with results of at least one element."""
    return not isinstance(outcome, FailedRun) and any(array.size for array in outcome)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _example_samples(entry: str, main: Function, inputs: Sequence[Sequence[Any]]) -> list[Sample]:
    """Samples of example inputs. Raises InvalidArgumentError for a wrong number of arguments."""
    samples = []
    for args in inputs:
        if len(args) != len(main.params):
            raise InvalidArgumentError(
                f"{entry!r} takes {len(main.params)} arguments, got {len(args)} to validate with"
            )
        symbols: Symbols = {}
        arrays = tuple(a if isinstance(a, tuple) else np.asarray(a, order="C") for a in args)
        for param, array in zip(main.params, arrays, strict=True):
            bind(param.ty, array, symbols, f"argument '{param.name}'", define_only=True)
        for param, array in zip(main.params, arrays, strict=True):  # sizes that symbols of later ones may be part of
            bind(param.ty, array, symbols, f"argument '{param.name}'")
        samples.append(Sample(symbols, arrays))
    return samples
