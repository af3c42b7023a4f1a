"""Additive masks of onnxruntime's Attention and MultiHeadAttention, for scores (b, h, s, keys)."""

from __future__ import annotations

import numpy as np

from relaxlite.frontend.onnx.attention_parts import additive_mask, positions, with_sizes
from relaxlite.frontend.onnx.node import Node
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, sym


def score_masks(
    n: Node, q: Expr, k: Expr, mask: Expr | None, bias: Expr | None, low: float, *, causal: bool, is_self: bool
) -> list[Expr]:
    """Return the additive masks of an attention: padding, causal, bias.

    mask: see `_padding_mask`. bias: (b or 1, h or 1, s, keys). low: masked scores. is_self: of Attention, whose masks
    may have more forms than MultiHeadAttention's.
    """
    (_, _, queries, _), keys = n.shape_of(q), n.shape_of(k)[2]
    masks = [] if mask is None else _padding_mask(n, mask, q, keys, low, is_self)
    if causal:
        masks.append(_causal(n, q, keys))
    if bias is not None:
        masks.append(with_sizes(n, bias, {2: queries, 3: keys}, "the bias of the scores"))
    return masks


def _causal(n: Node, q: Expr, keys: SymExpr) -> Expr:
    """Return the causal mask (s, keys): query i is at position past + i. Its masked score is below that of padding."""
    queries, dtype = n.shape_of(q)[2], n.type_of(q).dtype
    low = float(np.finfo(np.float16 if dtype == "float16" else np.float32).min)
    row = n.emit(ops.reshape(positions(n, queries, keys - queries), (queries, 1)))
    column = n.emit(ops.reshape(positions(n, keys), (1, keys)))
    return additive_mask(n, n.emit(ops.less_equal(column, row)), dtype, low)


def _padding_mask(n: Node, mask: Expr, q: Expr, keys: SymExpr, low: float, is_self: bool) -> list[Expr]:
    """Return the mask of padding, as a list of at most one additive mask.

    mask: flags (b, keys) or (b, queries, keys), 1 for keys that are visible, or one dimension, see `_allowed`. Of
    Attention, (b or 1, 1) is no mask.
    """
    shape, (batch, _, queries, _), dtype = n.shape_of(mask), n.shape_of(q), n.type_of(q).dtype
    if len(shape) == 1:
        return [additive_mask(n, _allowed(n, mask, batch, keys, is_self), dtype, low)]
    if len(shape) not in (2, 3):
        n.fail(f"a mask of rank {len(shape)} is not supported")
    if is_self and len(shape) == 2 and as_int(shape[1]) == 1 and not PROVER.can_prove_equal(keys, 1):
        return []
    sizes = {0: batch, 1: keys} if len(shape) == 2 else {0: batch, 1: queries, 2: keys}
    mask = with_sizes(n, mask, sizes, "the mask")
    flags = n.emit(ops.not_equal(mask, Constant.of(0, n.type_of(mask).dtype)))
    wide = (batch, sym(1), sym(1) if len(shape) == 2 else queries, keys)
    return [additive_mask(n, n.emit(ops.reshape(flags, wide)), dtype, low)]


def _allowed(n: Node, mask: Expr, batch: SymExpr, keys: SymExpr, is_self: bool) -> Expr:
    """Convert a mask of one dimension to flags (b, 1, 1, keys).

    Forms: lengths of the sequences (b,); of Attention also their ends, then their starts (2 * b,); or lengths followed
    by cumulative lengths of packed sequences (3 * b + 2,).
    """
    size, packed = n.shape_of(mask)[0], batch * 3 + 2
    forms = (batch, batch * 2, packed) if is_self else (batch, packed)
    possible = [form for form in forms if not PROVER.can_prove_ne(size, form)]
    if not possible:
        expected = " or ".join(map(str, forms))
        n.fail(f"a mask of one dimension must hold {expected} numbers for a batch of {batch}, but has shape ({size},)")
    if len(possible) == 1:
        mask = with_sizes(n, mask, {0: possible[0]}, "the mask")
    elif not any(PROVER.can_prove_equal(size, form) for form in possible):
        mask = _of_one_size(n, mask, possible)
    column = n.emit(ops.cast(positions(n, keys), dtype=n.type_of(mask).dtype))
    allowed = n.emit(ops.less(column, _per_sequence(n, mask, sym(0), batch)))
    starts = batch * 2
    if not is_self or (starts not in possible) or PROVER.can_prove_equal(size, batch):
        return allowed
    first = _per_sequence(n, mask, n.shape_of(mask)[0] - batch, batch)
    if len(possible) > 1 and not PROVER.can_prove_equal(size, starts):
        none = Constant.of(0, n.type_of(mask).dtype)
        first = n.emit(ops.where(_equal(n, size, starts), first, none))
    return n.emit(ops.logical_and(allowed, n.emit(ops.greater_equal(column, first))))


def _per_sequence(n: Node, mask: Expr, begin: SymExpr, batch: SymExpr) -> Expr:
    part = n.emit(ops.slice(mask, (begin,), (batch,), axes=(0,)))
    return n.emit(ops.reshape(part, (batch, 1, 1, 1)))


def _equal(n: Node, a: SymExpr, b: SymExpr) -> Expr:
    return n.emit(ops.equal(*(n.emit(ops.reshape(n.emit(ops.shape_to_tensor((x,))), ())) for x in (a, b))))


def _of_one_size(n: Node, mask: Expr, forms: list[SymExpr]) -> Expr:
    """Check at run time that the mask has one of these sizes."""
    size, expected = n.shape_of(mask)[0], n.emit(ops.shape_to_tensor((forms[-1],)))
    for form in forms[:-1]:
        expected = n.emit(ops.where(_equal(n, size, form), n.emit(ops.shape_to_tensor((form,))), expected), "mask_size")
    return n.bb.match_shape(mask, n.resolver.values(expected), "mask")
