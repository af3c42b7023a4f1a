"""Winograd's F(2x2, 3x3) for dense 3x3 convolutions of stride 1 with constant filters, channels last.

Four neighbouring outputs come from a 4x4 patch of x by 16 products per channel where the direct sum takes 36:

    V = Bt d B   for each patch d and channel          (16 numbers)
    M = V * U    summed over channels, U = G g Gt       (16 matrix products; U is computed at compile time)
    Y = At M A   and the epilogue                       (2x2 outputs)

(Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.) All three steps run for one block of
patches after another, so that V and M stay in the cache. The error stays near that of the direct sum, unlike that of
the larger F(4x4, 3x3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relaxlite.ir.attributes import IN_PLACE, SCHEDULED
from relaxlite.ir.expr import Attrs, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Check,
    For,
    IfThenElse,
    Literal,
    Load,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import ReplaceLoads, Substitute
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, smin, sym
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.in_place import in_place_pairs
from relaxlite.passes.loops.pattern import perfect_nest, top_stages
from relaxlite.passes.loops.transforms import less
from relaxlite.passes.loops.versioning import clamped_indices
from relaxlite.passes.products.convolution import FilterTile, Piece, column_vectors, tile_of
from relaxlite.passes.products.reduction import ReductionBlock, reduction_block
from relaxlite.records import dataclass
from relaxlite.target import Target

ENOUGH_CHANNELS = 16  # minimum of x and of the result; with fewer, the transforms cost what the products save
PATCHES = 12  # maximum in a block: two tiles of six rows
POINTS = 16
ROW_HEIGHTS = (6, 3, 2, 1)  # of register tiles

# B transposed: a row of V from rows of the patch; A transposed: a row of Y from rows of M; G: of U from those of g.
INPUT = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
OUTPUT = ((1, 1, 1, 0), (0, 1, -1, -1))
FILTER = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))


def winograd(module: IRModule, context: PassContext) -> IRModule:
    """Compute 3x3 convolutions of stride 1 by Winograd's F(2x2, 3x3)."""
    programs = module.programs().items()
    convolutions = {name: convolution for name, p in programs if (convolution := _find(p, context.target)) is not None}
    for call in program_calls(module):
        if call.callee.name in convolutions and not isinstance(
            call.args[convolutions[call.callee.name].operand], Constant
        ):
            del convolutions[call.callee.name]
    definitions: dict[str, Definition] = {name: conv.program() for name, conv in convolutions.items()}
    for name, function in module.functions().items():
        definitions[name] = _Transform(convolutions).function(function)
    return module.updated(definitions)


def _find(program: TensorProgram, target: Target) -> _Conv | None:
    """Match a program of one loop nest as a 3x3 convolution of stride 1; None: no match."""
    stages, lanes = top_stages(program), target.vector_lanes(4)
    nests = [s for s in stages if not isinstance(s, Check)]
    if len(nests) != 1 or lanes < 4 or program.attrs.get(SCHEDULED) or clamped_indices(nests[0]):
        return None
    block = reduction_block(nests[0])
    if block is None or len(block.spatial) != 4 or len(perfect_nest(block.stmts[1]).loops) != 3:
        return None
    value = block.update.value
    if not isinstance(value, Binary) or value.op != "mul" or block.update.combine != "add":
        return None
    x, w = value.a, value.b
    if not isinstance(x, Load) or not isinstance(w, Load) or {x.dtype, w.dtype, value.dtype} != {"float32"}:
        return None
    if any(as_int(loop.extent) == 0 for loop in block.spatial):  # nothing to compute
        return None
    n, h, v, c = (loop.var for loop in block.spatial)
    kh, kw, ic = (loop.var for loop in perfect_nest(block.stmts[1]).loops)
    shape = tuple(as_int(d) for d in w.buffer.shape)
    if w.indices != (kh, kw, ic, c) or shape[:2] != (3, 3) or x.indices != (n, h + kh, v + kw, ic):
        return None
    if w.buffer not in program.inputs or (shape[2] or 0) < ENOUGH_CHANNELS or (shape[3] or 0) < ENOUGH_CHANNELS:
        return None
    return _Conv(program, stages, nests[0], block, x, w, lanes, target.num_vector_registers)


