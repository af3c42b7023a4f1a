"""ONNX models of one operator, or of a few that are often seen together. Sizes of inputs stay symbolic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence["int | str"]
Model = onnx.ModelProto
MICROSOFT = "com.microsoft"
GROUP = 32  # rows that share a scale where weights have 4 bits


def save(folder: Path, name: str, model: Model) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def _model(
    nodes: list[Any], inputs: dict[str, Dims], outputs: dict[str, Dims], weights: dict[str, np.ndarray] | None = None
) -> Model:
    graph = helper.make_graph(
        nodes,
        "bench",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    return model


def _node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attrs)


def matmul(k: int, n: int, layers: int, epilogue: str = "") -> Model:
    """y_i = x W_i, or gelu(x W_i + b_i), for x of (m, k): layers that differ in their weights only."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {}
    for i in range(layers):
        weights[f"w{i}"] = rng.standard_normal((k, n), np.float32) * np.float32(k**-0.5)
        if not epilogue:
            nodes.append(_node("MatMul", f"x w{i}", f"y{i}"))
            continue
        weights[f"b{i}"] = rng.standard_normal(n, np.float32)
        nodes += [
            _node("MatMul", f"x w{i}", f"product{i}"),
            _node("Add", f"product{i} b{i}", f"sum{i}"),
            _node("Gelu", f"sum{i}", f"y{i}"),
        ]
    return _model(nodes, {"x": ("m", k)}, {f"y{i}": ("m", n) for i in range(layers)}, weights)


STORED_BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4 + 32 / GROUP}  # of a weight, with its scales


