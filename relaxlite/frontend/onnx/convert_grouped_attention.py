"""Converter of onnxruntime's GroupQueryAttention (com.microsoft), with a KV cache of varying lengths."""

from __future__ import annotations

from relaxlite.frontend.onnx.attention_parts import (
    apply_rotary,
    attend,
    attention_scale,
    input_with_sizes,
    merge_heads,
    positions,
    repeat_heads,
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
class _NewRows:
    """Positions of the step's new rows: `count` rows of sequence b, from begins[b] on."""

    count: SymExpr
    begins: Expr | None  # int64 (b,); None: 0
    lengths: Expr  # int64 (b,): of the sequences, with the new rows
    is_prompt: Expr | None  # bool scalar: the rows start their sequences; None: input 16 counts valid rows
    total: SymExpr  # minimum number of rows of the caches

    def places(self, n: Node) -> Expr:
        """Emit the positions of the rows in their sequences, (b or 1, count)."""
        offsets = n.emit(ops.reshape(positions(n, self.count), (1, self.count)))
        return offsets if self.begins is None else n.emit(ops.add(_column(n, self.begins), offsets))


@onnx_op("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(n: Node) -> Result:
    """GroupQueryAttention: attention that also appends the new keys and values to a KV cache.

    Inputs: query (or concatenated q, k, v), key, value, past key, past value, lengths - 1 (b,), total length, cos, sin,
    position ids (b, s), score bias, sinks (h,): scores of a key whose value is zero, 12 and 13: scales of a cache, 14
    and 15: weights of an RMS norm of each head of q and k, number of valid rows of q, k and v (b,).

    New keys of a sequence are appended at its length - s, or at 0 if s is the total length. The resulting caches have
    the rows of the input caches, or the total length if that is more.
    """
    heads, groups = n.int("num_heads"), n.int("kv_num_heads")
    _refuse_unsupported(n, heads, groups)
    q, k, v = _grouped_inputs(n, heads, groups)
    rows = _new_rows(n, n.optional(3), n.shape_of(q)[2])
    q, k = _normed(n, q, k)
    query_positions = rows.places(n)
    if n.flag("do_rotary"):
        interleaved, rotary_positions = n.flag("rotary_interleaved"), _rotary_positions(n, rows, query_positions)
        cos, sin = n.input(7), input_with_sizes(n, 8, {1: n.shape(7)[1]})
        q = apply_rotary(n, q, rotary_positions, cos, sin, interleaved)
        k = k if _is_shared(n) else apply_rotary(n, k, rotary_positions, cos, sin, interleaved)
    n.ignore("rotary_interleaved")
    k, v = _appended(n, 3, k, rows), _appended(n, 4, v, rows)
    kv = [repeat_heads(n, x, heads // groups) for x in _without_unused_rows(n, rows, k, v)]
    sink = None if n.optional(11) is None else input_with_sizes(n, 11, {0: sym(heads)})
    if n.flag("smooth_softmax") and sink is None:
        sink = Constant.of([0.0], n.type_of(q).dtype)
    masks = [] if n.optional(10) is None else [input_with_sizes(n, 10, {2: rows.count, 3: rows.total})]
    result = attend(
        n, q, *kv, scale=attention_scale(n, n.shape_of(q)[3]), visible=_visible_keys(n, rows, query_positions),
        masks=masks, softcap=n.float("softcap", 0.0), sink=sink,
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
        k, v = (split_heads(n, input_with_sizes(n, i, sizes), groups) for i in (1, 2))
        return split_heads(n, n.input(0), heads), k, v
    begin, parts = sym(0), []
    for count in (heads, groups, groups):
        size = width // (heads + 2 * groups) * count
        parts.append(split_heads(n, n.emit(ops.slice(n.input(0), (begin,), (size,), axes=(2,))), count))
        begin = begin + size
    q, k, v = parts
    return q, k, v


def _is_shared(n: Node) -> bool:
    """Whether the node has no new keys: the cache is another layer's, which has appended them."""
    return n.optional(3) is not None and n.optional(1) is not None and as_int(n.shape(1)[1]) == 0


def _new_rows(n: Node, past: Expr | None, count: SymExpr) -> _NewRows:
    batch, total = n.shape()[0], n.shape_values(6, lower=0)[0]
    last_positions = input_with_sizes(n, 5, {0: batch}) if n.rank(5) == 1 else n.emit(ops.reshape(n.input(5), (batch,)))
    lengths = n.emit(ops.add(n.emit(ops.cast(last_positions, dtype="int64")), _ONE))
    if n.optional(16) is not None:
        if past is None:
            n.fail("GroupQueryAttention with a number of valid rows (input 16) needs a past key and a past value")
        valid = n.emit(ops.cast(input_with_sizes(n, 16, {0: batch}), dtype="int64"))
        return _NewRows(count, n.emit(ops.subtract(lengths, valid)), lengths, None, total)
    if past is None:
        _require_equal(n, total, count)
        return _NewRows(count, None, lengths, Constant.of(True, "bool"), count)
    new_count, total_count = (n.emit(ops.reshape(n.emit(ops.shape_to_tensor((x,))), ())) for x in (count, total))
    is_prompt = n.emit(ops.equal(new_count, total_count))
    begins = n.emit(ops.where(is_prompt, Constant.of(0, "int64"), n.emit(ops.subtract(lengths, new_count))))
    return _NewRows(count, begins, lengths, is_prompt, total)


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
    normed = [
        n.emit(ops.rms_norm(x, input_with_sizes(n, i, {0: n.shape_of(x)[3]}), axis=-1, epsilon=epsilon))
        for x, i, epsilon in zip((q, k), (14, 15), epsilons, strict=True)
    ]
    return normed[0], normed[1]


def _rotary_positions(n: Node, rows: _NewRows, query_positions: Expr) -> Expr:
    """Return the positions for the rotary embedding; of given position ids of a prompt, only the first counts."""
    if n.optional(9) is None:  # invalid rows may be outside of the tables
        return query_positions if rows.is_prompt is not None else _clamp_to_last(n, rows, query_positions)
    count = rows.count
    position_ids = n.emit(ops.cast(input_with_sizes(n, 9, {0: n.shape()[0]}), dtype="int64"))
    if not PROVER.can_prove_equal(n.shape(9)[1], count):  # there may be more position ids
        position_ids = n.emit(ops.slice(position_ids, (0,), (count,), axes=(1,)))
    if rows.is_prompt is None:
        return position_ids
    first = n.emit(ops.slice(position_ids, (0, 0), (1, 1), axes=(0, 1)))
    offsets = n.emit(ops.reshape(positions(n, count), (1, count)))
    return n.emit(ops.where(rows.is_prompt, n.emit(ops.add(first, offsets)), position_ids))


def _clamp_to_last(n: Node, rows: _NewRows, query_positions: Expr) -> Expr:
    """Clamp positions (b, s) to the last position of each sequence."""
    return n.emit(ops.minimum(query_positions, _column(n, n.emit(ops.subtract(rows.lengths, _ONE)))))


def _column(n: Node, x: Expr) -> Expr:
    return n.emit(ops.expand_dims(x, axes=(1,)))


def _appended(n: Node, index: int, x: Expr, rows: _NewRows) -> Expr:
    """Append new rows (b, h, s, d) to the cache, input `index`."""
    cache = n.optional(index)
    if cache is None:
        return x
    capacity = n.shape(index)[2]
    begins = rows.lengths if _is_shared(n) else rows.begins
    assert begins is not None
    batch, heads, _, width = n.shape_of(x)
    cache = input_with_sizes(n, index, {0: batch, 1: heads, 3: width})
    return n.emit(ops.append_at(cache, x, begins, (smax(rows.total, capacity),)))


def _without_unused_rows(n: Node, rows: _NewRows, k: Expr, v: Expr) -> list[Expr]:
    """Return keys and values without the rows after the total length, of which static caches have many."""
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


def _visible_keys(n: Node, rows: _NewRows, query_positions: Expr) -> Expr:
    """Emit the mask of keys that each query sees, (b, 1, s or 1, total): causal, and within its sequence."""
    window, column = n.int("local_window_size", -1), positions(n, rows.total)
    if not n.flag("causal", True):
        if window > 0:
            n.fail("GroupQueryAttention that is not causal has no local window")
        return n.emit(ops.less(column, n.emit(ops.expand_dims(rows.lengths, axes=(1, 2, 3)))))
    last = n.emit(ops.expand_dims(_clamp_to_last(n, rows, query_positions), axes=(1, 3)))
    mask = n.emit(ops.less_equal(column, last))
    if window <= 0:
        return mask
    recent = n.emit(ops.less(n.emit(ops.subtract(last, column)), Constant.of(window, "int64")))
    return n.emit(ops.logical_and(mask, recent))
