"""Keys and values of past tokens in pages: appending to a pool, and attention over the pages of each sequence.

A pool holds pages of `page` tokens, values as (heads, pages, page, width) and keys, turned, as (heads, pages, width,
page): so both products of attention read vectors, along keys and along widths, whatever the number of queries is, and
pages with numbers in a row are one stream from memory (measured: 22 GB/s for 15 with pages outermost). Which pages are
whose, tables say (Kwon et al., "PagedAttention", arXiv 2309.06180). Tokens of all sequences of a step stand
one after another, without padding; a list of blocks says which rows of queries attend to which sequence:

    for each block and head of keys, rows = its queries times the query heads that share the head:
        for each page:  S[r, j] = scale * q[r] . k[j]           as far as row r may see key j
                        softmax online, as in nn_attention.py
                        O[r, e] = O[r, e]*shrink[r] + sum over j of P[r, j] * v[j, e]

Where that makes fewer tasks than threads, as for one token after a long context, a block comes in several parts, each
with a range of the pages, whose results a second loop combines (Dao et al., "Flash-Decoding", 2023).
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
from relaxlite.ir.ops.nn_norm import weight
from relaxlite.ir.ops.scalars import Scalar, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Check, For, LetIndex, Load, Stmt, Store, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

T = TypeVar("T")
BLOCK_FIELDS = 6  # of a block: its sequence, first row, number of rows, position of the first row, part, parts
SPAN = 4  # pages whose scores are computed before their values are read
LOWEST = float(np.finfo(np.float32).min)  # of a score that is not seen: -inf - -inf would be NaN


@register
class KvAppend(Op):
    """A copy of pool (heads, pages, page, width) with x (n, heads, width) at n slots: token t in row slots[t] % page of
    page slots[t] // page. `turned`: the pool is (heads, pages, width, page). Rows whose slot is negative go nowhere; of
    several in one slot the last stays. Where the pool is donated and dies, it is updated in place (memory/donate.py).
    """

    name = "kv_append"
    operands = ("pool", "x", "slots")
    attrs: ClassVar[Mapping[str, Attr]] = {"turned": Attr("bool", False)}

    def infer(self, pool: Expr, x: Expr, slots: Expr, *, turned: bool) -> Type:
        ty, new, places = self.tensor(pool, "pool"), self.tensor(x, "x"), self.tensor(slots, "slots")
        if ty.rank != 4 or new.rank != 3 or places.rank != 1 or places.dtype != "int64":
            self.fail(f"pool, x and int64 slots must have ranks 4, 3 and 1, got {ty}, {new}, {places}")
        assert ty.shape is not None and new.shape is not None and places.shape is not None
        width, page = ty.shape[2 if turned else 3], ty.shape[3 if turned else 2]
        wanted = (places.shape[0], ty.shape[0], width)
        if new.dtype != ty.dtype or any(map(PROVER.can_prove_ne, new.shape, wanted)):
            self.fail(f"x must be {ty.dtype} of (slots, heads, width) as the pool {ty} has them, got {new}")
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
            result = slots[t]
            # of a negative slot the loops run no times
            kept = smin(smax(slot + 1, sym(0)), sym(1))
            check = Check((index(slot) < pool.shape[1] * page).value, "kv_append: a slot lies beyond the pool's pages")
            stores = loops("hd", (x.shape[1] * kept, width), lambda h, d: element(t, h, d))
            return LetIndex(slot, result, seq(check, stores))

        checks = equality_checks(
            "kv_append: x, slots and the pool differ in size",
            (x.shape[0], slots.shape[0]),
            (x.shape[1], pool.shape[0]),
            (x.shape[2], width),
        )
        return seq(*checks, compute(out, lambda *i: pool[i]), loops("t", (slots.shape[0],), token))

    def reference(self, pool: Any, x: Any, slots: Any, *, turned: bool) -> Any:
        out = pool.copy()
        seen = np.swapaxes(out, 2, 3) if turned else out
        for row, slot in zip(x, slots.tolist(), strict=True):
            if slot >= 0:
                seen[:, slot // seen.shape[2], slot % seen.shape[2]] = row
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
    """Causal attention of q (n, heads, width) over pages: keys (kv_heads, pages, width, page), values (kv_heads, pages,
    page, depth), float32, float16 or int8 with scales (kv_heads, pages, page, 1) of each key and value. table int32 (s,
    m): the pages of each sequence in order. blocks int64 (w, 6): sequence, first row of q, rows (at most `block`), the
    position of the first row, part and parts; a row at position p sees the keys at positions p - `window` + 1 (None:
    0) to p. The parts 0, 1, ... of a block stand one after another, alike but for their number; each takes its share of
    the pages. Scores s = `scale` * q . key become cap * tanh(s / cap) where there is a `cap` (Gemma 2). `others`: the
    scales of keys and values, if they are int8, and then maybe sinks float32 (heads,): a score of each head that the
    softmax counts, with a value of 0 (Xiao et al., arXiv 2309.17453; GPT-OSS).

    Rows of q that no block names are 0; blocks do not overlap. Sums are in float32, and so are q and the result.
    """

    name = "paged_attention"
    operands = ("q", "keys", "values", "table", "blocks", "*others")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "scale": Attr("float", 1.0),
        "window": Attr("int", None),
        "cap": Attr("float", None),
        "block": Attr("int", 16),
    }

    def infer(self, q: Expr, keys: Expr, values: Expr, table: Expr, blocks: Expr, *others: Expr, **attrs: Any) -> Type:
        scales, sinks = _scales_and_sinks(others)
        types = [self.tensor(x, name) for x, name in zip((q, keys, values, table, blocks), self.operands, strict=False)]
        if [t.rank for t in types] != [3, 4, 4, 2, 2]:
            self.fail(f"q, keys, values, table and blocks must have ranks 3, 4, 4, 2, 2, got {_told(types)}")
        qs, ks, vs, _, bs = (t.shape or () for t in types)
        if types[0].dtype != "float32" or types[1].dtype != types[2].dtype:
            self.fail(f"q must be float32, keys and values of one dtype, got {_told(types)}")
        if types[1].dtype not in ("float32", "float16", "int8") or (types[1].dtype == "int8") != (len(scales) == 2):
            self.fail(f"keys and values are float32, float16, or int8 with scales, got {_told(types)}")
        if len(sinks) > 1:
            self.fail(f"scales of keys and values and sinks are 3 operands at most, got {len(others)}")
        if (types[3].dtype, types[4].dtype) != ("int32", "int64") or as_int(bs[1]) != BLOCK_FIELDS:
            self.fail(f"table and blocks must be int32 and int64 of {BLOCK_FIELDS} columns, got {_told(types)}")
        sizes = [as_int(d) for d in (qs[1], qs[2], ks[0], *ks[2:], vs[0], *vs[2:])]
        if any(s is None or s < 1 for s in sizes):
            self.fail(f"heads, widths and the tokens of a page must be known, got {_told(types)}")
        heads, width, kv_heads, key_width, page, value_heads, value_page, depth = (s or 0 for s in sizes)
        if heads % kv_heads or (width, kv_heads, page) != (key_width, value_heads, value_page):
            self.fail(f"heads, widths or pages of q, keys and values do not fit: {_told(types)}")
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
        q, keys, values, table, blocks, *others = operands
        scales, sinks = _scales_and_sinks(others)
        checks = equality_checks(
            "paged_attention: pools of different sizes",
            *((keys.shape[1], x.shape[1]) for x in (values, *scales)),
        )
        width, rows = values.shape[3], block * ((as_int(q.shape[1]) or 1) // (as_int(keys.shape[0]) or 1))
        shape = (blocks.shape[0], keys.shape[0], sym(rows))
        sums, top, total = (
            Buffer(name, (*shape, *more), "float32")
            for name, more in (("part_sums", (width,)), ("part_top", ()), ("part_total", ()))
        )
        sink = sinks[0] if sinks else None
        parts = _Parts(
            q, keys, values, table, blocks, scales, sink, out, sums, top, total, scale, window, cap, block
        )  # fmt: skip
        body = seq(_tasks(parts, _Attend), _tasks(parts, _Combine))
        for buffer in (sums, top, total):
            body = Allocate(buffer, body)
        return seq(*checks, compute(out, lambda *i: literal(0.0, out.dtype)), body)

    def reference(self, q: Any, keys: Any, values: Any, table: Any, blocks: Any, *others: Any, **attrs: Any) -> Any:
        scales, sinks = _scales_and_sinks(others)
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
            """Of 7 rows, three of sequence 0 and then four of sequence 1."""
            several = [(0, 1, 2, 7, part, 5) for part in range(5)]  # more parts than pages
            last = [(1, 6, 1, 3, 0, 2), (1, 6, 1, 3, 1, 2)]
            return np.array([(0, 0, 1, 6, 0, 1), *several, (1, 3, 3, 0, 0, 1), *last], np.int64)

        ints = ("int32", "int64")
        shapes = ((7, 4, 8), (2, "p + 5", 8, 4), (2, "p + 5", 4, 16), ("s + 2", 3), (9, 6))
        result = {3: table, 4: blocks}
        yield Sample(shapes, {"scale": 0.3, "block": 4}, ("float32",) * 3 + ints, result)
        yield Sample(shapes, {"scale": 0.3, "block": 3, "window": 3}, ("float32",) * 3 + ints, result)
        yield Sample(shapes, {"block": 4, "cap": 1.5}, ("float32",) * 3 + ints, result)
        half = ("float32", "float16", "float16", *ints)
        yield Sample(shapes, {"block": 4}, half, result, tolerance=2e-4)
        scaled = (*shapes, (2, "p + 5", 4, 1), (2, "p + 5", 4, 1))
        kinds = ("float32", "int8", "int8", *ints)
        yield Sample(scaled, {"scale": 0.01, "block": 4}, kinds, result, tolerance=2e-4)
        floats = ("float32",) * 3 + ints
        yield Sample((*shapes, (4,)), {"scale": 0.3, "block": 4, "window": 3}, (*floats, "float32"), result)
        yield Sample((*scaled, (4,)), {"scale": 0.01, "block": 4}, (*kinds, *("float32",) * 3), result, tolerance=2e-4)


def _scales_and_sinks(others: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Those of keys and of values, or none; and the rest."""
    count = 2 if len(others) > 1 else 0
    return tuple(others[:count]), tuple(others[count:])


