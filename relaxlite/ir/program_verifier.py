"""Verifier of tensor programs, and the error for a violated rule of the IR."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, get_args

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import VerifyError
from relaxlite.ir.attributes import WRITES_INPUTS, attribute_problem
from relaxlite.ir.intrinsics import INTRINSICS, type_error
from relaxlite.ir.launch_verifier import LAUNCH_RULES, launch_problem
from relaxlite.ir.printer import excerpt
from relaxlite.ir.program import (
    BINARY,
    COMBINE,
    COMPARE,
    UNARY,
    AddressOf,
    Allocate,
    Binary,
    Buffer,
    CallingConvention,
    CallLibrary,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    LoopKind,
    MemoryScope,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.program_printer import postorder
from relaxlite.ir.program_visitor import value_children
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int

PROGRAM_RULES = {
    "symbol": "a symbol is bound by the program, a loop or let_index before it is used, and only inside of that",
    "buffer": "a buffer is a parameter or allocated around its uses",
    "input": f"inputs are not written, unless the program has the attribute {WRITES_INPUTS}",
    "rank": "an element is named by one index per dimension",
    "bounds": "a constant index lies inside the buffer, unless a condition guards it",
    "dtype": "operands of an operation, and a buffer and what is stored, have one known dtype; conditions are bool",
    "operation": "only the operations of ir/program.py and the intrinsics of ir/intrinsics.py",
    "library": "a library is called with literals, integers and addresses of elements, and only there addresses are",
    "attribute": "attributes are those of ir/attributes.py, with values of their kinds",
    "extent": "a vectorized loop has a constant extent, a local buffer a constant size",
    **LAUNCH_RULES,
}


def violation(where: str, rule: str, message: str, excerpt_text: str, loc: str | None = None) -> VerifyError:
    """VerifyError of a violated rule: message, rule, IR excerpt, source location."""
    shown = excerpt_text.replace("\n", "\n    ")
    place = "" if loc is None else f"\n  source: {loc}"
    return VerifyError(f"{where}: {message}\n  rule: {rule}\n  in: {shown}{place}")


def verify_program(name: str, program: TensorProgram) -> None:
    """Raise VerifyError if the program violates a rule of `PROGRAM_RULES`."""
    _ProgramVerifier(name).program(program)


class _ProgramVerifier:
    """Verifier of one program; tracks the symbols and buffers in scope."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._symbols: set[SymVar] = set()
        self._buffers: set[Buffer] = set()
        self._read_only: frozenset[Buffer] = frozenset()
        self._at: Stmt | str = ""
        self._guards = 0  # enclosing conditions and loops of extent 0

    def _fail(self, rule: str, message: str) -> NoReturn:
        shown = self._at if isinstance(self._at, str) else excerpt(self._at)
        raise violation(f"program {self._name}", PROGRAM_RULES[rule], message, shown)

    def program(self, program: TensorProgram) -> None:
        self._at = f"program {self._name}({', '.join(b.name for b in program.params)})"
        if not 0 <= program.num_outputs <= len(program.params):
            self._fail("buffer", f"{program.num_outputs} outputs of {len(program.params)} parameters")
        for symbol in program.symbols:
            self._declare(self._symbols, symbol, "symbol", f"symbol {symbol.name} is listed twice")
        for buffer in program.params:
            self._buffer(buffer)
            self._declare(self._buffers, buffer, "buffer", f"buffer {buffer.name} is listed twice")
        if (problem := attribute_problem("program", program.attrs)) is not None:
            self._fail("attribute", problem)
        if not program.attrs.get(WRITES_INPUTS):
            self._read_only = frozenset(program.inputs)
        self._stmt(program.body)
        if (broken := launch_problem(program)) is not None:
            self._at = broken.stmt
            self._fail(broken.rule, broken.message)

    def _declare(self, declared: set[SymVar] | set[Buffer], item: SymVar | Buffer, rule: str, message: str) -> None:
        if item in declared:
            self._fail(rule, message)
        declared.add(item)  # type: ignore[arg-type]

    @contextmanager
    def _bound(self, var: SymVar) -> Iterator[None]:
        self._declare(self._symbols, var, "symbol", f"symbol {var.name} is bound again inside of its own scope")
        yield
        self._symbols.remove(var)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._guards += 1
        yield
        self._guards -= 1

    def _exprs(self, exprs: Iterable[SymExpr]) -> None:
        for expr in exprs:
            for var in expr.free_vars():
                if var not in self._symbols:
                    self._fail("symbol", f"symbol {var.name} of {expr} is not bound here")

    def _buffer(self, buffer: Buffer) -> None:
        self._exprs(buffer.shape)
        self._dtype(buffer.dtype)
        if buffer.scope not in get_args(MemoryScope):
            self._fail("operation", f"buffer {buffer.name} has the unknown scope {buffer.scope!r}")

    def _dtype(self, dtype: str) -> None:
        if dtype not in dtypes.ALL:
            self._fail("dtype", f"unknown dtype {dtype!r}")

    # statements

    def _stmt(self, stmt: Stmt) -> None:
        if isinstance(stmt, Seq):
            for inner in stmt.stmts:
                self._stmt(inner)
            return
        self._at = stmt
        if isinstance(stmt, For):
            self._for(stmt)
        elif isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, LetIndex):
            self._value(stmt.value)
            if not dtypes.is_integer(stmt.value.dtype):
                self._fail("dtype", f"symbol {stmt.var.name} is bound to a {stmt.value.dtype}; an index is an integer")
            with self._bound(stmt.var):
                self._stmt(stmt.body)
        elif isinstance(stmt, Allocate):
            self._allocate(stmt)
        elif isinstance(stmt, Prefetch):
            self._element(stmt.buffer, stmt.indices, is_guarded=True)
        elif isinstance(stmt, CallLibrary):
            self._call_library(stmt)
        elif isinstance(stmt, IfThenElse | Check):
            self._condition(stmt.cond)
            if isinstance(stmt, IfThenElse):
                with self._guarded():
                    self._stmt(stmt.then)
                    if stmt.other is not None:
                        self._stmt(stmt.other)

    def _for(self, stmt: For) -> None:
        self._exprs((stmt.extent,))
        if stmt.kind not in get_args(LoopKind):
            self._fail("operation", f"unknown kind of loop {stmt.kind!r}")
        if stmt.kind == "vectorized" and not stmt.extent.is_const:
            self._fail("extent", f"the vectorized loop over {stmt.var.name} has the extent {stmt.extent}")
        with self._bound(stmt.var):
            if as_int(stmt.extent) == 0:
                with self._guarded():
                    self._stmt(stmt.body)
            else:
                self._stmt(stmt.body)

    def _store(self, stmt: Store) -> None:
        self._element(stmt.buffer, stmt.indices, is_guarded=False)
        if stmt.buffer in self._read_only:
            self._fail("input", f"{stmt.buffer.name} is an input")
        if stmt.nontemporal and stmt.combine is not None:
            self._fail("operation", "a nontemporal store combines nothing")
        if stmt.combine is not None and stmt.combine not in COMBINE:
            self._fail("operation", f"unknown combination {stmt.combine!r}; known: {', '.join(COMBINE)}")
        self._value(stmt.value)
        if stmt.value.dtype != stmt.buffer.dtype:
            self._fail("dtype", f"a {stmt.value.dtype} is stored into {stmt.buffer.name}, which is {stmt.buffer.dtype}")

    def _allocate(self, stmt: Allocate) -> None:
        buffer = stmt.buffer
        self._buffer(buffer)
        if buffer.scope == "local" and not all(dim.is_const for dim in buffer.shape):
            self._fail("extent", f"the local buffer {buffer.name} has the shape ({', '.join(map(str, buffer.shape))})")
        self._declare(
            self._buffers, buffer, "buffer", f"buffer {buffer.name} is allocated again inside of its own scope"
        )
        self._stmt(stmt.body)
        self._buffers.remove(buffer)

    def _call_library(self, stmt: CallLibrary) -> None:
        self._exprs((stmt.work,))
        if stmt.convention not in get_args(CallingConvention):
            self._fail("library", f"unknown convention {stmt.convention!r}")
        for arg in stmt.args:
            if not isinstance(arg, Literal | IndexValue | AddressOf):
                self._fail("library", f"an argument is a {type(arg).__name__}")
            if not isinstance(arg, AddressOf):
                self._value(arg)
                continue
            self._element(arg.buffer, arg.indices, is_guarded=True)  # guarded: the buffer may be empty
            if arg.is_written and arg.buffer in self._read_only:
                self._fail("input", f"{arg.buffer.name} is an input")

    def _element(self, buffer: Buffer, indices: tuple[SymExpr, ...], *, is_guarded: bool) -> None:
        if buffer not in self._buffers:
            self._fail("buffer", f"buffer {buffer.name} is not known here")
        self._exprs(indices)
        if len(indices) != len(buffer.shape):
            self._fail("rank", f"{buffer.name} has {len(buffer.shape)} dimensions, got {len(indices)} indices")
        for index, dim in zip(indices, buffer.shape, strict=True):
            value, extent = as_int(index), as_int(dim)
            is_outside = value is not None and (value < 0 or (extent is not None and value >= extent))
            if is_outside and not is_guarded and self._guards == 0:
                self._fail("bounds", f"index {index} of {buffer.name} lies outside of 0..{dim - 1}")

    # values

    def _condition(self, cond: Value) -> None:
        self._value(cond)
        if cond.dtype != "bool":
            self._fail("dtype", f"a condition is {cond.dtype}, not bool")

    def _value(self, root: Value) -> None:
        unguarded = {id(root)}  # ids of values that are evaluated whatever the selects choose
        for value in reversed(postorder(root)):
            children = value_children(value)
            if id(value) in unguarded:
                unguarded.update(map(id, children[:1] if isinstance(value, Select) else children))
            self._one_value(value, is_guarded=id(value) not in unguarded)

    def _one_value(self, value: Value, *, is_guarded: bool) -> None:
        if isinstance(value, Load):
            self._element(value.buffer, value.indices, is_guarded=is_guarded)
        elif isinstance(value, AddressOf):
            self._fail("library", f"the address of an element of {value.buffer.name} is used as data")
        elif isinstance(value, Literal):
            self._literal(value)
        elif isinstance(value, Unary):
            self._check_op(value.op, UNARY)
        elif isinstance(value, Binary):
            self._check_op(value.op, BINARY)
            self._check_same_dtype(value.op, value.a, value.b)
            if value.op == "div" and not dtypes.is_float(value.dtype):
                self._fail("dtype", f"div of {value.dtype}; integers have floordiv and truncdiv")
        elif isinstance(value, Compare):
            self._check_op(value.op, COMPARE)
            self._check_same_dtype(value.op, value.a, value.b)
        elif isinstance(value, Select):
            if value.cond.dtype != "bool":
                self._fail("dtype", f"the condition of a select is {value.cond.dtype}, not bool")
            self._check_same_dtype("select", value.then, value.other)
        elif isinstance(value, IndexValue):
            self._exprs((value.index,))
        elif isinstance(value, Intrinsic):
            problem = type_error(value.name, tuple(arg.dtype for arg in value.args), value.dtype)
            if problem is not None:
                self._fail("operation" if value.name not in INTRINSICS else "dtype", problem)
        if isinstance(value, Literal | Cast | IndexValue | Intrinsic):
            self._dtype(value.dtype)

    def _check_op(self, op: str, table: tuple[str, ...]) -> None:
        if op not in table:
            self._fail("operation", f"unknown operation {op!r}")

    def _check_same_dtype(self, op: str, a: Value, b: Value) -> None:
        if a.dtype != b.dtype:
            self._fail("dtype", f"{op} of {a.dtype} and {b.dtype}")

    def _literal(self, literal: Literal) -> None:
        value, dtype = literal.value, literal.dtype
        self._dtype(dtype)
        if dtypes.is_integer(dtype):
            limits = np.iinfo(dtypes.to_numpy(dtype))
            fits = isinstance(value, int | np.integer) and limits.min <= value <= limits.max
        else:
            fits = dtype != "bool" or value in (False, True)
        if not fits:
            self._fail("dtype", f"{value} is no {dtype}")
