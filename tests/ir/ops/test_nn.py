"""The NumPy references of the neural-network ops against onnxruntime, and what their type rules refuse.

That compiled loops agree with the references is tests/ir/ops/test_conformance.py's part, from each op's samples.
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


@pytest.fixture(autouse=True)
def same_numbers_for_a_test_run_alone() -> None:
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


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
    kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in given.items()}
    infos = [helper.make_tensor_value_info(name, kinds[name], value.shape) for name, value in given.items()]
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


EINSUM = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    ("bnhd,bmhd->bhnm", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("ij,jk,k->i", (3, 4), (4, 5), (5,)),
    ("i,i", (4,), (4,)),
    ("ij->ji", (3, 4)),
    ("ij->", (3, 4)),
    ("ij,kl->ijkl", (2, 3), (4, 1)),
    ("a...b,bc->c...a", (2, 3, 4, 5), (5, 2)),
]


@pytest.mark.parametrize("case", EINSUM)
def test_einsum(case: Any) -> None:
    equation, *shapes = case
    xs = [floats(*shape) for shape in shapes]
    check(reference("einsum", *xs, equation=equation), run_onnx("Einsum", *xs, equation=equation))


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
    centered = [x.astype(np.float32) - 7, w.astype(np.float32) - np.reshape(zeros[1], (-1, 1, 1, 1))]  # exact
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


# resizing


def resize_both_ways(x: Any, sizes: Any = None, scales: Any = None, roi: Any = None, **attrs: Any) -> tuple[Any, Any]:
    """(reference, onnxruntime), of sizes or of scales."""
    node = {k: int(v) if isinstance(v, bool) else v for k, v in attrs.items()}
    given = [None if v is None else np.asarray(v, np.float32) for v in (roi, scales)]
    expected = run_onnx("Resize", x, *given, None if sizes is None else np.asarray(sizes), opset=19, **node)
    return reference("resize", x, expected.shape, scales=scales, roi=roi, **attrs), expected


SIZES = [(1, 1), (2, 3), (6, 10), (7, 9), (13, 3)]
COORDINATES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]


@pytest.mark.parametrize("mode", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_resize_nearest(coordinates: str, mode: str) -> None:
    for h, w in SIZES:
        if coordinates == "half_pixel_symmetric" and mode == "floor" and (h, w) != (6, 10):
            continue  # a source coordinate that is whole up to one rounding; onnxruntime rounds it the other way
        attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": mode}
        check(*resize_both_ways(floats(1, 2, 3, 5), (1, 2, h, w), **attrs))


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", [*COORDINATES, "tf_crop_and_resize"])
def test_resize_weighted(coordinates: str, mode: str, antialias: bool) -> None:
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": antialias}
    roi = [0, 0, 0.2, 0.1, 1, 1, 0.7, 1.2] if coordinates == "tf_crop_and_resize" else None
    for (h, w), exclude in itertools.product(SIZES, [False, True] if mode == "cubic" else [False]):
        more = {"exclude_outside": exclude, "extrapolation_value": 3.0}
        check(*resize_both_ways(floats(1, 2, 3, 5), (1, 2, h, w), roi=roi, **attrs, **more), 1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.3, 2.0), (1.0, 1.0, 0.6, 0.5)])
def test_resize_by_scales_that_are_not_the_ratio_of_sizes(mode: str, scales: Any) -> None:
    check(*resize_both_ways(floats(1, 2, 5, 7), scales=scales, mode=mode), 1e-4)


def test_resize_of_bytes() -> None:
    x = integers("uint8", 1, 2, 4, 5)
    found, expected = resize_both_ways(x, (1, 2, 7, 9), mode="linear")
    assert np.abs(found.astype(int) - expected).max() <= 1  # onnxruntime interpolates in fixed point
    check(*resize_both_ways(x, (1, 2, 8, 3)))


# reading at coordinates


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("linear", (4, 5)), ("nearest", (4, 5)), ("cubic", (4, 5)), ("linear", (3, 4, 2)), ("linear", (1, 1))],
)
def test_grid_sample(mode: str, sizes: Any, padding: str, align_corners: bool) -> None:
    x, grid = floats(2, 3, *sizes), RNG.uniform(-1.8, 1.8, (2, 3, *sizes[1:], len(sizes))).astype(np.float32)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    expected = run_onnx("GridSample", x, grid, opset=20, **{**attrs, "align_corners": int(align_corners)})
    check(reference("grid_sample", x, grid, **attrs), expected)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", [(4, 5), (3, 4, 2)])
def test_affine_grid(sizes: Any, align_corners: bool) -> None:
    theta = floats(2, len(sizes), len(sizes) + 1)
    expected = run_onnx("AffineGrid", theta, np.array((2, 3, *sizes)), align_corners=int(align_corners), opset=20)
    check(reference("affine_grid", theta, sizes, align_corners=align_corners), expected)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("half_pixel", [False, True])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, half_pixel: bool, ratio: int) -> None:
    x, corner = floats(2, 3, 7, 6), RNG.uniform(-1, 4, (5, 2))
    rois = np.concatenate([corner, corner + RNG.uniform(0.2, 5, (5, 2))], axis=1).astype(np.float32)
    batch, attrs = RNG.integers(0, 2, 5), {"mode": mode, "sampling_ratio": ratio, "spatial_scale": 0.9}
    coordinates = "half_pixel" if half_pixel else "output_half_pixel"
    node = {**attrs, "output_height": 2, "output_width": 3, "coordinate_transformation_mode": coordinates}
    expected = run_onnx("RoiAlign", x, rois, batch, opset=16, **node)
    check(reference("roi_align", x, rois, batch, output=(2, 3), half_pixel=half_pixel, **attrs), expected)


# signals


@pytest.mark.parametrize(
    ("parts", "length", "attrs"),
    [(1, 8, {}), (1, 8, {"onesided": True}), (2, 6, {}), (2, 9, {"inverse": True}), (1, 12, {"onesided": True})],
)
def test_dft(parts: int, length: int, attrs: Any) -> None:
    x, node = floats(2, 8, 3, parts), {k: int(v) for k, v in attrs.items()}
    expected = run_onnx("DFT", x, np.array(length), np.array(1), opset=20, **node)
    check(reference("dft", x, (length,), axis=1, **attrs), expected)


@pytest.mark.parametrize("onesided", [False, True])
def test_stft(onesided: bool) -> None:
    x, window = floats(2, 20, 1), floats(8)
    expected = run_onnx("STFT", x, np.array(3), window, np.array(8), onesided=int(onesided))
    check(reference("stft", x, window, step=3, onesided=onesided), expected)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(
    ("op", "coefficients"),
    [
        ("HannWindow", (0.5, 0.5, 0.0)),
        ("HammingWindow", (25 / 46, 21 / 46, 0.0)),
        ("BlackmanWindow", (0.42, 0.5, 0.08)),
    ],
)
def test_cosine_window(op: str, coefficients: Any, periodic: bool) -> None:
    expected = run_onnx(op, np.array(10), periodic=int(periodic))
    check(reference("cosine_window", (10,), coefficients=coefficients, periodic=periodic), expected)


# quantization


QUANTIZE = [
    ((4, 5), (), {}, "uint8"),
    ((4, 5, 2), (5,), {"axis": 1}, "int8"),
    ((4, 5), (4,), {"axis": -2}, "int16"),
    ((4, 6), (4, 2), {"axis": 1, "block_size": 3}, "uint8"),
]


@pytest.mark.parametrize(("shape", "scale_shape", "attrs", "dtype"), QUANTIZE)
def test_quantize_linear_and_back(shape: Any, scale_shape: Any, attrs: Any, dtype: str) -> None:
    x, scale, zero = floats(*shape) * 20, positive(*scale_shape) / 8, integers("int8", *scale_shape).astype(dtype)
    found = reference("quantize_linear", x, scale, zero, **attrs)
    check(found, run_onnx("QuantizeLinear", x, scale, zero, **attrs))
    expected = run_onnx("DequantizeLinear", found, scale, zero, **attrs)
    check(reference("dequantize_linear", found, scale, zero, **attrs), expected)


def test_quantize_linear_rounds_halves_to_even_and_saturates() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, 300, -300, np.inf, -np.inf], np.float32)
    found = reference("quantize_linear", x, np.float32(1), np.int8(0))
    np.testing.assert_array_equal(found, [0, 2, 2, 0, 127, -128, 127, -128])


@pytest.mark.parametrize("x", [floats(3, 5), positive(4), -positive(4), np.zeros(3, np.float32)])
def test_dynamic_quantize_linear(x: Any) -> None:
    expected = run_onnx("DynamicQuantizeLinear", x, results=3)
    for a, b in zip(reference("dynamic_quantize_linear", x), expected, strict=True):
        check(a, b)


def seven_bits(*shape: int) -> Any:
    """Weights whose products onnxruntime can sum in pairs of 16 bits, as it does without VNNI; it cuts off others."""
    return integers("int8", *shape) // np.int8(2)


def test_qlinear_matmul() -> None:
    a, b = integers("uint8", 3, 7), seven_bits(7, 4)
    scales = [np.float32(0.02), positive(4) / 50, np.float32(0.4)]
    zeros = [np.uint8(120), np.zeros(4, np.int8), np.uint8(100)]
    operands = [a, scales[0], zeros[0], b, scales[1], zeros[1], scales[2], zeros[2]]
    check(reference("qlinear_matmul", *operands), run_onnx("QLinearMatMul", *operands))


@pytest.mark.parametrize("has_bias", [False, True])
def test_qlinear_conv(has_bias: bool) -> None:
    x, w = integers("uint8", 2, 3, 6, 5), seven_bits(4, 3, 3, 2)
    scales = [np.float32(0.02), positive(4) / 50, np.float32(0.6)]
    zeros = [np.uint8(120), np.zeros(4, np.int8), np.uint8(100)]
    operands = [x, scales[0], zeros[0], w, scales[1], zeros[1], scales[2], zeros[2]]
    bias = [integers("int8", 4).astype(np.int32) * 50] if has_bias else []
    expected = run_onnx("QLinearConv", *operands, *bias, pads=(1, 0, 1, 2), strides=(2, 1))
    found = reference("qlinear_conv", *operands, (1, 0, 1, 2), *bias, strides=(2, 1))
    check(found, expected)


# recurrent nets


def recurrent_operands(gates: int, states: int, directions: int, lengths: Any) -> tuple[list[Any], list[Any]]:
    """(operands of the op, inputs of the ONNX node): 5 steps, batch 3, 2 inputs, 4 hidden."""
    d, rows = directions, gates * 4
    x, w, r, b = floats(5, 3, 2), floats(d, rows, 2), floats(d, rows, 4) / 4, floats(d, rows * 2)
    initial = [floats(d, 3, 4) for _ in range(states)]
    sizes = None if lengths is None else np.array(lengths, np.int32)
    return [x, w, r, b, *initial, *([] if sizes is None else [sizes])], [x, w, r, b, sizes, *initial]


@pytest.mark.parametrize("lengths", [None, (5, 2, 1)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("attrs", [{}, {"clip": 0.4}])
@pytest.mark.parametrize(("name", "gates", "states"), [("lstm", 4, 2), ("gru", 3, 1), ("rnn", 1, 1)])
def test_recurrent(name: str, gates: int, states: int, attrs: Any, direction: str, lengths: Any) -> None:
    operands, inputs = recurrent_operands(gates, states, 2 if direction == "bidirectional" else 1, lengths)
    expected = run_onnx(name.upper(), *inputs, results=1 + states, hidden_size=4, direction=direction, **attrs)
    found = reference(name, *operands, direction=direction, **attrs)
    for a, b in zip(found, expected, strict=True):
        check(a, b)


def test_lstm_with_peepholes_and_coupled_gates() -> None:
    operands, inputs = recurrent_operands(4, 2, 1, (5, 5, 5))
    peepholes = floats(1, 12)
    for coupled in (False, True):
        expected = run_onnx("LSTM", *inputs, peepholes, results=3, hidden_size=4, input_forget=int(coupled))
        found = reference("lstm", *operands, peepholes, input_forget=coupled)
        for a, b in zip(found, expected, strict=True):
            check(a, b)


@pytest.mark.parametrize("lengths", [None, (5, 2, 1)])
def test_gru_linear_before_reset(lengths: Any) -> None:
    operands, inputs = recurrent_operands(3, 1, 2, lengths)
    attrs = {"direction": "bidirectional"}
    expected = run_onnx("GRU", *inputs, results=2, hidden_size=4, linear_before_reset=1, **attrs)
    for a, b in zip(reference("gru", *operands, linear_before_reset=True, **attrs), expected, strict=True):
        check(a, b)


@pytest.mark.parametrize(
    ("onnx_name", "name", "alpha", "beta"),
    [("Relu", "relu", None, None), ("LeakyRelu", "leaky_relu", 0.2, None), ("Affine", "affine", 0.5, 0.1),
     ("ThresholdedRelu", "thresholded_relu", 0.3, None), ("ScaledTanh", "scaled_tanh", 0.7, 0.9),
     ("Elu", "elu", 0.6, None), ("HardSigmoid", "hard_sigmoid", 0.3, 0.4), ("Softsign", "softsign", None, None),
     ("Softplus", "softplus", None, None)],
)  # fmt: skip
def test_rnn_activations(onnx_name: str, name: str, alpha: Any, beta: Any) -> None:
    operands, inputs = recurrent_operands(1, 1, 1, None)
    given = {k: [v] for k, v in (("activation_alpha", alpha), ("activation_beta", beta)) if v is not None}
    expected = run_onnx("RNN", *inputs, results=2, hidden_size=4, activations=[onnx_name], **given)
    attrs = {k: (v,) for k, v in (("alphas", alpha), ("betas", beta)) if v is not None}
    for a, b in zip(reference("rnn", *operands, activations=name, **attrs), expected, strict=True):
        check(a, b)


def test_layout_1_moves_the_batch_to_the_front() -> None:
    operands, _ = recurrent_operands(4, 2, 2, None)
    attrs = {"direction": "bidirectional"}
    y, h, c = reference("lstm", *operands, **attrs)
    moved = [operands[0].transpose(1, 0, 2), *operands[1:4], *(s.transpose(1, 0, 2) for s in operands[4:])]
    y1, h1, c1 = reference("lstm", *moved, layout=1, **attrs)
    check(y1.transpose(1, 2, 0, 3), y)
    check(h1.transpose(1, 0, 2), h)
    check(c1.transpose(1, 0, 2), c)


# type rules


IMAGE = tensor("n", 3, 8, 8)
NO_PADS = (0, 0, 0, 0)
REFUSED = [
    ("matmul", (tensor("n", 3), tensor(4, 5)), {},
     "the inner dimensions differ: a is (n, 3) and b is (4, 5); the last dimension of a must"),
    ("matmul", (IMAGE, tensor(8, 2, dtype="int32")), {}, "one numeric dtype, got float32 and int32; cast one of them"),
    ("conv", (IMAGE, tensor(4, 5, 3, 3), NO_PADS), {}, "x has 3 channels, but w takes 5 (groups=1)"),
    ("conv", (IMAGE, tensor(3, 3, 1, 1), NO_PADS), {"groups": 2}, "groups=2 must be positive and divide the 3"),
    ("conv", (IMAGE, tensor(4, 3, 3, 3), (1, 1)), {}, "pads must be 2 begins, then as many ends, got (1, 1)"),
    ("conv", (IMAGE, tensor(4, 3, 3, 3), NO_PADS), {"strides": (0, 1)}, "strides must be 2 positive integers, got"),
    ("conv", (IMAGE, tensor(4, 3, 1, 11), NO_PADS), {}, "dimension 1 of x has size 8, less than the window of 11"),
    ("max_pool", (IMAGE, NO_PADS), {"kernel": (10, 1)}, "less than the window of 10"),
    ("avg_pool", (IMAGE, (0, 0)), {"kernel": (2,)}, "x must be (n, c, spatial...)"),
    ("einsum", (IMAGE, IMAGE), {"equation": "ab,bc"}, "does not fit operand 0 of rank 4"),
    ("einsum", (IMAGE,), {"equation": "nchw->nx"}, "must name labels of the operands, each once"),
    ("softmax", (IMAGE,), {"axis": 4}, "axis 4 does not exist in a tensor of rank 4"),
    ("layer_norm", (IMAGE, tensor(7)), {}, "scale must have the normalized shape (8,), got (7,)"),
    ("instance_norm", (IMAGE, tensor(4), tensor(4)), {}, "scale must have one value for each of the 3 channels of x"),
    ("group_norm", (IMAGE, tensor(3), tensor(3)), {"groups": 2}, "groups=2 must be positive and divide the 3"),
    ("resize", (IMAGE, (1, 3, 8)), {}, "one value per dimension of x (n, 3, 8, 8) float32, got (1, 3, 8)"),
    ("resize", (IMAGE, (1, 3, 8, 8)), {"scales": (2.0,)}, "scales must have 4 values, got (2.0,)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "attrs", "message"), REFUSED)
def test_type_rules_name_the_operand_and_the_shapes(name: str, operands: Any, attrs: Any, message: str) -> None:
    with pytest.raises(TypeInferenceError) as error:
        getattr(ops, name)(*operands, **attrs)
    assert str(error.value).startswith(f"{name}: ")
    assert message in str(error.value)
