"""Small ONNX models for the tests of the importer, and a way to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.frontend.onnx import from_onnx
from relaxlite.ir.module import IRModule
from relaxlite.ir.verifier import verify
from tests.support.ort_reference import session

Dims = Sequence["int | str | None"]

_TYPES = {
    "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32, "bool": TensorProto.BOOL,
    "string": TensorProto.STRING, "uint8": TensorProto.UINT8, "float16": TensorProto.FLOAT16,
}  # fmt: skip


def value(name: str, dims: Dims | None, dtype: str = "float32") -> onnx.ValueInfoProto:
    """The declaration of an input or output; a dimension of None has neither name nor value."""
    return helper.make_tensor_value_info(name, _TYPES[dtype], dims)


def values(**shapes: Dims) -> list[onnx.ValueInfoProto]:
    return [value(name, dims) for name, dims in shapes.items()]


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: Sequence[str | onnx.ValueInfoProto] = ("y",),
    weights: dict[str, Any] | None = None,
) -> onnx.GraphProto:
    """A graph; outputs given by name have no declared shape."""
    made = [value(o, None) if isinstance(o, str) else o for o in outputs]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    return helper.make_graph(list(nodes), "test", list(inputs), made, tensors)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: Sequence[str | onnx.ValueInfoProto] = ("y",),
    weights: dict[str, Any] | None = None,
    *,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(
        graph(nodes, inputs, outputs, weights), opset_imports=imports, functions=list(functions), producer_name="tests"
    )


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), name: str = "", domain: str = "", **attrs: Any
) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), name=name, domain=domain, **attrs)


def imported(proto: onnx.ModelProto, **options: Any) -> IRModule:
    """The module, verified."""
    module = from_onnx(proto, **options)
    verify(module, "graph")
    return module


def run(proto: onnx.ModelProto | IRModule, *inputs: Any, **options: Any) -> Any:
    """Import, verify, interpret."""
    module = proto if isinstance(proto, IRModule) else imported(proto, **options)
    return Interpreter(module).run("main", *map(np.asarray, inputs))


def onnxruntime_result(proto: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    """What onnxruntime makes of the model."""
    proto.ir_version = 9
    return session(proto).run(None, feeds)


def input_dims(module: IRModule) -> dict[str, list[str]]:
    """The dimensions of every input as text."""
    return {p.name: [str(d) for d in p.ty.shape or ()] for p in module.functions()["main"].params}  # type: ignore[union-attr]


def output_dims(module: IRModule) -> list[list[str]]:
    result: Any = module.functions()["main"].body.result
    types = [f.ty for f in result.fields] if hasattr(result, "fields") else [result.ty]
    return [[str(d) for d in ty.shape or ()] for ty in types]
