"""Operands whose sizes must agree, and that only a call tells: a call with others is refused, and names the node.

Nothing else would be noticed: kernels read as far as their loops go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import relaxlite as rl
from relaxlite.errors import ExecutionError, ImportModelError
from tests.support.onnx_models import model, node, value


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def of(op: str, operands: list[np.ndarray], *, opset: int = 17, **attrs: Any) -> onnx.ModelProto:
    """The op on inputs x0, x1, ... of these dtypes and ranks, nothing known of their sizes."""
    names = [f"x{k}" for k in range(len(operands))]
    given = [value(n, [None] * x.ndim, str(x.dtype)) for n, x in zip(names, operands, strict=True)]
    return model([node(op, names, name="N", **attrs)], given, opset=opset)


BYTES = [ones(3, 4, dtype="uint8"), ones(4, 5, dtype="uint8"), ones(3, dtype="uint8"), ones(5, dtype="uint8")]
PICTURES = [ones(1, 3, 8, 8, dtype="uint8"), ones(4, 3, 3, 3, dtype="uint8")]
CASES = [
    ("QuantizeLinear", [ones(2, 3, 4), ones(3), ones(3, dtype="uint8")], {"axis": 1}, [(2, 2), (2, 4)]),
    ("DequantizeLinear", [ones(2, 3, dtype="uint8"), ones(3), ones(3, dtype="uint8")], {"axis": 1}, [(2, 2)]),
    ("ReverseSequence", [ones(4, 3), np.int64([1, 2, 3])], {}, [(1, 2), (1, 4)]),
    ("MatMulInteger", BYTES, {}, [(2, 2), (3, 4), (3, 6)]),
    ("ConvInteger", [*PICTURES, ones(1, dtype="uint8"), ones(4, dtype="uint8")], {}, [(2, 2), (3, 3)]),
    ("OneHot", [np.int64([1, 0]), np.int64(3), np.float32([0, 1])], {}, [(2, 1), (2, 3)]),
    (
        "TensorScatter",
        [ones(2, 3, 8, 4), ones(2, 3, 2, 4), np.int64([0, 1])],
        {"opset": 24, "axis": 2},
        [(0, 3), (1, 1)],
    ),
    ("NonMaxSuppression", [ones(2, 5, 4), ones(2, 1, 5), np.int64(3)], {}, [(0, 1), (0, 3), (1, 3)]),
    ("BatchNormalization", [ones(2, 3, 4), *[ones(3)] * 4], {}, [(1, 1), (2, 4), (3, 2), (4, 1)]),
    ("Conv", [ones(2, 3, 8), ones(4, 3, 3), ones(4)], {}, [(2, 1), (2, 3)]),
    ("ConvTranspose", [ones(2, 3, 8), ones(3, 4, 3), ones(4)], {}, [(2, 1), (2, 5)]),
]


def with_size(x: np.ndarray, size: int) -> np.ndarray:
    """x repeated or cut in its first dimension."""
    return np.take(x, np.arange(size) % x.shape[0], axis=0)


@pytest.mark.each_value("op")
@pytest.mark.parametrize(
    ("op", "operands", "attrs", "operand", "size"),
    [
        pytest.param(op, operands, attrs, operand, size, id=f"{op}-x{operand}-{size}")
        for op, operands, attrs, changes in CASES
        for operand, size in changes
    ],
)
def test_an_operand_of_another_size_is_refused(
    op: str, operands: list[np.ndarray], attrs: dict[str, Any], operand: int, size: int
) -> None:
    exe = rl.compile(rl.from_onnx(of(op, operands, **attrs)))
    exe(*operands)
    changed = list(operands)
    changed[operand] = with_size(operands[operand], size)
    with pytest.raises(ExecutionError, match=f"^ONNX node 'N' \\({op}\\)"):
        exe(*changed)
    exe(*operands)


@pytest.mark.parametrize(("op", "gates", "states"), [("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_an_initial_state_of_another_batch_is_refused(op: str, gates: int, states: int, has_lengths: bool) -> None:
    names = ["x", "w", "r", "", "lengths" if has_lengths else "", *["h", "c"][:states]]
    given = [value("x", [None, None, 5]), value("w", [1, 4 * gates, 5]), value("r", [1, 4 * gates, 4])]
    given += [value("lengths", [None], "int32")] if has_lengths else []
    given += [value(name, [1, None, 4]) for name in names[5:]]
    exe = rl.compile(rl.from_onnx(model([node(op, names, ["y"], name="N", hidden_size=4)], given, ["y"])))

    def call(batch: int, *state_batches: int) -> Any:
        lengths = [np.full(batch, 3, np.int32)] if has_lengths else []
        initial = [ones(1, b, 4) for b in state_batches[:states]]
        return exe(ones(3, batch, 5), ones(1, 4 * gates, 5), ones(1, 4 * gates, 4), *lengths, *initial)

    for batch in (1, 3):
        assert call(batch, batch, batch).shape == (3, 1, batch, 4)
    for batch, *others in [(3, 2, 3), (1, 16, 1), (2, 1, 2), (2, 0, 2)]:
        with pytest.raises(ExecutionError, match="initial state has another batch than x, or"):
            call(batch, *others)


def test_an_affine_map_for_another_batch_is_refused() -> None:
    given = [value("theta", [None] * 3), value("sizes", [4], "int64")]
    exe = rl.compile(rl.from_onnx(model([node("AffineGrid", ["theta", "sizes"], name="N")], given, opset=20)))
    sizes = np.int64([2, 3, 4, 5])
    assert exe(ones(2, 2, 3), sizes).shape == (2, 4, 5, 2)
    with pytest.raises(ExecutionError, match=r"dimension 0 of shape \(1, 2, 3\): expects .* = 2, got 1"):
        exe(ones(1, 2, 3), sizes)


def test_offsets_for_another_picture_are_refused() -> None:
    w, offset = ones(3, 2, 3, 3), ones(1, 18, 4, 5)
    weights = {"w": w}
    given = [value("x", [1, 2, None, None]), value("o", [1, 18, None, None])]
    proto = model([node("DeformConv", ["x", "w", "o"], ["y"], name="N")], given, ["y"], weights=weights, opset=19)
    exe = rl.compile(rl.from_onnx(proto))
    assert exe(ones(1, 2, 6, 7), offset).shape == (1, 3, 4, 5)
    with pytest.raises(ExecutionError, match="ONNX node 'N'"):
        exe(ones(1, 2, 7, 7), offset)


@pytest.mark.parametrize("dims", [["b", "n"], ["b", "n", None], ["b", "n", 1]])
def test_a_real_signal_has_any_of_its_ranks(dims: list[Any]) -> None:
    signal = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    weights = {"step": np.int64(8), "window": np.hanning(16).astype(np.float32)}
    proto = model([node("STFT", ["x", "step", "window"], ["y"], name="N")], [value("x", dims)], ["y"], weights=weights)
    exe = rl.compile(rl.from_onnx(proto))
    frames = np.stack([signal[:, k : k + 16] * weights["window"] for k in range(0, 25, 8)], axis=1)
    expected = np.fft.rfft(frames)
    given = signal if len(dims) == 2 else signal[..., None]
    np.testing.assert_allclose(exe(given)[..., 0] + 1j * exe(given)[..., 1], expected, atol=1e-4)
    if dims[-1] is None:
        with pytest.raises(ExecutionError, match=r"expects 1, got 2"):
            exe(np.concatenate([given, given], -1))


SPLITS = [
    pytest.param("Split", {}, 13, [3, 2], [5], [4, 9], id="sizes"),
    pytest.param("Split", {}, 18, [3, 2], [5], [4, 9], id="sizes-18"),
    pytest.param("Split", {"split": [3, 2]}, 11, None, [5], [4, 9], id="attribute"),
    pytest.param("Split", {}, 13, None, [0, 6], [1, 5], id="equal"),
    pytest.param("SplitToSequence", {}, 13, [3, 2], [5], [4, 9], id="sequence"),
]


@pytest.mark.parametrize(("op", "attrs", "opset", "sizes", "fitting", "others"), SPLITS)
def test_parts_that_do_not_make_up_the_axis_are_refused(
    op: str, attrs: dict[str, Any], opset: int, sizes: list[int] | None, fitting: list[int], others: list[int]
) -> None:
    """Split of 9 into 3 and 2 gave the first 5."""
    inputs = ["x"] if sizes is None else ["x", "sizes"]
    weights = {} if sizes is None else {"sizes": np.int64(sizes)}
    is_sequence = op == "SplitToSequence"
    nodes = [node(op, inputs, ["parts"] if is_sequence else ["a", "b"], name="N", **attrs)]
    if is_sequence:
        nodes.append(node("ConcatFromSequence", ["parts"], ["a"], axis=0))

    def of_dims(t: Any) -> onnx.ModelProto:
        return model(nodes, [value("x", [t, 4])], ["a"], weights=weights, opset=opset)

    exe = rl.compile(rl.from_onnx(of_dims("t")))
    for t in fitting:
        assert exe(ones(t, 4)).shape == (t if is_sequence else (t + 1) // 2, 4)
    for t in others:
        with pytest.raises(ExecutionError, match=f"^ONNX node 'N' \\({op}\\).*got {t}"):
            exe(ones(t, 4))
        with pytest.raises(ImportModelError, match=f"parts of .* add up to .*, but axis 0 has size {t}"):
            rl.from_onnx(of_dims(t))


def test_parts_of_sizes_that_the_model_computes_make_up_the_axis() -> None:
    given = [value("x", ["t"]), value("sizes", [2], "int64")]
    exe = rl.compile(rl.from_onnx(model([node("Split", ["x", "sizes"], ["a", "b"], name="N")], given, ["a", "b"])))
    x = np.arange(5, dtype=np.float32)
    assert [part.tolist() for part in exe(x, np.int64([1, 4]))] == [[0], [1, 2, 3, 4]]
    for sizes in ([1, 3], [5, 1], [6, -1]):
        with pytest.raises(ExecutionError, match="ONNX node 'N'"):
            exe(x, np.int64(sizes))


@pytest.mark.parametrize("sizes", [[5], [2, 2, 1]])
def test_as_many_sizes_as_parts(sizes: list[int]) -> None:
    proto = model(
        [node("Split", ["x", "sizes"], ["a", "b"])], [value("x", [5])], ["a"], weights={"sizes": np.int64(sizes)}
    )
    with pytest.raises(ImportModelError, match=f"2 outputs need as many sizes, got {len(sizes)}"):
        rl.from_onnx(proto)


def test_sums_of_a_product_are_broadcast_to_it_only() -> None:
    """The one row of a product was added to each of two."""
    exe = rl.compile(rl.from_onnx(of("Gemm", [ones(1, 2), ones(2, 4), ones(1, 4)])))
    assert exe(ones(3, 2), ones(2, 4), ones(1, 4)).shape == exe(ones(3, 2), ones(2, 4), ones(3, 1)).shape == (3, 4)
    for a, b, c in ((ones(1, 2), ones(2, 4), ones(2, 4)), (ones(3, 2), ones(2, 1), ones(3, 4))):
        with pytest.raises(ExecutionError, match="ONNX node 'N'"):
            exe(a, b, c)
        fixed = [value(f"x{k}", x.shape) for k, x in enumerate((a, b, c))]
        with pytest.raises(ImportModelError, match="cannot be broadcast to"):
            rl.from_onnx(model([node("Gemm", ["x0", "x1", "x2"])], fixed))


@pytest.mark.parametrize(("k", "v"), [((1, 2, 5, 4), (1, 2, 5, 4)), ((2, 2, 5, 4), (2, 1, 5, 4))])
def test_attention_broadcasts_no_batches_or_heads(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    shapes = ((2, 2, 3, 4), k, v)
    exe = rl.compile(rl.from_onnx(of("Attention", [ones(*s) for s in shapes], opset=23)))
    assert exe(ones(2, 2, 3, 4), ones(2, 2, 5, 4), ones(2, 2, 5, 4)).shape == (2, 2, 3, 4)
    with pytest.raises(ExecutionError, match=r"^ONNX node 'N' \(Attention\).*got 1"):
        exe(*(ones(*s) for s in shapes))
    given = [value(f"x{k}", s) for k, s in enumerate(shapes)]
    with pytest.raises(ImportModelError, match=r"axis . of input . has size 1, but must have 2"):
        rl.from_onnx(model([node("Attention", ["x0", "x1", "x2"])], given, opset=23))
