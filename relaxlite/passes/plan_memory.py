"""One arena per call: every intermediate gets a symbolic offset, and dead memory is used again.

Whose memory is in use when, aliases.py says; what lies where, pack_arena.py. The arena takes all tensors that live and
die inside one activation of the function, bodies of `If` and `Loop` included: branches share space, iterations use the
same space again, and what both branches of an If give back at one place is one tensor. Memory of their own have
results, what a loop carries from one iteration to the next, and what has a size that the parameters do not determine.

With `constant_memory` sizes are taken at the upper bounds of the symbols: then every offset is a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import (
    Binding,
    Block,
    Body,
    Call,
    Expr,
    Function,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    Var,
)
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, substitute, sym
from relaxlite.ir.types import ObjectType, ShapeType, TensorType, defined_symbols
from relaxlite.passes.aliases import Aliases, find_aliases
from relaxlite.passes.arena_order import Span, Tenant
from relaxlite.passes.manager import PassContext
from relaxlite.passes.memory_plan import MemoryPlan, PlannedTensor
from relaxlite.passes.pack_arena import ALIGNMENT as ALIGNMENT
from relaxlite.passes.pack_arena import Packing, pack
from relaxlite.passes.replay_plan import replay_plan


def plan_memory(module: IRModule, context: PassContext) -> IRModule:
    """Intermediates into one arena; the plan of each function stays in the context."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name] = _PlanFunction(name, module, context).plan(function)
    return module.updated(definitions)


@dataclass(slots=True)
class _Group:
    """Allocations that are one tensor to the plan: one, or those of several branches that an If gives back."""

    size: SymExpr
    variables: list[Var]
    spans: tuple[Span, ...] = ()
    offset: SymExpr = field(default_factory=lambda: sym(0))


class _PlanFunction:
    def __init__(self, name: str, module: IRModule, context: PassContext) -> None:
        self._name, self._module, self._context = name, module, context
        self._outside: list[str] = []

    def plan(self, function: Function) -> Function:
        aliases = find_aliases(function, self._module)
        groups = _merge_branches(aliases, self._allocations(function, aliases))
        for group in groups:
            group.spans = _spans(aliases, group)
        tenants = [Tenant(self._planned_size(group.size), group.spans) for group in groups]
        if all(as_int(tenant.size) == 0 for tenant in tenants):
            return function
        packing = pack(tenants)
        for group, place in zip(groups, packing.places, strict=True):
            group.offset = place.expr
        plan = replace(_record(self._name, aliases, groups, packing), outside=tuple(self._outside))
        self._context.memory_plans[self._name] = plan
        self._context.decide(
            "plan_memory",
            self._name,
            True,
            f"{len(groups)} tensors share an arena of at most {packing.worst_ratio:.3f} times the least size",
            arena=plan.arena,
        )
        planned = _rewrite(function, groups, packing)
        if self._context.verify:
            replay_plan(self._name, planned, self._module)
        return planned

    def _allocations(self, function: Function, aliases: Aliases) -> Iterator[_Group]:
        """What can lie in the arena."""
        known: dict[SymVar, SymExpr] = {s: s for param in function.params for s in defined_symbols(param.ty)}
        for binding in aliases.steps:
            if isinstance(binding, MatchShape):
                _define(binding, known)
            elif is_allocation(binding):
                size = tensor_bytes(binding.var.ty)
                if self._can_plan(binding.var, size, aliases, known):
                    yield _Group(substitute(size, known), [binding.var])

    def _can_plan(self, var: Var, size: SymExpr, aliases: Aliases, known: dict[SymVar, SymExpr]) -> bool:
        if aliases.last_use(var) >= aliases.end:
            return False  # a result: the caller's
        unknown = [s.name for s in size.free_vars() if s not in known]
        if aliases.is_carried(var):
            reason = "a loop carries it on: it keeps memory of its own"
        elif unknown:
            reason = f"its size depends on {', '.join(unknown)}, which only a run tells: it keeps memory of its own"
        else:
            return True
        self._outside.append(var.name)
        self._context.decide("plan_memory", f"{self._name}: {var.name}", False, reason, size=size)
        return False

    def _planned_size(self, size: SymExpr) -> SymExpr:
        """The size to plan with: a constant where the plan is to be one."""
        if not self._context.constant_memory:
            return size
        most = Analyzer().bounds(size)[1]
        if most is not None:
            return sym(most)
        unbounded = ", ".join(s.name for s in size.free_vars() if s.upper is None)
        reason = f"no constant plan: give {unbounded} an upper bound"
        self._context.decide("plan_memory", f"{self._name}: {size} bytes", False, reason)
        return size


def is_allocation(binding: Binding) -> bool:
    """Whether the binding makes an uninitialized tensor, of memory of its own so far."""
    value = binding.value if isinstance(binding, Let) else None
    return isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "memory.alloc_tensor"


def tensor_bytes(ty: object) -> SymExpr:
    """The bytes of a tensor of known shape."""
    assert isinstance(ty, TensorType) and ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


def _define(binding: MatchShape, known: dict[SymVar, SymExpr]) -> None:
    """Symbols that a MatchShape gives to sizes which are known already."""
    ty = binding.source.ty
    sizes = ty.values if isinstance(ty, ShapeType) else ty.shape if isinstance(ty, TensorType) else None
    for symbol, size in zip(binding.shape, sizes or (), strict=False):
        if isinstance(symbol, SymVar) and symbol not in known and all(s in known for s in size.free_vars()):
            known[symbol] = substitute(size, known)


