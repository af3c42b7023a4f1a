"""Layers whose past is one state of fixed size: the gated delta rule, and the short convolution before it.

Models that mix tokens so (Qwen3-Next, Qwen3.5) keep of each sequence a matrix for each head, and the last rows that the
convolution sees, however long the sequence is. States of all sequences lie in pools, one slot each. Tokens of all
sequences of a step stand one after another, without padding; `spans` int64 (s, 4) say whose they are: the first row,
how many, the slot with the state before them (negative: none, it is zero), and the slot for the state behind them.
Both ops give the states behind as a result, which `store_states` puts into the pool: a step reads what the ones before
have left, whatever it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.nn_attention import fold
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.program import Allocate, Buffer, Check, For, LetIndex, Load, Stmt, Store, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, TupleType, Type

SPAN_FIELDS = 4
COLUMNS = 32  # of a state, which do not depend on others: 128 x 32 floats stay in a first cache from token to token
CHANNELS = 512  # of a convolution, in one task


@register
class GatedDeltaRule(Op):
    """(out (n, heads, width), states (s, heads, key_width, width)): for each token of a span and each head, from the
    state S before it (Yang et al., "Gated Delta Networks", arXiv 2412.06464):

        S = exp(decay) * S;  S = S + k (x) (beta * (v - k . S));  out = q . S

    q, k float32 (n, key_heads, key_width), v (n, heads, width), decay, beta (n, heads), pool (heads, slots, key_width,
    width). Each head of keys serves heads / key_heads in a row, or, `tiled`, every key_heads-th. Rows that no span
    names are 0; spans do not overlap.
    """

    name = "gated_delta_rule"
    operands = ("q", "k", "v", "decay", "beta", "pool", "spans")
    attrs: ClassVar[Mapping[str, Attr]] = {"tiled": Attr("bool", False)}

    def infer(self, *operands: Expr, tiled: bool) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        told = ", ".join(map(str, types))
        if [t.rank for t in types] != [3, 3, 3, 2, 2, 4, 2]:
            self.fail(f"q, k, v, decay, beta, pool and spans must have ranks 3, 3, 3, 2, 2, 4, 2, got {told}")
        _check_kinds(self, types, told)
        q, k, v, decay, beta, pool, spans = (t.shape or () for t in types)
        key_heads, key_width, heads, width = (as_int(d) or 0 for d in (*k[1:], *v[1:]))
        if not (key_heads and key_width and heads and width) or heads % key_heads:
            self.fail(f"heads and widths must be known, and heads of keys divide those of values, got {told}")
        wanted = [(q, (v[0], *k[1:])), (k, (v[0], *k[1:])), (decay, v[:2]), (beta, v[:2])]
        wanted.append((pool, (v[1], pool[1], k[2], v[2])))
        if any(PROVER.can_prove_ne(a, b) for found, right in wanted for a, b in zip(found, right, strict=True)):
            self.fail(f"rows, heads or widths of q, k, v, decay, beta and the pool do not fit: {told}")
        return TupleType(
            (
                TensorType.of((v[0], heads, width), "float32"),
                TensorType.of((spans[0], heads, key_width, width), "float32"),
            )
        )

    def lower(
        self, q: Buffer, k: Buffer, v: Buffer, decay: Buffer, beta: Buffer, pool: Buffer, spans: Buffer,
        *, out: tuple[Buffer, Buffer], tiled: bool,
    ) -> Stmt:  # fmt: skip
        y, states = out
        heads, width, key_width = (as_int(d) or 1 for d in (*v.shape[1:], k.shape[2]))
        key_heads, columns = as_int(k.shape[1]) or 1, _divisor(width, COLUMNS)
        parts = width // columns
        state = Buffer("state", (sym(key_width), sym(columns)), "float32", "local")
        delta = Buffer("delta", (sym(columns),), "float32", "local")
        factor = Buffer("factor", (), "float32", "local")

        def task(t: SymExpr) -> Stmt:
            w, h, begin = SymVar("w"), SymVar("h", upper=heads - 1), SymVar("begin", upper=width - columns)
            key_head = h % key_heads if tiled else h // (heads // key_heads)
            row = SymVar("row", lower=None)

            def remembered(e: SymExpr, queried: Buffer, finish: Callable[[Scalar], Stmt]) -> Stmt:
                """finish(queried . S) of one column."""
                return fold(
                    "float32", "add", sym(key_width),
                    lambda d: Scalar(state[d, e]) * Scalar(queried[row, key_head, d]), finish,
                )  # fmt: skip

            def changed(e: SymExpr, found: Scalar) -> Stmt:
                missing = Scalar(v[row, h, begin + e]) - found * Scalar(factor[()])
                return Store(delta, (e,), (missing * Scalar(beta[row, h])).value)

            def renewed(d: SymExpr, e: SymExpr) -> Stmt:
                old = Scalar(state[d, e]) * Scalar(factor[()])
                return Store(state, (d, e), (old + Scalar(k[row, key_head, d]) * Scalar(delta[e])).value)

            def given(e: SymExpr, found: Scalar) -> Stmt:
                return Store(y, (row, h, begin + e), found.value)

            def token() -> Stmt:
                return seq(
                    Store(factor, (), Scalar(decay[row, h]).exp().value),
                    loops("e", (columns,), lambda e: remembered(e, k, lambda found: changed(e, found))),
                    loops("de", (key_width, columns), renewed),
                    loops("e", (columns,), lambda e: remembered(e, q, lambda found: given(e, found))),
                )

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr) -> Stmt:
                kept = _is_there(slot)
                return seq(
                    For(SymVar("none"), 1 - kept, compute(state, lambda *i: literal(0.0, "float32"))),
                    For(SymVar("some"), kept, compute(state, lambda d, e: pool[h, slot, d, begin + e])),
                    loops("t", (rows,), lambda t: LetIndex(row, index(first + t).value, token())),
                    loops("de", (key_width, columns), lambda d, e: Store(states, (w, h, d, begin + e), state[d, e])),
                )

            body = _with_span(self.name, spans, w, y.shape[0], pool.shape[1], span)
            for buffer in (state, delta, factor):
                body = Allocate(buffer, body)
            fields = ((begin, t % parts * columns), (h, t // parts % heads), (w, t // (heads * parts)))
            for var, place in fields:
                body = LetIndex(var, index(place).value, body)
            return body

        t = SymVar("t")
        rows = y.shape[0]
        checks = equality_checks(
            "gated_delta_rule: q, k, v, decay and beta have different rows",
            *((x.shape[0], rows) for x in (q, k, v, decay, beta)),
        )
        # rows do not overlap, which is the caller's promise: no loop can show it
        tasks = For(t, spans.shape[0] * (heads * parts), task(t), "parallel")
        return seq(*checks, compute(y, lambda *i: literal(0.0, "float32")), tasks)

    def reference(
        self, q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, spans: Any, *, tiled: bool
    ) -> tuple[Any, Any]:
        heads, shared = v.shape[1], v.shape[1] // k.shape[1]
        places = np.arange(heads) % k.shape[1] if tiled else np.arange(heads) // shared
        out = np.zeros(v.shape, np.float32)
        states = np.zeros((len(spans), heads, k.shape[2], v.shape[2]), np.float32)
        for w, (first, rows, slot, _) in enumerate(spans.tolist()):
            state = np.zeros_like(states[w]) if slot < 0 else pool[:, slot]
            for row in range(first, first + rows):
                key, state = k[row, places], state * np.exp(decay[row])[:, None, None]
                missing = v[row] - np.einsum("hd,hde->he", key, state)
                state = state + key[:, :, None] * (missing * beta[row][:, None])[:, None, :]
                out[row] = np.einsum("hd,hde->he", q[row, places], state)
            states[w] = state
        return out, states

    def samples(self) -> Iterable[Sample]:
        def negative(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return -np.abs(rng.standard_normal(shape)).astype(np.float32)

        made = {3: negative, 6: _draw_spans}
        kinds = ("float32",) * 6 + ("int64",)
        for key_heads, heads, key_width, width, tiled in (
            (2, 4, 8, 16, True),
            (2, 4, 6, 40, False),
            (1, 1, 16, 7, False),
        ):
            keys, values, gates = (7, key_heads, key_width), (7, heads, width), (7, heads)
            shapes = (keys, keys, values, gates, gates, (heads, "p + 3", key_width, width), (3, SPAN_FIELDS))
            yield Sample(shapes, {"tiled": tiled}, kinds, made, tolerance=1e-4)


@register
class StateConvolution(Op):
    """(out (n, width), states (s, 1, l - 1, width)): of each row of a span the sum over j < l of weight[j] * the row
    l - 1 - j places before it, channel by channel, x float32 (n, width) behind the l - 1 rows of its slot in the pool
    (1, slots, l - 1, width); and the last l - 1 rows of each. weight (l, width), l > 1. Rows that no span names are 0;
    spans do not overlap.
    """

    name = "state_convolution"
    operands = ("x", "weight", "pool", "spans")

    def infer(self, *operands: Expr) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        told = ", ".join(map(str, types))
        if [t.rank for t in types] != [2, 2, 4, 2]:
            self.fail(f"x, weight, pool and spans must have ranks 2, 2, 4, 2, got {told}")
        _check_kinds(self, types, told)
        x, weight, pool, spans = (t.shape or () for t in types)
        length, width = (as_int(d) or 0 for d in weight)
        if length < 2 or not width:
            self.fail(f"a weight (l, width) of known sizes is needed, with l of 2 at least, got {told}")
        wanted = [(x, (x[0], weight[1])), (pool, (sym(1), pool[1], sym(length - 1), weight[1]))]
        if any(PROVER.can_prove_ne(a, b) for found, right in wanted for a, b in zip(found, right, strict=True)):
            self.fail(f"x and the pool must be as wide as the weight, and the pool one row less long, got {told}")
        return TupleType(
            (TensorType.of((x[0], width), "float32"), TensorType.of((spans[0], 1, length - 1, width), "float32"))
        )

    def lower(self, x: Buffer, weight: Buffer, pool: Buffer, spans: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        y, states = out
        length, width = (as_int(d) or 1 for d in weight.shape)
        channels = _divisor(width, CHANNELS)
        parts = width // channels

        def task(t: SymExpr) -> Stmt:
            w, begin = SymVar("w"), SymVar("begin", upper=width - channels)

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr) -> Stmt:
                kept = _is_there(slot)

                def along(place: SymExpr, make: Callable[[SymExpr, Scalar], Stmt]) -> Stmt:
                    """make(channel, element) of the row `place` of the span, which may lie before it; else nothing."""
                    at, inside = SymVar("at", lower=None), smin(smax(place + 1, sym(0)), sym(1))

                    def channel(load: Callable[[SymExpr], Load]) -> Stmt:
                        return loops("c", (channels,), lambda c: make(begin + c, Scalar(load(begin + c))))

                    new = LetIndex(at, index(first + place).value, channel(lambda c: x[at, c]))
                    past = channel(lambda c: pool[sym(0), slot, at, c])
                    old = LetIndex(at, index(place + (length - 1)).value, past)
                    return seq(For(SymVar("new"), inside, new), For(SymVar("old"), (1 - inside) * kept, old))

                def row(t: SymExpr) -> Stmt:
                    def term(j: int) -> Callable[[SymExpr, Scalar], Stmt]:
                        return lambda c, found: Store(
                            y, (first + t, c), (found * Scalar(weight[sym(j), c])).value, "add"
                        )

                    return seq(*(along(t - (length - 1 - j), term(j)) for j in range(length)))

                def last(i: SymExpr) -> Stmt:
                    return along(
                        rows - (length - 1) + i, lambda c, found: Store(states, (w, sym(0), i, c), found.value)
                    )

                return seq(loops("t", (rows,), row), loops("i", (length - 1,), last))

            body = _with_span(self.name, spans, w, y.shape[0], pool.shape[1], span)
            for var, place in ((begin, t % parts * channels), (w, t // parts)):
                body = LetIndex(var, index(place).value, body)
            return body

        t = SymVar("t")
        checks = equality_checks("state_convolution: x has other rows than the result", (x.shape[0], y.shape[0]))
        zeros = [compute(each, lambda *i: literal(0.0, "float32")) for each in out]
        return seq(*checks, *zeros, For(t, spans.shape[0] * parts, task(t), "parallel"))

    def reference(self, x: Any, weight: Any, pool: Any, spans: Any) -> tuple[Any, Any]:
        past, width = len(weight) - 1, x.shape[1]
        out, states = np.zeros_like(x), np.zeros((len(spans), 1, past, width), np.float32)
        for w, (first, rows, slot, _) in enumerate(spans.tolist()):
            before = np.zeros((past, width), np.float32) if slot < 0 else pool[0, slot]
            seen = np.concatenate([before, x[first : first + rows]])
            for t in range(rows):
                out[first + t] = (seen[t : t + past + 1] * weight).sum(axis=0)
            states[w, 0] = seen[rows:]
        return out, states

    def samples(self) -> Iterable[Sample]:
        for length, width in ((4, 20), (2, 1), (5, 1030)):
            shapes = ((7, width), (length, width), (1, "p + 3", length - 1, width), (3, SPAN_FIELDS))
            yield Sample(shapes, {}, ("float32",) * 3 + ("int64",), {3: _draw_spans})


@register
class StoreStates(Op):
    """A copy of pool (heads, slots, a, b) with states (s, heads, a, b), each in the slot that its span ends in; where
    that is negative it goes nowhere. Where the pool is donated and dies, it is updated in place (passes/donate.py).
    """

    name = "store_states"
    operands = ("pool", "states", "spans")

    def infer(self, *operands: Expr) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        told = ", ".join(map(str, types))
        if [t.rank for t in types] != [4, 4, 2]:
            self.fail(f"pool, states and spans must have ranks 4, 4, 2, got {told}")
        _check_kinds(self, types, told)
        pool, states, spans = (t.shape or () for t in types)
        wanted = (spans[0], pool[0], *pool[2:])
        if any(map(PROVER.can_prove_ne, states, wanted)):
            self.fail(f"states must be (spans, heads, a, b) as the pool has them, got {told}")
        return types[0]

    def lower(self, pool: Buffer, states: Buffer, spans: Buffer, *, out: Buffer) -> Stmt:
        slot = SymVar("slot", lower=None)

        def state(w: SymExpr) -> Stmt:
            check = Check((index(slot) < pool.shape[1]).value, "store_states: a slot lies beyond the pool's")

            def element(h: SymExpr, a: SymExpr, b: SymExpr) -> Stmt:
                return Store(out, (h, slot, a, b), states[w, h, a, b])

            stores = loops("hab", (pool.shape[0] * _is_there(slot), *pool.shape[2:]), element)
            return LetIndex(slot, spans[w, sym(3)], seq(check, stores))

        checks = equality_checks(
            "store_states: pool, states and spans differ in size",
            (states.shape[0], spans.shape[0]), (states.shape[1], pool.shape[0]),
            (states.shape[2], pool.shape[2]), (states.shape[3], pool.shape[3]),
        )  # fmt: skip
        return seq(*checks, compute(out, lambda *i: pool[i]), loops("w", (spans.shape[0],), state))

    def reference(self, pool: Any, states: Any, spans: Any) -> Any:
        out = pool.copy()
        for state, slot in zip(states, spans[:, 3].tolist(), strict=True):
            if slot >= 0:
                out[:, slot] = state
        return out

    def samples(self) -> Iterable[Sample]:
        for heads, a, b in ((4, 8, 16), (1, 3, 20)):
            shapes = ((heads, "p + 3", a, b), (3, heads, a, b), (3, SPAN_FIELDS))
            yield Sample(shapes, {}, ("float32", "float32", "int64"), {2: _draw_spans})


def _check_kinds(op: Op, types: list[TensorType], told: str) -> None:
    """float32, and spans at last."""
    if any(t.dtype != "float32" for t in types[:-1]):
        op.fail(f"all but the spans must be float32, got {told}")
    if types[-1].dtype != "int64" or as_int((types[-1].shape or (0, 0))[1]) != SPAN_FIELDS:
        op.fail(f"spans must be int64 of {SPAN_FIELDS} columns, got {told}")


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
    make: Callable[[SymExpr, SymExpr, SymExpr], Stmt],
) -> Stmt:
    """make(first row, rows, slot before) of span `w`, which is checked."""
    first, count, slot = (SymVar(field, lower=None) for field in ("first", "count", "slot"))
    checks = {
        "its number of rows": index(count) >= 0,
        "a row": (index(first) >= 0) & (index(first + count) <= rows),
        "its slot": index(slot) < slots,
    }
    guards = [Check(cond.value, f"{name}: {what} is out of range in a span") for what, cond in checks.items()]
    body = seq(*guards, make(first, count, slot))
    for k, field in reversed(list(enumerate((first, count, slot)))):
        body = LetIndex(field, spans[w, sym(k)], body)
    return body


def _draw_spans(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Of 7 rows, four of a sequence that begins, none of another, and two of a third, which stays in its slot."""
    return np.array([(0, 4, -1, 1), (4, 0, 2, -1), (5, 2, 0, 0)], np.int64)
