"""Static memory planning: intermediates get symbolic offsets in one arena per call, and dead memory is reused.

aliases.py computes lifetimes, pack_arena.py offsets. The arena holds all tensors that are allocated and die inside one
activation of the function, bodies of `If` and `Loop` included. Branches share space, iterations reuse space, and
counterparts that both branches of an If yield are one tensor. Sizes that depend on data are planned at the upper bounds
of their symbols. Where there is no bound, these tensors get a second arena, allocated after the MatchShape that binds
the last symbol of their sizes. Results, values that a loop carries, and tensors whose size a branch or loop binds have
memory of their own.

With `constant_memory`, sizes are planned at the upper bounds of the symbols: then every offset is a constant.
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
from relaxlite.passes.memory.arena_order import ArenaTensor, StepRange
from relaxlite.passes.memory.pack_arena import ALIGNMENT as ALIGNMENT
from relaxlite.passes.memory.pack_arena import Packing, pack
from relaxlite.passes.memory.plan import MemoryPlan, PlannedTensor
from relaxlite.passes.memory.replay_plan import replay_plan
from relaxlite.records import dataclass

_ANALYZER = Analyzer()


def plan_memory(module: IRModule, context: PassContext) -> IRModule:
    """Place intermediates in one arena per function; the memory plans are recorded in the context."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name] = _PlanFunction(name, module, context).plan(function)
    return module.updated(definitions)


@dataclass(slots=True)
class _Group:
    """Allocations planned as one tensor: one allocation, or counterparts in the branches of an If."""

    size: SymExpr
    variables: list[Var]
    spans: tuple[StepRange, ...] = ()


@dataclass(frozen=True, slots=True)
class _Arena:
    """Arena with its tensors, allocated at the start of the function or after a MatchShape."""

    after: Var | None
    groups: list[_Group]
    packing: Packing
    var: Var = field(default_factory=lambda: Var("arena", ObjectType()))


@dataclass(slots=True)
class _Sizes:
    """Symbols with a value outside of branches and loops, and the MatchShape that defines each (None: a parameter)."""

    meaning: dict[SymVar, SymExpr]  # in terms of symbols that data or a parameter binds
    definition: dict[SymVar, tuple[int, Var | None]]

    @staticmethod
    def of(function: Function) -> _Sizes:
        """The symbols that the parameters of a function define."""
        symbols = [s for param in function.params for s in defined_symbols(param.ty)]
        return _Sizes({s: s for s in symbols}, dict.fromkeys(symbols, (-1, None)))

    def define(self, binding: MatchShape, step: int, *, is_outermost: bool) -> None:
        """Record the symbols of a MatchShape in terms of known symbols.

        Symbols without such a size, or with a long one, stay symbols.
        """
        ty = binding.source.ty
        sizes = ty.values if isinstance(ty, ShapeType) else ty.shape if isinstance(ty, TensorType) else None
        for symbol, size in zip(binding.shape, sizes or [None] * len(binding.shape), strict=True):
            if not isinstance(symbol, SymVar) or symbol in self.meaning:
                continue
            meaning = substitute(size, self.meaning) if size is not None and self._is_defined(size) else None
            if meaning is not None and not has_many_atoms(meaning):
                self.meaning[symbol] = meaning
            elif is_outermost:
                self.meaning[symbol], self.definition[symbol] = symbol, (step, binding.var)

    def _is_defined(self, size: SymExpr) -> bool:
        return all(s in self.meaning for s in size.free_vars())

    def bounded(self, size: SymExpr) -> SymExpr:
        """The size with data-dependent symbols at their upper bounds, if all of them have one; else the size itself."""
        data_symbols = [s for s in size.free_vars() if self.definition[s][1] is not None]
        if not data_symbols or any(s.upper is None for s in data_symbols):
            return size
        upper_bound = substitute(size, {s: sym(s.upper or 0) for s in data_symbols})
        return upper_bound if _ANALYZER.can_prove_le(size, upper_bound) else size

    def defining_match(self, size: SymExpr) -> Var | None:
        """The MatchShape after which the size is known; None: from the start."""
        return max((self.definition[s] for s in size.free_vars()), key=lambda item: item[0], default=(-1, None))[1]


