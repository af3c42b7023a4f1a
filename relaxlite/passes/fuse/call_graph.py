"""Call graph of a function body for fusion: producers and consumers, legal positions of calls, and fusion groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from math import inf

from relaxlite.ir.attributes import COMPOSITE
from relaxlite.ir.expr import (
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Expr,
    Function,
    GlobalVar,
    Let,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import ShapeType, TensorType, TupleType, type_symbols
from relaxlite.ir.visitor import expr_symbols, used_vars
from relaxlite.passes.loops.pattern import LoopPattern
from relaxlite.records import dataclass

_VARIABLES = Var | SymVar


@dataclass(eq=False)
class CallNode:
    """Call of a tensor program in a body. `is_view` marks a reshape, which costs nothing on its own."""

    position: int
    var: Var
    call: Call
    program: TensorProgram
    pattern: LoopPattern
    is_view: bool = False
    earliest: float = -1  # operands and symbols that no node computes are defined after this position
    producers: list[CallNode] = field(default_factory=list)
    consumers: list[CallNode] = field(default_factory=list)
    external_uses: list[float] = field(
        default_factory=list
    )  # positions of other uses; infinity: the result of the body
    parent: CallNode | None = None  # immediate post-dominator; None: the end of the body
    depth: int = 1
    group: FusionGroup = field(init=False)

    def __post_init__(self) -> None:
        self.group = FusionGroup([self], self.position)

    @property
    def shape(self) -> tuple[SymExpr, ...]:
        """Shape of the result; () for a result of unknown shape."""
        return self.call.ty.shape or () if isinstance(self.call.ty, TensorType) else ()


@dataclass(eq=False)
class FusionGroup:
    """Nodes that become one kernel, in order.

    `place` is the position of the kernel in the body, comparable to positions of nodes.
    """

    nodes: list[CallNode]
    place: float

    @property
    def has_anchor(self) -> bool:
        """Whether the group contains a reduction or a ROW, OUT_FUSIBLE or OPAQUE program."""
        return any(n.pattern >= LoopPattern.REDUCTION for n in self.nodes)

    @property
    def outputs(self) -> list[CallNode]:
        """Nodes whose results are used outside of the group, or unused."""
        inside = set(self.nodes)
        return [n for n in self.nodes if n.external_uses or not n.consumers or not inside.issuperset(n.consumers)]

    @property
    def inputs(self) -> tuple[Expr, ...]:
        """Operands that no node of the group computes, without duplicates."""
        inside = {n.var for n in self.nodes}
        return tuple(dict.fromkeys(a for n in self.nodes for a in n.call.args if a not in inside))

    @property
    def structural_key(self) -> object:
        """Structural key of the group: programs, symbols, types and data flow."""
        numbers: dict[Expr, int] = {x: k for k, x in enumerate((*self.inputs, *(n.var for n in self.nodes)))}
        calls = tuple(
            (n.call.callee, n.is_view, tuple(numbers[a] for a in n.call.args), n.call.sym_args) for n in self.nodes
        )
        types = tuple((ty.shape, ty.dtype) for x in numbers if isinstance(ty := x.ty, TensorType))
        return calls, types, tuple(numbers[n.var] for n in self.outputs)

    @property
    def names(self) -> list[str]:
        """Names of the tensors of the group's program: inputs, then results of nodes."""
        inputs = [expr.name if isinstance(expr, Var) else f"c{k}" for k, expr in enumerate(self.inputs)]
        return inputs + [n.var.name for n in self.nodes]

    @property
    def symbols(self) -> tuple[SymVar, ...]:
        """Symbols that the calls and the types of their results use."""
        return tuple(dict.fromkeys(s for n in self.nodes for s in (*expr_symbols(n.call), *type_symbols(n.var.ty))))


def join_groups(groups: Iterable[FusionGroup]) -> FusionGroup | str:
    """Join groups into one group.

    Its position is after the definition of all operands and before the first use of a result; the reason as text if
    there is no such position.
    """
    nodes = sorted((n for g in groups for n in g.nodes), key=lambda n: n.position)
    inside, group = set(nodes), FusionGroup(nodes, nodes[-1].position)
    operand_positions = [p.group.place for n in nodes for p in n.producers if p not in inside]
    earliest = max((*operand_positions, *(n.earliest for n in nodes)))
    uses = [(c.group.place, c.var.name) for n in nodes for c in n.consumers if c not in inside]
    uses += [(p, "what follows") for n in nodes for p in n.external_uses]
    latest, name = min(uses, default=(inf, ""), key=lambda user: user[0])
    if earliest >= latest:
        return f"{name} is needed in between"
    if not earliest < group.place < latest:
        group.place = (earliest + latest) / 2 if latest < inf else earliest + 0.5
    return group


