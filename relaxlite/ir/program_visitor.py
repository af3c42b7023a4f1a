"""Walking and rewriting tensor programs: statements, values, indices.

Rewriters return the very object they were given when nothing changes, so "did it change?" is `is`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Binder,
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
    Unary,
    Value,
    seq,
)
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, substitute

# Unions that are made at each test take longer than it
_WithIndices: TypeAlias = Store | Prefetch
_Indexed: TypeAlias = Load | AddressOf


def stmt_children(stmt: Stmt) -> tuple[Stmt, ...]:
    return _STMT_CHILDREN[type(stmt)](stmt)


# Compilation asks these millions of times: a table of kinds takes half the time of a chain of isinstance
_STMT_CHILDREN: dict[type, Callable[[Any], tuple[Stmt, ...]]] = {
    **dict.fromkeys((For, LetIndex, Allocate), lambda stmt: (stmt.body,)),
    IfThenElse: lambda stmt: (stmt.then,) if stmt.other is None else (stmt.then, stmt.other),
    Seq: lambda stmt: stmt.stmts,
    **dict.fromkeys((Store, Check, Prefetch, Barrier, CallLibrary), lambda stmt: ()),
}


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """The statement and all inside it, outer first."""
    stack = [stmt]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(_STMT_CHILDREN[type(current)](current)[::-1])


def stmt_values(stmt: Stmt) -> tuple[Value, ...]:
    """The values that one statement holds itself."""
    return _STMT_VALUES[type(stmt)](stmt)


_STMT_VALUES: dict[type, Callable[[Any], tuple[Value, ...]]] = {
    **dict.fromkeys((Store, LetIndex), lambda stmt: (stmt.value,)),
    **dict.fromkeys((IfThenElse, Check), lambda stmt: (stmt.cond,)),
    CallLibrary: lambda stmt: stmt.args,
    **dict.fromkeys((For, Allocate, Prefetch, Barrier, Seq), lambda stmt: ()),
}


def value_children(value: Value) -> tuple[Value, ...]:
    return _VALUE_CHILDREN[type(value)](value)


_VALUE_CHILDREN: dict[type, Callable[[Any], tuple[Value, ...]]] = {
    **dict.fromkeys((Unary, Cast), lambda value: (value.x,)),
    **dict.fromkeys((Binary, Compare), lambda value: (value.a, value.b)),
    Select: lambda value: (value.cond, value.then, value.other),
    Intrinsic: lambda value: value.args,
    **dict.fromkeys((Literal, Load, IndexValue, AddressOf, LibraryFound), lambda value: ()),
}


def walk_values(value: Value) -> Iterator[Value]:
    """The value and all inside it; a shared part once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack.extend(_VALUE_CHILDREN[type(current)](current)[::-1])


def all_values(stmt: Stmt) -> Iterator[Value]:
    """Every value inside a statement."""
    for inner in walk_stmts(stmt):
        for value in stmt_values(inner):
            yield from walk_values(value)


def loads(stmt: Stmt) -> Iterator[Load]:
    return (v for v in all_values(stmt) if isinstance(v, Load))


def stores(stmt: Stmt) -> Iterator[Store]:
    return (s for s in walk_stmts(stmt) if isinstance(s, Store))


def stmt_indices(stmt: Stmt) -> Iterator[SymExpr]:
    """Every symbolic integer inside a statement: extents, indices, index values."""
    for inner in walk_stmts(stmt):
        if isinstance(inner, For):
            yield inner.extent
        elif isinstance(inner, _WithIndices):
            yield from inner.indices
        elif isinstance(inner, Allocate):
            yield from inner.buffer.shape
        elif isinstance(inner, CallLibrary):
            yield inner.work
        for root in stmt_values(inner):
            for value in walk_values(root):
                if isinstance(value, _Indexed):
                    yield from value.indices
                elif isinstance(value, IndexValue):
                    yield value.index


def bound_symbols(stmt: Stmt) -> set[SymVar]:
    """Loop variables and data-dependent indices bound inside."""
    return {s.var for s in walk_stmts(stmt) if isinstance(s, Binder)}


def free_symbols(stmt: Stmt) -> tuple[SymVar, ...]:
    """The symbols that a statement uses and does not bind, in order of first use."""
    bound, result = bound_symbols(stmt), dict[SymVar, None]()
    for expr in stmt_indices(stmt):
        result.update(dict.fromkeys(v for v in expr.free_vars() if v not in bound))
    return tuple(result)


