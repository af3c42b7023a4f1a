"""One arena per call: every intermediate gets a symbolic offset, and dead memory is used again.

Storage is reused where the new tensor's size is *provably* at most the old one's, whatever the types. Tensors that
leave the function (results, and what If and Loop bodies yield) keep memory of their own. Views (reshape, MatchShape)
share the storage of what they view and keep it alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import (
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Expr,
    Function,
    Let,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, evaluate, product, sym
from relaxlite.ir.types import ObjectType, ShapeType, TensorType, defined_symbols
from relaxlite.ir.visitor import used_vars
from relaxlite.passes.manager import PassContext
from relaxlite.passes.memory_plan import MemoryPlan, PlannedTensor

ALIGNMENT = 64


def plan_memory(module: IRModule, context: PassContext) -> IRModule:
    """Intermediates into one arena; the plan of each function stays in the context."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        definitions[name], plan = plan_function(name, function)
        if plan is not None:
            context.memory_plans[name] = plan
    return module.updated(definitions)


@dataclass(eq=False)
class _Storage:
    """A piece of the arena, made for a tensor of `size` bytes."""

    size: SymExpr
    free_after: int = -1
    offset: SymExpr | None = None


@dataclass
class _Plan:
    """What is known of one body: where each tensor is allocated and last used."""

    allocations: dict[Var, int] = field(default_factory=dict)
    last_use: dict[Var, int] = field(default_factory=dict)
    root: dict[Var, tuple[Var, ...]] = field(default_factory=dict)  # whose memory a variable may share


def plan_function(name: str, function: Function) -> tuple[Function, MemoryPlan | None]:
    """The function with its own allocations taken from one arena, and the plan. Bodies of If and Loop keep theirs."""
    known = {s for p in function.params for s in defined_symbols(p.ty)}
    bindings = function.body.bindings()
    lives = _liveness(bindings, function.body.result)
    placed = _assign(bindings, lives, known)
    return _rewrite(function, placed), _plan_of(name, bindings, lives, placed)


def _plan_of(name: str, bindings: tuple[Binding, ...], lives: _Plan, placed: dict[Var, _Storage]) -> MemoryPlan | None:
    """What was planned, as a record; offsets are written out here, where the function has names for long sizes."""
    offsets: dict[_Storage, SymExpr] = {}
    end = sym(0)
    for storage in dict.fromkeys(placed.values()):
        offsets[storage] = end
        end = end + ceildiv(storage.size, ALIGNMENT) * ALIGNMENT
    tensors = []
    for var, storage in placed.items():
        first = lives.allocations[var]
        assert isinstance(var.ty, TensorType)
        last = lives.last_use.get(var, first)
        tensors.append(PlannedTensor(var.name, tensor_bytes(var.ty), offsets[storage], first, last))
    return MemoryPlan(name, tuple(map(_step, bindings)), end, tuple(tensors)) if tensors else None


def _step(binding: Binding) -> str:
    value = binding.value if isinstance(binding, Let) else binding.source
    what = value.callee.name if isinstance(value, Call) else type(value).__name__
    return f"{binding.var.name} = {what}"


def _liveness(bindings: tuple[Binding, ...], result: Expr) -> _Plan:
    plan = _Plan()
    for position, binding in enumerate(bindings):
        value = binding.value if isinstance(binding, Let) else binding.source
        used = tuple(used_vars(value))
        _touch(plan, used, position)
        if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "memory.alloc_tensor":
            plan.allocations[binding.var] = position
            plan.root[binding.var] = (binding.var,)
        elif _may_alias(binding, value):
            plan.root[binding.var] = tuple(dict.fromkeys(r for v in used for r in plan.root.get(v, ())))
    _touch(plan, used_vars(result), len(bindings))
    return plan


def _may_alias(binding: Binding, value: Expr) -> bool:
    """Whether the result may share memory with an operand. Only an op that makes new memory surely does not."""
    if isinstance(binding, MatchShape) or isinstance(value, Var | Tuple | TupleGetItem):
        return True
    if isinstance(value, Call):
        return not (isinstance(value.callee, Op) and value.callee.name in ("memory.copy", "tensor_to_shape"))
    return True  # If and Loop may yield what they captured


def _touch(plan: _Plan, used: Iterable[Var], position: int) -> None:
    for var in used:
        for root in plan.root.get(var, ()):
            plan.last_use[root] = position


