"""Mixtures of experts: each expert is a gated MLP over the tokens that are routed to it.

Grouped: if the experts' weights are in blocks that are multiplied in integers, tokens are sorted by expert, and each of
the three projections is one grouped matmul (ops/grouped_products.py). Only chosen experts cost time. The results of a
token are added in the order of its choices.

One by one: otherwise, as for experts in floats, each expert has calls of its own. The number of its tokens is known at
run time only: one MatchShape per layer binds a symbol for each expert. All experts share their kernels, for any number
of rows including none. Results are added in the order of the experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relaxlite.frontend.llm.config import Experts
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Expr, TupleGetItem, Var
from relaxlite.ir.symbolic import SymExpr, product, sym
from relaxlite.ir.types import TensorType

if TYPE_CHECKING:
    from relaxlite.frontend.llm.layers import Decoder

_KINDS = ("gate", "up", "down")
_MIN = 1e-20  # added to the sum that scores are divided by (DeepSeek-V3)


def mixture(d: Decoder, name: str, experts: Experts, x: Expr, routed: Expr) -> Var:
    """Emit a mixture of experts for x [..., hidden], in the same shape.

    `routed` [..., hidden] is the input of the router.
    """
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    shape, rows = x.ty.shape, product(x.ty.shape[:-1])
    flat = d.op("reshape", x, (rows, shape[-1]))
    router_rows = flat if routed is x else d.op("reshape", routed, (rows, shape[-1]))
    weights, chosen = _route(d, name, experts, router_rows)
    total = _shared_expert(d, name, experts, flat)
    if d.groups_rows and all(d.can_stack(_matrix_names(name, experts, kind)) for kind in _KINDS):
        total = _grouped(d, name, experts, flat, (weights, chosen), total)
    else:
        total = _one_by_one(d, name, experts, flat, (weights, chosen), total)
    return d.op("reshape", total, shape)


def _matrix_names(name: str, experts: Experts, kind: str) -> list[str]:
    """Return the names of one matrix of all experts."""
    return [f"{name}.experts.{e}.{kind}" for e in range(experts.count)]


def _route(d: Decoder, name: str, experts: Experts, x: Expr) -> tuple[Var, Var]:
    """Emit the router: for each token, weights (float32) and numbers (int64) of its experts, both [rows, chosen]."""
    router_logits = d.linear(f"{name}.router", x, experts.has_bias)
    scores = d.op("softmax", router_logits, axis=-1) if experts.scores == "softmax" else d.op("sigmoid", router_logits)
    preferred = d.op("add", scores, d.vector(f"{name}.router_balance")) if experts.is_balanced else scores
    if experts.top_k_groups < experts.groups:
        preferred = _mask_other_groups(d, experts, preferred)
    top = d.op("top_k", preferred, (sym(experts.top_k),), axis=-1)
    weights, chosen = (d.bb.emit(TupleGetItem(top, k)) for k in (0, 1))
    if preferred is not scores:
        weights = d.op("gather_elements", scores, chosen, axis=-1)
    if experts.is_normed:
        total = d.op("sum", weights, axes=(-1,), keepdims=True)
        if experts.scores == "sigmoid":  # the sum may be 0
            total = d.op("add", total, np.float32(_MIN))
        weights = d.op("divide", weights, total)
    if experts.scale != 1:
        weights = d.op("multiply", weights, np.float32(experts.scale))
    if experts.has_output_scales:
        weights = d.op("multiply", weights, d.op("gather", d.vector(f"{name}.experts_scale"), chosen, axis=0))
    return weights, chosen


def _mask_other_groups(d: Decoder, experts: Experts, preferred: Var) -> Var:
    """Set scores [rows, experts] to -inf outside the groups whose two best experts have the largest sums."""
    rows, groups = _dims(preferred)[0], sym(experts.groups)
    members = sym(experts.count // experts.groups)
    by_group = d.op("reshape", preferred, (rows, groups, members))
    top_pairs = d.op("top_k", by_group, (sym(min(2, experts.count // experts.groups)),), axis=-1)
    sums = d.op("sum", d.bb.emit(TupleGetItem(top_pairs, 0)), axes=(-1,))
    best = d.op("top_k", sums, (sym(experts.top_k_groups),), axis=-1)
    chosen = d.op("expand_dims", d.bb.emit(TupleGetItem(best, 1)), axes=(1,))  # [rows, 1, chosen groups]
    group_numbers = np.arange(experts.groups, dtype=np.int64).reshape(1, -1, 1)
    is_chosen = d.op("max", d.op("cast", d.op("equal", chosen, group_numbers), dtype="int64"), axes=(2,), keepdims=True)
    masked = d.op("where", d.op("equal", is_chosen, np.int64(1)), by_group, np.float32(-np.inf))
    return d.op("reshape", masked, (rows, sym(experts.count)))


def _grouped(d: Decoder, name: str, experts: Experts, x: Expr, choices: tuple[Var, Var], total: Var) -> Var:
    """Add the results of all experts for x [rows, hidden] to `total`, with one grouped matmul per projection."""
    weights, chosen = choices
    numbers = d.op("reshape", chosen, (_dims(x)[0] * experts.top_k,))
    sorted_rows = d.op("group_rows", numbers, groups=experts.count)
    order, places, spans = (d.bb.emit(TupleGetItem(sorted_rows, k)) for k in range(3))
    tokens = d.op("floor_divide", order, np.int64(experts.top_k))
    row_experts = d.op("gather", numbers, order, axis=0)

    def linear(kind: str, operand: Expr) -> Var:
        names = _matrix_names(name, experts, kind)
        result = d.grouped(names, operand, spans, row_experts)
        if not experts.has_bias:
            return result
        biases = np.stack([d.vector(f"{matrix}_bias") for matrix in names])
        return d.op("add", result, d.op("gather", biases, row_experts, axis=0))

    outputs = d.gated_mlp_with(linear, d.op("gather", x, tokens, axis=0))
    return d.op("add", total, d.op("sum_rows", outputs, places, weights))


def _one_by_one(d: Decoder, name: str, experts: Experts, x: Expr, choices: tuple[Var, Var], total: Var) -> Var:
    """Add the results of all experts for x [rows, hidden] to `total`, with calls for each expert."""
    rows = _dims(x)[0]
    is_routed, shares = _dense_routing(d, experts, choices)
    counts = _tokens_per_expert(d, experts, is_routed, rows)
    for e, count in enumerate(counts):
        result = d.op("nonzero_fill", _row(d, is_routed, e, rows), (count,))
        tokens = d.op("reshape", result, (count,))
        output = d.gated_mlp(f"{name}.experts.{e}", d.op("gather", x, tokens, axis=0), experts.has_bias)
        share = d.op("gather", _row(d, shares, e, rows), tokens, axis=0)
        weighted = d.op("multiply", output, d.op("expand_dims", share, axes=(1,)))
        places = d.op("expand_dims", tokens, axes=(1,))
        total = d.op("scatter_nd", total, places, weighted, reduction="add")
    return total


def _dense_routing(d: Decoder, experts: Experts, choices: tuple[Var, Var]) -> tuple[Var, Var]:
    """Emit the routing of all tokens to all experts, [experts, rows].

    The first result is 1 where a token is routed to an expert, else 0, int64; the second is its weight, float32.
    """
    weights, chosen = choices
    expert_numbers = np.arange(experts.count, dtype=np.int64).reshape(-1, 1, 1)
    is_chosen = d.op("equal", d.op("expand_dims", chosen, axes=(0,)), expert_numbers)
    weights = d.op("where", is_chosen, d.op("expand_dims", weights, axes=(0,)), np.float32(0))
    return d.op("max", d.op("cast", is_chosen, dtype="int64"), axes=(2,)), d.op("sum", weights, axes=(2,))


def _tokens_per_expert(d: Decoder, experts: Experts, is_routed: Expr, rows: SymExpr) -> list[SymExpr]:
    """Bind a symbol for the number of tokens of each expert."""
    max_tokens = Analyzer().bounds(rows)[1]
    symbols = [d.bb.symbol(f"taken_{e}", upper=max_tokens) for e in range(experts.count)]
    d.bb.match_shape(d.op("tensor_to_shape", d.op("sum", is_routed, axes=(1,))), tuple(symbols))
    return list(symbols)


def _shared_expert(d: Decoder, name: str, experts: Experts, x: Expr) -> Var:
    """Emit what results are added to: the output of the shared expert, or zeros."""
    if experts.shared is None:
        assert isinstance(x.ty, TensorType) and x.ty.shape is not None
        return d.op("full", x.ty.shape, np.float32(0))
    result = d.gated_mlp(f"{name}.shared", x)
    if not experts.has_shared_gate:
        return result
    gate = d.op("matmul", x, d.vector(f"{name}.shared_router").reshape(-1, 1))
    return d.op("multiply", result, d.op("sigmoid", gate))


def _row(d: Decoder, table: Expr, row: int, size: SymExpr) -> Var:
    """Slice a row of a table [rows, size]."""
    return d.op("reshape", d.op("slice", table, (row,), (1,), axes=(0,)), (size,))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return x.ty.shape
