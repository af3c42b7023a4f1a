"""Scheduling of reductions: which form a block's loops have, and which strategies its contraction gets.

`ReductionScheduler.reduction` fixes the order of decisions. Each form is matched once; strategy_table.py determines
which of its strategies are taken, and why others are refused. The notes of a schedule record both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from relaxlite import dtypes
from relaxlite.ir.attributes import (
    IN_ORDER,
    INHERITS_LAYOUT,
    MIN_PREPARED_ROWS,
    PANELS,
    PREFETCH_BYTES,
    ROW_GROUPS,
    STACKED,
)
from relaxlite.ir.expr import AttrValue
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import Allocate, Buffer, For, IfThenElse, Load, Stmt, Store, TensorProgram, Value, seq
from relaxlite.ir.program_visitor import all_values, stores, walk_stmts, walk_values
from relaxlite.ir.symbolic import as_int
from relaxlite.passes.loops.parallel import collapse_parallel, is_contiguous, make_serial
from relaxlite.passes.loops.transforms import nest, split_reduction
from relaxlite.passes.products.block_terms import find_sums
from relaxlite.passes.products.blocks import (
    BlockPlan,
    BlockProduct,
    ManyRows,
    ManyRowsPlan,
    block_product,
    tiled_blocks,
)
from relaxlite.passes.products.blocks_grouped import Groups, tiled_groups
from relaxlite.passes.products.choice import ONE_SUM, ScheduleChoice
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.convolution import FilterTile, filter_tile, tiled_filters
from relaxlite.passes.products.dots import Dots, amx_dots, dot_products
from relaxlite.passes.products.panel_prefetch import PanelPrefetch, steps_of, width_that_fits
from relaxlite.passes.products.reduction import (
    ReductionBlock,
    panel_width,
    panel_widths,
    prefetch_distances,
    prologues_of,
    reduction_block,
    tile_size,
    tiled,
)
from relaxlite.passes.products.strategy import Candidate, Strategy, allowed_of, candidates, chosen
from relaxlite.passes.products.strategy_table import (
    BLOCKED_DP4A,
    BLOCKED_GEMV,
    CONVOLUTION,
    DEQUANTIZED_FMA,
    DOTS,
    DOTS_AMX_BF16,
    DOTS_AMX_INT8,
    FMA,
    TABLE,
    TRANSPOSED_FMA,
    WINDOW_NCHW,
    WINDOW_NHWC,
    WINOGRAD_FLOAT32,
    WINOGRAD_INT16,
)
from relaxlite.passes.products.transposed import find_transposed, tiled_transposed
from relaxlite.passes.products.windows import nchw_tile_of, nhwc_tile_of, tiled_nchw, tiled_nhwc
from relaxlite.passes.products.winograd_tile import InnerTile, chained_terms, find_widened, tiled_inner
from relaxlite.passes.schedule.primitives.trace import Step
from relaxlite.records import dataclass
from relaxlite.target import Target

ENOUGH_WORK = 2**18  # minimum elements of a reduction inside a serial loop for threads to share them
PARTIAL_SUMS = 4  # vectors of partial results of a reduction along its contiguous loop
MIN_VECTORS = 3  # of a tile narrowed to fit the cache: 8 rows then hide latencies


@dataclass(frozen=True, slots=True)
class OperandLayouts:
    """The memory layouts and prefetch distances that a schedule requires of operands: attributes of the same names."""

    panels: dict[Buffer, int] = field(default_factory=dict)
    row_groups: dict[Buffer, int] = field(default_factory=dict)
    stacked: set[Buffer] = field(default_factory=set)
    prefetch_bytes: dict[Buffer, int] = field(default_factory=dict)
    in_order: set[Buffer] = field(default_factory=set)

    def attrs(self, inputs: Sequence[Buffer]) -> dict[str, AttrValue]:
        """Return the attributes of a program with these inputs."""

        def pairs(of: dict[Buffer, int]) -> tuple[tuple[int, int], ...]:
            return tuple((k, of[b]) for k, b in enumerate(inputs) if b in of)

        def numbers(of: set[Buffer]) -> tuple[int, ...]:
            return tuple(k for k, b in enumerate(inputs) if b in of)

        attributes: dict[str, AttrValue] = {
            PANELS: pairs(self.panels),
            ROW_GROUPS: pairs(self.row_groups),
            STACKED: numbers(self.stacked),
            PREFETCH_BYTES: pairs(self.prefetch_bytes),
            IN_ORDER: numbers(self.in_order),
        }
        return {name: value for name, value in attributes.items() if value}


def lanes_of(stmt: Stmt, target: Target) -> int:
    """Return the vector lanes for the widest element type that the statement computes with."""
    widths = [dtypes.itemsize(v.dtype) for v in all_values(stmt)]
    widths += [dtypes.itemsize(s.buffer.dtype) for s in stores(stmt)]
    widest = max((w for w in widths if w < 8), default=8)  # 64-bit indices beside float32 data do not halve it
    return max(1, target.vector_bits // 8 // widest)


@dataclass(frozen=True, slots=True)
class ReductionScheduler:
    """Schedules the reductions of one program.

    `steps`: notes of the schedule. `packs`: whether constants may be packed for tiles.
    """

    program: TensorProgram
    target: Target
    given: ScheduleChoice
    choice: ScheduleChoice  # `given`, or with less code where few rows ever run it
    layouts: OperandLayouts
    steps: list[Step]
    packs: bool = True

    def reduction(self, block: ReductionBlock, *, packs: bool = True) -> Stmt:
        """Lower a block by the strategies of the first form that its loops match."""
        rules = self if packs else replace(self, packs=False)
        fused = block.fused()
        code = (
            rules._windows(block)
            or rules._blocked(fused)
            or rules._convolution(block, fused)
            or rules._winograd(fused)
            or rules._matmul(fused)
        )
        return rules._along_the_depth(fused) if code is None else code

    # Notes

    def note(self, name: str, *args: str | int, **options: AttrValue) -> None:
        """Record a step of the schedule."""
        self.steps.append(Step(name, args, tuple(options.items())))

    def _take(self, strategy: Strategy, rows: int | None = None) -> None:
        self.note("strategy", strategy.name, rows=strategy.min_rows if rows is None else rows)

    def _refuse(self, name: str, reason: str) -> None:
        self.note("refuse", name, reason=reason)

    def _candidates(self, contraction: Contraction | None) -> tuple[Candidate, ...]:
        """Return the candidates of the table for a contraction, and note the refused ones; none for no contraction."""
        found = (
            () if contraction is None else candidates(TABLE, contraction, self.target, preferred=self.given.strategy)
        )
        for candidate in found:
            if candidate.refusal is not None:
                self._refuse(candidate.strategy.name, candidate.refusal)
        return found

    def _lanes(self, stmt: Stmt) -> int:
        return lanes_of(stmt, self.target)

    @property
    def partial_sums(self) -> int:
        return self.choice.partial_sums or PARTIAL_SUMS

    # Windows

    def _windows(self, block: ReductionBlock) -> Stmt | None:
        """Lower a depthwise convolution or pooling; None: the block is neither."""
        lanes = self._lanes(block.body)
        nhwc = nhwc_tile_of(block, lanes)
        if nhwc is not None:
            self._take(WINDOW_NHWC)
            self.note("window_tile", nhwc.along.var.name, lanes=lanes)
            return tiled_nhwc(nhwc)
        nchw = nchw_tile_of(block, lanes)
        if nchw is None:
            return None
        self._take(WINDOW_NCHW)
        self.note("nchw_tile", nchw.along.var.name, rows=nchw.height, lanes=lanes)
        return tiled_nchw(nchw)

    # Blocked weights

    def _blocked(self, block: ReductionBlock) -> Stmt | None:
        lanes = self._lanes(block.body)
        product = block_product(block, lanes, self.target) if lanes > 1 else None
        if product is None:
            return None
        column = product.column.var.name
        self.note("block_tile", column, vectors=product.vectors, alone=product.alone, lanes=lanes)
        return tiled_blocks(product, lanes, self._block_plan(product, lanes))

    def grouped(self, groups: Groups) -> Stmt | None:
        """Lower a grouped product with blocked weights; None: it is another product."""
        block, lanes = reduction_block(groups.nest), self._lanes(groups.nest)
        product = block_product(block, lanes, self.target) if block is not None and lanes > 1 else None
        if product is None or product.row is None:
            return None
        if self.packs:
            self.layouts.stacked.update(product.panels)
        column = product.column.var.name
        self.note("grouped_tile", column, vectors=product.vectors, alone=product.alone, lanes=lanes)
        return tiled_groups(groups, product, lanes, self._block_plan(product, lanes))

    def _block_plan(self, product: BlockProduct, lanes: int) -> BlockPlan:
        """Choose the strategies of a product with blocked weights, and the packing of the weights.

        Weights lie in panels where `packs`, read in order where nothing prefetches them.
        """
        prefetch = self.target.cpu_facts.block_prefetch_plan
        if self.packs:
            self.layouts.panels.update(dict.fromkeys(product.panels, product.panel * lanes))
            self.layouts.in_order.update(() if prefetch.gemv_bytes else product.panels)
        else:
            prefetch = replace(prefetch, gemv_bytes=0, gemm_bytes=0)
        options = self._candidates(self._blocked_contraction(product))
        tile = next((strategy for strategy in chosen(options) if strategy.tile is not None), BLOCKED_DP4A)
        assert tile.tile is not None

        def many_rows(tiles: ManyRows, vectors: int) -> ManyRowsPlan | None:
            for strategy in allowed_of(options):
                plan = None if strategy.many_rows is None else strategy.many_rows(tiles, vectors, self.target)
                if isinstance(plan, ManyRowsPlan):
                    self._take(strategy)
                    return plan
                if isinstance(plan, str):
                    self._refuse(strategy.name, plan)
            return None

        self._take(BLOCKED_GEMV)
        if product.row is not None:
            self._take(tile)
        return BlockPlan(prefetch, tile.tile, many_rows)

    def _blocked_contraction(self, product: BlockProduct) -> Contraction:
        row, column = product.row, product.column
        sums = find_sums(product.block.update.value)
        x = Encoding("blocked", 8 + (sums.shift if sums is not None else 0))
        w = Encoding("blocked", 8 if sums is None else sums.sums[-1].greatest.bit_length())
        contraction = Contraction.of_loops(product.block, "matmul", row, column, x, w)
        return replace(contraction, rows=None)  # variants for all numbers of rows stand in one program

    # Convolutions

    def _convolution(self, unfused: ReductionBlock, block: ReductionBlock) -> Stmt | None:
        lanes, registers = self._lanes(block.body), self.target.num_vector_registers
        tile = None if block.is_pair else filter_tile(block, lanes, registers, self.choice)
        if tile is None:
            return None
        contraction = Contraction.of_block(tile.block, "convolution", tile.row, tile.column)
        allowed = allowed_of(self._candidates(contraction))
        of_dots = self._dots_of_filters(unfused, lanes, registers, allowed) if self.packs else None
        tile, dots = (tile, None) if of_dots is None else of_dots
        if self.packs:
            self.layouts.panels.update(tile.panels)
        sizes = {"rows": tile.most_rows, "vectors": tile.vectors, "lanes": lanes}
        if contraction is not None:
            self._take(CONVOLUTION if dots is None else DOTS[dots.name])
        self.note("filter_tile", tile.column.var.name, row=tile.row.var.name, **sizes)
        code = tiled_filters(tile, self.choice)
        if dots is None:
            return code
        self.layouts.panels[tile.filters] = tile.width
        self._group(dots)
        flat = unfused.fused(reduced=False)
        return self._or_amx(flat, flat.spatial[-1], lanes, tile.width, code, allowed)

    def _dots_of_filters(
        self, block: ReductionBlock, lanes: int, registers: int, allowed: Sequence[Strategy]
    ) -> tuple[FilterTile, Dots] | None:
        """Match a tile that sums channels by dot products; the loop over channels is not fused with those over the
        kernel."""
        tile = filter_tile(block.fused(reduced=False), lanes, registers, self.choice)
        dots = None if tile is None else dot_products(tile.block, tile.column, lambda name: DOTS[name] in allowed)
        if tile is None or dots is None:
            return None
        return replace(tile, block=replace(tile.block, body=dots.body)), dots

    # Winograd's inner product

    def _winograd(self, block: ReductionBlock) -> Stmt | None:
        """Lower a sum of several products per step, as winograd_products.py and int16_products.py build; None: no
        match."""
        lanes = self._lanes(block.body)
        column = block.vector_loop() if lanes > 1 else None
        body = chained_terms(block, self.target) if self.program.attrs.get(MIN_PREPARED_ROWS) else None
        if column is None or body is None:
            return None
        tile, min_rows = InnerTile.of(self.target), self._min_prepared_rows
        self._take(self._winograd_strategy(body), min_rows)
        self.note("inner_product_tile", column.var.name, rows=tile.rows, vectors=tile.vectors, lanes=lanes)
        inputs, most = self.program.inputs, self.choice.rows
        code, panels = tiled_inner(block, column, body, lanes, self.target, inputs=inputs, least=min_rows, most=most)
        self.layouts.panels.update(panels)
        return code

    def widened(self, stmt: Allocate) -> Stmt | None:
        """Lower Winograd's inner product after stages that dequantize its weights; None: no match."""
        product, tile = find_widened(stmt, self.target), InnerTile.of(self.target)
        if product is None:
            return None
        column, lanes = product.column.var.name, self._lanes(product.body)
        self.layouts.panels.update(dict.fromkeys(product.stored, tile.vectors * lanes))
        self._take(self._winograd_strategy(product.body), self._min_prepared_rows)
        self.note("widened_inner_product_tile", column, rows=tile.rows, vectors=tile.vectors, lanes=lanes)
        is_packed = not self.program.attrs.get(INHERITS_LAYOUT)
        return product.tiled(tile, lanes, self._min_prepared_rows, is_packed=is_packed)

    @staticmethod
    def _winograd_strategy(body: Allocate) -> Strategy:
        return WINOGRAD_INT16 if body.buffer.dtype == "int32" else WINOGRAD_FLOAT32

    @property
    def _min_prepared_rows(self) -> int:
        rows: Any = self.program.attrs[MIN_PREPARED_ROWS]
        return int(rows)

    # Matrix products

    def _matmul(self, block: ReductionBlock) -> Stmt | None:
        """Lower a block to register tiles whose vectors lie along the columns; None: no loop fits vectors.

        The tiles are of dot products, of weights with a prologue, or of FMAs.
        """
        lanes, registers = self._lanes(block.body), self.target.num_vector_registers
        column = block.vector_loop() if lanes > 1 else None
        if column is None:
            return None
        contraction = Contraction.of_block(block, "matmul", block.row_loop(column), column)
        allowed = allowed_of(self._candidates(contraction))
        dots = dot_products(block, column, lambda name: DOTS[name] in allowed) if self.packs else None
        prologues = prologues_of(block, column) if dots is None else ()
        strategy = DOTS[dots.name] if dots is not None else DEQUANTIZED_FMA if prologues else FMA
        hides = self.target.cpu_facts.hides_conversions
        choice, prefetch = self._tile_choice(block, column, lanes, strategy)
        if self.packs:
            for operand, width in panel_widths(block, column, lanes, registers, choice).items():
                self.layouts.panels.setdefault(operand, width)  # a variant before this one may have chosen
        row, rows, vectors = tile_size(block, column, lanes, registers, choice)
        if contraction is not None:
            self._take(strategy)
        if dots is not None:
            width = panel_width(block, column, lanes, registers, choice)
            self.layouts.panels.update(dict.fromkeys(dots.operands, width))
            self._group(dots)
        down = None if row is None else row.var.name
        self.note("register_tile", column.var.name, row=down, rows=rows, vectors=vectors, lanes=lanes)
        for prologue in prologues:
            rest = "stream" if row is None or (prologue.is_cheap and hides) else "stage"
            self.note("prologue", prologue.loop.var.name, few_rows="stream", more_rows=rest)
            self._prefetch_operand(prologue.operand)
        body = None if dots is None else dots.body
        code = tiled(block, column, lanes, registers, body, choice, hides_conversions=hides, asks=prefetch)
        if dots is None:
            return code
        return self._or_amx(block, column, lanes, panel_width(block, column, lanes, registers, choice), code, allowed)

    def _tile_choice(
        self, block: ReductionBlock, column: For, lanes: int, strategy: Strategy
    ) -> tuple[ScheduleChoice, PanelPrefetch | None]:
        """Return the sizes of register tiles, and how they prefetch panels of weights."""
        choice, prefetch = self.given if strategy is DEQUANTIZED_FMA else self.choice, None
        has_few_rows = bool(self.program.attrs.get(MIN_PREPARED_ROWS))  # too few to prefetch for
        if self.packs and strategy is FMA and not has_few_rows:
            choice, prefetch = self._panel_prefetch(block, column, lanes)
        if self._is_counted_by_data(block, column):
            choice = replace(choice, sums=ONE_SUM)
            steps = steps_of(block.stmts[1], column.var, self.target.cpu_facts.page_prefetch_bytes)
            prefetch = PanelPrefetch(steps, for_next=False, cache=2) if steps else None
        return choice, prefetch

    def _is_counted_by_data(self, block: ReductionBlock, column: For) -> bool:
        """Whether data, not symbols of the program, determine the number of rows, as in attention over pages.

        A row is then computed alone or beside others. Each element must be one sum, in the order of its terms, so that
        results are bit-identical.
        """
        row = block.row_loop(column)
        return row is not None and not set(row.extent.free_vars()) <= set(self.program.symbols)

    def _panel_prefetch(
        self, block: ReductionBlock, column: For, lanes: int
    ) -> tuple[ScheduleChoice, PanelPrefetch | None]:
        """Choose tiles of the usual width, or narrower where two panels then fit into L2, and their prefetches.

        Where no width fits, tiles do not prefetch the next panel.
        """
        registers = self.target.num_vector_registers
        if block.is_pair or not panel_widths(block, column, lanes, registers, self.choice):
            return self.choice, None
        usual = panel_width(block, column, lanes, registers, self.choice)
        widths = [usual, *([] if self.choice.vectors else range(usual - lanes, MIN_VECTORS * lanes - 1, -lanes))]
        width = width_that_fits(block.stmts[1], column.var, widths, self.target.l2_bytes)
        choice = self.choice if width is None else replace(self.choice, vectors=width // lanes)
        prefetch = PanelPrefetch(self.target.cpu_facts.panel_prefetch_steps, width is not None)
        return choice, prefetch if prefetch.ahead or prefetch.for_next else None

    def _prefetch_operand(self, operand: Value) -> None:
        """Prefetch integer weights of a prologue, at the target's distance.

        Half-precision weights load at full speed without prefetch, as there is less work between their loads.
        """
        read = dict.fromkeys(v.buffer for v in walk_values(operand) if isinstance(v, Load))
        panels = self.layouts.panels
        if any(b.dtype in dtypes.INTEGERS and b in panels for b in read):
            distance = self.target.cpu_facts.weight_prefetch_bytes
            self.layouts.prefetch_bytes.update(prefetch_distances((b for b in read if b in panels), distance))

    # Dot products

    def _group(self, dots: Dots) -> None:
        for operand in dots.operands:
            self.layouts.row_groups[operand] = dots.group
            self.note("dot_products", operand.name, length=dots.group)

    def _or_amx(
        self, block: ReductionBlock, column: For, lanes: int, width: int, code: Stmt, allowed: Sequence[Strategy]
    ) -> Stmt:
        """Return code that selects AMX tiles from 16 rows on, and `code`, the dot products of the block, below."""
        strategy = next((s for s in allowed if s in (DOTS_AMX_BF16, DOTS_AMX_INT8)), None)
        if strategy is None:
            return code
        tiles = amx_dots(block, column, lanes, width, self.target)
        if tiles is None:
            self._refuse(strategy.name, "its loops do not fit AMX tiles")
            return code
        self._take(strategy)
        self.note("amx_tile", column.var.name)
        return IfThenElse(*tiles, code)

    # Sums along the depth

    def _along_the_depth(self, block: ReductionBlock) -> Stmt:
        """Lower a sum whose operands are contiguous along the depth: partial sums in lanes, or transposed panels."""
        lanes, registers = self._lanes(block.body), self.target.num_vector_registers
        body = self._lanes_of_reduced(block, lanes) if lanes > 1 else block.body
        code = collapse_parallel(block.spatial, body)
        operand = find_transposed(block) if lanes > 1 and not block.is_pair else None
        if operand is None:
            return code
        self._take(TRANSPOSED_FMA)
        self.note("transposed_panels", operand.column.var.name, row=operand.row.var.name, lanes=lanes)
        return tiled_transposed(block, operand, lanes, registers, code, self.choice)

    def _lanes_of_reduced(self, block: ReductionBlock, lanes: int) -> Allocate:
        """Split the innermost reduced loop into partial results in vector lanes, if it is contiguous."""

        def rewrite(stmt: Stmt) -> Stmt:
            if not isinstance(stmt, For):
                return stmt
            if isinstance(stmt.body, Store):
                store = stmt.body
                if store.combine is None or not is_contiguous(stmt):
                    return stmt
                self.note("split_reduction", stmt.var.name, lanes, self.partial_sums)
                return split_reduction(stmt, lanes, self.partial_sums, identity(store.combine, store.buffer.dtype))
            return replace(stmt, body=rewrite(stmt.body))

        return replace(block.body, body=seq(*(rewrite(s) for s in block.stmts)))

    def step_reduction(self, block: ReductionBlock, *, unknown: int) -> Stmt:
        """Lower a reduction inside a stage that may run many times: it is parallel only where each run pays for
        threads.

        Loops of unknown extent count as `unknown` steps. Operands are not packed, as other reductions of the stage may
        read other parts of them.
        """
        tiles = self.reduction(block, packs=False)
        sizes = [as_int(s.extent) for s in walk_stmts(nest(block.spatial, block.body)) if isinstance(s, For)]
        work = math.prod(unknown if size is None else size for size in sizes)
        return tiles if work >= ENOUGH_WORK else make_serial(tiles)