class _PlanFunction:
    """Planning of one function."""

    def __init__(self, name: str, module: IRModule, context: PassContext) -> None:
        self._name, self._module, self._context = name, module, context
        self._outside: list[str] = []

    def plan(self, function: Function) -> Function:
        """The function with arenas and views of arenas in place of allocations."""
        aliases, sizes = find_aliases(function, self._module), _Sizes.of(function)
        all_groups = _merge_branches(aliases, self._allocations(function, aliases, sizes))
        groups_by_match: dict[Var | None, list[_Group]] = {}
        for group in all_groups:
            group.spans, group.size = _spans(aliases, group), sizes.bounded(group.size)
            groups_by_match.setdefault(sizes.defining_match(group.size), []).append(group)
        arenas = [result for at, groups in groups_by_match.items() if (result := self._arena(at, groups)) is not None]
        for arena in arenas:
            self._record_plan(arena, _memory_plan(self._name, aliases, arena))
            if arena.after is not None:
                self._outside += [var.name for group in arena.groups for var in group.variables]
        if self._outside:
            plan = self._context.memory_plans.get(self._name) or _empty_plan(self._name, aliases)
            self._context.memory_plans[self._name] = replace(plan, outside=tuple(self._outside))
        if not arenas:
            return function
        planned = _Rewrite(arenas).function(function)
        if self._context.verify:
            replay_plan(self._name, planned, self._module)
        return planned

    def _arena(self, after: Var | None, groups: list[_Group]) -> _Arena | None:
        """Arena for these groups; None if it has no bytes, or holds one tensor of data-dependent size."""
        tenants = [ArenaTensor(self._planned_size(group.size), group.spans) for group in groups]
        if all(as_int(tenant.size) == 0 for tenant in tenants):
            return None
        if after is not None and len(groups) == 1:
            self._exclude(groups[0].variables[0], groups[0].size, f"only '{after.name}' tells its size")
            return None
        return _Arena(after, groups, pack(tenants))

    def _record_plan(self, arena: _Arena, plan: MemoryPlan) -> None:
        """Record the plan of an arena in the context."""
        name = self._name if arena.after is None else f"{self._name} behind {arena.after.name}"
        self._context.memory_plans[name] = plan
        ratio = f"at most {arena.packing.worst_ratio:.3f} times the least size"
        reason = f"{len(arena.groups)} tensors share an arena of {ratio}"
        self._context.decide("plan_memory", name, True, reason, arena=plan.arena)

    def _allocations(self, function: Function, aliases: Aliases, sizes: _Sizes) -> Iterator[_Group]:
        """Allocations that can lie in an arena."""
        outermost = {binding.var for binding in function.body.bindings()}
        for step, binding in enumerate(aliases.steps):
            if isinstance(binding, MatchShape):
                sizes.define(binding, step, is_outermost=binding.var in outermost)
            elif is_allocation(binding):
                size = tensor_bytes(binding.var.ty)
                if self._can_plan(binding.var, size, aliases, sizes):
                    yield _Group(substitute(size, sizes.meaning), [binding.var])

    def _can_plan(self, var: Var, size: SymExpr, aliases: Aliases, sizes: _Sizes) -> bool:
        """Whether the allocation can lie in an arena; records the reason if not."""
        if aliases.last_use(var) >= aliases.end:
            return False  # a result, owned by the caller
        unknown = [s.name for s in size.free_vars() if s not in sizes.meaning]
        if aliases.is_carried(var):
            self._exclude(var, size, "a loop carries it on")
        elif unknown:
            self._exclude(var, size, f"its size depends on {', '.join(unknown)}, which a branch or loop binds")
        return not unknown and not aliases.is_carried(var)

    def _exclude(self, var: Var, size: SymExpr, reason: str) -> None:
        self._outside.append(var.name)
        reason += ": it keeps memory of its own"
        self._context.decide("plan_memory", f"{self._name}: {var.name}", False, reason, size=size)

    def _planned_size(self, size: SymExpr) -> SymExpr:
        """The size to plan with: its upper bound with `constant_memory`."""
        if not self._context.constant_memory:
            return size
        upper_bound = _ANALYZER.bounds(size)[1]
        if upper_bound is not None:
            return sym(upper_bound)
        unbounded = ", ".join(s.name for s in size.free_vars() if s.upper is None)
        reason = f"no constant plan: give {unbounded} an upper bound"
        self._context.decide("plan_memory", f"{self._name}: {size} bytes", False, reason)
        return size


def is_allocation(binding: Binding) -> bool:
    """Whether the binding allocates an uninitialized tensor."""
    value = binding.value if isinstance(binding, Let) else None
    return isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "memory.alloc_tensor"


def tensor_bytes(ty: object) -> SymExpr:
    """Size in bytes of a tensor of known shape."""
    assert isinstance(ty, TensorType) and ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


# Lifetimes


