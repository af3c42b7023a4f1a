"""Row programs: several stages that share a loop over rows, such as softmax and layer norm.

for i:                                    spatial loops, none or several
    allocate top[], exps[m], ...           scalars and rows that live for one row
    top[] = -inf                          stages: stores into scalars,
    for j: top[] max= x[i, j]             and loops over the row that combine into scalars,
    for j: exps[j] = exp(x[i, j] - top[]) that fill a local row,
    ...
    for j: out[i, j] = exps[j] * scale[]  and last the one that writes the result

Stages may write further outputs, at the place of the row where they are, and read them again there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.program import Allocate, Buffer, For, Load, Select, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, all_values, loads, stores, walk_values
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.passes.loops.access import accesses
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """The parts of a row program; `stages` are in order, the last one is the loop that writes the result."""

    spatial: tuple[For, ...]
    locals: tuple[Buffer, ...]
    stages: tuple[Stmt, ...]
    asks: bool = False  # for the next row, while one is computed
    cores: int | None = None  # rows overlap (rows_in_flight.py), in blocks that so many cores share; None: they do not

    @property
    def final(self) -> For:
        last = self.stages[-1]
        assert isinstance(last, For)
        return last

    @property
    def size(self) -> SymExpr:
        """The length of a row."""
        return self.final.extent

    @property
    def result(self) -> Store:
        """The store of an element of the result: the last of the last stage."""
        return [s for s in stores(self.final) if s.buffer not in self.locals][-1]

    @property
    def nest(self) -> Stmt:
        body = seq(*self.stages)
        for local in reversed(self.locals):
            body = Allocate(local, body)
        for loop in reversed(self.spatial):
            body = replace(loop, body=body)
        return body

    def loads(self) -> Iterator[Load]:
        """What the stages load, with one and the same variable for the position in the row."""
        place = SymVar("j")
        for stage in self.stages:
            yield from loads(Substitute({stage.var: place}).stmt(stage.body) if isinstance(stage, For) else stage)


def rows_of(stage: Stmt) -> Rows | None:
    """The stage as a row program, or None."""
    spatial, body, found = list[For](), stage, list[Buffer]()
    while isinstance(body, For):
        spatial.append(body)
        body = body.body
    while isinstance(body, Allocate):
        found.append(body.buffer)
        body = body.body
    if not found or not isinstance(body, Seq) or not isinstance(body.stmts[-1], For):
        return None
    rows = Rows(tuple(spatial), tuple(found), body.stmts)
    written = list(stores(body))
    outputs = {s.buffer for s in written if s.buffer not in found}
    last = [s for s in stores(rows.final) if s.buffer in outputs]
    if not last or any(x.buffer is last[-1].buffer for x in accesses(body) if x is not last[-1]):
        return None
    variables = {loop.var for loop in spatial}
    return rows if all(_is_stage(s, rows, variables, outputs - {last[-1].buffer}) for s in body.stmts) else None


def _is_stage(stage: Stmt, rows: Rows, variables: set[SymVar], further: set[Buffer]) -> bool:
    """`further`: outputs beside the result."""
    if isinstance(stage, Store):
        return (
            stage.buffer in rows.locals and not stage.buffer.shape and not any(_is_row(x, rows) for x in loads(stage))
        )
    if not isinstance(stage, For) or stage.kind != "serial" or stage.extent is not rows.size:
        return False
    if variables & set(stage.extent.free_vars()):
        return False
    body = stage.body.stmts if isinstance(stage.body, Seq) else (stage.body,)
    outer = [loop.var for loop in rows.spatial]
    scalars = {s.buffer for s in stores(stage) if not s.indices}
    return (
        all(isinstance(s, Store) and (s.combine is None) is bool(s.indices) for s in body)
        and all(x.indices == (stage.var,) for x in accesses(stage) if _is_row(x, rows))
        and all(x.indices == (*outer, stage.var) for x in accesses(stage) if x.buffer in further)
        and all(x.buffer not in scalars for x in loads(stage))
    )


def _is_row(access: Load | Store, rows: Rows) -> bool:
    return bool(access.buffer.shape) and access.buffer in rows.locals


def keep_row(rows: Rows, buffer: Buffer) -> Rows | None:
    """Load each element of a buffer once: the first stage that reads it keeps the row in a local one for the others.

    None when the stages read different elements, or read them under a condition.
    """
    read = [load for load in rows.loads() if load.buffer is buffer]
    is_certain = all(load.buffer is not buffer for stage in rows.stages for load in _conditional_loads(stage))
    if len({load.indices for load in read}) != 1 or not is_certain:
        return None
    first = next(k for k, stage in enumerate(rows.stages) if any(x.buffer is buffer for x in loads(stage)))
    stage, kept = rows.stages[first], Buffer(f"{buffer.name}_row", (rows.size,), buffer.dtype)
    assert isinstance(stage, For)
    var = SymVar(stage.var.name)
    load = next(x for x in loads(stage) if x.buffer is buffer)
    fill = For(var, rows.size, Store(kept, (var,), Substitute({stage.var: var}).value(load)))
    stages = [_FromRow(buffer, kept, s.var).stmt(s) if isinstance(s, For) else s for s in rows.stages]
    return replace(rows, locals=(*rows.locals, kept), stages=(*stages[:first], fill, *stages[first:]))


def with_output(rows: Rows, loops: Sequence[For], store: Store) -> Rows | None:
    """Compute a further output row by row, in a stage before the first one that reads it: that of a nest of these loops
    round a store at their variables. None when the stages read other elements than those of their own row."""
    analyzer = Analyzer()
    own, extents = (loop.extent for loop in (*rows.spatial, rows.final)), [loop.extent for loop in loops]
    if len(extents) != len(rows.spatial) + 1 or not all(map(analyzer.can_prove_equal, own, extents)):
        return None
    place = SymVar(rows.final.var.name)
    at = (*(loop.var for loop in rows.spatial), place)
    reading = [k for k, s in enumerate(rows.stages) if any(x.buffer is store.buffer for x in loads(s))]
    for k in reading:
        stage = rows.stages[k]
        here = (*at[:-1], stage.var) if isinstance(stage, For) else None
        if any(x.indices != here for x in loads(stage) if x.buffer is store.buffer):
            return None
    if not reading:
        return None
    body = Substitute(dict(zip(store.indices, at, strict=True)), fresh=True).stmt(store)  # type: ignore[arg-type]
    made = For(place, rows.size, body)
    return replace(rows, stages=(*rows.stages[: reading[0]], made, *rows.stages[reading[0] :]))


def _conditional_loads(stmt: Stmt) -> Iterator[Load]:
    """The loads in branches of a Select."""
    for value in all_values(stmt):
        if isinstance(value, Select):
            for branch in (value.then, value.other):
                yield from (v for v in walk_values(branch) if isinstance(v, Load))


class _FromRow(ProgramRewriter):
    """Loads of a buffer become loads of the local row that keeps its elements."""

    def __init__(self, buffer: Buffer, kept: Buffer, var: SymVar) -> None:
        super().__init__()
        self._buffer, self._kept, self._var = buffer, kept, var

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._buffer:
            return Load(self._kept, (self._var,))
        return super()._value(value)


def with_final(rows: Rows, store: Stmt) -> Stmt:
    """The nest with another statement in place of the store of the result, at the variables of the spatial loops and of
    the last loop."""
    stages = (*rows.stages[:-1], replace(rows.final, body=_Replacement(rows.result, store).stmt(rows.final.body)))
    return replace(rows, stages=stages).nest


class _Replacement(ProgramRewriter):
    def __init__(self, old: Store, new: Stmt) -> None:
        super().__init__()
        self._old, self._new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self._new if stmt is self._old else super().stmt(stmt)
