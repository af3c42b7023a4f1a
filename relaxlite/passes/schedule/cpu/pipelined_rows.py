"""Software pipelining of row programs: stages of several rows run in one loop over the columns.

    for each block of rows, in parallel:                       softmax of three stages, by rows
        top = max of row 0
        exps, sum = ... of row 0; top' = max of row 1          copies top' and top for two rows
        for r:
            for j: out[r, j] = exps[j] * scale                 last stage first: exps[j] is read
                   exps[j] = exp(x[r + 1, j] - top)            before the previous stage overwrites it
                   top' max= x[r + 2, j]
        out = ... of the last row

Separate stages stall on memory (first stage), on stores (last stage) and on the latency of their totals. The first
stage also prefetches a later row into the L2 cache. Pipelining requires elementwise functions of many instructions:
memory bound rows such as layer norm get slower (docs/measurements/cpus.md, rows_in_flight).

A scalar that is live across stages has one copy per stage, passed on once per row. A local row has a single copy, so
its readers must be in the stage of its writer or the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from relaxlite.ir.program import Allocate, Buffer, For, IndexValue, LetIndex, Load, Stmt, Store, Unary, seq
from relaxlite.ir.program_visitor import Substitute, all_values
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, ceildiv, product, smax, smin, sym
from relaxlite.passes.loops.access import accesses
from relaxlite.passes.loops.row_program import RowProgram
from relaxlite.records import dataclass

MAX_STAGES = 3
MAX_ROWS = 16  # of a block of rows; its first and last rows fill and drain the pipeline
BLOCKS_PER_CORE = 4  # minimum, for an even distribution over cores; blocks of fewer rows make up for it
MIN_ROWS = 4  # of a block of rows
_INSTRUCTIONS = (
    "neg", "not", "bitwise_not", "abs", "sign", "sqrt", "floor", "ceil", "round", "trunc", "isnan", "isinf"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stage:
    """A pipeline stage: a loop over a row, and the scalar statements before it."""

    scalars: tuple[Stmt, ...]
    loop: For


def pipeline_rows(
    rows: RowProgram,
    stmts: Sequence[Stmt],
    over_row: Callable[[For, Sequence[Load]], Stmt],
    prefetched: Sequence[Load],
    cores: int,
) -> tuple[SymExpr, Stmt] | None:
    """Pipeline the stages `stmts` of a row program; None: not possible or not profitable.

    Returns (minimum number of rows, nest). `over_row` schedules a loop over a row with prefetches; `prefetched`: the
    loads to prefetch in loops with the first stage.
    """
    stages = _stages(stmts)
    if not 2 <= len(stages) <= MAX_STAGES or not rows.spatial or not _rows_fit(rows, stages):
        return None
    if not any(isinstance(v, Unary) and v.op not in _INSTRUCTIONS for s in stages for v in all_values(s.loop)):
        return None
    extents = [loop.extent for loop in rows.spatial]
    count, blocks = product(extents), BLOCKS_PER_CORE * max(cores, 1)
    known, min_rows = as_int(count), blocks * MIN_ROWS
    if (known is not None and known < min_rows) or {v for e in extents for v in e.free_vars()} & {
        loop.var for loop in rows.spatial
    }:
        return None
    plan = _Pipeline(rows, stages, over_row, prefetched)
    return sym(min_rows), plan.blocks(count, smax(smin(count // blocks, MAX_ROWS), 1))


def _stages(stmts: Sequence[Stmt]) -> list[_Stage]:
    stages, scalars = list[_Stage](), list[Stmt]()
    for stmt in stmts:
        if isinstance(stmt, For):
            stages.append(_Stage(tuple(scalars), stmt))
            scalars = []
        else:
            scalars.append(stmt)
    return stages


def _rows_fit(rows: RowProgram, stages: Sequence[_Stage]) -> bool:
    """Whether each local row is used by one stage or by two adjacent stages."""
    for row in rows.locals:
        using = [
            k for k, stage in enumerate(stages) if row.shape and any(x.buffer is row for x in accesses(stage.loop))
        ]
        if using and using[-1] - using[0] > 1:
            return False
    return True


class _Pipeline:
    """Builds the pipelined nest of a row program."""

    def __init__(
        self,
        rows: RowProgram,
        stages: Sequence[_Stage],
        over_row: Callable[[For, Sequence[Load]], Stmt],
        prefetched: Sequence[Load],
    ) -> None:
        self.rows, self.stages, self.over_row, self.prefetched = rows, stages, over_row, prefetched
        self.copies = [dict[Buffer, Buffer]() for _ in stages]  # per stage, of its live scalars
        for scalar in (b for b in rows.locals if not b.shape):
            using = [k for k, stage in enumerate(stages) if any(x.buffer is scalar for x in _accesses(stage))]
            for k in range(using[0], using[-1] + 1) if using else ():
                self.copies[k][scalar] = replace(scalar, name=f"{scalar.name}_{k}" if k > using[0] else scalar.name)

    def blocks(self, count: SymExpr, max_rows: SymExpr) -> Stmt:
        """The parallel loop over blocks of at most `max_rows` of `count` rows."""
        block, rows = SymVar("block"), SymVar("block_rows", lower=1, upper=MAX_ROWS)
        first, last = SymVar("first"), SymVar("last")
        body = LetIndex(
            first,
            IndexValue(block * rows),
            LetIndex(last, IndexValue(smin(first + rows, count) - 1), self._block(sym(first), sym(last))),
        )
        for local in reversed((*(b for b in self.rows.locals if b.shape), *self._copies())):
            body = Allocate(local, body)  # type: ignore[assignment]
        return LetIndex(rows, IndexValue(max_rows), For(block, ceildiv(count, rows), body, "parallel"))

    def _copies(self) -> Iterator[Buffer]:
        for copies in self.copies:
            yield from copies.values()

    def _block(self, first: SymExpr, last: SymExpr) -> Stmt:
        n, t = len(self.stages), SymVar("t")
        behind = {k: n - 1 - k for k in range(n)}  # distance in rows from stage k to the last stage
        # A row number beyond the last is clamped to it: recomputing a row has no effect.
        filling = [
            self._step({k: smin(first + (s - k), last) if k < s else first for k in range(s + 1)}) for s in range(n - 1)
        ]
        steady = self._step({k: smin(first + t + d, last) if d > 1 else first + t + d for k, d in behind.items()})
        return seq(*filling, For(t, last - first, steady), self._step({n - 1: last}))

    def _step(self, places: Mapping[int, SymExpr]) -> Stmt:
        """One loop over the columns of the rows in `places` (stage -> row), last stage first."""
        scalars, bodies, bindings = list[Stmt](), list[Stmt](), list[tuple[SymVar, SymExpr]]()
        var, prefetched = self.stages[0].loop.var, list[Load]()
        for k in sorted(places, reverse=True):
            stage, copies = self.stages[k], self.copies[k]
            before = self.copies[k - 1] if k else {}
            scalars += [Store(copies[s], (), Load(before[s], ())) for s in copies if s in before]
            at, lets = self._place(places[k])
            bindings += lets
            own = Substitute({**at, stage.loop.var: var}, copies)
            scalars += [own.stmt(s) for s in stage.scalars]
            bodies.append(own.stmt(stage.loop.body))
            if k == 0:
                prefetched = [replace(x, indices=own.indices(x.indices)) for x in self.prefetched]
        stmt = seq(*scalars, self.over_row(replace(self.stages[0].loop, body=seq(*bodies)), prefetched))
        for symbol, value in reversed(bindings):
            stmt = LetIndex(symbol, IndexValue(value), stmt)
        return stmt

    def _place(self, row: SymExpr) -> tuple[dict[SymVar, IntLike], list[tuple[SymVar, SymExpr]]]:
        """The indices of the spatial loops for a flat row number, and the bindings that compute them."""
        rest = SymVar("row")
        variables: dict[SymVar, IntLike] = {}
        lets = [(rest, row)]
        for loop in reversed(self.rows.spatial[1:]):
            place, whole = SymVar(loop.var.name), SymVar("row")
            variables[loop.var] = place
            lets += [(place, sym(rest) % loop.extent), (whole, sym(rest) // loop.extent)]
            rest = whole
        variables[self.rows.spatial[0].var] = rest
        return variables, lets


def _accesses(stage: _Stage) -> Iterator[Load | Store]:
    for stmt in (*stage.scalars, stage.loop):
        yield from accesses(stmt)
