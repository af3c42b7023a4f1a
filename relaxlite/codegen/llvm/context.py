"""What the parts of the code generator share while they emit one function of a kernel."""

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

# statuses that a kernel may return beside 0 and 1 + the index of a failed check; the last in a guarded one alone
OVERFLOWED, OUT_OF_MEMORY, OUT_OF_BOUNDS = -1, -2, -3

LoadKey: TypeAlias = tuple[Buffer, SymExpr, int, str]  # where, how many lanes, under which mask
AccessKey: TypeAlias = tuple[Buffer, SymExpr, SymVar | None, int, tuple[int, ...]]  # ... and the unrolled variables


@dataclass(frozen=True, slots=True)
class Access:
    """One element per lane of a buffer: element number `base + stride*lane` when `kind` says so, else `offset`."""

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
class Kernel:
    """One function under construction: `e` writes it, `ix` knows the variables, the rest is where we are.

    Inside a vectorized loop `lane` is its variable and `lanes` its extent. `mask` says which lanes are active (None:
    all); `some_active`: it is known that one is, as it always is between statements.
    """

    name: str
    e: Emitter
    ix: Indices
    checks: dict[str, int]  # message -> index; shared with the outlined functions
    entry: Lines  # where arrays on the stack are made: only there do they live once per call
    is_checked: bool = False
    is_guarded: bool = False  # see guarded.py
    in_parallel: bool = False
    lane: SymVar | None = None
    lanes: int = 0
    mask: Val | None = None
    some_active: bool = True
    per_lane: set[Buffer] = field(default_factory=set)  # allocated inside the vectorized loop: one copy per lane
    scratch: list[Val] = field(default_factory=list)  # to be freed on every way out
    loads: dict[LoadKey, Val] = field(default_factory=dict)  # what is still known to be in memory
    places: dict[LoadKey, int] = field(default_factory=dict)  # where those begin that are contiguous from a constant on
    values: dict[Value, Val] = field(default_factory=dict)  # of the statement being emitted
    offsets: dict[tuple[Buffer, tuple[SymExpr, ...]], SymExpr] = field(default_factory=dict)
    accesses: dict[AccessKey, Access] = field(default_factory=dict)
    needs_fence: bool = False  # stores went past the caches: they must be done before the function says that it is
    ahead: dict[Buffer, int] = field(default_factory=dict)  # bytes before its loads that a vector of it is asked for
    in_order: frozenset[Buffer] = frozenset()  # vectors of which are loaded in the order in which they are read
    loading: dict[Value, bool] = field(default_factory=dict)  # whether a value loads anything

    # Lanes

    @contextmanager
    def vectorized(self, lane: SymVar, lanes: int) -> Iterator[None]:
        self.lane, self.lanes = lane, lanes
        try:
            yield
        finally:
            self.lane, self.lanes = None, 0

    @contextmanager
    def active(self, cond: Val, *, some_active: bool = True) -> Iterator[None]:
        """Only the lanes of `cond` are active, of those that are now; `some_active`: what is read for all lanes at once
        may be read even so."""
        outer = self.mask, self.some_active
        self.mask = cond if self.mask is None else self.e.binary("and", self.mask, cond, "mask")
        self.some_active = some_active
        try:
            yield
        finally:
            self.mask, self.some_active = outer

    @contextmanager
    def masked(self, cond: Val, *, some_active: bool = False) -> Iterator[None]:
        """The same for code that may not run: what it finds out is forgotten afterwards."""
        with self.active(cond, some_active=some_active), self.branch():
            yield

    def when_active(self, cond: Val) -> Val:
        """cond in the lanes that are active, false in the others."""
        return cond if self.mask is None else self.e.binary("and", self.mask, cond, "mask")

    def stack_array(self, name: str, elem: str, count: int) -> Val:
        with self.e.place(self.entry):
            return self.e.op(f"alloca [{count} x {elem}], align 64", "ptr", 0, name)

    # What is known

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Code that may not run: what it finds out is forgotten afterwards."""
        loads, values = self.loads, self.values
        self.loads, self.values = dict(loads), dict(values)
        try:
            yield
        finally:
            self.loads, self.values = loads, values

    def forget_loads(self) -> None:
        self.loads.clear()
        self.values.clear()

    # Ways out

    def finish(self) -> None:
        """Return success."""
        if self.needs_fence and self.e.target.is_x86:
            self.e.call_void("llvm.x86.sse.sfence", [])
        self.e.line("ret i32 0")

    def fail_if(self, cond: Val, status: int) -> None:
        """Return `status` from the function when the scalar `cond` holds."""
        self.return_if(cond, int_const(status, "i32"))

    def return_if(self, cond: Val, status: Val) -> None:
        failed, passed = self.e.fresh("failed"), self.e.fresh("passed")
        self.e.branch_if(cond, failed, passed)
        self.e.start(failed)
        for pointer in reversed(self.scratch):
            self.e.call_void("relaxlite_scratch_free", [pointer])
        self.e.line(f"ret {status}")
        self.e.start(passed)
