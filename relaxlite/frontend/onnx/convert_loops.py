"""Converters of loops: Loop and Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from onnx import GraphProto, ValueInfoProto, helper

from relaxlite.forms import part_names
from relaxlite.frontend.common.control_flow import Outputs
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.onnx.border import as_optional, declared_element
from relaxlite.frontend.onnx.convert_if import mark, scalar
from relaxlite.frontend.onnx.convert_shapes import move_first_axis, normalize_axis
from relaxlite.frontend.onnx.loop_sequences import is_append_only, with_appended_outputs
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.ragged import appended
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.frontend.onnx.sequences import (
    RaggedSequence,
    RuntimeOptional,
    StackedSequence,
    leaves,
    rank_of,
    rebuilt,
    row_of,
    to_ragged,
)
from relaxlite.frontend.onnx.unrolled import unroll_loop
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
_MIN_UNLIMITED = 1 << 31  # larger trip counts are no limit


class _Collector(Protocol):
    """Accumulates an output of a loop's body that later iterations do not read, in values that the loop carries.

    `step` returns the next carried values, `result` the collected value after `count` iterations.
    """

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each value that the loop carries for the collector."""

    def inits(self, n: Node) -> list[Expr]: ...

    def step(self, n: Node, carried: Sequence[Expr], value: Expr) -> list[Expr]: ...

    def result(self, n: Node, carried: Sequence[Expr], count: Expr) -> Expr: ...


@dataclass
class _LastValue:
    """Keeps the last iteration's value. The initial value, used if there are no iterations, may have another shape."""

    name: str
    init: Expr
    ty: TensorType
    dims: Shape

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.name,)

    def inits(self, n: Node) -> list[Expr]:
        init_type = n.type_of(self.init)
        if init_type.dtype == self.ty.dtype and init_type.rank == self.ty.rank:
            return [self.init]
        return [n.emit(ops.full(self.dims, Constant.of(0, self.ty.dtype)), self.name)]

    def step(self, n: Node, carried: Sequence[Expr], value: Expr) -> list[Expr]:
        return [value]

    def result(self, n: Node, carried: Sequence[Expr], count: Expr) -> Expr:
        return carried[0]


@dataclass
class _StackedValues:
    """Stacks the values along a new first axis; as a flat tensor and a shape if sizes are known only in the body."""

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

    def step(self, n: Node, carried: Sequence[Expr], value: Expr) -> list[Expr]:
        if self.is_flat:
            row = n.emit(ops.reshape(value, (product(n.shape_of(value)),)))
            sizes = n.emit(ops.shape_of(value))
        else:
            fitted = unify_dims(n.bb, value, dict(enumerate(n.shape_of(carried[0])[1:])))
            row = n.emit(ops.expand_dims(fitted, axes=(0,)))
        pair = (row, carried[0]) if self.prepends else (carried[0], row)
        joined = n.emit(ops.concat(*pair, axis=0), self.name)
        return [joined, sizes] if self.is_flat else [joined]

    def result(self, n: Node, carried: Sequence[Expr], count: Expr) -> Expr:
        if not self.is_flat:
            return carried[0]
        sizes = n.resolver.values(carried[1], lower=0)
        return n.emit(ops.reshape(carried[0], (*n.resolver.values(count, lower=0), *sizes)), self.name)


@dataclass
class _RaggedValues:
    """Collects the elements of a sequence, whose sizes are known only in the body."""

    name: str
    dtype: str
    rank: int

    @property
    def labels(self) -> tuple[str, ...]:
        return part_names(self.name, "sequence()")

    def inits(self, n: Node) -> list[Expr]:
        zeros = n.emit(ops.full((sym(0),), Constant.of(0, self.dtype)))
        return [zeros, n.emit(ops.full((sym(0), sym(self.rank)), ZERO))]

    def step(self, n: Node, carried: Sequence[Expr], value: Expr) -> list[Expr]:
        return [n.emit(ops.concat(old, row, axis=0)) for old, row in zip(carried, row_of(n.bb, value), strict=True)]

    def result(self, n: Node, carried: Sequence[Expr], count: Expr) -> Expr:
        return RaggedSequence(tuple(carried))


