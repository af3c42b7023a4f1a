"""The processor itself as a peer: how long it needs for a workload's arithmetic or memory traffic and nothing else.

Kernels are loop nests compiled as every program of relaxlite is. `fma`: independent fused multiply-adds on registers.
`read`: a sum over as many bytes as the weights have; `copy`: of half as many bytes as are moved, to as many others,
with stores past the caches where these cannot hold them, as memcpy does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from bench.cpu.cases import Case, Workload
from bench.cpu.peers import Peer, Prepared, Unsupported
from relaxlite.codegen.llvm import compile_programs
from relaxlite.ir.program import Allocate, Binary, Buffer, For, Literal, Seq, Stmt, Store, TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.runtime import memory, threadpool
from relaxlite.runtime.native import load_objects
from relaxlite.target import Target

CHAINS = 12  # independent accumulators: latency of a multiply-add times its throughput, with room, in 16 registers
STEPS = 20_000  # of all chains, per turn of the fma kernel: 65 us at two 512-bit operations per cycle
PARTS = 4  # vectors of a copy's or a read's step: 256 bytes with 512-bit vectors
PAIRS = 4  # of a read's accumulators, each of PARTS vectors

Kernel = Callable[[Sequence[np.ndarray], Sequence[int]], int]


class Machine(Peer):
    title = "the machine's limit"

    def version(self) -> str:
        return Target.host().cpu

    def open(self, workload: Workload) -> None:
        threadpool.set_num_threads(self.threads)
        target = Target.host()
        lanes = target.vector_lanes(4)
        self.lanes = lanes
        programs = {
            "fma": fma(self.threads, lanes),
            "read": read(self.threads, lanes),
            "copy": copy(self.threads, lanes),
            "copy_past_caches": copy(self.threads, lanes, past_caches=True),
        }
        code = compile_programs(programs, target)
        self.library = load_objects(code.objects)
        self.kernels = {name: _callable(self.library.address(info.symbol)) for name, info in code.kernels.items()}

    def prepare(self, case: Case) -> Prepared:
        if case.work is None:
            raise Unsupported("nobody has counted the work of this case")
        kind, amount = case.work.kind, case.work.amount
        past_caches = kind == "copy" and amount / 2 > Target.host().l3_bytes
        kernel = self.kernels["copy_past_caches" if past_caches else kind]
        if kind == "fma":
            x = _floats(self.lanes)
            out = _floats(self.threads * CHAINS * self.lanes)
            done = 2.0 * self.threads * CHAINS * self.lanes * STEPS
            return _prepared(kernel, [x, out], [STEPS], amount / done)
        step = PARTS * self.lanes * (PAIRS if kind == "read" else 1)
        tensors = 1 if kind == "read" else 2
        steps = max(1, int(amount / tensors / 4 / self.threads / step))
        count = self.threads * steps * step
        out = _floats(self.threads * step if tensors == 1 else count)
        return _prepared(kernel, [_floats(count), out], [steps], amount / (4.0 * tensors * count))


def _prepared(kernel: Kernel, arrays: list[np.ndarray], symbols: list[int], scale: float) -> Prepared:
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    values = (ctypes.c_int64 * len(symbols))(*symbols)
    keep = (arrays, pointers, values)
    return Prepared(lambda: kernel(keep[1], keep[2]), lambda _: [], scale)  # type: ignore[arg-type]


def _callable(address: int) -> Kernel:
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(address)  # type: ignore[return-value]


def _floats(count: int) -> np.ndarray:
    """Aligned, on huge pages where there are some, as weights and arenas are; written to, so that pages exist."""
    block = memory.allocate(4 * count, "a benchmark's buffer")
    array = block.raw[block.ptr - block.base :][: 4 * count].view(np.float32)
    array.fill(1e-3)
    return array


def _nest(*around: tuple[SymVar, int | SymVar, str], body: Stmt) -> Stmt:
    for var, extent, kind in reversed(around):
        body = For(var, sym(extent), body, kind)  # type: ignore[arg-type]
    return body


def fma(threads: int, lanes: int) -> TensorProgram:
    """2 * threads * CHAINS * lanes operations per step."""
    steps, thread = SymVar("steps"), SymVar("thread")
    x = Buffer.of("x", (lanes,), "float32")
    out = Buffer.of("out", (threads, CHAINS, lanes), "float32")
    tile = Buffer.of("tile", (CHAINS, lanes), "float32", "local")

    def each(make: Callable[[SymVar, SymVar], Stmt]) -> Stmt:
        chain, lane = SymVar("chain"), SymVar("lane")
        return _nest((chain, CHAINS, "unrolled"), (lane, lanes, "vectorized"), body=make(chain, lane))

    body = Allocate(
        tile,
        Seq(
            (
                each(lambda c, v: Store(tile, (c, v), x[v])),
                For(
                    SymVar("step"), sym(steps), each(lambda c, v: Store(tile, (c, v), Binary("mul", x[v], x[v]), "add"))
                ),
                each(lambda c, v: Store(out, (thread, c, v), tile[c, v])),
            )
        ),
    )
    return TensorProgram((x, out), (steps,), _nest((thread, threads, "parallel"), body=body))


def read(threads: int, lanes: int) -> TensorProgram:
    """Each thread sums a contiguous part of x into accumulators that stay in registers."""
    steps, thread, step = SymVar("steps"), SymVar("thread"), SymVar("step")
    vectors = PARTS * PAIRS
    x = Buffer.of("x", (threads, steps, vectors, lanes), "float32")
    out = Buffer.of("out", (threads, vectors, lanes), "float32")
    tile = Buffer.of("tile", (vectors, lanes), "float32", "local")

    def each(make: Callable[[SymVar, SymVar], Stmt]) -> Stmt:
        part, lane = SymVar("part"), SymVar("lane")
        return _nest((part, vectors, "unrolled"), (lane, lanes, "vectorized"), body=make(part, lane))

    body = Allocate(
        tile,
        Seq(
            (
                each(lambda c, v: Store(tile, (c, v), Literal(0.0, "float32"))),
                For(step, sym(steps), each(lambda c, v: Store(tile, (c, v), x[thread, step, c, v], "add"))),
                each(lambda c, v: Store(out, (thread, c, v), tile[c, v])),
            )
        ),
    )
    return TensorProgram((x, out), (steps,), _nest((thread, threads, "parallel"), body=body))


def copy(threads: int, lanes: int, *, past_caches: bool = False) -> TensorProgram:
    steps = SymVar("steps")
    x, out = (Buffer.of(name, (threads, steps, PARTS, lanes), "float32") for name in ("x", "out"))
    thread, step, part, lane = SymVar("thread"), SymVar("step"), SymVar("part"), SymVar("lane")
    at: tuple[SymExpr, ...] = (thread, step, part, lane)
    body: Stmt = Store(out, at, x[at], nontemporal=past_caches)
    body = _nest((part, PARTS, "unrolled"), (lane, lanes, "vectorized"), body=body)
    return TensorProgram((x, out), (steps,), _nest((thread, threads, "parallel"), (step, steps, "serial"), body=body))
