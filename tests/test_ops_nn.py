"""The NumPy references of the neural-network ops against onnxruntime, and what their type rules refuse.

That compiled loops agree with the references is tests/test_ops_conformance.py's part, from each op's samples.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.expr import Var
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Any:
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def integers(dtype: str, *shape: int) -> Any:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


def run_onnx(op: str, *inputs: Any, results: int = 1, opset: int = 21, domain: str = "", **attrs: Any) -> Any:
    """What onnxruntime computes for one node; a None input is left out."""
    names = ["" if value is None else f"x{k}" for k, value in enumerate(inputs)]
    outputs = [f"y{k}" for k in range(results)]
    helper = onnx.helper
    node = helper.make_node(op, names, outputs, domain=domain, **attrs)
    given = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if value is not None}
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in given.items()]
    graph = helper.make_graph([node], "test", infos, [helper.make_empty_tensor_value_info(name) for name in outputs])
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, given)
    return found if results > 1 else found[0]


def reference(name: str, *operands: Any, **attrs: Any) -> Any:
    """The op's NumPy reference, with its attributes checked and completed."""
    op = ops.get_op(name)
    return op.reference(*operands, **op.check_attrs(attrs))


def check(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance)


def tensor(*shape: int | str | SymVar, dtype: str = "float32") -> Var:
    dims = tuple(SymVar(d) if isinstance(d, str) else d for d in shape)
    return Var("x", TensorType.of(dims, dtype))


# linalg


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((2, 3, 4), (4, 1)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((2, 1, 3, 4), (5, 4, 2)),
     ((0, 4), (4, 2)), ((2, 0), (0, 3)), ((7, 2, 3), (3,))],
)  # fmt: skip
def test_matmul(a: Any, b: Any) -> None:
    x, y = floats(*a), floats(*b)
    check(reference("matmul", x, y), run_onnx("MatMul", x, y))


def test_matmul_of_half_precision_is_rounded_once() -> None:
    x, y = np.full((1, 4096), 0.1, np.float16), np.ones((4096, 1), np.float16)
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert reference("matmul", x, y) == exact.astype(np.float16)


@pytest.mark.parametrize("zeros", [(), ("scalar",), ("scalar", "scalar"), ("scalar", "vector")])
def test_matmul_integer(zeros: tuple[str, ...]) -> None:
    a, b = integers("uint8", 3, 5), integers("uint8", 5, 4)
    given = [integers("uint8", *(() if kind == "scalar" else (4,))) for kind in zeros]
    check(reference("matmul_integer", a, b, *given), run_onnx("MatMulInteger", a, b, *given))


# convolutions


CONV = [
    ((1, 3, 7, 5), (4, 3, 3, 3), {}),
    ((2, 3, 7, 6), (4, 3, 3, 2), {"pads": (1, 0, 2, 1), "strides": (2, 3)}),
    ((2, 4, 9), (6, 2, 3), {"groups": 2, "pads": (2, 1), "dilations": (2,)}),
    ((1, 4, 6, 6), (4, 1, 3, 3), {"groups": 4, "pads": (1, 1, 1, 1)}),
    ((1, 2, 5, 4, 6), (3, 2, 2, 3, 1), {"pads": (1, 0, 0, 0, 1, 2), "strides": (2, 1, 2)}),
    ((0, 2, 5), (3, 2, 3), {}),
    ((2, 2, 8, 8), (2, 2, 1, 1), {"strides": (2, 2)}),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "attrs"), CONV)
def test_conv(x_shape: Any, w_shape: Any, attrs: Any) -> None:
    x, w, attrs = floats(*x_shape), floats(*w_shape), dict(attrs)
    pads = attrs.pop("pads", (0,) * (2 * (x.ndim - 2)))
    renamed = {"group" if k == "groups" else k: v for k, v in attrs.items()}
    check(reference("conv", x, w, pads, **attrs), run_onnx("Conv", x, w, pads=pads, **renamed))


@pytest.mark.parametrize("per_channel", [False, True])
def test_conv_integer(per_channel: bool) -> None:
    x, w = integers("uint8", 2, 3, 6, 5), integers("uint8", 4, 3, 3, 2)
    zeros = [np.uint8(7), integers("uint8", 4) if per_channel else np.uint8(200)]
    centered = [x.astype(np.float32) - 7, w.astype(np.float32) - np.reshape(zeros[1], (-1, 1, 1, 1))]  # exact in float32
    expected = run_onnx("Conv", *centered, pads=(1, 0, 1, 2), strides=(2, 1)).astype(np.int32)
    check(reference("conv_integer", x, w, (1, 0, 1, 2), *zeros, strides=(2, 1)), expected)


