"""Paged KV cache: appending to a pool of pages, and attention over the pages of each sequence.

A pool holds pages of `page` tokens: values (heads, pages, page, width), keys transposed (heads, pages, width, page).
Both products of attention thus load vectors, along keys and along widths, for any number of queries, and consecutive
pages are contiguous in memory (docs/measurements/irops.md). Page tables map sequences to pages (Kwon et al.,
"PagedAttention", arXiv 2309.06180). The tokens of all sequences of a step are packed without padding (varlen); a list
of blocks maps query rows to sequences:

    for each block and KV head, rows = queries of the block * query heads that share the KV head:
        for each page:  S[r, j] = scale * q[r] . k[j]           where row r may attend to key j
                        online softmax, as in nn_attention.py
                        O[r, e] = O[r, e]*rescale[r] + sum over j of P[r, j] * v[j, e]

Blocks alone give too few tasks for all threads when one token follows a long context. A block is then split into
parts with a range of pages each, and a second loop combines their results (Dao et al., "Flash-Decoding", 2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.nn_attention import fold
from relaxlite.ir.ops.nn_norm import softmax_exp
from relaxlite.ir.ops.scalars import Scalar, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Check, For, LetIndex, Load, Stmt, Store, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

T = TypeVar("T")
BLOCK_FIELDS = 6  # sequence, first row, number of rows, position of the first row, part, number of parts
PAGES_PER_STEP = 4  # pages per step of the online softmax
MASKED_SCORE = float(np.finfo(np.float32).min)  # masked score: -inf - -inf would be NaN


@register
class KvAppend(Op):
    """Scatter tokens x (n, heads, width) to slots of a paged pool (heads, pages, page, width); the result is a copy.

    Token t goes to row slots[t] % page of page slots[t] // page; slots int64 (n,), of equal slots the last token wins,
    negative slots are skipped. `turned`: the pool is transposed, (heads, pages, width, page). A donated pool that dies
    is updated in place (passes/memory/donate.py).
    """

    name = "kv_append"
    operands = ("pool", "x", "slots")
    attrs: ClassVar[Mapping[str, Attr]] = {"turned": Attr("bool", False)}

    def infer(self, pool: Expr, x: Expr, slots: Expr, *, turned: bool) -> Type:
        ty, x_type, slots_type = self.tensor(pool, "pool"), self.tensor(x, "x"), self.tensor(slots, "slots")
        if ty.rank != 4 or x_type.rank != 3 or slots_type.rank != 1 or slots_type.dtype != "int64":
            self.fail(f"pool, x and int64 slots must have ranks 4, 3 and 1, got {ty}, {x_type}, {slots_type}")
        assert ty.shape is not None and x_type.shape is not None and slots_type.shape is not None
        width, page = ty.shape[2 if turned else 3], ty.shape[3 if turned else 2]
        expected = (slots_type.shape[0], ty.shape[0], width)
        if x_type.dtype != ty.dtype or any(map(PROVER.can_prove_ne, x_type.shape, expected)):
            self.fail(f"x must be {ty.dtype} of (slots, heads, width) as the pool {ty} has them, got {x_type}")
        if (as_int(page) or 0) < 1:
            self.fail(f"the tokens of a page must be known and positive, got {page} in {ty}")
        return ty

    def lower(self, pool: Buffer, x: Buffer, slots: Buffer, *, out: Buffer, turned: bool) -> Stmt:
        page = pool.shape[3 if turned else 2]
        width = pool.shape[2 if turned else 3]
        slot = SymVar("slot", lower=None)

        def element(t: SymExpr, h: SymExpr, d: SymExpr) -> Stmt:
            place = (h, slot // page, d, slot % page) if turned else (h, slot // page, slot % page, d)
            return Store(out, place, Load(x, (t, h, d)))

        def token(t: SymExpr) -> Stmt:
            slot_value = slots[t]
            # 0 iterations for a negative slot
            is_stored = smin(smax(slot + 1, sym(0)), sym(1))
            check = Check((index(slot) < pool.shape[1] * page).value, "kv_append: a slot lies beyond the pool's pages")
            stores = loops("hd", (x.shape[1] * is_stored, width), lambda h, d: element(t, h, d))
            return LetIndex(slot, slot_value, seq(check, stores))

        checks = equality_checks(
            "kv_append: x, slots and the pool differ in size",
            (x.shape[0], slots.shape[0]),
            (x.shape[1], pool.shape[0]),
            (x.shape[2], width),
        )
        return seq(*checks, compute(out, lambda *i: pool[i]), loops("t", (slots.shape[0],), token))

    def reference(self, pool: Any, x: Any, slots: Any, *, turned: bool) -> Any:
        out = pool.copy()
        view = np.swapaxes(out, 2, 3) if turned else out
        for row, slot in zip(x, slots.tolist(), strict=True):
            if slot >= 0:
                view[:, slot // view.shape[2], slot % view.shape[2]] = row
        return out

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return np.where(rng.random(shape) < 0.2, -1, rng.integers(0, 12, shape))

        types = ("float32", "float32", "int64")
        yield Sample(((2, 3, 4, 5), ("n", 2, 5), ("n",)), {}, types, make={2: draw})
        yield Sample(((2, 3, 5, 4), ("n", 2, 5), ("n",)), {"turned": True}, types, make={2: draw})
        yield Sample(((1, 3, 4, 16), ("n", 1, 16), ("n",)), {}, ("int8", "int8", "int64"), make={2: draw})


@register
class PagedAttention(Op):
    """Causal attention of packed queries q float32 (n, heads, width) over a paged KV cache: float32 (n, heads, depth).

    keys (kv_heads, pages, width, page) and values (kv_heads, pages, page, depth) are float32, float16, or int8 with a
    scale per key and value. table int32 (s, m): the pages of each sequence in order. blocks int64 (w, 6): sequence,
    first row of q, rows (at most `block`), position of the first row, part, number of parts. Parts 0, 1, ... of a block
    follow each other and differ in nothing else; each handles an equal share of the pages. Blocks do not overlap; rows
    of q in no block give 0.

    A row at position p attends to positions p - `window` + 1 (None: 0) to p. With `cap`, scores s become cap * tanh(s /
    cap) (Gemma 2). `others`: scales of keys and of values, float32 (kv_heads, pages, page, 1), for int8 only; then
    optional sinks float32 (heads,), an extra score per head with a value of 0 (arXiv 2309.17453; GPT-OSS).
    """

    name = "paged_attention"
    operands = ("q", "keys", "values", "table", "blocks", "*others")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "scale": Attr("float", 1.0),
        "window": Attr("int", None),
        "cap": Attr("float", None),
        "block": Attr("int", 16),
    }

    def infer(
        self, q: Expr, keys: Expr, values: Expr, table: Expr, blocks: Expr, *optional: Expr, **attrs: Any
    ) -> Type:
        scales, sinks = _scales_and_sinks(optional)
        types = [self.tensor(x, name) for x, name in zip((q, keys, values, table, blocks), self.operands, strict=False)]
        if [t.rank for t in types] != [3, 4, 4, 2, 2]:
            self.fail(f"q, keys, values, table and blocks must have ranks 3, 4, 4, 2, 2, got {_join(types)}")
        qs, ks, vs, _, bs = (t.shape or () for t in types)
        if types[0].dtype != "float32" or types[1].dtype != types[2].dtype:
            self.fail(f"q must be float32, keys and values of one dtype, got {_join(types)}")
        if types[1].dtype not in ("float32", "float16", "int8") or (types[1].dtype == "int8") != (len(scales) == 2):
            self.fail(f"keys and values are float32, float16, or int8 with scales, got {_join(types)}")
        if len(sinks) > 1:
            self.fail(f"scales of keys and values and sinks are 3 operands at most, got {len(optional)}")
        if (types[3].dtype, types[4].dtype) != ("int32", "int64") or as_int(bs[1]) != BLOCK_FIELDS:
            self.fail(f"table and blocks must be int32 and int64 of {BLOCK_FIELDS} columns, got {_join(types)}")
        sizes = [as_int(d) for d in (qs[1], qs[2], ks[0], *ks[2:], vs[0], *vs[2:])]
        if any(s is None or s < 1 for s in sizes):
            self.fail(f"heads, widths and the tokens of a page must be known, got {_join(types)}")
        heads, width, kv_heads, key_width, page, value_heads, value_page, depth = (s or 0 for s in sizes)
        if heads % kv_heads or (width, kv_heads, page) != (key_width, value_heads, value_page):
            self.fail(f"heads, widths or pages of q, keys and values do not fit: {_join(types)}")
        for x in scales:
            ty = self.tensor(x, "scales")
            if ty.dtype != "float32" or _without_pages(ty) != [kv_heads, page, 1]:
                self.fail(f"scales must be float32 of ({kv_heads}, pages, {page}, 1), got {ty}")
        for x in sinks:
            ty = self.tensor(x, "sinks")
            if ty.dtype != "float32" or ty.rank != 1 or as_int((ty.shape or (0,))[0]) != heads:
                self.fail(f"sinks must be float32 of ({heads},), one for each head, got {ty}")
        if attrs["block"] < 1 or (attrs["window"] is not None and attrs["window"] < 1):
            self.fail(f"block {attrs['block']} and window {attrs['window']} must be positive")
        if attrs["cap"] is not None and not attrs["cap"] > 0:
            self.fail(f"cap {attrs['cap']} must be positive")
        return TensorType.of((qs[0], qs[1], depth), "float32")

    def lower(
        self, *operands: Buffer, out: Buffer, scale: float, window: int | None, cap: float | None, block: int
    ) -> Stmt:
        q, keys, values, table, blocks, *optional = operands
        scales, sinks = _scales_and_sinks(optional)
        checks = equality_checks(
            "paged_attention: pools of different sizes",
            *((keys.shape[1], x.shape[1]) for x in (values, *scales)),
        )
        width, rows = values.shape[3], block * ((as_int(q.shape[1]) or 1) // (as_int(keys.shape[0]) or 1))
        shape = (blocks.shape[0], keys.shape[0], sym(rows))
        sums, top, total = (
            Buffer(name, (*shape, *columns), "float32")
            for name, columns in (("part_sums", (width,)), ("part_top", ()), ("part_total", ()))
        )
        sink = sinks[0] if sinks else None
        problem = _Problem(
            q, keys, values, table, blocks, scales, sink, out, sums, top, total, scale, window, cap, block
        )  # fmt: skip
        body = seq(_tasks(problem, _Attend), _tasks(problem, _Combine))
        for buffer in (sums, top, total):
            body = Allocate(buffer, body)
        return seq(*checks, compute(out, lambda *i: literal(0.0, out.dtype)), body)

    def reference(self, q: Any, keys: Any, values: Any, table: Any, blocks: Any, *optional: Any, **attrs: Any) -> Any:
        scales, sinks = _scales_and_sinks(optional)
        group, page, window = q.shape[1] // keys.shape[0], keys.shape[3], attrs["window"]
        k, v = np.swapaxes(keys, 2, 3).astype(np.float32), values.astype(np.float32)
        if scales:
            k, v = k * scales[0], v * scales[1]
        out = np.zeros((*q.shape[:2], v.shape[3]), np.float32)
        for sequence, first, rows, position, part, _ in blocks.tolist():
            for t in range(rows if part == 0 else 0):
                stop = position + t + 1
                start = 0 if window is None else max(0, stop - window)
                pages = table[sequence, : (stop + page - 1) // page]
                seen_k, seen_v = (
                    np.repeat(x[:, pages].reshape(len(x), -1, x.shape[3])[:, start:stop], group, axis=0) for x in (k, v)
                )
                scores = np.einsum("hd,hjd->hj", q[first + t] * np.float32(attrs["scale"]), seen_k)
                scores = scores if attrs["cap"] is None else attrs["cap"] * np.tanh(scores / attrs["cap"])
                if sinks:
                    scores = np.concatenate([scores, sinks[0][:, None]], axis=1)
                    seen_v = np.concatenate([seen_v, np.zeros_like(seen_v[:, :1])], axis=1)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[first + t] = np.einsum("hj,hje->he", weights / weights.sum(axis=1, keepdims=True), seen_v)
        return out

    def samples(self) -> Iterable[Sample]:
        def table(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(0, 5, shape)

        def blocks(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            """Blocks over 7 rows: three of sequence 0, then four of sequence 1."""
            split_block = [(0, 1, 2, 7, part, 5) for part in range(5)]  # more parts than pages
            last_block = [(1, 6, 1, 3, 0, 2), (1, 6, 1, 3, 1, 2)]
            return np.array([(0, 0, 1, 6, 0, 1), *split_block, (1, 3, 3, 0, 0, 1), *last_block], np.int64)

        ints = ("int32", "int64")
        shapes = ((7, 4, 8), (2, "p + 5", 8, 4), (2, "p + 5", 4, 16), ("s + 2", 3), (9, 6))
        draws = {3: table, 4: blocks}
        yield Sample(shapes, {"scale": 0.3, "block": 4}, ("float32",) * 3 + ints, draws)
        yield Sample(shapes, {"scale": 0.3, "block": 3, "window": 3}, ("float32",) * 3 + ints, draws)
        yield Sample(shapes, {"block": 4, "cap": 1.5}, ("float32",) * 3 + ints, draws)
        half_kinds = ("float32", "float16", "float16", *ints)
        yield Sample(shapes, {"block": 4}, half_kinds, draws, tolerance=2e-4)
        scaled = (*shapes, (2, "p + 5", 4, 1), (2, "p + 5", 4, 1))
        kinds = ("float32", "int8", "int8", *ints)
        yield Sample(scaled, {"scale": 0.01, "block": 4}, kinds, draws, tolerance=2e-4)
        float_kinds = ("float32",) * 3 + ints
        yield Sample((*shapes, (4,)), {"scale": 0.3, "block": 4, "window": 3}, (*float_kinds, "float32"), draws)
        yield Sample((*scaled, (4,)), {"scale": 0.01, "block": 4}, (*kinds, *("float32",) * 3), draws, tolerance=2e-4)


def _scales_and_sinks(operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Split the optional operands into the scales of keys and values (none or two) and the sinks (none or one)."""
    count = 2 if len(operands) > 1 else 0
    return tuple(operands[:count]), tuple(operands[count:])


