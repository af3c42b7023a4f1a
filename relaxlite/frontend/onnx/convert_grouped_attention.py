"""GroupQueryAttention of onnxruntime (com.microsoft): attention behind a cache that each sequence fills otherwise."""

from __future__ import annotations

from relaxlite.frontend.onnx.attention_parts import (
    attend,
    merge_heads,
    of_sizes,
    positions,
    repeated,
    rotated,
    score_scale,
    split_heads,
)
from relaxlite.frontend.onnx.convert_contrib import MICROSOFT
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, smax, sym
from relaxlite.records import dataclass

_ONE = Constant.of(1, "int64")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the new rows of each sequence stand: from begins[b] on, and of a sequence of lengths[b] in all.

    `is_prompt` (a bool tensor of rank 0): they are the first ones of their sequences, whatever the lengths say; None
    where the number of valid rows is given. `total`: how many rows the caches have at least.
    """

    count: SymExpr
    begins: Expr | None  # int64 (b,); None: 0
    lengths: Expr  # int64 (b,)
    is_prompt: Expr | None
    total: SymExpr

    def places(self, n: Node) -> Expr:
        """(b or 1, count)"""
        offsets = n.emit(ops.reshape(positions(n, self.count), (1, self.count)))
        return offsets if self.begins is None else n.emit(ops.add(_column(n, self.begins), offsets))


@onnx_op("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(n: Node) -> Result:
    """Inputs: query (or q, k, v side by side), key, value, past key, past value, lengths - 1 (b,), total length, cos,
    sin, positions (b, s), a bias of the scores, sinks (h,): scores of a key whose value is zero, 12 and 13: scales of a
    cache, 14 and 15: weights of an RMS norm of each head of q and k, the number of valid rows of q, k and v (b,).

    The new keys of a sequence go behind its old ones: to its length - s, or to 0 if s is the total length. The caches
    that come out have as many rows as those that come in, or as the total length if that is more.
    """
    heads, groups = n.int("num_heads"), n.int("kv_num_heads")
    _refuse_unsupported(n, heads, groups)
    q, k, v = _grouped_inputs(n, heads, groups)
    rows = _rows(n, n.optional(3), n.shape_of(q)[2])
    q, k = _normed(n, q, k)
    places = rows.places(n)
    if n.flag("do_rotary"):
        interleaved, turned = n.flag("rotary_interleaved"), _rotary_places(n, rows, places)
        cos, sin = n.input(7), of_sizes(n, 8, {1: n.shape(7)[1]})
        q = rotated(n, q, turned, cos, sin, interleaved)
        k = k if _is_shared(n) else rotated(n, k, turned, cos, sin, interleaved)
    n.ignore("rotary_interleaved")
    k, v = _appended(n, 3, k, rows), _appended(n, 4, v, rows)
    held = [repeated(n, x, heads // groups) for x in _without_room(n, rows, k, v)]
    sink = None if n.optional(11) is None else of_sizes(n, 11, {0: sym(heads)})
    if n.flag("smooth_softmax") and sink is None:
        sink = Constant.of([0.0], n.type_of(q).dtype)
    masks = [] if n.optional(10) is None else [of_sizes(n, 10, {2: rows.count, 3: rows.total})]
    result = attend(
        n, q, *held, scale=score_scale(n, n.shape_of(q)[3]), seen=_seen(n, rows, places), masks=masks,
        softcap=n.float("softcap", 0.0), sink=sink,
    )  # fmt: skip
    return merge_heads(n, result), k, v


def _refuse_unsupported(n: Node, heads: int, groups: int) -> None:
    quantized = any(n.text(name, "NONE") != "NONE" for name in ("k_quant_type", "v_quant_type"))
    if quantized or n.int("kv_cache_bit_width", 0) or any(n.optional(k) is not None for k in (12, 13)):
        n.fail("GroupQueryAttention with a quantized cache is not supported")
    if n.int("qk_output", 0) or n.wants(3):
        n.fail("GroupQueryAttention that gives its scores is not supported")
    if n.flag("sliding_window_cache"):
        n.fail("GroupQueryAttention with a cache of one window (sliding_window_cache) is not supported")
    if heads % groups:
        n.fail(f"num_heads, {heads}, must be a multiple of kv_num_heads, {groups}")
    for first, second, names in ((1, 2, "key and value"), (3, 4, "past key and past value"), (14, 15, "norms of q, k")):
        if (n.optional(first) is None) != (n.optional(second) is None):
            n.fail(f"inputs {first} and {second}, {names}, must be given together")


def _grouped_inputs(n: Node, heads: int, groups: int) -> tuple[Expr, Expr, Expr]:
    batch, length, width = n.shape()
    if n.optional(1) is not None:
        sizes = {0: batch} if _is_shared(n) else {0: batch, 1: length}
        k, v = (split_heads(n, of_sizes(n, i, sizes), groups) for i in (1, 2))
        return split_heads(n, n.input(0), heads), k, v
    begin, parts = sym(0), []
    for count in (heads, groups, groups):
        size = width // (heads + 2 * groups) * count
        parts.append(split_heads(n, n.emit(ops.slice(n.input(0), (begin,), (size,), axes=(2,))), count))
        begin = begin + size
    q, k, v = parts
    return q, k, v


def _is_shared(n: Node) -> bool:
    """Whether there are no new keys: the cache, another layer's, holds those of these rows already."""
    return n.optional(3) is not None and n.optional(1) is not None and as_int(n.shape(1)[1]) == 0


