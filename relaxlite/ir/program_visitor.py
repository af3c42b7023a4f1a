"""Traversal and rewriting of tensor programs: statements, values, indices.

Rewriters return the same object if nothing changes, so callers detect changes by `is`.
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

# Named unions: building a union for each isinstance is slower than the test
_WithIndices: TypeAlias = Store | Prefetch
_Indexed: TypeAlias = Load | AddressOf


def stmt_children(stmt: Stmt) -> tuple[Stmt, ...]:
    """Direct child statements."""
    return _STMT_CHILDREN[type(stmt)](stmt)


# Dispatch tables by node class, as traversal dominates (docs/measurements/ircore.md)
_STMT_CHILDREN: dict[type, Callable[[Any], tuple[Stmt, ...]]] = {
    **dict.fromkeys((For, LetIndex, Allocate), lambda stmt: (stmt.body,)),
    IfThenElse: lambda stmt: (stmt.then,) if stmt.other is None else (stmt.then, stmt.other),
    Seq: lambda stmt: stmt.stmts,
    **dict.fromkeys((Store, Check, Prefetch, Barrier, CallLibrary), lambda stmt: ()),
}


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """Yield a statement and all nested statements in pre-order."""
    stack = [stmt]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(_STMT_CHILDREN[type(current)](current)[::-1])


def stmt_values(stmt: Stmt) -> tuple[Value, ...]:
    """Root values of one statement, without those of nested statements."""
    return _STMT_VALUES[type(stmt)](stmt)


_STMT_VALUES: dict[type, Callable[[Any], tuple[Value, ...]]] = {
    **dict.fromkeys((Store, LetIndex), lambda stmt: (stmt.value,)),
    **dict.fromkeys((IfThenElse, Check), lambda stmt: (stmt.cond,)),
    CallLibrary: lambda stmt: stmt.args,
    **dict.fromkeys((For, Allocate, Prefetch, Barrier, Seq), lambda stmt: ()),
}


def value_children(value: Value) -> tuple[Value, ...]:
    """Direct operands of a value."""
    return _VALUE_CHILDREN[type(value)](value)


_VALUE_CHILDREN: dict[type, Callable[[Any], tuple[Value, ...]]] = {
    **dict.fromkeys((Unary, Cast), lambda value: (value.x,)),
    **dict.fromkeys((Binary, Compare), lambda value: (value.a, value.b)),
    Select: lambda value: (value.cond, value.then, value.other),
    Intrinsic: lambda value: value.args,
    **dict.fromkeys((Literal, Load, IndexValue, AddressOf, LibraryFound), lambda value: ()),
}


def walk_values(value: Value) -> Iterator[Value]:
    """Yield a value and all nested values in pre-order; a shared value once."""
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
    """Yield every value of a statement and all nested statements."""
    for inner in walk_stmts(stmt):
        for value in stmt_values(inner):
            yield from walk_values(value)


def loads(stmt: Stmt) -> Iterator[Load]:
    """Yield every load inside a statement."""
    return (v for v in all_values(stmt) if isinstance(v, Load))


def stores(stmt: Stmt) -> Iterator[Store]:
    """Yield every store inside a statement."""
    return (s for s in walk_stmts(stmt) if isinstance(s, Store))


def stmt_indices(stmt: Stmt) -> Iterator[SymExpr]:
    """Yield every symbolic integer inside a statement: extents, indices, index values, buffer shapes."""
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
    """Symbols that a statement binds: loop variables and data-dependent indices."""
    return {s.var for s in walk_stmts(stmt) if isinstance(s, Binder)}


def free_symbols(stmt: Stmt) -> tuple[SymVar, ...]:
    """Symbols that a statement uses but does not bind, in order of first use."""
    bound, result = bound_symbols(stmt), dict[SymVar, None]()
    for expr in stmt_indices(stmt):
        result.update(dict.fromkeys(v for v in expr.free_vars() if v not in bound))
    return tuple(result)


def program_symbols(params: tuple[Buffer, ...], body: Stmt) -> tuple[SymVar, ...]:
    """Free symbols of parameters and body, in the order of a program's `symbols`."""
    roots: dict[SymVar, None] = {}
    for buffer in params:
        for dim in buffer.shape:
            roots.update(dict.fromkeys(dim.free_vars()))
    roots.update(dict.fromkeys(free_symbols(body)))
    return tuple(roots)


