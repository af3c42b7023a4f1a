"""Auto-tuning of schedules by measurement, as `relaxlite tune` does.

    tuning = tune(module, [{"ids": ids_of_16}, {"ids": ids_of_128}])
    tuning.save("model.tuning.json")
    exe = rl.compile(module, tuning=tuning)

1. The model is compiled with the default rules and run on every sample, to find which programs run, at which sizes,
   how often, and for how long.
2. Each program with a relevant share of the time becomes a model of its own, with random constants. Choices that change
   its schedule (passes/products/choice.py) are compiled, and dropped when their results differ.
3. The remaining choices run in turn at the sampled sizes; the slower half is dropped after each round (successive
   halving). A choice that beats the default by more than noise is kept. One axis of choices is searched after another.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from tqdm import tqdm

from relaxlite import dtypes
from relaxlite.driver import build
from relaxlite.errors import ExecutionError, InvalidArgumentError, RelaxliteError
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.expr import Attrs, Call, Constant, Expr, Function, GlobalVar, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import SymVar, evaluate
from relaxlite.ir.types import TensorType, TupleType, type_symbols
from relaxlite.ir.visitor import bodies
from relaxlite.passes.context import DEFAULT_PRECISION, PassContext
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.choice import DEFAULT, ScheduleChoice, axes
from relaxlite.passes.products.strategy_table import ALTERNATIVES
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.passes.schedule.tuning import TunedProgram, Tuning, program_key
from relaxlite.records import dataclass
from relaxlite.runtime import threadpool
from relaxlite.runtime.executable import ENTRY
from relaxlite.runtime.replay import Recorder, Replay
from relaxlite.signature import signature_of
from relaxlite.target import Target

MIN_SHARE = 0.01  # of a model's time; programs below are not tuned
MIN_GAIN = 1.03  # smaller gains count as noise
ROUNDS = 4
MAX_UNBOUNDED_SAMPLE = 64  # the largest sample of a symbol without an upper bound
MIN_SECONDS_PER_SIZE = 0.01  # of one choice in one round
MIN_RUNS, MAX_RUNS = 3, 200
LOW_PERCENTILE = 20.0  # robust against other load on the machine
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2}  # relative to the largest magnitude; the order of summation may differ
DEFAULT_TOLERANCE = 1e-4

Arrays = Mapping[str, np.ndarray]


@dataclass(slots=True)
class TuningTask:
    """Program to tune. `sizes` counts the calls per assignment of its symbols in all samples."""

    name: str
    program: TensorProgram
    constants: frozenset[int]  # inputs that are constants at every call
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    seconds: float = 0.0  # sum over all samples


def tune(
    module: IRModule,
    samples: Sequence[Mapping[str, Any]],
    target: str | Target = "llvm",
    *,
    precision: str = DEFAULT_PRECISION,
    tuning: Tuning | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> Tuning:
    """Search schedule choices for the programs of a module by measuring them on sample inputs.

    `samples`: inputs by name, as for `Executable.run`, one mapping per size. `precision`: as for `compile`. `tuning`:
    earlier choices, which are extended and returned. Raises InvalidArgumentError without samples or for a target other
    than this machine, and the errors of compiling and running.
    """
    machine = Target.parse(target) if isinstance(target, str) else target
    if not samples:
        raise InvalidArgumentError("tuning needs at least one sample of inputs")
    if machine != Target.host():
        raise InvalidArgumentError(f"tuning runs what it compiles, so the target must be this machine, not {machine}")
    if threads is not None:
        threadpool.set_num_threads(threads)
    result = Tuning() if tuning is None else tuning
    tasks = find_tasks(module, samples, machine, precision)
    with tqdm(tasks, desc="tune", unit="program", disable=not progress) as bar:
        for task in bar:
            bar.set_postfix_str(task.name)
            try:
                entry = search(task, machine)
            except ExecutionError as error:  # random values may fail checks
                bar.write(f"{task.name} does not run on its own and is left as it is: {error}", file=sys.stderr)
                continue
            if entry is None:
                result.remove(task.program, machine)  # an older choice is outdated
            else:
                result.add(task.program, machine, entry)
    return result


# Programs to tune


def sample_shapes(module: IRModule) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of a model's inputs by name, at the smallest, a middle and the largest size within bounds."""
    main = module[ENTRY]
    assert isinstance(main, Function)
    types = [p.ty for p in main.params if isinstance(p.ty, TensorType) and p.ty.shape is not None]
    symbols = list(dict.fromkeys(s for ty in types for s in type_symbols(ty)))
    names = [spec.name for spec in signature_of(main).inputs]
    result: list[dict[str, tuple[int, ...]]] = []
    for fraction in (0.0, 0.5, 1.0):
        values = {symbol: _interpolate(symbol, fraction) for symbol in symbols}
        shapes = {
            name: tuple(evaluate(dim, values) for dim in p.ty.shape)
            for name, p in zip(names, main.params, strict=True)
            if isinstance(p.ty, TensorType) and p.ty.shape is not None
        }
        if shapes not in result:
            result.append(shapes)
    return result