def _stacks(n: Node, values: Sequence[Expr], names: Sequence[str], marker: int) -> list[_StackedValues]:
    stacks = []
    for value, name in zip(values, names, strict=True):
        dims = n.shape_of(value)
        is_flat = any(v.serial > marker for d in dims for v in d.free_vars())
        stacks.append(_StackedValues(name or "stacked", n.type_of(value).dtype, dims, is_flat))
    return stacks


def _collect(n: Node, collectors: Sequence[_Collector], carried: Sequence[Expr], outputs: Sequence[Expr]) -> list[Expr]:
    """Return the next carried values of all collectors, from one iteration's outputs."""
    remaining, values = list(carried), list[Expr]()
    for collector, value in zip(collectors, outputs, strict=True):
        values += collector.step(n, [remaining.pop(0) for _ in collector.labels], value)
    return values


def _collected(n: Node, collectors: Sequence[_Collector], carried: Sequence[Expr], count: Expr) -> list[Expr]:
    """Return the results of all collectors, from the final carried values."""
    remaining = list(carried)
    return [c.result(n, [remaining.pop(0) for _ in c.labels], count) for c in collectors]


def _placeholder(n: Node, x: Expr) -> Expr:
    """Return a variable of the type of x, for a body that is converted only to learn types."""
    return Var("probe", n.type_of(x))


@onnx_op("Loop")
def loop_op(n: Node) -> Result:
    """Loop; inputs: trip count, condition, initial values. The body yields condition, next values, values to stack."""
    unrolled = unroll_loop(n)
    if unrolled is not None:
        return unrolled
    body = _LoopBody(n)
    limit = _trip_limit(n)
    collectors = body.collectors()
    carried = len(body.carried_leaves())

    def make(params: Sequence[Var]) -> Outputs:
        cond, outputs, outputs_to_collect = body.convert(params[0], params[1 : carried + 1])
        next_step = n.emit(ops.add(params[0], ONE))
        collector_values = _collect(n, collectors, params[carried + 1 :], outputs_to_collect)
        return _loop_condition(n, cond, next_step, limit), [next_step, *outputs, *collector_values]

    cond = TRUE if n.optional(1) is None else scalar(n, n.input(1))
    labels = ["iteration", *body.carried_labels(), *(label for c in collectors for label in c.labels)]
    values = [ZERO, *body.carried_leaves(), *(x for c in collectors for x in c.inits(n))]
    count, *final = n.importer.flow.loop(_loop_condition(n, cond, ZERO, limit), values, labels, make)
    gathered = _collected(n, collectors, final[carried:], count)
    results = list(body.inits)
    for k, value in zip(body.carried, body.rebuilt(final[:carried]), strict=True):
        results[k] = value
    for k, value in zip(body.last + body.lists, gathered, strict=False):
        results[k] = _as_list(n, body.inits[k], value) if k in body.lists else value
    results += gathered[len(body.last + body.lists) :]
    for k, value in enumerate(results):
        mark(n, value, body.marks[k])
    return tuple(results)


def _as_list(n: Node, init: Expr, collected: Expr) -> Expr:
    """Return a sequence with what the loop appended to it."""
    added = collected if isinstance(collected, Tuple) else StackedSequence((collected,))
    if isinstance(init, Tuple) and type(init) is Tuple and not init.fields:
        return added
    more = to_ragged(n.bb, added)
    return appended(n, to_ragged(n.bb, init, (n.type_of(more.elements).dtype, rank_of(more))), more)


