"""Merge stages over the same rows into one row program (loops/row_program.py).

The stages are reductions of rows, scalars per row that are computed from reductions, and elementwise stages along the
row.

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


def merge_into_row_program(stages: Sequence[Stmt], intermediates: Sequence[Buffer]) -> RowProgram | None:
    """Merge stages into one row program; None if they do not share their rows or the last stage writes no row.

    Intermediates that the stages write become local scalars and rows of the row program.
    """
    anchor = next((s for s in stages if _row_of(s) is not None), None)
    if anchor is None:
        return None
    spatial, size = _row_of(anchor) or ((), sym(1))
    builder = _RowBuilder(tuple(replace(loop, var=SymVar(loop.var.name)) for loop in spatial), size, set(intermediates))
    if not all(builder.add(stage) for stage in stages):
        return None
    rows = RowProgram(builder.spatial, tuple(builder.locals), tuple(builder.stages))
    return rows if isinstance(builder.stages[-1], For) and match_row_program(rows.nest) is not None else None


def _row_of(stage: Stmt) -> tuple[tuple[For, ...], SymExpr] | None:
    """The loops over rows, and the length of a row, of a row-wise reduction or a row program; None for other stages."""
    rows, reduction = match_row_program(stage), reduction_of(stage)
    if rows is not None:
        return _nonunit_loops(rows.spatial), rows.size
    reduction_loops = () if reduction is None else _nonunit_loops(perfect_nest(reduction.inner).loops)
    if reduction is None or len(reduction_loops) != 1 or not isinstance(reduction.final, Store):
        return None
    return _nonunit_loops(reduction.spatial), reduction_loops[0].extent


def _nonunit_loops(loops: Sequence[For]) -> tuple[For, ...]:
    return tuple(loop for loop in loops if as_int(loop.extent) != 1)


@dataclass(slots=True)
class _RowBuilder:
    """Builder of a row program from stages.

    `locals_of` maps an intermediate to its local buffer, the indices of its store and the variable j.
    """

    spatial: tuple[For, ...]
    size: SymExpr
    intermediates: set[Buffer]
    locals: list[Buffer] = field(default_factory=list)
    stages: list[Stmt] = field(default_factory=list)
    locals_of: dict[Buffer, tuple[Buffer, tuple[SymExpr, ...], SymVar]] = field(default_factory=dict)

    def add(self, stage: Stmt) -> bool:
        """Add one stage; False if the stage has other loops or reads elements of other rows."""
        rows, reduction, nest = match_row_program(stage), reduction_of(stage), perfect_nest(stage)
        if rows is not None:
            return self._rows(rows)
        if reduction is not None:
            return self._reduction(reduction)
        store = injective_store(nest)
        if store is None or nest.body is not store:
            return False
        var_map = self._map_vars(nest.loops)
        if var_map is not None:
            return self._scalar(store, var_map)
        j = SymVar("j")
        row_map = self._map_vars(nest.loops, j)
        return row_map is not None and self._row(store, row_map, j)

    def _map_vars(self, loops: Sequence[For], j: SymVar | None = None) -> dict[SymVar, SymExpr] | None:
        """Map the loop variables of a stage to those of the row program.

        None unless the loops run over rows and, with `j`, along them.
        """
        row_loops, extents = (
            _nonunit_loops(loops),
            [loop.extent for loop in self.spatial] + ([] if j is None else [self.size]),
        )
        variables: list[SymVar] = [loop.var for loop in self.spatial] + ([] if j is None else [j])
        if len(row_loops) != len(extents) or not all(map(_equal, (loop.extent for loop in row_loops), extents)):
            return None
        var_map: dict[SymVar, SymExpr] = {loop.var: sym(0) for loop in loops}
        var_map.update({loop.var: variable for loop, variable in zip(row_loops, variables, strict=True)})
        return var_map

    def _local(self, name: str, dtype: str, shape: tuple[SymExpr, ...] = ()) -> Buffer:
        buffer = Buffer(name, shape, dtype, "global" if shape else "local")
        self.locals.append(buffer)
        return buffer

    def _rewrite(self, stmt: Stmt, var_map: dict[SymVar, SymExpr], j: SymVar | None) -> Stmt | None:
        """A statement over the variables and locals of the row program; None where it reads another row."""
        rewriter = _ReplaceLocalLoads(self.locals_of, j)
        result = rewriter.stmt(Substitute(var_map).stmt(stmt))
        return None if rewriter.failed else result

    def _scalar(self, store: Store, var_map: dict[SymVar, SymExpr]) -> bool:
        if store.buffer not in self.intermediates:
            return False  # a row program stores no scalars to global buffers
        result = self._rewrite(store, var_map, None)
        if not isinstance(result, Store):
            return False
        local = self._local(store.buffer.name, store.buffer.dtype)
        self.stages.append(Store(local, (), result.value))
        self.locals_of[store.buffer] = (local, result.indices, SymVar("none"))
        return True

    def _row(self, store: Store, var_map: dict[SymVar, SymExpr], j: SymVar) -> bool:
        code = self._rewrite(store, var_map, j)
        if not isinstance(code, Store):
            return False
        if store.buffer in self.intermediates:
            local = self._local(store.buffer.name, store.buffer.dtype, (self.size,))
            self.locals_of[store.buffer] = (local, code.indices, j)
            code = Store(local, (j,), code.value)
        self.stages.append(For(j, self.size, code))
        return True

    def _reduction(self, reduction: Reduction) -> bool:
        var_map, final = self._map_vars(reduction.spatial), reduction.final
        loops = perfect_nest(reduction.inner).loops
        row_loops = _nonunit_loops(loops)
        if (
            var_map is None
            or len(row_loops) != 1
            or not _equal(row_loops[0].extent, self.size)
            or not isinstance(final, Store)
        ):
            return False
        element = replace(reduction.element)
        var_map.update({loop.var: sym(0) for loop in loops})
        k = SymVar(row_loops[0].var.name)
        buffers = Substitute({**var_map, row_loops[0].var: k}, {reduction.element: element})
        update = self._rewrite(buffers.stmt(reduction.update), {}, k)
        if update is None:
            return False
        self.locals.append(element)
        self.stages += [buffers.stmt(reduction.init), For(k, self.size, update)]
        last = buffers.stmt(final)
        return isinstance(last, Store) and self._scalar(last, {})

    def _rows(self, rows: RowProgram) -> bool:
        var_map = self._map_vars(rows.spatial)
        if var_map is None or not _equal(rows.size, self.size):
            return False
        fresh = {b: replace(b, shape=tuple(self.size for _ in b.shape)) for b in rows.locals}
        result_store = rows.result
        for stage in rows.stages:
            j = SymVar(stage.var.name) if isinstance(stage, For) else None
            body = stage.body if isinstance(stage, For) else stage
            stage_map = {**var_map, stage.var: j} if isinstance(stage, For) and j is not None else var_map
            moved = Substitute(stage_map, fresh).stmt(body)
            code = self._rewrite(moved, {}, j)
            if code is None:
                return False
            if stage is rows.stages[-1] and result_store.buffer in self.intermediates:
                assert j is not None
                store = next(s for s in stores(code) if s.buffer is result_store.buffer)
                local = self._local(result_store.buffer.name, result_store.buffer.dtype, (self.size,))
                self.locals_of[result_store.buffer] = (local, store.indices, j)
                code = _StoreTo(store, Store(local, (j,), store.value)).stmt(code)
            self.stages.append(code if j is None else For(j, self.size, code))
        self.locals += fresh.values()
        return True


class _ReplaceLocalLoads(ProgramRewriter):
    """Replace loads of intermediates by loads of local scalars and rows.

    `failed` is set where a load reads another row.
    """

    def __init__(self, locals_of: dict[Buffer, tuple[Buffer, tuple[SymExpr, ...], SymVar]], j: SymVar | None) -> None:
        super().__init__()
        self._locals_of, self._j, self.failed = locals_of, j, False

    def _value(self, value: Value) -> Value:
        if not isinstance(value, Load) or value.buffer not in self._locals_of:
            return super()._value(value)
        local, indices, j = self._locals_of[value.buffer]
        if local.shape and self._j is None:
            self.failed = True
            return value
        indices_of_row = Substitute({j: self._j}).indices(indices) if self._j is not None else indices
        shape = value.buffer.shape
        if not _equal(flat_offset(shape, value.indices), flat_offset(shape, indices_of_row)):
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
