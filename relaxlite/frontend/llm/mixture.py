"""Mixtures of experts: each expert is a gated MLP over the tokens that chose it.

Where the experts' weights are in blocks that are multiplied in integers, tokens are sorted by expert, and each of the
three products of a layer is one call for all experts (ops/grouped_products.py): what a step costs, and a compilation,
is what the chosen ones are. A token's results are added up in the order of its choices.

Else, as for experts in floats, each has calls of its own. How many tokens it has, only a run tells: one MatchShape per
layer binds a symbol for each expert. All experts are then the same kernels, for any number of rows, none included; a
call for no rows costs some 40 ns. Results are added up in the order of the experts.
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
_MIN = 1e-20  # of what shares are of (DeepSeek-V3)


def mixture(d: Decoder, name: str, experts: Experts, x: Expr, routed: Expr) -> Var:
    """What the experts of a layer give for x [..., hidden], in the same shape; `routed`, as large: what they are chosen
    by."""
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    shape, rows = x.ty.shape, product(x.ty.shape[:-1])
    flat = d.op("reshape", x, (rows, shape[-1]))
    by = flat if routed is x else d.op("reshape", routed, (rows, shape[-1]))
    weights, chosen = _choices(d, name, experts, by)
    total = _shared(d, name, experts, flat)
    if d.groups_rows and all(d.can_stack(_matrices(name, experts, kind)) for kind in _KINDS):
        total = _together(d, name, experts, flat, (weights, chosen), total)
    else:
        total = _one_by_one(d, name, experts, flat, (weights, chosen), total)
    return d.op("reshape", total, shape)


def _matrices(name: str, experts: Experts, kind: str) -> list[str]:
    """The names of that matrix of each expert."""
    return [f"{name}.experts.{e}.{kind}" for e in range(experts.count)]


def _choices(d: Decoder, name: str, experts: Experts, x: Expr) -> tuple[Var, Var]:
    """By token [rows, chosen]: what the results of the experts that it takes count, float32, and these, int64."""
    likes = d.linear(f"{name}.router", x, experts.has_bias)
    scores = d.op("softmax", likes, axis=-1) if experts.scores == "softmax" else d.op("sigmoid", likes)
    preferred = d.op("add", scores, d.vector(f"{name}.router_balance")) if experts.is_balanced else scores
    if experts.chosen_groups < experts.groups:
        preferred = _of_best_groups(d, experts, preferred)
    best = d.op("top_k", preferred, (sym(experts.chosen),), axis=-1)
    weights, chosen = (d.bb.emit(TupleGetItem(best, k)) for k in (0, 1))
    if preferred is not scores:
        weights = d.op("gather_elements", scores, chosen, axis=-1)
    if experts.is_normed:
        total = d.op("sum", weights, axes=(-1,), keepdims=True)
        if experts.scores == "sigmoid":  # whose sum may be 0
            total = d.op("add", total, np.float32(_MIN))
        weights = d.op("divide", weights, total)
    if experts.scale != 1:
        weights = d.op("multiply", weights, np.float32(experts.scale))
    if experts.has_scales:
        weights = d.op("multiply", weights, d.op("gather", d.vector(f"{name}.experts_scale"), chosen, axis=0))
    return weights, chosen


def _of_best_groups(d: Decoder, experts: Experts, preferred: Var) -> Var:
    """The scores [rows, experts] of those in the groups whose two best have most together; -inf of all others."""
    rows, groups = _dims(preferred)[0], sym(experts.groups)
    members = sym(experts.count // experts.groups)
    parted = d.op("reshape", preferred, (rows, groups, members))
    pairs = d.op("top_k", parted, (sym(min(2, experts.count // experts.groups)),), axis=-1)
    together = d.op("sum", d.bb.emit(TupleGetItem(pairs, 0)), axes=(-1,))
    best = d.op("top_k", together, (sym(experts.chosen_groups),), axis=-1)
    chosen = d.op("expand_dims", d.bb.emit(TupleGetItem(best, 1)), axes=(1,))  # [rows, 1, chosen groups]
    names = np.arange(experts.groups, dtype=np.int64).reshape(1, -1, 1)
    is_chosen = d.op("max", d.op("cast", d.op("equal", chosen, names), dtype="int64"), axes=(2,), keepdims=True)
    kept = d.op("where", d.op("equal", is_chosen, np.int64(1)), parted, np.float32(-np.inf))
    return d.op("reshape", kept, (rows, sym(experts.count)))


def _together(d: Decoder, name: str, experts: Experts, x: Expr, choices: tuple[Var, Var], total: Var) -> Var:
    """`total` [rows, hidden] and what the experts give for x [rows, hidden], in a call for each of their matrices."""
    weights, chosen = choices
    numbers = d.op("reshape", chosen, (_dims(x)[0] * experts.chosen,))
    sorted_rows = d.op("group_rows", numbers, groups=experts.count)
    order, places, spans = (d.bb.emit(TupleGetItem(sorted_rows, k)) for k in range(3))
    tokens = d.op("floor_divide", order, np.int64(experts.chosen))
    own = d.op("gather", numbers, order, axis=0)

    def linear(kind: str, given: Expr) -> Var:
        names = _matrices(name, experts, kind)
        result = d.grouped(names, given, spans, own)
        if not experts.has_bias:
            return result
        biases = np.stack([d.vector(f"{each}_bias") for each in names])
        return d.op("add", result, d.op("gather", biases, own, axis=0))

    given = d.gated_by(linear, d.op("gather", x, tokens, axis=0))
    return d.op("add", total, d.op("sum_rows", given, places, weights))


def _one_by_one(d: Decoder, name: str, experts: Experts, x: Expr, choices: tuple[Var, Var], total: Var) -> Var:
    """The same with calls for each expert."""
    rows = _dims(x)[0]
    takes, shares = _routed(d, experts, choices)
    counts = _counts(d, experts, takes, rows)
    for e, count in enumerate(counts):
        result = d.op("nonzero_fill", _row(d, takes, e, rows), (count,))
        tokens = d.op("reshape", result, (count,))
        given = d.gated(f"{name}.experts.{e}", d.op("gather", x, tokens, axis=0), experts.has_bias)
        share = d.op("gather", _row(d, shares, e, rows), tokens, axis=0)
        weighted = d.op("multiply", given, d.op("expand_dims", share, axes=(1,)))
        places = d.op("expand_dims", tokens, axes=(1,))
        total = d.op("scatter_nd", total, places, weighted, reduction="add")
    return total


def _routed(d: Decoder, experts: Experts, choices: tuple[Var, Var]) -> tuple[Var, Var]:
    """By expert and token: whether it takes the token, int64 0 or 1, and what its result counts, float32."""
    weights, chosen = choices
    names = np.arange(experts.count, dtype=np.int64).reshape(-1, 1, 1)
    is_chosen = d.op("equal", d.op("expand_dims", chosen, axes=(0,)), names)
    weights = d.op("where", is_chosen, d.op("expand_dims", weights, axes=(0,)), np.float32(0))
    return d.op("max", d.op("cast", is_chosen, dtype="int64"), axes=(2,)), d.op("sum", weights, axes=(2,))


def _counts(d: Decoder, experts: Experts, takes: Expr, rows: SymExpr) -> list[SymExpr]:
    """How many tokens each expert takes."""
    most = Analyzer().bounds(rows)[1]
    symbols = [d.bb.symbol(f"taken_{e}", upper=most) for e in range(experts.count)]
    d.bb.match_shape(d.op("tensor_to_shape", d.op("sum", takes, axes=(1,))), tuple(symbols))
    return list(symbols)


def _shared(d: Decoder, name: str, experts: Experts, x: Expr) -> Var:
    """What results are added to: that of the expert for all tokens, or zeros."""
    if experts.shared is None:
        assert isinstance(x.ty, TensorType) and x.ty.shape is not None
        return d.op("full", x.ty.shape, np.float32(0))
    result = d.gated(f"{name}.shared", x)
    if not experts.has_shared_gate:
        return result
    gate = d.op("matmul", x, d.vector(f"{name}.shared_router").reshape(-1, 1))
    return d.op("multiply", result, d.op("sigmoid", gate))


def _row(d: Decoder, table: Expr, row: int, size: SymExpr) -> Var:
    return d.op("reshape", d.op("slice", table, (row,), (1,), axes=(0,)), (size,))


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return x.ty.shape