class _LoopBody:
    """The body of an ONNX Loop, with its values classified by use.

    `carried`: values that change and are read. `last`: values that change and are never read. `lists`: sequences that
    are only appended to. Other values are loop-invariant. `marks`: the narrow type of each output, or None.
    """

    def __init__(self, n: Node) -> None:
        graph, self.n = n.graph("body"), n
        self.inits = [self._initial_value(k) for k in range(2, len(n.inputs))]
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
        self.graph = with_appended_outputs(graph, self.lists)
        self.marks: list[NarrowType | None] = []

    def _is_list(self, graph: GraphProto, k: int) -> bool:
        """Whether value k is a sequence that is only appended to."""
        init = self.inits[k]
        return isinstance(init, Tuple) and not isinstance(init, RuntimeOptional) and is_append_only(graph, k)

    def _carried_value(self, k: int, value: Expr) -> Expr:
        """Return a carried value as it stands in tensors: one of the kind of the initial value."""
        init = self.inits[k]
        if isinstance(init, RuntimeOptional):
            return as_optional(self.n.bb, value, self.graph.input[k + 2].type.optional_type.elem_type)
        if not isinstance(init, Tuple):
            return value
        return to_ragged(self.n.bb, value, declared_element(self.graph.input[k + 2].type))

    def carried_leaves(self) -> list[Expr]:
        """Return the tensors that the initial carried values stand in."""
        return [leaf for k in self.carried for leaf in leaves(self._carried_value(k, self.inits[k]))]

    def carried_labels(self) -> list[str]:
        counts = [len(leaves(self._carried_value(k, self.inits[k]))) for k in self.carried]
        return [self.names[k] for k, count in zip(self.carried, counts, strict=True) for _ in range(count)]

    def rebuilt(self, parts: Sequence[Expr]) -> list[Expr]:
        """Return carried values from the tensors that they stand in."""
        rest, values = list(parts), list[Expr]()
        for k in self.carried:
            template = self._carried_value(k, self.inits[k])
            values.append(rebuilt(template, [rest.pop(0) for _ in leaves(template)]))
            mark(self.n, values[-1], self.n.importer.narrow.get(self.inits[k]))
        return values

    def _initial_value(self, index: int) -> Expr:
        init = self.n.optional(index)
        if init is None:
            self.n.fail(f"initial value {index - 2} of the loop is missing")
        return init

    def convert(self, step: Expr, carried: Sequence[Expr]) -> tuple[Expr, list[Expr], list[Expr]]:
        """Convert one iteration; return (next condition, next carried values, outputs to collect)."""
        values = list(self.inits)
        for k, value in zip(self.carried, self.rebuilt(carried), strict=True):
            values[k] = value
        cond, *outputs = self.n.importer.subgraph(self.graph, [step, TRUE, *values], self.n.label)
        self.marks = [self.n.importer.narrow.get(x) for x in outputs]
        collected = [outputs[k] for k in self.last + self.lists] + outputs[len(values) :]
        return scalar(self.n, cond), self._next(outputs), collected

    def _next(self, outputs: Sequence[Expr]) -> list[Expr]:
        """Return the tensors that the next carried values stand in."""
        return [leaf for k in self.carried for leaf in leaves(self._carried_value(k, outputs[k]))]

    def collectors(self) -> list[_Collector]:
        """Return collectors for the outputs to collect, whose types are learned from a loop that is discarded."""
        n, total = self.n, len(self.inits)
        stacked = [n.proto.output[k] if k < n.num_outputs else "" for k in range(total, len(self.graph.output) - 1)]
        stacked = [self.names[k] for k in self.lists] + stacked
        if not stacked and not self.last:
            return []
        marker = SymVar("outer").serial
        outputs_to_collect: list[Expr] = []

        def make(params: Sequence[Var]) -> Outputs:
            cond, outputs, outputs_to_collect[:] = self.convert(params[0], params[1:])
            return cond, [params[0], *outputs]

        with n.bb.body(), n.resolver.scope():
            n.importer.flow.loop(TRUE, [ZERO, *self.carried_leaves()], ["iteration", *self.carried_labels()], make)
        count = len(self.last)
        lasts = [self._last(k, x, marker) for k, x in zip(self.last, outputs_to_collect, strict=False)]
        stacks = _stacks(n, outputs_to_collect[count:], stacked, marker)
        sequences = [_RaggedValues(x.name, x.dtype, len(x.dims)) if x.is_flat else x for x in stacks[: len(self.lists)]]
        return [*lasts, *sequences, *stacks[len(self.lists) :]]

    def _last(self, k: int, value: Expr, marker: int) -> _LastValue:
        dims = tuple(sym(0) if any(v.serial > marker for v in d.free_vars()) else d for d in self.n.shape_of(value))
        return _LastValue(self.names[k], self.inits[k], self.n.type_of(value), dims)


def _trip_limit(n: Node) -> Expr | None:
    if n.optional(0) is None:
        return None
    known = n.const(0)
    if known is not None and int(known.reshape(-1)[0]) >= _MIN_UNLIMITED:
        return None
    limit = scalar(n, n.input(0))
    return limit if n.type_of(limit).dtype == "int64" else n.emit(ops.cast(limit, dtype="int64"))