def _interpolate(symbol: SymVar, fraction: float) -> int:
    """A legal value by geometric interpolation between the bounds.

    MAX_UNBOUNDED_SAMPLE replaces a missing upper bound.
    """
    low = max(symbol.lower or 0, 1)
    high = max(MAX_UNBOUNDED_SAMPLE, low) if symbol.upper is None else max(symbol.upper, 1)
    value = round(low ** (1 - fraction) * high**fraction)
    step = symbol.divisor
    return min(max(-(-low // step), round(value / step)), max(high // step, 1)) * step


def find_tasks(
    module: IRModule, samples: Sequence[Mapping[str, Any]], target: Target, precision: str = DEFAULT_PRECISION
) -> list[TuningTask]:
    """Programs with a relevant share of the samples' time, longest first."""
    unscheduled = run_passes(module, _passes_before_schedule(), PassContext(target, precision))
    programs, constants = unscheduled.programs(), _constant_inputs(unscheduled)
    recorder = Recorder(build(module, target, precision=precision, tuning=Tuning()))
    tasks: dict[str, TuningTask] = {}
    total = 0.0
    for sample in samples:
        replay = recorder.record(sample)
        times = np.min([replay.seconds() for _ in range(MIN_RUNS)], axis=0) if replay.calls else ()
        for call, seconds in zip(replay.calls, times, strict=True):
            total += seconds
            program = programs.get(call.kernel)
            if program is None or len(call.symbols) != len(program.symbols) or min(call.symbols, default=1) < 0:
                continue
            key = program_key(program)
            constant_inputs = constants.get(call.kernel, frozenset())
            task = tasks.setdefault(key, TuningTask(call.kernel, program, constant_inputs))
            task.constants &= constant_inputs
            task.sizes[call.symbols] += 1
            task.seconds += seconds
    relevant = [task for task in tasks.values() if task.seconds >= MIN_SHARE * total]
    return sorted(relevant, key=lambda task: -task.seconds)


def _passes_before_schedule() -> list[Pass]:
    return _split_pipeline()[0]


def _split_pipeline() -> tuple[list[Pass], list[Pass]]:
    """The passes before scheduling, and the rest."""
    steps = list(default_pipeline())
    at = next(k for k, step in enumerate(steps) if step.name == "schedule")
    return steps[:at], steps[at:]


def _constant_inputs(module: IRModule) -> dict[str, frozenset[int]]:
    """Inputs of constant shape for which every call passes a constant, by program."""
    result: dict[str, frozenset[int]] = {}
    programs = module.programs()
    for function in module.functions().values():
        for body in bodies(function):
            for binding in body.bindings():
                value = binding.value if isinstance(binding, Let) else None
                if isinstance(value, Call) and isinstance(value.callee, GlobalVar) and value.callee.name in programs:
                    name = value.callee.name
                    pairs = enumerate(zip(value.args, programs[name].inputs, strict=True))
                    constant_numbers = frozenset(
                        k for k, (arg, b) in pairs if isinstance(arg, Constant) and _is_known(b)
                    )
                    result[name] = result.get(name, constant_numbers) & constant_numbers
    return result


def _is_known(buffer: Buffer) -> bool:
    return all(dim.is_const for dim in buffer.shape)


# Measuring one program


def search(task: TuningTask, target: Target) -> TunedProgram | None:
    """Find the best choice for a program, one axis after another; None if nothing beats the default."""
    bench = _Bench(task, target)
    default = bench.contender(DEFAULT)
    assert default is not None  # the first contender is never rejected
    best = default
    for axis in axes(target.num_vector_registers, ALTERNATIVES):
        candidates = [
            contender for choice in axis if (contender := bench.contender(best.choice.updated(choice))) is not None
        ]
        if not candidates:
            continue
        winner = bench.tournament([default, *([] if best is default else [best]), *candidates])
        if winner.slowness(default) * MIN_GAIN <= best.slowness(default):
            best = winner
    if best is default:
        return None
    sizes = tuple(task.sizes)
    seconds, default_seconds = tuple(best.low), tuple(default.low)
    return TunedProgram(task.name, best.choice, sizes, seconds, default_seconds, threadpool.num_threads())


@dataclass(slots=True)
class _Contender:
    """Compiled choice with its timings."""

    choice: ScheduleChoice
    replays: list[Replay]  # one per size
    times: list[list[float]] = field(default_factory=list)  # seconds of each run, at each size
    low: list[float] = field(default_factory=list)  # low percentile of seconds per call, at each size

    def measure(self) -> None:
        """Time some runs at each size, after one warm-up run."""
        for replay, times in zip(self.replays, self.times, strict=True):
            replay.run()
            spent, runs = 0.0, 0
            while runs < MIN_RUNS or (spent < MIN_SECONDS_PER_SIZE and runs < MAX_RUNS):
                seconds = sum(replay.seconds())
                times.append(seconds)
                spent, runs = spent + seconds, runs + 1
        self.low = [float(np.percentile(times, LOW_PERCENTILE)) for times in self.times]

    def slowness(self, other: _Contender) -> float:
        """Time relative to another contender: geometric mean over sizes, so that large sizes do not dominate."""
        ratios = [
            seconds / max(other_seconds, 1e-12) for seconds, other_seconds in zip(self.low, other.low, strict=True)
        ]
        return math.exp(sum(math.log(max(ratio, 1e-12)) for ratio in ratios) / len(ratios))


class _Bench:
    """Compilation and comparison of contenders for one program."""

    def __init__(self, task: TuningTask, target: Target) -> None:
        self._task, self._target = task, target
        self._module, self._passes = single_program_module(task), _split_pipeline()[1]
        self._inputs = [_random_inputs(task, size) for size in task.sizes]
        self._expected: list[list[np.ndarray]] | None = None  # results of the default schedule
        self._seen: set[str] = set()  # hashes of schedules

    def contender(self, choice: ScheduleChoice) -> _Contender | None:
        """Compile a choice.

        None if its schedule was seen before, does not compile, or gives other results than the first.
        """
        schedule = structural_hash(schedule_program(self._task.program, self._target, choice))
        if schedule in self._seen:
            return None
        self._seen.add(schedule)
        try:
            context = _context_with_choice(self._task, self._target, choice)
            recorder = Recorder(build(self._module, self._target, passes=self._passes, context=context))
            replays = [recorder.record(arrays) for arrays in self._inputs]
        except RelaxliteError:
            if self._expected is None:
                raise
            return None
        outputs = [replay.outputs for replay in replays]
        if self._expected is None:
            self._expected = outputs
        elif not all(map(_same, outputs, self._expected)):
            return None
        return _Contender(choice, replays)

    def tournament(self, contenders: Sequence[_Contender]) -> _Contender:
        """Find the fastest contender by successive halving.

        The first contender stays as the reference for all others.
        """
        for contender in contenders:
            contender.times = [[] for _ in contender.replays]
        remaining = list(contenders)
        for _ in range(ROUNDS):
            for contender in remaining:
                contender.measure()
            reference, *rivals = remaining
            rivals.sort(key=lambda c: c.slowness(reference))
            remaining = [reference, *rivals[: max(2, len(rivals) // 2)]]
        return min(remaining, key=lambda c: c.slowness(remaining[0]))


def _context_with_choice(task: TuningTask, target: Target, choice: ScheduleChoice) -> PassContext:
    tuning = Tuning()
    tuning.add(task.program, target, TunedProgram(task.name, choice, (), (), (), 1))
    return PassContext(target, tuning=tuning)


def single_program_module(task: TuningTask) -> IRModule:
    """A model that only calls the program.

    Each symbol is the length of an input of its own, so that it may have any value.
    """
    program, builder = task.program, BlockBuilder()
    callee = builder.define(task.name if task.name != ENTRY else f"{ENTRY}_program", program)
    params = [Var(_size_name(k), TensorType((symbol,), "bool")) for k, symbol in enumerate(program.symbols)]
    args: list[Expr] = []
    for k, buffer in enumerate(program.inputs):
        if k in task.constants:
            args.append(Constant.of(_random(buffer, {}, k), buffer.dtype))
        else:
            params.append(Var(_input_name(k), TensorType(buffer.shape, buffer.dtype)))
            args.append(params[-1])
    types = tuple(TensorType(buffer.shape, buffer.dtype) for buffer in program.outputs)
    result = types[0] if len(types) == 1 else TupleType(types)
    with builder.function_with_params(ENTRY, tuple(params)):
        builder.result(builder.emit(Call(callee, tuple(args), Attrs(), program.symbols, result)))
    return builder.module()


def _size_name(k: int) -> str:
    return f"size_{k}"


def _input_name(k: int) -> str:
    return f"input_{k}"


def _random_inputs(task: TuningTask, size: tuple[int, ...]) -> dict[str, np.ndarray]:
    values = dict(zip(task.program.symbols, size, strict=True))
    lengths = {_size_name(k): np.zeros(length, np.bool_) for k, length in enumerate(size)}
    inputs = enumerate(task.program.inputs)
    return lengths | {_input_name(k): _random(b, values, k) for k, b in inputs if k not in task.constants}


def _random(buffer: Buffer, values: Mapping[SymVar, int], seed: int) -> np.ndarray:
    """Random input; integers are zeros, which are legal indices."""
    shape = tuple(evaluate(dim, values) for dim in buffer.shape)
    rng = np.random.default_rng(seed)
    dtype = dtypes.to_numpy(buffer.dtype)
    if dtypes.is_float(buffer.dtype):
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    return np.asarray(rng.integers(0, 2, shape)).astype(dtype) if buffer.dtype == "bool" else np.zeros(shape, dtype)


def _same(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return all(_agree(a, b) for a, b in zip(outputs, expected, strict=True))


def _agree(output: np.ndarray, expected: np.ndarray) -> bool:
    """Whether results agree: integers exactly, floats within tolerance, non-finite elements at the same positions."""
    name = dtypes.from_numpy(output.dtype) or ""
    if not dtypes.is_float(name):
        return bool(np.array_equal(output, expected))
    a, b = output.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    scale = np.abs(b[finite]).max(initial=1e-30)
    return bool(np.abs(a[finite] - b[finite]).max(initial=0.0) <= TOLERANCE.get(name, DEFAULT_TOLERANCE) * scale)
