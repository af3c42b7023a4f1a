"""Schedules of row programs (loops/row_program.py): softmax, layer norm and the ops fused with them.

All rows run in parallel. Within a row:

    stages that do not need each other's totals are fused into one loop      exps[j] = exp(..) and sum += exps[j]
    a short local row lives in registers or on the stack, a long one in      out[i, j] = exp(..)
      the output's row if dtypes agree; otherwise each stage recomputes      out[i, j] = out[i, j] * scale
      its elements
    a loop steps by several vectors, which gives a total several             for jo in m // 64: 4 vectors
      accumulators, then by single vectors, then takes a masked vector       for js in m % 64 // 16: 1 vector
                                                                             m % 16 lanes
A row of a few vectors is loaded once and stays in registers across stages. If the row length is symbolic, versions for
one to four masked vectors and the general form are selected at run time.

The second loop over a row is compute bound. On targets that gain by prefetching (`RowProgram.prefetches_next`), it
prefetches the operands of the first loop for the next row, and the row of the result if a later loop writes that. On
other targets the stages of several rows are pipelined (`RowProgram.cores`; pipelined_rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Allocate, Buffer, For, IfThenElse, Load, Prefetch, Seq, Stmt, Store, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, loads, stores
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, smax, smin, substitute, sym
from relaxlite.passes.loops.access import accesses, coefficient, offset, stride
from relaxlite.passes.loops.parallel import collapse_parallel, has_disjoint_writes
from relaxlite.passes.loops.row_program import RowProgram
from relaxlite.passes.loops.transforms import (
    init_accumulators,
    less,
    reduce_accumulators,
    select_version,
    when_positive,
    with_nontemporal_stores,
)
from relaxlite.passes.products.panel_prefetch import CACHE_LINE_BYTES
from relaxlite.passes.schedule.cpu.pipelined_rows import pipeline_rows
from relaxlite.records import dataclass

PREFETCH_DISTANCE_ROWS = 2  # prefetch distance of pipelined rows, in rows (docs/measurements/passes.md)
MAX_ACCUMULATORS = 4  # vectors per step of a loop over a row: accumulators of a total
MAX_REGISTERS = 8  # vectors of a row of constant length that stay in registers across stages
MAX_STACK_BYTES = 16 * 1024  # of a local row: half of the L1 cache


def schedule_rows(rows: RowProgram, lanes: int, cache_bytes: int) -> Stmt | None:
    """Schedule a row program for vectors of `lanes` elements; None: rows depend on each other.

    A result larger than `cache_bytes` is written with nontemporal stores.
    """
    if not all(map(has_disjoint_writes, rows.spatial)):
        return None
    known, output = as_int(rows.size), rows.result.buffer
    is_large = less(cache_bytes // dtypes.itemsize(output.dtype), product(output.shape))
    if known is not None:
        in_output, pieces = _in_output(rows), _pieces_of(known, lanes)
        in_registers, is_aligned = known // lanes <= MAX_REGISTERS, known % lanes == 0
        usual = stmt = _rows_up_to(rows, known, pieces, lanes)
        if is_aligned and _fits_stack(rows, known):  # else stores are unaligned, or the output holds local rows
            usual = stmt if in_registers or _local_rows(in_output) else _scheduled(in_output, pieces, lanes)
            usual = select_version(is_large, with_nontemporal_stores(stmt, output), usual)
        return (
            usual
            if in_registers
            else _with_pipelined_rows(rows, known, pieces, lanes, is_large if is_aligned else None, usual)
        )
    stmt = _long(rows, lanes)
    stmt = select_version(is_large, _long(rows, lanes, streamed=True), stmt)
    stmt = _with_pipelined_rows(rows, _max_size_on_stack(rows), _pieces(rows.size, lanes), lanes, is_large, stmt)
    for vectors in range(MAX_ACCUMULATORS, 0, -1):
        max_size = vectors * lanes
        short = _rows_up_to(rows, max_size, [_Piece(sym(0), sym(1), vectors, masked=True)], lanes)
        stmt = IfThenElse(less(rows.size, max_size + 1), short, stmt)
    return stmt


def _with_pipelined_rows(
    rows: RowProgram, max_size: int, pieces: Sequence[_Piece], lanes: int, is_large: Value | None, usual: Stmt
) -> Stmt:
    """Add a version with pipelined rows for sufficiently many rows of at most `max_size` elements; else `usual` only.

    `is_large`: condition for nontemporal stores; None: never.
    """
    if rows.cores is None or not _fits_stack(rows, max_size):
        return usual
    short = _on_stack(rows, max_size, lanes)
    stages = _merged(short.stages)
    first = next(stage for stage in stages if isinstance(stage, For))

    def over_row(loop: For, later: Sequence[Load]) -> Stmt:
        return _over_row(loop, pieces, lanes, later, overlaps=True)

    prefetched = _loads_of_next_row(short, first, first.var, PREFETCH_DISTANCE_ROWS)
    pipeline = pipeline_rows(short, stages, over_row, prefetched, rows.cores)
    if pipeline is None:
        return usual
    fewest, stmt = pipeline
    if is_large is not None:
        stmt = select_version(is_large, with_nontemporal_stores(stmt, rows.result.buffer), stmt)
    if as_int(rows.size) is None:
        stmt = IfThenElse(less(rows.size, max_size + 1), stmt, usual)
    return select_version(less(product([loop.extent for loop in rows.spatial]), fewest), usual, stmt)


def _rows_up_to(rows: RowProgram, max_size: int, pieces: Sequence[_Piece], lanes: int) -> Stmt:
    """Schedule rows of at most `max_size` elements: local rows on the stack if they fit, else recomputed."""
    if not _fits_stack(rows, max_size):
        return _scheduled(_in_output(rows, recompute=True), pieces, lanes)
    return _scheduled(_on_stack(rows, max_size, lanes), pieces, lanes)


def _on_stack(rows: RowProgram, max_size: int, lanes: int) -> RowProgram:
    width = -(-max_size // lanes) * lanes
    short = {row: replace(row, shape=(sym(width),), scope="local") for row in _local_rows(rows)}
    stages = tuple(Substitute(buffers=short).stmt(s) for s in rows.stages)
    return replace(rows, locals=tuple(short.get(b, b) for b in rows.locals), stages=stages)


def _long(rows: RowProgram, lanes: int, *, streamed: bool = False) -> Stmt:
    """Schedule rows of any length. Local rows live in the output's row (docs/measurements/passes.md), except with
    nontemporal stores (`streamed`), as only the last stage may write the output then."""
    pieces, in_output, local = _pieces(rows.size, lanes), _in_output(rows), _local_rows(rows)
    if not local:
        stmt = _scheduled(rows, pieces, lanes)
        return with_nontemporal_stores(stmt, rows.result.buffer) if streamed else stmt
    if not streamed and not _local_rows(in_output):
        return _scheduled(in_output, pieces, lanes)
    max_size = _max_size_on_stack(rows)
    on_stack = _rows_up_to(rows, max_size, pieces, lanes)
    return IfThenElse(
        less(rows.size, max_size + 1),
        with_nontemporal_stores(on_stack, rows.result.buffer) if streamed else on_stack,
        _scheduled(_in_output(rows, recompute=True), pieces, lanes),
    )


def _fits_stack(rows: RowProgram, size: int) -> bool:
    return all(size * dtypes.itemsize(row.dtype) <= MAX_STACK_BYTES for row in _local_rows(rows))


def _max_size_on_stack(rows: RowProgram) -> int:
    """The maximum row length in elements for local rows on the stack; without local rows, for float32."""
    return MAX_STACK_BYTES // max((dtypes.itemsize(row.dtype) for row in _local_rows(rows)), default=4)


def _local_rows(rows: RowProgram) -> list[Buffer]:
    return [local for local in rows.locals if local.shape]


def can_alias_result(rows: RowProgram, x: Buffer) -> bool:
    """Whether `x` and the result may alias in every schedule of a row program.

    No stage may read an element of `x` after a write to the same element of the result, local rows in the result
    included.
    """
    forms = (rows, _in_output(rows), _in_output(rows, recompute=True))
    return all(_reads_before_writing(_merged(form.stages), x, rows.result.buffer) for form in forms)


def _reads_before_writing(stages: Sequence[Stmt], x: Buffer, out: Buffer) -> bool:
    is_written = False
    for stage in stages:
        for store in _stores_of(stage) if isinstance(stage, For) else [stage]:
            if is_written and any(load.buffer is x for load in loads(store)):
                return False
            is_written = is_written or any(s.buffer is out for s in stores(store))
    return True


# Placement of local rows


def _in_output(rows: RowProgram, *, recompute: bool = False) -> RowProgram:
    """Place local rows with disjoint live ranges in the row of the output; with `recompute`, stages that read the
    remaining local rows recompute their elements."""
    free_from = 0
    for row in _local_rows(rows):
        first = next(k for k, s in enumerate(rows.stages) if any(store.buffer is row for store in stores(s)))
        last = max((k for k, s in enumerate(rows.stages) if any(x.buffer is row for x in loads(s))), default=first)
        if row.dtype == rows.result.buffer.dtype and first >= free_from:
            free_from = last
            rows = _without(rows, row, rows.stages, _InOutput(row, rows))
        elif recompute:
            rows = _without(rows, row, _drop(rows.stages, row), _Recompute(row, rows))
    return rows


def _without(rows: RowProgram, row: Buffer, stages: Sequence[Stmt], rewriter: _EachStage) -> RowProgram:
    new = tuple(rewriter.stage(s) for s in stages)
    return replace(rows, locals=tuple(b for b in rows.locals if b is not row), stages=new)


def _drop(stages: Sequence[Stmt], row: Buffer) -> list[Stmt]:
    """Remove the stores into a local row from the stages."""
    remaining: list[Stmt] = []
    for stage in stages:
        if isinstance(stage, For):
            body = [s for s in _stores_of(stage) if s.buffer is not row]
            if not body:
                continue
            stage = replace(stage, body=seq(*body))
        remaining.append(stage)
    return remaining


class _EachStage(ProgramRewriter):
    """Rewrites the accesses of stages to one local row; `var` is the loop variable of the current stage."""

    var: SymVar

    def __init__(self, row: Buffer, rows: RowProgram) -> None:
        super().__init__()
        self._row, self._final, self._result = row, rows.final, rows.result
        self._rows = rows

    def stage(self, stage: Stmt) -> Stmt:
        if not isinstance(stage, For):
            return stage
        self.var, self._done = stage.var, {}
        return self.stmt(stage)


class _InOutput(_EachStage):
    def _where(self) -> tuple[SymExpr, ...]:
        return Substitute({self._final.var: self.var}).indices(self._result.indices)

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._row:
            return Load(self._result.buffer, self._where())
        return super()._value(value)

    def stmt(self, stmt: Stmt) -> Stmt:
        new = super().stmt(stmt)
        if isinstance(new, Store) and new.buffer is self._row:
            return Store(self._result.buffer, self._where(), new.value)
        return new


class _Recompute(_EachStage):
    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer is self._row:
            loop, store = next(
                (s, store)
                for s in self._rows.stages
                if isinstance(s, For)
                for store in _stores_of(s)
                if store.buffer is self._row
            )
            return Substitute({loop.var: self.var}).value(store.value)
        return super()._value(value)


# Fusion of stages


def _merged(stages: Sequence[Stmt]) -> list[Stmt]:
    """Fuse stages: move scalar stores as early as possible, then fuse each loop with the previous one unless it depends
    on a total of that."""
    done: list[Stmt] = []
    for stage in stages:
        place = len(done)
        while place and isinstance(done[place - 1], For) and not _depends(stage, done[place - 1]):
            place -= 1
        if not isinstance(stage, For):
            done.insert(place, stage)
            continue
        before = next((k for k in range(len(done) - 1, -1, -1) if isinstance(done[k], For)), None)
        if before is None or any(_depends(stage, other) for other in done[before:]):
            done.append(stage)
            continue
        loop = done[before]
        assert isinstance(loop, For)
        joined = Substitute({stage.var: loop.var}).stmt(stage.body)
        done[before] = replace(loop, body=seq(loop.body, joined))
    return done


def _depends(later: Stmt, earlier: Stmt) -> bool:
    """Whether two stages cannot be reordered or fused: one uses a scalar that the other writes. Local rows cause no
    dependence, as element j is written and read in iteration j."""
    for a, b in ((later, earlier), (earlier, later)):
        written = {s.buffer for s in stores(a) if not s.buffer.shape}
        if any(x.buffer in written for x in accesses(b)):
            return True
    return False


# Loops over a row


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a row: `count` steps of `vectors` vectors from element `start` on; `masked`: lanes beyond the row are
    off."""

    start: SymExpr
    count: SymExpr
    vectors: int
    masked: bool = False


