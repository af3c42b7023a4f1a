"""The view of an operator call that converters use: typed operands, the result types that torch derived, places."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import torch

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.common.unify import unify_dims
from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, TupleGetItem, Var
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, as_int, smax, smin
from relaxlite.ir.types import TensorType, TupleType
from relaxlite.records import dataclass

if TYPE_CHECKING:
    from relaxlite.frontend.torch.importer import GraphImporter
    from relaxlite.frontend.torch.symbols import SymbolTable

Shape: TypeAlias = "tuple[SymExpr, ...]"
Number: TypeAlias = "int | float | bool | SymExpr | torch.SymFloat | torch.SymBool"


@dataclass(frozen=True, slots=True, eq=False)
class Complex:
    """A complex tensor as a real one: `parts` has a trailing dimension of 2, real and imaginary part."""

    parts: Expr


class Node:
    """An operator call under conversion."""

    def __init__(self, importer: GraphImporter, fx_node: torch.fx.Node) -> None:
        self.importer, self.fx_node = importer, fx_node

    @property
    def bb(self) -> BlockBuilder:
        return self.importer.bb

    @property
    def symbols(self) -> SymbolTable:
        return self.importer.symbols

    @property
    def target(self) -> str:
        """Name of the operator with its overload, as "aten.add.Tensor"."""
        return str(self.fx_node.target)

    @property
    def overload(self) -> str:
        return self.target.rpartition(".")[2]

    def emit(self, expr: Expr, name: str | None = None) -> Var:
        return self.bb.emit(expr, name)

    def fields(self, call: Expr) -> tuple[Expr, ...]:
        """Emit a call that yields a tuple and return the tuple's fields."""
        var = self.bb.emit(call)
        assert isinstance(var.ty, TupleType)
        return tuple(self.bb.emit(TupleGetItem(var, k)) for k in range(len(var.ty.fields)))

    def fail(self, message: str) -> NoReturn:
        raise ImportModelError(message)

    # the results, as torch derived them

    def result(self, index: int = 0) -> torch.Tensor:
        """Return torch's description of a result: dtype and symbolic sizes."""
        value = self.fx_node.meta.get("val")
        if isinstance(value, tuple | list):
            value = value[index]
        if not isinstance(value, torch.Tensor):
            self.fail(f"result {index} is {type(value).__name__}, not a tensor")
        return value

    def dtype(self, index: int = 0) -> str:
        """Return the dtype of a result; of a complex result, that of its parts."""
        return dtype_name(self.result(index).dtype)

    def shape(self, index: int = 0) -> Shape:
        """Return the symbolic shape of a result. ImportModelError for sizes that only this operator will compute."""
        return self.symbols.shape(self.result(index))

    def is_complex(self, index: int = 0) -> bool:
        """Whether a result is complex."""
        return self.result(index).dtype.is_complex

    def wants(self, index: int) -> bool:
        """Whether the graph uses a result of several."""
        return any(user.args[1] == index and user.users for user in self.fx_node.users if len(user.args) > 1)

    # operands

    def type_of(self, x: Expr) -> TensorType:
        if not isinstance(x, Complex) and isinstance(x.ty, TensorType):
            return x.ty
        self.fail(f"an operand is {getattr(x, 'ty', 'complex')}, not a real tensor")

    def dtype_of(self, x: Expr) -> str:
        return self.type_of(x).dtype

    def shape_of(self, x: Expr) -> Shape:
        shape = self.type_of(x).shape
        if shape is None:
            self.fail("the shape of an operand is not known")
        return shape

    def rank(self, x: Expr) -> int:
        return len(self.shape_of(x))

    def axis(self, x: Expr, dim: int) -> int:
        """Return a dimension of x, which may count from the end, as a number from 0 on."""
        rank = max(self.rank(x), 1)
        return dim + rank if dim < 0 else dim

    def axes(self, x: Expr, dims: Sequence[int] | int | None) -> tuple[int, ...]:
        """Return dimensions of x as numbers from 0 on, sorted; all of them for None and ()."""
        if dims is None or dims == [] or dims == ():
            return tuple(range(self.rank(x)))
        if isinstance(dims, int):
            dims = (dims,)
        return tuple(sorted(self.axis(x, d) for d in dims)) if self.rank(x) else ()

    # values

    def cast(self, x: Expr, dtype: str) -> Expr:
        """Return x in another dtype; x itself where it has it."""
        if isinstance(x, Constant) and x.value.size <= 1:
            return Constant.of(x.value.astype(dtypes.to_numpy(dtype))) if x.ty.dtype != dtype else x
        return x if self.dtype_of(x) == dtype else self.emit(ops.cast(x, dtype=dtype))

    def operand(self, value: Expr | Number, dtype: str) -> Expr:
        """Return a tensor, number or symbolic scalar as an operand of a dtype; a scalar gets rank 0."""
        if isinstance(value, Var | Constant):
            return self.cast(value, dtype)
        if isinstance(value, Complex):
            self.fail("a complex operand, where a real one is expected")
        if isinstance(value, SymExpr | torch.SymFloat | torch.SymBool | torch.SymInt):
            return self.symbols.tensor(value, dtype)
        with np.errstate(all="ignore"):
            return Constant.of(np.asarray(value).astype(dtypes.to_numpy(dtype)))

    def full(self, shape: Sequence[SymExpr | builtins.int], value: Expr | Number, dtype: str) -> Expr:
        """Return a tensor of a shape filled with a scalar."""
        return self.emit(ops.full(tuple(shape), self.operand(value, dtype)))

    def ints(self, values: Sequence[Any] | Any) -> tuple[SymExpr, ...]:
        """Return sizes, whether Python integers, symbolic ones or tensors of rank 0, as symbolic integers."""
        values = values if isinstance(values, tuple | list) else (values,)
        return tuple(self.int(v) for v in values)

    def int(self, value: Any) -> SymExpr:
        """Return an integer scalar as a symbolic integer; a tensor of one element is read at run time."""
        if isinstance(value, Var | Constant):
            return self.read(value)
        return self.symbols.dim(value) if not isinstance(value, SymExpr) else value

    def read(self, x: Expr, name: str = "item") -> SymExpr:
        """Read an integer tensor of one element at run time as a symbolic integer."""
        known = self.bb.known_value(x)
        if known is not None and known.size == 1:
            return known.reshape(-1)[0]
        vector = self.emit(ops.reshape(self.cast(x, "int64"), (1,)))
        size = self.symbols.fresh(name, lower=None)
        self.bb.match_shape(self.emit(ops.tensor_to_shape(vector)), (size,))
        return size

    def carried(self, value: Any) -> Expr:
        """Return a value that a loop or branch carries as a tensor: integers as int64 of rank 0."""
        if isinstance(value, Var | Constant):
            return value
        kinds = {bool: "bool", float: "float64", torch.SymFloat: "float64", torch.SymBool: "bool"}
        return self.operand(value, kinds.get(type(value), "int64"))

    def result_type(self, *values: Any) -> str:
        """Return the dtype to which torch promotes these arguments, given by their fx values."""
        described = [v.meta["val"] if isinstance(v, torch.fx.Node) else v for v in values]
        described = [_example(v) for v in described]
        result = described[0]
        dtype = result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, 0)
        if len(described) > 1:
            dtype = torch.result_type(described[0], described[1])
        return dtype_name(dtype)

    # shapes

    def reshape(self, x: Expr, shape: Sequence[SymExpr | builtins.int]) -> Expr:
        """Return x in another shape; x itself where it has it."""
        target = tuple(shape)
        if self.shape_of(x) == target:
            return x
        return self.emit(ops.reshape(x, target))

    def broadcast(self, x: Expr, shape: Sequence[SymExpr | builtins.int]) -> Expr:
        """Return x broadcast to a shape; sizes that must agree are checked at run time unless proven equal."""
        x = self.fit(x, tuple(shape))
        return x if self.shape_of(x) == tuple(shape) else self.emit(ops.broadcast_to(x, tuple(shape)))

    def fit(self, x: Expr, result: Sequence[SymExpr | builtins.int]) -> Expr:
        """Return x with the sizes of the result that it is broadcast to: each is that size or 1.

        A size that is not proven to be either is checked at run time to be that of the result.
        """
        shape, target = self.shape_of(x), tuple(map(self.symbols.dim_or_expr, result))
        offset = len(target) - len(shape)
        changes = {k: target[offset + k] for k, size in enumerate(shape) if offset + k >= 0 and as_int(size) != 1}
        return unify_dims(self.bb, x, changes)

    def fit_except(self, x: Expr, result: Sequence[SymExpr | builtins.int], axis: builtins.int) -> Expr:
        """Return x with the sizes of the result in all dimensions but one, checked at run time unless proven."""
        target = {k: self.symbols.dim_or_expr(size) for k, size in enumerate(result) if k != axis}
        return unify_dims(self.bb, x, target)

    def unify_depth(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        """Return the operands of a matrix product with the size that they share, checked unless proven equal."""
        depth = self.shape_of(a)[-1]
        return a, unify_dims(self.bb, b, {max(self.rank(b) - 2, 0): depth})

    def slice_begin(self, size: SymExpr, start: Any) -> SymExpr:
        """Return where a slice of a dimension begins: a negative start counts from the end, all are clamped."""
        begin = self.int(start)
        if PROVER.can_prove_le(0, begin):
            return begin if PROVER.can_prove_le(begin, size) else smin(begin, size)
        if PROVER.can_prove_le(begin + 1, 0):
            return begin + size if PROVER.can_prove_le(0, begin + size) else smax(begin + size, 0)
        is_negative = smin(smax(-begin, 0), 1)  # its sign is known at run time only
        return smin(smax(begin + is_negative * size, 0), size)

    # run-time checks

    def check(self, condition: Any, message: str) -> None:
        """Check a condition when the model runs; one that is proven is no check. Errors show the message."""
        truth = None if isinstance(condition, Var | Constant) else self.symbols.truth(condition)
        if truth:
            return
        flag = self.operand(condition, "bool")
        number = self.emit(ops.reshape(self.cast(flag, "int64"), (1,)), "assertion")
        loc = self.bb.loc
        values = self.emit(ops.tensor_to_shape(number))
        self.bb.loc = f"{loc}: {message}"
        self.bb.match_shape(values, (1,))
        self.bb.loc = loc

    def proves_equal(self, a: SymExpr | builtins.int, b: SymExpr | builtins.int) -> bool:
        """Whether two sizes are provably equal."""
        return PROVER.can_prove_equal(a, b)


def _example(value: Any) -> Any:
    """Return a stand-in for type promotion: symbolic scalars become numbers of their kind."""
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return 1.0
    return True if isinstance(value, torch.SymBool) else value
