"""Control flow: If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from relaxlite.frontend.onnx.convert_shapes import normalize_axis
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.unify import unify_dims
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.symbolic import SymExpr, SymVar, product, sym

TRUE = Constant.of(np.array(True))
ZERO = Constant.of(np.int64(0))
ONE = Constant.of(np.int64(1))
_ENDLESS = 1 << 31  # a trip count of at least this is no limit


@onnx_op("If")
def if_op(n: Node) -> Result:
    """A condition known at compile time selects its branch here."""
    branches = [n.graph("then_branch"), n.graph("else_branch")]
    for graph in branches:
        if len(graph.output) < n.num_outputs:
            n.fail(f"branch '{graph.name}' has {len(graph.output)} outputs, but the node has {n.num_outputs}")
    known = n.const(0)
    if known is not None:
        chosen = branches[0] if bool(known.reshape(-1)[0]) else branches[1]
        return tuple(n.importer.subgraph(chosen, [], n.label))
    names = [name or f"{n.op_type}_{k}" for k, name in enumerate(n.proto.output)]
    ranks = [n.importer.declared_rank(name) for name in n.proto.output]
    bodies = [lambda g=graph: n.importer.subgraph(g, [], n.label)[: n.num_outputs] for graph in branches]
    return tuple(n.importer.flow.branch(_scalar(n, n.input(0)), bodies, names, ranks))


def _scalar(n: Node, x: Expr) -> Expr:
    return x if not n.shape_of(x) else n.emit(ops.reshape(x, ()))


@dataclass
class _Accumulator:
    """A value per iteration, collected: along a new first axis, or (sizes known inside only) flattened with its sizes."""

    name: str
    dtype: str
    dims: tuple[SymExpr, ...]
    is_flat: bool
    prepends: bool = False

    def inits(self, n: Node) -> list[Expr]:
        zero = Constant.of(0, self.dtype)
        if not self.is_flat:
            return [n.emit(ops.full((sym(0), *self.dims), zero), self.name)]
        return [n.emit(ops.full((sym(0),), zero), self.name), Constant.of(np.zeros(len(self.dims), np.int64))]

    def step(self, n: Node, held: Sequence[Expr], value: Expr) -> list[Expr]:
        if self.is_flat:
            row = n.emit(ops.reshape(value, (product(n.shape_of(value)),)))
            sizes = n.emit(ops.shape_of(value))
        else:
            fitted = unify_dims(n.bb, value, dict(enumerate(n.shape_of(held[0])[1:])))
            row = n.emit(ops.expand_dims(fitted, axes=(0,)))
        pair = (row, held[0]) if self.prepends else (held[0], row)
        joined = n.emit(ops.concat(*pair, axis=0), self.name)
        return [joined, sizes] if self.is_flat else [joined]

    def result(self, n: Node, held: Sequence[Expr], count: Expr) -> Expr:
        if not self.is_flat:
            return held[0]
        sizes = n.resolver.values(held[1], lower=0)
        return n.emit(ops.reshape(held[0], (*n.resolver.values(count, lower=0), *sizes)), self.name)

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_shape")[: self.width]

    @property
    def width(self) -> int:
        return 2 if self.is_flat else 1


def _accumulators(n: Node, values: Sequence[Expr], names: Sequence[str], marker: int) -> list[_Accumulator]:
    found = []
    for value, name in zip(values, names, strict=True):
        dims = n.shape_of(value)
        is_flat = any(v.serial > marker for d in dims for v in d.free_vars())
        found.append(_Accumulator(name or "collected", n.type_of(value).dtype, dims, is_flat))
    return found


def _stand_in(n: Node, x: Expr) -> Expr:
    """A variable of the same type whose value is not known."""
    return Var("probe", n.type_of(x))


@onnx_op("Loop")
def loop_op(n: Node) -> Result:
    """Inputs: trip count, condition, initial values. The body yields the next condition and values, and what to collect."""
    graph = n.graph("body")
    inits = [_present(n, k) for k in range(2, len(n.inputs))]
    total = len(inits)
    if len(graph.input) != total + 2 or len(graph.output) < total + 1:
        n.fail(f"the body must take 2 + {total} inputs and yield 1 + {total} outputs or more, not {len(graph.input)} and {len(graph.output)}")
    names = [i.name for i in graph.input[2:]]
    changing = [k for k in range(total) if graph.output[k + 1].name != names[k]]  # the others keep their initial value
    limit = _trip_limit(n)

    def convert(step: Expr, held: Sequence[Expr]) -> tuple[Expr, list[Expr], list[Expr]]:
        values = list(inits)
        for k, value in zip(changing, held, strict=True):
            values[k] = value
        cond, *outputs = n.importer.subgraph(graph, [step, TRUE, *values], n.label)
        return _scalar(n, cond), [outputs[k] for k in changing], outputs[total:]

    collected = [n.proto.output[k] if k < n.num_outputs else "" for k in range(total, len(graph.output) - 1)]
    accumulators = _probed(n, convert, [inits[k] for k in changing], [names[k] for k in changing], collected)

    def make(params: Sequence[Var]) -> tuple[Expr, list[Expr]]:
        cond, outputs, found = convert(params[0], params[1 : len(changing) + 1])
        following = n.emit(ops.add(params[0], ONE))
        kept = _accumulate(n, accumulators, params[len(changing) + 1 :], found)
        return _goes_on(n, cond, following, limit), [following, *outputs, *kept]

    cond = TRUE if n.optional(1) is None else _scalar(n, n.input(1))
    starts = [x for a in accumulators for x in a.inits(n)]
    labels = ["iteration", *(names[k] for k in changing), *(label for a in accumulators for label in a.labels)]
    values = [ZERO, *(inits[k] for k in changing), *starts]
    final = n.importer.flow.loop(_goes_on(n, cond, ZERO, limit), values, labels, make)
    for k, value in zip(changing, final[1:], strict=False):
        inits[k] = value
    return (*inits, *_collected(n, accumulators, final[len(changing) + 1 :], final[0]))


def _accumulate(n: Node, accumulators: Sequence[_Accumulator], held: Sequence[Expr], found: Sequence[Expr]) -> list[Expr]:
    rest, values = list(held), list[Expr]()
    for accumulator, value in zip(accumulators, found, strict=True):
        values += accumulator.step(n, [rest.pop(0) for _ in range(accumulator.width)], value)
    return values


def _collected(n: Node, accumulators: Sequence[_Accumulator], held: list[Expr], count: Expr) -> list[Expr]:
    results, rest = [], list(held)
    for accumulator in accumulators:
        results.append(accumulator.result(n, [rest.pop(0) for _ in range(accumulator.width)], count))
    return results


def _present(n: Node, index: int) -> Expr:
    found = n.optional(index)
    if found is None:
        n.fail(f"initial value {index - 2} of the loop is missing")
    return found


def _probed(
    n: Node,
    convert: Callable[[Expr, Sequence[Expr]], tuple[Expr, list[Expr], list[Expr]]],
    inits: Sequence[Expr],
    names: Sequence[str],
    collected: Sequence[str],
) -> list[_Accumulator]:
    """How to collect the outputs of a loop body: their types show in a loop that is built and thrown away."""
    if not collected:
        return []
    marker = SymVar("outer").serial
    found: list[Expr] = []

    def make(params: Sequence[Var]) -> tuple[Expr, list[Expr]]:
        cond, outputs, found[:] = convert(params[0], params[1:])
        return cond, [params[0], *outputs]

    with n.bb.body(), n.resolver.scope():
        n.importer.flow.loop(TRUE, [ZERO, *inits], ["iteration", *names], make)
    return _accumulators(n, found, collected, marker)


def _trip_limit(n: Node) -> Expr | None:
    if n.optional(0) is None:
        return None
    known = n.const(0)
    if known is not None and int(known.reshape(-1)[0]) >= _ENDLESS:
        return None
    limit = _scalar(n, n.input(0))
    return limit if n.type_of(limit).dtype == "int64" else n.emit(ops.cast(limit, dtype="int64"))


def _goes_on(n: Node, cond: Expr, step: Expr, limit: Expr | None) -> Expr:
    """cond and step < limit"""
    if limit is None:
        return cond
    is_below = n.emit(ops.less(step, limit))
    if isinstance(cond, Constant):
        return is_below if bool(cond.value) else cond
    return n.emit(ops.logical_and(cond, is_below))


@onnx_op("Scan", since=9)
def scan_op(n: Node) -> Result:
    """A loop over slices of the scan inputs; the scan outputs are stacked."""
    graph, scanned = n.graph("body"), n.int("num_scan_inputs")
    count = len(n.inputs) - scanned
    outputs = len(graph.output) - count
    states, xs = n.all_inputs()[:count], n.all_inputs()[count:]
    axes = n.ints("scan_input_axes", None) or (0,) * scanned
    backwards = n.ints("scan_input_directions", None) or (0,) * scanned
    out_axes = n.ints("scan_output_axes", None) or (0,) * outputs
    reversed_ = n.ints("scan_output_directions", None) or (0,) * outputs
    axes = tuple(normalize_axis(n, a, len(n.shape_of(x))) for a, x in zip(axes, xs, strict=True))
    length = n.shape_of(xs[0])[axes[0]]
    trip = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((length,))), ()))

    def slices(step: Expr) -> list[Expr]:
        last = n.emit(ops.subtract(n.emit(ops.subtract(trip, ONE)), step)) if any(backwards) else step
        return [n.emit(ops.gather(x, last if b else step, axis=a)) for x, a, b in zip(xs, axes, backwards, strict=True)]

    marker = SymVar("outer").serial
    with n.bb.body(), n.resolver.scope():
        step = Var("probe", ZERO.ty)
        probed = n.importer.subgraph(graph, [*map(lambda s: _stand_in(n, s), states), *slices(step)], n.label)[count:]
    collected = [n.proto.output[k] if k < n.num_outputs else "" for k in range(count, len(graph.output))]
    accumulators = _accumulators(n, probed, collected, marker)
    for accumulator, flag in zip(accumulators, reversed_, strict=True):
        accumulator.prepends = bool(flag)

    def make(params: Sequence[Var]) -> tuple[Expr, list[Expr]]:
        step, held, rest = params[0], params[1 : count + 1], params[count + 1 :]
        found = n.importer.subgraph(graph, [*held, *slices(step)], n.label)
        following = n.emit(ops.add(step, ONE))
        return n.emit(ops.less(following, trip)), [following, *found[:count], *_accumulate(n, accumulators, rest, found[count:])]

    starts = [x for a in accumulators for x in a.inits(n)]
    labels = ["iteration", *(i.name for i in graph.input[:count])]
    labels += [label for a in accumulators for label in a.labels]
    lead: list[SymExpr | None] = [None] * (count + 1)
    for accumulator in accumulators:
        lead += [None, None] if accumulator.is_flat else [length]
    final = n.importer.flow.loop(n.emit(ops.less(ZERO, trip)), [ZERO, *states, *starts], labels, make, lead)
    stacked = _collected(n, accumulators, final[count + 1 :], final[0])
    return (*final[1 : count + 1], *(_move_first(n, x, a) for x, a in zip(stacked, out_axes, strict=True)))


def _move_first(n: Node, x: Expr, axis: int) -> Expr:
    """x with its first axis moved to `axis`."""
    rank = len(n.shape_of(x))
    axis = normalize_axis(n, axis, rank)
    order = list(range(1, rank))
    order.insert(axis, 0)
    return x if axis == 0 else n.emit(ops.transpose(x, axes=tuple(order)))


