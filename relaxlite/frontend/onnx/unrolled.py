"""Unrolling of ONNX Loops that carry a sequence and have few iterations, known at compile time.

In unrolled code the elements of a sequence may differ in size, as the parts of torch.tensor_split do, and can be read
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto

from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.validation import subgraphs
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Tuple

_MAX_ITERATIONS = 64
_MAX_NODES = 4096  # of the unrolled loop
_TRUE = Constant.of(np.array(True))


def unroll_loop(n: Node) -> tuple[Expr, ...] | None:
    """Unroll an ONNX Loop and return its outputs; None if it carries no sequence, or may have many iterations.

    Raises ImportModelError if a later iteration's condition is not known at compile time.
    """
    graph, inits = n.graph("body"), [x for x in n.inputs[2:] if x is not None]
    count = _trip_count(n)
    if count is None or count * _num_nodes(graph) > _MAX_NODES:
        return None
    if not any(isinstance(x, Tuple) for x in inits) or len(graph.input) != len(n.inputs):
        return None
    has_stacks = len(graph.output) > len(inits) + 1
    if (count == 0 and has_stacks) or (count > 0 and not _condition_is_known(n, graph, inits)):
        return None
    values, rows = inits, list[list[Expr]]()
    for step in range(count):
        condition, *outputs = _iteration(n, graph, step, values)
        values = outputs[: len(inits)]
        rows.append([n.emit(ops.expand_dims(x, axes=(0,))) for x in outputs[len(inits) :]])
        known = n.const_of(condition)
        if known is None:
            n.fail(f"whether the loop goes on after iteration {step} must be known, for it carries a sequence")
        if not bool(known.reshape(-1)[0]):
            break
    return (*values, *(n.emit(ops.concat(*column, axis=0)) for column in zip(*rows, strict=True)))


def _num_nodes(graph: GraphProto) -> int:
    return sum(1 + sum(map(_num_nodes, subgraphs(node))) for node in graph.node)


def _trip_count(n: Node) -> int | None:
    """Return the maximum number of iterations, or None if it is unknown or more than _MAX_ITERATIONS."""
    limit, cond = n.const(0), n.const(1)
    if cond is not None and not bool(cond.reshape(-1)[0]):
        return 0
    if limit is None or (cond is None and n.optional(1) is not None):
        return None
    count = max(int(limit.reshape(-1)[0]), 0)
    return count if count <= _MAX_ITERATIONS else None


def _condition_is_known(n: Node, graph: GraphProto, values: Sequence[Expr]) -> bool:
    """Whether the condition after the first iteration is known, found by building and discarding that iteration."""
    with n.bb.body(), n.resolver.scope():
        return n.const_of(_iteration(n, graph, 0, values)[0]) is not None


def _iteration(n: Node, graph: GraphProto, step: int, values: Sequence[Expr]) -> list[Expr]:
    """Convert one iteration and return the body's outputs: condition, next values, values to stack."""
    is_vector = len(graph.input[0].type.tensor_type.shape.dim) == 1  # as torch.tensor_split is exported
    number = Constant.of(np.full((1,) if is_vector else (), step, np.int64))
    return n.importer.subgraph(graph, [number, _TRUE, *values], n.label)
