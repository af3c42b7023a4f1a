"""State of the code generator while it emits one function of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Literal, TypeAlias

from relaxlite import dtypes
from relaxlite.codegen.llvm.emitter import Emitter, Lines, Val, int_const
from relaxlite.codegen.llvm.indices import Indices
from relaxlite.codegen.llvm.types import memory_elem
from relaxlite.ir.program import Buffer, Value
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.records import dataclass

# Statuses of kernels beside 0 and 1 + the index of a failed check; OUT_OF_BOUNDS only of guarded kernels.
OVERFLOWED, OUT_OF_MEMORY, OUT_OF_BOUNDS = -1, -2, -3

LoadKey: TypeAlias = tuple[Buffer, SymExpr, int, str]  # buffer, offset, lanes, text of the mask
AccessKey: TypeAlias = tuple[
    Buffer, SymExpr, SymVar | None, int, tuple[int, ...]
]  # buffer, offset, lane variable, lanes, values of unrolled variables


@dataclass(frozen=True, slots=True)
class Access:
    """A memory access of one element per lane: `base + stride*lane` if contiguous or strided, else `offset`."""

    buffer: Buffer
    kind: Literal["uniform", "contiguous", "strided", "scattered"]
    offset: SymExpr
    base: SymExpr
    stride: SymExpr | None = None

    @property
    def elem(self) -> str:
        return memory_elem(self.buffer.dtype)

    @property
    def align(self) -> int:
        return dtypes.itemsize(self.buffer.dtype)


@dataclass(slots=True)
class KernelContext:
    """One function under construction: `e` emits instructions, `ix` emits index expressions.

    In a vectorized loop, `lane` is the loop variable and `lanes` its extent; `mask`: the active lanes, None for all;
    `some_active`: at least one lane is known to be active, which is the case between statements.
    """

    name: str
    e: Emitter
    ix: Indices
    checks: dict[str, int]  # message -> index, shared with outlined functions
    entry: Lines  # insertion point of allocas in the entry block
    is_checked: bool = False
    is_guarded: bool = False  # bounds checks at every access, see guarded.py
    in_parallel: bool = False
    lane: SymVar | None = None
    lanes: int = 0
    mask: Val | None = None
    some_active: bool = True
    per_lane: set[Buffer] = field(default_factory=set)  # buffers allocated in the vectorized loop, one copy per lane
    scratch: list[Val] = field(default_factory=list)  # workspaces to free at every return
    loads: dict[LoadKey, Val] = field(default_factory=dict)  # values known to be in memory, for load forwarding
    vector_offsets: dict[LoadKey, int] = field(default_factory=dict)  # constant first element of contiguous `loads`
    values: dict[Value, Val] = field(default_factory=dict)  # emitted values of the current statement
    offsets: dict[tuple[Buffer, tuple[SymExpr, ...]], SymExpr] = field(default_factory=dict)
    accesses: dict[AccessKey, Access] = field(default_factory=dict)
    needs_fence: bool = False  # after nontemporal stores, which must complete before the function returns
    prefetch_distances: dict[Buffer, int] = field(default_factory=dict)  # prefetch distance in bytes, by buffer
    ordered_buffers: frozenset[Buffer] = frozenset()  # buffers whose vector loads LLVM must not reorder
    contains_load: dict[Value, bool] = field(default_factory=dict)  # whether a value contains a load

    # Lanes

    @contextmanager
    def vectorized(self, lane: SymVar, lanes: int) -> Iterator[None]:
        """Enter the body of a vectorized loop."""
        self.lane, self.lanes = lane, lanes
        try:
            yield
        finally:
            self.lane, self.lanes = None, 0

    @contextmanager
    def active(self, cond: Val, *, some_active: bool = True) -> Iterator[None]:
        """Restrict the active lanes to those of `cond`. `some_active`: at least one is known to be active, so uniform
        loads are safe."""
        outer = self.mask, self.some_active
        self.mask = cond if self.mask is None else self.e.binary("and", self.mask, cond, "mask")
        self.some_active = some_active
        try:
            yield
        finally:
            self.mask, self.some_active = outer

    @contextmanager
    def masked(self, cond: Val, *, some_active: bool = False) -> Iterator[None]:
        """Enter `active` for code that may not run: known loads and values are restored afterwards."""
        with self.active(cond, some_active=some_active), self.branch():
            yield

    def when_active(self, cond: Val) -> Val:
        """Emit `cond` in active lanes and false in inactive ones."""
        return cond if self.mask is None else self.e.binary("and", self.mask, cond, "mask")

    def stack_array(self, name: str, elem: str, count: int) -> Val:
        """Alloca of an array, aligned to 64 bytes, in the entry block."""
        with self.e.place(self.entry):
            return self.e.op(f"alloca [{count} x {elem}], align 64", "ptr", 0, name)

    # Known values

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Enter code that may not run: known loads and values are restored afterwards."""
        loads, values = self.loads, self.values
        self.loads, self.values = dict(loads), dict(values)
        try:
            yield
        finally:
            self.loads, self.values = loads, values

    def forget_loads(self) -> None:
        """Invalidate all known loads and values, at control flow and calls."""
        self.loads.clear()
        self.values.clear()

    # Returns

    def finish(self) -> None:
        """Emit the return of success, behind a store fence where nontemporal stores need one."""
        if self.needs_fence and self.e.target.is_x86:
            self.e.call_void("llvm.x86.sse.sfence", [])
        self.e.line("ret i32 0")

    def fail_if(self, cond: Val, status: int) -> None:
        """Emit: return `status` if the scalar `cond` holds."""
        self.return_if(cond, int_const(status, "i32"))

    def return_if(self, cond: Val, status: Val) -> None:
        """Emit: free all workspaces and return `status` if the scalar `cond` holds."""
        failed, passed = self.e.fresh("failed"), self.e.fresh("passed")
        self.e.branch_if(cond, failed, passed)
        self.e.start(failed)
        for pointer in reversed(self.scratch):
            self.e.call_void("relaxlite_scratch_free", [pointer])
        self.e.line(f"ret {status}")
        self.e.start(passed)
