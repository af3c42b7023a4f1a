"""Translate a tensor program to Python source: its loops, unscheduled, over NumPy scalars.

Slow on purpose: this is the reference semantics of tensor programs. Negative indices are errors, as NumPy checks the
upper bounds, and fresh memory is poisoned, so that reads of uninitialized memory show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import CodegenError, ExecutionError
from relaxlite.ir import scalar_functions
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16, DOT4_PACKED_U8S8, LOOKUP, PACK_BYTES
from relaxlite.ir.program import (
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
)  # fmt: skip
from relaxlite.ir.program_visitor import value_children, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, to_text

PythonKernel = Callable[..., None]

_OPERATORS = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "and": "({} & {})", "or": "({} | {})",
    "xor": "({} ^ {})", "eq": "({} == {})", "ne": "({} != {})", "lt": "({} < {})", "le": "({} <= {})",
    "gt": "({} > {})", "ge": "({} >= {})",
}  # fmt: skip


@functools.lru_cache(maxsize=512)
def compile_to_python(program: TensorProgram, name: str = "program") -> PythonKernel:
    """Compile a program to a Python function of its buffers (arrays: inputs, then outputs) and its symbols' values.

    The function raises IndexError for an access outside of a buffer, ExecutionError for a failed check.
    """
    source = _Source()
    text = source.program(program, name)
    code = compile(text, f"<relaxlite {name}>", "exec")
    exec(code, source.scope)
    kernel: PythonKernel = source.scope[source.entry]
    kernel.__doc__ = text
    return kernel


def poisoned(shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate an array filled with NaN, True or the maximum of an integer dtype."""
    array = np.empty(shape, dtypes.to_numpy(dtype))
    array.fill(np.nan if dtypes.is_float(dtype) else True if dtype == "bool" else np.iinfo(array.dtype).max)
    return array


def _checked(i: int) -> int:
    if i < 0:
        raise IndexError(f"index {i} is negative")
    return i


def _stop(message: str) -> None:
    raise ExecutionError(message)


