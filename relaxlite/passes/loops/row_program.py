"""Row programs: several stages that share the loops over rows, such as softmax and layer norm.

for i:                                    spatial loops, zero or more
    allocate top[], exps[m], ...           local scalars and local rows of one iteration
    top[] = -inf                          stages: stores into scalars,
    for j: top[] max= x[i, j]             and loops over the row that combine into scalars,
    for j: exps[j] = exp(x[i, j] - top[]) that fill a local row,
    ...
    for j: out[i, j] = exps[j] * scale[]  and last the loop that writes the result

Stages may write further outputs at the current element of the row, and read that element again.
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
class RowProgram:
    """A row program: `stages` in order, of which the last is the loop that writes the result."""

    spatial: tuple[For, ...]
    locals: tuple[Buffer, ...]
    stages: tuple[Stmt, ...]
    prefetches_next: bool = False  # prefetch the next row while one is computed
    cores: int | None = None  # that share the blocks of pipelined rows (pipelined_rows.py); None: no pipelining

    @property
    def final(self) -> For:
        """The last stage, which writes the result."""
        last = self.stages[-1]
        assert isinstance(last, For)
        return last

    @property
    def size(self) -> SymExpr:
        """The length of a row, in elements."""
        return self.final.extent

    @property
    def result(self) -> Store:
        """The store of an element of the result: the last store of the last stage into an output."""
        return [s for s in stores(self.final) if s.buffer not in self.locals][-1]

    @property
    def nest(self) -> Stmt:
        """The row program as one statement."""
        body = seq(*self.stages)
        for local in reversed(self.locals):
            body = Allocate(local, body)
        for loop in reversed(self.spatial):
            body = replace(loop, body=body)
        return body

    def loads(self) -> Iterator[Load]:
        """The loads of all stages, with one common variable for the position in the row."""
        place = SymVar("j")
        for stage in self.stages:
            yield from loads(Substitute({stage.var: place}).stmt(stage.body) if isinstance(stage, For) else stage)


def match_row_program(stage: Stmt) -> RowProgram | None:
    """Match a stage as a row program; else None."""
    spatial, body, local_buffers = list[For](), stage, list[Buffer]()
    while isinstance(body, For):
        spatial.append(body)
        body = body.body
    while isinstance(body, Allocate):
        local_buffers.append(body.buffer)
        body = body.body
    if not local_buffers or not isinstance(body, Seq) or not isinstance(body.stmts[-1], For):
        return None
    rows = RowProgram(tuple(spatial), tuple(local_buffers), body.stmts)
    written = list(stores(body))
    outputs = {s.buffer for s in written if s.buffer not in local_buffers}
    last = [s for s in stores(rows.final) if s.buffer in outputs]
    if not last or any(x.buffer is last[-1].buffer for x in accesses(body) if x is not last[-1]):
        return None
    variables = {loop.var for loop in spatial}
    return rows if all(_is_stage(s, rows, variables, outputs - {last[-1].buffer}) for s in body.stmts) else None


def _is_stage(stage: Stmt, rows: RowProgram, variables: set[SymVar], further: set[Buffer]) -> bool:
    """Whether a statement is a valid stage of a row program. `further`: outputs other than the result."""
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


def _is_row(access: Load | Store, rows: RowProgram) -> bool:
    return bool(access.buffer.shape) and access.buffer in rows.locals


def stage_row(rows: RowProgram, buffer: Buffer) -> RowProgram | None:
    """Load each element of a buffer once: copy the row to a local buffer before the first stage that reads it.

    None if the stages read different elements or load under a condition.
    """
    read = [load for load in rows.loads() if load.buffer is buffer]
    is_certain = all(load.buffer is not buffer for stage in rows.stages for load in _conditional_loads(stage))
    if len({load.indices for load in read}) != 1 or not is_certain:
        return None
    first = next(k for k, stage in enumerate(rows.stages) if any(x.buffer is buffer for x in loads(stage)))
    stage, local = rows.stages[first], Buffer(f"{buffer.name}_row", (rows.size,), buffer.dtype)
    assert isinstance(stage, For)
    var = SymVar(stage.var.name)
    load = next(x for x in loads(stage) if x.buffer is buffer)
    fill = For(var, rows.size, Store(local, (var,), Substitute({stage.var: var}).value(load)))
    stages = [_FromRow(buffer, local, s.var).stmt(s) if isinstance(s, For) else s for s in rows.stages]
    return replace(rows, locals=(*rows.locals, local), stages=(*stages[:first], fill, *stages[first:]))


def fuse_producer(rows: RowProgram, loops: Sequence[For], store: Store) -> RowProgram | None:
    """Fuse the producer of an operand, a nest of `loops` around `store` at their variables, into a row program.

    The producer becomes a stage before its first reader, and its buffer a further output. None if the loops differ from
    those of the row program or a stage reads elements of another row or position.
    """
    analyzer = Analyzer()
    own, extents = (loop.extent for loop in (*rows.spatial, rows.final)), [loop.extent for loop in loops]
    if len(extents) != len(rows.spatial) + 1 or not all(map(analyzer.can_prove_equal, own, extents)):
        return None
    element = SymVar(rows.final.var.name)
    indices = (*(loop.var for loop in rows.spatial), element)
    reading = [k for k, s in enumerate(rows.stages) if any(x.buffer is store.buffer for x in loads(s))]
    for k in reading:
        stage = rows.stages[k]
        own_indices = (*indices[:-1], stage.var) if isinstance(stage, For) else None
        if any(x.indices != own_indices for x in loads(stage) if x.buffer is store.buffer):
            return None
    if not reading:
        return None
    body = Substitute(dict(zip(store.indices, indices, strict=True)), fresh=True).stmt(store)  # type: ignore[arg-type]
    producer = For(element, rows.size, body)
    return replace(rows, stages=(*rows.stages[: reading[0]], producer, *rows.stages[reading[0] :]))


def _conditional_loads(stmt: Stmt) -> Iterator[Load]:
    """The loads in the branches of `Select` values."""
    for value in all_values(stmt):
        if isinstance(value, Select):
            for branch in (value.then, value.other):
                yield from (v for v in walk_values(branch) if isinstance(v, Load))


class _FromRow(ProgramRewriter):
    """Replaces loads of a buffer by loads of its local row."""

    def __init__(self, buffer: Buffer, local: Buffer, var: SymVar) -> None:
        super().__init__()
        self._buffer, self._local, self._var = buffer, local, var

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._buffer:
            return Load(self._local, (self._var,))
        return super()._value(value)


def replace_result_store(rows: RowProgram, store: Stmt) -> Stmt:
    """The nest of a row program with the store of the result replaced by another statement.

    The statement uses the variables of the spatial loops and of the last loop.
    """
    stages = (*rows.stages[:-1], replace(rows.final, body=_Replacement(rows.result, store).stmt(rows.final.body)))
    return replace(rows, stages=stages).nest


class _Replacement(ProgramRewriter):
    """Replaces one store."""

    def __init__(self, old: Store, new: Stmt) -> None:
        super().__init__()
        self._old, self._new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self._new if stmt is self._old else super().stmt(stmt)
