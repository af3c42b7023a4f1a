"""One arena per call: every intermediate gets a symbolic offset, and dead memory is used again.

Storage is reused where the new tensor's size is *provably* at most the old one's, whatever the types. Tensors that leave
the function (results, and what If and Loop bodies yield) keep memory of their own. Views (reshape, MatchShape) share the
storage of what they view and keep it alive.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, product, sym
from relaxlite.ir.types import ObjectType, TensorType, defined_symbols
from relaxlite.ir.visitor import map_functions, used_vars

ALIGNMENT = 64


def plan_memory(module: IRModule) -> IRModule:
    return map_functions(module, plan_function)


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


def plan_function(function: Function) -> Function:
    """The function with its own allocations taken from one arena. Bodies of If and Loop keep theirs."""
    known = {s for p in function.params for s in defined_symbols(p.ty)}
    bindings = function.body.bindings()
    placed = _assign(bindings, _liveness(bindings, function.body.result), known)
    return _rewrite(function, placed)


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
    """Whether the result may share memory with an operand. Only a call of an op that makes new memory surely does not."""
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
    analyzer = Analyzer()
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
        found = _best_fit([s for s in storages if s.free_after < position], size, analyzer)
        if found is None:
            found = _Storage(size)
            storages.append(found)
        found.free_after = last
        placed[binding.var] = found
    return placed


def tensor_bytes(ty: TensorType) -> SymExpr:
    assert ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


def _best_fit(free: list[_Storage], size: SymExpr, analyzer: Analyzer) -> _Storage | None:
    """The smallest free storage that is provably large enough."""
    best: _Storage | None = None
    for storage in free:
        fits = analyzer.can_prove_le(size, storage.size)
        if fits and (best is None or analyzer.can_prove_le(storage.size, best.size)):
            best = storage
    return best


def _rewrite(function: Function, placed: dict[Var, _Storage]) -> Function:
    total = sym(0)
    for storage in dict.fromkeys(placed.values()):
        storage.offset = total
        total = total + ceildiv(storage.size, ALIGNMENT) * ALIGNMENT
    if as_int(total) == 0:
        return function
    arena = Var("arena", ObjectType())
    blocks = [Block((Let(arena, get_op("memory.alloc_arena")(ShapeValue((total,)))),))]
    for block in function.body.blocks:
        blocks.append(Block(tuple(_place(b, placed, arena) for b in block.bindings), block.is_dataflow))
    attrs = Attrs({**function.attrs, "arena_bytes": str(total)})
    return Function(function.params, Body(tuple(blocks), function.body.result), attrs)


def _place(binding: Binding, placed: dict[Var, _Storage], arena: Var) -> Binding:
    if not isinstance(binding, Let) or binding.var not in placed:
        return binding
    offset = placed[binding.var].offset
    assert offset is not None and isinstance(binding.var.ty, TensorType) and binding.var.ty.shape is not None
    shape = ShapeValue(binding.var.ty.shape)
    return Let(binding.var, get_op("memory.view")(arena, ShapeValue((offset,)), shape, dtype=binding.var.ty.dtype))
