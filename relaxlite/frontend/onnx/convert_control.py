"""Control flow: If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from onnx import GraphProto

from relaxlite.frontend.onnx.appended import Stacked, only_appends, yielding_elements
from relaxlite.frontend.onnx.convert_shapes import move_first, normalize_axis
from relaxlite.frontend.onnx.loops import Outputs, RankConflict
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.unify import unify_dims
from relaxlite.frontend.onnx.unrolled import unrolled_loop
from relaxlite.frontend.onnx.validation import names_read
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, Tuple, Var
from relaxlite.ir.symbolic import SymExpr, SymVar, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

Shape = tuple[SymExpr, ...]

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
    bodies = [lambda g=graph: n.importer.subgraph(g, [], n.label)[: n.num_outputs] for graph in branches]
    cond = _scalar(n, n.input(0))
    try:
        return tuple(n.importer.flow.branch(cond, bodies, names))
    except RankConflict as conflict:
        return tuple(_chosen_branch(n, cond, bodies, str(conflict)))


def _chosen_branch(n: Node, cond: Expr, bodies: Sequence[Callable[[], list[Expr]]], why: str) -> list[Expr]:
    """One branch in place of the If, with a check at run time that it is the one: a value has one rank."""
    takes_then = n.importer.model.choices.take(n.bb.loc or n.label, f"the condition, for {why}")
    taken = str(takes_then).lower()
    n.check_assumption(
        cond, takes_then, f"its condition is {str(not takes_then).lower()}, but taken to be {taken}: {why}"
    )
    return bodies[0 if takes_then else 1]()


def _scalar(n: Node, x: Expr) -> Expr:
    return x if not n.shape_of(x) else n.emit(ops.reshape(x, ()))


class _Collector(Protocol):
    """What a loop makes of an output of its body that the body does not read back."""

    @property
    def labels(self) -> tuple[str, ...]:
        """One name for each value that the loop carries for it."""

    def inits(self, n: Node) -> list[Expr]: ...

    def step(self, n: Node, held: Sequence[Expr], value: Expr) -> list[Expr]: ...

    def result(self, n: Node, held: Sequence[Expr], count: Expr) -> Expr: ...


@dataclass
class _Last:
    """The value of the last iteration. The initial one counts only if there is none; it may be of another shape."""

    name: str
    init: Expr
    ty: TensorType
    dims: Shape

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.name,)

    def inits(self, n: Node) -> list[Expr]:
        given = n.type_of(self.init)
        if given.dtype == self.ty.dtype and given.rank == self.ty.rank:
            return [self.init]
        return [n.emit(ops.full(self.dims, Constant.of(0, self.ty.dtype)), self.name)]

    def step(self, n: Node, held: Sequence[Expr], value: Expr) -> list[Expr]:
        return [value]

    def result(self, n: Node, held: Sequence[Expr], count: Expr) -> Expr:
        return held[0]


@dataclass
class _Stack:
    """A value per iteration, along a new first axis; flattened with its sizes where these are known inside only."""

    name: str
    dtype: str
    dims: Shape
    is_flat: bool
    prepends: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_shape") if self.is_flat else (self.name,)

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


def _stacks(n: Node, values: Sequence[Expr], names: Sequence[str], marker: int) -> list[_Stack]:
    found = []
    for value, name in zip(values, names, strict=True):
        dims = n.shape_of(value)
        is_flat = any(v.serial > marker for d in dims for v in d.free_vars())
        found.append(_Stack(name or "stacked", n.type_of(value).dtype, dims, is_flat))
    return found


def _collect(n: Node, collectors: Sequence[_Collector], held: Sequence[Expr], found: Sequence[Expr]) -> list[Expr]:
    """What the loop carries on for its collectors."""
    rest, values = list(held), list[Expr]()
    for collector, value in zip(collectors, found, strict=True):
        values += collector.step(n, [rest.pop(0) for _ in collector.labels], value)
    return values


def _collected(n: Node, collectors: Sequence[_Collector], held: Sequence[Expr], count: Expr) -> list[Expr]:
    rest = list(held)
    return [c.result(n, [rest.pop(0) for _ in c.labels], count) for c in collectors]


def _stand_in(n: Node, x: Expr) -> Expr:
    """A variable of the same type whose value is not known."""
    return Var("probe", n.type_of(x))


@onnx_op("Loop")
def loop_op(n: Node) -> Result:
    """Inputs: trip count, condition, initial values. The body yields both anew, and what to stack."""
    unrolled = unrolled_loop(n)
    if unrolled is not None:
        return unrolled
    body = _LoopBody(n)
    limit = _trip_limit(n)
    collectors = body.collectors()
    carried = len(body.carried)

    def make(params: Sequence[Var]) -> Outputs:
        cond, outputs, found = body.convert(params[0], params[1 : carried + 1])
        following = n.emit(ops.add(params[0], ONE))
        kept = _collect(n, collectors, params[carried + 1 :], found)
        return _goes_on(n, cond, following, limit), [following, *outputs, *kept]

    cond = TRUE if n.optional(1) is None else _scalar(n, n.input(1))
    labels = ["iteration", *(body.names[k] for k in body.carried), *(label for c in collectors for label in c.labels)]
    values = [ZERO, *(body.inits[k] for k in body.carried), *(x for c in collectors for x in c.inits(n))]
    count, *final = n.importer.flow.loop(_goes_on(n, cond, ZERO, limit), values, labels, make)
    gathered = _collected(n, collectors, final[carried:], count)
    results = list(body.inits)
    for k, value in zip(body.carried + body.last + body.lists, final[:carried] + gathered, strict=False):
        results[k] = Stacked((value,)) if k in body.lists else value
    return (*results, *gathered[len(body.last + body.lists) :])


class _LoopBody:
    """The body of an ONNX Loop and how its values are carried: some never change, some are never read back; lists that
    are only appended to yield what is appended."""

    def __init__(self, n: Node) -> None:
        graph, self.n = n.graph("body"), n
        self.inits = [self._present(k) for k in range(2, len(n.inputs))]
        total = len(self.inits)
        if len(graph.input) != total + 2 or len(graph.output) < total + 1:
            n.fail(
                f"the body must take 2 + {total} inputs and yield at least 1 + {total} outputs, not "
                f"{len(graph.input)} and {len(graph.output)}"
            )
        self.names = [i.name for i in graph.input[2:]]
        changing = [k for k in range(total) if graph.output[k + 1].name != self.names[k]]
        read = names_read(graph) | {o.name for o in graph.output}
        self.lists = [k for k in changing if self._is_list(graph, k)]
        self.carried = [k for k in changing if self.names[k] in read and k not in self.lists]
        self.last = [k for k in changing if self.names[k] not in read]
        self.graph = yielding_elements(graph, self.lists)

    def _is_list(self, graph: GraphProto, k: int) -> bool:
        """Whether value k is one; ImportModelError for another sequence."""
        init = self.inits[k]
        if isinstance(init, Tuple) and (init.fields or not only_appends(graph, k)):
            self.n.fail(
                f"sequence '{self.names[k]}' changes in the loop: this is supported only where it is empty at first "
                "and each iteration just appends a tensor; concatenate a tensor instead"
            )
        return isinstance(init, Tuple)

    def _present(self, index: int) -> Expr:
        found = self.n.optional(index)
        if found is None:
            self.n.fail(f"initial value {index - 2} of the loop is missing")
        return found

    def convert(self, step: Expr, held: Sequence[Expr]) -> tuple[Expr, list[Expr], list[Expr]]:
        """(next condition, next values that are carried, values to collect) of one iteration."""
        values = list(self.inits)
        for k, value in zip(self.carried, held, strict=True):
            values[k] = value
        cond, *outputs = self.n.importer.subgraph(self.graph, [step, TRUE, *values], self.n.label)
        collected = [outputs[k] for k in self.last + self.lists] + outputs[len(values) :]
        return _scalar(self.n, cond), [outputs[k] for k in self.carried], collected

    def collectors(self) -> list[_Collector]:
        """For the outputs to collect: their types show in a loop that is built and thrown away."""
        n, total = self.n, len(self.inits)
        stacked = [n.proto.output[k] if k < n.num_outputs else "" for k in range(total, len(self.graph.output) - 1)]
        stacked = [self.names[k] for k in self.lists] + stacked
        if not stacked and not self.last:
            return []
        marker = SymVar("outer").serial
        exprs: list[Expr] = []

        def make(params: Sequence[Var]) -> Outputs:
            cond, outputs, exprs[:] = self.convert(params[0], params[1:])
            return cond, [params[0], *outputs]

        with n.bb.body(), n.resolver.scope():
            labels = ["iteration", *(self.names[k] for k in self.carried)]
            n.importer.flow.loop(TRUE, [ZERO, *(self.inits[k] for k in self.carried)], labels, make)
        count = len(self.last)
        lasts = [self._last(k, x, marker) for k, x in zip(self.last, exprs, strict=False)]
        stacks = _stacks(n, exprs[count:], stacked, marker)
        for stack in stacks[: len(self.lists)]:
            if stack.is_flat:
                n.fail(f"what the loop appends to sequence '{stack.name}' has sizes that only the loop knows")
        return [*lasts, *stacks]

    def _last(self, k: int, value: Expr, marker: int) -> _Last:
        dims = tuple(sym(0) if any(v.serial > marker for v in d.free_vars()) else d for d in self.n.shape_of(value))
        return _Last(self.names[k], self.inits[k], self.n.type_of(value), dims)


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
    stacks = _stacks(n, probed, collected, marker)
    for stack, flag in zip(stacks, reversed_, strict=True):
        stack.prepends = bool(flag)

    def make(params: Sequence[Var]) -> Outputs:
        step, held, rest = params[0], params[1 : count + 1], params[count + 1 :]
        found = n.importer.subgraph(graph, [*held, *slices(step)], n.label)
        following = n.emit(ops.add(step, ONE))
        return n.emit(ops.less(following, trip)), [following, *found[:count], *_collect(n, stacks, rest, found[count:])]

    starts = [x for stack in stacks for x in stack.inits(n)]
    labels = [
        "iteration",
        *(i.name for i in graph.input[:count]),
        *(label for stack in stacks for label in stack.labels),
    ]
    lead: list[SymExpr | None] = [None] * (count + 1)
    for stack in stacks:
        lead += [None, None] if stack.is_flat else [length]
    final = n.importer.flow.loop(n.emit(ops.less(ZERO, trip)), [ZERO, *states, *starts], labels, make, lead)
    stacked = _collected(n, stacks, final[count + 1 :], final[0])
    return (*final[1 : count + 1], *(move_first(n, x, a) for x, a in zip(stacked, out_axes, strict=True)))
