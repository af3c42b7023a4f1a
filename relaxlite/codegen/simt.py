"""Execute programs with launches (ir/launch.py) in NumPy: the oracle of schedules for GPUs.

The threads of many blocks are the lanes of NumPy arrays, and execute one statement after the other. Programs for which
that order matters are errors, since a GPU does not keep it: KernelFaultError for

- a race: two threads access one element, one of them writes, and no barrier stands between. Barriers order the threads
  of a block in shared memory; in global memory nothing orders two threads of a launch;
- a read of shared or local memory that nobody wrote, or into which an asynchronous copy is unfinished;
- a barrier that some threads of a block do not reach, and a warp instruction in a part of a warp.

Accesses outside of a buffer are OutOfBoundsError. The host's part runs as one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.python_source import poisoned
from relaxlite.errors import ExecutionError, KernelFaultError, OutOfBoundsError
from relaxlite.gpus import WARP
from relaxlite.ir import scalar_functions as scalar
from relaxlite.ir.intrinsics import SHUFFLE_XOR
from relaxlite.ir.launch import BLOCK_AXES, THREAD_AXES, is_launch
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallLibrary,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import FloorDiv, FloorMod, Max, Min, SymExpr, SymVar
from relaxlite.ir.warp import COPY_BYTES, INSTRUCTIONS, LIBRARY, load_matrices, multiply
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"
Environment: TypeAlias = "dict[SymVar, Any]"  # an integer, or an array of one for each lane

MAX_LANES = 1 << 15  # that execute together; further blocks come after them
_NOBODY, _SEVERAL = -1, -2  # in place of a thread's number


def run_launches(program: TensorProgram, arrays: Sequence[Array], symbols: Mapping[SymVar, int]) -> None:
    """Execute a program on arrays: inputs, then outputs. Errors are those of the module's docstring, and ExecutionError
    of a failed check."""
    dense = [np.ascontiguousarray(array) for array in arrays]
    memory = {b: _Memory(array.reshape(1, -1), None) for b, array in zip(program.params, dense, strict=True)}
    host = _Lanes(memory, dict(symbols), np.zeros(1, np.int64), np.zeros(1, np.int64))
    with np.errstate(all="ignore"):
        host.stmt(program.body)
    for array, copy in zip(arrays, dense, strict=True):
        if copy is not array and array.flags.writeable:
            array[...] = copy


class _Memory:
    """The elements of a buffer: one row for all lanes (global), for each block (shared) or for each lane (local).

    `owner`: the row of each lane. In `writer` and `reader` are the threads that accessed an element since the last
    barrier, in `is_known` whether it has been written.
    """

    def __init__(self, elements: Array, owner: Array | None, *, is_known: bool = True) -> None:
        self.elements, self.owner = elements, owner
        self.is_known = np.full(elements.shape, is_known)
        self.writer = np.full(elements.shape, _NOBODY, np.int64)
        self.reader = np.full(elements.shape, _NOBODY, np.int64)

    def row_of(self, mask: Array) -> Array:
        """The row of each active lane."""
        return np.zeros(int(mask.sum()), np.int64) if self.owner is None else self.owner[mask]

    def forget_accesses(self, rows: Any = slice(None)) -> None:
        self.writer[rows] = self.reader[rows] = _NOBODY


@dataclass(frozen=True, slots=True)
class _Copy:
    """An unfinished asynchronous copy of some lanes, and the number of the group that each lane's copy belongs to."""

    memory: _Memory
    rows: Array
    places: Array  # (lanes, elements)
    values: Array
    lanes: Array
    groups: Array

    def __getitem__(self, chosen: Array) -> _Copy:
        parts = (self.rows, self.places, self.values, self.lanes, self.groups)
        return _Copy(self.memory, *(part[chosen] for part in parts))

    def finish(self) -> None:
        self.memory.elements[self.rows, self.places] = self.values
        self.memory.is_known[self.rows, self.places] = True


