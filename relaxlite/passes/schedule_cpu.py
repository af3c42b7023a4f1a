"""Schedule rules for CPUs: which primitives a loop nest gets, from its accesses and the target's registers.

    injective nest      fuse loops that stay linear; vectorize the innermost; run the outermost in parallel
    reduction           a register tile: rows x vectors of outputs accumulate while the reduced loops run inside
                        (matmul, convolution, column sums), or, where only a reduced loop is contiguous, partial sums
                        in vector lanes (row sums, dot products)
    anything else       innermost loops vectorized where their iterations are independent or combine into one element

Shapes may be symbolic: tiles have an exact tail, masked along vectors and narrower along rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import (
    Allocate, Buffer, Check, For, LetIndex, Literal, Load, Seq, Stmt, Store, TensorProgram, Value, seq,
)  # fmt: skip
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.ir.visitor import (
    ProgramRewriter, Substitute, all_values, loads, map_programs, program_symbols, stmt_children, stores, walk_stmts,
)  # fmt: skip
from relaxlite.passes.access import accesses, can_fuse, stride
from relaxlite.passes.loop_pattern import perfect_nest, reduction_of, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.schedule import (
    distribute, fuse, hoist_lets, less, masked_rest, nest, rest_of, split, split_reduction, when_positive,
)  # fmt: skip
from relaxlite.target import Target

ACCUMULATORS = 24  # vector registers of a tile, of 32; the rest hold operands
ROW_TAILS = (3, 1)  # narrower tiles for the rows that are left
MAX_SMALL_STRIDE = 4  # a strided vector load is still better than scalar code


def schedule_cpu(module: IRModule, context: PassContext) -> IRModule:
    return map_programs(module, lambda p: schedule_program(p, context.target))


def schedule_program(program: TensorProgram, target: Target) -> TensorProgram:
    """The same program with loops arranged for the target."""
    if program.attrs.get("scheduled"):
        return program
    body = seq(*(_Rules(program, target).stage(hoist_lets(s)) for s in top_stages(program)))
    return replace(program, body=body, symbols=program_symbols(program.params, body))


def identity(combine: str, dtype: str) -> Value:
    """The neutral element of a combination."""
    if combine in ("add", "mul"):
        return Literal(0 if combine == "add" else 1, dtype)
    if combine in ("and", "or"):
        return Literal((combine == "and") if dtype == "bool" else (-1 if combine == "and" else 0), dtype)
    if dtypes.is_float(dtype):
        return Literal(float("-inf") if combine == "max" else float("inf"), dtype)
    if dtype == "bool":
        return Literal(combine == "min", dtype)
    info = np.iinfo(dtypes.to_numpy(dtype))
    return Literal(int(info.min if combine == "max" else info.max), dtype)


@dataclass(frozen=True, slots=True)
class _Rules:
    program: TensorProgram
    target: Target

    def lanes(self, stmt: Stmt) -> int:
        """Vector lanes for the widest element that the statement computes with."""
        widths = [dtypes.itemsize(v.dtype) for v in all_values(stmt)] + [dtypes.itemsize(s.buffer.dtype) for s in stores(stmt)]
        widest = max((w for w in widths if w < 8), default=8)  # 64-bit indices beside float32 data do not halve it
        return max(1, self.target.vector_bits // 8 // widest)

    def stage(self, stage: Stmt) -> Stmt:
        block = _reduction_block(stage)
        if block is not None:
            return self.reduction(block)
        return self.parallel(self.inner(self.fused(stage)))

    # Generic nests

    def fused(self, stmt: Stmt) -> Stmt:
        """Fuse perfectly nested loops whose accesses stay linear."""
        if not isinstance(stmt, For):
            return stmt
        inner = self.fused(stmt.body)
        stmt = stmt if inner is stmt.body else replace(stmt, body=inner)
        if isinstance(inner, For) and stmt.var not in inner.extent.free_vars() and can_fuse(inner.body, stmt.var, inner.var, inner.extent):
            return fuse(stmt, inner)
        return stmt

    def inner(self, stmt: Stmt) -> Stmt:
        """Vectorize innermost loops."""
        if isinstance(stmt, For) and not any(isinstance(s, For) for s in walk_stmts(stmt.body)):
            return self.vectorized(stmt)
        if isinstance(stmt, Seq):
            return seq(*(self.inner(s) for s in stmt.stmts))
        if isinstance(stmt, For | LetIndex | Allocate):
            return replace(stmt, body=self.inner(stmt.body))
        return stmt

    def vectorized(self, loop: For) -> Stmt:
        lanes = self.lanes(loop.body)
        if lanes == 1 or as_int(loop.extent) == 1:
            return loop
        if _combines_into_one(loop) and self._contiguous(loop):
            store = loop.body
            assert isinstance(store, Store) and store.combine is not None
            return split_reduction(loop, lanes, 4, identity(store.combine, store.buffer.dtype))
        if not _is_independent(loop) or not self._contiguous(loop):
            return loop
        main, inner, start, count = split(loop, lanes)
        main = replace(main, body=_with_kind(main.body, inner, "vectorized"))
        return seq(*when_positive(main.extent, main), *when_positive(count, masked_rest(loop, start, lanes)))

    def _contiguous(self, loop: For) -> bool:
        """Worth vectorizing: the accesses that move along the loop move by one element, most of them."""
        strides = [stride(a, loop.var) for a in accesses(loop.body) if a.buffer.scope == "global"]
        return not strides or any(s == 1 for s in strides)

    def parallel(self, stmt: Stmt) -> Stmt:
        """Run the outermost loop in parallel where its iterations write different elements."""
        if isinstance(stmt, Seq):
            return seq(*(self.parallel(s) for s in stmt.stmts))
        if isinstance(stmt, LetIndex):
            return replace(stmt, body=self.parallel(stmt.body))
        if isinstance(stmt, For) and stmt.kind == "serial" and _writes_apart(stmt):
            return replace(stmt, kind="parallel")
        return stmt

    # Reductions

    def reduction(self, block: _Block) -> Stmt:
        lanes = self.lanes(block.body)
        block = block.fused()
        column = block.vector_loop() if lanes > 1 else None
        if column is not None:
            return self.tiled(block, column, lanes)
        loops, body = block.spatial, block.body
        if lanes > 1:
            body = self._lanes_of_reduced(block, lanes)
        return self._outer(loops, body)

    def _lanes_of_reduced(self, block: _Block, lanes: int) -> Allocate:
        """Partial results in vector lanes, if the innermost reduced loop is contiguous."""

        def rewrite(stmt: Stmt) -> Stmt:
            if not isinstance(stmt, For):
                return stmt
            if isinstance(stmt.body, Store):
                store = stmt.body
                if store.combine is None or not self._contiguous(stmt):
                    return stmt
                return split_reduction(stmt, lanes, 4, identity(store.combine, store.buffer.dtype))
            return replace(stmt, body=rewrite(stmt.body))

        return replace(block.body, body=seq(*(rewrite(s) for s in block.stmts)))

    def tiled(self, block: _Block, column: For, lanes: int) -> Stmt:
        """A register tile of rows x columns; see the module docstring."""
        row = block.row_loop(column)
        width = as_int(column.extent)
        vectors = 4 if row is not None and row.extent.is_const is False else 2 if row is not None else 4
        if width is not None:
            vectors = max(1, min(4, -(-width // lanes)))
        rows = 1 if row is None else self._rows(row, vectors)
        others = [loop for loop in block.spatial if loop is not column and loop is not row]

        def columns(make: _Tile) -> Stmt:
            pieces: list[Stmt] = []
            count = column.extent // (vectors * lanes)
            outer = SymVar(f"{column.var.name}o")
            pieces += when_positive(count, For(outer, count, make(outer * (vectors * lanes), vectors, masked=False)))
            rest = column.extent % (vectors * lanes)
            tail = SymVar(f"{column.var.name}t")
            at = count * (vectors * lanes) + tail * lanes
            pieces += when_positive(rest, For(tail, (rest + lanes - 1) // lanes, make(at, 1, masked=True)))
            return seq(*pieces)

        make = _Tile(block, row, column, lanes, rows)
        return self._outer(others, columns(make), distinct=True)

    def _rows(self, row: For, vectors: int) -> int:
        most = max(1, min(8, ACCUMULATORS // vectors))
        extent = as_int(row.extent)
        if extent is None:
            return most
        divisors = [r for r in range(most, most // 2, -1) if extent % r == 0]
        return min(divisors[0] if divisors else most, max(extent, 1))

    def _outer(self, loops: Sequence[For], body: Stmt, *, distinct: bool = False) -> Stmt:
        """The remaining spatial loops, fused into one parallel loop; without any, the tiles' own loops."""
        loops = [replace(loop, kind="serial") for loop in loops if as_int(loop.extent) != 1] or list(loops)
        ones = {loop.var: 0 for loop in loops if as_int(loop.extent) == 1}
        if not loops or (len(ones) == len(loops)):
            body = Substitute(ones).stmt(body) if ones else body
            return seq(*(_parallel_tiles(s) for s in (body.stmts if isinstance(body, Seq) else (body,)))) if distinct else body
        stmt = nest(loops, body)
        while isinstance(stmt, For) and isinstance(stmt.body, For) and any(stmt.body.var is loop.var for loop in loops[1:]):
            stmt = fuse(stmt, stmt.body)
            loops = [stmt, *loops[2:]]
        assert isinstance(stmt, For)
        return replace(stmt, kind="parallel")


