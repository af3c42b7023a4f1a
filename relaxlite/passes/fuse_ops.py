"""Group calls of tensor programs that are to become one kernel.

The graph of calls is walked in order; a call `u` may join its immediate post-dominator `v` (the first call that all of
its uses flow into) together with everything on the paths between, when the patterns of those programs allow it:

    epilogue    u is a reduction, ROW or OUT_FUSIBLE, all others are elementwise over u's own output shape
    injective   u and the path are at most INJECTIVE, v is at most ROW

Each group becomes a Function with the attribute `composite`, called in place of the group's last call; its last
parameter is a shape that carries the symbols. fuse_programs.py then merges the loops. Every refusal leaves a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Attrs, Binding, Block, Body, Call, Expr, Function, GlobalVar, Let, ShapeValue, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Binary, Check, For, LetIndex, Load, Select, Stmt, TensorProgram, Unary, Value
from relaxlite.ir.program_visitor import all_values, loads, stmt_values, stores, value_children, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, product, substitute
from relaxlite.ir.types import ShapeType, TensorType, type_symbols
from relaxlite.ir.visitor import Rewriter, body_uses, expr_symbols
from relaxlite.passes.loop_pattern import LoopPattern, analyze, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.rows import rows_of

MAX_GROUP = 40  # calls in one kernel: bounds the size of the code
CHEAP = 4  # cost of a value that may be computed again rather than stored
_COSTLY = {"div", "pow", "fmod", "floormod", "truncdiv", "floordiv", "atan2"}
_FREE_UNARY = {"neg", "not", "abs", "floor", "ceil", "round", "trunc"}


def fuse_ops(module: IRModule, context: PassContext) -> IRModule:
    definitions: dict[str, Definition] = dict(module)
    patterns = {name: analyze(program) for name, program in module.programs().items()}
    for name, function in module.functions().items():
        definitions[name] = _FuseFunction(module, patterns, definitions, context).function(function)
    return module.updated(definitions)


@dataclass(eq=False)
class _Node:
    """A call of a program in a body."""

    position: int
    var: Var
    call: Call
    program: TensorProgram
    pattern: LoopPattern
    consumers: list[_Node] = field(default_factory=list)
    escapes: bool = False  # used by something that is no call of a program
    parent: _Node | None = None  # immediate post-dominator; None: the end of the body
    depth: int = 1
    group: _Group = field(init=False)

    def __post_init__(self) -> None:
        self.group = _Group([self])

    @property
    def shape(self) -> tuple[SymExpr, ...]:
        return self.call.ty.shape or () if isinstance(self.call.ty, TensorType) else ()


@dataclass(eq=False)
class _Group:
    nodes: list[_Node]

    @property
    def has_anchor(self) -> bool:
        return any(n.pattern >= LoopPattern.REDUCTION for n in self.nodes)


class _FuseFunction(Rewriter):
    def __init__(
        self,
        module: IRModule,
        patterns: dict[str, LoopPattern],
        definitions: dict[str, Definition],
        context: PassContext,
    ) -> None:
        super().__init__()
        self._module, self._patterns, self._definitions, self._context = module, patterns, definitions, context

    def body(self, body: Body) -> Body:
        nodes = self._graph(body)
        _post_dominate(nodes)
        for epilogue in (True, False):
            for node in nodes:
                self._try(node, epilogue)
        last = {group.nodes[-1].var: group for node in nodes if len((group := node.group).nodes) > 1}
        inner = {n.var for group in last.values() for n in group.nodes if n.var not in last}
        if not last:
            return super().body(body)
        self.changed = True
        blocks = tuple(
            Block(
                tuple(self._fused(b, last) for b in block.bindings if not (isinstance(b, Let) and b.var in inner)),
                block.is_dataflow,
            )
            for block in body.blocks
        )
        return super().body(Body(tuple(b for b in blocks if b.bindings), body.result))

    def _graph(self, body: Body) -> list[_Node]:
        nodes: dict[Var, _Node] = {}
        for position, binding in enumerate(body.bindings()):
            node = self._node(position, binding)
            if node is None:
                source = binding.value if isinstance(binding, Let) else binding.source
                self._escape(source, nodes)
                continue
            nodes[node.var] = node
            for arg in dict.fromkeys(node.call.args):
                if isinstance(arg, Var) and arg in nodes:
                    nodes[arg].consumers.append(node)
        self._escape(body.result, nodes)
        return list(nodes.values())

    def _node(self, position: int, binding: Binding) -> _Node | None:
        value = binding.value if isinstance(binding, Let) else None
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        program = self._module[value.callee.name]
        if not isinstance(program, TensorProgram):
            return None
        return _Node(position, binding.var, value, program, self._patterns[value.callee.name])

    def _escape(self, expr: Expr, nodes: dict[Var, _Node]) -> None:
        for var in body_uses(Body((), expr)):
            if var in nodes:
                nodes[var].escapes = True

    def _try(self, node: _Node, epilogue: bool) -> None:
        sink = node.parent
        if sink is None or node.pattern == LoopPattern.OPAQUE or node.group is sink.group:
            return
        if epilogue != (node.pattern >= LoopPattern.REDUCTION):
            return
        path = _between(node, sink)
        reason = None if epilogue else _refuse_injective(node, path, sink)
        if node.group.has_anchor:  # what follows a reduction runs in its loops, element by element
            reason = reason or _refuse_epilogue(node, path)
        groups = list(dict.fromkeys(n.group for n in (node, *path)))
        merged = _Group(sorted((n for g in groups for n in g.nodes), key=lambda n: n.position))
        if reason is None and sum(g.has_anchor for g in groups) > 1:
            reason = "both sides hold a reduction"
        if reason is None and len(merged.nodes) > MAX_GROUP:
            reason = f"the group would exceed {MAX_GROUP} calls"
        reason = reason or _refuse_data_index(merged)
        if reason is not None:
            self._context.decide("fuse_ops", f"{node.var.name} into {sink.var.name}", False, reason)
            return
        for n in merged.nodes:
            n.group = merged

    def _fused(self, binding: Binding, last: dict[Var, _Group]) -> Binding:
        if not isinstance(binding, Let) or binding.var not in last:
            return binding
        nodes = last[binding.var].nodes
        inside = {n.var for n in nodes}
        inputs = tuple(dict.fromkeys(a for n in nodes for a in n.call.args if a not in inside))
        symbols = tuple(dict.fromkeys(s for n in nodes for s in (*expr_symbols(n.call), *type_symbols(n.var.ty))))
        function = _composite(nodes, inputs, symbols)
        name = self._unique("fused_" + "_".join(_base_name(n.call) for n in nodes))
        self._definitions[name] = function
        args = (*inputs, ShapeValue(symbols))
        return Let(binding.var, Call(GlobalVar(name), args, ty=binding.var.ty, loc=nodes[-1].call.loc))

    def _unique(self, hint: str) -> str:
        hint = hint if len(hint) <= 60 else hint[:56] + "_etc"
        name, count = hint, 0
        while name in self._definitions:
            count += 1
            name = f"{hint}_{count}"
        return name


def _base_name(call: Call) -> str:
    name = call.callee.name
    stem, _, last = name.rpartition("_")
    return stem if stem and last.isdigit() else name


def _composite(nodes: Sequence[_Node], inputs: tuple[Expr, ...], symbols: tuple[SymVar, ...]) -> Function:
    params: list[Var] = []
    env: dict[Expr, Expr] = {}
    for k, expr in enumerate(inputs):
        param = Var(expr.name if isinstance(expr, Var) else f"c{k}", expr.ty)
        params.append(param)
        env[expr] = param
    params.append(Var("symbols", ShapeType(symbols, len(symbols))))
    bindings: list[Binding] = []
    for n in nodes:
        args = tuple(env.get(a, a) for a in n.call.args)
        var = Var(n.var.name, n.var.ty)
        env[n.var] = var
        bindings.append(Let(var, Call(n.call.callee, args, n.call.attrs, n.call.sym_args, n.call.ty, n.call.loc)))
    body = Body((Block(tuple(bindings)),), bindings[-1].var)
    return Function(tuple(params), body, Attrs({"composite": True}))


def _post_dominate(nodes: list[_Node]) -> None:
    """The immediate post-dominator of each call: the nearest common descendant of its consumers in their own tree."""
    for node in reversed(nodes):
        common: _Node | None = None
        for k, consumer in enumerate(node.consumers):
            common = consumer if k == 0 else _common(common, consumer)
        node.parent = None if node.escapes else common
        node.depth = 1 if node.parent is None else node.parent.depth + 1


def _common(a: _Node | None, b: _Node | None) -> _Node | None:
    while a is not b:
        if a is None or b is None:
            return None
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a


def _between(node: _Node, sink: _Node) -> list[_Node]:
    """Every call on a path from node (excluded) to sink (included)."""
    found: dict[_Node, None] = {}
    stack = list(node.consumers)
    while stack:
        current = stack.pop()
        if current in found:
            continue
        found[current] = None
        if current is not sink:
            stack.extend(current.consumers)
    return list(found)


def _refuse_epilogue(node: _Node, path: list[_Node]) -> str | None:
    analyzer = Analyzer()
    for other in path:
        if other.pattern > LoopPattern.BROADCAST:
            return f"{other.var.name} is {other.pattern.name}, an epilogue must be elementwise"
        same = len(other.shape) == len(node.shape) and all(
            analyzer.can_prove_equal(a, b) for a, b in zip(other.shape, node.shape, strict=True)
        )
        if not same:
            return f"{other.var.name} has another shape than {node.var.name}"
    inside = {node.var, *(n.var for n in path)}
    for other in path:
        (store,) = stores(other.program.body)
        for load in _loads_of(other, inside):
            if not _same_element(load, store.indices, other):
                return f"{other.var.name} reads its operand at other indices than it writes"
        checked = {load.buffer for s in top_stages(other.program) if isinstance(s, Check) for load in loads(s)}
        if any(load.buffer in checked for load in _loads_of(other, inside)):
            return f"{other.var.name} checks its operand before its loops"
    return None


def _same_element(load: Load, indices: tuple[SymExpr, ...], node: _Node) -> bool:
    """Equal indices; a constant 0 stands for the loop variable of a dimension of one."""
    if len(load.indices) != len(indices):
        return False
    return all(
        a is b or (a.is_const and d.is_const and d.const == 1)
        for a, b, d in zip(load.indices, indices, node.shape, strict=True)
    )


def _loads_of(node: _Node, variables: set[Var]) -> list[Load]:
    """The loads of a program that read an operand among these variables."""
    buffers = {b for b, arg in zip(node.program.inputs, node.call.args, strict=True) if arg in variables}
    return [load for load in loads(node.program.body) if load.buffer in buffers]


def _refuse_injective(node: _Node, path: list[_Node], sink: _Node) -> str | None:
    for other in path:
        limit = LoopPattern.ROW if other is sink else LoopPattern.INJECTIVE
        if other.pattern > limit:
            return f"{other.var.name} is {other.pattern.name}"
    cost = sum(_cost(n.program) for n in node.group.nodes)
    for other in path:
        if cost > CHEAP and _recomputes(node, other):
            return f"{other.var.name} would compute {node.var.name} (cost {cost}) more than once per element"
    return None


def _refuse_data_index(group: _Group) -> str | None:
    """An inlined index from data is bound, and checked, round the store that needs it: in front of what would guard it
    in a Select, and inside the reduced loops, which are then no plain reduction any more."""
    for node in group.nodes:
        if not _has_data_index(node.program):
            continue
        for other in _downstream(node, group):
            if _reads_under_condition(other, group):
                return f"{other.var.name} reads under a condition, {node.var.name} computes indices from data"
            if other.pattern >= LoopPattern.REDUCTION:
                return f"{other.var.name} is a reduction, {node.var.name} computes indices from data"
    return None


def _downstream(node: _Node, group: _Group) -> list[_Node]:
    """Every call of the group that depends on the node."""
    found = dict.fromkeys([node])
    for other in group.nodes:  # in order of position
        if any(other in n.consumers for n in found):
            found[other] = None
    return list(found)[1:]


def _recomputes(producer: _Node, consumer: _Node) -> bool:
    """Whether the consumer reads the producer's elements more often than there are elements (not proven: yes)."""
    read = _loads_of(consumer, {producer.var})
    loops = [s for s in walk_stmts(consumer.program.body) if isinstance(s, For)]
    rows = rows_of(top_stages(consumer.program)[-1]) if consumer.pattern == LoopPattern.ROW else None
    if rows is not None:  # its stages read the row once: the first one keeps it for the others (fuse_programs)
        buffers = {load.buffer for load in read}
        read = [load for load in rows.loads() if load.buffer in buffers]
        loops = [*rows.spatial, rows.final]
    if not read:
        return False
    if len({load.indices for load in read}) > 1:
        return True
    symbols = dict(zip(consumer.program.symbols, consumer.call.sym_args, strict=True))
    extents = (substitute(loop.extent, symbols) for loop in loops)
    return not Analyzer().can_prove_le(product(extents), product(producer.shape))