def _assign(bindings: tuple[Binding, ...], plan: _Plan, known: set[SymVar]) -> dict[Var, _Storage]:
    """Storage for every allocation that dies inside the body and whose size the parameters' symbols determine."""
    prover = _Prover()
    placed: dict[Var, _Storage] = {}
    storages: list[_Storage] = []
    for position, binding in enumerate(bindings):
        if binding.var not in plan.allocations:
            continue
        assert isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
        last = plan.last_use.get(binding.var, position)
        size = tensor_bytes(binding.var.ty)
        if last >= len(bindings) or not set(size.free_vars()) <= known:
            continue
        found = _best_fit([s for s in storages if s.free_after < position], size, prover)
        if found is None:
            found = _Storage(size)
            storages.append(found)
        found.free_after = last
        placed[binding.var] = found
    return placed


def tensor_bytes(ty: TensorType) -> SymExpr:
    assert ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


def _best_fit(free: list[_Storage], size: SymExpr, prover: _Prover) -> _Storage | None:
    """The smallest free storage that is provably large enough."""
    best: _Storage | None = None
    for storage in free:
        if storage.size is size:
            return storage
        if prover.fits(size, storage.size) and (best is None or prover.fits(storage.size, best.size)):
            best = storage
    return best


class _Prover:
    """size <= room for all values of the symbols. A few values are tried first: most false claims fail there."""

    def __init__(self) -> None:
        self._analyzer = Analyzer()
        self._known: dict[tuple[SymExpr, SymExpr], bool] = {}

    def fits(self, size: SymExpr, room: SymExpr) -> bool:
        key = (size, room)
        if key not in self._known:
            self._known[key] = self._may_fit(size, room) and self._analyzer.can_prove_le(size, room)
        return self._known[key]

    def _may_fit(self, size: SymExpr, room: SymExpr) -> bool:
        variables = tuple(dict.fromkeys(size.free_vars() + room.free_vars()))
        try:
            return all(evaluate(size, at) <= evaluate(room, at) for at in _trials(variables))
        except ZeroDivisionError:  # these values are no sizes: they tell nothing
            return True


def _trials(variables: tuple[SymVar, ...]) -> Iterator[dict[SymVar, int]]:
    """Values within the bounds: all small, all larger, and each variable large among small others."""
    for scale in (1, 37):
        yield {v: _near(v, scale) for v in variables}
    for large in variables:
        yield {v: _near(v, 1000 if v is large else 2) for v in variables}


def _near(var: SymVar, value: int) -> int:
    value = max(value, var.lower if var.lower is not None else value)
    value = -(-value // var.divisor) * var.divisor
    return value if var.upper is None else min(value, var.upper // var.divisor * var.divisor)


def _rewrite(function: Function, placed: dict[Var, _Storage]) -> Function:
    storages = list(dict.fromkeys(placed.values()))
    rooms = [ceildiv(storage.size, ALIGNMENT) * ALIGNMENT for storage in storages]
    total = sum(rooms, sym(0))
    if as_int(total) == 0:
        return function
    named = _name_sizes(rooms)
    head: list[Binding] = [named.binding] if named.binding is not None else []
    end = sym(0)
    for storage, room in zip(storages, named.rooms, strict=True):
        storage.offset = end
        end = end + room
    arena = Var("arena", ObjectType())
    head.append(Let(arena, get_op("memory.alloc_arena")(ShapeValue((end,)))))
    blocks = [Block(tuple(head))]
    for block in function.body.blocks:
        blocks.append(Block(tuple(_place(b, placed, arena) for b in block.bindings), block.is_dataflow))
    attrs = Attrs({**function.attrs, "arena_bytes": str(total)})
    return Function(function.params, Body(tuple(blocks), function.body.result), attrs)


@dataclass(frozen=True, slots=True)
class _NamedSizes:
    rooms: list[SymExpr]
    binding: MatchShape | None


def _name_sizes(rooms: list[SymExpr]) -> _NamedSizes:
    """Give sizes of several terms a symbol each, bound once, so that offsets stay short sums."""
    long = list(dict.fromkeys(room for room in rooms if len(room.terms) > 1))
    names = {room: SymVar(f"size_{k}", divisor=ALIGNMENT) for k, room in enumerate(long)}
    if not names:
        return _NamedSizes(rooms, None)
    shape = tuple(names.values())
    var = Var("sizes", ShapeType(shape, len(shape)))
    return _NamedSizes([names.get(room, room) for room in rooms], MatchShape(var, ShapeValue(tuple(long)), shape))


def _place(binding: Binding, placed: dict[Var, _Storage], arena: Var) -> Binding:
    if not isinstance(binding, Let) or binding.var not in placed:
        return binding
    offset = placed[binding.var].offset
    assert offset is not None and isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
    shape = ShapeValue(binding.var.ty.shape)
    return Let(binding.var, get_op("memory.view")(arena, ShapeValue((offset,)), shape, dtype=binding.var.ty.dtype))
