"""Splitting of fused projections: a product whose columns are used in slices becomes one product per slice.

    y = x @ w + b;  q = y[.., :n];  k = y[.., n:2*n]        =>        q = x @ w[:, :n] + b[:n];  k = x @ w[:, n:2*n] ..

Slices may be taken after reshapes and transposes of y: reshape(y, (.., 3, h, d)), transposed, and one of the 3 taken.
Each part is then stored in the layout of its uses, gated layers become pairs (pair_products.py), and join_calls.py
joins the remaining parts into one kernel. No column is computed twice: parts must not overlap, and y must have no other
uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from relaxlite.ir.expr import Call, Constant, Expr, Function, Let, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.symbolic import SymExpr, as_int, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, body_uses, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.records import dataclass

MIN_COLUMNS = 16  # of a part: fewer would leave most lanes of a vector unused


def split_products(module: IRModule, context: PassContext) -> IRModule:
    """Split products whose columns are used only in disjoint slices into one product per slice.

    The weights are constants of rank 2; a slice has at least `MIN_COLUMNS` columns.
    """
    return map_functions(module, partial(_rewritten, context=context))


def _rewritten(function: Function, context: PassContext) -> Function:
    parts = _parts_of(function, context)
    return _Split(parts).function(function) if parts else function


@dataclass(frozen=True, slots=True)
class _Range:
    """A range begin <= index < begin + size along an axis."""

    axis: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice of a product: `links` are the ops from the product to the slice, each with the range of its result that
    the slice reads."""

    product: Call
    links: tuple[tuple[Var, Call, _Range], ...]  # the product first
    slice_call: Call


def _parts_of(function: Function, context: PassContext) -> dict[Var, _Part]:
    """The slices to compute as separate products, by their variables."""
    calls = {
        b.var: b.value
        for b in function.body.bindings()
        if isinstance(b, Let) and isinstance(b.value, Call) and isinstance(b.value.callee, Op)
    }
    uses = Counter(body_uses(function.body))
    by_product: dict[Var, dict[Var, _Part]] = {}
    for var, call in calls.items():
        part = _part(call, calls) if call.callee.name in ("slice", "gather") else None
        if part is not None:
            by_product.setdefault(part.links[0][0], {})[var] = part
    accepted: dict[Var, _Part] = {}
    for var, parts in by_product.items():
        if len(parts) < 2:
            continue
        reason = _refusal(parts, uses)
        ranges = ", ".join(str(p.links[0][2].size) for p in parts.values())
        context.decide(
            "split_products", var.name, reason is None, reason or f"its columns are used in parts of {ranges}"
        )
        if reason is None:
            accepted.update(parts)
    return accepted


def _refusal(parts: Mapping[Var, _Part], uses: Mapping[Var, int]) -> str | None:
    """Why a product is not split into its parts; None: it is."""
    readers: dict[Var, set[Var]] = {}
    for var, part in parts.items():
        names = [*(link for link, _, _ in part.links), var]
        for link, reader in pairwise(names):
            readers.setdefault(link, set()).add(reader)
    if any(uses[link] != len(users) for link, users in readers.items()):
        return "the whole result is used too"
    ranges = sorted((p.links[0][2] for p in parts.values()), key=lambda r: r.begin)
    if any(a.begin + a.size > b.begin for a, b in pairwise(ranges)):
        return "parts overlap"
    narrowest = min(r.size for r in ranges)
    return f"a part has {narrowest} columns, less than {MIN_COLUMNS}" if narrowest < MIN_COLUMNS else None


def _part(slice_call: Call, calls: Mapping[Var, Call]) -> _Part | None:
    """Trace a slice back to a product with constant weights; None: there is none."""
    at = _taken_range(slice_call)
    source = slice_call.args[0]
    links: list[tuple[Var, Call, _Range]] = []
    while at is not None and isinstance(source, Var) and source in calls:
        call = calls[source]
        links.append((source, call, at))
        name = call.callee.name
        if name == "matmul":
            weights = call.args[1]
            is_last = at.axis == len(_shape(call)) - 1
            is_matrix = isinstance(weights, Constant) and weights.value.ndim == 2 and isinstance(call.args[0], Var)
            return _Part(call, tuple(reversed(links)), slice_call) if is_last and is_matrix else None
        if name == "transpose":
            at = replace(at, axis=_axes(call)[at.axis])
        elif name == "reshape":
            at = _before_reshape(call, at)
        elif (
            name not in ("add", "multiply")
            or not isinstance(call.args[1], Constant)
            or _shape(call) != _shape(call.args[0])
        ):
            return None
        source = call.args[0]
    return None


