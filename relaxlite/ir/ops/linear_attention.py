"""Layers whose past is one state of fixed size: linear attention that fades, and the short convolution before it.

Models that mix tokens so (Qwen3-Next, Qwen3.5, Mamba-2) keep of each sequence a matrix for each head, and the last rows
that the convolution sees, however long the sequence is. States of all sequences lie in pools, one slot each. Tokens of
all sequences of a step stand one after another, without padding; `spans` int64 (s, 4) say whose they are: the first
row, how many, the slot with the state before them (negative: none, it is zero), and the slot for the state behind them
(negative: it goes nowhere). No span reads a slot that another one writes; its own it has read when it writes. Where the
pool is donated and dies, it is updated in place (passes/memory/donate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.nn_attention import fold
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    Check,
    For,
    Intrinsic,
    LetIndex,
    Load,
    Stmt,
    Store,
    Value,
    compute,
    loops,
    seq,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, TupleType, Type

SPAN_FIELDS = 4
COLUMNS = 32  # of a state, which do not depend on others: 128 x 32 floats stay in a first cache from token to token
CHAINS = 2  # of sums, if rows are even: additions of one wait for each other
CHANNELS = 512  # of a convolution, in one task


@register
class GatedLinearAttention(Op):
    """(out (n, heads, width), the pool with the new states): for each token of a span and each head, from the state S
    before it,

        S = exp(decay) * S;  c = beta * (v - k . S);  S = S + k (x) c;  out = q . S

    the gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464); without `delta` c = beta * v, as for
    the state spaces of Mamba-2 (Dao and Gu, arXiv 2405.21060).

    q, k float32 (n, key_heads, key_width), v (n, heads, width), decay, beta (n, heads), pool (heads, slots, key_width,
    width). Each head of keys serves heads / key_heads in a row, or, `tiled`, every key_heads-th. Rows that no span
    names are 0; spans do not overlap. The loops add q . S up beside k . S, of S as it was, and (q . k) * c then: so
    they read S twice, not three times.
    """

    name = "gated_linear_attention"
    operands = ("q", "k", "v", "decay", "beta", "pool", "spans")
    reads_apart = True
    attrs: ClassVar[Mapping[str, Attr]] = {"tiled": Attr("bool", False), "delta": Attr("bool", True)}

    def infer(self, *operands: Expr, tiled: bool, delta: bool) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        told = ", ".join(map(str, types))
        if [t.rank for t in types] != [3, 3, 3, 2, 2, 4, 2]:
            self.fail(f"q, k, v, decay, beta, pool and spans must have ranks 3, 3, 3, 2, 2, 4, 2, got {told}")
        _check_kinds(self, types, told)
        q, k, v, decay, beta, pool, _ = (t.shape or () for t in types)
        key_heads, key_width, heads, width = (as_int(d) or 0 for d in (*k[1:], *v[1:]))
        if not (key_heads and key_width and heads and width) or heads % key_heads:
            self.fail(f"heads and widths must be known, and heads of keys divide those of values, got {told}")
        wanted = [(q, (v[0], *k[1:])), (k, (v[0], *k[1:])), (decay, v[:2]), (beta, v[:2])]
        wanted.append((pool, (v[1], pool[1], k[2], v[2])))
        if any(PROVER.can_prove_ne(a, b) for result, right in wanted for a, b in zip(result, right, strict=True)):
            self.fail(f"rows, heads or widths of q, k, v, decay, beta and the pool do not fit: {told}")
        return TupleType((TensorType.of((v[0], heads, width), "float32"), types[5]))

    def lower(
        self, q: Buffer, k: Buffer, v: Buffer, decay: Buffer, beta: Buffer, pool: Buffer, spans: Buffer,
        *, out: tuple[Buffer, Buffer], tiled: bool, delta: bool,
    ) -> Stmt:  # fmt: skip
        y, new = out
        heads, width, key_width = (as_int(d) or 1 for d in (*v.shape[1:], k.shape[2]))
        key_heads, columns, chains = as_int(k.shape[1]) or 1, _divisor(width, COLUMNS), _divisor(key_width, CHAINS)
        parts = width // columns
        state = Buffer("state", (sym(key_width), sym(columns)), "float32", "local")
        change, *sums_of = (
            Buffer(name, (sym(columns),), "float32", "local")
            for name in ("change", *(f"{kind}{chain}" for kind in ("asked", "found") for chain in range(chains)))
        )
        asked, found = sums_of[:chains], sums_of[chains:] if delta else []
        sums_of = [*asked, *found]
        factor, alike = (Buffer(name, (), "float32", "local") for name in ("factor", "alike"))

        def task(t: SymExpr) -> Stmt:
            w, h, begin = SymVar("w"), SymVar("h", upper=heads - 1), SymVar("begin", upper=width - columns)
            key_head = h % key_heads if tiled else h // (heads // key_heads)
            row = SymVar("row", lower=None)

            def sums(d: SymExpr, e: SymExpr) -> Stmt:
                """What key and query add to their sums, of one column and a row of the state for each chain."""
                places = [d * chains + chain for chain in range(chains)]
                return seq(
                    *(
                        Store(to[chain], (e,), (Scalar(state[at, e]) * Scalar(x[row, key_head, at])).value, "add")
                        for x, to in ((k, found), (q, asked))
                        for chain, at in enumerate(places[: len(to)])
                    )
                )

            def changed(e: SymExpr) -> Stmt:
                def total(sums: list[Buffer]) -> Scalar:
                    return reduce(Scalar.__add__, (Scalar(x[e]) for x in sums)) * Scalar(factor[()])

                given = Scalar(v[row, h, begin + e])
                more = (given - total(found) if delta else given) * Scalar(beta[row, h])
                result = total(asked) + more * Scalar(alike[()])
                return seq(Store(change, (e,), more.value), Store(y, (row, h, begin + e), result.value))

            def renewed(d: SymExpr, e: SymExpr) -> Stmt:
                old = Scalar(state[d, e]) * Scalar(factor[()])
                return Store(state, (d, e), Intrinsic("fma", (k[row, key_head, d], change[e], old.value), "float32"))

            def token() -> Stmt:
                return seq(
                    Store(factor, (), Scalar(decay[row, h]).exp().value),
                    fold(
                        "float32", "add", sym(key_width),
                        lambda d: Scalar(q[row, key_head, d]) * Scalar(k[row, key_head, d]),
                        lambda total: Store(alike, (), total.value),
                    ),
                    *(compute(x, lambda *i: literal(0.0, "float32")) for x in sums_of),
                    loops("de", (key_width // chains, columns), sums),
                    loops("e", (columns,), changed),
                    loops("de", (key_width, columns), renewed),
                )  # fmt: skip

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr, to: SymExpr) -> Stmt:
                def kept(d: SymExpr, e: SymExpr) -> Stmt:
                    return Store(new, (h, to, d, begin + e), state[d, e])

                known = _is_there(slot)
                return seq(
                    For(SymVar("none"), 1 - known, compute(state, lambda *i: literal(0.0, "float32"))),
                    For(SymVar("some"), known, compute(state, lambda d, e: pool[h, slot, d, begin + e])),
                    loops("t", (rows,), lambda t: LetIndex(row, index(first + t).value, token())),
                    For(SymVar("kept"), _is_there(to), loops("de", (key_width, columns), kept)),
                )

            body = _with_span(self.name, spans, w, y.shape[0], pool.shape[1], span)
            for buffer in (state, change, *sums_of, factor, alike):
                body = Allocate(buffer, body)
            fields = ((begin, t % parts * columns), (h, t // parts % heads), (w, t // (heads * parts)))
            for var, place in fields:
                body = LetIndex(var, index(place).value, body)
            return body

        t = SymVar("t")
        rows = y.shape[0]
        checks = equality_checks(
            "gated_linear_attention: q, k, v, decay and beta have different rows",
            *((x.shape[0], rows) for x in (q, k, v, decay, beta)),
        )
        # rows do not overlap, which is the caller's promise: no loop can show it
        tasks = For(t, spans.shape[0] * (heads * parts), task(t), "parallel")
        copy, zeros = compute(new, lambda *i: pool[i]), compute(y, lambda *i: literal(0.0, "float32"))
        return seq(*checks, copy, zeros, tasks)

    def reference(
        self, q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, spans: Any, *, tiled: bool, delta: bool
    ) -> tuple[Any, Any]:
        heads, shared = v.shape[1], v.shape[1] // k.shape[1]
        places = np.arange(heads) % k.shape[1] if tiled else np.arange(heads) // shared
        out, new = np.zeros(v.shape, np.float32), pool.copy()
        for first, rows, slot, to in spans.tolist():
            state = np.zeros_like(pool[:, 0]) if slot < 0 else pool[:, slot]
            for row in range(first, first + rows):
                key, state = k[row, places], state * np.exp(decay[row])[:, None, None]
                missing = v[row] - np.einsum("hd,hde->he", key, state) if delta else v[row]
                state = state + key[:, :, None] * (missing * beta[row][:, None])[:, None, :]
                out[row] = np.einsum("hd,hde->he", q[row, places], state)
            if to >= 0:
                new[:, to] = state
        return out, new

    def samples(self) -> Iterable[Sample]:
        def negative(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return -np.abs(rng.standard_normal(shape)).astype(np.float32)

        result = {3: negative, 6: _draw_spans}
        kinds = ("float32",) * 6 + ("int64",)
        for key_heads, heads, key_width, width, attrs in (
            (2, 4, 8, 16, {"tiled": True}),
            (2, 4, 5, 40, {}),
            (1, 1, 16, 7, {}),
            (2, 6, 8, 64, {"delta": False}),
        ):
            keys, values, gates = (7, key_heads, key_width), (7, heads, width), (7, heads)
            shapes = (keys, keys, values, gates, gates, (heads, "p + 5", key_width, width), (5, SPAN_FIELDS))
            yield Sample(shapes, attrs, kinds, result, tolerance=1e-4)


@register
class StateConvolution(Op):
    """(out (n, width), the pool with the last l - 1 rows of each span): of each row of a span the sum over j < l of
    weight[j] * the row l - 1 - j places before it, channel by channel, x float32 (n, width) behind the l - 1 rows of
    its slot in the pool (1, slots, l - 1, width). weight (l, width), l > 1. Rows that no span names are 0; spans do not
    overlap.
    """

    name = "state_convolution"
    operands = ("x", "weight", "pool", "spans")
    reads_apart = True

    def infer(self, *operands: Expr) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        told = ", ".join(map(str, types))
        if [t.rank for t in types] != [2, 2, 4, 2]:
            self.fail(f"x, weight, pool and spans must have ranks 2, 2, 4, 2, got {told}")
        _check_kinds(self, types, told)
        x, weight, pool, _ = (t.shape or () for t in types)
        length, width = (as_int(d) or 0 for d in weight)
        if length < 2 or not width:
            self.fail(f"a weight (l, width) of known sizes is needed, with l of 2 at least, got {told}")
        wanted = [(x, (x[0], weight[1])), (pool, (sym(1), pool[1], sym(length - 1), weight[1]))]
        if any(PROVER.can_prove_ne(a, b) for result, right in wanted for a, b in zip(result, right, strict=True)):
            self.fail(f"x and the pool must be as wide as the weight, and the pool one row less long, got {told}")
        return TupleType((TensorType.of((x[0], width), "float32"), types[2]))

    def lower(self, x: Buffer, weight: Buffer, pool: Buffer, spans: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        y, new = out
        length, width = (as_int(d) or 1 for d in weight.shape)
        channels = _divisor(width, CHANNELS)
        parts = width // channels

        def task(t: SymExpr) -> Stmt:
            w, begin = SymVar("w"), SymVar("begin", upper=width - channels)

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr, to: SymExpr) -> Stmt:
                known, kept, past = _is_there(slot), _is_there(to), length - 1

                def along(place: SymExpr, make: Callable[[SymExpr, Scalar], Stmt]) -> Stmt:
                    """make(channel, element) of the row `place` of the span, which may lie before it; else nothing."""
                    at, inside = SymVar("at", lower=None), smin(smax(place + 1, sym(0)), sym(1))

                    def row_of(load: Callable[[SymExpr], Load]) -> Stmt:
                        return loops("c", (channels,), lambda c: make(begin + c, Scalar(load(begin + c))))

                    own = LetIndex(at, index(first + place).value, row_of(lambda c: x[at, c]))
                    old = LetIndex(at, index(place + past).value, row_of(lambda c: pool[sym(0), slot, at, c]))
                    return seq(For(SymVar("own"), inside, own), For(SymVar("old"), (1 - inside) * known, old))

                def first_row(t: SymExpr) -> Stmt:
                    """One of those that see rows before the span."""

                    def term(j: int) -> Callable[[SymExpr, Scalar], Stmt]:
                        def added(c: SymExpr, found: Scalar) -> Stmt:
                            return Store(y, (first + t, c), _added(found.value, weight[sym(j), c], y[first + t, c]))

                        return added

                    return seq(*(along(t - (past - j), term(j)) for j in range(length)))

                def other_row(t: SymExpr) -> Stmt:
                    at = SymVar("at", lower=None)

                    def channel(c: SymExpr) -> Stmt:
                        total: Value = literal(0.0, "float32")
                        for j in range(length):
                            total = _added(x[at + j, begin + c], weight[sym(j), begin + c], total)
                        return Store(y, (at + past, begin + c), total)

                    return LetIndex(at, index(first + t).value, loops("c", (channels,), channel))

                def last(i: SymExpr) -> Stmt:
                    def place(c: SymExpr) -> tuple[SymExpr, ...]:
                        return (sym(0), to, i, c)

                    at = rows - past + i
                    before = (1 - smin(smax(at + 1, sym(0)), sym(1))) * (1 - known)
                    zero = loops("c", (channels,), lambda c: Store(new, place(begin + c), literal(0.0, "float32")))
                    taken = along(at, lambda c, found: Store(new, place(c), found.value))
                    return seq(taken, For(SymVar("none"), before, zero))

                return seq(
                    loops("t", (smin(rows, sym(past)),), first_row),
                    loops("t", (smax(rows - past, sym(0)),), other_row),
                    For(SymVar("kept"), kept, loops("i", (past,), last)),
                )

            body = _with_span(self.name, spans, w, y.shape[0], pool.shape[1], span)
            for var, place in ((begin, t % parts * channels), (w, t // parts)):
                body = LetIndex(var, index(place).value, body)
            return body

        t = SymVar("t")
        checks = equality_checks("state_convolution: x has other rows than the result", (x.shape[0], y.shape[0]))
        copy, zeros = compute(new, lambda *i: pool[i]), compute(y, lambda *i: literal(0.0, "float32"))
        return seq(*checks, copy, zeros, For(t, spans.shape[0] * parts, task(t), "parallel"))

    def reference(self, x: Any, weight: Any, pool: Any, spans: Any) -> tuple[Any, Any]:
        past, width = len(weight) - 1, x.shape[1]
        out, new = np.zeros_like(x), pool.copy()
        for first, rows, slot, to in spans.tolist():
            before = np.zeros((past, width), np.float32) if slot < 0 else pool[0, slot]
            seen = np.concatenate([before, x[first : first + rows]])
            for t in range(rows):
                out[first + t] = (seen[t : t + past + 1] * weight).sum(axis=0)
            if to >= 0:
                new[0, to] = seen[rows:]
        return out, new

    def samples(self) -> Iterable[Sample]:
        for length, width in ((4, 20), (2, 1), (5, 1030)):
            shapes = ((7, width), (length, width), (1, "p + 5", length - 1, width), (5, SPAN_FIELDS))
            yield Sample(shapes, {}, ("float32",) * 3 + ("int64",), {3: _draw_spans})


def _check_kinds(op: Op, types: list[TensorType], told: str) -> None:
    """float32, and spans at last."""
    if any(t.dtype != "float32" for t in types[:-1]):
        op.fail(f"all but the spans must be float32, got {told}")
    if types[-1].dtype != "int64" or as_int((types[-1].shape or (0, 0))[1]) != SPAN_FIELDS:
        op.fail(f"spans must be int64 of {SPAN_FIELDS} columns, got {told}")


def _added(a: Value, b: Value, total: Value) -> Value:
    """total + a * b, rounded alike wherever a row stands"""
    return Intrinsic("fma", (a, b, total), "float32")


def _divisor(count: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next(d for d in range(min(count, most), 0, -1) if count % d == 0)


def _is_there(slot: SymExpr) -> SymExpr:
    """1, or 0 of a negative slot."""
    return smin(smax(slot + 1, sym(0)), sym(1))


def _with_span(
    name: str,
    spans: Buffer,
    w: SymExpr,
    rows: SymExpr,
    slots: SymExpr,
    make: Callable[[SymExpr, SymExpr, SymExpr, SymExpr], Stmt],
) -> Stmt:
    """make(first row, rows, slot before, slot behind) of span `w`, which is checked."""
    fields = tuple(SymVar(field, lower=None) for field in ("first", "count", "slot", "to"))
    first, count, slot, to = fields
    checks = {
        "its number of rows": index(count) >= 0,
        "a row": (index(first) >= 0) & (index(first + count) <= rows),
        "a slot": (index(slot) < slots) & (index(to) < slots),
    }
    guards = [Check(cond.value, f"{name}: {what} is out of range in a span") for what, cond in checks.items()]
    body = seq(*guards, make(*fields))
    for k, field in reversed(list(enumerate(fields))):
        body = LetIndex(field, spans[w, sym(k)], body)
    return body


def _draw_spans(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Of 7 rows, four of a sequence that begins, none of two others, whose states move and stay, one of a sequence that
    stays in its slot, and one whose new state goes nowhere."""
    return np.array([(0, 4, -1, 1), (4, 0, 2, 0), (4, 0, 4, 4), (4, 1, 3, 3), (6, 1, 2, -1)], np.int64)
