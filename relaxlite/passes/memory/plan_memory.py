"""One arena per call: every intermediate gets a symbolic offset, and dead memory is used again.

Whose memory is in use when, aliases.py says; what lies where, pack_arena.py. The arena takes all tensors that live and
die inside one activation of the function, bodies of `If` and `Loop` included: branches share space, iterations use the
same space again, and what both branches of an If give back at one place is one tensor. Sizes that only data tells are
taken at the upper bounds of what data binds; where there is none, they have an arena of their own, behind the
MatchShape that binds the last symbol that they need. Memory of their own have results, what a loop carries from one
iteration to the next, and what has a size that a branch or loop binds.

With `constant_memory` sizes are taken at the upper bounds of the symbols: then every offset is a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import field, replace

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
from relaxlite.ir.simplify import has_many_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, substitute, sym
from relaxlite.ir.types import ObjectType, ShapeType, TensorType, defined_symbols
from relaxlite.passes.context import PassContext
from relaxlite.passes.memory.aliases import Aliases, find_aliases
from relaxlite.passes.memory.arena_order import Span, Tenant
from relaxlite.passes.memory.pack_arena import ALIGNMENT as ALIGNMENT
from relaxlite.passes.memory.pack_arena import Packing, pack
from relaxlite.passes.memory.plan import MemoryPlan, PlannedTensor
from relaxlite.passes.memory.replay_plan import replay_plan
from relaxlite.records import dataclass

_ANALYZER = Analyzer()


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


@dataclass(frozen=True, slots=True)
class _Arena:
    """An arena that is allocated where its size is known: at the function's beginning, or behind a MatchShape."""

    behind: Var | None
    groups: list[_Group]
    packing: Packing
    var: Var = field(default_factory=lambda: Var("arena", ObjectType()))


@dataclass(slots=True)
class _Sizes:
    """Which symbols have a value outside of branches and loops, and since which MatchShape (None: a parameter)."""

    meaning: dict[SymVar, SymExpr]  # in terms of those that data or a parameter binds
    since: dict[SymVar, tuple[int, Var | None]]

    @staticmethod
    def of(function: Function) -> _Sizes:
        symbols = [s for param in function.params for s in defined_symbols(param.ty)]
        return _Sizes({s: s for s in symbols}, dict.fromkeys(symbols, (-1, None)))

    def define(self, binding: MatchShape, step: int, *, is_outermost: bool) -> None:
        """Symbols get the sizes that they are matched with; what those do not tell, or only at length, a run does."""
        ty = binding.source.ty
        sizes = ty.values if isinstance(ty, ShapeType) else ty.shape if isinstance(ty, TensorType) else None
        for symbol, size in zip(binding.shape, sizes or [None] * len(binding.shape), strict=True):
            if not isinstance(symbol, SymVar) or symbol in self.meaning:
                continue
            meaning = substitute(size, self.meaning) if size is not None and self._is_told(size) else None
            if meaning is not None and not has_many_atoms(meaning):
                self.meaning[symbol] = meaning
            elif is_outermost:
                self.meaning[symbol], self.since[symbol] = symbol, (step, binding.var)

    def _is_told(self, size: SymExpr) -> bool:
        return all(s in self.meaning for s in size.free_vars())

    def told_before(self, size: SymExpr) -> SymExpr:
        """The size itself where arguments tell it; else at the upper bounds of what data tells, if there are all."""
        late = [s for s in size.free_vars() if self.since[s][1] is not None]
        if not late or any(s.upper is None for s in late):
            return size
        most = substitute(size, {s: sym(s.upper or 0) for s in late})
        return most if _ANALYZER.can_prove_le(size, most) else size

    def place(self, size: SymExpr) -> Var | None:
        """Behind what the size has a value; None: from the beginning."""
        return max((self.since[s] for s in size.free_vars()), key=lambda item: item[0], default=(-1, None))[1]


