"""Symbolic dimensions of a model's inputs: declared names, overrides, bounds, and names that are expressions.

Equal names are one symbol, across inputs. A dimension with neither name nor value gets a fresh symbol, as `x_dim2`. A
name that is arithmetic over other dimensions of inputs (`past_length + length`) becomes that expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx

from relaxlite.errors import ImportModelError, InvalidArgumentError
from relaxlite.frontend.common.bounds import Bounds, listed, parse_range
from relaxlite.frontend.onnx.tensors import element_type, tensor_type_of
from relaxlite.ir.symbolic import SymExpr, SymVar, floordiv, smax, smin, sym
from relaxlite.ir.types import TensorType

Dim: TypeAlias = "int | str | None"
DynamicShapes: TypeAlias = "Mapping[str, Mapping[int, Dim] | Sequence[Dim]]"
Fraction: TypeAlias = "tuple[SymExpr, int]"  # numerator and positive denominator


class SymbolTable:
    """The symbols of one model, by name, with the bounds that the caller gave."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = {name: parse_range(name, value) for name, value in (bounds or {}).items()}
        self._symbols: dict[str, SymVar] = {}

    def named(self, name: str) -> SymVar:
        """Return the symbol of this name, created on first use."""
        if name not in self._symbols:
            lower, upper = self._bounds.get(name, (0, None))
            self._symbols[name] = SymVar(name, lower=lower, upper=upper)
        return self._symbols[name]

    def fresh(self, name: str, *, lower: int | None = 0) -> SymVar:
        """Return a symbol with a new name: this one, or with a suffix if it is taken."""
        unique, count = name, 0
        while unique in self._symbols:
            count += 1
            unique = f"{name}_{count}"
        if unique in self._bounds:
            return self.named(unique)
        self._symbols[unique] = SymVar(unique, lower=lower)
        return self._symbols[unique]

    def check_bounds_used(self) -> None:
        """Raise InvalidArgumentError if a name among the bounds is no symbol of the model."""
        for name in self._bounds:
            if name not in self._symbols:
                raise InvalidArgumentError(f"bounds: the model has no symbol '{name}'; it has {listed(self._symbols)}")


# Inputs


def input_types(
    inputs: Sequence[onnx.ValueInfoProto], overrides: DynamicShapes | None, table: SymbolTable
) -> list[TensorType]:
    """Return the types of a graph's inputs, with symbols for dimensions that are not fixed.

    Raises InvalidArgumentError for overrides that do not fit, ImportModelError for inputs that are no tensors.
    """
    by_name = {i.name: i for i in inputs}
    for name in overrides or {}:
        if name not in by_name:
            raise InvalidArgumentError(f"dynamic_shapes: the model has no input '{name}'; it has {listed(by_name)}")
    shapes = {i.name: _override(i.name, declared_dims(i), (overrides or {}).get(i.name)) for i in inputs}
    names = dict.fromkeys(d for dims in shapes.values() for d in dims if isinstance(d, str))
    simple = {name for name in names if _parse(name, names.keys() - {name}, table) is None}
    types = []
    for info in inputs:
        dims = [_dimension(info.name, k, d, simple, table) for k, d in enumerate(shapes[info.name])]
        types.append(TensorType.of(tuple(dims), _dtype(info)))
    table.check_bounds_used()
    return types


def _dimension(name: str, axis: int, dim: Dim, simple: set[str], table: SymbolTable) -> SymExpr:
    if dim is None:
        return table.fresh(f"{name}_dim{axis}")
    if isinstance(dim, int):
        return sym(dim)
    expression = None if dim in simple else _parse(dim, simple, table)
    return table.named(dim) if expression is None else expression


def _dtype(info: onnx.ValueInfoProto) -> str:
    return element_type(tensor_type_of(info).elem_type, f"input '{info.name}'")


def declared_dims(info: onnx.ValueInfoProto) -> list[Dim] | None:
    """Return the declared dimensions, or None if the rank is not declared. ImportModelError for no tensor.

    Of a sequence or optional, those of its elements, without their names: elements differ in size.
    """
    tensor, kind = tensor_type_of(info), info.type.WhichOneof("value")
    if not tensor.HasField("shape"):
        return None
    dims = [_declared_dim(d) for d in tensor.shape.dim]
    return dims if kind == "tensor_type" else [d if isinstance(d, int) else None for d in dims]