CONV_TRANSPOSE = [
    ((1, 3, 4, 5), (3, 2, 2, 2), {"strides": (2, 2)}),
    ((2, 2, 4, 3), (2, 3, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 2, 5), (2, 2, 3), {"strides": (2,), "pads": (1, 1), "output_padding": (1,)}),
    ((1, 4, 5), (4, 3, 3), {"strides": (3,), "dilations": (2,), "groups": 2, "pads": (2, 1)}),
    ((1, 2, 3, 4), (2, 1, 3, 1), {"pads": (1, 0, 1, 0)}),
    ((1, 2, 3), (2, 2, 1), {"strides": (3,), "output_padding": (2,)}),
    ((1, 2, 2, 3, 2), (2, 2, 2, 3, 1), {"strides": (2, 1, 3)}),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "attrs"), CONV_TRANSPOSE)
def test_conv_transpose(x_shape: Any, w_shape: Any, attrs: Any) -> None:
    x, w, attrs = floats(*x_shape), floats(*w_shape), dict(attrs)
    pads = attrs.pop("pads", (0,) * (2 * (x.ndim - 2)))
    renamed = {"group" if k == "groups" else k: v for k, v in attrs.items()}
    check(reference("conv_transpose", x, w, pads, **attrs), run_onnx("ConvTranspose", x, w, pads=pads, **renamed))


# pooling


POOL = [
    ((2, 3, 7, 6), {"kernel": (3, 2)}),
    ((1, 2, 7, 7), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 2, 6, 9), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 0, 1, 1), "ceil_mode": True}),
    ((2, 1, 11), {"kernel": (2,), "strides": (3,), "ceil_mode": True}),
    ((2, 1, 11), {"kernel": (3,), "dilations": (2,), "pads": (2, 1)}),
    ((1, 2, 5, 6, 7), {"kernel": (2, 3, 2), "strides": (2, 2, 1), "pads": (1, 0, 1, 0, 1, 0)}),
    ((0, 2, 5, 5), {"kernel": (2, 2)}),
    ((1, 1, 4, 4), {"kernel": (2, 2), "strides": (3, 3), "pads": (1, 1, 1, 1), "ceil_mode": True}),
]


def pool_arguments(attrs: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """pads, the attributes of the op, the attributes of the ONNX node."""
    given = dict(attrs)
    pads = given.pop("pads", (0,) * (2 * len(attrs["kernel"])))
    node = {"kernel_shape" if k == "kernel" else k: int(v) if k == "ceil_mode" else v for k, v in given.items()}
    return pads, given, {**node, "pads": pads}


@pytest.mark.parametrize(("shape", "attrs"), POOL)
def test_max_pool(shape: Any, attrs: Any) -> None:
    x, (pads, given, node) = floats(*shape), pool_arguments(attrs)
    check(reference("max_pool", x, pads, **given), run_onnx("MaxPool", x, **node))


@pytest.mark.parametrize("storage_order", [0, 1])
@pytest.mark.parametrize(("shape", "attrs"), POOL)
def test_max_pool_with_indices(shape: Any, attrs: Any, storage_order: int) -> None:
    x, (pads, given, node) = floats(*shape), pool_arguments(attrs)
    found = reference("max_pool_with_indices", x, pads, **given, storage_order=storage_order)
    expected = run_onnx("MaxPool", x, results=2, **node, storage_order=storage_order)
    for a, b in zip(found, expected, strict=True):
        check(a, b)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("shape", "attrs"), POOL)
def test_avg_pool(shape: Any, attrs: Any, include: bool) -> None:
    x, (pads, given, node) = floats(*shape), pool_arguments(attrs)
    expected = run_onnx("AveragePool", x, **node, count_include_pad=int(include))
    check(reference("avg_pool", x, pads, **given, count_include_pad=include), expected)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("shape", "attrs"), POOL)
def test_lp_pool(shape: Any, attrs: Any, p: int) -> None:
    x, (pads, given, node) = floats(*shape), pool_arguments(attrs)
    check(reference("lp_pool", x, pads, **given, p=p), run_onnx("LpPool", x, **node, p=p))


# normalization


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(3, 5, 4), (0, 3, 2), (2, 3, 0)])
@pytest.mark.parametrize(("name", "op"), [("softmax", "Softmax"), ("log_softmax", "LogSoftmax")])
def test_softmax(name: str, op: str, shape: Any, axis: int) -> None:
    x = floats(*shape) * 10
    check(reference(name, x, axis=axis), run_onnx(op, x, axis=axis))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_infinities_and_nan(name: str) -> None:
    inf = np.inf
    x = np.array([[-inf, -inf], [-inf, 1], [inf, 1], [np.nan, 1]], np.float32)
    op = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[name]
    np.testing.assert_array_equal(reference(name, x), run_onnx(op, x))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, -1])
