"""Graph-level expressions and functions, in A-normal form.

Every operand is a leaf (`Var`, `Constant`, `ShapeValue`, `GlobalVar`); every compound expression is bound to a `Var`.
One `Call` node serves all three levels; the kind of its callee determines the level.
Nodes are frozen and compared by identity; `structural_equal` (ir/equality.py) compares by structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relaxlite import dtypes
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import UNIT, FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from relaxlite.records import dataclass

if TYPE_CHECKING:
    from relaxlite.ir.op import Op

Array: TypeAlias = "NDArray[np.generic]"
AttrValue: TypeAlias = "int | float | str | bool | tuple[AttrValue, ...] | None"


class Attrs(Mapping[str, "AttrValue"]):
    """Immutable, hashable mapping of attribute names to values, sorted by name."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, AttrValue] | None = None) -> None:
        self._values: dict[str, AttrValue] = dict(sorted((values or {}).items()))

    def __getitem__(self, name: str) -> AttrValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attrs) and self._values == other._values

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._values.items())


NO_ATTRS = Attrs()


def make_attrs(values: Mapping[str, AttrValue]) -> Attrs:
    """Convert a mapping to `Attrs`; an `Attrs` is returned as it is."""
    return values if isinstance(values, Attrs) else Attrs(values)


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """Graph-level variable, compared by identity. The name is for messages and the text form."""

    name: str
    ty: Type
    loc: str | None = None  # source location: an ONNX node, a Python line


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """Tensor known at compile time. `value` is read-only, and C-contiguous until constants are packed."""

    value: Array
    ty: TensorType
    name: str | None = None

    @staticmethod
    def of(value: object, dtype: str | None = None, name: str | None = None) -> Constant:
        """Constant of a number or array. Raises TypeError for a NumPy dtype that has no counterpart."""
        array = np.asarray(value, dtype=None if dtype is None else dtypes.to_numpy(dtype))
        element_type = dtypes.from_numpy(array.dtype)
        if element_type is None:
            raise TypeError(
                f"a constant of NumPy type {array.dtype} has no relaxlite type; cast it to one of {dtypes.ALL}"
            )
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        return Constant(array, TensorType.of(array.shape, element_type), name)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeValue:
    """Tuple of symbolic integers as a value: the shape operand of reshape, broadcast_to, ..."""

    values: tuple[SymExpr, ...]

    @property
    def ty(self) -> ShapeType:
        return ShapeType(self.values, len(self.values))


@dataclass(frozen=True, slots=True)
class GlobalVar:
    """Reference by name to a Function, TensorProgram or ExternFunction of the module."""

    name: str

    @property
    def ty(self) -> Type:
        return ObjectType()


Leaf: TypeAlias = Var | Constant | ShapeValue | GlobalVar


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Call callee(args, attrs) of an op, or of a tensor program, library routine or function (`GlobalVar`, `Var`).

    `sym_args` are the symbolic arguments of a tensor program, one per symbol of the program.
    A call of a program in value form passes inputs and returns outputs. A call in destination-passing form passes
    inputs and outputs and returns nothing (`ty` is the empty tuple).
    """

    callee: Op | GlobalVar | Var
    args: tuple[Expr, ...]
    attrs: Attrs = NO_ATTRS
    sym_args: tuple[SymExpr, ...] = ()
    ty: Type = UNIT
    loc: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tuple:
    """Tuple of leaves."""

    fields: tuple[Expr, ...]

    @property
    def ty(self) -> TupleType:
        return TupleType(tuple(f.ty for f in self.fields))


@dataclass(frozen=True, slots=True, eq=False)
class TupleGetItem:
    """Field `index` of a tuple value."""

    value: Expr
    index: int

    @property
    def ty(self) -> Type:
        assert isinstance(self.value.ty, TupleType)
        return self.value.ty.fields[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """Conditional expression. `cond` is a bool tensor of one element. Both bodies yield values of type `ty`, which may
    leave sizes unknown: a MatchShape after it binds them."""

    cond: Expr
    then_body: Body
    else_body: Body
    ty: Type
    loc: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """Loop `while cond: (cond, *params) = body(*params)`; yields the final params as a tuple.

    `cond` is the first condition (a bool tensor of one element); `body.result` is Tuple(next condition, next values).
    A symbol that is a whole dimension in the params' types is rebound at each iteration, as by a function's parameters,
    so shapes may change between iterations.
    """

    params: tuple[Var, ...]
    inits: tuple[Expr, ...]
    cond: Expr
    body: Body
    ty: Type
    loc: str | None = None


ControlFlow: TypeAlias = If | Loop
Expr: TypeAlias = "Leaf | Call | Tuple | TupleGetItem | If | Loop"


@dataclass(frozen=True, slots=True, eq=False)
class Let:
    """Binding var = value."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class MatchShape:
    """Binding var = source with a run-time check of the shape; binds symbols that are not defined before.

    `source` is a tensor, or a value of ShapeType. `var` has the type of the source with `shape` as its shape.
    """

    var: Var
    source: Expr
    shape: tuple[SymExpr, ...]
    loc: str | None = None


Binding: TypeAlias = "Let | MatchShape"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Sequence of bindings. A dataflow block has no side effects and no control flow; dead bindings are removable."""

    bindings: tuple[Binding, ...]
    is_dataflow: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Blocks of bindings, then the result: a leaf, or a tuple of leaves."""

    blocks: tuple[Block, ...]
    result: Expr

    def bindings(self) -> tuple[Binding, ...]:
        """Bindings of all blocks, in order."""
        return tuple(b for block in self.blocks for b in block.bindings)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """Graph-level function. A call binds each symbol that is a whole dimension in the parameters' types."""

    params: tuple[Var, ...]
    body: Body
    attrs: Attrs = NO_ATTRS

    @property
    def ty(self) -> FuncType:
        return FuncType(tuple(p.ty for p in self.params), self.body.result.ty)


@dataclass(frozen=True, slots=True, eq=False)
class ExternFunction:
    """Library routine in destination-passing style: `symbol(inputs..., outputs...)`."""

    symbol: str
    params: tuple[Type, ...]
    num_outputs: int = 1
    attrs: Attrs = NO_ATTRS