# Lives


def _merge_branches(aliases: Aliases, groups: Iterator[_Group]) -> list[_Group]:
    """What the branches of an If allocate and give back at the same place, of the same size, becomes one group."""
    group_of = {group.variables[0]: group for group in groups}
    for binding in aliases.steps:
        value = binding.value if isinstance(binding, Let) else None
        if isinstance(value, If):
            for then, other in zip(_fields(value.then_body.result), _fields(value.else_body.result), strict=False):
                for a in aliases.roots(then):
                    for b in aliases.roots(other):
                        if a in group_of and b in group_of:
                            _merge(group_of, group_of[a], group_of[b], aliases)
    return list({id(group): group for group in group_of.values()}.values())


def _fields(result: Expr) -> Sequence[Expr]:
    return result.fields if isinstance(result, Tuple) else (result,)


def _merge(group_of: dict[Var, _Group], a: _Group, b: _Group, aliases: Aliases) -> None:
    if a.size is b.size and all(aliases.are_exclusive(x, y) for x in a.variables for y in b.variables):
        a.variables += b.variables
        group_of.update((var, a) for var in b.variables)


def _spans(aliases: Aliases, group: _Group) -> tuple[Span, ...]:
    """The steps in which the group is in use; the branches that run instead of the one that makes it are left out."""
    first = min(map(aliases.step, group.variables))
    last = max(map(aliases.last_use, group.variables))
    if len(group.variables) > 1:
        return ((first, last),)
    spans, start = [], first
    for begin, end in aliases.other_branches(group.variables[0]):
        if start < begin <= last:
            spans.append((start, begin - 1))
            start = end + 1
    return (*spans, (start, max(start, last))) if start <= last else tuple(spans)


# The result


def _record(name: str, aliases: Aliases, groups: Sequence[_Group], packing: Packing) -> MemoryPlan:
    """What was planned, in terms of the function's own symbols."""
    tensors = []
    for group, place in zip(groups, packing.places, strict=True):
        owner = group.variables[0]
        for var in group.variables:
            whole = group.spans if var is owner else ((aliases.step(var), aliases.last_use(var)),)
            inside = None if var is owner else owner.name
            pauses = tuple((a[1] + 1, b[0] - 1) for a, b in itertools.pairwise(whole))
            tensors.append(PlannedTensor(var.name, group.size, place.full, whole[0][0], whole[-1][1], inside, pauses))
    end = packing.end.full
    most = Analyzer().interval(end)[1]  # quick, and exact for sums of products of sizes and their maxima
    return MemoryPlan(name, tuple(map(_step, aliases.steps)), end, tuple(tensors), most)


def _step(binding: Binding) -> str:
    value = binding.value if isinstance(binding, Let) else binding.source
    what = value.callee.name if isinstance(value, Call) else type(value).__name__
    return f"{binding.var.name} = {what}"


def _rewrite(function: Function, groups: Sequence[_Group], packing: Packing) -> Function:
    arena = Var("arena", ObjectType())
    head = [*_definitions(packing), Let(arena, get_op("memory.alloc_arena")(ShapeValue((packing.end.expr,))))]
    offsets = {var: group.offset for group in groups for var in group.variables}
    body = _rewrite_body(function.body, offsets, arena)
    return replace(function, body=Body((Block(tuple(head)), *body.blocks), body.result))


def _definitions(packing: Packing) -> list[Binding]:
    """Names for sizes of several terms and for bases, so that offsets are short sums."""
    levels: list[dict[SymVar, SymExpr]] = [{name: room for room, name in packing.rooms.items()}]
    for base in packing.bases:
        levels += [{} for _ in range(1 + base.level - len(levels))]
        levels[base.level][base.name] = base.expr
    made: list[Binding] = []
    for level in filter(None, levels):
        shape = tuple(level)
        var = Var(f"places_{len(made)}", ShapeType(shape, len(shape)))
        made.append(MatchShape(var, ShapeValue(tuple(level.values())), shape))
    return made


def _rewrite_body(body: Body, offsets: dict[Var, SymExpr], arena: Var) -> Body:
    blocks = [replace(b, bindings=tuple(_place(item, offsets, arena) for item in b.bindings)) for b in body.blocks]
    return replace(body, blocks=tuple(blocks))


def _place(binding: Binding, offsets: dict[Var, SymExpr], arena: Var) -> Binding:
    """Views of the arena in place of allocations, in nested bodies too."""
    if not isinstance(binding, Let):
        return binding
    value = binding.value
    if isinstance(value, If):
        then_body, else_body = (_rewrite_body(b, offsets, arena) for b in (value.then_body, value.else_body))
        return replace(binding, value=replace(value, then_body=then_body, else_body=else_body))
    if isinstance(value, Loop):
        return replace(binding, value=replace(value, body=_rewrite_body(value.body, offsets, arena)))
    if binding.var not in offsets:
        return binding
    assert isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
    place, shape = ShapeValue((offsets[binding.var],)), ShapeValue(binding.var.ty.shape)
    return Let(binding.var, get_op("memory.view")(arena, place, shape, dtype=binding.var.ty.dtype))