def _parallel_tiles(stmt: Stmt) -> Stmt:
    for_ = stmt
    if hasattr(stmt, "then"):
        return replace(stmt, then=_parallel_tiles(stmt.then))
    return replace(for_, kind="parallel") if isinstance(for_, For) else stmt


@dataclass(frozen=True, slots=True)
class _Tile:
    """Makes the code of all rows for one range of columns."""

    block: _Block
    row: For | None
    column: For
    lanes: int
    rows: int

    def __call__(self, start: SymExpr, vectors: int, *, masked: bool) -> Stmt:
        if self.row is None:
            return self._tile(None, 0, start, vectors, masked)
        pieces: list[Stmt] = []
        first, left = sym(0), self.row.extent
        for rows in dict.fromkeys((self.rows, *(t for t in ROW_TAILS if t < self.rows))):
            count = left // rows
            outer = SymVar(f"{self.row.var.name}o")
            tile = self._tile(first + outer * rows, rows, start, vectors, masked)
            pieces += when_positive(count, For(outer, count, tile))
            first, left = first + count * rows, left % rows
        return seq(*pieces)

    def _tile(self, first: SymExpr | None, rows: int, start: SymExpr, vectors: int, masked: bool) -> Stmt:
        part, lane = SymVar("u", upper=vectors - 1), SymVar("l", upper=self.lanes - 1)
        inner = [For(part, sym(vectors), Seq(()), "unrolled"), For(lane, sym(self.lanes), Seq(()), "vectorized")]
        column = start + part * self.lanes + lane
        at: dict[SymVar, SymExpr] = {self.column.var: column}
        if self.row is not None and first is not None:
            row = SymVar("r", upper=rows - 1)
            inner.insert(0, For(row, sym(rows), Seq(()), "unrolled"))
            at[self.row.var] = first + row
        block = Substitute(at, fresh=True).stmt(self.block.body)
        assert isinstance(block, Allocate)
        return distribute(inner, block, less(column, self.column.extent) if masked else None)


