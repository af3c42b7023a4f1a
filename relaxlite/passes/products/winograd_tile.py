"""Tiles of sums of several products per step, as Winograd's inner product is (winograd_loops.py)."""

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

ORDINARY_ROWS = 4  # of tiles of the ordinary product beside it, which has few rows to compute: less code
STEPS_AHEAD = 32  # that tiles ask for their own panel of weights
FEW_ROWS, FEW_VECTORS = 2, 4  # of tiles of prepared rows that are too few for sums one vector wide to hide latencies

_ANALYZER = Analyzer()


@dataclass(frozen=True, slots=True)
class InnerTile:
    """The shape of a tile of results: it leaves registers for three vectors of weights, or two times three, and for
    sums of operands."""

    rows: int
    vectors: int
    row_unit: int  # heights are multiples of this, three of them: 1 would take 11 or 5, and more time to compile
    prefetches_next: (
        bool  # panel of weights, where two lie in 5/8 of the second cache; else some steps ahead for its own
    )
    together: int | None = None  # products of a step that all elements add before they add the next; None: all

    @classmethod
    def of(cls, target: Target) -> InnerTile:
        """Of one vector, where a step's two loads for each multiply-add and addition come in time: an element of x is
        then one operand in memory, for a register for it would take a place in the queues of adders and multipliers.
        Else of two vectors, which share the register of an element; for half of the weights to do at a time, all rows
        add the first pair and its neighbour before the second. Figures: docs/measurements/cpus.md, winograd_tile."""
        if target.cpu_facts.loads_per_fma > 1:
            return cls(20, 1, ROW_UNIT, prefetches_next=False)
        return cls(10, 2, ROW_UNIT // 2, prefetches_next=True, together=2)

    def asks(self, weights: Buffer, target: Target) -> PanelPrefetch:
        panel = int(weights.shape[0]) * self.vectors * target.vector_bits // 8
        if self.prefetches_next and 2 * panel <= target.l2_bytes * 5 // 8:
            return PanelPrefetch(0, for_next=True)
        return PanelPrefetch(STEPS_AHEAD, for_next=False, cache=2)


def blocks_together(weights: Buffer, target: Target) -> int | None:
    """How many row blocks go along a panel before the next, for their elements to stay in the second cache: one where
    the weights stay there themselves, all where they come from memory."""
    size, block = product(weights.shape).const * 4, InnerTile.of(target).rows * int(weights.shape[0]) * 4
    if size > target.l3_bytes // 2:
        return None
    return 1 if size <= target.l2_bytes // 2 else max(2, target.l2_bytes // 4 // block)


def chained_terms(block: Block, target: Target) -> Allocate | None:
    """The block of a sum of several products per step, each added by a multiply-add of its own; None: it is none."""
    update, init, reduced, *final = block.update, *block.stmts
    terms = _terms(update.value)
    if block.is_pair or update.combine != "add" or len(terms) < 2:
        return None
    together = InnerTile.of(target).together or len(terms)
    added: list[Stmt] = []
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
        added.append(Store(update.buffer, update.indices, total))
    chained = nest(perfect_nest(reduced).loops, seq(*added))
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
    """The tiles of `body`, which `chained_terms` made of the block, and how wide panels of operands are. `inputs`: of
    the program. `least`: how many rows there are at least where they were prepared; `most`: of a tile of others."""
    registers, tile = target.num_vector_registers, InnerTile.of(target)
    (weights,) = {load.buffer for load in block.loads() if load.indices[-1] is column.var}
    is_prepared = {load.buffer for load in block.loads()} & set(inputs) <= {weights}
    choice = ScheduleChoice(rows=tile.rows if is_prepared else most, vectors=tile.vectors)
    asks, together = tile.asks(weights, target), blocks_together(weights, target)
    panels = panel_widths(block, column, lanes, registers, choice)
    has_all_rows = len(block.spatial) == 2  # else the rows of one picture, for one, of which there may be few
    some = least if is_prepared and has_all_rows else 1
    rows = RowShape(min(some, MIN_ROWS), tile.row_unit if is_prepared else 1, together)
    usual = tiled(block, column, lanes, registers, body, choice, asks=asks, shape=rows)
    row = block.row_loop(column)
    if not is_prepared or some > FEW_ROWS or row is None:
        return usual, panels
    few = tiled(block, column, lanes, registers, body, ScheduleChoice(rows=FEW_ROWS, vectors=FEW_VECTORS))
    return select_version(less(row.extent, FEW_ROWS + 1), few, usual), panels


def _terms(value: Value) -> list[tuple[bool, Value]]:
    """Those of a sum, and whether each is added."""
    if not isinstance(value, Binary) or value.op not in ("add", "sub"):
        return [(True, value)]
    return [*_terms(value.a), (value.op == "add", value.b)]


class _Simplify(ProgramRewriter):
    """Indices t // m * m + t % m, as fused loops leave them, become t."""

    def index(self, expr: SymExpr) -> SymExpr:
        return _ANALYZER.simplify(expr)
