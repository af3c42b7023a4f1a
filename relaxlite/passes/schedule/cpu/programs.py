"""Schedule rules for CPUs: the transformations of each loop nest, chosen by its accesses and the target's registers.

    row program         one loop over rows, several over each row (rows.py)
    transpose           tiles transposed in registers (transpose.py)
    injective nest      fuse loops whose accesses stay linear; vectorize the innermost; run the outermost in parallel
    reduction           a register tile: rows x vectors of outputs accumulate while the reduced loops run inside
                        (matmul, convolution, column sums), or, where only a reduced loop is contiguous, partial sums
                        in vector lanes (row sums, dot products)
    other nests         vectorize innermost loops whose iterations are independent or combine into one element

Shapes may be symbolic: tiles have exact tails, masked along vectors and with fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from functools import partial, reduce
from typing import Any

from relaxlite import dtypes
from relaxlite.ir.attributes import (
    BATCH_INVARIANT,
    IN_ORDER,
    IN_PLACE,
    INHERITS_LAYOUT,
    MIN_PREPARED_ROWS,
    PANELS,
    PREFETCH_BYTES,
    ROW_GROUPS,
    SCHEDULED,
    STACKED,
    WRITES_INPUTS,
)
from relaxlite.ir.expr import Attrs, AttrValue
from relaxlite.ir.module import IRModule
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    Enclosing,
    For,
    IfThenElse,
    Load,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import all_values, stores, walk_stmts, walk_values
from relaxlite.ir.symbolic import SymVar, as_int, product
from relaxlite.ir.visitor import map_programs
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.access import accesses, can_fuse, stride
from relaxlite.passes.loops.edits import (
    fuse,
    hoist_lets,
    less,
    masked_rest,
    nest,
    past_caches,
    prefetch_arrays,
    split,
    split_reduction,
    when_positive,
    with_variant,
    without_unit_loops,
)
from relaxlite.passes.loops.in_place import Pairs, in_place_pairs, keeps_order, with_late_stores
from relaxlite.passes.loops.join_parallel import joined_loops, reads_only_where_written
from relaxlite.passes.loops.parallel import (
    combines_into_one,
    is_independent,
    mark_parallel,
    outermost_parallel,
    parallel_nest,
    serial,
    share_two_loops,
)
from relaxlite.passes.loops.pattern import calls_library, injective_store, perfect_nest, plain_store, top_stages
from relaxlite.passes.loops.row_program import rows_of
from relaxlite.passes.loops.versioning import Unclamp, clamped_loops
from relaxlite.passes.products.blocks import (
    BlockPlan,
    BlockProduct,
    ManyRows,
    ManyRowsRule,
    block_product,
    tiled_blocks,
)
from relaxlite.passes.products.blocks_amx import by_amx
from relaxlite.passes.products.blocks_grouped import Groups, groups_of, tiled_groups
from relaxlite.passes.products.blocks_int16 import by_int16_pairs
from relaxlite.passes.products.blocks_interleaved import InterleavedRows
from relaxlite.passes.products.blocks_maddubs import by_pairs
from relaxlite.passes.products.choice import DEFAULT, ONE_SUM, ScheduleChoice
from relaxlite.passes.products.convolution import FilterTile, filter_tile, tiled_filters
from relaxlite.passes.products.dots import Dots, dot_products
from relaxlite.passes.products.dots_amx import amx_dots
from relaxlite.passes.products.panel_prefetch import PanelPrefetch, steps_of, width_that_fits
from relaxlite.passes.products.reduction import (
    Block,
    panel_width,
    panel_widths,
    prefetch_distances,
    prologues_of,
    reduction_block,
    tile_size,
    tiled,
)
from relaxlite.passes.products.transposed import find_transposed, tiled_transposed
from relaxlite.passes.products.windows_nchw import nchw_tile_of, tiled_nchw
from relaxlite.passes.products.windows_nhwc import tiled_windows, window_of
from relaxlite.passes.products.winograd_tile import ORDINARY_ROWS, InnerTile, chained_terms, tiled_inner
from relaxlite.passes.products.winograd_widened import find_widened
from relaxlite.passes.schedule.cpu.rows import reads_in_time, schedule_rows
from relaxlite.passes.schedule.cpu.transpose import MAX_TILE_LANES, both, tiled_transpose
from relaxlite.passes.schedule.primitives.trace import Step, with_steps
from relaxlite.records import dataclass
from relaxlite.target import Target

ENOUGH_WORK = 2**18  # elements combined by a reduction inside of a serial loop from which on it runs in parallel
PARTIAL_SUMS = 4  # vector accumulators of a reduction along a contiguous loop
MAX_UNROLLED = 4  # vector iterations of a loop that is fully unrolled, so that values stay in registers for later loops
MIN_VECTORS = 3  # of a register tile that was narrowed to fit the cache: enough to hide latencies with 8 rows


def schedule_cpu(module: IRModule, context: PassContext) -> IRModule:
    """Schedule every program for the CPU target: tile, vectorize and parallelize loops, choose layouts of constants.

    Programs in the tuning database use its choice. Outputs that the schedule excludes from aliasing an input leave a
    decision with the reason.
    """
    target, tuning = context.target, context.tuning

    def schedule(program: TensorProgram) -> TensorProgram:
        if program.attrs.get(SCHEDULED):
            return program
        choice = tuning.choice(program, target) if tuning is not None else DEFAULT
        if module.attrs.get(BATCH_INVARIANT):
            choice = replace(choice, sums=ONE_SUM)
        result: tuple[TensorProgram] = context.program_cache.recall(
            "schedule", program, repr(choice), lambda: (schedule_program(program, target, choice),)
        )
        return result[0]

    scheduled = map_programs(module, schedule)
    after = scheduled.programs()
    for name, program in module.programs().items():
        _note_operands(name, program, after[name], context)
    return scheduled


def _note_operands(name: str, before: TensorProgram, after: TensorProgram, context: PassContext) -> None:
    """Record which outputs of a program cannot alias an input of their size, and why."""
    pairs, reasons = in_place_pairs(with_late_stores(before)) if before is not after else ((), ())
    for reason in reasons:
        context.decide("in_place", name, False, reason)
    for x, out in pairs:
        if (x, out) not in after.attrs.get(IN_PLACE, ()):  # type: ignore[operator]
            subject = f"{after.params[out].name} of {name} in {after.params[x].name}"
            reason = "its schedule computes elements twice, or stages other values in the result"
            context.decide("in_place", subject, False, reason)


def schedule_program(program: TensorProgram, target: Target, choice: ScheduleChoice = DEFAULT) -> TensorProgram:
    """Schedule one program for a target; a program that is scheduled already is returned unchanged.

    The result has the attributes of packed operands, prefetch distances, aliasing and the schedule trace.
    """
    if program.attrs.get(SCHEDULED):
        return program
    program = with_late_stores(program)
    pairs = _in_place(program)
    in_place = {(program.params[x], program.params[out]) for x, out in pairs}
    if program.num_outputs > 1 and not program.attrs.get(MIN_PREPARED_ROWS):  # its loops will be joined
        in_place = {(x, out) for x, out in in_place if reads_only_where_written(top_stages(program), x, out)}
    rules = _Rules(program, target, choice, choice, {}, {}, set(), {}, set(), [], in_place)
    if program.attrs.get(MIN_PREPARED_ROWS):
        rules = replace(rules, choice=replace(choice, rows=choice.rows or ORDINARY_ROWS))
        stages = [rules.variants(s) for s in top_stages(program)]
    else:
        stages = [rules.stage(hoist_lets(s)) for s in top_stages(program)]
    body = seq(*(joined_loops(stages) if program.num_outputs > 1 else stages))
    panels = tuple((k, rules.panels[b]) for k, b in enumerate(program.inputs) if b in rules.panels)
    groups = tuple((k, rules.groups[b]) for k, b in enumerate(program.inputs) if b in rules.groups)
    prefetch_bytes = tuple(
        (k, rules.prefetch_bytes[b]) for k, b in enumerate(program.inputs) if b in rules.prefetch_bytes
    )
    stacked = tuple(k for k, b in enumerate(program.inputs) if b in rules.stacked)
    in_order = tuple(k for k, b in enumerate(program.inputs) if b in rules.in_order)
    candidates = (
        (PANELS, panels),
        (ROW_GROUPS, groups),
        (STACKED, stacked),
        (PREFETCH_BYTES, prefetch_bytes),
        (IN_ORDER, in_order),
    )
    packing = {name: value for name, value in candidates if value}
    parallel = [s for s in walk_stmts(body) if isinstance(s, For) and s.kind == "parallel"]
    steps = dict.fromkeys([*rules.steps, *(Step("parallelize", (loop.var.name,)) for loop in parallel)])
    aliases = tuple((x, out) for x, out in pairs if rules.keeps(program.params[x], program.params[out], body))
    old = {name: value for name, value in program.attrs.items() if name != IN_PLACE}
    attrs = with_steps(Attrs({**old, **packing, **({IN_PLACE: aliases} if aliases else {})}), steps)
    return replace(program, body=body, attrs=attrs)  # symbols keep their order, on which callers rely


def _in_place(program: TensorProgram) -> Pairs:
    """The pairs of inputs and outputs that may alias; for programs with strategies in branches, those declared by the
    pass that made the branches."""
    declared: Any = program.attrs.get(IN_PLACE, ())
    return declared if program.attrs.get(MIN_PREPARED_ROWS) else in_place_pairs(program)[0]


@dataclass(frozen=True, slots=True)
class _Rules:
    """Schedules the stages of one program and collects the attributes that follow from the chosen tiles."""

    program: TensorProgram
    target: Target
    original_choice: ScheduleChoice
    choice: ScheduleChoice  # the given one, or one for less code if few rows run it
    panels: dict[Buffer, int]  # operand -> panel width in elements
    groups: dict[Buffer, int]  # packed operand -> rows per dot product instruction
    stacked: set[Buffer]  # packed operands that are several matrices
    prefetch_bytes: dict[Buffer, int]  # operand -> prefetch distance in bytes
    in_order: set[Buffer]  # operands whose loads must not be reordered
    steps: list[Step]  # the schedule trace
    in_place: set[tuple[Buffer, Buffer]]  # (input, output) that may alias; rules remove the pairs that they break
    staged: set[Buffer] = field(default_factory=set)  # outputs that hold local rows, for which `in_place` is checked

    packs: bool = True  # whether constants may be packed

    def note(self, name: str, *args: str | int, **options: AttrValue) -> None:
        """Record a step in the schedule trace."""
        self.steps.append(Step(name, args, tuple(options.items())))

    def lanes(self, stmt: Stmt) -> int:
        """The number of vector lanes for the widest dtype in a statement.

        64-bit elements beside narrower ones do not count.
        """
        widths = [dtypes.itemsize(v.dtype) for v in all_values(stmt)] + [
            dtypes.itemsize(s.buffer.dtype) for s in stores(stmt)
        ]
        widest = max((w for w in widths if w < 8), default=8)  # 64-bit indices must not halve the lanes of float32 data
        return max(1, self.target.vector_bits // 8 // widest)

    def keeps(self, x: Buffer, out: Buffer, body: Stmt) -> bool:
        """Whether an output may still alias an input with the scheduled loops."""
        return (x, out) in self.in_place and (out in self.staged or keeps_order(body, out))

    def _forbid(self, out: Buffer, inputs: Iterable[Buffer]) -> None:
        self.in_place.difference_update({(x, out) for x in inputs})

    @property
    def partial_sums(self) -> int:
        """The number of vector accumulators of a reduction along its contiguous loop."""
        return self.choice.partial_sums or PARTIAL_SUMS

    def stage(self, stage: Stmt) -> Stmt:
        """Schedule one top-level stage, with a version without clamped indices if it has some."""
        if calls_library(stage):
            return self.beside_library(stage)
        clamps = clamped_loops(stage)
        if not clamps:
            return self.nest(stage)
        conds = [less(extent - 1, limit + 1) for (_, limit), extent in clamps.items()]
        usual = reduce(lambda a, b: Binary("and", a, b), conds)
        return IfThenElse(usual, self.nest(Unclamp(clamps).stmt(stage)), self.nest(stage))

    def beside_library(self, stage: IfThenElse) -> Stmt:
        """Schedule the loops around a library call: its epilogue and its fallback.

        Constants are not packed, as the library reads them in their original layout.
        """
        rules = replace(self, packs=False)

        def scheduled(stmt: Stmt) -> Stmt:
            if isinstance(stmt, Allocate) and stmt.buffer.scope == "global":
                return replace(stmt, body=scheduled(stmt.body))
            parts = stmt.stmts if isinstance(stmt, Seq) else (stmt,)
            return seq(*(s if _is_library_call(s) else rules.stage(hoist_lets(s)) for s in parts))

        return replace(stage, then=scheduled(stage.then), other=None if stage.other is None else scheduled(stage.other))

    def variants(self, stmt: Stmt) -> Stmt:
        """Schedule strategies in branches; parallel loops in them are scheduled already."""
        if isinstance(stmt, Allocate):
            widened = self.widened(stmt)
            return replace(stmt, body=self.variants(stmt.body)) if widened is None else widened
        if isinstance(stmt, IfThenElse):
            then = self.variants(stmt.then)
            return replace(stmt, then=then, other=None if stmt.other is None else self.variants(stmt.other))
        if isinstance(stmt, Seq):
            return seq(*joined_loops([self.variants(s) for s in stmt.stmts]))
        is_scheduled = isinstance(stmt, Store) or (isinstance(stmt, For) and stmt.kind == "parallel")
        return stmt if is_scheduled else self.stage(stmt)

    def nest(self, stage: Stmt) -> Stmt:
        """Schedule a stage by the first rule that matches."""
        if _never_runs(stage):
            return seq()  # an empty nest
        block = reduction_block(stage)
        if block is not None:
            return self.reduction(block)
        groups = groups_of(stage)
        grouped = None if groups is None else self.grouped(groups)
        if grouped is not None:
            return grouped
        rows = None if self.program.attrs.get(WRITES_INPUTS) else rows_of(stage)
        if rows is not None:
            prefetches = self.target.cpu_facts.prefetches_next_row
            rows = replace(rows, prefetches_next=prefetches, cores=None if prefetches else self.target.cores)
        scheduled = None if rows is None else schedule_rows(rows, self.lanes(stage), self.target.l3_bytes)
        if rows is not None and scheduled is not None:
            self.note("row_program", lanes=self.lanes(stage))
            out = rows.result.buffer
            self._forbid(out, [x for x, to in self.in_place if to is out and not reads_in_time(rows, x)])
            self.staged.add(out)
            return scheduled
        marked = mark_parallel(without_unit_loops(stage))
        outer = perfect_nest(marked)
        if outer.loops and _is_worth_a_task(outer.body) and all(loop.kind == "parallel" for loop in outer.loops):
            return parallel_nest(outer.loops, serial(self.inner(outer.body)))
        usual = self.streamed(stage, outermost_parallel(self.inner(share_two_loops(self.fused(marked)))))
        return self.transposed(stage, usual)

    def transposed(self, stage: Stmt, usual: Stmt) -> Stmt:
        """Tile a nest with transposed loads, with the usual schedule as fallback for sizes below a tile."""
        store = plain_store(perfect_nest(stage))
        if store is None or store.buffer.scope != "global":
            return usual
        tiling = tiled_transpose(self.fused(stage), min(MAX_TILE_LANES, self.lanes(stage)))
        if tiling is None:
            return usual
        conditions, tiles = tiling
        self._forbid(store.buffer, self.program.inputs)  # overlapping tiles compute elements twice
        return IfThenElse(both(conditions), tiles, usual) if conditions else tiles

    def streamed(self, stage: Stmt, scheduled: Stmt) -> Stmt:
        """Add a version with nontemporal stores for results larger than the L3 cache."""
        store = injective_store(perfect_nest(stage))
        if store is None or store.buffer not in self.program.outputs:
            return scheduled
        self.note("store_past_caches", store.buffer.name)
        max_elements = self.target.l3_bytes // dtypes.itemsize(store.buffer.dtype)
        nontemporal = past_caches(scheduled, store.buffer)
        if self.target.cpu_facts.elementwise_prefetch_bytes:
            nontemporal = prefetch_arrays(nontemporal, store.buffer, self.target.cpu_facts.elementwise_prefetch_bytes)
        return with_variant(less(max_elements, product(store.buffer.shape)), nontemporal, scheduled)

    # Generic nests

    def fused(self, stmt: Stmt) -> Stmt:
        """Fuse perfectly nested loops if all accesses stay linear."""
        if not isinstance(stmt, For):
            return stmt
        inner = self.fused(stmt.body)
        stmt = stmt if inner is stmt.body else replace(stmt, body=inner)
        if (
            isinstance(inner, For)
            and inner.kind == stmt.kind
            and stmt.var not in inner.extent.free_vars()
            and can_fuse(inner.body, stmt.var, inner.var, inner.extent)
        ):
            self.note("fuse", stmt.var.name, inner.var.name)
            return fuse(stmt, inner)
        return stmt

    def inner(self, stmt: Stmt) -> Stmt:
        """Vectorize innermost loops, and tile nested reductions, such as those in the steps of a recurrence."""
        if _never_runs(stmt):
            return seq()
        if isinstance(stmt, For) and not any(isinstance(s, For) for s in walk_stmts(stmt.body)):
            return self.vectorized(stmt)
        block = reduction_block(stmt) if isinstance(stmt, For) else None
        if block is not None:
            assert isinstance(stmt, For)
            return self.step_reduction(block, unknown=1 if stmt.kind == "serial" else ENOUGH_WORK)
        if isinstance(stmt, Seq):
            return seq(*(self.inner(s) for s in stmt.stmts))
        if isinstance(stmt, Enclosing):
            return replace(stmt, body=self.inner(stmt.body))
        return stmt

    def vectorized(self, loop: For) -> Stmt:
        """Vectorize an innermost loop if that is legal and its accesses are contiguous."""
        lanes = self.lanes(loop.body)
        if lanes == 1 or as_int(loop.extent) == 1:
            return loop
        if combines_into_one(loop) and self._contiguous(loop):
            store = loop.body
            assert isinstance(store, Store) and store.combine is not None
            self.note("split_reduction", loop.var.name, lanes, self.partial_sums)
            partial = max(1, min(self.partial_sums, (as_int(loop.extent) or lanes * self.partial_sums) // lanes))
            return split_reduction(loop, lanes, partial, identity(store.combine, store.buffer.dtype))
        if not is_independent(loop) or not self._contiguous(loop):
            return loop
        short = as_int(loop.extent) or lanes
        if short < lanes and short.bit_count() == 1:
            lanes = short
        self.note("vectorize", loop.var.name, lanes=lanes)
        main, inner, start, count = split(loop, lanes)
        steps = as_int(main.extent)
        is_short = steps is not None and steps <= MAX_UNROLLED
        main = replace(
            main, body=_with_kind(main.body, inner, "vectorized"), kind="unrolled" if is_short else main.kind
        )
        return seq(*when_positive(main.extent, main), *when_positive(count, masked_rest(loop, start, lanes)))

    def _contiguous(self, loop: For) -> bool:
        """Whether vectorizing a loop pays: some access to global memory has stride 1 along it, or all have stride 0."""
        strides = [stride(a, loop.var) for a in accesses(loop.body) if a.buffer.scope == "global"]
        return any(s == 1 for s in strides) or all(s == 0 for s in strides)

    # Reductions

    def reduction(self, block: Block, *, packs: bool = True) -> Stmt:
        """Schedule a reduction by the first tile that matches; else in the order of its loops."""
        lanes, registers, packs = self.lanes(block.body), self.target.num_vector_registers, packs and self.packs
        window = None if block.is_pair else window_of(block, lanes)
        if window is not None:
            self.note("window_tile", window.along.var.name, lanes=lanes)
            return tiled_windows(window)
        nchw_tile = nchw_tile_of(block, lanes)
        if nchw_tile is not None:
            self.note("plane_tile", nchw_tile.along.var.name, rows=nchw_tile.height, lanes=lanes)
            return tiled_nchw(nchw_tile)
        unfused, block = block, block.fused()
        blocks = block_product(block, lanes, self.target) if lanes > 1 else None
        if blocks is not None:
            self.note("block_tile", blocks.column.var.name, vectors=blocks.vectors, alone=blocks.alone, lanes=lanes)
            return tiled_blocks(blocks, lanes, self._block_plan(blocks, lanes))
        tile = None if block.is_pair else filter_tile(block, lanes, registers, self.choice)
        if tile is not None:
            of_bytes = self._dots_of_filters(unfused, lanes, registers) if packs else None
            tile, dots = (tile, None) if of_bytes is None else of_bytes
            if packs:
                self.panels.update(tile.panels)
            sizes = {"rows": tile.most_rows, "vectors": tile.vectors, "lanes": lanes}
            self.note("filter_tile", tile.column.var.name, row=tile.row.var.name, **sizes)
            tile_nest = tiled_filters(tile, self.choice)
            if dots is None:
                return tile_nest
            self.panels[tile.filters] = tile.width
            self._group(dots)
            flat = unfused.fused(reduced=False)
            return self._with_amx(flat, flat.spatial[-1], lanes, tile.width, tile_nest)
        column = block.vector_loop() if lanes > 1 else None
        chained = chained_terms(block, self.target) if self.program.attrs.get(MIN_PREPARED_ROWS) else None
        if column is not None and chained is not None:
            return self.chained(block, column, chained)
        if column is not None:
            dots, hides = (
                dot_products(block, column, self.target) if packs else None,
                self.target.cpu_facts.hides_conversions,
            )
            prologues = prologues_of(block, column) if dots is None else ()
            has_few_rows = bool(self.program.attrs.get(MIN_PREPARED_ROWS))  # too few for prefetching to pay
            is_plain = packs and dots is None and not prologues and not has_few_rows
            choice, prefetch = self.original_choice if prologues else self.choice, None
            if is_plain:
                choice, prefetch = self._panel_prefetch(block, column, lanes)
            if self.is_counted_by_data(block, column):
                choice = replace(choice, sums=ONE_SUM)
                distance = steps_of(block.stmts[1], column.var, self.target.cpu_facts.page_prefetch_bytes)
                prefetch = PanelPrefetch(distance, for_next=False, cache=2) if distance else None
            if packs:
                for operand, width in panel_widths(block, column, lanes, registers, choice).items():
                    self.panels.setdefault(operand, width)  # a strategy scheduled before may have set it
            if dots is not None:
                self.panels.update(dict.fromkeys(dots.operands, panel_width(block, column, lanes, registers, choice)))
                self._group(dots)
            row, rows, vectors = tile_size(block, column, lanes, registers, choice)
            row_name = None if row is None else row.var.name
            self.note("register_tile", column.var.name, row=row_name, rows=rows, vectors=vectors, lanes=lanes)
            for prologue in prologues:
                more_rows = "stream" if row is None or (prologue.is_cheap and hides) else "stage"
                self.note("prologue", prologue.loop.var.name, few_rows="stream", more_rows=more_rows)
                self.prefetch_operand(prologue.operand)
            body = None if dots is None else dots.body
            tile_nest = tiled(block, column, lanes, registers, body, choice, hides_conversions=hides, asks=prefetch)
            if dots is None:
                return tile_nest
            return self._with_amx(block, column, lanes, panel_width(block, column, lanes, registers, choice), tile_nest)
        body = self._lanes_of_reduced(block, lanes) if lanes > 1 else block.body
        usual = parallel_nest(block.spatial, body)
        transposed = find_transposed(block) if lanes > 1 and not block.is_pair else None
        if transposed is None:
            return usual
        self.note("turned_panels", transposed.column.var.name, row=transposed.row.var.name, lanes=lanes)
        return tiled_transposed(block, transposed, lanes, registers, usual, self.choice)

    def grouped(self, groups: Groups) -> Stmt | None:
        """Schedule a grouped matmul with block-quantized weights; None: the groups compute something else."""
        if _never_runs(groups.nest):
            return seq()
        block, lanes = reduction_block(groups.nest), self.lanes(groups.nest)
        match = block_product(block, lanes, self.target) if block is not None and lanes > 1 else None
        if match is None or match.row is None:
            return None
        if self.packs:
            self.stacked.update(match.panels)
        self.note("grouped_tile", match.column.var.name, vectors=match.vectors, alone=match.alone, lanes=lanes)
        return tiled_groups(groups, match, lanes, self._block_plan(match, lanes))

    def _block_plan(self, match: BlockProduct, lanes: int) -> BlockPlan:
        """The prefetch plan and the strategies of a product with block-quantized weights. Weights are packed in panels
        if packing is allowed, and loaded in order if they are not prefetched."""
        target, prefetch_plan = self.target, self.target.cpu_facts.block_prefetch_plan
        if self.packs:
            self.panels.update(dict.fromkeys(match.panels, match.panel * lanes))
            self.in_order.update(() if prefetch_plan.gemv_bytes else match.panels)
        else:
            prefetch_plan = replace(prefetch_plan, gemv_bytes=0, gemm_bytes=0)
        many_rows_rule: ManyRowsRule | None = None
        if target.has("amx-int8"):
            many_rows_rule = by_amx
        elif target.has_maddubs and not target.has_dp4a:
            many_rows_rule = partial(by_pairs, target=target)
        elif target.cpu_facts.adds_beside_fmas and target.cpu_facts.loads_per_fma > 1:
            many_rows_rule = by_int16_pairs
        return BlockPlan(prefetch_plan, InterleavedRows if target.interleaves_rows else ManyRows, many_rows_rule)

    def is_counted_by_data(self, block: Block, column: For) -> bool:
        """Whether the number of rows depends on outer loops or data, as in paged attention, rather than on sizes.

        A row then runs with varying numbers of other rows. Such a block uses one accumulator per element, so that
        results are bitwise independent of the other rows.
        """
        row = block.row_loop(column)
        return row is not None and not set(row.extent.free_vars()) <= set(self.program.symbols)

    def chained(self, block: Block, column: For, body: Allocate) -> Stmt:
        """Schedule a reduction with several products per step, as in Winograd's inner product algorithm."""
        lanes, tile, min_rows = self.lanes(block.body), InnerTile.of(self.target), self._min_rows
        self.note("inner_product_tile", column.var.name, rows=tile.rows, vectors=tile.vectors, lanes=lanes)
        inputs, max_rows = self.program.inputs, self.choice.rows
        tiles, panels = tiled_inner(
            block, column, body, lanes, self.target, inputs=inputs, least=min_rows, most=max_rows
        )
        self.panels.update(panels)
        return tiles

    @property
    def _min_rows(self) -> int:
        """The minimum number of rows in the strategy with prepared rows."""
        count: Any = self.program.attrs[MIN_PREPARED_ROWS]
        return int(count)

    def widened(self, stmt: Allocate) -> Stmt | None:
        """Schedule inner products together with the stages that compute their weights; None: other stages."""
        widened, tile = find_widened(stmt, self.target), InnerTile.of(self.target)
        if widened is None:
            return None
        column, lanes = widened.column.var.name, self.lanes(widened.body)
        self.panels.update(dict.fromkeys(widened.stored, tile.vectors * lanes))
        self.note("widened_inner_product_tile", column, rows=tile.rows, vectors=tile.vectors, lanes=lanes)
        return widened.tiled(tile, lanes, self._min_rows, is_packed=not self.program.attrs.get(INHERITS_LAYOUT))

    def _panel_prefetch(self, block: Block, column: For, lanes: int) -> tuple[ScheduleChoice, PanelPrefetch | None]:
        """The choice of panel width and the prefetching of panels: the usual width, or a narrower one if only then two
        panels fit the L2 cache. If no width fits, the next panel is not prefetched."""
        registers = self.target.num_vector_registers
        if block.is_pair or not panel_widths(block, column, lanes, registers, self.choice):
            return self.choice, None
        usual = panel_width(block, column, lanes, registers, self.choice)
        widths = [usual, *([] if self.choice.vectors else range(usual - lanes, MIN_VECTORS * lanes - 1, -lanes))]
        width = width_that_fits(block.stmts[1], column.var, widths, self.target.l2_bytes)
        choice = self.choice if width is None else replace(self.choice, vectors=width // lanes)
        prefetch = PanelPrefetch(self.target.cpu_facts.panel_prefetch_steps, width is not None)
        return choice, prefetch if prefetch.ahead or prefetch.for_next else None

    def _with_amx(self, block: Block, column: For, lanes: int, width: int, fallback: Stmt) -> Stmt:
        """Add a version with AMX tiles to the scheduled dot products of a block (`fallback`), if the target has
        them."""
        amx = amx_dots(block, column, lanes, width, self.target)
        if amx is None:
            return fallback
        self.note("tile_squares", column.var.name)
        return IfThenElse(*amx, fallback)

    def _dots_of_filters(self, block: Block, lanes: int, registers: int) -> tuple[FilterTile, Dots] | None:
        """A filter tile that sums channels with dot product instructions; the channel loop is not fused with the kernel
        loops. None: the target or the block has no such dot products."""
        tile = filter_tile(block.fused(reduced=False), lanes, registers, self.choice)
        dots = None if tile is None else dot_products(tile.block, tile.column, self.target)
        if tile is None or dots is None:
            return None
        return replace(tile, block=replace(tile.block, body=dots.body)), dots

    def _group(self, dots: Dots) -> None:
        for operand in dots.operands:
            self.groups[operand] = dots.group
            self.note("dot_products", operand.name, length=dots.group)

    def prefetch_operand(self, operand: Value) -> None:
        """Prefetch the packed integer operands of a prologue that widens them.

        Half-precision operands need no prefetch (docs/measurements/passa.md).
        """
        read = dict.fromkeys(v.buffer for v in walk_values(operand) if isinstance(v, Load))
        if any(b.dtype in dtypes.INTEGERS and b in self.panels for b in read):
            self.prefetch_bytes.update(
                prefetch_distances((b for b in read if b in self.panels), self.target.cpu_facts.weight_prefetch_bytes)
            )

    def step_reduction(self, block: Block, *, unknown: int) -> Stmt:
        """Schedule a reduction that is part of a larger stage and may run many times.

        Threads are used if each execution combines at least `MIN_PARALLEL_WORK` elements, where symbolic extents count
        as `unknown`. Operands are not packed, as other reductions of the stage may read other parts of them.
        """
        tiles = self.reduction(block, packs=False)
        sizes = [as_int(s.extent) for s in walk_stmts(nest(block.spatial, block.body)) if isinstance(s, For)]
        work = math.prod(unknown if size is None else size for size in sizes)
        return tiles if work >= ENOUGH_WORK else serial(tiles)

    def _lanes_of_reduced(self, block: Block, lanes: int) -> Allocate:
        """Vectorize the innermost reduced loops of a block if they are contiguous, with partial results in vector
        lanes."""

        def rewrite(stmt: Stmt) -> Stmt:
            if not isinstance(stmt, For):
                return stmt
            if isinstance(stmt.body, Store):
                store = stmt.body
                if store.combine is None or not self._contiguous(stmt):
                    return stmt
                self.note("split_reduction", stmt.var.name, lanes, self.partial_sums)
                return split_reduction(stmt, lanes, self.partial_sums, identity(store.combine, store.buffer.dtype))
            return replace(stmt, body=rewrite(stmt.body))

        return replace(block.body, body=seq(*(rewrite(s) for s in block.stmts)))


def _never_runs(stmt: Stmt) -> bool:
    """Whether a loop of the nest has extent 0 for all sizes."""
    return any(as_int(loop.extent) == 0 for loop in perfect_nest(stmt).loops)


def _is_library_call(stmt: Stmt) -> bool:
    """Whether a statement is a library call, perhaps in loops, without stores."""
    return any(isinstance(s, CallLibrary) for s in walk_stmts(stmt)) and not any(stores(stmt))


def _is_worth_a_task(body: Stmt) -> bool:
    """Whether an iteration is large enough for a loop collapsed with division of the index: it allocates a buffer that
    is not a scalar."""
    return isinstance(body, Allocate) and bool(body.buffer.shape)


def _with_kind(stmt: Stmt, var: SymVar, kind: str) -> Stmt:
    assert isinstance(stmt, For)
    return replace(stmt, kind=kind)  # type: ignore[arg-type]