@dataclass(frozen=True, slots=True)
class _Block:
    """for spatial: { element[]; init; reduced loops: combine; epilogue }"""

    spatial: tuple[For, ...]
    body: Allocate

    @property
    def stmts(self) -> tuple[Stmt, ...]:
        return self.body.body.stmts if isinstance(self.body.body, Seq) else (self.body.body,)

    @property
    def update(self) -> Store:
        """The combining store."""
        return next(s for s in walk_stmts(self.body) if isinstance(s, Store) and s.combine is not None)

    def fused(self) -> _Block:
        """Fuse adjacent spatial loops, and adjacent reduced loops, whose accesses stay linear."""
        spatial, body = list(self.spatial), self.body
        k = len(spatial) - 2
        while k >= 0:
            outer, inner = spatial[k], spatial[k + 1]
            if can_fuse(body, outer.var, inner.var, inner.extent):
                merged = fuse(outer, replace(inner, body=body))
                spatial[k : k + 2] = [merged]
                assert isinstance(merged.body, Allocate)
                body = merged.body
            k -= 1
        return _Block(tuple(spatial), replace(body, body=_fuse_reduced(body.body)))

    def vector_loop(self) -> For | None:
        """The spatial loop to vectorize: the last along which the output and some operand are contiguous and no operand
        jumps far. None: there is none."""
        for loop in reversed(self.spatial):
            if as_int(loop.extent) == 1:
                continue
            read = [stride(load, loop.var) for load in loads(self.update) if load.buffer is not self.body.buffer]
            written = [stride(s, loop.var) for s in stores(self.body) if s.buffer.scope == "global"]
            near = all(s is not None and abs(s) <= MAX_SMALL_STRIDE for s in read)
            if near and any(read) and all(s == 1 for s in written):
                return loop
        return None

    def row_loop(self, column: For) -> For | None:
        """A spatial loop that the contiguous operand does not depend on, so that a vector of it serves several rows."""
        moving = [load for load in loads(self.update) if stride(load, column.var)]
        for loop in reversed(self.spatial):
            if loop is not column and as_int(loop.extent) != 1 and moving and all(stride(load, loop.var) == 0 for load in moving):
                return loop
        return None