class _Lanes:
    """Some lanes that execute statements together: the host's one, or the threads of some blocks of a launch.

    `block`: the number of each lane's block among these, `thread`: of its thread among all of the launch.
    """

    def __init__(self, memory: dict[Buffer, _Memory], env: Environment, block: Array, thread: Array) -> None:
        self.memory, self.env, self.block, self.thread = memory, env, block, thread
        self.count = len(thread)
        self.mask = np.ones(self.count, bool)
        self.copies: list[_Copy] = []
        self.commits = np.zeros(self.count, np.int64)  # of each lane: the number of its present group
        self.thread_places: Mapping[Any, Array] = {}  # thread axis -> place of each lane

    # Launches

    def _launch(self, stmt: For) -> None:
        axes, inner = [], stmt
        while isinstance(inner, For) and inner.kind in BLOCK_AXES:
            axes.append((inner.var, int(self.index(inner.extent))))
            inner = inner.body  # type: ignore[assignment]
        nests = {s.kind: s for s in walk_stmts(inner) if isinstance(s, For) and s.kind in THREAD_AXES}
        threads = [(s.kind, int(self.index(s.extent))) for s in nests.values()]
        per_block, blocks = prod(n for _, n in threads), prod(n for _, n in axes)
        for memory in self.memory.values():
            memory.forget_accesses()
        step = max(1, MAX_LANES // per_block)
        for first in range(0, blocks, step):
            numbers = np.arange(first, min(blocks, first + step))
            block, thread = np.repeat(numbers, per_block), np.tile(np.arange(per_block), len(numbers))
            env = {**self.env, **_coordinates(axes, block)}
            lanes = _Lanes(dict(self.memory), env, block - first, block * per_block + thread)
            lanes.thread_places = _coordinates(threads, thread)
            lanes.stmt(inner)

    # Indices and values

    def index(self, expr: SymExpr) -> Any:
        """Value of a symbolic integer: one, or an array of one for each lane."""
        total: Any = expr.const
        for monomial, factor in expr.terms:
            term: Any = factor
            for atom in monomial:
                term = term * (self.env[atom] if isinstance(atom, SymVar) else self._atom(atom))
            total = total + term
        return total

    def _atom(self, atom: Any) -> Any:
        a, b = self.index(atom.a), self.index(atom.b)
        return _ATOMS[type(atom)](a, b)

    def on_lanes(self, value: Any) -> Array:
        """One for each lane."""
        return np.broadcast_to(value, (self.count,))

    def place(self, buffer: Buffer, indices: Sequence[SymExpr]) -> tuple[_Memory, Array, Array]:
        """Memory, row and offset of each active lane's element. OutOfBoundsError."""
        for index, dim in zip(indices, buffer.shape, strict=True):
            at, size = self.on_lanes(self.index(index))[self.mask], self.on_lanes(self.index(dim))[self.mask]
            if ((at < 0) | (at >= size)).any():
                raise OutOfBoundsError(f"an access of {buffer.name} at {index} is outside of 0..{dim - 1}")
        memory = self.memory[buffer]
        offset = self.on_lanes(self.index(flat_offset(buffer.shape, tuple(indices))))[self.mask]
        return memory, memory.row_of(self.mask), offset

    def value(self, value: Value) -> Any:
        """A value: one, or an array of one for each lane."""
        return _VALUES[type(value)](self, value)

    def _load(self, value: Load) -> Array:
        memory, row, at = self.place(value.buffer, value.indices)
        self.note_read(value.buffer, memory, row, at)
        result = np.zeros(self.count, memory.elements.dtype)
        result[self.mask] = memory.elements[row, at]
        return result

    def _select(self, value: Select) -> Any:
        cond, sides = self.on_lanes(self.value(value.cond)), []
        for active, side in ((cond, value.then), (~cond, value.other)):
            with self.only(active):
                sides.append(self.value(side))
        return np.where(cond, *sides)

    def _intrinsic(self, value: Intrinsic) -> Any:
        if value.name == SHUFFLE_XOR:
            self.require_warps("a shuffle")
            x, distance = self.on_lanes(self.value(value.args[0])).reshape(-1, WARP), self.value(value.args[1])
            return x[:, np.arange(WARP) ^ int(distance)].reshape(-1)
        return scalar.apply_intrinsic(value.name, tuple(np.asarray(self.value(arg)) for arg in value.args))

    # Accesses

    def note_read(self, buffer: Buffer, memory: _Memory, row: Array, at: Array) -> None:
        """Record reads of active lanes. KernelFaultError for a race, or an element that nobody wrote."""
        if not memory.is_known[row, at].all():
            raise KernelFaultError(f"a read of {buffer.name} where nobody wrote")
        if buffer.scope == "local":
            return
        own = self.thread[self.mask]
        self._refuse_race(buffer, memory.writer[row, at], own)
        seen = memory.reader[row, at]
        memory.reader[row, at] = np.where((seen == _NOBODY) | (seen == own), own, _SEVERAL)
        others = memory.reader[row, at] != own  # of several readers in one statement, the last is recorded
        memory.reader[row[others], at[others]] = _SEVERAL

    def note_write(self, buffer: Buffer, memory: _Memory, row: Array, at: Array) -> None:
        """Record writes of active lanes. KernelFaultError for a race."""
        if buffer.scope == "local":
            return
        own = self.thread[self.mask]
        self._refuse_race(buffer, memory.writer[row, at], own)
        self._refuse_race(buffer, memory.reader[row, at], own)
        memory.writer[row, at] = own
        self._refuse_race(buffer, memory.writer[row, at], own)

    def _refuse_race(self, buffer: Buffer, seen: Array, own: Array) -> None:
        if ((seen != _NOBODY) & (seen != own)).any():
            raise KernelFaultError(f"a race: several threads access an element of {buffer.name}, and one writes it")

    @contextmanager
    def only(self, active: Array) -> Iterator[None]:
        """Restrict the active lanes."""
        outer, self.mask = self.mask, self.mask & active
        yield
        self.mask = outer

    def require_warps(self, what: str) -> None:
        """KernelFaultError unless the active lanes are whole warps."""
        warps = self.mask.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise KernelFaultError(f"{what} in a part of a warp")

    # Statements

    def stmt(self, stmt: Stmt) -> None:
        if self.mask.any():
            _STATEMENTS[type(stmt)](self, stmt)

    def _seq(self, stmt: Seq) -> None:
        for part in stmt.stmts:
            self.stmt(part)

    def _for(self, stmt: For) -> None:
        if is_launch(stmt):
            self._launch(stmt)
        elif stmt.kind in THREAD_AXES:
            self.env[stmt.var] = self.thread_places[stmt.kind]
            self.stmt(stmt.body)
        else:
            extents = self.on_lanes(self.index(stmt.extent))
            for i in range(int(extents[self.mask].max(initial=0))):
                with self.only(extents > i):
                    self.env[stmt.var] = i
                    self.stmt(stmt.body)

    def _store(self, stmt: Store) -> None:
        value = self.on_lanes(self.value(stmt.value))[self.mask]
        memory, row, at = self.place(stmt.buffer, stmt.indices)
        if stmt.combine is not None:
            self.note_read(stmt.buffer, memory, row, at)
            value = scalar.apply_combine(stmt.combine, memory.elements[row, at], value)
        self.note_write(stmt.buffer, memory, row, at)
        memory.elements[row, at] = value
        memory.is_known[row, at] = True

    def _if(self, stmt: IfThenElse) -> None:
        cond = self.on_lanes(self.value(stmt.cond))
        for active, part in ((cond, stmt.then), (~cond, stmt.other)):
            if part is not None:
                with self.only(active):
                    self.stmt(part)

    def _let(self, stmt: LetIndex) -> None:
        self.env[stmt.var] = np.asarray(self.value(stmt.value)).astype(np.int64)
        self.stmt(stmt.body)

    def _allocate(self, stmt: Allocate) -> None:
        buffer = stmt.buffer
        count = prod(int(np.max(self.index(dim))) for dim in buffer.shape)
        owner = {"global": None, "shared": self.block, "local": np.arange(self.count)}[buffer.scope]
        rows = 1 if owner is None else int(owner.max()) + 1
        self.memory[buffer] = _Memory(poisoned((rows, count), buffer.dtype), owner, is_known=False)
        self.stmt(stmt.body)

    def _check(self, stmt: Check) -> None:
        if not self.on_lanes(self.value(stmt.cond))[self.mask].all():
            raise ExecutionError(stmt.message)

    def _barrier(self, stmt: Barrier) -> None:
        per_block = self.count // (int(self.block.max()) + 1)
        blocks = self.mask.reshape(-1, per_block)
        if (blocks.any(1) != blocks.all(1)).any():
            raise KernelFaultError("a barrier that some threads of a block do not reach")
        for memory in self.memory.values():
            if memory.owner is self.block:
                memory.forget_accesses(np.nonzero(blocks.any(1))[0])

    def _ignore(self, stmt: Prefetch) -> None:
        pass

    # Warp instructions

    def _call(self, stmt: CallLibrary) -> None:
        if stmt.library != LIBRARY:
            raise ExecutionError(f"the interpreter calls no libraries: {stmt.symbol} of {stmt.library}")
        if INSTRUCTIONS[stmt.symbol].needs_warp:
            self.require_warps(stmt.symbol)
        if (mma := INSTRUCTIONS[stmt.symbol].mma) is not None:
            c, a, b = (self._fragment(arg, n) for arg, n in zip(stmt.args, (4, 4, 2), strict=True))
            self._keep(stmt.args[0], multiply(mma, a, b, c))
        else:
            _WARP[stmt.symbol](self, *stmt.args)

    def _fragment(self, address: Value, words: int) -> Array:
        """The words of a fragment: (warps, 32, words)."""
        assert isinstance(address, AddressOf)
        memory, row, at = self.place(address.buffer, address.indices)
        rows, offsets = row[:, None], at[:, None] + np.arange(words)
        if not memory.is_known[rows, offsets].all():
            raise KernelFaultError(f"a read of {address.buffer.name} where nobody wrote")
        return memory.elements[rows, offsets].reshape(-1, WARP, words)

    def _keep(self, address: Value, words: Array) -> None:
        """Store the words (warps, 32, words) of a fragment."""
        assert isinstance(address, AddressOf)
        memory, row, at = self.place(address.buffer, address.indices)
        rows, offsets = row[:, None], at[:, None] + np.arange(words.shape[-1])
        memory.elements[rows, offsets] = words.reshape(len(at), -1)
        memory.is_known[rows, offsets] = True

    def _load_matrix(self, to: AddressOf, source: AddressOf, *, is_transposed: bool = False) -> None:
        memory, row, at = self.place(source.buffer, source.indices)
        for n in range(8):
            self.note_read(source.buffer, memory, row, at + n)
        rows = memory.elements[row[:, None], at[:, None] + np.arange(8)].reshape(-1, WARP, 8)
        self._keep(to, load_matrices(rows, is_transposed=is_transposed))

    def _load_matrix_t(self, to: AddressOf, source: AddressOf) -> None:
        self._load_matrix(to, source, is_transposed=True)

    def _copy_async(self, to: AddressOf, source: AddressOf, size: Value) -> None:
        """Read now; the elements become known when the copy's group is waited for."""
        memory, row, at = self.place(to.buffer, to.indices)
        itemsize, sizes = memory.elements.itemsize, self.on_lanes(self.value(size))
        lanes = np.arange(COPY_BYTES // itemsize)
        values = np.zeros((len(at), len(lanes)), memory.elements.dtype)
        is_read, outer = sizes > 0, self.mask
        with self.only(is_read):
            if self.mask.any():
                taken, _, start = self.place(source.buffer, source.indices)
                wanted = lanes * itemsize < sizes[self.mask][:, None]
                offsets = np.minimum(start[:, None] + lanes, taken.elements.shape[1] - 1)
                values[is_read[outer]] = np.where(wanted, taken.elements[0, offsets], 0)
        places = at[:, None] + lanes
        for n in lanes:
            self.note_write(to.buffer, memory, row, places[:, n])
        memory.is_known[row[:, None], places] = False
        active = np.nonzero(self.mask)[0]
        self.copies.append(_Copy(memory, row[:, None], places, values, active, self.commits[active]))

    def _commit(self) -> None:
        self.commits[self.mask] += 1

    def _wait(self, count: Literal) -> None:
        unfinished = []
        for copy in self.copies:
            is_done = self.mask[copy.lanes] & (copy.groups < self.commits[copy.lanes] - int(count.value))
            copy[is_done].finish()
            unfinished += [] if is_done.all() else [copy[~is_done]]
        self.copies = unfinished


def _coordinates(axes: Sequence[tuple[Any, int]], number: Array) -> dict[Any, Array]:
    """Place on each axis of a number in row-major order."""
    places, rest = {}, number
    for name, extent in reversed(axes):
        places[name], rest = rest % extent, rest // extent
    return places


def _floor_div(a: Any, b: Any) -> Any:
    return np.where(np.equal(b, 0), 0, a // np.where(np.equal(b, 0), 1, b))


def _floor_mod(a: Any, b: Any) -> Any:
    return np.where(np.equal(b, 0), 0, a % np.where(np.equal(b, 0), 1, b))


_ATOMS: Mapping[type, Callable[[Any, Any], Any]] = {
    FloorDiv: _floor_div,
    FloorMod: _floor_mod,
    Min: np.minimum,
    Max: np.maximum,
}
_VALUES: Mapping[type, Callable[[_Lanes, Any], Any]] = {
    Literal: lambda k, v: np.asarray(v.value, dtypes.to_numpy(v.dtype)),
    IndexValue: lambda k, v: np.asarray(k.index(v.index)).astype(dtypes.to_numpy(v.dtype)),
    LibraryFound: lambda k, v: np.bool_(False),
    Load: _Lanes._load,
    Unary: lambda k, v: scalar.apply_unary(v.op, np.asarray(k.value(v.x))),
    Binary: lambda k, v: scalar.apply_binary(v.op, np.asarray(k.value(v.a)), np.asarray(k.value(v.b))),
    Compare: lambda k, v: scalar.apply_compare(v.op, np.asarray(k.value(v.a)), np.asarray(k.value(v.b))),
    Cast: lambda k, v: scalar.cast(np.asarray(k.value(v.x)), v.dtype),
    Select: _Lanes._select,
    Intrinsic: _Lanes._intrinsic,
}
_STATEMENTS: Mapping[type, Callable[[_Lanes, Any], None]] = {
    Seq: _Lanes._seq,
    For: _Lanes._for,
    Store: _Lanes._store,
    LetIndex: _Lanes._let,
    IfThenElse: _Lanes._if,
    Allocate: _Lanes._allocate,
    Check: _Lanes._check,
    Prefetch: _Lanes._ignore,
    Barrier: _Lanes._barrier,
    CallLibrary: _Lanes._call,
}
_WARP: Mapping[str, Callable[..., None]] = {
    "copy_async": _Lanes._copy_async,
    "commit": _Lanes._commit,
    "wait": _Lanes._wait,
    "load_matrix": _Lanes._load_matrix,
    "load_matrix_t": _Lanes._load_matrix_t,
}