class _PlanFunction:
    def __init__(self, name: str, module: IRModule, context: PassContext) -> None:
        self._name, self._module, self._context = name, module, context
        self._outside: list[str] = []

    def plan(self, function: Function) -> Function:
        aliases, sizes = find_aliases(function, self._module), _Sizes.of(function)
        found = _merge_branches(aliases, self._allocations(function, aliases, sizes))
        by_place: dict[Var | None, list[_Group]] = {}
        for group in found:
            group.spans, group.size = _spans(aliases, group), sizes.told_before(group.size)
            by_place.setdefault(sizes.place(group.size), []).append(group)
        arenas = [result for at, groups in by_place.items() if (result := self._arena(at, groups)) is not None]
        for arena in arenas:
            self._keep(arena, _record(self._name, aliases, arena))
            if arena.behind is not None:
                self._outside += [var.name for group in arena.groups for var in group.variables]
        if self._outside:
            plan = self._context.memory_plans.get(self._name) or _empty(self._name, aliases)
            self._context.memory_plans[self._name] = replace(plan, outside=tuple(self._outside))
        if not arenas:
            return function
        planned = _Rewrite(arenas).function(function)
        if self._context.verify:
            replay_plan(self._name, planned, self._module)
        return planned

    def _arena(self, behind: Var | None, groups: list[_Group]) -> _Arena | None:
        """An arena for them; none where it has no bytes, or only one tensor of a size that data tells."""
        tenants = [Tenant(self._planned_size(group.size), group.spans) for group in groups]
        if all(as_int(tenant.size) == 0 for tenant in tenants):
            return None
        if behind is not None and len(groups) == 1:
            self._leave_out(groups[0].variables[0], groups[0].size, f"only '{behind.name}' tells its size")
            return None
        return _Arena(behind, groups, pack(tenants))

    def _keep(self, arena: _Arena, plan: MemoryPlan) -> None:
        where = self._name if arena.behind is None else f"{self._name} behind {arena.behind.name}"
        self._context.memory_plans[where] = plan
        ratio = f"at most {arena.packing.worst_ratio:.3f} times the least size"
        reason = f"{len(arena.groups)} tensors share an arena of {ratio}"
        self._context.decide("plan_memory", where, True, reason, arena=plan.arena)

    def _allocations(self, function: Function, aliases: Aliases, sizes: _Sizes) -> Iterator[_Group]:
        """What can lie in an arena."""
        outermost = {binding.var for binding in function.body.bindings()}
        for step, binding in enumerate(aliases.steps):
            if isinstance(binding, MatchShape):
                sizes.define(binding, step, is_outermost=binding.var in outermost)
            elif is_allocation(binding):
                size = tensor_bytes(binding.var.ty)
                if self._can_plan(binding.var, size, aliases, sizes):
                    yield _Group(substitute(size, sizes.meaning), [binding.var])

    def _can_plan(self, var: Var, size: SymExpr, aliases: Aliases, sizes: _Sizes) -> bool:
        if aliases.last_use(var) >= aliases.end:
            return False  # a result: the caller's
        unknown = [s.name for s in size.free_vars() if s not in sizes.meaning]
        if aliases.is_carried(var):
            self._leave_out(var, size, "a loop carries it on")
        elif unknown:
            self._leave_out(var, size, f"its size depends on {', '.join(unknown)}, which a branch or loop binds")
        return not unknown and not aliases.is_carried(var)

    def _leave_out(self, var: Var, size: SymExpr, reason: str) -> None:
        self._outside.append(var.name)
        reason += ": it keeps memory of its own"
        self._context.decide("plan_memory", f"{self._name}: {var.name}", False, reason, size=size)

    def _planned_size(self, size: SymExpr) -> SymExpr:
        """The size to plan with: a constant where the plan is to be one."""
        if not self._context.constant_memory:
            return size
        most = _ANALYZER.bounds(size)[1]
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