class ProgramRewriter:
    """Bottom-up rewriter of statements and values. Subclasses override `stmt`, `value`, `index` or `buffer`.

    Overrides call super for nodes that they do not handle. A shared value is rewritten once and stays shared.
    """

    def __init__(self) -> None:
        self._done: dict[int, tuple[Value, Value]] = {}

    def index(self, expr: SymExpr) -> SymExpr:
        """Rewrite a symbolic integer."""
        return expr

    def buffer(self, buffer: Buffer) -> Buffer:
        """Rewrite a buffer at a definition or use."""
        return buffer

    def indices(self, exprs: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        """Rewrite indices or a shape by `index`."""
        new = tuple([self.index(e) for e in exprs])
        return exprs if new == exprs else new  # interned, so compared by identity

    def value(self, value: Value) -> Value:
        """Rewrite a value, memoized by identity."""
        entry = self._done.get(id(value))
        if entry is None:
            entry = (value, self._value(value))  # the reference to `value` keeps its id unique
            self._done[id(value)] = entry
        return entry[1]

    def _value(self, value: Value) -> Value:
        return _REWRITE_VALUE[type(value)](self, value)

    def values(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Rewrite several values."""
        new = tuple([self.value(v) for v in values])
        return values if new == values else new  # nodes are compared by identity

    def stmt(self, stmt: Stmt) -> Stmt:
        """Rewrite a statement."""
        return _REWRITE_STMT[type(stmt)](self, stmt)


def _unchanged(rewriter: ProgramRewriter, node: Any) -> Any:
    return node


def _load(rewriter: ProgramRewriter, value: Load) -> Value:
    buffer, indices = rewriter.buffer(value.buffer), rewriter.indices(value.indices)
    return value if buffer is value.buffer and indices is value.indices else Load(buffer, indices)


def _address(rewriter: ProgramRewriter, value: AddressOf) -> Value:
    buffer, indices = rewriter.buffer(value.buffer), rewriter.indices(value.indices)
    is_same = buffer is value.buffer and indices is value.indices
    return value if is_same else AddressOf(buffer, indices, value.is_written)


def _index_value(rewriter: ProgramRewriter, value: IndexValue) -> Value:
    index = rewriter.index(value.index)
    return value if index is value.index else IndexValue(index, value.dtype)


def _unary(rewriter: ProgramRewriter, value: Unary) -> Value:
    x = rewriter.value(value.x)
    return value if x is value.x else Unary(value.op, x)


def _cast(rewriter: ProgramRewriter, value: Cast) -> Value:
    x = rewriter.value(value.x)
    return value if x is value.x else Cast(x, value.dtype)


def _binary(rewriter: ProgramRewriter, value: Binary | Compare) -> Value:
    a, b = rewriter.value(value.a), rewriter.value(value.b)
    return value if a is value.a and b is value.b else type(value)(value.op, a, b)


def _select(rewriter: ProgramRewriter, value: Select) -> Value:
    cond, then, other = rewriter.value(value.cond), rewriter.value(value.then), rewriter.value(value.other)
    is_same = cond is value.cond and then is value.then and other is value.other
    return value if is_same else Select(cond, then, other)


def _intrinsic(rewriter: ProgramRewriter, value: Intrinsic) -> Value:
    args = rewriter.values(value.args)
    return value if args is value.args else Intrinsic(value.name, args, value.dtype)


_REWRITE_VALUE: dict[type, Callable[[ProgramRewriter, Any], Value]] = {
    Load: _load,
    AddressOf: _address,
    IndexValue: _index_value,
    Unary: _unary,
    Cast: _cast,
    Binary: _binary,
    Compare: _binary,
    Select: _select,
    Intrinsic: _intrinsic,
    Literal: _unchanged,
    LibraryFound: _unchanged,
}


def _store(rewriter: ProgramRewriter, stmt: Store) -> Stmt:
    buffer, indices, value = rewriter.buffer(stmt.buffer), rewriter.indices(stmt.indices), rewriter.value(stmt.value)
    if buffer is stmt.buffer and indices is stmt.indices and value is stmt.value:
        return stmt
    return Store(buffer, indices, value, stmt.combine, stmt.nontemporal)


def _prefetch(rewriter: ProgramRewriter, stmt: Prefetch) -> Stmt:
    buffer, indices = rewriter.buffer(stmt.buffer), rewriter.indices(stmt.indices)
    return stmt if buffer is stmt.buffer and indices is stmt.indices else Prefetch(buffer, indices, stmt.cache)


def _for(rewriter: ProgramRewriter, stmt: For) -> Stmt:
    extent, body = rewriter.index(stmt.extent), rewriter.stmt(stmt.body)
    return stmt if extent is stmt.extent and body is stmt.body else For(stmt.var, extent, body, stmt.kind)


def _seq(rewriter: ProgramRewriter, stmt: Seq) -> Stmt:
    stmts = tuple([rewriter.stmt(s) for s in stmt.stmts])
    return stmt if stmts == stmt.stmts else seq(*stmts)


def _allocate(rewriter: ProgramRewriter, stmt: Allocate) -> Stmt:
    buffer, body = rewriter.buffer(stmt.buffer), rewriter.stmt(stmt.body)
    return stmt if buffer is stmt.buffer and body is stmt.body else Allocate(buffer, body)


def _let_index(rewriter: ProgramRewriter, stmt: LetIndex) -> Stmt:
    value, body = rewriter.value(stmt.value), rewriter.stmt(stmt.body)
    return stmt if value is stmt.value and body is stmt.body else LetIndex(stmt.var, value, body)


def _if_then_else(rewriter: ProgramRewriter, stmt: IfThenElse) -> Stmt:
    other = None if stmt.other is None else rewriter.stmt(stmt.other)
    cond, then = rewriter.value(stmt.cond), rewriter.stmt(stmt.then)
    is_same = cond is stmt.cond and then is stmt.then and other is stmt.other
    return stmt if is_same else IfThenElse(cond, then, other)


def _check(rewriter: ProgramRewriter, stmt: Check) -> Stmt:
    cond = rewriter.value(stmt.cond)
    return stmt if cond is stmt.cond else Check(cond, stmt.message)


def _call_library(rewriter: ProgramRewriter, stmt: CallLibrary) -> Stmt:
    args, work = rewriter.values(stmt.args), rewriter.index(stmt.work)
    return stmt if args is stmt.args and work is stmt.work else replace(stmt, args=args, work=work)


_REWRITE_STMT: dict[type, Callable[[ProgramRewriter, Any], Stmt]] = {
    Store: _store,
    Prefetch: _prefetch,
    For: _for,
    Seq: _seq,
    Allocate: _allocate,
    LetIndex: _let_index,
    IfThenElse: _if_then_else,
    Check: _check,
    CallLibrary: _call_library,
    Barrier: _unchanged,
}


class Substitute(ProgramRewriter):
    """Substitution of symbols and buffers; with `fresh`, bound symbols and allocated buffers become new objects."""

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
        self._indices: dict[SymExpr, SymExpr] = {}  # memo: bodies repeat few indices often

    def index(self, expr: SymExpr) -> SymExpr:
        substituted = self._indices.get(expr)
        if substituted is None:
            self._indices[expr] = substituted = substitute(expr, self.symbols)
        return substituted

    def buffer(self, buffer: Buffer) -> Buffer:
        result = self.buffers.get(buffer)
        if result is None:
            shape = self.indices(buffer.shape)
            result = buffer if shape is buffer.shape else Buffer(buffer.name, shape, buffer.dtype, buffer.scope)
            self.buffers[buffer] = result
        return result

    def clear_memo(self) -> None:
        """Clear the memo of rewritten values and indices, after a change of `symbols` or `buffers`."""
        self._done, self._indices = {}, {}

    def stmt(self, stmt: Stmt) -> Stmt:
        if self.fresh and isinstance(stmt, Binder):
            var = _fresh_symbol(stmt.var)
            if stmt.var in self.symbols:  # values shared with another loop over it have that loop's new variable
                self.clear_memo()
            self.symbols[stmt.var] = var
            if isinstance(stmt, For):
                return For(var, self.index(stmt.extent), self.stmt(stmt.body), stmt.kind)
            return LetIndex(var, self.value(stmt.value), self.stmt(stmt.body))
        if self.fresh and isinstance(stmt, Allocate) and stmt.buffer not in self.buffers:
            buffer = stmt.buffer
            self.buffers[buffer] = Buffer(buffer.name, self.indices(buffer.shape), buffer.dtype, buffer.scope)
        return super().stmt(stmt)


def _fresh_symbol(var: SymVar) -> SymVar:
    return SymVar(var.name, lower=var.lower, upper=var.upper, divisor=var.divisor)


class ReplaceLoads(ProgramRewriter):
    """Replacement of every load of a buffer by one value, regardless of indices."""

    def __init__(self, buffer: Buffer, by: Value) -> None:
        super().__init__()
        self._buffer, self._by = buffer, by

    def _value(self, value: Value) -> Value:
        return self._by if isinstance(value, Load) and value.buffer is self._buffer else super()._value(value)