def program_symbols(params: tuple[Buffer, ...], body: Stmt) -> tuple[SymVar, ...]:
    """What the `symbols` of a program with these parameters and this body must be."""
    roots: dict[SymVar, None] = {}
    for buffer in params:
        for dim in buffer.shape:
            roots.update(dict.fromkeys(dim.free_vars()))
    roots.update(dict.fromkeys(free_symbols(body)))
    return tuple(roots)


class ProgramRewriter:
    """Rewrites statements and values bottom-up. Override `stmt`, `value`, `index` or `buffer`; call super for the rest.

    Shared values stay shared: each is rewritten once.
    """

    def __init__(self) -> None:
        self._done: dict[int, tuple[Value, Value]] = {}

    def index(self, expr: SymExpr) -> SymExpr:
        return expr

    def buffer(self, buffer: Buffer) -> Buffer:
        return buffer

    def indices(self, exprs: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        new = tuple([self.index(e) for e in exprs])
        return exprs if new == exprs else new  # of interned expressions: compared by identity

    def value(self, value: Value) -> Value:
        done = self._done.get(id(value))
        if done is None:
            done = (value, self._value(value))  # keeps `value` alive, so that its id stays its own
            self._done[id(value)] = done
        return done[1]

    def _value(self, value: Value) -> Value:
        return _REBUILT_VALUE[type(value)](self, value)

    def values(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        new = tuple([self.value(v) for v in values])
        return values if new == values else new  # nodes too are compared by identity

    def stmt(self, stmt: Stmt) -> Stmt:
        return _REBUILT_STMT[type(stmt)](self, stmt)


def _same(to: ProgramRewriter, node: Any) -> Any:
    return node


def _load(to: ProgramRewriter, value: Load) -> Value:
    buffer, indices = to.buffer(value.buffer), to.indices(value.indices)
    return value if buffer is value.buffer and indices is value.indices else Load(buffer, indices)


def _address(to: ProgramRewriter, value: AddressOf) -> Value:
    buffer, indices = to.buffer(value.buffer), to.indices(value.indices)
    is_same = buffer is value.buffer and indices is value.indices
    return value if is_same else AddressOf(buffer, indices, value.is_written)


def _index_value(to: ProgramRewriter, value: IndexValue) -> Value:
    index = to.index(value.index)
    return value if index is value.index else IndexValue(index, value.dtype)


def _unary(to: ProgramRewriter, value: Unary) -> Value:
    x = to.value(value.x)
    return value if x is value.x else Unary(value.op, x)


def _cast(to: ProgramRewriter, value: Cast) -> Value:
    x = to.value(value.x)
    return value if x is value.x else Cast(x, value.dtype)


def _of_two(to: ProgramRewriter, value: Binary | Compare) -> Value:
    a, b = to.value(value.a), to.value(value.b)
    return value if a is value.a and b is value.b else type(value)(value.op, a, b)


def _select(to: ProgramRewriter, value: Select) -> Value:
    cond, then, other = to.value(value.cond), to.value(value.then), to.value(value.other)
    is_same = cond is value.cond and then is value.then and other is value.other
    return value if is_same else Select(cond, then, other)


def _intrinsic(to: ProgramRewriter, value: Intrinsic) -> Value:
    args = to.values(value.args)
    return value if args is value.args else Intrinsic(value.name, args, value.dtype)


_REBUILT_VALUE: dict[type, Callable[[ProgramRewriter, Any], Value]] = {
    Load: _load,
    AddressOf: _address,
    IndexValue: _index_value,
    Unary: _unary,
    Cast: _cast,
    Binary: _of_two,
    Compare: _of_two,
    Select: _select,
    Intrinsic: _intrinsic,
    Literal: _same,
    LibraryFound: _same,
}


def _store(to: ProgramRewriter, stmt: Store) -> Stmt:
    buffer, indices, value = to.buffer(stmt.buffer), to.indices(stmt.indices), to.value(stmt.value)
    if buffer is stmt.buffer and indices is stmt.indices and value is stmt.value:
        return stmt
    return Store(buffer, indices, value, stmt.combine, stmt.nontemporal)


def _prefetch(to: ProgramRewriter, stmt: Prefetch) -> Stmt:
    buffer, indices = to.buffer(stmt.buffer), to.indices(stmt.indices)
    return stmt if buffer is stmt.buffer and indices is stmt.indices else Prefetch(buffer, indices, stmt.cache)


def _for(to: ProgramRewriter, stmt: For) -> Stmt:
    extent, body = to.index(stmt.extent), to.stmt(stmt.body)
    return stmt if extent is stmt.extent and body is stmt.body else For(stmt.var, extent, body, stmt.kind)


def _seq(to: ProgramRewriter, stmt: Seq) -> Stmt:
    stmts = tuple([to.stmt(s) for s in stmt.stmts])
    return stmt if stmts == stmt.stmts else seq(*stmts)


def _allocate(to: ProgramRewriter, stmt: Allocate) -> Stmt:
    buffer, body = to.buffer(stmt.buffer), to.stmt(stmt.body)
    return stmt if buffer is stmt.buffer and body is stmt.body else Allocate(buffer, body)


def _let_index(to: ProgramRewriter, stmt: LetIndex) -> Stmt:
    value, body = to.value(stmt.value), to.stmt(stmt.body)
    return stmt if value is stmt.value and body is stmt.body else LetIndex(stmt.var, value, body)


def _if_then_else(to: ProgramRewriter, stmt: IfThenElse) -> Stmt:
    other = None if stmt.other is None else to.stmt(stmt.other)
    cond, then = to.value(stmt.cond), to.stmt(stmt.then)
    is_same = cond is stmt.cond and then is stmt.then and other is stmt.other
    return stmt if is_same else IfThenElse(cond, then, other)


def _check(to: ProgramRewriter, stmt: Check) -> Stmt:
    cond = to.value(stmt.cond)
    return stmt if cond is stmt.cond else Check(cond, stmt.message)


def _call_library(to: ProgramRewriter, stmt: CallLibrary) -> Stmt:
    args, work = to.values(stmt.args), to.index(stmt.work)
    return stmt if args is stmt.args and work is stmt.work else replace(stmt, args=args, work=work)


_REBUILT_STMT: dict[type, Callable[[ProgramRewriter, Any], Stmt]] = {
    Store: _store,
    Prefetch: _prefetch,
    For: _for,
    Seq: _seq,
    Allocate: _allocate,
    LetIndex: _let_index,
    IfThenElse: _if_then_else,
    Check: _check,
    CallLibrary: _call_library,
    Barrier: _same,
}


class Substitute(ProgramRewriter):
    """Replaces symbols and buffers; with `fresh`, also gives every loop variable a new identity."""

    def __init__(
        self,
        symbols: Mapping[SymVar, IntLike] | None = None,
        buffers: Mapping[Buffer, Buffer] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__()
        self.symbols = dict(symbols or {})
        self.buffers = dict(buffers or {})
        self.fresh = fresh
        self._indices: dict[SymExpr, SymExpr] = {}  # bodies repeat few indices many times

    def index(self, expr: SymExpr) -> SymExpr:
        indice = self._indices.get(expr)
        if indice is None:
            self._indices[expr] = indice = substitute(expr, self.symbols)
        return indice

    def buffer(self, buffer: Buffer) -> Buffer:
        result = self.buffers.get(buffer)
        if result is None:
            shape = self.indices(buffer.shape)
            result = buffer if shape is buffer.shape else Buffer(buffer.name, shape, buffer.dtype, buffer.scope)
            self.buffers[buffer] = result
        return result

    def forget(self) -> None:
        """From here on, what was rewritten before may become something else: a symbol or buffer has a new meaning."""
        self._done, self._indices = {}, {}

    def stmt(self, stmt: Stmt) -> Stmt:
        if self.fresh and isinstance(stmt, Binder):
            var = _renewed(stmt.var)
            if stmt.var in self.symbols:  # what is shared with another loop over it must not keep that loop's new one
                self.forget()
            self.symbols[stmt.var] = var
            if isinstance(stmt, For):
                return For(var, self.index(stmt.extent), self.stmt(stmt.body), stmt.kind)
            return LetIndex(var, self.value(stmt.value), self.stmt(stmt.body))
        if self.fresh and isinstance(stmt, Allocate) and stmt.buffer not in self.buffers:
            buffer = stmt.buffer
            self.buffers[buffer] = Buffer(buffer.name, self.indices(buffer.shape), buffer.dtype, buffer.scope)
        return super().stmt(stmt)


def _renewed(var: SymVar) -> SymVar:
    return SymVar(var.name, lower=var.lower, upper=var.upper, divisor=var.divisor)


class ReplaceLoads(ProgramRewriter):
    """Replaces every load of a buffer by one value, whatever its indices."""

    def __init__(self, buffer: Buffer, by: Value) -> None:
        super().__init__()
        self._buffer, self._by = buffer, by

    def _value(self, value: Value) -> Value:
        return self._by if isinstance(value, Load) and value.buffer is self._buffer else super()._value(value)
