"""Short convolution along the tokens of each sequence, with past inputs in a paged cache (kv_cache.py).

The convolution (LFM2, arXiv 2511.23404) reads only the last few inputs of a sequence. The cache keeps all of them, in
pages like keys and values: sequences can be forked, truncated and continued anywhere, and chunked prefill is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register
from relaxlite.ir.ops.kv_cache import BLOCK_FIELDS
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.program import Buffer, Check, For, LetIndex, Load, Stmt, Store, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, Type


@register
class PagedConvolution(Op):
    """Causal depthwise convolution over a paged cache of inputs: float32 (n, width).

    A row at position p of a sequence gives the sum over j < l of weight[j] * input p - (l - 1) + j, channel by channel,
    inputs before position 0 being 0. weight float32 (l, width); pool (1, pages, page, width), float32 or float16,
    already holds the inputs of these rows. `like` (n, ...) determines n. table int32 (s, m) and blocks int64 (w, 6) as
    of `paged_attention`; parts of a block after the first are skipped. Blocks do not overlap; rows in no block give 0.
    """

    name = "paged_convolution"
    operands = ("pool", "weight", "like", "table", "blocks")

    def infer(self, pool: Expr, weight: Expr, like: Expr, table: Expr, blocks: Expr) -> Type:
        operands = (pool, weight, like, table, blocks)
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        types_text = ", ".join(map(str, types))
        if [types[k].rank for k in (0, 1, 3, 4)] != [4, 2, 2, 2] or not types[2].rank:
            self.fail(f"pool, weight, table and blocks must have ranks 4, 2, 2, 2, and like rows, got {types_text}")
        pools, weights, rows, _, fields = (t.shape or () for t in types)
        if types[0].dtype not in ("float32", "float16") or types[1].dtype != "float32":
            self.fail(f"the pool must be float32 or float16 and the weight float32, got {types_text}")
        if (types[3].dtype, types[4].dtype) != ("int32", "int64") or as_int(fields[1]) != BLOCK_FIELDS:
            self.fail(f"table and blocks must be int32 and int64 of {BLOCK_FIELDS} columns, got {types_text}")
        heads, page, width, length, channels = map(as_int, (pools[0], *pools[2:], *weights))
        if heads != 1 or not page or not length or not width or width != channels:
            self.fail(
                f"a pool (1, pages, page, width) and a weight (l, width) of known sizes are needed, got {types_text}"
            )
        return TensorType.of((rows[0], width), "float32")

    def lower(self, pool: Buffer, weight: Buffer, like: Buffer, table: Buffer, blocks: Buffer, *, out: Buffer) -> Stmt:
        length, page = as_int(weight.shape[0]) or 0, pool.shape[2]
        sequence, first, rows, position, part = (
            SymVar(name, lower=None) for name in ("sequence", "first", "queried", "position", "part")
        )

        def block(w: SymExpr) -> Stmt:
            last = position + rows - 1
            checks = {
                "its sequence": (index(sequence) >= 0) & (index(sequence) < table.shape[0]),
                "its number of rows": index(rows) >= 0,
                "a row": (index(first) >= 0) & (index(first + rows) <= out.shape[0]),
                "its position": (index(position) >= 0) & (index(last // page) < table.shape[1]),
            }
            guards = [
                Check(cond.value, f"paged_convolution: {what} is out of range in a block")
                for what, cond in checks.items()
            ]
            count = rows * smin(smax(1 - part, sym(0)), sym(1))  # 0 for parts after the first
            body: Stmt = seq(*guards, loops("t", (count,), row))
            for k, field in reversed(list(enumerate((sequence, first, rows, position, part)))):
                body = LetIndex(field, blocks[w, sym(k)], body)
            return body

        def row(t: SymExpr) -> Stmt:
            return seq(*(term(t, j) for j in range(length)))

        def term(t: SymExpr, j: int) -> Stmt:
            """Add tap j of the window of token t of the block."""
            place, page_number = SymVar("place", lower=None), SymVar("page", lower=None)
            inside = (index(page_number) >= 0) & (index(page_number) < pool.shape[1])
            check = Check(inside.value, "paged_convolution: a page of the table is out of range for the pool")
            is_present = smin(smax(place + 1, sym(0)), sym(1))  # 0 before the start of the sequence

            def channel(c: SymExpr) -> Stmt:
                x = Scalar(Load(pool, (sym(0), page_number, place % page, c))).cast("float32")
                return Store(out, (first + t, c), (x * Scalar(weight[sym(j), c])).value, "add")

            of_page = seq(check, loops("c", (out.shape[1],), channel))
            table_entry = Scalar(table[sequence, place // page]).cast("int64").value
            once = For(SymVar("once"), is_present, LetIndex(page_number, table_entry, of_page))
            return LetIndex(place, index(position + t - (length - 1 - j)).value, once)

        w = SymVar("w")
        sizes = equality_checks("paged_convolution: like has other rows than the result", (like.shape[0], out.shape[0]))
        # the caller guarantees that rows of blocks are disjoint; no analysis can prove that
        rows_of_blocks = For(w, blocks.shape[0], block(w), "parallel")
        return seq(*sizes, compute(out, lambda *i: literal(0.0, out.dtype)), rows_of_blocks)

    def reference(self, pool: Any, weight: Any, like: Any, table: Any, blocks: Any) -> Any:
        out, page = np.zeros((len(like), weight.shape[1]), np.float32), pool.shape[2]
        for sequence, first, rows, position, part, _ in blocks.tolist():
            for t in range(rows if part == 0 else 0):
                for j, factor in enumerate(weight):
                    place = position + t - (len(weight) - 1) + j
                    if place >= 0:
                        x = pool[0, table[sequence, place // page], place % page]
                        out[first + t] += x.astype(np.float32) * factor
        return out

    def samples(self) -> Iterable[Sample]:
        def table(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(0, 5, shape)

        def blocks(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            """Blocks over 7 rows: three of sequence 0, then four of sequence 1."""
            return np.array([(0, 0, 1, 6, 0, 1), (0, 1, 2, 7, 0, 2), (0, 1, 2, 7, 1, 2), (1, 3, 4, 0, 0, 1)], np.int64)

        ints, draws = ("int32", "int64"), {3: table, 4: blocks}
        for length, dtype in ((3, "float32"), (1, "float32"), (4, "float16")):
            shapes = ((1, "p + 5", 4, 20), (length, 20), (7, 2), ("s + 2", 3), (4, 6))
            yield Sample(shapes, {}, (dtype, "float32", "float32", *ints), draws)
