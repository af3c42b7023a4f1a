"""Recurrent token mixers with a state of fixed size: gated linear attention and the short convolution before it.

Models with such layers (Qwen3-Next, Qwen3.5, Mamba-2) keep, per sequence, one matrix per head and the last rows of the
convolution's input. Pools hold the states of all sequences, one slot each. The tokens of all sequences of a step are
packed without padding (varlen); `spans` int64 (s, 4) map them to sequences: first row, number of rows, slot of the
initial state (negative: zeros), slot for the final state (negative: dropped). A slot that one span writes is not read
by another; its own initial state is read first. A donated pool that dies is updated in place (passes/memory/donate.py).
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
TASK_COLUMNS = 32  # independent columns of a state per task: 128 x 32 floats stay in the L1 cache from token to token
MAX_ACCUMULATORS = 2  # independent accumulators, to hide the latency of additions; 1 if rows are odd
TASK_CHANNELS = 512  # channels of a convolution per task


@register
class GatedLinearAttention(Op):
    """Gated delta rule linear attention: (out float32 (n, heads, width), the pool with the new states).

    For each token of a span and each head, with state S (Yang et al., "Gated Delta Networks", arXiv 2412.06464):

        S = exp(decay) * S;  c = beta * (v - k . S);  S = S + k (x) c;  out = q . S

    Without `delta`, c = beta * v: the state space model of Mamba-2 (Dao and Gu, arXiv 2405.21060).

    q, k float32 (n, key_heads, key_width), v (n, heads, width), decay, beta (n, heads), pool (heads, slots, key_width,
    width). A key head serves heads / key_heads consecutive heads, or with `tiled` every key_heads-th head. Spans do not
    overlap; rows in no span give 0. The loops sum q . S along with k . S, of the old S, and add (q . k) * c: S is read
    twice per token, not three times.
    """

    name = "gated_linear_attention"
    operands = ("q", "k", "v", "decay", "beta", "pool", "spans")
    reads_apart = True
    attrs: ClassVar[Mapping[str, Attr]] = {"tiled": Attr("bool", False), "delta": Attr("bool", True)}

    def infer(self, *operands: Expr, tiled: bool, delta: bool) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        types_text = ", ".join(map(str, types))
        if [t.rank for t in types] != [3, 3, 3, 2, 2, 4, 2]:
            self.fail(f"q, k, v, decay, beta, pool and spans must have ranks 3, 3, 3, 2, 2, 4, 2, got {types_text}")
        _check_kinds(self, types, types_text)
        q, k, v, decay, beta, pool, _ = (t.shape or () for t in types)
        key_heads, key_width, heads, width = (as_int(d) or 0 for d in (*k[1:], *v[1:]))
        if not (key_heads and key_width and heads and width) or heads % key_heads:
            self.fail(f"heads and widths must be known, and heads of keys divide those of values, got {types_text}")
        pairs = [(q, (v[0], *k[1:])), (k, (v[0], *k[1:])), (decay, v[:2]), (beta, v[:2])]
        pairs.append((pool, (v[1], pool[1], k[2], v[2])))
        if any(PROVER.can_prove_ne(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)):
            self.fail(f"rows, heads or widths of q, k, v, decay, beta and the pool do not fit: {types_text}")
        return TupleType((TensorType.of((v[0], heads, width), "float32"), types[5]))

    def lower(
        self, q: Buffer, k: Buffer, v: Buffer, decay: Buffer, beta: Buffer, pool: Buffer, spans: Buffer,
        *, out: tuple[Buffer, Buffer], tiled: bool, delta: bool,
    ) -> Stmt:  # fmt: skip
        y, new = out
        heads, width, key_width = (as_int(d) or 1 for d in (*v.shape[1:], k.shape[2]))
        key_heads, columns, chains = (
            as_int(k.shape[1]) or 1,
            _divisor(width, TASK_COLUMNS),
            _divisor(key_width, MAX_ACCUMULATORS),
        )
        blocks = width // columns
        state = Buffer("state", (sym(key_width), sym(columns)), "float32", "local")
        change, *all_sums = (
            Buffer(name, (sym(columns),), "float32", "local")
            for name in ("change", *(f"{kind}{chain}" for kind in ("asked", "found") for chain in range(chains)))
        )
        query_sums, key_sums = all_sums[:chains], all_sums[chains:] if delta else []
        all_sums = [*query_sums, *key_sums]
        factor, query_key = (Buffer(name, (), "float32", "local") for name in ("factor", "alike"))

        def task(t: SymExpr) -> Stmt:
            w, h, begin = SymVar("w"), SymVar("h", upper=heads - 1), SymVar("begin", upper=width - columns)
            key_head = h % key_heads if tiled else h // (heads // key_heads)
            row = SymVar("row", lower=None)

            def sums(d: SymExpr, e: SymExpr) -> Stmt:
                """Accumulate k . S and q . S for one column and one row of the state per accumulator."""
                places = [d * chains + chain for chain in range(chains)]
                return seq(
                    *(
                        Store(to[chain], (e,), (Scalar(state[at, e]) * Scalar(x[row, key_head, at])).value, "add")
                        for x, to in ((k, key_sums), (q, query_sums))
                        for chain, at in enumerate(places[: len(to)])
                    )
                )

            def update_value(e: SymExpr) -> Stmt:
                def total(sums: list[Buffer]) -> Scalar:
                    return reduce(Scalar.__add__, (Scalar(x[e]) for x in sums)) * Scalar(factor[()])

                target = Scalar(v[row, h, begin + e])
                correction = (target - total(key_sums) if delta else target) * Scalar(beta[row, h])
                result = total(query_sums) + correction * Scalar(query_key[()])
                return seq(Store(change, (e,), correction.value), Store(y, (row, h, begin + e), result.value))

            def update_state(d: SymExpr, e: SymExpr) -> Stmt:
                old = Scalar(state[d, e]) * Scalar(factor[()])
                return Store(state, (d, e), Intrinsic("fma", (k[row, key_head, d], change[e], old.value), "float32"))

            def token() -> Stmt:
                return seq(
                    Store(factor, (), Scalar(decay[row, h]).exp().value),
                    fold(
                        "float32", "add", sym(key_width),
                        lambda d: Scalar(q[row, key_head, d]) * Scalar(k[row, key_head, d]),
                        lambda total: Store(query_key, (), total.value),
                    ),
                    *(compute(x, lambda *i: literal(0.0, "float32")) for x in all_sums),
                    loops("de", (key_width // chains, columns), sums),
                    loops("e", (columns,), update_value),
                    loops("de", (key_width, columns), update_state),
                )  # fmt: skip

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr, to: SymExpr) -> Stmt:
                def store_state(d: SymExpr, e: SymExpr) -> Stmt:
                    return Store(new, (h, to, d, begin + e), state[d, e])

                has_state = _is_slot(slot)
                return seq(
                    For(SymVar("none"), 1 - has_state, compute(state, lambda *i: literal(0.0, "float32"))),
                    For(SymVar("some"), has_state, compute(state, lambda d, e: pool[h, slot, d, begin + e])),
                    loops("t", (rows,), lambda t: LetIndex(row, index(first + t).value, token())),
                    For(SymVar("kept"), _is_slot(to), loops("de", (key_width, columns), store_state)),
                )

            body = _with_span(self.name, spans, w, y.shape[0], pool.shape[1], span)
            for buffer in (state, change, *all_sums, factor, query_key):
                body = Allocate(buffer, body)
            fields = ((begin, t % blocks * columns), (h, t // blocks % heads), (w, t // (heads * blocks)))
            for var, place in fields:
                body = LetIndex(var, index(place).value, body)
            return body

        t = SymVar("t")
        rows = y.shape[0]
        checks = equality_checks(
            "gated_linear_attention: q, k, v, decay and beta have different rows",
            *((x.shape[0], rows) for x in (q, k, v, decay, beta)),
        )
        # the caller guarantees that rows of spans are disjoint; no analysis can prove that
        tasks = For(t, spans.shape[0] * (heads * blocks), task(t), "parallel")
        copy, zeros = compute(new, lambda *i: pool[i]), compute(y, lambda *i: literal(0.0, "float32"))
        return seq(*checks, copy, zeros, tasks)

    def reference(
        self, q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, spans: Any, *, tiled: bool, delta: bool
    ) -> tuple[Any, Any]:
        heads, shared = v.shape[1], v.shape[1] // k.shape[1]
        key_heads = np.arange(heads) % k.shape[1] if tiled else np.arange(heads) // shared
        out, new = np.zeros(v.shape, np.float32), pool.copy()
        for first, rows, slot, to in spans.tolist():
            state = np.zeros_like(pool[:, 0]) if slot < 0 else pool[:, slot]
            for row in range(first, first + rows):
                key, state = k[row, key_heads], state * np.exp(decay[row])[:, None, None]
                correction = v[row] - np.einsum("hd,hde->he", key, state) if delta else v[row]
                state = state + key[:, :, None] * (correction * beta[row][:, None])[:, None, :]
                out[row] = np.einsum("hd,hde->he", q[row, key_heads], state)
            if to >= 0:
                new[:, to] = state
        return out, new

    def samples(self) -> Iterable[Sample]:
        def negative(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return -np.abs(rng.standard_normal(shape)).astype(np.float32)

        draws = {3: negative, 6: _draw_spans}
        kinds = ("float32",) * 6 + ("int64",)
        for key_heads, heads, key_width, width, attrs in (
            (2, 4, 8, 16, {"tiled": True}),
            (2, 4, 5, 40, {}),
            (1, 1, 16, 7, {}),
            (2, 6, 8, 64, {"delta": False}),
        ):
            keys, values, gates = (7, key_heads, key_width), (7, heads, width), (7, heads)
            shapes = (keys, keys, values, gates, gates, (heads, "p + 5", key_width, width), (5, SPAN_FIELDS))
            yield Sample(shapes, attrs, kinds, draws, tolerance=1e-4)


@register
class StateConvolution(Op):
    """Causal depthwise convolution with carried state: (out (n, width), pool with the last l - 1 rows of each span).

    Row t of a span gives the sum over j < l of weight[j] * row t - (l - 1) + j, channel by channel; the l - 1 rows
    before a span come from its slot of the pool. x float32 (n, width), weight (l, width), l > 1, pool (1, slots, l - 1,
    width). Spans do not overlap; rows in no span give 0.
    """

    name = "state_convolution"
    operands = ("x", "weight", "pool", "spans")
    reads_apart = True

    def infer(self, *operands: Expr) -> Type:
        types = [self.tensor(x, name) for x, name in zip(operands, self.operands, strict=True)]
        types_text = ", ".join(map(str, types))
        if [t.rank for t in types] != [2, 2, 4, 2]:
            self.fail(f"x, weight, pool and spans must have ranks 2, 2, 4, 2, got {types_text}")
        _check_kinds(self, types, types_text)
        x, weight, pool, _ = (t.shape or () for t in types)
        length, width = (as_int(d) or 0 for d in weight)
        if length < 2 or not width:
            self.fail(f"a weight (l, width) of known sizes is needed, with l of 2 at least, got {types_text}")
        pairs = [(x, (x[0], weight[1])), (pool, (sym(1), pool[1], sym(length - 1), weight[1]))]
        if any(PROVER.can_prove_ne(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)):
            self.fail(f"x and the pool must be as wide as the weight, and the pool one row less long, got {types_text}")
        return TupleType((TensorType.of((x[0], width), "float32"), types[2]))

    def lower(self, x: Buffer, weight: Buffer, pool: Buffer, spans: Buffer, *, out: tuple[Buffer, Buffer]) -> Stmt:
        y, new = out
        length, width = (as_int(d) or 1 for d in weight.shape)
        channels = _divisor(width, TASK_CHANNELS)
        parts = width // channels

        def task(t: SymExpr) -> Stmt:
            w, begin = SymVar("w"), SymVar("begin", upper=width - channels)

            def span(first: SymExpr, rows: SymExpr, slot: SymExpr, to: SymExpr) -> Stmt:
                has_state, has_target, past = _is_slot(slot), _is_slot(to), length - 1

                def for_row(place: SymExpr, make: Callable[[SymExpr, Scalar], Stmt]) -> Stmt:
                    """Loop make(channel, element) over row `place` of the span, or if negative of the state, if any."""
                    at, is_inside = SymVar("at", lower=None), smin(smax(place + 1, sym(0)), sym(1))

                    def row_of(load: Callable[[SymExpr], Load]) -> Stmt:
                        return loops("c", (channels,), lambda c: make(begin + c, Scalar(load(begin + c))))

                    from_span = LetIndex(at, index(first + place).value, row_of(lambda c: x[at, c]))
                    from_state = LetIndex(at, index(place + past).value, row_of(lambda c: pool[sym(0), slot, at, c]))
                    return seq(
                        For(SymVar("own"), is_inside, from_span),
                        For(SymVar("old"), (1 - is_inside) * has_state, from_state),
                    )

                def first_row(t: SymExpr) -> Stmt:
                    """Compute a row whose window starts before the span."""

                    def term(j: int) -> Callable[[SymExpr, Scalar], Stmt]:
                        def added(c: SymExpr, element: Scalar) -> Stmt:
                            return Store(y, (first + t, c), _fma(element.value, weight[sym(j), c], y[first + t, c]))

                        return added

                    return seq(*(for_row(t - (past - j), term(j)) for j in range(length)))

                def other_row(t: SymExpr) -> Stmt:
                    at = SymVar("at", lower=None)

                    def channel(c: SymExpr) -> Stmt:
                        total: Value = literal(0.0, "float32")
                        for j in range(length):
                            total = _fma(x[at + j, begin + c], weight[sym(j), begin + c], total)
                        return Store(y, (at + past, begin + c), total)

                    return LetIndex(at, index(first + t).value, loops("c", (channels,), channel))

                def store_row(i: SymExpr) -> Stmt:
                    def place(c: SymExpr) -> tuple[SymExpr, ...]:
                        return (sym(0), to, i, c)

                    at = rows - past + i
                    is_missing = (1 - smin(smax(at + 1, sym(0)), sym(1))) * (1 - has_state)
                    zero = loops("c", (channels,), lambda c: Store(new, place(begin + c), literal(0.0, "float32")))
                    copied = for_row(at, lambda c, element: Store(new, place(c), element.value))
                    return seq(copied, For(SymVar("none"), is_missing, zero))

                return seq(
                    loops("t", (smin(rows, sym(past)),), first_row),
                    loops("t", (smax(rows - past, sym(0)),), other_row),
                    For(SymVar("kept"), has_target, loops("i", (past,), store_row)),
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
            state = np.zeros((past, width), np.float32) if slot < 0 else pool[0, slot]
            rows_with_state = np.concatenate([state, x[first : first + rows]])
            for t in range(rows):
                out[first + t] = (rows_with_state[t : t + past + 1] * weight).sum(axis=0)
            if to >= 0:
                new[0, to] = rows_with_state[rows:]
        return out, new

    def samples(self) -> Iterable[Sample]:
        for length, width in ((4, 20), (2, 1), (5, 1030)):
            shapes = ((7, width), (length, width), (1, "p + 5", length - 1, width), (5, SPAN_FIELDS))
            yield Sample(shapes, {}, ("float32",) * 3 + ("int64",), {3: _draw_spans})


def _check_kinds(op: Op, types: list[TensorType], types_text: str) -> None:
    """Check that all operands are float32, and the last one int64 spans."""
    if any(t.dtype != "float32" for t in types[:-1]):
        op.fail(f"all but the spans must be float32, got {types_text}")
    if types[-1].dtype != "int64" or as_int((types[-1].shape or (0, 0))[1]) != SPAN_FIELDS:
        op.fail(f"spans must be int64 of {SPAN_FIELDS} columns, got {types_text}")


def _fma(a: Value, b: Value, total: Value) -> Value:
    """Fused multiply-add total + a * b, so that rounding does not depend on the position of a row."""
    return Intrinsic("fma", (a, b, total), "float32")


def _divisor(count: int, limit: int) -> int:
    """Largest divisor of `count` that is at most `limit`."""
    return next(d for d in range(min(count, limit), 0, -1) if count % d == 0)


def _is_slot(slot: SymExpr) -> SymExpr:
    """1 for a slot, 0 for a negative one."""
    return smin(smax(slot + 1, sym(0)), sym(1))


def _with_span(
    name: str,
    spans: Buffer,
    w: SymExpr,
    rows: SymExpr,
    slots: SymExpr,
    make: Callable[[SymExpr, SymExpr, SymExpr, SymExpr], Stmt],
) -> Stmt:
    """Load and check the fields of span `w`, for make(first row, rows, initial slot, final slot)."""
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
    """Spans over 7 rows: a new sequence, two empty ones (state moved, state kept), one in place, one dropped."""
    return np.array([(0, 4, -1, 1), (4, 0, 2, 0), (4, 0, 4, 4), (4, 1, 3, 3), (6, 1, 2, -1)], np.int64)
