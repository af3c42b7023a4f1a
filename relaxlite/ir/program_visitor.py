"""Walking and rewriting tensor programs: statements, values, indices.

Rewriters return the very object they were given when nothing changes, so "did it change?" is `is`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Binary,
    Binder,
    Buffer,
    CallLibrary,
    Cast,
    Check,
    Compare,
    Enclosing,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
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
_WithValue: TypeAlias = Store | LetIndex
_WithCondition: TypeAlias = IfThenElse | Check
_WithIndices: TypeAlias = Store | Prefetch
_OfOne: TypeAlias = Unary | Cast
_OfTwo: TypeAlias = Binary | Compare
_Indexed: TypeAlias = Load | AddressOf


def stmt_children(stmt: Stmt) -> tuple[Stmt, ...]:
    if isinstance(stmt, Enclosing):
        return (stmt.body,)
    if isinstance(stmt, IfThenElse):
        return (stmt.then,) if stmt.other is None else (stmt.then, stmt.other)
    return stmt.stmts if isinstance(stmt, Seq) else ()


def walk_stmts(stmt: Stmt) -> Iterator[Stmt]:
    """The statement and all inside it, outer first."""
    stack = [stmt]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(stmt_children(current)))


def stmt_values(stmt: Stmt) -> tuple[Value, ...]:
    """The values that one statement holds itself."""
    if isinstance(stmt, _WithValue):
        return (stmt.value,)
    if isinstance(stmt, CallLibrary):
        return stmt.args
    return (stmt.cond,) if isinstance(stmt, _WithCondition) else ()


def value_children(value: Value) -> tuple[Value, ...]:
    if isinstance(value, _OfOne):
        return (value.x,)
    if isinstance(value, _OfTwo):
        return (value.a, value.b)
    if isinstance(value, Select):
        return (value.cond, value.then, value.other)
    return value.args if isinstance(value, Intrinsic) else ()


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
        stack.extend(reversed(value_children(current)))


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
    bound, found = bound_symbols(stmt), dict[SymVar, None]()
    for expr in stmt_indices(stmt):
        found.update(dict.fromkeys(v for v in expr.free_vars() if v not in bound))
    return tuple(found)


def program_symbols(params: tuple[Buffer, ...], body: Stmt) -> tuple[SymVar, ...]:
    """What the `symbols` of a program with these parameters and this body must be."""
    found: dict[SymVar, None] = {}
    for buffer in params:
        for dim in buffer.shape:
            found.update(dict.fromkeys(dim.free_vars()))
    found.update(dict.fromkeys(free_symbols(body)))
    return tuple(found)


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
        new = tuple(self.index(e) for e in exprs)
        return exprs if all(a is b for a, b in zip(new, exprs, strict=True)) else new

    def value(self, value: Value) -> Value:
        done = self._done.get(id(value))
        if done is None:
            done = (value, self._value(value))  # keeps `value` alive, so that its id stays its own
            self._done[id(value)] = done
        return done[1]

    def _value(self, value: Value) -> Value:
        if isinstance(value, _Indexed):
            buffer, indices = self.buffer(value.buffer), self.indices(value.indices)
            is_same = buffer is value.buffer and indices is value.indices
            return value if is_same else type(value)(buffer, indices)
        if isinstance(value, IndexValue):
            index = self.index(value.index)
            return value if index is value.index else IndexValue(index, value.dtype)
        old = value_children(value)
        new = tuple(self.value(child) for child in old)
        return value if all(a is b for a, b in zip(new, old, strict=True)) else rebuild_value(value, new)

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, Store):
            buffer, indices, value = self.buffer(stmt.buffer), self.indices(stmt.indices), self.value(stmt.value)
            if buffer is stmt.buffer and indices is stmt.indices and value is stmt.value:
                return stmt
            return Store(buffer, indices, value, stmt.combine, stmt.nontemporal)
        if isinstance(stmt, Prefetch):
            buffer, indices = self.buffer(stmt.buffer), self.indices(stmt.indices)
            is_same = buffer is stmt.buffer and indices is stmt.indices
            return stmt if is_same else replace(stmt, buffer=buffer, indices=indices)
        if isinstance(stmt, For):
            extent, body = self.index(stmt.extent), self.stmt(stmt.body)
            return stmt if extent is stmt.extent and body is stmt.body else For(stmt.var, extent, body, stmt.kind)
        if isinstance(stmt, Seq):
            stmts = tuple(self.stmt(s) for s in stmt.stmts)
            return stmt if all(a is b for a, b in zip(stmts, stmt.stmts, strict=True)) else seq(*stmts)
        if isinstance(stmt, Allocate):
            buffer, body = self.buffer(stmt.buffer), self.stmt(stmt.body)
            return stmt if buffer is stmt.buffer and body is stmt.body else Allocate(buffer, body)
        if isinstance(stmt, LetIndex):
            value, body = self.value(stmt.value), self.stmt(stmt.body)
            return stmt if value is stmt.value and body is stmt.body else LetIndex(stmt.var, value, body)
        if isinstance(stmt, IfThenElse):
            other = None if stmt.other is None else self.stmt(stmt.other)
            cond, then = self.value(stmt.cond), self.stmt(stmt.then)
            same = cond is stmt.cond and then is stmt.then and other is stmt.other
            return stmt if same else IfThenElse(cond, then, other)
        if isinstance(stmt, Check):
            cond = self.value(stmt.cond)
            return stmt if cond is stmt.cond else Check(cond, stmt.message)
        if isinstance(stmt, CallLibrary):
            args, work = tuple(map(self.value, stmt.args)), self.index(stmt.work)
            same = work is stmt.work and all(a is b for a, b in zip(args, stmt.args, strict=True))
            return stmt if same else replace(stmt, args=args, work=work)
        return stmt


def rebuild_value(value: Value, children: tuple[Value, ...]) -> Value:
    """The same kind of value of new operands."""
    if isinstance(value, Unary):
        return Unary(value.op, children[0])
    if isinstance(value, Cast):
        return Cast(children[0], value.dtype)
    if isinstance(value, Binary):
        return Binary(value.op, *children)
    if isinstance(value, Compare):
        return Compare(value.op, *children)
    if isinstance(value, Select):
        return Select(*children)
    if isinstance(value, Intrinsic):
        return Intrinsic(value.name, children, value.dtype)
    return value


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

    def index(self, expr: SymExpr) -> SymExpr:
        return substitute(expr, self.symbols)

    def buffer(self, buffer: Buffer) -> Buffer:
        found = self.buffers.get(buffer)
        if found is None:
            shape = self.indices(buffer.shape)
            found = buffer if shape is buffer.shape else replace(buffer, shape=shape)
            self.buffers[buffer] = found
        return found

    def stmt(self, stmt: Stmt) -> Stmt:
        if self.fresh and isinstance(stmt, Binder):
            var = _renewed(stmt.var)
            self.symbols[stmt.var] = var
            self._done = {}  # a value shared with another loop over the same variable must not keep that loop's new one
            if isinstance(stmt, For):
                return For(var, self.index(stmt.extent), self.stmt(stmt.body), stmt.kind)
            return LetIndex(var, self.value(stmt.value), self.stmt(stmt.body))
        if self.fresh and isinstance(stmt, Allocate) and stmt.buffer not in self.buffers:
            self.buffers[stmt.buffer] = replace(stmt.buffer, shape=self.indices(stmt.buffer.shape))
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