class _Source:
    """Builder of the Python source of one program, and the scope of global objects that the source names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0
        self.entry = "kernel"
        self.scope: dict[str, Any] = {"_checked": _checked, "_stop": _stop, "_poisoned": poisoned, "_int": int}
        self.buffers: dict[Buffer, str] = {}
        self.symbols: dict[SymVar, str] = {}
        self.loop_vars: set[SymVar] = set()
        self.constants: dict[tuple[str, str], str] = {}
        self.shared: dict[int, str] = {}  # id of a value used several times in the current statement -> its local name

    def program(self, program: TensorProgram, name: str) -> str:
        params = [self._buffer(b) for b in program.params] + [self._symbol(s) for s in program.symbols]
        self.emit(f"def {self.entry}({', '.join(params)}):  # {name}")
        self._indented(program.body)
        return "\n".join(self.lines) + "\n"

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def _indented(self, stmt: Stmt | None) -> None:
        self.depth += 1
        before = len(self.lines)
        if stmt is not None:
            self.stmt(stmt)
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    # names

    def _buffer(self, buffer: Buffer) -> str:
        return self.buffers.setdefault(buffer, _identifier(buffer.name, f"b{len(self.buffers)}"))

    def _symbol(self, var: SymVar) -> str:
        return self.symbols.setdefault(var, _identifier(var.name, f"s{len(self.symbols)}"))

    def _global(self, value: Any, hint: str) -> str:
        name = f"_{hint}{len(self.scope)}"
        self.scope[name] = value
        return name

    def _function(self, kind: str, op: str, dtype: str) -> str:
        key = (f"{kind}_{op}", dtype)
        if key not in self.constants:
            self.constants[key] = self._global(_scalar_function(kind, op, dtype), f"{op}_{dtype}_")
        return self.constants[key]

    # statements

    def stmt(self, stmt: Stmt) -> None:
        method = _STATEMENTS.get(type(stmt))
        if method is None:
            raise CodegenError(f"the interpreter has no meaning for {type(stmt).__name__}")
        method(self, stmt)

    def _seq(self, stmt: Seq) -> None:
        for child in stmt.stmts:
            self.stmt(child)

    def _for(self, stmt: For) -> None:
        self.loop_vars.add(stmt.var)
        self.emit(f"for {self._symbol(stmt.var)} in range({self.index(stmt.extent)}):")
        self._indented(stmt.body)

    def _store(self, stmt: Store) -> None:
        target = f"{self._name_of(stmt.buffer)}[{self.subscript(stmt.indices)}]"
        value = self.root(stmt.value)
        if stmt.combine is not None:
            value = self._binary(stmt.combine, stmt.buffer.dtype, target, value)
        self.emit(f"{target} = {value}")

    def _let(self, stmt: LetIndex) -> None:
        value = self.root(stmt.value)
        self.emit(f"{self._symbol(stmt.var)} = _int({value})")
        self.stmt(stmt.body)

    def _if(self, stmt: IfThenElse) -> None:
        cond = self.root(stmt.cond)
        self.emit(f"if {cond}:")
        self._indented(stmt.then)
        if stmt.other is not None:
            self.emit("else:")
            self._indented(stmt.other)

    def _allocate(self, stmt: Allocate) -> None:
        shape = "".join(f"{self.index(d)}, " for d in stmt.buffer.shape)
        self.emit(f"{self._buffer(stmt.buffer)} = _poisoned(({shape}), {stmt.buffer.dtype!r})")
        self.stmt(stmt.body)

    def _check(self, stmt: Check) -> None:
        cond = self.root(stmt.cond)
        self.emit(f"if not {cond}: _stop({stmt.message!r})")

    def _prefetch(self, stmt: Prefetch) -> None:
        pass

    def _barrier(self, stmt: Barrier) -> None:
        pass

    def _call_library(self, stmt: CallLibrary) -> None:
        """Fail; unreachable in programs whose LibraryFound branch computes the same without the library."""
        message = f"the interpreter calls no libraries: {stmt.symbol} of {stmt.library}"
        self.emit(f"_stop({message!r})")

    # indices and values

    def _name_of(self, buffer: Buffer) -> str:
        if buffer not in self.buffers:
            raise CodegenError(f"buffer {buffer.name} is used outside its scope")
        return self.buffers[buffer]

    def index(self, expr: SymExpr) -> str:
        for var in expr.free_vars():
            if var not in self.symbols:
                raise CodegenError(f"symbol {var.name} is used before it is defined, in {expr}")
        return to_text(expr, self.symbols.__getitem__)

    def subscript(self, indices: tuple[SymExpr, ...]) -> str:
        if not indices:
            return "()"
        return ", ".join(self._position(i) for i in indices)

    def _position(self, expr: SymExpr) -> str:
        text = self.index(expr)
        safe = (isinstance(expr, SymVar) and expr in self.loop_vars) or (as_int(expr) or -1) >= 0 or as_int(expr) == 0
        return text if safe else f"_checked({text})"

    def root(self, value: Value) -> str:
        """Expression of a statement's value; common subexpressions are assigned to locals in the lines before."""
        self.shared = {}
        for shared in _common_subexpressions(value):
            text = self.value(shared)
            self.shared[id(shared)] = f"_t{len(self.shared)}"
            self.emit(f"{self.shared[id(shared)]} = {text}")
        text = self.value(value)
        self.shared = {}
        return text

    def value(self, value: Value) -> str:
        if id(value) in self.shared:
            return self.shared[id(value)]
        if isinstance(value, Load):
            return f"{self._name_of(value.buffer)}[{self.subscript(value.indices)}]"
        if isinstance(value, Literal):
            return self._literal(value)
        if isinstance(value, LibraryFound):
            return "False"
        if isinstance(value, IndexValue):
            return f"{self._type(value.dtype)}({self.index(value.index)})"
        if isinstance(value, Select):
            return f"({self.value(value.then)} if {self.value(value.cond)} else {self.value(value.other)})"
        if isinstance(value, Binary):
            return self._binary(value.op, value.a.dtype, self.value(value.a), self.value(value.b))
        if isinstance(value, Compare):
            return _OPERATORS[value.op].format(self.value(value.a), self.value(value.b))
        if isinstance(value, Unary):
            return f"{self._function('unary', value.op, value.x.dtype)}({self.value(value.x)})"
        if isinstance(value, Cast):
            return f"{self._function('cast', value.x.dtype, value.dtype)}({self.value(value.x)})"
        assert isinstance(value, Intrinsic)
        args = ", ".join(self.value(a) for a in value.args)
        return f"{self._function('intrinsic', value.name, value.dtype)}({args})"

    def _binary(self, op: str, dtype: str, a: str, b: str) -> str:
        if op in _OPERATORS:
            return _OPERATORS[op].format(a, b)
        return f"{self._function('binary', op, dtype)}({a}, {b})"

    def _type(self, dtype: str) -> str:
        name = f"_{dtype}"
        self.scope.setdefault(name, dtypes.to_numpy(dtype).type)
        return name

    def _literal(self, literal: Literal) -> str:
        key = (repr(literal.value), literal.dtype)
        if key not in self.constants:
            typed = dtypes.to_numpy(literal.dtype).type(literal.value)
            self.constants[key] = self._global(typed, "c")
        return self.constants[key]


_STATEMENTS: dict[type, Callable[[_Source, Any], None]] = {
    Seq: _Source._seq, For: _Source._for, Store: _Source._store, LetIndex: _Source._let, IfThenElse: _Source._if,
    Allocate: _Source._allocate, Check: _Source._check, Prefetch: _Source._prefetch,
    Barrier: _Source._barrier,
    CallLibrary: _Source._call_library,
}  # fmt: skip