def _without_pages(ty: TensorType) -> list[int | None]:
    return [as_int(dim) for k, dim in enumerate(ty.shape or ()) if k != 1]


def _told(types: Iterable[TensorType]) -> str:
    return ", ".join(map(str, types))


@dataclass(frozen=True, slots=True)
class _Parts:
    q: Buffer
    keys: Buffer
    values: Buffer
    table: Buffer
    blocks: Buffer
    scales: tuple[Buffer, ...]  # none, or of keys and of values
    sinks: Buffer | None
    out: Buffer
    part_sums: Buffer  # (blocks, heads of keys, rows, width): of blocks in several parts, not yet divided
    part_top: Buffer  # (blocks, heads of keys, rows)
    part_total: Buffer
    scale: float
    window: int | None
    cap: float | None
    block: int


def _tasks(parts: _Parts, make: type[_Block]) -> Stmt:
    """One parallel loop over blocks and heads. Their rows do not overlap, which is the caller's promise: no loop can
    show it."""
    t, w, h = SymVar("t"), SymVar("w"), SymVar("h")
    heads = parts.keys.shape[0]
    body = LetIndex(w, index(t // heads).value, LetIndex(h, index(t % heads).value, make(parts, w, h).stmt()))
    return For(t, parts.blocks.shape[0] * heads, body, "parallel")


class _Block(ABC):
    """What both loops know of block `w` of queries and head `h` of keys; rows are queries times heads that share it."""

    def __init__(self, parts: _Parts, w: SymExpr, h: SymExpr) -> None:
        self.parts, self.w, self.h = parts, w, h
        heads, kv_heads = as_int(parts.q.shape[1]) or 1, as_int(parts.keys.shape[0]) or 1
        self.group = heads // kv_heads
        self.most = self.group * parts.block
        self.width, self.depth, self.page = parts.q.shape[2], parts.values.shape[3], parts.keys.shape[3]
        self.sums = self._local("sums", self.depth)
        self.top, self.shrink, self.total = (self._local(name) for name in ("top", "shrink", "total"))
        self.sequence, self.first = SymVar("sequence", lower=None), SymVar("first", lower=None)
        self.queried = SymVar("queried", lower=None, upper=parts.block)
        self.position, self.part, self.parted = (SymVar(n, lower=None) for n in ("position", "part", "parted"))
        self.is_parted = smin(smax(self.parted - 1, sym(0)), sym(1))  # 1 or 0

    @abstractmethod
    def stmt(self) -> Stmt: ...

    def _with_fields(self, body: Stmt) -> Stmt:
        fields = (self.sequence, self.first, self.queried, self.position, self.part, self.parted)
        for k, field in reversed(list(enumerate(fields))):
            body = LetIndex(field, self.parts.blocks[self.w, sym(k)], body)
        return body

    def _local(self, name: str, *columns: SymExpr) -> Buffer:
        return Buffer(name, (sym(self.most), *columns), "float32", "local")

    @property
    def rows(self) -> SymExpr:
        return self.queried * self.group

    def _over_rows(self, times: SymExpr, make: Callable[[SymExpr, SymExpr, SymExpr], Stmt]) -> Stmt:
        """make(row, query, head) for all of them; `times`: 1, or 0 for none."""
        g, t = SymVar("g", upper=self.group - 1), SymVar("t", upper=self.parts.block - 1)
        body = make(t * self.group + g, self.first + t, self.h * self.group + g)
        return For(t, self.queried * times, For(g, sym(self.group), body))

    def _starts(self, rows: SymExpr) -> Stmt:
        """Nothing seen yet."""

        def filled(buffer: Buffer, value: float) -> Stmt:
            extents = (rows, *buffer.shape[1:])
            return self._nest(extents, lambda *at: Store(buffer, at, literal(value, "float32")))

        return seq(filled(self.sums, 0.0), filled(self.total, 0.0), filled(self.top, LOWEST))

    def _nest(self, extents: tuple[SymExpr, ...], make: Callable[..., Stmt]) -> Stmt:
        """Loops over rows and columns; the bound tells that the rows lie in their buffers."""
        r = SymVar("r", upper=self.most - 1)
        return For(r, extents[0], loops("j", extents[1:], lambda *at: make(r, *at)))

    def _finish(self, times: SymExpr) -> Stmt:
        """out = sums / total, to which a sink is added"""
        sinks = self.parts.sinks

        def row(r: SymExpr, query: SymExpr, head: SymExpr) -> Stmt:
            def element(e: SymExpr) -> Stmt:
                whole = Scalar(self.sums[r, e])
                result = whole / Scalar(self.total[(r,)]) if sinks is None else whole * Scalar(self.shrink[(r,)])
                return Store(self.parts.out, (query, head, e), result.value)

            divided = loops("e", (self.depth,), element)
            return divided if sinks is None else seq(self._sink(r, Scalar(sinks[(head,)])), divided)

        return self._over_rows(times, row)

    def _sink(self, r: SymExpr, sink: Scalar) -> Stmt:
        """shrink = 1 / (total + what the sink counts), by the largest of all scores"""
        old = Scalar(self.top[(r,)])
        new = old.maximum(sink)
        kept = weight(old - new)
        result = kept / (Scalar(self.total[(r,)]) * kept + weight(sink - new))
        return Store(self.shrink, (r,), result.value)


class _Attend(_Block):
    """Attention over the pages, or a part of them."""

    def __init__(self, parts: _Parts, w: SymExpr, h: SymExpr) -> None:
        super().__init__(parts, w, h)
        self.queries = self._local("queries", self.width)
        self.scores = self._local("scores", self.page * SPAN)

    def stmt(self) -> Stmt:
        parts = self.parts
        last = self.position + self.queried - 1
        aligned = self.position // self.page * self.page  # so that all rows of a page begin, and round, alike
        begin = sym(0) if parts.window is None else smax(aligned - (parts.window - 1), sym(0)) // self.page
        stop = last // self.page + 1
        share = (smax(stop - begin, sym(0)) + self.parted - 1) // smax(self.parted, sym(1))
        start = begin + self.part * share
        count = smax(smin(share, stop - start), sym(0))
        blocks = parts.blocks.shape[0]
        checks = {
            "its sequence": (index(self.sequence) >= 0) & (index(self.sequence) < parts.table.shape[0]),
            "its number of rows": (index(self.queried) >= 0) & (index(self.queried) <= parts.block),
            "a row": (index(self.first) >= 0) & (index(self.first + self.queried) <= parts.q.shape[0]),
            "its position": (index(self.position) >= 0) & (index(last // self.page) < parts.table.shape[1]),
            "its part": (index(self.part) >= 0) & (index(self.part) < self.parted),
            "one of its parts": (index(self.w - self.part) >= 0) & (index(self.w - self.part + self.parted) <= blocks),
        }
        guards = [
            Check(cond.value, f"paged_attention: {what} is out of range in a block") for what, cond in checks.items()
        ]
        body = seq(
            *guards,
            self._starts(self.rows),
            self._take_queries(),
            loops("b", ((count + SPAN - 1) // SPAN,), lambda b: self._span(start + b * SPAN, start + count)),
            self._finish(1 - self.is_parted),
            self._keep_part(),
        )
        body = self._with_fields(body)
        for buffer in (self.queries, self.scores, self.sums, self.top, self.shrink, self.total):
            body = Allocate(buffer, body)
        return body

    def _keep_part(self) -> Stmt:
        """For `_Combine`."""
        parts, rows = self.parts, self.rows * self.is_parted

        def keep(to: Buffer, given: Buffer) -> Callable[..., Stmt]:
            return lambda *at: Store(to, (self.w, self.h, *at), given[at])

        return seq(
            self._nest((rows, self.depth), keep(parts.part_sums, self.sums)),
            self._nest((rows,), keep(parts.part_top, self.top)),
            self._nest((rows,), keep(parts.part_total, self.total)),
        )

    def _take_queries(self) -> Stmt:
        def row(r: SymExpr, query: SymExpr, head: SymExpr) -> Stmt:
            q = self.parts.q
            return loops(
                "d", (self.width,),
                lambda d: Store(self.queries, (r, d), (Scalar(q[query, head, d]) * self.parts.scale).value),
            )  # fmt: skip

        return self._over_rows(sym(1), row)

    def _span(self, first: SymExpr, end: SymExpr) -> Stmt:
        """What the next pages of the sequence add, from `first` on, at most SPAN of them."""
        scores, top, shrink, total = self.scores, self.top, self.shrink, self.total
        pages, rows = smin(sym(SPAN), end - first), self.rows
        keys = pages * self.page

        def raise_top(r: SymExpr, found: Scalar) -> Stmt:
            old = Scalar(top[(r,)])
            new = old.maximum(found)
            return seq(Store(shrink, (r,), weight(old - new).value), Store(top, (r,), new.value))

        def weigh(r: SymExpr, j: SymExpr) -> Stmt:
            found = weight(Scalar(scores[r, j]) - Scalar(top[(r,)]))
            unseen = Scalar(scores[r, j]) <= LOWEST  # a row may see no key of these pages, nor of any before
            return Store(scores, (r, j), select(unseen, 0.0, found).value)

        def add_total(r: SymExpr, found: Scalar) -> Stmt:
            return Store(total, (r,), (Scalar(total[(r,)]) * Scalar(shrink[(r,)]) + found).value)

        def shrunk(r: SymExpr, e: SymExpr) -> Stmt:
            return Store(self.sums, (r, e), (Scalar(self.sums[r, e]) * Scalar(shrink[(r,)])).value)

        return seq(
            loops("p", (pages,), lambda p: self._with_page(first + p, partial(self._score, p, first + p))),
            self._fold("maxnum", (rows,), keys, lambda r, j: Scalar(scores[r, j]), raise_top),
            self._nest((rows, keys), weigh),
            self._fold("add", (rows,), keys, lambda r, j: Scalar(scores[r, j]), add_total),
            self._nest((rows, self.depth), shrunk),
            loops("p", (pages,), lambda p: self._with_page(first + p, partial(self._add_values, p, first + p))),
        )

    def _with_page(self, number: SymExpr, make: Callable[[SymExpr], Stmt]) -> Stmt:
        """make(page of the pool) for page `number` of the sequence."""
        page = SymVar("page", lower=None)
        given = Scalar(self.parts.table[self.sequence, number]).cast("int64")
        inside = (index(page) >= 0) & (index(page) < self.parts.keys.shape[1])
        check = Check(inside.value, "paged_attention: a page of the table is out of range for the pool")
        return LetIndex(page, given.value, seq(check, make(page)))

    def _score(self, p: SymExpr, number: SymExpr, page: SymExpr) -> Stmt:
        """The scores of one page, the p-th of its span."""
        parts, h = self.parts, self.h

        def score(r: SymExpr, j: SymExpr, d: SymExpr) -> Scalar:
            return Scalar(self.queries[r, d]) * self._read(parts.keys, h, page, d, j)

        def keep(r: SymExpr, j: SymExpr, found: Scalar) -> Stmt:
            if parts.scales:
                found = found * Scalar(parts.scales[0][h, page, j, 0])
            if parts.cap is not None:
                found = (found * (1 / parts.cap)).tanh() * parts.cap
            query = self.position + r // self.group - number * self.page
            seen = index(j, "int32") <= query
            if parts.window is not None:
                seen = seen & (index(j, "int32") > query - parts.window)
            return Store(self.scores, (r, p * self.page + j), select(seen, found, LOWEST).value)

        return self._fold("add", (self.rows, self.page), self.width, score, keep)

    def _add_values(self, p: SymExpr, number: SymExpr, page: SymExpr) -> Stmt:
        """The values of one page by their weights. What stands behind the last token is not defined, and not read."""
        parts, h, scores = self.parts, self.h, self.scores
        count = smin(self.page, self.position + self.queried - number * self.page)

        def value(r: SymExpr, e: SymExpr, j: SymExpr) -> Scalar:
            return Scalar(scores[r, p * self.page + j]) * self._read(parts.values, h, page, j, e)

        def scaled(r: SymExpr, j: SymExpr) -> Stmt:
            at = (r, p * self.page + j)
            return Store(scores, at, (Scalar(scores[at]) * Scalar(parts.scales[1][h, page, j, 0])).value)

        def keep(r: SymExpr, e: SymExpr, found: Scalar) -> Stmt:
            return Store(self.sums, (r, e), (Scalar(self.sums[r, e]) + found).value)

        return seq(
            *([self._nest((self.rows, count), scaled)] if parts.scales else []),
            self._fold("add", (self.rows, self.depth), count, value, keep),
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
        """for each element of `extents`: finish(combine over `reduced` of value)."""
        return self._nest(
            extents, lambda *i: fold("float32", combine, reduced, partial(value, *i), partial(finish, *i))
        )


class _Combine(_Block):
    """The parts of a block that has several, at the first of them."""

    def stmt(self) -> Stmt:
        parts, at = self.parts, (self.w, self.h)
        leads = self.is_parted * (1 - smin(self.part, sym(1)))
        rows = self.rows * leads

        def raise_top(p: SymExpr, r: SymExpr) -> Stmt:
            result = Scalar(parts.part_top[at[0] + p, at[1], r])
            return Store(self.top, (r,), Scalar(self.top[(r,)]).maximum(result).value)

        def weigh(p: SymExpr, r: SymExpr) -> Stmt:
            result = Scalar(parts.part_top[at[0] + p, at[1], r]) - Scalar(self.top[(r,)])
            return Store(self.shrink, (r,), weight(result).value)

        def add(to: Buffer, given: Buffer, p: SymExpr, r: SymExpr, *e: SymExpr) -> Stmt:
            source, place = (at[0] + p, at[1], r, *e), (r, *e)
            return Store(to, place, (Scalar(to[place]) + Scalar(given[source]) * Scalar(self.shrink[(r,)])).value)

        def of_part(p: SymExpr) -> Stmt:
            return seq(
                self._nest((rows,), partial(weigh, p)),
                self._nest((rows,), partial(add, self.total, parts.part_total, p)),
                self._nest((rows, self.depth), partial(add, self.sums, parts.part_sums, p)),
            )

        body = self._with_fields(
            seq(
                self._starts(rows),
                loops("p", (self.parted * leads,), lambda p: self._nest((rows,), partial(raise_top, p))),
                loops("p", (self.parted * leads,), of_part),
                self._finish(leads),
            )
        )
        for buffer in (self.sums, self.top, self.shrink, self.total):
            body = Allocate(buffer, body)
        return body
