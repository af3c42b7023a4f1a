"""The calls of a body as a graph for fusion: who reads whose result, where calls may stand, which ones are grouped."""

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
class Node:
    """A call of a program in a body; `is_view`: a reshape, which costs nothing on its own."""

    position: int
    var: Var
    call: Call
    program: TensorProgram
    pattern: LoopPattern
    is_view: bool = False
    earliest: float = -1  # what it needs beside the results of nodes is there after this position
    producers: list[Node] = field(default_factory=list)
    consumers: list[Node] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # positions of other uses; the end of the body is at infinity
    parent: Node | None = None  # immediate post-dominator; None: the end of the body
    depth: int = 1
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        self.group = Group([self], self.position)

    @property
    def shape(self) -> tuple[SymExpr, ...]:
        return self.call.ty.shape or () if isinstance(self.call.ty, TensorType) else ()


@dataclass(eq=False)
class Group:
    """Nodes that become one kernel, in order; `place`: where in the body it stands, among the positions of others."""

    nodes: list[Node]
    place: float

    @property
    def has_anchor(self) -> bool:
        return any(n.pattern >= LoopPattern.REDUCTION for n in self.nodes)

    @property
    def outs(self) -> list[Node]:
        """The nodes whose results are used outside, or nowhere."""
        inside = set(self.nodes)
        return [n for n in self.nodes if n.outside or not n.consumers or not inside.issuperset(n.consumers)]

    @property
    def inputs(self) -> tuple[Expr, ...]:
        inside = {n.var for n in self.nodes}
        return tuple(dict.fromkeys(a for n in self.nodes for a in n.call.args if a not in inside))

    @property
    def likeness(self) -> object:
        """What groups that merge alike have in common: programs, symbols, types, and who reads whose result."""
        known: dict[Expr, int] = {x: k for k, x in enumerate((*self.inputs, *(n.var for n in self.nodes)))}
        calls = tuple(
            (n.call.callee, n.is_view, tuple(known[a] for a in n.call.args), n.call.sym_args) for n in self.nodes
        )
        types = tuple((ty.shape, ty.dtype) for x in known if isinstance(ty := x.ty, TensorType))
        return calls, types, tuple(known[n.var] for n in self.outs)

    @property
    def names(self) -> list[str]:
        """What its program calls its tensors."""
        inputs = [expr.name if isinstance(expr, Var) else f"c{k}" for k, expr in enumerate(self.inputs)]
        return inputs + [n.var.name for n in self.nodes]

    @property
    def symbols(self) -> tuple[SymVar, ...]:
        return tuple(dict.fromkeys(s for n in self.nodes for s in (*expr_symbols(n.call), *type_symbols(n.var.ty))))


def joined(groups: Iterable[Group]) -> Group | str:
    """One group of all nodes, at a place where everything that they need is there and nothing needs them yet; where
    there is no such place, the reason."""
    nodes = sorted((n for g in groups for n in g.nodes), key=lambda n: n.position)
    inside, result = set(nodes), Group(nodes, nodes[-1].position)
    needed = [p.group.place for n in nodes for p in n.producers if p not in inside]
    before = max((*needed, *(n.earliest for n in nodes)))
    users = [(c.group.place, c.var.name) for n in nodes for c in n.consumers if c not in inside]
    users += [(p, "what follows") for n in nodes for p in n.outside]
    after, name = min(users, default=(inf, ""), key=lambda user: user[0])
    if before >= after:
        return f"{name} is needed in between"
    if not before < result.place < after:
        result.place = (before + after) / 2 if after < inf else before + 0.5
    return result


def make_graph(body: Body, node_of: Callable[[int, Binding], Node | None]) -> list[Node]:
    """The nodes of a body, in order."""
    nodes: dict[Var, Node] = {}
    defined: dict[object, int] = {}  # variables and symbols -> position
    for position, binding in enumerate(body.bindings()):
        if isinstance(binding, MatchShape):
            for symbol in dict.fromkeys(s for e in binding.shape for s in e.free_vars()):
                defined.setdefault(symbol, position)
        node = node_of(position, binding)
        if node is None:
            defined[binding.var] = position
            _leave(binding.value if isinstance(binding, Let) else binding.source, nodes, position)
            continue
        nodes[node.var] = node
        needed = [*node.call.args, *expr_symbols(node.call), *type_symbols(node.var.ty)]
        node.earliest = max((defined.get(v, -1) for v in needed if isinstance(v, _VARIABLES)), default=-1)
        for arg in dict.fromkeys(node.call.args):
            if isinstance(arg, Var) and arg in nodes:
                nodes[arg].consumers.append(node)
                node.producers.append(nodes[arg])
    _leave(body.result, nodes, inf)
    return list(nodes.values())


def _leave(expr: Expr, nodes: dict[Var, Node], position: float) -> None:
    for var in used_vars(expr):
        if var in nodes:
            nodes[var].outside.append(position)


def post_dominate(nodes: list[Node]) -> None:
    """The immediate post-dominator of each call: the nearest common descendant of its consumers in their own tree."""
    for node in reversed(nodes):
        common: Node | None = None
        for k, consumer in enumerate(node.consumers):
            common = consumer if k == 0 else _common(common, consumer)
        node.parent = None if node.outside else common
        node.depth = 1 if node.parent is None else node.parent.depth + 1


def _common(a: Node | None, b: Node | None) -> Node | None:
    while a is not b:
        if a is None or b is None:
            return None
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a


def between(node: Node, sink: Node) -> list[Node]:
    """Every call on a path from node (excluded) to sink (included)."""
    roots: dict[Node, None] = {}
    stack = list(node.consumers)
    while stack:
        current = stack.pop()
        if current in roots:
            continue
        roots[current] = None
        if current is not sink:
            stack.extend(current.consumers)
    return list(roots)


def composite(group: Group) -> Function:
    """The group as a function of its inputs, and of a shape that carries its symbols."""
    params: list[Var] = []
    env: dict[Expr, Var] = {}
    for name, expr in zip(group.names, group.inputs, strict=False):  # the names of its nodes follow
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
    results = tuple(env[n.var] for n in group.outs)
    body = Body((Block(tuple(bindings)),), results[0] if len(results) == 1 else Tuple(results))
    return Function(tuple(params), body, Attrs({COMPOSITE: True}))


def _place(group: Group) -> str | None:
    """Where the nodes come from: of several places the first and the last."""
    places = [place for place in dict.fromkeys(n.call.loc for n in group.nodes) if place is not None]
    return f"{places[0]}, fused up to {places[-1]}" if len(places) > 1 else next(iter(places), None)


def call_bindings(group: Group, callee: GlobalVar) -> list[Binding]:
    """The call of a group's kernel, binding the variables that others use."""
    args, outs = (*group.inputs, ShapeValue(group.symbols)), [n.var for n in group.outs]
    loc = _place(group)
    if len(outs) == 1:
        return [Let(outs[0], Call(callee, args, ty=outs[0].ty, loc=loc))]
    ty = TupleType(tuple(v.ty for v in outs))
    both = Var("_".join(v.name for v in outs), ty, loc)
    fields = [Let(v, TupleGetItem(both, k)) for k, v in enumerate(outs)]
    return [Let(both, Call(callee, args, ty=ty, loc=loc)), *fields]