def _taken_range(call: Call) -> _Range | None:
    """The range of a slice along one axis, or of a gather at one constant index; else None."""
    shape = _shape(call.args[0])
    if call.callee.name == "gather":
        axis, position = call.attrs["axis"], call.args[1]
        assert isinstance(axis, int)
        if not isinstance(position, Constant) or position.value.ndim != 0:
            return None
        length, index = as_int(shape[axis % len(shape)]), int(position.value)
        return None if length is None or not -length <= index < length else _Range(axis % len(shape), index % length, 1)
    _, begins, sizes = call.args
    axes, steps = call.attrs["axes"], call.attrs["steps"]
    if not isinstance(begins, ShapeValue) or not isinstance(sizes, ShapeValue):
        return None
    sliced_axes = axes if isinstance(axes, tuple) else tuple(range(len(shape)))
    if isinstance(steps, tuple) and any(step != 1 for step in steps):
        return None
    range_of_slice = None
    for axis, begin, size in zip(sliced_axes, begins.values, sizes.values, strict=True):
        assert isinstance(axis, int)
        dim, first, count = shape[axis % len(shape)], as_int(begin), as_int(size)
        if size is dim and first == 0:
            continue
        if range_of_slice is not None or first is None or count is None:
            return None
        range_of_slice = _Range(axis % len(shape), first, count)
    return range_of_slice


def _before_reshape(call: Call, at: _Range) -> _Range | None:
    """The range of the reshape's operand along its last axis, if `at.axis` is the outermost axis split from it."""
    before, after = _shape(call.args[0]), _shape(call)
    inner, columns = as_int(product(after[at.axis + 1 :])), as_int(before[-1]) if before else None
    if inner is None or columns is None or as_int(after[at.axis] * inner) != columns:
        return None
    return _Range(len(before) - 1, at.begin * inner, at.size * inner)


class _Split(Rewriter):
    def __init__(self, parts: Mapping[Var, _Part]) -> None:
        super().__init__()
        self._parts = parts
        self._sliced: dict[tuple[int, _Range], tuple[Constant, Constant]] = {}  # by the id of the array

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        part = self._parts.get(var)
        if part is None:
            return None
        result: Expr = self.operand(part.product.args[0])
        for _, call, at in part.links:
            result = self.bb.emit(self._of_part(call, result, at))
        assert isinstance(value, Call)
        return result if value.callee.name == "slice" else get_op("reshape")(result, ShapeValue(_shape(value)))

    def _of_part(self, call: Call, x: Expr, at: _Range) -> Call:
        """Recreate one link of the chain for a part."""
        assert isinstance(call.callee, Op)
        if call.callee.name == "reshape":
            shape = _shape(call)
            return get_op("reshape")(x, ShapeValue((*shape[: at.axis], sym(at.size), *shape[at.axis + 1 :])))
        rest = [self._slice(a, at, len(_shape(call))) if isinstance(a, Constant) else a for a in call.args[1:]]
        return call.callee(x, *rest, loc=call.loc, **dict(call.attrs))

    def _slice(self, constant: Constant, at: _Range, rank: int) -> Constant:
        """The slice of a constant operand that a part reads; the whole constant if it broadcasts along the axis."""
        axis = at.axis - rank + constant.value.ndim
        if axis < 0 or constant.value.shape[axis] == 1:
            return constant
        key = (id(constant.value), replace(at, axis=axis))
        if key not in self._sliced:
            places = (slice(None),) * axis + (slice(at.begin, at.begin + at.size),)
            self._sliced[key] = constant, Constant.of(constant.value[places], name=constant.name)
        return self._sliced[key][1]


def _axes(transpose: Call) -> tuple[int, ...]:
    axes, rank = transpose.attrs["axes"], len(_shape(transpose))
    if not isinstance(axes, tuple):
        return tuple(reversed(range(rank)))
    return tuple(int(a) % rank for a in axes)  # type: ignore[arg-type]


def _shape(expr: Expr) -> tuple[SymExpr, ...]:
    return expr.ty.shape or () if isinstance(expr.ty, TensorType) else ()
