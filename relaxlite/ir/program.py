"""Loop-level tensor programs: loops over buffers, in destination-passing style.

Indices and extents are symbolic integers (ir/symbolic.py); everything that depends on *data* is a `Value`.
A data-dependent index is bound to a symbol by `LetIndex`.
`Select` is lazy: a `Load` in the branch not taken is not executed, so its indices may be out of bounds.
`Unary` and `Binary` name scalar functions. This module has their names and dtype rules; ir/scalar_functions.py (NumPy)
and codegen/llvm implement them.
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
CallingConvention: TypeAlias = OneOf["c", "status", "arrays"]
MemoryScope: TypeAlias = OneOf["global", "shared", "local"]  # shared: of a block's threads; local: registers or stack

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
    """Dense row-major array, compared by identity."""

    name: str
    shape: tuple[SymExpr, ...]
    dtype: DType
    scope: MemoryScope = "global"

    @staticmethod
    def of(name: str, shape: Iterable[IntLike], dtype: DType, scope: MemoryScope = "global") -> Buffer:
        """Buffer of a shape of ints or symbolic integers."""
        return Buffer(name, syms(shape), dtype, scope)

    def __getitem__(self, indices: IntLike | tuple[IntLike, ...]) -> Load:
        """Build a load: `b[i, j]`."""
        return Load(self, syms(indices if isinstance(indices, tuple) else (indices,)))


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """Scalar constant."""

    value: int | float | bool
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Load of one element."""

    buffer: Buffer
    indices: tuple[SymExpr, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Unary:
    """Scalar function of one operand; the result has its dtype, or bool."""

    op: str  # one of UNARY
    x: Value

    @property
    def dtype(self) -> DType:
        return "bool" if self.op in _BOOL_RESULT else self.x.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Binary:
    """Scalar function of two operands of one dtype, which is also the result's.

    `div` divides floats; integer division is `floordiv` or `truncdiv`. `min` and `max` propagate NaN. `pow` of integers
    wraps.
    """

    op: str  # one of BINARY
    a: Value
    b: Value

    @property
    def dtype(self) -> DType:
        return self.a.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Compare:
    """Comparison of two operands of one dtype; the result is bool."""

    op: str  # one of COMPARE
    a: Value
    b: Value

    @property
    def dtype(self) -> DType:
        return "bool"


@dataclass(frozen=True, slots=True, eq=False)
class Select:
    """Lazy conditional: then if cond else other. Only the selected operand is evaluated."""

    cond: Value
    then: Value
    other: Value

    @property
    def dtype(self) -> DType:
        return self.then.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Conversion to a dtype.

    Float to integer truncates towards zero and saturates (NaN becomes 0). Conversion to bool tests != 0. Integers wrap.
    """

    x: Value
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class IndexValue:
    """Symbolic integer as a value."""

    index: SymExpr
    dtype: DType = "int64"


@dataclass(frozen=True, slots=True, eq=False)
class Intrinsic:
    """Call of an intrinsic of ir/intrinsics.py, such as "fma"(a, b, c) = a*b + c."""

    name: str
    args: tuple[Value, ...]
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class AddressOf:
    """Address of an element, as an argument of a library routine. `is_written`: the routine writes memory there."""

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    is_written: bool = False

    @property
    def dtype(self) -> DType:
        return "int64"


@dataclass(frozen=True, slots=True, eq=False)
class LibraryFound:
    """Whether a library routine is available, decided at load time; if `is_required`, loading fails without it.

    False in the NumPy interpreter, which executes the fallback.
    """

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
    """Loop `for var in range(extent)`.

    Iterations of a "parallel" loop are independent, and so are blocks of a GPU's grid; threads of a block meet at
    barriers (ir/launch.py). A "vectorized" loop has a constant extent.
    """

    var: SymVar
    extent: SymExpr
    body: Stmt
    kind: LoopKind = "serial"


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Store buffer[indices] = value, or with `combine` buffer[indices] = combine(buffer[indices], value).

    "maxnum" stores the value if it is greater than the element; unlike "max", it does not propagate NaN.
    `nontemporal`: hint to bypass the caches, for memory that is not read again soon.
    """

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    value: Value
    combine: str | None = None  # one of COMBINE
    nontemporal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LetIndex:
    """Binding of a symbol to an integer computed from data, for use in `body`."""

    var: SymVar
    value: Value
    body: Stmt


@dataclass(frozen=True, slots=True, eq=False)
class IfThenElse:
    """Conditional statement."""

    cond: Value
    then: Stmt
    other: Stmt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Allocate:
    """Allocation of a scratch buffer that is live in `body`."""

    buffer: Buffer
    body: Stmt


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Run-time check, for example of data-dependent indices: unless `cond`, the program fails with `message`."""

    cond: Value
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """Prefetch of an element's cache line to the L1 or L2 cache: a hint. The indices may be out of bounds."""

    buffer: Buffer
    indices: tuple[SymExpr, ...]
    cache: OneOf[1, 2] = 2


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Barrier of the threads of a block (GPU targets)."""


@dataclass(frozen=True, slots=True, eq=False)
class CallLibrary:
    """Call symbol(args...) of a library. `args` are literals, index values and addresses of elements.

    `convention`: "c", a C function whose result is ignored; "status", a C function that returns nonzero on failure;
    "arrays", i32(ptr addresses, ptr integers), with the arguments in two arrays, for Python functions.
    `work`: approximate number of instructions of a call, for the cost model of parallel loops.
    """

    library: str
    symbol: str
    args: tuple[Value, ...]
    convention: CallingConvention = "c"
    work: SymExpr = field(default_factory=lambda: sym(0))


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """Sequence of statements."""

    stmts: tuple[Stmt, ...]


Binder: TypeAlias = For | LetIndex
StmtWithBody: TypeAlias = For | LetIndex | Allocate
Stmt: TypeAlias = "For | Store | LetIndex | IfThenElse | Allocate | Check | Prefetch | Barrier | CallLibrary | Seq"


@dataclass(frozen=True, slots=True, eq=False)
class TensorProgram:
    """Loop-level function in destination-passing style.

    `params` are the inputs, then `num_outputs` outputs. `symbols` are passed by callers in addition to the buffers.
    """

    params: tuple[Buffer, ...]
    symbols: tuple[SymVar, ...]
    body: Stmt
    num_outputs: int = 1
    attrs: Attrs = NO_ATTRS

    @property
    def identity(self) -> Attrs:
        """Attributes that identify the program: all but the schedule steps, which only document its derivation."""
        return Attrs({name: value for name, value in self.attrs.items() if name != SCHEDULE})

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """Parameters other than the outputs."""
        return self.params[: len(self.params) - self.num_outputs]

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """The last `num_outputs` parameters."""
        return self.params[len(self.params) - self.num_outputs :]


def seq(*stmts: Stmt) -> Stmt:
    """Combine statements into one, flattening nested sequences."""
    flat: list[Stmt] = []
    for stmt in stmts:
        flat.extend(stmt.stmts if isinstance(stmt, Seq) else (stmt,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def loops(names: str, extents: Iterable[IntLike], make: Callable[..., Stmt]) -> Stmt:
    """Build a perfect loop nest: loops("ij", (n, m), lambda i, j: ...). Without extents, only the body."""
    dims = syms(extents)
    variables = [SymVar(names[k] if k < len(names) else f"i{k}") for k in range(len(dims))]
    body = make(*variables)
    for var, extent in reversed(list(zip(variables, dims, strict=True))):
        body = For(var, extent, body)
    return body


def compute(out: Buffer, value: Callable[..., Value]) -> Stmt:
    """Build the loop nest of out[i, j, ...] = value(i, j, ...) for every element."""
    return loops("ijklmn", out.shape, lambda *i: Store(out, i, value(*i)))


def reduce(
    out: Buffer,
    extents: Iterable[IntLike],
    combine: str,
    init: Value,
    value: Callable[..., Value],
    finish: Callable[..., Value] = lambda total, *i: total,
) -> Stmt:
    """Build a reduction: out[i...] = finish(combine over r... of value(i..., r...), starting from init; i...).

    This is the canonical form of a reduction: one local accumulator per output element, of the dtype of `init`.
    """
    extents = syms(extents)

    def element(*i: SymVar) -> Stmt:
        accumulator = Buffer(f"{out.name}_acc", (), init.dtype, "local")
        inner = loops("rstuvw", extents, lambda *r: Store(accumulator, (), value(*i, *r), combine))
        return Allocate(
            accumulator, seq(Store(accumulator, (), init), inner, Store(out, i, finish(Load(accumulator, ()), *i)))
        )

    return loops("ijklmn", out.shape, element)


def index(expr: IntLike, dtype: DType = "int64") -> Value:
    """Value of a symbolic integer."""
    return IndexValue(sym(expr), dtype)