def _merge_branches(aliases: Aliases, groups: Iterator[_Group]) -> list[_Group]:
    """Merge allocations of equal size that the branches of an If yield as the same result."""
    group_of = {group.variables[0]: group for group in groups}
    for binding in aliases.steps:
        value = binding.value if isinstance(binding, Let) else None
        if isinstance(value, If):
            for then_field, else_field in zip(
                _fields(value.then_body.result), _fields(value.else_body.result), strict=False
            ):
                for a in aliases.roots(then_field):
                    for b in aliases.roots(else_field):
                        if a in group_of and b in group_of:
                            _merge(group_of, group_of[a], group_of[b], aliases)
    return list({id(group): group for group in group_of.values()}.values())


def _fields(result: Expr) -> Sequence[Expr]:
    return result.fields if isinstance(result, Tuple) else (result,)


def _merge(group_of: dict[Var, _Group], a: _Group, b: _Group, aliases: Aliases) -> None:
    if a.size is b.size and all(aliases.are_exclusive(x, y) for x in a.variables for y in b.variables):
        a.variables += b.variables
        group_of.update((var, a) for var in b.variables)


def _spans(aliases: Aliases, group: _Group) -> tuple[StepRange, ...]:
    """Ranges of steps in which the group is live, without later branches that exclude it."""
    first = min(map(aliases.step, group.variables))
    last = max(map(aliases.last_use, group.variables))
    if len(group.variables) > 1:
        return ((first, last),)
    spans, start = [], first
    for begin, end in aliases.exclusive_branches(group.variables[0]):
        if start < begin <= last:
            spans.append((start, begin - 1))
            start = end + 1
    return (*spans, (start, max(start, last))) if start <= last else tuple(spans)


# Plans and rewriting


def _memory_plan(name: str, aliases: Aliases, arena: _Arena) -> MemoryPlan:
    """The memory plan of an arena, in terms of the function's own symbols."""
    tensors = []
    for group, place in zip(arena.groups, arena.packing.offsets, strict=True):
        owner = group.variables[0]
        for var in group.variables:
            spans = group.spans if var is owner else ((aliases.step(var), aliases.last_use(var)),)
            inside = None if var is owner else owner.name
            pauses = tuple((a[1] + 1, b[0] - 1) for a, b in itertools.pairwise(spans))
            tensors.append(PlannedTensor(var.name, group.size, place.full, spans[0][0], spans[-1][1], inside, pauses))
    end = arena.packing.end.full
    upper_bound = Analyzer().interval(end)[1]  # fast, and exact for maxima of sums of products of sizes
    return replace(_empty_plan(name, aliases), arena=end, tensors=tuple(tensors), max_bytes=upper_bound)


def _empty_plan(name: str, aliases: Aliases) -> MemoryPlan:
    return MemoryPlan(name, tuple(map(_describe, aliases.steps)), sym(0), (), 0)


def _describe(binding: Binding) -> str:
    """Description of a binding."""
    value = binding.value if isinstance(binding, Let) else binding.source
    operation = value.callee.name if isinstance(value, Call) else type(value).__name__
    return f"{binding.var.name} = {operation}"


class _Rewrite:
    """Replace allocations by views of arenas."""

    def __init__(self, arenas: Sequence[_Arena]) -> None:
        self._heads = {arena.after: _arena_bindings(arena) for arena in arenas}
        self._offsets: dict[Var, tuple[Var, SymExpr]] = {}
        for arena in arenas:
            for group, offset in zip(arena.groups, arena.packing.offsets, strict=True):
                self._offsets.update((var, (arena.var, offset.expr)) for var in group.variables)

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
            yield self._view(binding) if binding.var in self._offsets else binding

    def _view(self, binding: Let) -> Let:
        arena, offset = self._offsets[binding.var]
        assert isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
        shape = ShapeValue(binding.var.ty.shape)
        return Let(binding.var, get_op("memory.view")(arena, ShapeValue((offset,)), shape, dtype=binding.var.ty.dtype))


def _arena_bindings(arena: _Arena) -> list[Binding]:
    """Allocation of an arena, after the definitions of the named sizes and bases that keep offsets short."""
    packing = arena.packing
    levels: list[dict[SymVar, SymExpr]] = [{name: room for room, name in packing.sizes.items()}]
    for base in packing.bases:
        levels += [{} for _ in range(1 + base.level - len(levels))]
        levels[base.level][base.name] = base.expr
    bindings: list[Binding] = []
    for level in filter(None, levels):
        shape = tuple(level)
        var = Var(f"places_{len(bindings)}", ShapeType(shape, len(shape)))
        bindings.append(MatchShape(var, ShapeValue(tuple(level.values())), shape))
    return [*bindings, Let(arena.var, get_op("memory.alloc_arena")(ShapeValue((packing.end.expr,))))]
