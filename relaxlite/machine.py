"""How fast this machine is at best: float32 multiply-adds, and reads from each cache and from RAM.

Two small kernels are made by our own code generator and timed, for one thread up to all: about a second, once per
machine (runtime/roofline.py keeps the figures in the user's cache folder).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from relaxlite.config import usable_cores
from relaxlite.driver import compile as compile_module
from relaxlite.errors import NoFolderError
from relaxlite.ir.attributes import SCHEDULED
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, Call, GlobalVar, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    Intrinsic,
    Literal,
    Load,
    Stmt,
    Store,
    TensorProgram,
    seq,
)
from relaxlite.ir.symbolic import IntLike, SymVar, sym
from relaxlite.ir.types import TensorType
from relaxlite.runtime import threadpool
from relaxlite.runtime.memory import MEMORY_LIMIT
from relaxlite.runtime.module import Executable
from relaxlite.runtime.roofline import MachineLimits, MemoryLevel, best_of, cpu_name, load_limits, save_limits
from relaxlite.target import Target, host_cache_bytes

_ACCUMULATORS = 12  # enough to hide the latency of a multiply-add, few enough for 16 registers
_STREAM = 8  # vectors read per step
_SECONDS = 0.004  # of one timed call
_REPEATS = 7  # timed calls, of which the fastest counts
_ATTEMPTS, _NEARLY = 3, 0.85  # measurements where the first falls below this share of what threads should reach
_MAX_BYTES = 512 << 20
_UNKNOWN_L3 = 16 << 20  # where the system does not say, the RAM is measured with several times this


def limits(*, fresh: bool = False) -> MachineLimits:
    """The limits of this machine: as measured before, or (`fresh`, or the first time) measured now and kept.

    Other work can only make a figure smaller: of a new one and the one that is known, the greater is kept.
    """
    known = load_limits()
    if known is not None and not fresh:
        return known
    best = best_of(known, measure_limits())
    with contextlib.suppress(OSError, NoFolderError):  # no folder that can be written: measured again next time
        save_limits(best)
    return best


def measure_limits() -> MachineLimits:
    """Measure now, with 1, 2, 4, ... threads and with as many as there are usable cores. Other work disturbs it."""
    cores = usable_cores()
    counts = sorted({cores, *(1 << k for k in range(cores.bit_length()))})
    lanes = Target.host().vector_lanes(4)
    peak, reader = _compiled(_multiply_adds(lanes)), _compiled(_reads(lanes))
    gflops: dict[int, float] = {}
    levels = _levels()
    speeds: dict[str, dict[int, float]] = {level.name: {} for level, _ in levels}
    before = threadpool.num_threads()
    try:
        for threads in counts:
            threadpool.set_num_threads(threads)
            _record(gflops, threads, partial(_peak, peak, lanes, threads))
            for level, nbytes in levels:
                share = nbytes if level.is_private else nbytes // threads
                _record(speeds[level.name], threads, partial(_bandwidth, reader, lanes, threads, share))
    finally:
        threadpool.set_num_threads(before)
    result = tuple(replace(level, gb_per_s=speeds[level.name]) for level, _ in levels)
    return MachineLimits(cpu_name(), gflops, result)


def _record(figures: dict[int, float], threads: int, measure: Callable[[], float]) -> None:
    """The best of several measurements where the first falls short of what one thread promises: others may be at work.
    No figure is less than that of fewer threads."""
    promised = threads * figures.get(1, 0.0)
    best = max(figures.values(), default=0.0)
    for _ in range(_ATTEMPTS):
        best = max(best, measure())
        if best >= _NEARLY * promised:
            break
    figures[threads] = best


def _levels() -> list[tuple[MemoryLevel, int]]:
    """The memories, without speeds, and how many bytes to read of each (per thread, of what is private)."""
    capacities = {number: host_cache_bytes(number) for number in (1, 2, 3)}
    result = []
    for number, capacity in capacities.items():
        if capacity is not None:
            is_private = number < 3
            result.append((MemoryLevel(f"L{number}", capacity, is_private, {}), capacity // (2 if is_private else 4)))
    nbytes = min(4 * (capacities[3] or _UNKNOWN_L3), _MAX_BYTES, MEMORY_LIMIT // 4)
    return [*result, (MemoryLevel("RAM", None, False, {}), nbytes)]


# The kernels. Each thread works on its own row; `repeats` and `threads` are the lengths of two arrays.


def _multiply_adds(lanes: int) -> TensorProgram:
    """acc = acc * x + y for a tile of registers, `repeats` times, in each of `threads` iterations."""
    repeats, threads = SymVar("repeats"), SymVar("threads")
    xy, out = Buffer.of("xy", (2, lanes), "float32"), Buffer.of("out", (threads, _ACCUMULATORS, lanes), "float32")
    acc = Buffer.of("acc", (_ACCUMULATORS, lanes), "float32", "local")
    x, y = (Buffer.of(name, (lanes,), "float32", "local") for name in "xy")
    row = SymVar("row", upper=_ACCUMULATORS - 1)
    thread = SymVar("thread")

    def step(r: IntLike, lane: SymVar) -> Stmt:
        return Store(acc, (sym(r), lane), Intrinsic("fma", (acc[r, lane], x[lane], y[lane]), "float32"))

    body = seq(
        _lanes(lanes, lambda lane: Store(x, (lane,), xy[0, lane])),
        _lanes(lanes, lambda lane: Store(y, (lane,), xy[1, lane])),
        *(_lanes(lanes, lambda lane, r=r: Store(acc, (sym(r), lane), xy[0, lane])) for r in range(_ACCUMULATORS)),
        For(SymVar("i"), repeats, _unrolled(row, _ACCUMULATORS, _lanes(lanes, lambda lane: step(row, lane)))),
        *(
            _lanes(lanes, lambda lane, r=r: Store(out, (thread, sym(r), lane), acc[r, lane]))
            for r in range(_ACCUMULATORS)
        ),
    )
    return _parallel([xy], out, (repeats, threads), thread, _allocated(body, acc, x, y))


def _reads(lanes: int) -> TensorProgram:
    """The sum of x[thread], read from one end to the other `repeats` times, in each of `threads` iterations."""
    repeats, threads, blocks = SymVar("repeats"), SymVar("threads"), SymVar("blocks")
    x = Buffer.of("x", (threads, blocks, _STREAM, lanes), "float32")
    out = Buffer.of("out", (threads, _STREAM, lanes), "float32")
    acc = Buffer.of("acc", (_STREAM, lanes), "float32", "local")
    part, block, thread = SymVar("part", upper=_STREAM - 1), SymVar("block"), SymVar("thread")
    zero = Literal(0.0, "float32")

    def step(lane: SymVar) -> Stmt:
        return Store(acc, (part, lane), Load(x, (thread, block, part, lane)), "add")

    read = For(block, blocks, _unrolled(part, _STREAM, _lanes(lanes, step)))
    body = seq(
        *(_lanes(lanes, lambda lane, r=r: Store(acc, (sym(r), lane), zero)) for r in range(_STREAM)),
        For(SymVar("i"), repeats, read),
        *(_lanes(lanes, lambda lane, r=r: Store(out, (thread, sym(r), lane), acc[r, lane])) for r in range(_STREAM)),
    )
    return _parallel([x], out, (repeats, threads, blocks), thread, _allocated(body, acc))


def _lanes(lanes: int, make: Callable[..., Stmt]) -> For:
    lane = SymVar("lane", upper=lanes - 1)
    return For(lane, sym(lanes), make(lane), "vectorized")


def _unrolled(var: SymVar, count: int, body: Stmt) -> For:
    return For(var, sym(count), body, "unrolled")


def _allocated(body: Stmt, *buffers: Buffer) -> Stmt:
    for buffer in reversed(buffers):
        body = Allocate(buffer, body)
    return body


def _parallel(
    inputs: list[Buffer], out: Buffer, symbols: tuple[SymVar, ...], thread: SymVar, body: Stmt
) -> TensorProgram:
    loop = For(thread, symbols[1], body, "parallel")
    return TensorProgram((*inputs, out), symbols, loop, attrs=Attrs({SCHEDULED: True}))


def _compiled(program: TensorProgram) -> Executable:
    """A model of one call: main(repeats: int8[r], threads: int8[t], *inputs) -> the program's output."""
    counters = [Buffer.of(s.name, (s,), "int8") for s in program.symbols[:2]]
    buffers = (*counters, *program.inputs)
    bb = BlockBuilder(IRModule({"kernel": program}))
    variables = tuple(Var(b.name, TensorType.of(b.shape, b.dtype)) for b in buffers)
    with bb.function_with_params("main", variables):
        result = TensorType.of(program.outputs[0].shape, "float32")
        bb.result(bb.emit(Call(GlobalVar("kernel"), variables[2:], Attrs({}), program.symbols, result)))
    return compile_module(bb.module())


