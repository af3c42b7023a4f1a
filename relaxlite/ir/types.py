"""The types of graph-level expressions: one family, immutable, compared by structure."""

from __future__ import annotations

from typing import TypeAlias

from relaxlite.dtypes import DType
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, syms
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dense tensor: `shape` (one SymExpr per dimension), or None where only the rank, or not even that, is known."""

    shape: tuple[SymExpr, ...] | None
    dtype: DType
    rank: int | None = None  # always set when shape is

    @staticmethod
    def of(shape: tuple[IntLike, ...] | list[IntLike], dtype: DType) -> TensorType:
        dims = syms(shape)
        return TensorType(dims, dtype, len(dims))

    def __str__(self) -> str:
        if self.shape is not None:
            return f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''}) {self.dtype}"
        return f"rank {'?' if self.rank is None else self.rank} {self.dtype}"


@dataclass(frozen=True, slots=True)
class ShapeType:
    """A tuple of integers, known symbolically (`values`), or only by its length, or not even that."""

    values: tuple[SymExpr, ...] | None
    rank: int | None = None

    @staticmethod
    def of(values: tuple[IntLike, ...] | list[IntLike]) -> ShapeType:
        dims = syms(values)
        return ShapeType(dims, len(dims))


@dataclass(frozen=True, slots=True)
class TupleType:
    fields: tuple[Type, ...]


@dataclass(frozen=True, slots=True)
class FuncType:
    params: tuple[Type, ...]
    result: Type


@dataclass(frozen=True, slots=True)
class ObjectType:
    """An opaque run-time value: an arena, a shape heap, a KV cache."""


Type: TypeAlias = "TensorType | ShapeType | TupleType | FuncType | ObjectType"

UNIT = TupleType(())


def type_symbols(ty: Type) -> tuple[SymVar, ...]:
    """Every symbol that occurs in a type, in order of first occurrence."""
    roots: dict[SymVar, None] = {}
    for expr in _expressions(ty):
        roots.update(dict.fromkeys(expr.free_vars()))
    return tuple(roots)


def defined_symbols(ty: Type) -> tuple[SymVar, ...]:
    """The symbols that a value of this type binds: those that stand alone as a dimension."""
    return tuple(dict.fromkeys(e for e in _expressions(ty) if isinstance(e, SymVar)))


def _expressions(ty: Type) -> tuple[SymExpr, ...]:
    if isinstance(ty, TensorType):
        return ty.shape or ()
    if isinstance(ty, ShapeType):
        return ty.values or ()
    if isinstance(ty, TupleType):
        return tuple(e for field in ty.fields for e in _expressions(field))
    return ()
