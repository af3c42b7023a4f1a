"""The check of each pass: what the module computes after it is what the module computed before.

The interpreter says what a module computes, at sizes that keep the bounds and divisors of the symbols, 0 and 1 among
them. A run-time check that fails must fail on both sides; one in code that nothing uses may go with that code.
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
from relaxlite.validation.oracle import Expected, Externs, Failed, flat, spread_of
from relaxlite.validation.record import keep
from relaxlite.validation.running import Remembering
from relaxlite.validation.samples import MORE_STYLES, STYLES, Sample, Symbols, draw_sample, symbol_values

ENTRY = "main"
MAGNITUDES = (10, 3, 2)  # of random integers
MAX_SECONDS = 4.0  # of one run of the module: larger sizes are left out, as each pass would take minutes for them
SURE_RUNS = 24  # more runs of the oracle before a difference is believed

_WAYS_OUT = (
    "validation compares hardly anything; give example inputs, `validate=[(array, ...)]` or `--validate --input "
    "NAME=FILE`, or bounds that the model needs"
)
_CHECK_OF_ELEMENTS = re.compile(r"index -?\d* ?is out of (range|bounds) for axis|lies outside of")
_CHECK_OF_NUMPY = re.compile(r"could not be broadcast|out of bounds for axis \d+ with size [1-9]")  # 0: nothing is read

Outcome = Expected | Failed


@dataclass(slots=True)
class Case:
    """One sample, and what the module that was compiled gives for it."""

    sample: Sample
    outcome: Outcome
    before: tuple[Any, ...] | Failed  # what the module gave after the pass before


class Validator:
    """Checks the passes that a module goes through, and the compiled model, by running all of them on samples.

    `inputs`: example arguments of function `entry`, each a sequence in its order; random ones at sizes of all kinds
    without them.
    `externs`: Python functions of the library routines that the module calls, by symbol. `program_runner` runs tensor
    programs in place of running.py. A mismatch is kept as text in `folder`. `styles`: of the sizes (samples.py).
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
        self._externs, self._runner = dict(externs or {}), program_runner or Remembering()
        self._folder, self._seed = folder, seed
        self._original = module
        self._earlier_doubt: str | None = None
        given = donated_params(main)
        self._donated = tuple(main.params.index(param) for param in given)
        self._results = len(result_types(main.body.result.ty))
        if inputs is not None:
            self.cases = [self._case(sample, self._run(module, sample.args)) for sample in _given(entry, main, inputs)]
        else:
            result = [self._drawn(main, v, k) for k, v in enumerate(symbol_values(main, random.Random(seed), styles))]
            if styles is STYLES and 2 * sum(_says_something(outcome) for _, outcome, _ in result) <= len(result):
                sizes = symbol_values(main, random.Random(seed), MORE_STYLES)
                result += [self._drawn(main, values, len(result) + k) for k, values in enumerate(sizes)]
            quickest = min((seconds for _, outcome, seconds in result if _says_something(outcome)), default=0.0)
            limit = max(MAX_SECONDS, quickest)
            self.cases = [self._case(sample, outcome) for sample, outcome, seconds in result if seconds <= limit]

    def doubt(self) -> str | None:
        """Why the check says little, if it does: the module gives nothing to compare, or nothing to compare it with."""
        if self._earlier_doubt is not None:
            return self._earlier_doubt
        coverage, given = self.coverage(), [case for case in self.cases if _says_something(case.before)]
        subject = "the model" if self.entry == ENTRY else repr(self.entry)
        if coverage.undetermined < coverage.elements:
            share = coverage.share_undetermined
            if share > MAX_UNDETERMINED:
                return f"rounding decides {share:.0%} of what {subject} gives, so {_WAYS_OUT}"
            share = coverage.share_not_finite
            is_most = share > MAX_UNDETERMINED
            return f"{share:.0%} of what {subject} gives is NaN or infinite, so {_WAYS_OUT}" if is_most else None
        failed = next((case.outcome for case in given or self.cases if isinstance(case.outcome, Failed)), None)
        if failed is None:
            reason = "gives nothing but what rounding decides" if given else "gives no elements"
        else:
            reason = f"stops{', if numbers are rounded otherwise,' if given else ''} ({_told(failed.error)})"
        return f"{subject} {reason} at all sizes that were tried, so {_WAYS_OUT}"

    def coverage(self) -> Coverage:
        """How much was compared; of the passes after the last that rounds, if one does."""
        return coverage_of(self.entry, [(case.before, case.outcome) for case in self.cases])

    def check(self, step: Pass, before: IRModule, after: IRModule, seconds: float = 0.0) -> None:
        """Raise ValidationError, which names the pass and the sizes, unless both modules compute the same."""
        if after is before or step.stage == "vm":  # what runs slots instead of symbols is checked as machine code
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
        """Numbers may change as the precision allows, but no shape, type or check. From here on the module is what it
        is now."""
        self._earlier_doubt = self.doubt()  # of the passes up to here
        result = [self._run(after, case.sample.args) for case in self.cases]
        for case, now in zip(self.cases, result, strict=True):
            if isinstance(case.outcome, Expected):
                anything = tuple(np.full(np.shape(value), np.inf) for value in case.outcome.values)
                case.outcome = replace(case.outcome, spread=anything)
            problem = self._problem(case, case.before, now, before)
            if problem is not None:
                self._fail(f"pass {step.name}", case.sample, problem, before, after)
        self._original = after
        self.cases = [self._case(case.sample, now) for case, now in zip(self.cases, result, strict=True)]

    def check_compiled(self, run: Callable[..., Any], lowered: IRModule | None = None) -> None:
        """Raise ValidationError unless a compiled model, called with the inputs, gives what the module computes.

        `lowered`: the module after all passes, to be kept beside the original.
        """
        for case in self.cases:
            result = self._outcome(run, case.sample.args)
            problem = self._problem(case, case.before, result, self._original)
            if problem is not None:
                self._fail("the compiled code", case.sample, problem, self._original, lowered)

    # one sample

    def _drawn(self, main: Function, values: Symbols, number: int) -> tuple[Sample, tuple[Any, ...] | Failed, float]:
        """A sample, what the module gives for it, and how long that took. Where integers are places of something, large
        ones stop the run: then smaller ones are drawn."""
        result: list[tuple[Sample, tuple[Any, ...] | Failed, float]] = []
        for magnitude in MAGNITUDES:
            sample = draw_sample(main, values, np.random.default_rng((self._seed, number)), magnitude)
            start = time.perf_counter()
            result.append((sample, self._run(self._original, sample.args), time.perf_counter() - start))
            if not isinstance(result[-1][1], Failed):
                return result[-1]
        return result[0]

    def _case(self, sample: Sample, found: tuple[Any, ...] | Failed) -> Case:
        if isinstance(found, Failed):
            return Case(sample, found, found)
        spread = spread_of(self._original, sample.args, found, self._externs, self._seed, entry=self.entry)
        return Case(sample, spread if isinstance(spread, Failed) else Expected(found, spread), found)

    def _run(self, module: IRModule, args: Sequence[Any]) -> tuple[Any, ...] | Failed:
        interpreter = Interpreter(module, self._externs, program_runner=self._runner)
        return self._outcome(partial(interpreter.run, self.entry), args)

    def _outcome(self, run: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...] | Failed:
        """What a run gives, the new contents of donated arguments last: as results, or in their arrays."""
        if not self._donated:
            return outcome_of(lambda: run(*args))
        own = [arg.copy() if k in self._donated else arg for k, arg in enumerate(args)]
        outcome = outcome_of(lambda: run(*own))
        if isinstance(outcome, Failed) or len(outcome) == self._results:
            return outcome
        return (*outcome, *(own[k] for k in self._donated))

    def _problem(
        self, case: Case, before: tuple[Any, ...] | Failed, found: tuple[Any, ...] | Failed, given: IRModule
    ) -> str | None:
        """What is wrong with `found`; `before` is what the module `given` computes."""
        if isinstance(found, Failed) and isinstance(found.error, OutOfBoundsError):
            is_new = not (isinstance(before, Failed) and isinstance(before.error, OutOfBoundsError))
            return f"a run-time check is missing: {found.error}" if is_new else None
        if isinstance(before, Failed):
            if _CHECK_OF_ELEMENTS.search(str(before.error)) and not isinstance(found, Failed):
                return None  # of elements that nothing reads: where one is read, the interpreter itself finds it
            if isinstance(found, Failed) or not before.is_check or not self._fails_alive(given, case.sample.args):
                return None
            return f"a run-time check is lost: before, the run stops with {_told(before.error)}"
        if isinstance(found, Failed):
            return f"the run fails with {_told(found.error)}"
        if not isinstance(case.outcome, Expected):
            return None
        difference = compare(found, case.outcome)
        return None if difference is None else self._sure(case, found, difference)

    def _sure(self, case: Case, found: tuple[Any, ...], difference: Difference) -> str | None:
        """The difference as text if it stands against what many runs of the oracle allow."""
        assert isinstance(case.outcome, Expected)
        values, known = case.outcome.values, case.outcome.spread

        def allowing(spread: tuple[Any, ...]) -> Expected:
            return Expected(values, tuple(map(np.maximum, known, spread)))

        spread = spread_of(
            self._original, case.sample.args, values, self._externs, self._seed + 1, SURE_RUNS, self.entry,
            is_enough=lambda spread: compare(found, allowing(spread)) is None,
        )  # fmt: skip
        case.outcome = spread if isinstance(spread, Failed) else allowing(spread)
        again = compare(found, case.outcome) if isinstance(case.outcome, Expected) else None
        return None if again is None else str(again)

    def _fails_alive(self, module: IRModule, args: Sequence[Any]) -> bool:
        """Whether checks stop the run also without what nothing uses, which may go together with its checks."""
        try:
            simplified = (eliminate_dead(module), eliminate_dead(fold_shapes(module)))
        except Exception:  # the pass at hand is not to blame
            return False
        result = [self._run(live, args) for live in simplified]
        return all(isinstance(outcome, Failed) and outcome.is_check for outcome in result)

    def _fail(self, what: str, sample: Sample, problem: str, before: IRModule, after: IRModule | None) -> None:
        what = what if self.entry == ENTRY else f"{what} in {self.entry}"
        path = keep(what, sample, problem, before, after, self._folder)
        raise ValidationError(
            f"{what} changes what the module computes, at {sample}: {problem}\n"
            f"  hint: `python -m relaxlite.revalidate {path}` runs it again"
        )


def outcome_of(run: Callable[[], Any]) -> tuple[Any, ...] | Failed:
    try:
        with np.errstate(all="ignore"):
            return flat(run())
    except RelaxliteError as error:
        return Failed(error, is_check=True)
    except Exception as error:  # NumPy's own checks; or it has no answer, as for the largest of no elements
        return Failed(error, is_check=_CHECK_OF_NUMPY.search(str(error)) is not None)


def _says_something(outcome: tuple[Any, ...] | Failed) -> bool:
    return not isinstance(outcome, Failed) and any(array.size for array in outcome)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _given(entry: str, main: Function, inputs: Sequence[Sequence[Any]]) -> list[Sample]:
    result = []
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
        result.append(Sample(symbols, arrays))
    return result