def _record(name: str, aliases: Aliases, arena: _Arena) -> MemoryPlan:
    """What was planned, in terms of the function's own symbols."""
    tensors = []
    for group, place in zip(arena.groups, arena.packing.places, strict=True):
        owner = group.variables[0]
        for var in group.variables:
            whole = group.spans if var is owner else ((aliases.step(var), aliases.last_use(var)),)
            inside = None if var is owner else owner.name
            pauses = tuple((a[1] + 1, b[0] - 1) for a, b in itertools.pairwise(whole))
            tensors.append(PlannedTensor(var.name, group.size, place.full, whole[0][0], whole[-1][1], inside, pauses))
    end = arena.packing.end.full
    most = Analyzer().interval(end)[1]  # quick, and exact for sums of products of sizes and their maxima
    return replace(_empty(name, aliases), arena=end, tensors=tuple(tensors), most=most)


def _empty(name: str, aliases: Aliases) -> MemoryPlan:
    return MemoryPlan(name, tuple(map(_step, aliases.steps)), sym(0), (), 0)


def _step(binding: Binding) -> str:
    value = binding.value if isinstance(binding, Let) else binding.source
    what = value.callee.name if isinstance(value, Call) else type(value).__name__
    return f"{binding.var.name} = {what}"


class _Rewrite:
    """Views of arenas in place of allocations."""

    def __init__(self, arenas: Sequence[_Arena]) -> None:
        self._heads = {arena.behind: _head(arena) for arena in arenas}
        self._places: dict[Var, tuple[Var, SymExpr]] = {}
        for arena in arenas:
            for group, place in zip(arena.groups, arena.packing.places, strict=True):
                self._places.update((var, (arena.var, place.expr)) for var in group.variables)

    def function(self, function: Function) -> Function:
        body = self._body(function.body)
        head = self._heads.get(None, ())
        return replace(function, body=replace(body, blocks=(Block(tuple(head)), *body.blocks)) if head else body)

    def _body(self, body: Body) -> Body:
        blocks = [
            replace(block, bindings=tuple(result for binding in block.bindings for result in self._binding(binding)))
            for block in body.blocks
        ]
        return replace(body, blocks=tuple(blocks))

    def _binding(self, binding: Binding) -> Iterator[Binding]:
        if isinstance(binding, MatchShape):
            yield from (binding, *self._heads.get(binding.var, ()))
        elif isinstance(binding.value, If):
            value = binding.value
            then_body, else_body = self._body(value.then_body), self._body(value.else_body)
            yield replace(binding, value=replace(value, then_body=then_body, else_body=else_body))
        elif isinstance(binding.value, Loop):
            yield replace(binding, value=replace(binding.value, body=self._body(binding.value.body)))
        else:
            yield self._view(binding) if binding.var in self._places else binding

    def _view(self, binding: Let) -> Let:
        arena, place = self._places[binding.var]
        assert isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
        shape = ShapeValue(binding.var.ty.shape)
        return Let(binding.var, get_op("memory.view")(arena, ShapeValue((place,)), shape, dtype=binding.var.ty.dtype))


def _head(arena: _Arena) -> list[Binding]:
    """The arena, behind names for sizes of several terms and for bases, so that offsets are short sums."""
    packing = arena.packing
    levels: list[dict[SymVar, SymExpr]] = [{name: room for room, name in packing.rooms.items()}]
    for base in packing.bases:
        levels += [{} for _ in range(1 + base.level - len(levels))]
        levels[base.level][base.name] = base.expr
    bindings: list[Binding] = []
    for level in filter(None, levels):
        shape = tuple(level)
        var = Var(f"places_{len(bindings)}", ShapeType(shape, len(shape)))
        bindings.append(MatchShape(var, ShapeValue(tuple(level.values())), shape))
    return [*bindings, Let(arena.var, get_op("memory.alloc_arena")(ShapeValue((packing.end.expr,))))]