@dataclass(frozen=True, slots=True, eq=False)
class _Conv:
    """A 3x3 convolution of stride 1 that is the program `whole`, and its rewriting."""

    whole: TensorProgram
    stages: tuple[Stmt, ...]
    stage: Stmt
    block: ReductionBlock
    x: Load
    w: Load
    lanes: int
    registers: int

    @property
    def operand(self) -> int:
        """Position of the filters among the inputs."""
        return self.whole.inputs.index(self.w.buffer)

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of x and of the result."""
        return int(self.w.buffer.shape[2]), int(self.w.buffer.shape[3])

    @property
    def vectors(self) -> int:
        return column_vectors(-(-self.channels[1] // self.lanes), self.registers)

    @property
    def width(self) -> int:
        return self.vectors * self.lanes

    def filters(self, w: Constant) -> Constant:
        """Transform filters (3, 3, c, oc) to U, as panels (oc / width, 16, c, width), padded with zeros."""
        g = np.asarray(FILTER)
        inner, outer = self.channels
        u = np.einsum("pi,qj,ijco->pqco", g, g, w.value.astype(np.float64)).reshape(POINTS, inner, outer)
        panels = -(-outer // self.width)
        padded = np.zeros((POINTS, inner, panels * self.width), np.float32)
        padded[..., :outer] = u
        split = padded.reshape(POINTS, inner, panels, self.width)
        return Constant.of(np.ascontiguousarray(np.moveaxis(split, 2, 0)), name=w.name)

    def program(self) -> TensorProgram:
        inner, outer = self.channels
        panels = -(-outer // self.width)
        u = Buffer(f"{self.w.buffer.name}_points", (sym(panels), sym(POINTS), sym(inner), sym(self.width)), "float32")
        params = tuple(u if p is self.w.buffer else p for p in self.whole.params)
        body = seq(*(self._blocks(u) if s is self.stage else s for s in self.stages))
        pairs, _ = in_place_pairs(self.whole)  # outputs are written once each, after all that is read for them
        attrs = Attrs({**self.whole.attrs, SCHEDULED: True, **({IN_PLACE: pairs} if pairs else {})})
        return replace(self.whole, params=params, body=body, attrs=attrs)

    def _blocks(self, u: Buffer) -> Stmt:
        """Return the loop over all patches of all images, in an even number of blocks of equal size."""
        images, high, wide = (loop.extent for loop in self.block.spatial[:3])
        patches = images * ceildiv(high, 2) * ceildiv(wide, 2)
        count, block = ceildiv(patches, 2 * PATCHES) * 2, SymVar("block", lower=0)
        start, size = SymVar("start", lower=0), SymVar("size", lower=0, upper=PATCHES)
        inner, _ = self.channels
        v = Buffer("patches", (sym(POINTS), sym(PATCHES), sym(inner)), "float32", "local")
        m = Buffer("products", (sym(POINTS), sym(PATCHES), sym(self.width)), "float32", "local")
        first, last = block * patches // count, (block + 1) * patches // count
        at = {start: first, size: last - first}
        body = seq(self._gather(v, start, size), self._multiply(v, u, m, start, size))
        return For(block, count, Substitute(at).stmt(Allocate(v, Allocate(m, body))), "parallel")

    def _place(self, patch: SymExpr) -> tuple[SymExpr, SymExpr, SymExpr]:
        """Return (image, row, column) of a patch's first output."""
        high, wide = (ceildiv(loop.extent, 2) for loop in self.block.spatial[1:3])
        return patch // (high * wide), patch // wide % high * 2, patch % wide * 2

    def _gather(self, v: Buffer, start: SymExpr, size: SymExpr) -> Stmt:
        """Return the input transform of a block: V, of 16 numbers for each patch and channel."""
        inner, _ = self.channels
        patch, part, lane = SymVar("t", lower=0), SymVar("co", lower=0), SymVar("l", upper=self.lanes - 1)
        image, row, column = self._place(start + patch)
        channel = part * self.lanes + lane
        _, height, width, _ = self.x.buffer.shape

        def element(a: int, b: int) -> Value:
            """Load an element of the patch; beyond the last row or column, which no output needs, the last one."""
            at = (
                smin(row + a, height - 1) if a == 3 else row + a,
                smin(column + b, width - 1) if b == 3 else column + b,
            )
            return Load(self.x.buffer, (image, *at, channel))

        patches = {(a, b): element(a, b) for a in range(4) for b in range(4)}
        stores = [
            Store(v, (sym(4 * p + q), patch, channel), _combination(INPUT[p], INPUT[q], patches))
            for p in range(4)
            for q in range(4)
        ]
        body: Stmt = seq(*stores)
        if inner % self.lanes:
            body = IfThenElse(less(channel, inner), body)
        body = For(part, sym(-(-inner // self.lanes)), For(lane, sym(self.lanes), body, "vectorized"))
        return For(patch, size, body)

    def _multiply(self, v: Buffer, u: Buffer, m: Buffer, start: SymExpr, size: SymExpr) -> Stmt:
        """Return the 16 matrix products and the outputs, for one panel of channels after another."""
        full, rest = divmod(self.channels[1], self.width)
        panel = SymVar("panel", lower=0, upper=max(full - 1, 0))
        stages: list[Stmt] = []
        if full:
            stages.append(For(panel, sym(full), self._panel(v, u, m, start, size, panel, self.vectors)))
        if rest:
            stages.append(self._panel(v, u, m, start, size, sym(full), -(-rest // self.lanes)))
        return seq(*stages)

    def _panel(
        self, v: Buffer, u: Buffer, m: Buffer, start: SymExpr, size: SymExpr, panel: SymExpr, vectors: int
    ) -> Stmt:
        point, patch, column, k = (SymVar(name, lower=0) for name in ("p", "t", "j", "k"))
        total = Buffer("sum", (), "float32", "local")
        reduced = Store(total, (), Binary("mul", v[point, patch, k], u[panel, point, k, column]), "add")
        stmts = (
            Store(total, (), Literal(0.0, "float32")),
            For(k, sym(self.channels[0]), reduced),
            Store(m, (point, patch, column), total[()]),
        )
        rows, columns = For(patch, size, Seq(())), For(column, sym(self.width), Seq(()))
        block = ReductionBlock((rows, columns), Allocate(total, seq(*stmts)))
        tile = FilterTile(block, rows, columns, u, self.lanes, vectors, ROW_HEIGHTS[0])
        piece, first, remaining, parts = Piece(sym(0), vectors, self.lanes), sym(0), size, []
        for height in ROW_HEIGHTS:
            row_block = SymVar("to", lower=0)
            parts.append(For(row_block, remaining // height, tile_of(tile, piece, first + row_block * height, height)))
            first, remaining = first + remaining // height * height, remaining % height
        return seq(For(point, sym(POINTS), seq(*parts)), self._outputs(m, start, size, panel, vectors))

    def _outputs(self, m: Buffer, start: SymExpr, size: SymExpr, panel: SymExpr, vectors: int) -> Stmt:
        """Return the output transform Y of a block's patches and the epilogue, for outputs that exist."""
        patch, part, lane = (
            SymVar("t", lower=0),
            SymVar("u", lower=0, upper=vectors - 1),
            SymVar("l", upper=self.lanes - 1),
        )
        image, row, column = self._place(start + patch)
        _, outer = self.channels
        at = part * self.lanes + lane
        channel = panel * self.width + at
        n, h, w, c = (loop.var for loop in self.block.spatial)
        products = {(p, q): m[sym(4 * p + q), patch, at] for p in range(4) for q in range(4)}
        masked = as_int(panel) is not None and (int(panel) * self.width + vectors * self.lanes > outer)
        stmts: list[Stmt] = []
        for a in range(2):
            for b in range(2):
                y = _combination(OUTPUT[a], OUTPUT[b], products)
                final = ReplaceLoads(self.block.body.buffer, y).stmt(seq(*self.block.stmts[2:]))
                final = Substitute({n: image, h: row + a, w: column + b, c: channel}, fresh=True).stmt(final)
                if masked:
                    final = IfThenElse(less(channel, outer), final)
                inside = [less(row + 1, self.block.spatial[1].extent)] if a else []
                inside += [less(column + 1, self.block.spatial[2].extent)] if b else []
                for cond in inside:
                    final = IfThenElse(cond, final)
                stmts.append(final)
        body = For(lane, sym(self.lanes), seq(*stmts), "vectorized")
        return For(patch, size, For(part, sym(vectors), body))


def _combination(rows: tuple[int, ...], columns: tuple[int, ...], values: Mapping[tuple[int, int], Value]) -> Value:
    """Return the sum of rows[i] * columns[j] * values[i, j], whose factors are 1, 0 and -1."""
    terms = [(r * c, values[i, j]) for i, r in enumerate(rows) for j, c in enumerate(columns) if r * c]
    terms.sort(key=lambda term: -term[0])
    (sign, total), *rest = terms
    assert sign > 0
    for sign, value in rest:
        total = Binary("add" if sign > 0 else "sub", total, value)
    return total


class _Transform(Rewriter):
    """Passes the transformed filters U to calls of the new programs."""

    def __init__(self, convolutions: Mapping[str, _Conv]) -> None:
        super().__init__()
        self._convolutions = convolutions

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        conv = self._convolutions.get(value.callee.name)
        if conv is None:
            return None
        filters = value.args[conv.operand]
        assert isinstance(filters, Constant)
        args = tuple(conv.filters(filters) if k == conv.operand else a for k, a in enumerate(value.args))
        return replace(value, args=args)