def _common_subexpressions(root: Value) -> list[Value]:
    """Subexpressions used more than once and evaluated in every case (not only in one arm of a Select), operands
    first."""
    uses: dict[int, int] = {}
    for value in walk_values(root):
        for child in value_children(value):
            uses[id(child)] = uses.get(id(child), 0) + 1
    values: dict[int, Value] = {}

    def visit(value: Value) -> None:
        if id(value) not in values:
            for child in (value.cond,) if isinstance(value, Select) else value_children(value):
                visit(child)
            values[id(value)] = value

    visit(root)
    return [v for v in values.values() if uses.get(id(v), 0) > 1 and value_children(v)]


def _identifier(name: str, fallback: str) -> str:
    """Unique Python identifier that shows `name` where that is an identifier."""
    return f"{name}_{fallback}" if name.isidentifier() else fallback


# Scalar functions: common ones of float32 and float64 directly by NumPy, for speed; the others by ir.scalar_functions.

_FAST: dict[tuple[str, str], Callable[..., Any]] = {
    ("binary", "div"): lambda a, b: a / b,
    ("binary", "min"): lambda a, b: a if a < b or a != a else b,
    ("binary", "max"): lambda a, b: a if a > b or a != a else b,
    ("unary", "neg"): lambda x: -x,
    ("unary", "abs"): abs,
    ("unary", "sqrt"): np.sqrt,
    ("unary", "exp"): np.exp,
    ("unary", "exp2"): np.exp2,
    ("unary", "log"): np.log,
    ("unary", "tanh"): np.tanh,
}


_SHIFTS = {"shift_left": np.left_shift, "shift_right": np.right_shift}

# Intrinsics of packed int32 by Python integers, which are faster than NumPy scalars (docs/measurements/backend.md).


def _wrap_int32(total: int) -> np.int32:
    return np.int32((total + 2**31 & 2**32 - 1) - 2**31)


def _sign_extend_byte(byte: int) -> int:
    return (byte & 255 ^ 128) - 128


def _dot4_bytes(c: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, b2: Any, b3: Any) -> np.int32:
    return _wrap_int32(int(c) + int(a0) * int(b0) + int(a1) * int(b1) + int(a2) * int(b2) + int(a3) * int(b3))


def _dp4a(c: Any, a: Any, b: Any, *_: Any) -> np.int32:
    x, y = int(a), int(b)
    products = [(x >> shift & 255) * _sign_extend_byte(y >> shift) for shift in (0, 8, 16, 24)]
    return _wrap_int32(int(c) + sum(products))


def _dot2_int16(c: Any, a: Any, b: Any) -> np.int32:
    x, y = int(a), int(b)
    low = ((x & 0xFFFF ^ 0x8000) - 0x8000) * ((y & 0xFFFF ^ 0x8000) - 0x8000)
    return _wrap_int32(int(c) + low + (x >> 16) * (y >> 16))


def _lookup_bytes(a: Any, *table: Any) -> np.int32:
    indices = [(shift, int(a) >> shift & 255) for shift in (0, 8, 16, 24)]
    return _wrap_int32(sum((int(table[at >> 2]) >> 8 * (at & 3) & 255) << shift for shift, at in indices))


def _pack_bytes(*parts: Any) -> np.int32:
    return _wrap_int32(sum((int(part) & 255) << 8 * n for n, part in enumerate(parts)))


_PACKED_INTRINSICS: dict[str, Callable[..., np.int32]] = {
    "dot4_u8s8": _dot4_bytes,
    DOT4_PACKED_U8S8: _dp4a,
    DOT2_PACKED_INT16: _dot2_int16,
    LOOKUP: _lookup_bytes,
    PACK_BYTES: _pack_bytes,
}


def _scalar_function(kind: str, op: str, dtype: str) -> Callable[..., Any]:
    """Function of kind "unary", "binary" or "intrinsic" named `op` over `dtype`, or of kind "cast" from `op` to
    `dtype`."""
    if dtype in ("float32", "float64"):
        if kind == "cast":
            return dtypes.to_numpy(dtype).type
        if (kind, op) in _FAST:
            return _FAST[kind, op]
    if kind == "intrinsic" and op in _PACKED_INTRINSICS:
        return _PACKED_INTRINSICS[op]
    if kind == "binary" and op in _SHIFTS and dtypes.is_integer(dtype):
        return _SHIFTS[op]
    if kind == "cast" and dtypes.is_integer(op) and dtypes.is_integer(dtype):
        return partial(np.generic.astype, dtype=dtypes.to_numpy(dtype))
    if kind == "unary" and op == "not":
        return lambda x: np.bool_(not x)
    if kind == "unary":
        return lambda x: scalar_functions.apply_unary(op, x)[()]
    if kind == "binary" and op == "maxnum":
        return lambda a, b: b if b > a else a
    if kind == "binary":
        return lambda a, b: scalar_functions.apply_binary(op, a, b)[()]
    if kind == "cast":
        return lambda x: scalar_functions.cast(x, dtype)[()]
    return lambda *args: scalar_functions.apply_intrinsic(op, args)[()]
