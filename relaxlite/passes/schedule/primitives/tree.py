"""Lookup and replacement of statements in a program, and unique names for loops and buffers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from relaxlite.errors import ScheduleError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, Buffer, For, IfThenElse, Seq, Stmt, StmtWithBody, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, stmt_children, walk_stmts
from relaxlite.ir.symbolic import Division, FloorDiv, SymExpr, SymVar


def find_loop(root: Stmt, name: str) -> For:
    """Find a loop by its name, which `with_unique_names` makes unique. Raises ScheduleError if there is none."""
    for stmt in walk_stmts(root):
        if isinstance(stmt, For) and stmt.var.name == name:
            return stmt
    known = ", ".join(loop.var.name for loop in all_loops(root))
    raise ScheduleError(f"there is no loop {name!r}; the loops are {known or 'none'}")


def find_allocation(root: Stmt, name: str) -> Allocate:
    """Find the allocation of a buffer by name. Raises ScheduleError if there is none."""
    allocations = [stmt for stmt in walk_stmts(root) if isinstance(stmt, Allocate)]
    for stmt in allocations:
        if stmt.buffer.name == name:
            return stmt
    known = ", ".join(stmt.buffer.name for stmt in allocations)
    raise ScheduleError(f"no buffer {name!r} is allocated in the program; allocated are {known or 'none'}")


def all_loops(root: Stmt) -> Iterator[For]:
    """All loops in a statement, outer before inner."""
    return (stmt for stmt in walk_stmts(root) if isinstance(stmt, For))


def path_to(root: Stmt, stmt: Stmt) -> tuple[Stmt, ...]:
    """The statements on the path from the root to `stmt`, both included; empty if `stmt` is not inside."""
    if root is stmt:
        return (root,)
    for child in stmt_children(root):
        path = path_to(child, stmt)
        if path:
            return (root, *path)
    return ()


def replaced(root: Stmt, old: Stmt, new: Stmt) -> Stmt:
    """Replace the statement object `old`, compared by identity, by `new`."""
    if root is old:
        return new
    return map_children(root, lambda child: replaced(child, old, new))


def map_children(stmt: Stmt, change: Callable[[Stmt], Stmt]) -> Stmt:
    """Apply a function to the child statements; returns the same object if none changes."""
    children = stmt_children(stmt)
    new = tuple(change(child) for child in children)
    if all(a is b for a, b in zip(new, children, strict=True)):
        return stmt
    if isinstance(stmt, Seq):
        return seq(*new)
    if isinstance(stmt, IfThenElse):
        return replace(stmt, then=new[0], other=new[1] if len(new) > 1 else None)
    assert isinstance(stmt, StmtWithBody)
    return replace(stmt, body=new[0])


def perfect_nest_of(outer: For, names: Sequence[str]) -> tuple[For, ...]:
    """The perfect nest from `outer` inwards to the last of the loops in `names`.

    Raises ScheduleError if a loop is not in the perfect nest.
    """
    loops, missing = [outer], set(names) - {outer.var.name}
    while missing:
        body = loops[-1].body
        if not isinstance(body, For):
            raise ScheduleError(
                f"loop {sorted(missing)[0]!r} does not stand directly inside of loop {loops[-1].var.name!r}, whose "
                f"body "
                f"is {describe(body)}; distribute() takes the statements of a loop apart"
            )
        loops.append(body)
        missing.discard(body.var.name)
    return tuple(loops)


def describe(stmt: Stmt) -> str:
    """A short description of a statement for error messages."""
    if isinstance(stmt, Seq):
        return f"{len(stmt.stmts)} statements"
    if isinstance(stmt, Allocate):
        return f"an allocation of {stmt.buffer.name}"
    return {"IfThenElse": "a condition", "LetIndex": "a let_index"}.get(type(stmt).__name__, f"a {type(stmt).__name__}")


def analyzer_at(root: Stmt, stmt: Stmt) -> Analyzer:
    """An analyzer with the ranges of the loops around a statement."""
    return with_ranges(Analyzer(), [outer for outer in path_to(root, stmt)[:-1] if isinstance(outer, For)])


def with_ranges(analyzer: Analyzer, loops: Sequence[For]) -> Analyzer:
    """The analyzer extended by the ranges of loops and by extents of at least 1, which hold inside of them."""
    for loop in loops:
        analyzer = analyzer.with_range(loop.var, 0, loop.extent)
        if not loop.extent.is_const:
            analyzer = analyzer.assume_le(1, loop.extent)
            atom = _positive_atom(loop.extent)
            if isinstance(atom, FloorDiv) and atom.b.is_const:
                analyzer = analyzer.assume_le(atom.b, atom.a)
    return analyzer


def _positive_atom(extent: SymExpr) -> SymExpr | None:
    """The atom of an extent c * atom with c > 0, which is positive if the extent is; else None."""
    if extent.const != 0 or len(extent.terms) != 1:
        return None
    (monomial, coef) = extent.terms[0]
    return monomial[0] if len(monomial) == 1 and coef > 0 else None


def simplified(stmt: Stmt, known: Analyzer) -> Stmt:
    """Simplify quotients and remainders of loop variables by the ranges of the loops."""
    return _Simplified(known).stmt(stmt)


class _Simplified(ProgramRewriter):
    def __init__(self, known: Analyzer) -> None:
        super().__init__()
        self._known = known

    def index(self, expr: SymExpr) -> SymExpr:
        divides = any(isinstance(atom, Division) for monomial, _ in expr.terms for atom in monomial)
        return self._known.simplify(expr) if divides else expr

    def stmt(self, stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For):
            return super().stmt(stmt)
        outer, self._known = self._known, with_ranges(self._known, [stmt])
        self._done = {}  # values shared between loops are simplified per loop
        body = self.stmt(stmt.body)
        self._known, self._done = outer, {}
        return stmt if body is stmt.body else replace(stmt, body=body)


# Unique names

Named: TypeAlias = "For | SymVar | Buffer"


def with_unique_names(
    before: Stmt | None, after: Stmt, params: Sequence[Buffer], created: Sequence[Named] = ()
) -> tuple[Stmt, tuple[str, ...]]:
    """Rename loops and allocated buffers to unique names. Returns (statement, names of the items in `created`).

    Loops and buffers of `before` keep their names; the first copy keeps its name, further copies get a number.
    """
    old = [] if before is None else [_named(stmt) for stmt in walk_stmts(before) if isinstance(stmt, For | Allocate)]
    names = _Names(old, after, params)
    new = names.stmt(after)
    items = [item.var if isinstance(item, For) else item for item in created]
    return new, tuple(names.first.get(item, item.name) for item in items)


def _named(stmt: For | Allocate) -> SymVar | Buffer:
    return stmt.var if isinstance(stmt, For) else stmt.buffer


class _Names(Substitute):
    def __init__(self, old: Sequence[SymVar | Buffer], body: Stmt, params: Sequence[Buffer]) -> None:
        super().__init__()
        present = {_named(s) for s in walk_stmts(body) if isinstance(s, For | Allocate)}
        self._reserved: dict[tuple[type, str], SymVar | Buffer] = {}
        for item in old:
            if item in present:
                self._reserved.setdefault((type(item), item.name), item)
        self._used: set[tuple[type, str]] = {(Buffer, param.name) for param in params}
        self.first: dict[SymVar | Buffer, str] = {}  # name of the first occurrence

    def stmt(self, stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For | Allocate):
            return super().stmt(stmt)
        item = _named(stmt)
        is_copy = item in self.first
        name = self._name_for(item)
        self.first.setdefault(item, name)
        if name == item.name and not is_copy:
            return super().stmt(stmt)
        self.clear_memo()
        if isinstance(stmt, For):
            var = SymVar(name, lower=stmt.var.lower, upper=stmt.var.upper, divisor=stmt.var.divisor)
            extent, outer_var = self.index(stmt.extent), self.symbols.get(stmt.var)
            self.symbols[stmt.var] = var
            new: Stmt = replace(stmt, var=var, extent=extent, body=self.stmt(stmt.body))
            del self.symbols[stmt.var]
            if outer_var is not None:
                self.symbols[stmt.var] = outer_var
        else:
            buffer = replace(stmt.buffer, name=name, shape=self.indices(stmt.buffer.shape))
            outer_buffer = self.buffers.get(stmt.buffer)
            self.buffers[stmt.buffer] = buffer
            new = Allocate(buffer, self.stmt(stmt.body))
            del self.buffers[stmt.buffer]
            if outer_buffer is not None:
                self.buffers[stmt.buffer] = outer_buffer
        self._done = {}
        return new

    def _name_for(self, item: SymVar | Buffer) -> str:
        kind, name = type(item), item.name
        is_mine = self._reserved.get((kind, name), item) is item
        if (kind, name) not in self._used and is_mine:
            self._used.add((kind, name))
            return name
        base, count = re.sub(r"_\d+$", "", name), 1
        while (kind, f"{base}_{count}") in self._used or (kind, f"{base}_{count}") in self._reserved:
            count += 1
        self._used.add((kind, f"{base}_{count}"))
        return f"{base}_{count}"
