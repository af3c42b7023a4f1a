"""Graph-level expressions: what a function's body is made of, in A-normal form.

Every operand is a leaf (`Var`, `Constant`, `ShapeValue`, `GlobalVar`); every compound expression is bound to a `Var`.
One `Call` node serves all three levels: the kind of its callee says which.
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
    """An immutable, hashable mapping of attribute names to values, in order of the names."""

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
    return values if isinstance(values, Attrs) else Attrs(values)


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """A graph-level variable; identity counts, the name is for people."""

    name: str
    ty: Type
    loc: str | None = None  # where it comes from: an ONNX node, a Python line


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor known at compile time. `value` is never written to, and C-contiguous until constants are packed."""

    value: Array
    ty: TensorType
    name: str | None = None

    @staticmethod
    def of(value: object, dtype: str | None = None, name: str | None = None) -> Constant:
        array = np.asarray(value, dtype=None if dtype is None else dtypes.to_numpy(dtype))
        result = dtypes.from_numpy(array.dtype)
        if result is None:
            raise TypeError(
                f"a constant of NumPy type {array.dtype} has no relaxlite type; cast it to one of {dtypes.ALL}"
            )
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        return Constant(array, TensorType.of(array.shape, result), name)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeValue:
    """A tuple of symbolic integers as a value: the shape operand of reshape, broadcast_to, ..."""

    values: tuple[SymExpr, ...]

    @property
    def ty(self) -> ShapeType:
        return ShapeType(self.values, len(self.values))


@dataclass(frozen=True, slots=True)
class GlobalVar:
    """The name of a Function, TensorProgram or ExternFunction of the module."""

    name: str

    @property
    def ty(self) -> Type:
        return ObjectType()


Leaf: TypeAlias = Var | Constant | ShapeValue | GlobalVar


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """callee(args, attrs). Of an `Op`: graph level. Of a `GlobalVar`: a tensor program, library routine or function.

    `sym_args` are the extra symbolic arguments of a tensor program, one per symbol of the program.
    A call of a program in value form passes its inputs only and yields its outputs; in destination-passing form it
    passes inputs and outputs and yields nothing (`ty` is the empty tuple).
    """

    callee: Op | GlobalVar | Var
    args: tuple[Expr, ...]
    attrs: Attrs = NO_ATTRS
    sym_args: tuple[SymExpr, ...] = ()
    ty: Type = UNIT
    loc: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tuple:
    fields: tuple[Expr, ...]

    @property
    def ty(self) -> TupleType:
        return TupleType(tuple(f.ty for f in self.fields))


@dataclass(frozen=True, slots=True, eq=False)
class TupleGetItem:
    value: Expr
    index: int

    @property
    def ty(self) -> Type:
        assert isinstance(self.value.ty, TupleType)
        return self.value.ty.fields[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class If:
    """`cond` is a bool tensor of one element. Both bodies yield values of type `ty`."""

    cond: Expr
    then_body: Body
    else_body: Body
    ty: Type
    loc: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """while cond: (cond, *params) = body(*params); yields the final params as a tuple.

    `cond` is the first condition (a bool tensor of one element); `body.result` is Tuple(next condition, next values).
    Symbols that stand alone in the params' types are bound anew at each iteration, as by a function's parameters, so a
    value may change its size from one iteration to the next.
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
    """var = value"""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class MatchShape:
    """var = source, checked at run time to have this shape; symbols not defined before are bound by it.

    `source` is a tensor, or a value of ShapeType. `var` has the type of the source with `shape` as its shape.
    """

    var: Var
    source: Expr
    shape: tuple[SymExpr, ...]
    loc: str | None = None


Binding: TypeAlias = "Let | MatchShape"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A run of bindings. A dataflow block is pure: no effects, no control flow; its dead bindings may be removed."""

    bindings: tuple[Binding, ...]
    is_dataflow: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Blocks, then the value that they make."""

    blocks: tuple[Block, ...]
    result: Expr

    def bindings(self) -> tuple[Binding, ...]:
        return tuple(b for block in self.blocks for b in block.bindings)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A graph-level function. Symbols that stand alone in the parameters' types are bound by a call."""

    params: tuple[Var, ...]
    body: Body
    attrs: Attrs = NO_ATTRS

    @property
    def ty(self) -> FuncType:
        return FuncType(tuple(p.ty for p in self.params), self.body.result.ty)


@dataclass(frozen=True, slots=True, eq=False)
class ExternFunction:
    """A library routine in destination-passing style: `symbol(inputs..., outputs...)`."""

    symbol: str
    params: tuple[Type, ...]
    num_outputs: int = 1
    attrs: Attrs = NO_ATTRS