def _pieces(size: SymExpr, lanes: int) -> list[_Piece]:
    width = MAX_ACCUMULATORS * lanes
    return [
        _Piece(sym(0), size // width, MAX_ACCUMULATORS),
        _Piece(size // width * width, size % width // lanes, 1),
        _Piece(size // lanes * lanes, size % lanes, 1, masked=True),
    ]


def _pieces_of(size: int, lanes: int) -> list[_Piece]:
    vectors = size // lanes
    rest = _Piece(sym(vectors * lanes), sym(size % lanes), 1, masked=True)
    if vectors <= MAX_REGISTERS:
        pieces = [_Piece(sym(0), sym(1), vectors), rest]
    else:
        main = vectors // MAX_ACCUMULATORS * MAX_ACCUMULATORS
        pieces = [
            _Piece(sym(0), sym(main // MAX_ACCUMULATORS), MAX_ACCUMULATORS),
            _Piece(sym(main * lanes), sym(1), vectors - main),
            rest,
        ]
    return [p for p in pieces if p.vectors and as_int(p.count)]


def _scheduled(rows: RowProgram, pieces: Sequence[_Piece], lanes: int) -> Stmt:
    merged = _merged(rows.stages)
    loops = [stage for stage in merged if isinstance(stage, For)]
    later = _loads_of_next_row(rows, loops[0], loops[1].var) if rows.prefetches_next and len(loops) > 1 else []
    prefetching = loops[1] if later else None
    if later and all(s.buffer is not rows.result.buffer for loop in loops[:2] for s in stores(loop)):
        place = Substitute({rows.final.var: loops[1].var}).indices(rows.result.indices)
        later.append(Load(rows.result.buffer, place))
    body = seq(
        *(_over_row(s, pieces, lanes, later if s is prefetching else ()) if isinstance(s, For) else s for s in merged)
    )
    for local in reversed(rows.locals):
        body = Allocate(local, body)
    return collapse_parallel(rows.spatial, body)


def _loads_of_next_row(rows: RowProgram, first: For, place: SymVar, count: int = 1) -> list[Load]:
    """The loads of the first loop over a row, moved to position `place` of the row `count` rows ahead; of the same row
    if two rows exceed the L1 cache."""
    itemsize = max((dtypes.itemsize(x.dtype) for x in loads(first)), default=1)
    is_short = smin(MAX_STACK_BYTES // itemsize // smax(rows.size, 1), 1)
    if not rows.spatial or as_int(is_short) == 0:
        return []
    row = rows.spatial[-1].var
    of_next = Substitute({row: row + is_short * count, first.var: place})
    global_loads = [x for x in loads(first) if x.buffer.scope == "global" and x.buffer is not rows.result.buffer]
    moving = [
        x for x in global_loads if stride(x, first.var) == 1 and coefficient(offset(x), row) not in (sym(0), None)
    ]
    distinct = {(x.buffer, x.indices): x for x in moving}.values()
    return [replace(x, indices=of_next.indices(x.indices)) for x in distinct]


def _over_row(
    loop: For, pieces: Sequence[_Piece], lanes: int, later: Sequence[Load] = (), *, overlaps: bool = False
) -> Stmt:
    """Vectorize a loop over a row; totals accumulate in up to `MAX_ACCUMULATORS` vectors.

    Steps prefetch the loads in `later`, one prefetch per cache line.

    In a loop over several pipelined rows (`overlaps`), stores are delayed until the later loads of the step are done:
    processors compare pending stores and loads by the low 12 address bits, and rows are often a multiple of 4096 bytes
    apart (docs/measurements/cpus.md, rows_in_flight). Prefetches then go to the L2 cache, as L1 has no room.
    """
    totals = [s for s in _stores_of(loop) if s.combine is not None]
    parts = min(MAX_ACCUMULATORS, max((p.vectors for p in pieces), default=0))
    if all(p.masked and p.vectors == 1 for p in pieces):
        parts = 0  # one vector: combine its lanes directly
    partials = {
        s: Buffer(f"{s.buffer.name}_partial", (sym(parts * lanes),), s.buffer.dtype, "local") for s in totals if parts
    }
    delayed = {
        s: Buffer(f"{s.buffer.name}_next", (sym(max(p.vectors for p in pieces) * lanes),), s.buffer.dtype, "local")
        for s in (_before_loads(_stores_of(loop)) if overlaps else ())
    }
    prefetches = [Prefetch(x.buffer, x.indices, 2 if overlaps else 1) for x in later]
    stmts: list[Stmt] = []
    for store, partial in partials.items():
        assert store.combine is not None
        stmts.append(init_accumulators(partial, identity(store.combine, store.buffer.dtype), lanes))
    for piece in pieces:
        stmts += when_positive(piece.count, _step(loop, piece, partials, delayed, lanes, prefetches))
    stmts += [reduce_accumulators(store, partial, parts, lanes) for store, partial in partials.items()]
    body = seq(*stmts)
    for local in (*partials.values(), *delayed.values()):
        body = Allocate(local, body)
    return body


def _before_loads(body: Sequence[Store]) -> list[Store]:
    """The stores into global memory that are followed by loads of other global buffers."""
    delayed = []
    for k, store in enumerate(body):
        loaded = {x.buffer for later in body[k + 1 :] for x in loads(later) if x.buffer.scope == "global"}
        if store.buffer.scope == "global" and store.indices and loaded and store.buffer not in loaded:
            delayed.append(store)
    return delayed


def _step(
    loop: For,
    piece: _Piece,
    partials: Mapping[Store, Buffer],
    delayed: Mapping[Store, Buffer],
    lanes: int,
    prefetches: Sequence[Prefetch],
) -> Stmt:
    name = loop.var.name
    lane = SymVar("l", upper=lanes - 1)
    outer, part = SymVar(f"{name}o"), SymVar("u", upper=piece.vectors - 1)
    is_loop = as_int(piece.count) != 1 and not piece.masked
    at = piece.start + part * lanes + lane + (outer * (lanes * piece.vectors) if is_loop else 0)
    body = _at(loop, at, partials, part % MAX_ACCUMULATORS * lanes + lane, delayed, part * lanes + lane)
    if piece.masked:
        body = IfThenElse(less(at, loop.extent), body)
    inner: Stmt = For(part, sym(piece.vectors), For(lane, sym(lanes), body, "vectorized"), "unrolled")
    starts = [] if piece.masked else [substitute(at, {part: sym(u), lane: sym(0)}) for u in range(piece.vectors)]
    lines = [
        replace(x, indices=Substitute({loop.var: k}).indices(x.indices))
        for x in prefetches
        for k in starts[:: max(1, CACHE_LINE_BYTES // (lanes * dtypes.itemsize(x.buffer.dtype)))]
    ]
    inner = seq(*lines, inner)
    return For(outer, piece.count, inner) if is_loop else inner


def _at(
    loop: For,
    at: SymExpr,
    partials: Mapping[Store, Buffer],
    place: SymExpr,
    delayed: Mapping[Store, Buffer],
    number: SymExpr,
) -> Stmt:
    """The body of a loop for element `at`: totals go to index `place` of their partial results, delayed stores to index
    `number` of their temporary buffers first."""
    rewriter = Substitute({loop.var: at})
    body: list[Stmt] = []
    last: list[Stmt] = []
    for store in _stores_of(loop):
        new = rewriter.stmt(store)
        assert isinstance(new, Store)
        if store in partials:
            new = Store(partials[store], (place,), new.value, new.combine)
        elif store in delayed:
            last.append(replace(new, value=Load(delayed[store], (number,))))
            new = Store(delayed[store], (number,), new.value)
        body.append(new)
    return seq(*body, *last)


def _stores_of(loop: For) -> list[Store]:
    body = loop.body.stmts if isinstance(loop.body, Seq) else (loop.body,)
    return [s for s in body if isinstance(s, Store)]
