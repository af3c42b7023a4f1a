"""Types of graph-level expressions: immutable, compared by structure."""

from __future__ import annotations

from typing import TypeAlias

from relaxlite.dtypes import DType
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, syms
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dense tensor. `shape` has one SymExpr per dimension, or is None if only the rank is known, or nothing."""

    shape: tuple[SymExpr, ...] | None
    dtype: DType
    rank: int | None = None  # set if `shape` is set

    @staticmethod
    def of(shape: tuple[IntLike, ...] | list[IntLike], dtype: DType) -> TensorType:
        """Tensor type of a known shape of ints or symbolic integers."""
        dims = syms(shape)
        return TensorType(dims, dtype, len(dims))

    def __str__(self) -> str:
        if self.shape is not None:
            return f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''}) {self.dtype}"
        return f"rank {'?' if self.rank is None else self.rank} {self.dtype}"


@dataclass(frozen=True, slots=True)
class ShapeType:
    """Tuple of integers. `values` are symbolic, or None if only the length (`rank`) is known, or nothing."""

    values: tuple[SymExpr, ...] | None
    rank: int | None = None

    @staticmethod
    def of(values: tuple[IntLike, ...] | list[IntLike]) -> ShapeType:
        """Shape type of known values."""
        dims = syms(values)
        return ShapeType(dims, len(dims))


@dataclass(frozen=True, slots=True)
class TupleType:
    """Tuple of values."""

    fields: tuple[Type, ...]


@dataclass(frozen=True, slots=True)
class FuncType:
    """Function of these parameters and result."""

    params: tuple[Type, ...]
    result: Type


@dataclass(frozen=True, slots=True)
class ObjectType:
    """Opaque run-time value: an arena, a shape heap, a KV cache."""


Type: TypeAlias = "TensorType | ShapeType | TupleType | FuncType | ObjectType"

UNIT = TupleType(())


def type_symbols(ty: Type) -> tuple[SymVar, ...]:
    """Symbols of a type, in order of first occurrence."""
    symbols: dict[SymVar, None] = {}
    for expr in _expressions(ty):
        symbols.update(dict.fromkeys(expr.free_vars()))
    return tuple(symbols)


def defined_symbols(ty: Type) -> tuple[SymVar, ...]:
    """Symbols that a value of this type binds: those that are a whole dimension."""
    return tuple(dict.fromkeys(e for e in _expressions(ty) if isinstance(e, SymVar)))


def _expressions(ty: Type) -> tuple[SymExpr, ...]:
    if isinstance(ty, TensorType):
        return ty.shape or ()
    if isinstance(ty, ShapeType):
        return ty.values or ()
    if isinstance(ty, TupleType):
        return tuple(e for field in ty.fields for e in _expressions(field))
    return ()