def build_call_graph(body: Body, node_of: Callable[[int, Binding], CallNode | None]) -> list[CallNode]:
    """Build the call graph of a body; returns its nodes in order of position.

    `node_of` gives None for a binding that is no node.
    """
    nodes: dict[Var, CallNode] = {}
    defined: dict[object, int] = {}  # variables and symbols -> position
    for position, binding in enumerate(body.bindings()):
        if isinstance(binding, MatchShape):
            for symbol in dict.fromkeys(s for e in binding.shape for s in e.free_vars()):
                defined.setdefault(symbol, position)
        node = node_of(position, binding)
        if node is None:
            defined[binding.var] = position
            _add_outside_uses(binding.value if isinstance(binding, Let) else binding.source, nodes, position)
            continue
        nodes[node.var] = node
        operands = [*node.call.args, *expr_symbols(node.call), *type_symbols(node.var.ty)]
        node.earliest = max((defined.get(v, -1) for v in operands if isinstance(v, _VARIABLES)), default=-1)
        for arg in dict.fromkeys(node.call.args):
            if isinstance(arg, Var) and arg in nodes:
                nodes[arg].consumers.append(node)
                node.producers.append(nodes[arg])
    _add_outside_uses(body.result, nodes, inf)
    return list(nodes.values())


def _add_outside_uses(expr: Expr, nodes: dict[Var, CallNode], position: float) -> None:
    for var in used_vars(expr):
        if var in nodes:
            nodes[var].external_uses.append(position)


def set_post_dominators(nodes: list[CallNode]) -> None:
    """Set the immediate post-dominator of each node.

    It is the nearest common ancestor of all consumers in the post-dominator tree.
    """
    for node in reversed(nodes):
        common: CallNode | None = None
        for k, consumer in enumerate(node.consumers):
            common = consumer if k == 0 else _common_post_dominator(common, consumer)
        node.parent = None if node.external_uses else common
        node.depth = 1 if node.parent is None else node.parent.depth + 1


def _common_post_dominator(a: CallNode | None, b: CallNode | None) -> CallNode | None:
    while a is not b:
        if a is None or b is None:
            return None
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a


def nodes_between(node: CallNode, sink: CallNode) -> list[CallNode]:
    """Every call on a path from `node` (excluded) to `sink` (included)."""
    nodes: dict[CallNode, None] = {}
    stack = list(node.consumers)
    while stack:
        current = stack.pop()
        if current in nodes:
            continue
        nodes[current] = None
        if current is not sink:
            stack.extend(current.consumers)
    return list(nodes)


def composite_function(group: FusionGroup) -> Function:
    """The group as a composite function of its inputs and of a shape that carries its symbols."""
    params: list[Var] = []
    env: dict[Expr, Var] = {}
    for name, expr in zip(group.names, group.inputs, strict=False):  # names of nodes follow the names of inputs
        param = Var(name, expr.ty)
        params.append(param)
        env[expr] = param
    symbols = group.symbols
    params.append(Var("symbols", ShapeType(symbols, len(symbols))))
    bindings: list[Binding] = []
    for n in group.nodes:
        args = tuple(env.get(a, a) for a in n.call.args)
        var = Var(n.var.name, n.var.ty)
        env[n.var] = var
        bindings.append(Let(var, Call(n.call.callee, args, n.call.attrs, n.call.sym_args, n.call.ty, n.call.loc)))
    results = tuple(env[n.var] for n in group.outputs)
    body = Body((Block(tuple(bindings)),), results[0] if len(results) == 1 else Tuple(results))
    return Function(tuple(params), body, Attrs({COMPOSITE: True}))


def _location(group: FusionGroup) -> str | None:
    """Source location of a fused call: of several locations the first and the last."""
    locations = [location for location in dict.fromkeys(n.call.loc for n in group.nodes) if location is not None]
    return f"{locations[0]}, fused up to {locations[-1]}" if len(locations) > 1 else next(iter(locations), None)


def call_bindings(group: FusionGroup, callee: GlobalVar) -> list[Binding]:
    """Bind the results of a group that are used outside to the call of its kernel."""
    args, result_vars = (*group.inputs, ShapeValue(group.symbols)), [n.var for n in group.outputs]
    loc = _location(group)
    if len(result_vars) == 1:
        return [Let(result_vars[0], Call(callee, args, ty=result_vars[0].ty, loc=loc))]
    ty = TupleType(tuple(v.ty for v in result_vars))
    results = Var("_".join(v.name for v in result_vars), ty, loc)
    fields = [Let(v, TupleGetItem(results, k)) for k, v in enumerate(result_vars)]
    return [Let(results, Call(callee, args, ty=ty, loc=loc)), *fields]
