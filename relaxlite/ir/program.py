"""Loop-level tensor programs: loops over buffers, in destination-passing style.

Indices, extents and guards are symbolic integers (ir/symbolic.py); everything that depends on *data* is a `Value`.
An index that comes from data is bound to a symbol by `LetIndex` first.
`Select` is lazy: a `Load` in the branch not taken is never performed, so it may lie outside its buffer.
`Unary` and `Binary` name scalar functions; their tables and dtype rules stand here, their meaning in
ir/scalar_functions.py (NumPy) and codegen/llvm (machine code).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Literal as OneOf
from typing import TypeAlias

from relaxlite.dtypes import DType
from relaxlite.ir.attributes import SCHEDULE
from relaxlite.ir.expr import NO_ATTRS, Attrs
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, sym, syms
from relaxlite.records import dataclass

GpuAxis: TypeAlias = OneOf["block_x", "block_y", "block_z", "thread_x", "thread_y", "thread_z"]
LoopKind: TypeAlias = OneOf[
    "serial", "parallel", "vectorized", "unrolled", "block_x", "block_y", "block_z", "thread_x", "thread_y", "thread_z"
]
Convention: TypeAlias = OneOf["c", "status", "arrays"]
Scope: TypeAlias = OneOf["global", "local"]  # local: registers or stack, of constant size

UNARY = (
    "neg", "not", "bitwise_not", "abs", "sign", "sqrt", "floor", "ceil", "round", "trunc", "exp", "log", "log1p",
    "expm1", "exp2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "tanh",
    "erf", "gelu", "isnan", "isinf",  # gelu: x * (1 + erf(x / sqrt(2))) / 2, and 0 at -inf
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "floordiv", "truncdiv", "floormod", "fmod", "min", "max", "pow", "and", "or", "xor",
    "shift_left", "shift_right", "atan2",
)  # fmt: skip
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
COMBINE = ("add", "mul", "max", "min", "and", "or", "maxnum")  # associative, for reductions

_BOOL_RESULT = ("not", "isnan", "isinf")


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A dense row-major array. Identity counts."""

    name: str
    shape: tuple[SymExpr, ...]
    dtype: DType
    scope: Scope = "global"

    @staticmethod
    def of(name: str, shape: Iterable[IntLike], dtype: DType, scope: Scope = "global") -> Buffer:
        return Buffer(name, syms(shape), dtype, scope)

    def __getitem__(self, indices: IntLike | tuple[IntLike, ...]) -> Load:
        """b[i, j]: a Load."""
        return Load(self, syms(indices if isinstance(indices, tuple) else (indices,)))


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    value: int | float | bool
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    buffer: Buffer
    indices: tuple[SymExpr, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Unary:
    op: str  # one of UNARY
    x: Value

    @property
    def dtype(self) -> DType:
        return "bool" if self.op in _BOOL_RESULT else self.x.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Binary:
    """Both operands have the same dtype, which is the result's. `div` is true division of floats; integer division is
    `floordiv` or `truncdiv`. `min` and `max` give NaN when an operand is NaN. `pow` of integers wraps."""

    op: str  # one of BINARY
    a: Value
    b: Value

    @property
    def dtype(self) -> DType:
        return self.a.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Compare:
    op: str  # one of COMPARE
    a: Value
    b: Value

    @property
    def dtype(self) -> DType:
        return "bool"


@dataclass(frozen=True, slots=True, eq=False)
class Select:
    """then if cond else other; lazy."""

    cond: Value
    then: Value
    other: Value

    @property
    def dtype(self) -> DType:
        return self.then.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Float to integer truncates towards zero and saturates (NaN becomes 0); to bool tests != 0; integers wrap."""

    x: Value
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class IndexValue:
    """A symbolic integer as data."""

    index: SymExpr
    dtype: DType = "int64"


@dataclass(frozen=True, slots=True, eq=False)
class Intrinsic:
    """A function of several operands that targets may have in hardware, one of ir/intrinsics.py:
    "fma"(a, b, c) = a*b + c."""

    name: str
    args: tuple[Value, ...]
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class AddressOf:
    """Where an element lies in memory: an argument of a library routine, which reads from there on, or writes."""

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    is_written: bool = False

    @property
    def dtype(self) -> DType:
        return "int64"


@dataclass(frozen=True, slots=True, eq=False)
class LibraryFound:
    """Whether a routine of a library is there, which loading decides; always, where the program `is_required` to have
    it. The NumPy interpreter says no: it computes what a program means."""

    library: str
    symbol: str
    is_required: bool = False

    @property
    def dtype(self) -> DType:
        return "bool"


Value: TypeAlias = (
    "Literal | Load | Unary | Binary | Compare | Select | Cast | IndexValue | Intrinsic | AddressOf | LibraryFound"
)


@dataclass(frozen=True, slots=True, eq=False)
class For:
    """for var in range(extent). Iterations of a "parallel" loop, and of one on a GPU's axis, are independent;
    "vectorized" has a constant extent."""

    var: SymVar
    extent: SymExpr
    body: Stmt
    kind: LoopKind = "serial"


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """buffer[indices] = value, or with `combine` buffer[indices] = combine(buffer[indices], value).

    "maxnum" takes the value where it is greater than what is there: unlike "max" it does not notice a NaN.
    `nontemporal`: for memory that is not read again soon, past the caches where the target can; a hint.
    """

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    value: Value
    combine: str | None = None  # one of COMBINE
    nontemporal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LetIndex:
    """Bind a symbol to an integer computed from data, for use in `body`."""

    var: SymVar
    value: Value
    body: Stmt


@dataclass(frozen=True, slots=True, eq=False)
class IfThenElse:
    cond: Value
    then: Stmt
    other: Stmt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Allocate:
    """A scratch buffer that lives for `body`."""

    buffer: Buffer
    body: Stmt


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Stop the program with an error (`message`) unless `cond` holds: data-dependent indices and the like."""

    cond: Value
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """Have the cache line of an element brought to the first or second cache, for later loads: a hint that changes
    nothing. The element may lie outside of the buffer."""

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    cache: OneOf[1, 2] = 2


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Wait for all threads of a group (GPU targets)."""


@dataclass(frozen=True, slots=True, eq=False)
class CallLibrary:
    """symbol(args...) of a library. `args` are literals, index values and addresses of elements.

    `convention`: "c", a C function as it is; "status", one that says by a result other than 0 that it failed; "arrays",
    i32(ptr addresses, ptr words), with the addresses and the integers as two arrays (how Python functions are called).
    `work`: about how many instructions a call takes, for those who share it out among threads.
    """

    library: str
    symbol: str
    args: tuple[Value, ...]
    convention: Convention = "c"
    work: SymExpr = field(default_factory=lambda: sym(0))


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    stmts: tuple[Stmt, ...]


Binder: TypeAlias = For | LetIndex
Enclosing: TypeAlias = For | LetIndex | Allocate
Stmt: TypeAlias = "For | Store | LetIndex | IfThenElse | Allocate | Check | Prefetch | Barrier | CallLibrary | Seq"


@dataclass(frozen=True, slots=True, eq=False)
class TensorProgram:
    """params = inputs then `num_outputs` outputs; `symbols` are what a caller passes beside the buffers."""

    params: tuple[Buffer, ...]
    symbols: tuple[SymVar, ...]
    body: Stmt
    num_outputs: int = 1
    attrs: Attrs = NO_ATTRS

    @property
    def identity(self) -> Attrs:
        """The attributes without the steps of the schedule, which tell how the loops came about, not what they are."""
        return Attrs({name: value for name, value in self.attrs.items() if name != SCHEDULE})

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return self.params[: len(self.params) - self.num_outputs]

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return self.params[len(self.params) - self.num_outputs :]


def seq(*stmts: Stmt) -> Stmt:
    """One statement of several, flattened."""
    flat: list[Stmt] = []
    for stmt in stmts:
        flat.extend(stmt.stmts if isinstance(stmt, Seq) else (stmt,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def loops(names: str, extents: Iterable[IntLike], make: Callable[..., Stmt]) -> Stmt:
    """A perfect nest: loops("ij", (n, m), lambda i, j: ...). Without extents, the body alone."""
    dims = syms(extents)
    variables = [SymVar(names[k] if k < len(names) else f"i{k}") for k in range(len(dims))]
    body = make(*variables)
    for var, extent in reversed(list(zip(variables, dims, strict=True))):
        body = For(var, extent, body)
    return body


def compute(out: Buffer, value: Callable[..., Value]) -> Stmt:
    """out[i, j, ...] = value(i, j, ...) for every element."""
    return loops("ijklmn", out.shape, lambda *i: Store(out, i, value(*i)))


def reduce(
    out: Buffer,
    extents: Iterable[IntLike],
    combine: str,
    init: Value,
    value: Callable[..., Value],
    finish: Callable[..., Value] = lambda total, *i: total,
) -> Stmt:
    """out[i...] = finish(combine over r... of value(i..., r...), starting from init; i...).

    This is the canonical form of a reduction: one local element per output, of the dtype of `init`.
    """
    extents = syms(extents)

    def element(*i: SymVar) -> Stmt:
        total = Buffer(f"{out.name}_acc", (), init.dtype, "local")
        inner = loops("rstuvw", extents, lambda *r: Store(total, (), value(*i, *r), combine))
        return Allocate(total, seq(Store(total, (), init), inner, Store(out, i, finish(Load(total, ()), *i))))

    return loops("ijklmn", out.shape, element)


def index(expr: IntLike, dtype: DType = "int64") -> Value:
    return IndexValue(sym(expr), dtype)