def _loop_condition(n: Node, cond: Expr, step: Expr, limit: Expr | None) -> Expr:
    """Emit cond and step < limit; limit None: no limit."""
    if limit is None:
        return cond
    is_below = n.emit(ops.less(step, limit))
    if isinstance(cond, Constant):
        return is_below if bool(cond.value) else cond
    return n.emit(ops.logical_and(cond, is_below))


@onnx_op("Scan")
def scan_8(n: Node) -> Result:
    """Scan of opset 8: a batch of scans, all along axis 1, as a Scan of opset 9 over the batch."""
    if n.optional(0) is not None:
        n.fail("lengths of the sequences (input 0) are not supported: scan each sequence alone")
    graph, scanned = n.graph("body"), n.int("num_scan_inputs")
    inner = helper.make_node("Scan", [], [], body=graph, num_scan_inputs=scanned)
    directions = n.ints("directions", None)
    if directions:
        inner.attribute.append(helper.make_attribute("scan_input_directions", directions))
    names, results = [f"{i.name}_row" for i in graph.input], [f"{o.name}_row" for o in graph.output]
    inner.input.extend(names)
    inner.output.extend(results)
    row = GraphProto(name=f"{graph.name}_row", node=[inner])
    row.input.extend(ValueInfoProto(name=name) for name in names)
    row.output.extend(ValueInfoProto(name=name) for name in results)
    outer = helper.make_node("Scan", n.proto.input[1:], n.proto.output, body=row, num_scan_inputs=len(names))
    attributes = {attribute.name: attribute for attribute in outer.attribute}
    with n.importer.opset_of_domain("", 9):
        return scan_op(Node(outer, n.label, n.inputs[1:], attributes, 9, n.importer))


@onnx_op("Scan", since=9)
def scan_op(n: Node) -> Result:
    """Scan: a loop over slices of the scan inputs, whose scan outputs are stacked."""
    graph, scanned = n.graph("body"), n.int("num_scan_inputs")
    count = len(n.inputs) - scanned
    outputs = len(graph.output) - count
    states, xs = n.all_inputs()[:count], n.all_inputs()[count:]
    axes = n.ints("scan_input_axes", None) or (0,) * scanned
    is_reversed = n.ints("scan_input_directions", None) or (0,) * scanned
    out_axes = n.ints("scan_output_axes", None) or (0,) * outputs
    reversed_ = n.ints("scan_output_directions", None) or (0,) * outputs
    axes = tuple(normalize_axis(n, a, len(n.shape_of(x))) for a, x in zip(axes, xs, strict=True))
    length = n.shape_of(xs[0])[axes[0]]
    trip = n.emit(ops.reshape(n.emit(ops.shape_to_tensor((length,))), ()))

    def slices(step: Expr) -> list[Expr]:
        last = n.emit(ops.subtract(n.emit(ops.subtract(trip, ONE)), step)) if any(is_reversed) else step
        return [
            n.emit(ops.gather(x, last if b else step, axis=a)) for x, a, b in zip(xs, axes, is_reversed, strict=True)
        ]

    marker = SymVar("outer").serial
    with n.bb.body(), n.resolver.scope():
        step = Var("probe", ZERO.ty)
        probe_outputs = n.importer.subgraph(
            graph, [*map(lambda s: _placeholder(n, s), states), *slices(step)], n.label
        )[count:]
    collected = [n.proto.output[k] if k < n.num_outputs else "" for k in range(count, len(graph.output))]
    stacks = _stacks(n, probe_outputs, collected, marker)
    for stack, flag in zip(stacks, reversed_, strict=True):
        stack.prepends = bool(flag)

    def make(params: Sequence[Var]) -> Outputs:
        step, states_now, stack_values = params[0], params[1 : count + 1], params[count + 1 :]
        body_outputs = n.importer.subgraph(graph, [*states_now, *slices(step)], n.label)
        next_step = n.emit(ops.add(step, ONE))
        return n.emit(ops.less(next_step, trip)), [
            next_step,
            *body_outputs[:count],
            *_collect(n, stacks, stack_values, body_outputs[count:]),
        ]

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
    return (*final[1 : count + 1], *(move_first_axis(n, x, a) for x, a in zip(stacked, out_axes, strict=True)))
