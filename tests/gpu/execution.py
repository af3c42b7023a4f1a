"""Execute a function of PTX: the threads of many blocks are lanes of NumPy arrays, the lowest program counter first.

Faults are accesses outside of allocations or misaligned ones, barriers that some threads of a block do not reach,
instructions of a warp in a part of a warp, reads of shared memory that nobody wrote or whose asynchronous copy is
unfinished, and races: two threads touch one place, one of them writing, without a barrier between. In global memory
nothing orders two threads.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxlite.gpus import WARP
from relaxlite.ir.warp import MMA, load_matrices, multiply
from tests.gpu.arithmetic import ALU, COMPARE, ROUND, is_float
from tests.gpu.ptx import BITS, KINDS, Instruction, Kernel

if TYPE_CHECKING:
    from tests.gpu.simulator import SimulatedDriver

Array = Any
LOCAL, SHARED = 1 << 46, 1 << 45  # where these begin in the generic space
_SEVERAL = 1 << 31  # in place of a thread's number
_BY_PTX = {mma.ptx: mma for mma in MMA.values()}
_COUNTED_BY_SPACE = ("ld", "st", "mma", "cvt")


class FaultError(Exception):
    """What a program of a GPU must not do."""


class Execution:
    """Some blocks of a launch."""

    def __init__(
        self,
        device: SimulatedDriver,
        kernel: Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: list[int],
        blocks: Array,
    ) -> None:
        self.device, self.kernel, self.count = device, kernel, device.counts
        self.threads = prod(block)
        self.lanes = len(blocks) * self.threads
        thread, number = np.tile(np.arange(self.threads), len(blocks)), np.repeat(blocks, self.threads)
        self.block = np.repeat(np.arange(len(blocks)), self.threads)
        self.thread, self.who = thread, device.epoch + number * self.threads + thread
        self.special: dict[str, Array] = {}
        for name, size, of in (("tid", block, thread), ("ctaid", grid, number)):
            places = (of % size[0], of // size[0] % size[1], of // (size[0] * size[1]))
            self.special |= {f"%{name}.{a}": v.astype(np.uint32) for a, v in zip("xyz", places, strict=True)}
        self.params = {name: (KINDS[kind], value) for (kind, name), value in zip(kernel.params, values, strict=True)}
        self.registers: dict[str, Array] = {}
        self.shared = np.zeros((len(blocks), -(-kernel.shared_bytes // 16) * 16), np.uint8)
        self.local = np.full((self.lanes, -(-kernel.local_bytes // 16) * 16), 0xFF, np.uint8)
        self.is_written = np.zeros(self.shared.shape, bool)
        self.writer, self.reader = (np.full(self.shared.shape, -1, np.int64) for _ in range(2))
        self.copies: list[tuple[Array, ...]] = []
        self.commits = np.zeros(self.lanes, np.int64)
        self.pc = np.zeros(self.lanes, np.int64)
        self.waits, self.is_parked, self.is_done = (np.zeros(self.lanes, bool) for _ in range(3))

    # Control flow

    def run(self) -> None:
        """Execute until all threads have returned."""
        while not self.is_done.all():
            ready = ~(self.waits | self.is_done | self.is_parked)
            if ready.any():
                now = int(self.pc[ready].min())
                self._go_on(now, ready & (self.pc == now))
            elif self.is_parked.any():
                self._unpark()
            else:
                self._release()

    def _go_on(self, now: int, at: Array) -> None:
        """Execute instructions of the lanes `at`, straight on until they jump, wait or meet others."""
        code, is_converged = self.kernel.code, bool(at.all())
        if not is_converged and _needs_warp(code[now]):
            at = self._whole_warps(at)
            if not at.any():
                return
        while True:
            instruction = code[now]
            op, mask = instruction.op, at
            if instruction.predicate is not None:
                mask = at & (self.registers[instruction.predicate] ^ instruction.is_negated)
            self.count[_counted_name(op)] += int(at.reshape(-1, WARP).any(1).sum()) if self.lanes % WARP == 0 else 1
            if op[0] == "bra":
                self.pc[at] = now + 1
                self.pc[mask] = self.kernel.labels[instruction.operands[0]]
                return
            if op[0] in ("ret", "exit", "bar", "barrier"):
                finished = self.is_done if op[0] in ("ret", "exit") else self.waits
                finished |= mask
                self.pc[at] = now + 1
                return
            if op[0] == "trap" and mask.any():
                raise FaultError("a trap")
            if mask.any():
                self._step(instruction, mask, is_whole=is_converged and bool(mask.all()))
            now += 1
            self.pc[at] = now
            if not is_converged:
                return

    def _whole_warps(self, at: Array) -> Array:
        """The lanes whose warp is all there; the others of these wait for their warps."""
        there, alive = at.reshape(-1, WARP), ~self.is_done.reshape(-1, WARP)
        full = (there == alive).all(1, keepdims=True)
        self.is_parked |= (there & ~full).reshape(-1)
        return (there & full).reshape(-1)

    def _unpark(self) -> None:
        """Warps go on when all of their lanes have come to one place."""
        parked, alive = self.is_parked.reshape(-1, WARP), ~self.is_done.reshape(-1, WARP)
        pc = np.where(parked, self.pc.reshape(-1, WARP), -1)
        is_together = (np.where(parked, pc, pc.max(1, keepdims=True)) == pc.max(1, keepdims=True)).all(1)
        free = parked & ((parked == alive).all(1) & is_together)[:, None]
        if not free.any():
            raise FaultError("an instruction of a warp that some of its lanes do not reach")
        self.is_parked &= ~free.reshape(-1)

    def _release(self) -> None:
        """Barriers let a block go when all of its threads are there."""
        waits = self.waits.reshape(-1, self.threads)
        if (~waits.all(1) & waits.any(1)).any():
            raise FaultError("a barrier that some threads of a block do not reach")
        self.waits[:] = False
        self.writer[:] = self.reader[:] = -1

    # Operands

    def get(self, name: str, kind: Any) -> Array:
        """The value of an operand, by lanes or one for all, as the kind."""
        if name in self.special:
            return _as_kind(self.special[name], kind)
        if name[0] == "%":
            return _as_kind(self.registers[name], kind)
        if name in self.kernel.symbols:
            return np.asarray(self.kernel.symbols[name], kind)
        if name.startswith("__local_depot"):
            return np.asarray(0, kind)
        if name[:2] in ("0f", "0F"):
            return _as_kind(np.uint32(int(name[2:], 16)), kind)
        if name[:2] in ("0d", "0D"):
            return _as_kind(np.uint64(int(name[2:], 16)), kind)
        if kind == np.bool_:
            return np.bool_(name not in ("0", "false"))
        bits = BITS[kind.itemsize]
        return np.array(int(name, 0) & ((1 << 8 * kind.itemsize) - 1)).astype(bits).view(kind)

    def put(self, name: str, value: Array, mask: Array, *, is_whole: bool) -> None:
        """Store to a register in the lanes of the mask."""
        if name == "_":
            return
        value = np.asarray(value)
        if value.dtype != np.bool_:
            value = value.view(BITS[value.dtype.itemsize])
        value = np.broadcast_to(value, (self.lanes,))
        if is_whole or name not in self.registers:
            self.registers[name] = np.array(value)
        else:
            self.registers[name] = np.where(mask, value, self.registers[name])

    def address(self, operand: str) -> Array:
        match = re.match(r"([%\w$.]+)\+?(.*)$", operand[1:-1])
        assert match is not None
        base = self.get(match[1], KINDS["b64"]).astype(np.int64)
        return np.broadcast_to(base + int(match[2] or 0), (self.lanes,))

    # Memory

    def _space(self, op: tuple[str, ...], address: Array, mask: Array) -> tuple[str, Array]:
        """(space, address in it) of an access that may be generic."""
        for name in ("global", "shared", "local"):
            if name in op:
                return name, address
        first = int(address[mask][0])
        if first >= LOCAL:
            return "local", address - LOCAL
        return ("shared", address - SHARED) if first >= SHARED else ("global", address)

    def _places(self, at: Array, size: int, mask: Array, space: str) -> tuple[Array, Array | None]:
        """Offsets, and rows, of active lanes, after every check."""
        at = at[mask]
        if (at % size).any():
            raise FaultError(f"an access of {size} bytes that is not aligned")
        if space == "global":
            at = at - self.device.base
            place = np.searchsorted(self.device.starts, at, "right") - 1
            if (place < 0).any() or (at + size > self.device.ends[np.maximum(place, 0)]).any():
                raise FaultError("an access outside of an allocation")
            return at, None
        limit = self.kernel.local_bytes if space == "local" else self.kernel.shared_bytes
        if (at < 0).any() or (at + size > limit).any():
            raise FaultError(f"an access outside of {space} memory")
        return at, np.nonzero(mask)[0] if space == "local" else self.block[mask]

    def _watch(self, at: Array, row: Array | None, size: int, step: int, mask: Array, *, writes: bool) -> None:
        """Report races, and reads of shared memory that nobody wrote."""
        if not self.device.checks_races:
            return
        device = self.device
        for part in range(0, size, step):
            place: Any = at + part if row is None else (row, at + part)
            writer, reader = (device.writer, device.reader) if row is None else (self.writer, self.reader)
            who, least = (self.who[mask], device.epoch) if row is None else (self.thread[mask], 0)
            if row is not None and not writes and not self.is_written[place].all():
                raise FaultError("a read of shared memory that nobody wrote")
            self._refuse(writer[place], who, least)
            if writes:
                self._refuse(reader[place], who, least)
                writer[place] = who
                self._refuse(writer[place], who, least)
                if row is not None:
                    self.is_written[place] = True
                continue
            seen = reader[place]
            several = least + _SEVERAL
            reader[place] = np.where((seen < least) | (seen == who), who, several)
            others = reader[place] != who  # of several readers in one instruction, the last stays
            if others.any():
                reader[place[others] if row is None else (row[others], at[others] + part)] = several

    def _refuse(self, seen: Array, who: Array, least: int) -> None:
        if ((seen >= least) & (seen != who)).any():
            raise FaultError("a race: two threads touch one place, and one of them writes")

    def _note_traffic(self, at: Array, size: int, mask: Array, space: str) -> None:
        """Count bytes, sectors of 32 bytes that a warp's access touches, and cycles of banks."""
        if not self.device.counts_traffic:
            return
        if space == "local":
            self.count["#local bytes"] += len(at) * size
            return
        lane = np.nonzero(mask)[0]
        if space == "global":
            self.count["#global bytes"] += len(at) * size
            self.count["#global sectors"] += len(np.unique(np.stack([lane // WARP, at // 32], 1), axis=0))
            return
        words = max(1, size // 4)  # 16 bytes a lane are served in quarters of a warp
        phase = lane // WARP * WARP + lane % WARP // (WARP // words)
        accesses = np.unique(np.stack([phase, at // 4], 1), axis=0)
        banks = Counter(map(tuple, np.stack([accesses[:, 0], accesses[:, 1] % 32 // words], 1).tolist()))
        worst: Counter[int] = Counter()
        for (number, _), used in banks.items():
            worst[number] = max(worst[number], -(-used // words))
        self.count["#shared accesses"] += len(worst)
        self.count["#shared cycles"] += sum(worst.values())

    def _memory(self, space: str) -> Array:
        return {"shared": self.shared, "local": self.local, "global": self.device.memory}[space]

    def read(self, at: Array, kind: Any, count: int, mask: Array, space: str) -> list[Array]:
        """`count` elements from an address on, in the active lanes."""
        size = kind.itemsize * count
        at, row = self._places(at, size, mask, space)
        self._note_traffic(at, size, mask, space)
        if space != "local":
            self._watch(at, row, size, min(kind.itemsize, 4), mask, writes=False)
        source, unit = self._memory(space).view(BITS[kind.itemsize]), at // kind.itemsize
        return [source[unit + n if row is None else (row, unit + n)] for n in range(count)]

    def write(self, at: Array, values: list[Array], mask: Array, space: str) -> None:
        kind = values[0].dtype
        size = kind.itemsize * len(values)
        at, row = self._places(at, size, mask, space)
        self._note_traffic(at, size, mask, space)
        if space != "local":
            self._watch(at, row, size, min(kind.itemsize, 4) if row is None else 1, mask, writes=True)
        target, unit = self._memory(space).view(BITS[kind.itemsize]), at // kind.itemsize
        for n, value in enumerate(values):
            full = np.broadcast_to(value, (self.lanes,))[mask].view(BITS[kind.itemsize])
            target[unit + n if row is None else (row, unit + n)] = full

    def scattered(self, values: Array, mask: Array, kind: Any) -> Array:
        """An array for all lanes with values in the active ones."""
        full = np.zeros(self.lanes, kind)
        full[mask] = values
        return full

    # Instructions

    def _step(self, instruction: Instruction, mask: Array, *, is_whole: bool) -> None:
        op, operands = instruction.op, instruction.operands
        method = getattr(self, f"_{op[0]}", None)
        with np.errstate(all="ignore"):
            if method is not None:
                method(op, operands, mask, is_whole)
                return
            if op[0] not in ALU:
                raise FaultError(f"the simulator does not know {'.'.join(op)} {operands}")
            kind = KINDS[op[-1]]
            sources = [self.get(source, _operand_kind(op, kind, n)) for n, source in enumerate(operands[1:])]
            self.put(operands[0], ALU[op[0]](op, kind, *sources), mask, is_whole=is_whole)

    def _cvta(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        start = {"local": LOCAL, "shared": SHARED, "global": 0}[op[2] if op[1] == "to" else op[1]]
        value = self.get(o[1], KINDS["s64"])
        self.put(o[0], value - start if op[1] == "to" else value + start, mask, is_whole=is_whole)

    def _mov(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        kind = KINDS[op[-1]]
        if isinstance(o[1], tuple):  # pack
            part = KINDS[f"b{8 * kind.itemsize // len(o[1])}"]
            parts = [np.broadcast_to(self.get(name, part), (self.lanes,)) for name in o[1]]
            self.put(o[0], np.stack(parts, -1).view(BITS[kind.itemsize]).reshape(-1), mask, is_whole=is_whole)
        elif isinstance(o[0], tuple):
            full = np.ascontiguousarray(np.broadcast_to(self.get(o[1], kind), (self.lanes,)))
            parts = full.view(BITS[kind.itemsize // len(o[0])]).reshape(self.lanes, -1)
            for n, name in enumerate(o[0]):
                self.put(name, parts[:, n].copy(), mask, is_whole=is_whole)
        else:
            self.put(o[0], self.get(o[1], kind), mask, is_whole=is_whole)

    def _ld(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        kind = KINDS[op[-1]]
        if op[1] == "param":
            dtype, value = self.params[o[1][1:-1]]
            self.put(o[0], np.asarray(value, BITS[dtype.itemsize]), mask, is_whole=is_whole)
            return
        names = o[0] if isinstance(o[0], tuple) else (o[0],)
        space, at = self._space(op, self.address(o[1]), mask)
        for name, value in zip(names, self.read(at, kind, len(names), mask, space), strict=True):
            full = self.scattered(value, mask, value.dtype)
            if kind.itemsize < 4 and kind.kind in "iu":  # the register may be wider
                full = full.view(kind).astype(np.int32).view(np.uint32)
            self.put(name, full, mask, is_whole=is_whole)

    def _st(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        names = o[1] if isinstance(o[1], tuple) else (o[1],)
        space, at = self._space(op, self.address(o[0]), mask)
        self.write(at, [self.get(name, KINDS[op[-1]]) for name in names], mask, space)

    def _atom(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        assert op[-2:] == ("max", "u32"), op
        at, _ = self._places(self.address(o[1]), 4, mask, "global")
        value = np.broadcast_to(self.get(o[2], KINDS["u32"]), (self.lanes,))[mask]
        words = self.device.memory.view(np.uint32)
        before = words[at // 4]
        np.maximum.at(words, at // 4, value)
        self.put(o[0], self.scattered(before, mask, np.uint32), mask, is_whole=is_whole)

    def _setp(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        kind, test = KINDS[op[-1]], op[1]
        a, b = self.get(o[1], kind), self.get(o[2], kind)
        unordered = np.isnan(a) | np.isnan(b) if is_float(kind) else np.bool_(False)
        if test in ("nan", "num"):
            found = unordered if test == "nan" else ~unordered
        elif test[-1] == "u":
            found = COMPARE[test[:-1]](a, b) | unordered
        else:
            found = COMPARE[test](a, b) & ~unordered
        self.put(o[0], found, mask, is_whole=is_whole)

    def _selp(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        kind = KINDS[op[-1]]
        chosen = np.where(self.registers[o[3]], self.get(o[1], kind), self.get(o[2], kind))
        self.put(o[0], chosen, mask, is_whole=is_whole)

    def _cvt(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        if op[-2] in ("f16x2", "bf16x2"):
            half = KINDS[op[-2][:-2]]
            parts = [np.broadcast_to(self.get(x, KINDS["f32"]), (self.lanes,)).astype(half) for x in (o[2], o[1])]
            self.put(o[0], np.stack(parts, 1).view(np.uint32).reshape(-1), mask, is_whole=is_whole)
            return
        to, of = KINDS[op[-2]], KINDS[op[-1]]
        x = self.get(o[1], of)
        rounding = next((ROUND[part] for part in op if part in ROUND), None)
        if not is_float(to) and is_float(of):
            assert rounding is not None
            whole, info = rounding(x.astype(np.float64)), np.iinfo(to)
            inside = np.clip(np.nan_to_num(whole), float(info.min), float(info.max))
            x = np.where(whole >= float(info.max), info.max, inside.astype(to))
        elif rounding is not None:
            x = rounding(x)
        self.put(o[0], x.astype(to), mask, is_whole=is_whole)

    def _dp4a(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        total = self.get(o[3], KINDS["s32"])
        parts = []
        for name, kind in zip(o[1:3], op[1:3], strict=True):
            words = np.ascontiguousarray(np.broadcast_to(self.get(name, KINDS[kind]), (self.lanes,)))
            parts.append(words.view(KINDS[f"{kind[0]}8"]).reshape(-1, 4).astype(np.int32))
        dot = (parts[0] * parts[1]).sum(1, dtype=np.int32) + total
        self.put(o[0], dot.astype(np.int32), mask, is_whole=is_whole)

    # Instructions of warps

    def _shfl(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        self._require_warps(mask, "a shuffle")
        assert op[2] == "bfly", op
        x = np.broadcast_to(self.get(o[1], KINDS["b32"]), (self.lanes,)).reshape(-1, WARP)
        moved = x[:, np.arange(WARP) ^ int(o[2], 0)].reshape(-1)
        self.put(o[0].split("|")[0], moved, mask, is_whole=is_whole)

    def _require_warps(self, mask: Array, what: str) -> None:
        warps = mask.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise FaultError(f"{what} in a part of a warp")

    def _ldmatrix(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        self._require_warps(mask, "ldmatrix")
        words = self.read(self.address(o[1]), KINDS["b32"], 4, mask, "shared")
        rows = np.stack(words, 1).view(np.uint16).reshape(-1, WARP, 8)
        matrices = load_matrices(rows, is_transposed="trans" in op)
        for n, name in enumerate(o[0]):
            self.put(name, self.scattered(matrices[:, :, n].reshape(-1), mask, np.int32), mask, is_whole=is_whole)

    def _mma(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        self._require_warps(mask, "mma")
        mma = _BY_PTX[".".join(op)]
        kinds = ("b32", "b32", "s32" if mma.total == "int32" else "f32")
        a, b, c = (self._fragment(names, KINDS[kind], mask) for names, kind in zip(o[1:4], kinds, strict=True))
        totals = multiply(mma, a.view(np.int32), b.view(np.int32), c).reshape(-1, 4)
        for n, name in enumerate(o[0]):
            self.put(name, self.scattered(totals[:, n], mask, totals.dtype), mask, is_whole=is_whole)

    def _fragment(self, names: tuple[str, ...], kind: Any, mask: Array) -> Array:
        words = [np.broadcast_to(self.get(name, kind), (self.lanes,)) for name in names]
        return np.stack(words, 1)[mask].reshape(-1, WARP, len(names))

    def _cp(self, op: Any, o: Any, mask: Array, is_whole: bool) -> None:
        if op[2] == "commit_group":
            self.commits[mask] += 1
        elif op[2] == "wait_group":
            self._wait_group(int(o[0]), mask)
        else:
            self._copy_async(o, mask)

    def _copy_async(self, o: Any, mask: Array) -> None:
        """Read now; the place counts as written when the copy's group has been waited for."""
        to, size = self.address(o[0]), int(o[2])
        counts = (
            np.broadcast_to(self.get(o[3], KINDS["s32"]), (self.lanes,)) if len(o) > 3 else np.full(self.lanes, size)
        )
        values = np.zeros((self.lanes, size), np.uint8)
        reads = mask & (counts > 0)
        if reads.any():
            words = self.read(self.address(o[1]), KINDS["b32"], size // 4, reads, "global")
            values[reads] = np.stack(words, 1).view(np.uint8).reshape(-1, size)
        values[np.arange(size) >= counts[:, None]] = 0
        place, row = self._places(to, size, mask, "shared")
        self._watch(place, row, size, 1, mask, writes=True)
        assert row is not None
        rows, bytes_at = row[:, None], place[:, None] + np.arange(size)
        self.is_written[rows, bytes_at] = False
        lanes = np.nonzero(mask)[0]
        self.copies.append((rows, bytes_at, values[mask], lanes, self.commits[lanes]))

    def _wait_group(self, allowed: int, mask: Array) -> None:
        unfinished = []
        for rows, bytes_at, values, lanes, groups in self.copies:
            is_finished = mask[lanes] & (groups < self.commits[lanes] - allowed)
            self.shared[rows[is_finished], bytes_at[is_finished]] = values[is_finished]
            self.is_written[rows[is_finished], bytes_at[is_finished]] = True
            rest = ~is_finished
            if rest.any():
                unfinished.append((rows[rest], bytes_at[rest], values[rest], lanes[rest], groups[rest]))
        self.copies = unfinished


def _needs_warp(instruction: Instruction) -> bool:
    return "sync" in instruction.op[1:2] and instruction.op[0] != "bar"


def _counted_name(op: tuple[str, ...]) -> str:
    if op[0] == "cp":
        return ".".join(op[:3])
    return ".".join(op[:2]) if op[0] in _COUNTED_BY_SPACE else op[0]


def _operand_kind(op: tuple[str, ...], kind: Any, number: int) -> Any:
    """Kind of an operand of an arithmetic instruction: shifts and fields have 32-bit counts, wide sums wide ones."""
    if (op[0] in ("shl", "shr") and number == 1) or (op[0] == "bfe" and number > 0):
        return KINDS["u32"]
    if op[0] == "mad" and "wide" in op and number == 2:
        return np.dtype(f"{kind.kind}{2 * kind.itemsize}")
    return kind


def _as_kind(value: Array, kind: Any) -> Array:
    """A register's bits as a kind; of a wider register the low bits."""
    value = np.asarray(value)
    if value.dtype == kind:
        return value
    if value.dtype.itemsize == kind.itemsize and value.dtype != np.bool_:
        return value.view(kind)
    return value.astype(BITS[kind.itemsize]).view(kind) if kind != np.bool_ else value.astype(np.bool_)
