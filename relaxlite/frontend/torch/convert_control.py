"""Converters of control flow, cond, while_loop, scan and map, and of wrappers, whose subgraphs are inlined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.symbolic import SymExpr, sym

Graph = torch.fx.GraphModule


@torch_op("higher_order.cond", complex=True)
def cond(n: Node, pred: Any, true_graph: Graph, false_graph: Graph, operands: Sequence[Any] = ()) -> Any:
    if isinstance(pred, bool):
        return n.importer.subgraph(true_graph if pred else false_graph, operands)
    names = [f"{n.fx_node.name}_{k}" for k in range(len(_described(n)))]
    bodies = [lambda g=graph: _carried(n, n.importer.subgraph(g, operands)) for graph in (true_graph, false_graph)]
    return _uncarried(n, n.importer.flow.branch(n.operand(pred, "bool"), bodies, names))


@torch_op("higher_order.while_loop")
def while_loop(
    n: Node, cond_graph: Graph, body_graph: Graph, carried: Sequence[Any], additional: Sequence[Any] = ()
) -> Any:
    """Loop while the condition holds. Integers that it carries are tensors of rank 0, read again in each iteration."""
    inits = [n.carried(x) for x in carried]
    scalars = [not isinstance(x, Var | Constant) for x in carried]

    def values(params: Sequence[Expr]) -> list[Any]:
        return [n.read(p) if is_scalar else p for p, is_scalar in zip(params, scalars, strict=True)]

    def condition(operands: Sequence[Any]) -> Expr:
        (flag,) = n.importer.subgraph(cond_graph, [*operands, *additional])
        return n.reshape(n.operand(flag, "bool"), ())

    def body(params: Sequence[Expr]) -> tuple[Expr, list[Expr]]:
        results = n.importer.subgraph(body_graph, [*values(params), *additional])
        after = [n.carried(x) for x in results]
        after = [n.cast(x, n.dtype_of(p)) for x, p in zip(after, params, strict=True)]
        return condition(values(after)), after

    names = [f"{n.fx_node.name}_{k}" for k in range(len(inits))]
    finals = n.importer.flow.loop(condition(carried), inits, names, body)
    return tuple(n.read(x) if is_scalar else x for x, is_scalar in zip(finals, scalars, strict=True))


@torch_op("higher_order.scan")
def scan(n: Node, graph: Graph, init: Sequence[Any], xs: Sequence[Expr], additional: Sequence[Any] = ()) -> Any:
    """Loop over the rows of `xs`: (carried values, a row of each) -> (carried values, a row of each result)."""
    count = n.shape_of(xs[0])[0]
    states, rows = _loop_over_rows(n, graph, list(init), list(xs), additional, count)
    return (*states, *rows)


@torch_op("higher_order.map_impl", "higher_order.map")
def map_(n: Node, graph: Graph, xs: Sequence[Expr], additional: Sequence[Any] = ()) -> Any:
    count = n.shape_of(xs[0])[0]
    return tuple(_loop_over_rows(n, graph, [], list(xs), additional, count)[1])


def _loop_over_rows(
    n: Node, graph: Graph, init: list[Expr], xs: list[Expr], additional: Sequence[Any], count: SymExpr
) -> tuple[list[Expr], list[Expr]]:
    """Run a subgraph for each row of `xs`; return the final carried values and the stacked rows of results."""
    described = _described(n)[len(init) :]
    shapes = [n.symbols.shape(value) for value in described]
    stacks = [n.full(shape, 0, _dtype(value)) for shape, value in zip(shapes, described, strict=True)]
    total = n.symbols.tensor(count, "int64")
    zero = n.operand(0, "int64")

    def body(params: Sequence[Expr]) -> tuple[Expr, list[Expr]]:
        counter, *values = params
        states, outputs = values[: len(init)], values[len(init) :]
        position = n.reshape(counter, (1,))
        rows = [_row(n, x, counter) for x in xs]
        results = n.importer.subgraph(graph, [*states, *rows, *additional])
        new_states = [n.cast(n.carried(x), n.dtype_of(s)) for x, s in zip(results, states, strict=False)]
        new_rows = results[len(init) :]
        written = [_write_row(n, out, position, n.carried(row)) for out, row in zip(outputs, new_rows, strict=True)]
        following = n.emit(ops.add(counter, n.operand(1, "int64")))
        return n.emit(ops.less(following, total)), [following, *new_states, *written]

    names = [f"{n.fx_node.name}_{k}" for k in range(1 + len(init) + len(stacks))]
    inits = [zero, *map(n.carried, init), *stacks]
    finals = n.importer.flow.loop(n.emit(ops.less(zero, total)), inits, names, body)
    return finals[1 : 1 + len(init)], finals[1 + len(init) :]


def _row(n: Node, x: Expr, counter: Expr) -> Expr:
    return n.emit(ops.gather(x, counter, axis=0))


def _write_row(n: Node, out: Expr, position: Expr, row: Expr) -> Expr:
    """Return `out` with a row at a position (an int64 vector of one element)."""
    index = n.reshape(position, (1, 1))
    return n.emit(ops.scatter_nd(out, index, n.reshape(row, (sym(1), *n.shape_of(row)))))


@torch_op(
    "higher_order.wrap_with_set_grad_enabled", "higher_order.wrap_with_autocast", "higher_order.invoke_subgraph",
    "higher_order.tag_activation_checkpoint", "higher_order.wrap_activation_checkpoint", "higher_order.wrap",
    "higher_order.hints_wrapper", "higher_order.strict_mode", complex=True,
)  # fmt: skip
def inlined(n: Node, *args: Any, **_options: Any) -> Any:
    """Convert the subgraph in place: gradients, recomputation and scopes do not affect inference."""
    position = next(k for k, arg in enumerate(args) if isinstance(arg, Graph))
    operands = [x for x in args[position + 1 :] if not isinstance(x, str)]
    if n.target.startswith("hints_wrapper"):
        operands = list(args[position + 1])
    return tuple(n.importer.subgraph(args[position], operands))


def _described(n: Node) -> list[Any]:
    value = n.fx_node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def _dtype(value: torch.Tensor) -> str:
    return dtype_name(value.dtype)


def _carried(n: Node, values: Sequence[Any]) -> list[Expr]:
    """Results of a branch as tensors: complex ones as their parts, sizes as tensors of rank 0."""
    return [x.parts if isinstance(x, Complex) else n.carried(x) for x in values if x is not None]


def _uncarried(n: Node, values: Sequence[Expr]) -> Any:
    results: list[Any] = []
    remaining = iter(values)
    for described in _described(n):
        if described is None:
            results.append(None)
            continue
        x = next(remaining)
        if isinstance(described, torch.SymInt):
            results.append(n.read(x))
        elif isinstance(described, torch.Tensor) and described.is_complex():
            results.append(Complex(x))
        else:
            results.append(x)
    return tuple(results)
