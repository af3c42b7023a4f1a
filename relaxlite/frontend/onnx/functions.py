"""ONNX functions to inline: functions of a model, and the bodies by which ONNX defines many of its ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import AttributeProto

from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.tensors import onnx_type
from relaxlite.frontend.onnx.validation import function_schema
from relaxlite.ir.expr import Expr
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Expansion:
    """A function to inline in place of a node, and its attributes."""

    function: onnx.FunctionProto
    arguments: Mapping[str, AttributeProto]


def expand_model_function(function: onnx.FunctionProto, node: Node) -> Expansion:
    """Return the expansion of a node that calls one of the model's functions.

    Raises ImportModelError for an unknown attribute or too many inputs.
    """
    attributes = dict(node.all_attributes())
    known = {*function.attribute, *(a.name for a in function.attribute_proto)}
    unknown = sorted(attributes.keys() - known)
    if unknown:
        raise ImportModelError(f"function {function.name} has no attribute '{unknown[0]}'")
    if len(node.inputs) > len(function.input):
        raise ImportModelError(f"function {function.name} takes {len(function.input)} inputs, got {len(node.inputs)}")
    return Expansion(function, {**{a.name: a for a in function.attribute_proto}, **attributes})


def expand_schema(node: Node, domain: str) -> Expansion:
    """Return the expansion of a node by the body that ONNX defines for its op.

    Raises ImportModelError if there is no such body, or for an unknown attribute.
    """
    schema = function_schema(domain, node.op_type, node.opset)
    if schema is None:
        raise ImportModelError(f"op {node.op_type} is not known")
    function = _body(schema, node)
    if function is None:
        raise ImportModelError(f"ONNX defines no body of {node.op_type} for these inputs and attributes")
    attributes = dict(node.all_attributes())
    unknown = sorted(attributes.keys() - schema.attributes.keys())
    if unknown:
        raise ImportModelError(f"{node.op_type} has no attribute '{unknown[0]}' in opset {node.opset}")
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    return Expansion(function, {**defaults, **attributes})


def _body(schema: Any, node: Node) -> onnx.FunctionProto | None:
    function = onnx.FunctionProto()
    if schema.has_function:
        data = _newest(schema.function_opset_versions, node.opset)
        function.ParseFromString(schema.get_function_with_opset_version(data))
        return function
    types = [_type_proto(x).SerializeToString() for x in node.inputs]
    version = _newest(schema.context_dependent_function_opset_versions, node.opset)
    node_proto = onnx.NodeProto()
    node_proto.CopyFrom(node.proto)
    del node_proto.attribute[:]
    node_proto.attribute.extend(node.all_attributes().values())
    body = schema.get_context_dependent_function_with_opset_version(version, node_proto.SerializeToString(), types)
    function.ParseFromString(body)
    return function if function.node else None


def _newest(versions: list[int], opset: int) -> int:
    return max((v for v in versions if v <= opset), default=min(versions))


def _type_proto(x: Expr | None) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    if x is None or not isinstance(x.ty, TensorType):
        return proto
    proto.tensor_type.elem_type = onnx_type(x.ty.dtype)
    if x.ty.shape is not None:
        proto.tensor_type.shape.SetInParent()
        for dim in x.ty.shape:
            dim_proto, value = proto.tensor_type.shape.dim.add(), as_int(dim)
            if value is not None:
                dim_proto.dim_value = value
            else:
                dim_proto.dim_param = str(dim)
    return proto
