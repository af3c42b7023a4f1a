"""The view of an ONNX node that converters use: typed inputs, tracked attributes and symbolic shape values."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import onnx
from onnx import AttributeProto

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.narrow_types import TEXT, NarrowType
from relaxlite.frontend.onnx.shape_values import ShapeResolver
from relaxlite.frontend.onnx.tensors import element_type, narrow_type
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Array, Constant, Expr, TupleGetItem, Var
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.ir.types import TensorType, TupleType

if TYPE_CHECKING:
    from relaxlite.frontend.onnx.importer import GraphImporter

T = TypeVar("T")
ExprType = TypeVar("ExprType", bound=Expr)
Shape = tuple[SymExpr, ...]
_KIND_NAMES = {number: name for name, number in AttributeProto.AttributeType.items()}


class _Required:
    pass


REQUIRED = _Required()


class Node:
    """A node under conversion. An attribute that its converter does not read is an error (`check_all_read`)."""

    def __init__(
        self,
        proto: onnx.NodeProto,
        label: str,
        inputs: Sequence[Expr | None],
        attributes: Mapping[str, AttributeProto],
        opset: int,
        importer: GraphImporter,
    ) -> None:
        self.proto, self.label, self.opset, self.importer = proto, label, opset, importer
        self.inputs = list(inputs)
        self._attributes = attributes
        self._unread = set(attributes)

    # context

    @property
    def bb(self) -> BlockBuilder:
        return self.importer.bb

    @property
    def resolver(self) -> ShapeResolver:
        return self.importer.resolver

    @property
    def op_type(self) -> str:
        return self.proto.op_type

    @property
    def num_outputs(self) -> int:
        return len(self.proto.output)

    def wants(self, index: int) -> bool:
        """Whether the graph uses this output: optional outputs have empty names."""
        return index < len(self.proto.output) and bool(self.proto.output[index])

    def emit(self, expr: Expr, name: str | None = None) -> Var:
        return self.bb.emit(expr, name)

    def fields(self, call: Expr) -> tuple[Expr, ...]:
        """Emit a call that yields a tuple and return the tuple's fields."""
        var = self.bb.emit(call)
        assert isinstance(var.ty, TupleType)
        return tuple(self.bb.emit(TupleGetItem(var, k)) for k in range(len(var.ty.fields)))

    def fail(self, message: str) -> NoReturn:
        raise ImportModelError(message)

    # inputs

    def input(self, index: int) -> Expr:
        value = self.optional(index)
        if value is None:
            self.fail(f"input {index} is missing")
        return value

    def optional(self, index: int) -> Expr | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def all_inputs(self) -> list[Expr]:
        return [self.input(k) for k in range(len(self.inputs))]

    def type(self, index: int = 0) -> TensorType:
        return self.type_of(self.input(index))

    def type_of(self, expr: Expr) -> TensorType:
        if not isinstance(expr.ty, TensorType):
            self.fail(f"an input is {expr.ty}, not a tensor")
        return expr.ty

    def dtype(self, index: int = 0) -> str:
        return self.type(index).dtype

    def shape(self, index: int = 0) -> Shape:
        return self.shape_of(self.input(index))

    def shape_of(self, expr: Expr) -> Shape:
        shape = self.type_of(expr).shape
        if shape is None:
            self.fail("the shape of an input is not known: it comes out of branches whose results differ in rank")
        return shape

    def rank(self, index: int = 0) -> int:
        return len(self.shape(index))

    # compile-time and symbolic values

    def const(self, index: int) -> Array | None:
        """Return the compile-time value of an input, or None if it is absent or not known."""
        value = self.optional(index)
        return None if value is None else self.const_of(value)

    def const_of(self, expr: Expr) -> Array | None:
        """Return the compile-time value of an expression, or None if it is not known."""
        if isinstance(expr, Constant):
            return expr.value
        symbolic = self.resolver.derive_values(expr)
        if symbolic is None:
            return None
        values = [as_int(v) for v in symbolic.reshape(-1)]
        if None in values:
            return None
        return np.array(values, dtypes.to_numpy(self.type_of(expr).dtype)).reshape(symbolic.shape)

    def const_ints(self, index: int, what: str) -> tuple[int, ...]:
        """Return an input that must be known at compile time, such as axes, as integers; errors call it `what`."""
        value = self.const(index)
        if value is None:
            self.fail(
                f"{what} (input {index}) must be known when the model is compiled, but comes from the model's inputs"
            )
        return tuple(int(v) for v in value.reshape(-1))

    def shape_values(self, index: int, *, lower: int | None = None) -> Shape:
        """Return an integer input as symbolic values; data-dependent elements become fresh symbols >= `lower`."""
        return self.resolver.values(self.input(index), lower=lower)

    def check_assumption(self, flag: Expr, expected: bool, assumption: str) -> None:
        """Emit a run-time check that a bool tensor of one element is `expected`.

        The error at run time names the node and the assumption.
        """
        number = self.emit(ops.reshape(self.emit(ops.cast(flag, dtype="int64")), (1,)), "assumption")
        values, loc = self.emit(ops.tensor_to_shape(number)), self.bb.loc
        self.bb.loc = f"{loc or self.label}: {assumption}"
        self.bb.match_shape(values, (int(expected),))
        self.bb.loc = loc

    # text

    def text_constant(self, texts: Sequence[str]) -> Constant:
        """Return strings (n,) as a constant."""
        return self.as_text(Constant.of(self.importer.reader.codes(texts)))

    def is_text(self, expr: Expr) -> bool:
        """Whether an expression is a tensor of text."""
        return self.importer.narrow.get(expr) is TEXT

    def as_text(self, codes: ExprType) -> ExprType:
        """Mark a tensor of codes as text."""
        self.importer.narrow[codes] = TEXT
        return codes

    # attributes

    def has(self, name: str) -> bool:
        return name in self._attributes

    def int(self, name: str, default: builtins.int | T | _Required = REQUIRED) -> builtins.int | T:
        attribute = self._take(name, AttributeProto.INT, default)
        return default if attribute is None else attribute.i  # type: ignore[return-value]

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.int(name, int(default)))

    def float(self, name: str, default: builtins.float | T | _Required = REQUIRED) -> builtins.float | T:
        attribute = self._take(name, AttributeProto.FLOAT, default)
        return default if attribute is None else attribute.f  # type: ignore[return-value]

    def text(self, name: str, default: str | T | _Required = REQUIRED) -> str | T:
        attribute = self._take(name, AttributeProto.STRING, default)
        return default if attribute is None else attribute.s.decode("utf-8", "replace")  # type: ignore[return-value]

    def ints(
        self, name: str, default: Sequence[builtins.int] | T | _Required = REQUIRED
    ) -> tuple[builtins.int, ...] | T:
        attribute = self._take(name, AttributeProto.INTS, default)
        if attribute is None:
            return tuple(default) if isinstance(default, list) else default  # type: ignore[return-value]
        return tuple(attribute.ints)

    def floats(
        self, name: str, default: Sequence[builtins.float] | T | _Required = REQUIRED
    ) -> tuple[builtins.float, ...] | T:
        attribute = self._take(name, AttributeProto.FLOATS, default)
        return default if attribute is None else tuple(attribute.floats)  # type: ignore[return-value]

    def texts(self, name: str, default: Sequence[str] | T | _Required = REQUIRED) -> tuple[str, ...] | T:
        attribute = self._take(name, AttributeProto.STRINGS, default)
        return default if attribute is None else tuple(s.decode() for s in attribute.strings)  # type: ignore[return-value]

    def element_type(self, name: str, default: str | _Required = REQUIRED) -> str:
        """Return the dtype of an attribute that holds an ONNX element type."""
        number = self.int(name, REQUIRED if isinstance(default, _Required) else None)
        return element_type(number, f"attribute '{name}'") if number is not None else default  # type: ignore[return-value]

    def narrow_type(self, name: str) -> NarrowType | None:
        """Return the narrow type of an attribute that holds an ONNX element type, or None if the type is not narrow."""
        attribute = self._attributes.get(name)
        return None if attribute is None else narrow_type(attribute.i)

    def tensor(self, name: str) -> Constant | None:
        attribute = self._take(name, AttributeProto.TENSOR, None)
        return None if attribute is None else self.importer.constant(attribute.t)

    def tensor_proto(self, name: str) -> onnx.TensorProto | None:
        """Return a tensor attribute as it is stored, or None."""
        attribute = self._take(name, AttributeProto.TENSOR, None)
        return None if attribute is None else attribute.t

    def sparse_tensor(self, name: str) -> onnx.SparseTensorProto | None:
        attribute = self._take(name, AttributeProto.SPARSE_TENSOR, None)
        return None if attribute is None else attribute.sparse_tensor

    def graph(self, name: str) -> onnx.GraphProto:
        attribute = self._take(name, AttributeProto.GRAPH, REQUIRED)
        assert attribute is not None
        return attribute.g

    def ignore(self, *names: str) -> None:
        """Mark attributes as read that do not affect inference: momentum, training seeds, hints."""
        self._unread.difference_update(names)

    def all_attributes(self) -> Mapping[str, AttributeProto]:
        """Return every attribute and mark all as read, for an inlined function that receives them."""
        self._unread.clear()
        return self._attributes

    def _take(self, name: str, kind: builtins.int, default: object) -> AttributeProto | None:
        attribute = self._attributes.get(name)
        self._unread.discard(name)
        if attribute is None:
            if isinstance(default, _Required):
                self.fail(f"attribute '{name}' is missing")
            return None
        if attribute.type != kind and attribute.type != AttributeProto.UNDEFINED:
            self.fail(f"attribute '{name}' has kind {_KIND_NAMES.get(attribute.type, '?')}, not {_KIND_NAMES[kind]}")
        return attribute

    def check_all_read(self) -> None:
        """Raise ImportModelError if an attribute has not been read."""
        if self._unread:
            names = ", ".join(f"'{name}'" for name in sorted(self._unread))
            self.fail(
                f"attribute {names} of {self.op_type} (opset {self.opset}) is not known; attributes are never ignored"
            )