def _has_data_index(program: TensorProgram) -> bool:
    return any(isinstance(s, LetIndex) for s in walk_stmts(program.body))


def _reads_under_condition(node: _Node, group: _Group) -> bool:
    """Whether a Select decides if the call reads some element of another call of the group at all."""
    roots = [v for s in walk_stmts(node.program.body) for v in stmt_values(s)]
    certain = {(load.buffer, load.indices) for root in roots for load in _certain_loads(root)}
    return any((load.buffer, load.indices) not in certain for load in _loads_of(node, {n.var for n in group.nodes}))


def _certain_loads(value: Value) -> Iterator[Load]:
    """The loads that happen whatever the Selects say."""
    if isinstance(value, Load):
        yield value
    for child in (value.cond,) if isinstance(value, Select) else value_children(value):
        yield from _certain_loads(child)


def _cost(program: TensorProgram) -> int:
    """Rough cost of one element, in additions."""
    return stmt_cost(program.body)


def stmt_cost(stmt: Stmt) -> int:
    """Rough cost of what a statement computes for one element, in additions."""
    total = 0
    for value in all_values(stmt):
        if isinstance(value, Unary):
            total += 1 if value.op in _FREE_UNARY else 10
        elif isinstance(value, Binary):
            total += 5 if value.op in _COSTLY else 1
    return total