def _without_pages(ty: TensorType) -> list[int | None]:
    return [as_int(dim) for k, dim in enumerate(ty.shape or ()) if k != 1]


def _join(types: Iterable[TensorType]) -> str:
    """Format types for an error message."""
    return ", ".join(map(str, types))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Operands, results and attributes of paged attention."""

    q: Buffer
    keys: Buffer
    values: Buffer
    table: Buffer
    blocks: Buffer
    scales: tuple[Buffer, ...]  # empty, or those of keys and of values
    sinks: Buffer | None
    out: Buffer
    part_sums: Buffer  # (blocks, KV heads, rows, width): unnormalized results of parts
    part_max: Buffer  # (blocks, KV heads, rows)
    part_total: Buffer
    scale: float
    window: int | None
    cap: float | None
    block: int


def _tasks(problem: _Problem, block_type: type[_Block]) -> Stmt:
    """Parallel loop over blocks and KV heads.

    The caller guarantees that the rows of blocks are disjoint; no analysis can prove that.
    """
    t, w, h = SymVar("t"), SymVar("w"), SymVar("h")
    heads = problem.keys.shape[0]
    body = LetIndex(w, index(t // heads).value, LetIndex(h, index(t % heads).value, block_type(problem, w, h).stmt()))
    return For(t, problem.blocks.shape[0] * heads, body, "parallel")


class _Block(ABC):
    """Statements for block `w` of queries and KV head `h`; rows are queries times the query heads that share it."""

    def __init__(self, problem: _Problem, w: SymExpr, h: SymExpr) -> None:
        self.problem, self.w, self.h = problem, w, h
        heads, kv_heads = as_int(problem.q.shape[1]) or 1, as_int(problem.keys.shape[0]) or 1
        self.group = heads // kv_heads
        self.max_rows = self.group * problem.block
        self.width, self.depth, self.page = problem.q.shape[2], problem.values.shape[3], problem.keys.shape[3]
        self.sums = self._local("sums", self.depth)
        self.row_max, self.rescale, self.total = (self._local(name) for name in ("top", "shrink", "total"))
        self.sequence, self.first = SymVar("sequence", lower=None), SymVar("first", lower=None)
        self.num_queries = SymVar("queried", lower=None, upper=problem.block)
        self.position, self.part, self.num_parts = (SymVar(n, lower=None) for n in ("position", "part", "parted"))
        self.is_split = smin(smax(self.num_parts - 1, sym(0)), sym(1))  # 1 or 0

    @abstractmethod
    def stmt(self) -> Stmt: ...

    def _with_fields(self, body: Stmt) -> Stmt:
        fields = (self.sequence, self.first, self.num_queries, self.position, self.part, self.num_parts)
        for k, field in reversed(list(enumerate(fields))):
            body = LetIndex(field, self.problem.blocks[self.w, sym(k)], body)
        return body

    def _local(self, name: str, *columns: SymExpr) -> Buffer:
        return Buffer(name, (sym(self.max_rows), *columns), "float32", "local")

    @property
    def rows(self) -> SymExpr:
        return self.num_queries * self.group

    def _over_rows(self, times: SymExpr, make: Callable[[SymExpr, SymExpr, SymExpr], Stmt]) -> Stmt:
        """Loop make(row, query, head) over all rows; `times` is 1, or 0 to skip the loop."""
        g, t = SymVar("g", upper=self.group - 1), SymVar("t", upper=self.problem.block - 1)
        body = make(t * self.group + g, self.first + t, self.h * self.group + g)
        return For(t, self.num_queries * times, For(g, sym(self.group), body))

    def _init(self, rows: SymExpr) -> Stmt:
        """Initialize the accumulators of the online softmax."""

        def fill(buffer: Buffer, value: float) -> Stmt:
            extents = (rows, *buffer.shape[1:])
            return self._nest(extents, lambda *at: Store(buffer, at, literal(value, "float32")))

        return seq(fill(self.sums, 0.0), fill(self.total, 0.0), fill(self.row_max, MASKED_SCORE))

    def _nest(self, extents: tuple[SymExpr, ...], make: Callable[..., Stmt]) -> Stmt:
        """Loops over rows and columns; the bound of `r` proves that rows are inside their buffers."""
        r = SymVar("r", upper=self.max_rows - 1)
        return For(r, extents[0], loops("j", extents[1:], lambda *at: make(r, *at)))

    def _finish(self, times: SymExpr) -> Stmt:
        """Store out = sums / (total + the weight of the sink, if any)."""
        sinks = self.problem.sinks

        def row(r: SymExpr, query: SymExpr, head: SymExpr) -> Stmt:
            def element(e: SymExpr) -> Stmt:
                total_sum = Scalar(self.sums[r, e])
                result = (
                    total_sum / Scalar(self.total[(r,)]) if sinks is None else total_sum * Scalar(self.rescale[(r,)])
                )
                return Store(self.problem.out, (query, head, e), result.value)

            stores = loops("e", (self.depth,), element)
            return stores if sinks is None else seq(self._sink(r, Scalar(sinks[(head,)])), stores)

        return self._over_rows(times, row)

    def _sink(self, r: SymExpr, sink: Scalar) -> Stmt:
        """Store rescale[r], the factor that normalizes the sums with the sink, relative to the largest score."""
        old = Scalar(self.row_max[(r,)])
        new = old.maximum(sink)
        decay = softmax_exp(old - new)
        factor = decay / (Scalar(self.total[(r,)]) * decay + softmax_exp(sink - new))
        return Store(self.rescale, (r,), factor.value)


class _Attend(_Block):
    """Attention of a block over its pages, or over those of one part."""

    def __init__(self, problem: _Problem, w: SymExpr, h: SymExpr) -> None:
        super().__init__(problem, w, h)
        self.queries = self._local("queries", self.width)
        self.scores = self._local("scores", self.page * PAGES_PER_STEP)

    def stmt(self) -> Stmt:
        problem = self.problem
        last_position = self.position + self.num_queries - 1
        aligned = self.position // self.page * self.page  # all rows of a page start, and round, alike
        first_page = sym(0) if problem.window is None else smax(aligned - (problem.window - 1), sym(0)) // self.page
        end_page = last_position // self.page + 1
        share = (smax(end_page - first_page, sym(0)) + self.num_parts - 1) // smax(self.num_parts, sym(1))
        part_page = first_page + self.part * share
        count = smax(smin(share, end_page - part_page), sym(0))
        blocks = problem.blocks.shape[0]
        checks = {
            "its sequence": (index(self.sequence) >= 0) & (index(self.sequence) < problem.table.shape[0]),
            "its number of rows": (index(self.num_queries) >= 0) & (index(self.num_queries) <= problem.block),
            "a row": (index(self.first) >= 0) & (index(self.first + self.num_queries) <= problem.q.shape[0]),
            "its position": (index(self.position) >= 0) & (index(last_position // self.page) < problem.table.shape[1]),
            "its part": (index(self.part) >= 0) & (index(self.part) < self.num_parts),
            "one of its parts": (index(self.w - self.part) >= 0)
            & (index(self.w - self.part + self.num_parts) <= blocks),
        }
        guards = [
            Check(cond.value, f"paged_attention: {what} is out of range in a block") for what, cond in checks.items()
        ]
        body = seq(
            *guards,
            self._init(self.rows),
            self._load_queries(),
            loops(
                "b",
                ((count + PAGES_PER_STEP - 1) // PAGES_PER_STEP,),
                lambda b: self._softmax_step(part_page + b * PAGES_PER_STEP, part_page + count),
            ),
            self._finish(1 - self.is_split),
            self._store_part(),
        )
        body = self._with_fields(body)
        for buffer in (self.queries, self.scores, self.sums, self.row_max, self.rescale, self.total):
            body = Allocate(buffer, body)
        return body

    def _store_part(self) -> Stmt:
        """Store the unnormalized results of a part, for `_Combine`."""
        problem, rows = self.problem, self.rows * self.is_split

        def copy(to: Buffer, source: Buffer) -> Callable[..., Stmt]:
            return lambda *at: Store(to, (self.w, self.h, *at), source[at])

        return seq(
            self._nest((rows, self.depth), copy(problem.part_sums, self.sums)),
            self._nest((rows,), copy(problem.part_max, self.row_max)),
            self._nest((rows,), copy(problem.part_total, self.total)),
        )

    def _load_queries(self) -> Stmt:
        """Load and scale the queries."""

        def row(r: SymExpr, query: SymExpr, head: SymExpr) -> Stmt:
            q = self.problem.q
            return loops(
                "d", (self.width,),
                lambda d: Store(self.queries, (r, d), (Scalar(q[query, head, d]) * self.problem.scale).value),
            )  # fmt: skip

        return self._over_rows(sym(1), row)

    def _softmax_step(self, first: SymExpr, end: SymExpr) -> Stmt:
        """One step of the online softmax: pages `first` to `end` of the sequence, at most PAGES_PER_STEP of them."""
        scores, row_max, rescale, total = self.scores, self.row_max, self.rescale, self.total
        pages, rows = smin(sym(PAGES_PER_STEP), end - first), self.rows
        keys = pages * self.page

        def update_max(r: SymExpr, step_max: Scalar) -> Stmt:
            old = Scalar(row_max[(r,)])
            new = old.maximum(step_max)
            return seq(Store(rescale, (r,), softmax_exp(old - new).value), Store(row_max, (r,), new.value))

        def compute_weight(r: SymExpr, j: SymExpr) -> Stmt:
            exp_score = softmax_exp(Scalar(scores[r, j]) - Scalar(row_max[(r,)]))
            is_masked = Scalar(scores[r, j]) <= MASKED_SCORE  # all keys so far may be masked for a row
            return Store(scores, (r, j), select(is_masked, 0.0, exp_score).value)

        def add_total(r: SymExpr, step_sum: Scalar) -> Stmt:
            return Store(total, (r,), (Scalar(total[(r,)]) * Scalar(rescale[(r,)]) + step_sum).value)

        def rescale_sums(r: SymExpr, e: SymExpr) -> Stmt:
            return Store(self.sums, (r, e), (Scalar(self.sums[r, e]) * Scalar(rescale[(r,)])).value)

        return seq(
            loops("p", (pages,), lambda p: self._with_page(first + p, partial(self._score, p, first + p))),
            self._fold("maxnum", (rows,), keys, lambda r, j: Scalar(scores[r, j]), update_max),
            self._nest((rows, keys), compute_weight),
            self._fold("add", (rows,), keys, lambda r, j: Scalar(scores[r, j]), add_total),
            self._nest((rows, self.depth), rescale_sums),
            loops("p", (pages,), lambda p: self._with_page(first + p, partial(self._add_values, p, first + p))),
        )

    def _with_page(self, number: SymExpr, make: Callable[[SymExpr], Stmt]) -> Stmt:
        """Bind and check the pool page of page `number` of the sequence, for make(page)."""
        page = SymVar("page", lower=None)
        pool_page = Scalar(self.problem.table[self.sequence, number]).cast("int64")
        inside = (index(page) >= 0) & (index(page) < self.problem.keys.shape[1])
        check = Check(inside.value, "paged_attention: a page of the table is out of range for the pool")
        return LetIndex(page, pool_page.value, seq(check, make(page)))

    def _score(self, p: SymExpr, number: SymExpr, page: SymExpr) -> Stmt:
        """Compute the scores of one page, the p-th of its step."""
        problem, h = self.problem, self.h

        def score(r: SymExpr, j: SymExpr, d: SymExpr) -> Scalar:
            return Scalar(self.queries[r, d]) * self._read(problem.keys, h, page, d, j)

        def store_score(r: SymExpr, j: SymExpr, total: Scalar) -> Stmt:
            if problem.scales:
                total = total * Scalar(problem.scales[0][h, page, j, 0])
            if problem.cap is not None:
                total = (total * (1 / problem.cap)).tanh() * problem.cap
            query = self.position + r // self.group - number * self.page
            is_visible = index(j, "int32") <= query
            if problem.window is not None:
                is_visible = is_visible & (index(j, "int32") > query - problem.window)
            return Store(self.scores, (r, p * self.page + j), select(is_visible, total, MASKED_SCORE).value)

        return self._fold("add", (self.rows, self.page), self.width, score, store_score)

    def _add_values(self, p: SymExpr, number: SymExpr, page: SymExpr) -> Stmt:
        """Add the weighted values of one page, up to the last token; the rest of its page is undefined and not read."""
        problem, h, scores = self.problem, self.h, self.scores
        count = smin(self.page, self.position + self.num_queries - number * self.page)

        def value(r: SymExpr, e: SymExpr, j: SymExpr) -> Scalar:
            return Scalar(scores[r, p * self.page + j]) * self._read(problem.values, h, page, j, e)

        def scale_weight(r: SymExpr, j: SymExpr) -> Stmt:
            at = (r, p * self.page + j)
            return Store(scores, at, (Scalar(scores[at]) * Scalar(problem.scales[1][h, page, j, 0])).value)

        def accumulate(r: SymExpr, e: SymExpr, total: Scalar) -> Stmt:
            return Store(self.sums, (r, e), (Scalar(self.sums[r, e]) + total).value)

        return seq(
            *([self._nest((self.rows, count), scale_weight)] if problem.scales else []),
            self._fold("add", (self.rows, self.depth), count, value, accumulate),
        )

    def _read(self, pool: Buffer, *at: SymExpr) -> Scalar:
        return Scalar(pool[at]).cast("float32")

    def _fold(
        self,
        combine: str,
        extents: tuple[SymExpr, ...],
        reduced: SymExpr,
        value: Callable[..., Scalar],
        finish: Callable[..., Stmt],
    ) -> Stmt:
        """Loops over `extents` of finish(combine over `reduced` of value)."""
        return self._nest(
            extents, lambda *i: fold("float32", combine, reduced, partial(value, *i), partial(finish, *i))
        )


class _Combine(_Block):
    """Combine the parts of a split block, in the task of its first part."""

    def stmt(self) -> Stmt:
        problem, at = self.problem, (self.w, self.h)
        is_first = self.is_split * (1 - smin(self.part, sym(1)))
        rows = self.rows * is_first

        def update_max(p: SymExpr, r: SymExpr) -> Stmt:
            part_max = Scalar(problem.part_max[at[0] + p, at[1], r])
            return Store(self.row_max, (r,), Scalar(self.row_max[(r,)]).maximum(part_max).value)

        def compute_rescale(p: SymExpr, r: SymExpr) -> Stmt:
            difference = Scalar(problem.part_max[at[0] + p, at[1], r]) - Scalar(self.row_max[(r,)])
            return Store(self.rescale, (r,), softmax_exp(difference).value)

        def accumulate(to: Buffer, part_values: Buffer, p: SymExpr, r: SymExpr, *e: SymExpr) -> Stmt:
            source, place = (at[0] + p, at[1], r, *e), (r, *e)
            return Store(
                to, place, (Scalar(to[place]) + Scalar(part_values[source]) * Scalar(self.rescale[(r,)])).value
            )

        def add_part(p: SymExpr) -> Stmt:
            return seq(
                self._nest((rows,), partial(compute_rescale, p)),
                self._nest((rows,), partial(accumulate, self.total, problem.part_total, p)),
                self._nest((rows, self.depth), partial(accumulate, self.sums, problem.part_sums, p)),
            )

        body = self._with_fields(
            seq(
                self._init(rows),
                loops("p", (self.num_parts * is_first,), lambda p: self._nest((rows,), partial(update_max, p))),
                loops("p", (self.num_parts * is_first,), add_part),
                self._finish(is_first),
            )
        )
        for buffer in (self.sums, self.row_max, self.rescale, self.total):
            body = Allocate(buffer, body)
        return body