def _rows(n: Node, past: Expr | None, count: SymExpr) -> _Rows:
    batch, total = n.shape()[0], n.shape_values(6, lower=0)[0]
    given = of_sizes(n, 5, {0: batch}) if n.rank(5) == 1 else n.emit(ops.reshape(n.input(5), (batch,)))
    lengths = n.emit(ops.add(n.emit(ops.cast(given, dtype="int64")), _ONE))
    if n.optional(16) is not None:
        if past is None:
            n.fail("GroupQueryAttention with a number of valid rows (input 16) needs a past key and a past value")
        valid = n.emit(ops.cast(of_sizes(n, 16, {0: batch}), dtype="int64"))
        return _Rows(count, n.emit(ops.subtract(lengths, valid)), lengths, None, total)
    if past is None:
        _require_equal(n, total, count)
        return _Rows(count, None, lengths, Constant.of(True, "bool"), count)
    new, whole = (n.emit(ops.reshape(n.emit(ops.shape_to_tensor((x,))), ())) for x in (count, total))
    is_prompt = n.emit(ops.equal(new, whole))
    begins = n.emit(ops.where(is_prompt, Constant.of(0, "int64"), n.emit(ops.subtract(lengths, new))))
    return _Rows(count, begins, lengths, is_prompt, total)


def _require_equal(n: Node, total: SymExpr, count: SymExpr) -> None:
    if PROVER.can_prove_ne(total, count):
        n.fail(f"without a past, the total length (input 6) must be the length of the query, {count}, got {total}")
    if not PROVER.can_prove_equal(total, count):
        n.bb.match_shape(n.emit(ops.tensor_to_shape(n.emit(ops.shape_to_tensor((total,))))), (count,))


def _normed(n: Node, q: Expr, k: Expr) -> tuple[Expr, Expr]:
    common = n.float("qk_norm_epsilon", 1e-6)
    epsilons = [n.float(name, common) for name in ("q_norm_epsilon", "k_norm_epsilon")]
    if n.optional(14) is None:
        return q, k
    result = [
        n.emit(ops.rms_norm(x, of_sizes(n, i, {0: n.shape_of(x)[3]}), axis=-1, epsilon=epsilon))
        for x, i, epsilon in zip((q, k), (14, 15), epsilons, strict=True)
    ]
    return result[0], result[1]


def _rotary_places(n: Node, rows: _Rows, places: Expr) -> Expr:
    """Of a prompt, only the first of the positions that are given counts."""
    if n.optional(9) is None:  # rows that are not valid may lie behind the tables
        return places if rows.is_prompt is not None else _at_most_last(n, rows, places)
    count = rows.count
    given = n.emit(ops.cast(of_sizes(n, 9, {0: n.shape()[0]}), dtype="int64"))
    if not PROVER.can_prove_equal(n.shape(9)[1], count):  # there may be more of them
        given = n.emit(ops.slice(given, (0,), (count,), axes=(1,)))
    if rows.is_prompt is None:
        return given
    first = n.emit(ops.slice(given, (0, 0), (1, 1), axes=(0, 1)))
    offsets = n.emit(ops.reshape(positions(n, count), (1, count)))
    return n.emit(ops.where(rows.is_prompt, n.emit(ops.add(first, offsets)), given))


def _at_most_last(n: Node, rows: _Rows, places: Expr) -> Expr:
    """The places, (b, s), none behind the last of the sequence."""
    return n.emit(ops.minimum(places, _column(n, n.emit(ops.subtract(rows.lengths, _ONE)))))


def _column(n: Node, x: Expr) -> Expr:
    return n.emit(ops.expand_dims(x, axes=(1,)))


def _appended(n: Node, index: int, x: Expr, rows: _Rows) -> Expr:
    """The cache (an input) with new rows (b, h, s, d)."""
    cache = n.optional(index)
    if cache is None:
        return x
    held = n.shape(index)[2]
    begins = rows.lengths if _is_shared(n) else rows.begins
    assert begins is not None
    batch, heads, _, width = n.shape_of(x)
    cache = of_sizes(n, index, {0: batch, 1: heads, 3: width})
    return n.emit(ops.append_at(cache, x, begins, (smax(rows.total, held),)))


def _without_room(n: Node, rows: _Rows, k: Expr, v: Expr) -> list[Expr]:
    """Keys and values without the rows behind the total length, which a static cache has for later: usually many."""
    shape, total = n.shape_of(k), rows.total
    if PROVER.can_prove_equal(shape[2], total):
        return [k, v]
    fits = (*shape[:2], total, shape[3])
    total_and_all = (n.emit(ops.reshape(n.emit(ops.shape_to_tensor((x,))), ())) for x in (total, shape[2]))
    return n.importer.flow.branch(
        n.emit(ops.less(*total_and_all)),
        [
            lambda: [n.emit(ops.slice(x, (0,), (total,), axes=(2,))) for x in (k, v)],
            lambda: [n.bb.match_shape(x, fits) for x in (k, v)],
        ],
        ["keys", "values"],
    )


def _seen(n: Node, rows: _Rows, places: Expr) -> Expr:
    """Which of the keys each query sees, (b, 1, s or 1, total): none behind it or behind the end of its sequence."""
    window, column = n.int("local_window_size", -1), positions(n, rows.total)
    if not n.flag("causal", True):
        if window > 0:
            n.fail("GroupQueryAttention that is not causal has no local window")
        return n.emit(ops.less(column, n.emit(ops.expand_dims(rows.lengths, axes=(1, 2, 3)))))
    last = n.emit(ops.expand_dims(_at_most_last(n, rows, places), axes=(1, 3)))
    seen = n.emit(ops.less_equal(column, last))
    if window <= 0:
        return seen
    recent = n.emit(ops.less(n.emit(ops.subtract(last, column)), Constant.of(window, "int64")))
    return n.emit(ops.logical_and(seen, recent))
