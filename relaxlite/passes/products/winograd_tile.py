"""Register tiles of sums of several products per step: Winograd's inner product (winograd_loops.py)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.intrinsics import DOT2_PACKED_INT16
from relaxlite.ir.program import Allocate, Binary, Buffer, For, Intrinsic, Load, Seq, Stmt, Store, Unary, Value, seq
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymExpr, product
from relaxlite.passes.loops.pattern import perfect_nest
from relaxlite.passes.loops.transforms import less, nest, select_version
from relaxlite.passes.products.choice import ScheduleChoice
from relaxlite.passes.products.panel_prefetch import PanelPrefetch
from relaxlite.passes.products.prepared_rows import ROW_UNIT
from relaxlite.passes.products.reduction import Block, RowShape, panel_widths, tiled
from relaxlite.passes.products.winograd_loops import MIN_ROWS
from relaxlite.records import dataclass
from relaxlite.target import Target

ORDINARY_ROWS = 4  # of tiles of the fallback, the ordinary product, which computes few rows: less code
STEPS_AHEAD = 32  # prefetch distance within a tile's own panel of weights
FEW_ROWS, FEW_VECTORS = 2, 4  # of tiles of prepared rows too few for sums one vector wide to hide latencies

_ANALYZER = Analyzer()


@dataclass(frozen=True, slots=True)
class InnerTile:
    """The shape of a register tile of Winograd's inner product.

    It leaves registers for three vectors of weights, or two times three, and for sums of operands.
    """

    rows: int
    vectors: int
    row_unit: int  # heights are multiples of this: three heights to compile, where 1 would take 11 or 5
    prefetches_next: (
        bool  # whether tiles prefetch the next panel, where two fit into 5/8 of the L2 cache; else steps of their own
    )
    together: int | None = None  # products of a step that all elements add before they add the next; None: all

    @classmethod
    def of(cls, target: Target) -> InnerTile:
        """Return the shape for a target.

        One vector where two loads issue for each FMA and addition: an element of x is then a memory operand, as a
        broadcast to a register would take an entry of the adders' and multipliers' queues. Else two vectors, which
        share the register of an element of x; all rows then add the first pair and its neighbour before the second,
        so that half of the weights occupy registers at a time. Figures: docs/measurements/cpus.md, winograd_tile.
        """
        if target.cpu_facts.loads_per_fma > 1:
            return cls(20, 1, ROW_UNIT, prefetches_next=False)
        return cls(10, 2, ROW_UNIT // 2, prefetches_next=True, together=2)

    def asks(self, weights: Buffer, target: Target) -> PanelPrefetch:
        """Return how tiles prefetch panels of the weights."""
        panel_bytes = int(weights.shape[0]) * self.vectors * target.vector_bits // 8
        if self.prefetches_next and 2 * panel_bytes <= target.l2_bytes * 5 // 8:
            return PanelPrefetch(0, for_next=True)
        return PanelPrefetch(STEPS_AHEAD, for_next=False, cache=2)


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """Return how many row blocks run along a panel before the next panel, so that their elements stay in the L2 cache.

    1 where the weights fit into the L2 cache; None, all row blocks, where the weights come from memory.
    """
    weight_bytes, block_bytes = product(weights.shape).const * 4, InnerTile.of(target).rows * int(weights.shape[0]) * 4
    if weight_bytes > target.l3_bytes // 2:
        return None
    return 1 if weight_bytes <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block_bytes)


def chained_terms(block: Block, target: Target) -> Allocate | None:
    """Rewrite a sum of several products per step as a chain of FMAs or dot products; None: it is no such sum."""
    update, init, reduced, *final = block.update, *block.stmts
    terms = _terms(update.value)
    if block.is_pair or update.combine != "add" or len(terms) < 2:
        return None
    together = InnerTile.of(target).together or len(terms)
    chain: list[Stmt] = []
    for start in range(0, len(terms), together):
        total: Value = Load(update.buffer, update.indices)
        for is_added, term in terms[start : start + together]:
            if isinstance(term, Intrinsic) and term.name == DOT2_PACKED_INT16 and is_added:
                total = replace(term, args=(total, *term.args[1:]))
                continue
            if not isinstance(term, Binary) or term.op != "mul":
                return None
            factor = term.a if is_added else Unary("neg", term.a)
            total = Intrinsic("fma", (factor, term.b, total), update.buffer.dtype)
        chain.append(Store(update.buffer, update.indices, total))
    chained = nest(perfect_nest(reduced).loops, seq(*chain))
    return replace(block.body, body=_Simplify().stmt(Seq((init, chained, *final))))


def tiled_inner(
    block: Block,
    column: For,
    body: Allocate,
    lanes: int,
    target: Target,
    *,
    inputs: Collection[Buffer],
    least: int,
    most: int | None,
) -> tuple[Stmt, dict[Buffer, int]]:
    """Return the tiles of `body`, the result of `chained_terms`, and the widths of the panels of operands.

    `inputs`: of the program. `least`: minimum number of prepared rows. `most`: maximum rows of a tile of other rows.
    """
    registers, tile = target.num_vector_registers, InnerTile.of(target)
    (weights,) = {load.buffer for load in block.loads() if load.indices[-1] is column.var}
    is_prepared = {load.buffer for load in block.loads()} & set(inputs) <= {weights}
    choice = ScheduleChoice(rows=tile.rows if is_prepared else most, vectors=tile.vectors)
    prefetch, blocks_per_group = tile.asks(weights, target), blocks_together(weights, target)
    panels = panel_widths(block, column, lanes, registers, choice)
    has_all_rows = len(block.spatial) == 2  # else rows of one image, of which there may be few
    min_rows = least if is_prepared and has_all_rows else 1
    rows = RowShape(min(min_rows, MIN_ROWS), tile.row_unit if is_prepared else 1, blocks_per_group)
    many_rows = tiled(block, column, lanes, registers, body, choice, asks=prefetch, shape=rows)
    row = block.row_loop(column)
    if not is_prepared or min_rows > FEW_ROWS or row is None:
        return many_rows, panels
    few_rows = tiled(block, column, lanes, registers, body, ScheduleChoice(rows=FEW_ROWS, vectors=FEW_VECTORS))
    return select_version(less(row.extent, FEW_ROWS + 1), few_rows, many_rows), panels


def _terms(value: Value) -> list[tuple[bool, Value]]:
    """Return the terms of a sum, each with whether it is added or subtracted."""
    if not isinstance(value, Binary) or value.op not in ("add", "sub"):
        return [(True, value)]
    return [*_terms(value.a), (value.op == "add", value.b)]


class _Simplify(ProgramRewriter):
    """Simplifies indices of fused loops: t // m * m + t % m becomes t."""

    def index(self, expr: SymExpr) -> SymExpr:
        return _ANALYZER.simplify(expr)