def _fuse_reduced(stmt: Stmt) -> Stmt:
    if isinstance(stmt, Seq):
        return seq(*(_fuse_reduced(s) for s in stmt.stmts))
    if not isinstance(stmt, For):
        return stmt
    inner = _fuse_reduced(stmt.body)
    stmt = replace(stmt, body=inner)
    if isinstance(inner, For) and can_fuse(inner.body, stmt.var, inner.var, inner.extent):
        return fuse(stmt, inner)
    return stmt


def _reduction_block(stage: Stmt) -> _Block | None:
    """The stage as a reduction over one local element, whether or not it has an epilogue yet."""
    reduction = reduction_of(stage)
    if reduction is not None:
        out = reduction.init.buffer
        element = Buffer(f"{out.name}_acc", (), out.dtype, "local")
        update: Stmt = Store(element, (), reduction.update.value, reduction.update.combine)
        final = Store(out, reduction.init.indices, Load(element, ()))
        body = seq(Store(element, (), reduction.init.value), nest(reduction.reduced, update), final)
        return _Block(reduction.spatial, Allocate(element, body))
    found = perfect_nest(stage)
    block = found.body
    if not isinstance(block, Allocate) or block.buffer.shape or not isinstance(block.body, Seq):
        return None
    init, *rest = block.body.stmts
    if not isinstance(init, Store) or len(rest) < 2 or any(isinstance(s, For) for r in rest[1:] for s in walk_stmts(r)):
        return None
    update_nest = perfect_nest(rest[0])
    if not isinstance(update_nest.body, Store) or update_nest.body.combine is None or update_nest.body.buffer is not block.buffer:
        return None
    return _Block(found.loops, block)


def _combines_into_one(loop: For) -> bool:
    """Whether the body combines into an element that the loop does not move."""
    store = loop.body
    if not isinstance(store, Store) or store.combine is None:
        return False
    fixed = all(loop.var not in index.free_vars() for index in store.indices)
    return fixed and all(load.buffer is not store.buffer for load in loads(store))


def _is_independent(loop: For) -> bool:
    """Whether iterations of an innermost loop can run side by side: every store moves along the loop, and what is loaded
    from a stored buffer is the element that the same iteration stores."""
    if any(isinstance(s, LetIndex | Check | Allocate) for s in walk_stmts(loop.body)):
        return False
    written: dict[Buffer, tuple[SymExpr, ...]] = {}
    for store in stores(loop.body):
        if not any(index is loop.var or stride(store, loop.var) not in (0, None) for index in store.indices):
            return False
        if written.setdefault(store.buffer, store.indices) != store.indices:
            return False
    return all(load.indices == written.get(load.buffer, load.indices) for load in loads(loop.body))


def _writes_apart(loop: For) -> bool:
    """Whether different iterations write different elements and read none that another writes: in all accesses to a
    written buffer that outlives the iteration the loop variable stands alone in the same dimension."""
    own = {s.buffer for s in walk_stmts(loop.body) if isinstance(s, Allocate)}
    written = {s.buffer for s in stores(loop.body)} - own
    for buffer in written:
        places = [{k for k, index in enumerate(a.indices) if _owns(index, loop.var)} for a in accesses(loop.body) if a.buffer is buffer]
        if not set.intersection(*places):
            return False
    return True


def _owns(index: SymExpr, var: SymVar) -> bool:
    """Whether equal indices imply equal values of var: var itself, or var*c + (0 .. c-1)."""
    if index is var:
        return True
    coef = next((c for monomial, c in index.terms if monomial == (var,)), 0)
    rest = index - var * coef
    if coef <= 0 or var in rest.free_vars():
        return False
    from relaxlite.ir.analyzer import Analyzer

    lower, upper = Analyzer().bounds(rest)
    return lower is not None and upper is not None and lower >= 0 and upper < coef


def _with_kind(stmt: Stmt, var: SymVar, kind: str) -> Stmt:
    assert isinstance(stmt, For)
    return replace(stmt, kind=kind)  # type: ignore[arg-type]
