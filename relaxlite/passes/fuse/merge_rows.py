"""Make one row program (loops/row_program.py) of stages that share their rows: reductions, what is computed once a row
from them, and what is computed for each element of the row.

    for i: { e[]; e = -inf; for k: e max= x[i, k]; t[i] = e }       for i:
    for i, j: u[i, j] = exp(x[i, j] - t[i])                             local e[], t[], u[m], s[]
    for i: { s[]; ... s += u[i, k]; v[i] = s }                =>        e = -inf; for k: e max= x[i, k];  t = e
    for i, j: out[i, j] = u[i, j] / v[i]                                for j: u[j] = exp(x[i, j] - t)
                                                                        s = 0; for k: s += u[k]
                                                                        for j: out[i, j] = u[j] / s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.layout import flat_offset
from relaxlite.ir.program import Buffer, For, Load, Stmt, Store, Value
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.loops.pattern import Reduction, injective_store, perfect_nest, reduction_of
from relaxlite.passes.loops.row_program import RowProgram, match_row_program
from relaxlite.records import dataclass

_ANALYZER = Analyzer()


def rows_from(stages: Sequence[Stmt], intermediates: Sequence[Buffer]) -> RowProgram | None:
    """The stages as one row program; None: they do not share their rows, or their last one writes no row. Intermediates
    that are written here become scalars and rows of its own."""
    anchor = next((s for s in stages if _row_of(s) is not None), None)
    if anchor is None:
        return None
    spatial, size = _row_of(anchor) or ((), sym(1))
    result = _RowBuilder(tuple(replace(loop, var=SymVar(loop.var.name)) for loop in spatial), size, set(intermediates))
    if not all(result.add(stage) for stage in stages):
        return None
    rows = RowProgram(result.spatial, tuple(result.locals), tuple(result.stages))
    return rows if isinstance(result.stages[-1], For) and match_row_program(rows.nest) is not None else None


def _row_of(stage: Stmt) -> tuple[tuple[For, ...], SymExpr] | None:
    """The loops over rows of a reduction along them or of a row program, and the length of a row."""
    rows, reduction = match_row_program(stage), reduction_of(stage)
    if rows is not None:
        return _wide(rows.spatial), rows.size
    reduced = () if reduction is None else _wide(perfect_nest(reduction.inner).loops)
    if reduction is None or len(reduced) != 1 or not isinstance(reduction.final, Store):
        return None
    return _wide(reduction.spatial), reduced[0].extent


def _wide(loops: Sequence[For]) -> tuple[For, ...]:
    return tuple(loop for loop in loops if as_int(loop.extent) != 1)


@dataclass(slots=True)
class _RowBuilder:
    spatial: tuple[For, ...]
    size: SymExpr
    intermediates: set[Buffer]
    locals: list[Buffer] = field(default_factory=list)
    stages: list[Stmt] = field(default_factory=list)
    kept: dict[Buffer, tuple[Buffer, tuple[SymExpr, ...], SymVar]] = field(default_factory=dict)  # -> local, place, j

    def add(self, stage: Stmt) -> bool:
        """Take in one stage; False: it has other loops, or reads what is not of its own row."""
        rows, reduction, nest = match_row_program(stage), reduction_of(stage), perfect_nest(stage)
        if rows is not None:
            return self._rows(rows)
        if reduction is not None:
            return self._reduction(reduction)
        store = injective_store(nest)
        if store is None or nest.body is not store:
            return False
        at = self._at(nest.loops)
        if at is not None:
            return self._scalar(store, at)
        j = SymVar("j")
        along = self._at(nest.loops, j)
        return along is not None and self._row(store, along, j)

    def _at(self, loops: Sequence[For], j: SymVar | None = None) -> dict[SymVar, SymExpr] | None:
        """What the variables of a stage's loops are here, where these are the loops over rows and along them."""
        wide, extents = _wide(loops), [loop.extent for loop in self.spatial] + ([] if j is None else [self.size])
        places: list[SymVar] = [loop.var for loop in self.spatial] + ([] if j is None else [j])
        if len(wide) != len(extents) or not all(map(_equal, (loop.extent for loop in wide), extents)):
            return None
        at: dict[SymVar, SymExpr] = {loop.var: sym(0) for loop in loops}
        at.update({loop.var: place for loop, place in zip(wide, places, strict=True)})
        return at

    def _local(self, name: str, dtype: str, shape: tuple[SymExpr, ...] = ()) -> Buffer:
        buffer = Buffer(name, shape, dtype, "global" if shape else "local")
        self.locals.append(buffer)
        return buffer

    def _rewrite(self, stmt: Stmt, at: dict[SymVar, SymExpr], j: SymVar | None) -> Stmt | None:
        """A statement at these places, with the values that this row program keeps."""
        rewriter = _Kept(self.kept, j)
        result = rewriter.stmt(Substitute(at).stmt(stmt))
        return None if rewriter.failed else result

    def _scalar(self, store: Store, at: dict[SymVar, SymExpr]) -> bool:
        if store.buffer not in self.intermediates:
            return False  # a row program stores no scalars outside
        result = self._rewrite(store, at, None)
        if not isinstance(result, Store):
            return False
        local = self._local(store.buffer.name, store.buffer.dtype)
        self.stages.append(Store(local, (), result.value))
        self.kept[store.buffer] = (local, result.indices, SymVar("none"))
        return True

    def _row(self, store: Store, at: dict[SymVar, SymExpr], j: SymVar) -> bool:
        code = self._rewrite(store, at, j)
        if not isinstance(code, Store):
            return False
        if store.buffer in self.intermediates:
            local = self._local(store.buffer.name, store.buffer.dtype, (self.size,))
            self.kept[store.buffer] = (local, code.indices, j)
            code = Store(local, (j,), code.value)
        self.stages.append(For(j, self.size, code))
        return True

    def _reduction(self, reduction: Reduction) -> bool:
        at, final = self._at(reduction.spatial), reduction.final
        loops = perfect_nest(reduction.inner).loops
        wide = _wide(loops)
        if at is None or len(wide) != 1 or not _equal(wide[0].extent, self.size) or not isinstance(final, Store):
            return False
        element = replace(reduction.element)
        at.update({loop.var: sym(0) for loop in loops})
        k = SymVar(wide[0].var.name)
        buffers = Substitute({**at, wide[0].var: k}, {reduction.element: element})
        update = self._rewrite(buffers.stmt(reduction.update), {}, k)
        if update is None:
            return False
        self.locals.append(element)
        self.stages += [buffers.stmt(reduction.init), For(k, self.size, update)]
        last = buffers.stmt(final)
        return isinstance(last, Store) and self._scalar(last, {})

    def _rows(self, rows: RowProgram) -> bool:
        at = self._at(rows.spatial)
        if at is None or not _equal(rows.size, self.size):
            return False
        fresh = {b: replace(b, shape=tuple(self.size for _ in b.shape)) for b in rows.locals}
        result = rows.result
        for stage in rows.stages:
            j = SymVar(stage.var.name) if isinstance(stage, For) else None
            body = stage.body if isinstance(stage, For) else stage
            here = {**at, stage.var: j} if isinstance(stage, For) and j is not None else at
            moved = Substitute(here, fresh).stmt(body)
            made = self._rewrite(moved, {}, j)
            if made is None:
                return False
            if stage is rows.stages[-1] and result.buffer in self.intermediates:
                assert j is not None
                store = next(s for s in stores(made) if s.buffer is result.buffer)
                local = self._local(result.buffer.name, result.buffer.dtype, (self.size,))
                self.kept[result.buffer] = (local, store.indices, j)
                made = _StoreTo(store, Store(local, (j,), store.value)).stmt(made)
            self.stages.append(made if j is None else For(j, self.size, made))
        self.locals += fresh.values()
        return True


class _Kept(ProgramRewriter):
    """Loads of what a row program keeps become loads of its scalars and rows; `failed` where one reads another row."""

    def __init__(self, kept: dict[Buffer, tuple[Buffer, tuple[SymExpr, ...], SymVar]], j: SymVar | None) -> None:
        super().__init__()
        self._kept, self._j, self.failed = kept, j, False

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer not in self._kept:
            return super()._value(value)
        local, place, j = self._kept[value.buffer]
        if local.shape and self._j is None:
            self.failed = True
            return value
        here = Substitute({j: self._j}).indices(place) if self._j is not None else place
        shape = value.buffer.shape
        if not _equal(flat_offset(shape, value.indices), flat_offset(shape, here)):
            self.failed = True
        return Load(local, (self._j,) if local.shape and self._j is not None else ())


class _StoreTo(ProgramRewriter):
    def __init__(self, old: Store, new: Store) -> None:
        super().__init__()
        self._old, self._new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self._new if stmt is self._old else super().stmt(stmt)


def _equal(a: SymExpr, b: SymExpr) -> bool:
    return a is b or _ANALYZER.can_prove_equal(a, b)