# Timing


def _peak(exe: Executable, lanes: int, threads: int) -> float:
    """GFLOP/s."""
    xy = _aligned((2, lanes))
    xy[:] = 0.5
    per_repeat = threads * _ACCUMULATORS * lanes * 2
    return per_repeat / _seconds_per_repeat(exe, threads, xy) / 1e9


def _bandwidth(exe: Executable, lanes: int, threads: int, nbytes: int) -> float:
    """GB/s, of all threads together, each of which reads `nbytes` again and again."""
    blocks = max(nbytes // (_STREAM * lanes * 4), 1)
    x = _aligned((threads, blocks, _STREAM, lanes))
    x[:] = 1.0
    return x.nbytes / _seconds_per_repeat(exe, threads, x) / 1e9


def _seconds_per_repeat(exe: Executable, threads: int, data: np.ndarray) -> float:
    """The least, of calls that are long enough for what surrounds the kernel not to matter."""
    team = np.zeros(threads, np.int8)
    repeats, took = 1, _time_of(exe, 1, team, data)
    while took < _SECONDS / 2:
        repeats *= 8 if took < _SECONDS / 16 else 2
        took = _time_of(exe, repeats, team, data)
    return min(took, *(_time_of(exe, repeats, team, data) for _ in range(_REPEATS))) / repeats


def _time_of(exe: Executable, repeats: int, team: np.ndarray, data: np.ndarray) -> float:
    counter = np.zeros(repeats, np.int8)
    start = time.perf_counter()
    exe(counter, team, data)
    return time.perf_counter() - start


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """float32, on a cache line's start."""
    raw = np.empty(math.prod(shape) * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + math.prod(shape) * 4].view(np.float32).reshape(shape)