def test_lp_normalize(p: int, axis: int) -> None:
    x = floats(3, 4)
    x[1] = 0
    check(reference("lp_normalize", x, axis=axis, p=p), run_onnx("LpNormalization", x, axis=axis, p=p))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_norm(axis: int, has_bias: bool) -> None:
    x, tail = floats(2, 3, 5), (5,) if axis == -1 else (3, 5)
    weights = [floats(*tail)] + ([floats(*tail)] if has_bias else [])
    expected = run_onnx("LayerNormalization", x, *weights, axis=axis, epsilon=1e-3)
    check(reference("layer_norm", x, *weights, axis=axis, epsilon=1e-3), expected)


def test_rms_norm() -> None:
    x, scale = floats(2, 3, 5), floats(5)
    expected = run_onnx("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-5)
    check(reference("rms_norm", x, scale), expected)


def test_instance_norm() -> None:
    x, scale, bias = floats(2, 3, 5, 4), floats(3), floats(3)
    check(reference("instance_norm", x, scale, bias), run_onnx("InstanceNormalization", x, scale, bias), 1e-4)


def test_group_norm() -> None:
    x, scale, bias = floats(2, 6, 5, 4), floats(6), floats(6)
    expected = run_onnx("GroupNormalization", x, scale, bias, num_groups=3, epsilon=1e-5)
    check(reference("group_norm", x, scale, bias, groups=3), expected, 1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3)])
def test_batch_norm(shape: Any) -> None:
    x, weights = floats(*shape), [floats(3), floats(3), floats(3), positive(3)]
    check(reference("batch_norm", x, *weights), run_onnx("BatchNormalization", x, *weights), 1e-4)


@pytest.mark.parametrize("size", [1, 3])
def test_lrn(size: int) -> None:
    x, attrs = floats(2, 6, 3, 3), {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}
    check(reference("lrn", x, **attrs), run_onnx("LRN", x, **attrs))


def test_mean_variance_normalize() -> None:
    x = floats(2, 3, 4, 5)
    check(reference("mean_variance_normalize", x), run_onnx("MeanVarianceNormalization", x), 1e-4)


# type rules


def refuses(name: str, *operands: Any, **attrs: Any) -> str:
    with pytest.raises(TypeInferenceError) as error:
        getattr(ops, name)(*operands, **attrs)
    return str(error.value)


def test_errors_name_the_operand_and_the_shapes() -> None:
    x = tensor("n", 3, 8, 8)
    assert refuses("matmul", tensor("n", 3), tensor(4, 5)) == (
        "matmul: the inner dimensions differ: a is (n, 3) and b is (4, 5); the last dimension of a must equal the second to "
        "last dimension of b"
    )
    assert "one numeric dtype, got float32 and int32; cast one of them" in refuses("matmul", x, tensor(8, 2, dtype="int32"))
    assert refuses("conv", x, tensor(4, 5, 3, 3), (0,) * 4) == "conv: x has 3 channels, but w takes 5 (groups=1)"
    assert "groups=2 must be positive and divide the 3 channels of w" in refuses("conv", x, tensor(3, 3, 1, 1), (0,) * 4, groups=2)
    assert "pads must be 2 begins, then as many ends, got (1, 1)" in refuses("conv", x, tensor(4, 3, 3, 3), (1, 1))
    assert "strides must be 2 positive integers, got (0, 1)" in refuses("conv", x, tensor(4, 3, 3, 3), (0,) * 4, strides=(0, 1))
    assert "spatial dimension 1 of x has size 8, less than the window of 11" in refuses("conv", x, tensor(4, 3, 1, 11), (0,) * 4)
    assert "less than the window of 10" in refuses("max_pool", x, (0,) * 4, kernel=(10, 1))
    assert "x must be (n, c, spatial...)" in refuses("avg_pool", x, (0, 0), kernel=(2,))
    assert "axis 4 does not exist in a tensor of rank 4" in refuses("softmax", x, axis=4)
    assert "scale must have the normalized shape (8,), got (7,)" in refuses("layer_norm", x, tensor(7))
    assert "scale must have one value for each of the 3 channels of x" in refuses("instance_norm", x, tensor(4), tensor(4))
    assert "groups=2 must be positive and divide the 3 channels of x" in refuses("group_norm", x, tensor(3), tensor(3), groups=2)