def _declared_dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None  # some exporters write -1 for "any"
    return dim.dim_param.strip() or None if dim.dim_param not in ("?", "-1") else None


def _override(name: str, dims: list[Dim] | None, override: Mapping[int, Dim] | Sequence[Dim] | None) -> list[Dim]:
    """Return the declared dimensions with the caller's overrides applied; None keeps a dimension."""
    if dims is None:
        if override is None or isinstance(override, Mapping | str):
            raise ImportModelError(
                f"input '{name}' declares no shape, not even a rank; give it: dynamic_shapes={{{name!r}: ['n', 3]}}"
            )
        return [_checked(name, k, d) for k, d in enumerate(override)]
    changes = override if isinstance(override, Mapping) else dict(enumerate(override or ()))
    if (
        override is not None
        and not isinstance(override, Mapping)
        and (isinstance(override, str) or len(override) != len(dims))
    ):
        raise InvalidArgumentError(f"dynamic_shapes['{name}'] must name all {len(dims)} dimensions, got {override!r}")
    result = list(dims)
    for axis, dim in changes.items():
        if not isinstance(axis, int) or not -len(dims) <= axis < len(dims):
            raise InvalidArgumentError(
                f"dynamic_shapes['{name}']: axis {axis!r} does not exist; the input has {len(dims)} dimensions"
            )
        if dim is not None:
            result[axis] = _checked(name, axis, dim)
    return result


def _checked(name: str, axis: int, dim: Dim) -> Dim:
    is_name = isinstance(dim, str) and dim.strip() and not re.fullmatch(r"[+-]?\d+", dim.strip())
    if dim is None or is_name or (isinstance(dim, int) and 0 <= dim < 1 << 63):
        return dim
    raise InvalidArgumentError(f"dynamic_shapes['{name}'][{axis}] must be a name or a size, not {dim!r}")


# Names that are expressions


def _parse(text: str, names: Iterable[str], table: SymbolTable) -> SymExpr | None:
    """Parse text as an arithmetic expression over these names; None for other text and for a single name."""
    if text.isidentifier():
        return None
    known = {name for name in names if name.isidentifier()}
    try:
        fraction = _fraction(ast.parse(text, mode="eval").body, known, table)
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError):
        return None
    return fraction[0] if fraction is not None and fraction[1] == 1 else None


def _fraction(node: ast.expr, known: set[str], table: SymbolTable) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sym(node.value), 1
    if isinstance(node, ast.Name) and node.id in known:
        return table.named(node.id), 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _fraction(node.operand, known, table)
        return None if inner is None else (-inner[0], inner[1])
    if isinstance(node, ast.BinOp):
        left, right = _fraction(node.left, known, table), _fraction(node.right, known, table)
        return None if left is None or right is None else _combine(node.op, left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = [_fraction(a, known, table) for a in node.args]
        return None if None in args else _function(node.func.id.lower(), [a for a in args if a is not None])
    return None


def _combine(op: ast.operator, left: Fraction, right: Fraction) -> Fraction | None:
    (a, p), (b, q) = left, right
    if isinstance(op, ast.Add | ast.Sub):
        return a * q + (b * p if isinstance(op, ast.Add) else b * -p), p * q
    if isinstance(op, ast.Mult):
        return a * b, p * q
    if isinstance(op, ast.Div) and b.is_const and b.const > 0:
        return a * q, p * b.const
    if isinstance(op, ast.FloorDiv):
        return floordiv(a * q, b * p), 1
    return None


def _function(name: str, args: list[Fraction]) -> Fraction | None:
    if name in ("floor", "ceil", "ceiling") and len(args) == 1:
        a, p = args[0]
        return (floordiv(a, p) if name == "floor" else -floordiv(-a, p)), 1
    if name in ("min", "max") and args and all(p == 1 for _, p in args):
        return (smin if name == "min" else smax)(*(a for a, _ in args)), 1
    return None