def stored_matmul(kind: str, k: int, n: int, layers: int) -> Model:
    """y_i = x W_i for weights as they are stored: float32, float16, int8 with a scale per column, or int4 in groups (as
    MatMulNBits, which onnxruntime has a kernel for)."""
    rng = np.random.default_rng(0)
    nodes, weights = [], dict[str, np.ndarray]()
    for i in range(layers):
        if kind == "int4":
            weights[f"q{i}"] = rng.integers(0, 256, (n, k // GROUP, GROUP // 2)).astype(np.uint8)
            weights[f"s{i}"] = rng.uniform(0.5, 1, n * k // GROUP).astype(np.float32) * np.float32(0.2 * k**-0.5)
            sizes = {"K": k, "N": n, "bits": 4, "block_size": GROUP}
            nodes.append(helper.make_node("MatMulNBits", ["x", f"q{i}", f"s{i}"], [f"y{i}"], domain=MICROSOFT, **sizes))
            continue
        if kind == "int8":
            weights[f"q{i}"] = rng.integers(-128, 128, (k, n)).astype(np.int8)
            weights[f"s{i}"] = rng.uniform(0.5, 1, n).astype(np.float32) * np.float32(0.01 * k**-0.5)
            nodes.append(_node("DequantizeLinear", f"q{i} s{i}", f"w{i}", axis=1))
        else:
            values = rng.standard_normal((k, n), np.float32) * np.float32(k**-0.5)
            weights[f"q{i}" if kind == "float16" else f"w{i}"] = values.astype(kind)
            if kind == "float16":
                nodes.append(_node("Cast", f"q{i}", f"w{i}", to=TensorProto.FLOAT))
        nodes.append(_node("MatMul", f"x w{i}", f"y{i}"))
    return _model(nodes, {"x": ("m", k)}, {f"y{i}": ("m", n) for i in range(layers)}, weights)


def chain_of_matmuls(count: int, width: int) -> Model:
    """x W_1 W_2 ...: kernels that cannot become one, each of next to no work."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((width, width), np.float32) * np.float32(width**-0.5) for i in range(count)}
    nodes = [_node("MatMul", f"t{i} w{i}", f"t{i + 1}") for i in range(count)]
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    return _model(nodes, {"x": ("m", width)}, {"y": ("m", width)}, weights)


@dataclass(frozen=True, slots=True)
class RowOperator:
    inputs: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]
    weights: tuple[str, ...] = ()  # vectors as long as a row
    output: tuple[str, str] = ("m", "n")


ROW_OPERATORS: dict[str, RowOperator] = {
    "softmax": RowOperator(("x",), (_node("Softmax", "x", "y", axis=-1),)),
    "layer_norm": RowOperator(("x",), (_node("LayerNormalization", "x scale bias", "y", axis=-1),), ("scale", "bias")),
    "gelu": RowOperator(("x",), (_node("Gelu", "x", "y"),)),
    "relu": RowOperator(("x",), (_node("Relu", "x", "y"),)),
    "add": RowOperator(("x", "z"), (_node("Add", "x z", "y"),)),
    "chain": RowOperator(
        ("x", "z"),
        (_node("Mul", "x scale", "a"), _node("Add", "a bias", "b"), _node("Relu", "b", "c"), _node("Add", "c z", "y")),
        ("scale", "bias"),
    ),
    "transpose": RowOperator(("x",), (_node("Transpose", "x", "y", perm=[1, 0]),), output=("n", "m")),
}
ROW_LENGTH = 1024


def row_operator(name: str) -> Model:
    """An operator on matrices whose rows have ROW_LENGTH elements; their number stays open."""
    found = ROW_OPERATORS[name]
    rng = np.random.default_rng(0)
    weights = {w: rng.standard_normal(ROW_LENGTH, np.float32) for w in found.weights}
    sizes: dict[str, int | str] = {"m": "m", "n": ROW_LENGTH}
    return _model(
        list(found.nodes),
        {x: ("m", ROW_LENGTH) for x in found.inputs},
        {"y": [sizes[d] for d in found.output]},
        weights,
    )


def attention(heads: int, width: int) -> Model:
    """softmax(q k^T / sqrt(width)) v, for q, k and v of (batch, heads, seq, width)."""
    nodes = [
        _node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        _node("MatMul", "q kt", "scores"),
        _node("Mul", "scores scale", "scaled"),
        _node("Softmax", "scaled", "shares", axis=-1),
        _node("MatMul", "shares v", "y"),
    ]
    shape = ("batch", heads, "seq", width)
    scale = np.asarray(width**-0.5, np.float32)
    return _model(nodes, dict.fromkeys("qkv", shape), {"y": shape}, {"scale": scale})


@dataclass(frozen=True, slots=True)
class Convolution:
    """A square convolution with "same" padding, a bias and a ReLU."""

    name: str
    channels: int
    features: int
    kernel: int
    size: int  # of the usual picture
    stride: int = 1
    groups: int = 1

    def flops(self, batch: int, size: int) -> float:
        out = -(-size // self.stride)
        return 2.0 * batch * out * out * self.features * self.channels // self.groups * self.kernel**2


CONVOLUTIONS = (
    Convolution("1x1-64-256", 64, 256, 1, 56),
    Convolution("1x1-256-64", 256, 64, 1, 56),
    Convolution("1x1-512-512", 512, 512, 1, 14),
    Convolution("3x3-64", 64, 64, 3, 56),
    Convolution("3x3-256", 256, 256, 3, 14),
    Convolution("3x3-128-stride2", 128, 128, 3, 56, stride=2),
    Convolution("7x7-3-64-stride2", 3, 64, 7, 224, stride=2),
    Convolution("depthwise3x3-96", 96, 96, 3, 112, groups=96),
    Convolution("depthwise3x3-96-stride2", 96, 96, 3, 112, stride=2, groups=96),
    Convolution("depthwise5x5-240", 240, 240, 5, 28, groups=240),
)


def convolution(conv: Convolution) -> Model:
    rng = np.random.default_rng(0)
    per_group = conv.channels // conv.groups
    weights = {
        "w": rng.standard_normal((conv.features, per_group, conv.kernel, conv.kernel), np.float32)
        * np.float32((per_group * conv.kernel**2) ** -0.5),
        "b": rng.standard_normal(conv.features, np.float32),
    }
    pad = conv.kernel // 2
    nodes = [
        _node("Conv", "x w b", "c", strides=[conv.stride] * 2, pads=[pad] * 4, group=conv.groups),
        _node("Relu", "c", "y"),
    ]
    shape = ("batch", conv.channels, "height", "width")
    return _model(nodes, {"x": shape}, {"y": ("batch", conv.features, "out_height", "out_width")}, weights)
