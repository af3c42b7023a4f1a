"""Small ONNX models of the usual kinds, with random weights: what exporters write, quick to compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Dims = Sequence["int | str | None"]
Declared = tuple[str, "Dims | None"]
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
TYPES = {
    "f": FLOAT,
    "i": INT64,
    "i32": onnx.TensorProto.INT32,
    "b": onnx.TensorProto.BOOL,
    "d": onnx.TensorProto.DOUBLE,
}


class Net:
    """A graph in the making: every method adds nodes and gives the name of the result."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)
        self.prefix = f"g{seed}"  # no name of a subgraph is a name outside

    def _name(self, kind: str) -> str:
        return f"{self.prefix}/{kind}_{len(self.nodes) + len(self.weights)}"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        base = self._name(op_type)
        names = [base, *(f"{base}.{k}" for k in range(1, outputs))]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=base, domain=domain, **attrs))
        return base if outputs == 1 else names

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = self._name("const")
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int, scale: float | None = None) -> str:
        fan = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        values = self.rng.standard_normal(shape) * (scale if scale is not None else fan**-0.5)
        return self.const(values, np.float32)

    def dim(self, x: str, axis: int) -> str:
        """One size of x, as a vector of one element."""
        return self.op("Gather", self.op("Shape", x), self.const([axis]))

    def shape(self, *sizes: str | int) -> str:
        return self.op("Concat", *(s if isinstance(s, str) else self.const([s]) for s in sizes), axis=0)

    def reshape(self, x: str, *sizes: str | int) -> str:
        if all(isinstance(size, int) for size in sizes):
            return self.op("Reshape", x, self.const(sizes))
        return self.op("Reshape", x, self.shape(*sizes))

    def linear(self, x: str, width: int, out: int, *, bias: bool = True) -> str:
        y = self.op("MatMul", x, self.const(self.rng.standard_normal((width, out)) * width**-0.5, np.float32))
        return self.op("Add", y, self.weight(out, scale=0.1)) if bias else y

    def conv(self, x: str, channels: int, out: int, kernel: int = 3, *, norm: bool = True, **attrs: Any) -> str:
        group = attrs.get("group", 1)
        attrs.setdefault("pads", [kernel // 2] * 4)
        y = self.op("Conv", x, self.weight(out, channels // group, kernel, kernel), **attrs)
        return self.batch_norm(y, out) if norm else y

    def batch_norm(self, x: str, channels: int) -> str:
        variance = self.const(self.rng.uniform(0.5, 1.5, channels), np.float32)
        ones, small = self.const(self.rng.uniform(0.8, 1.2, channels), np.float32), self.weight(channels, scale=0.1)
        return self.op("BatchNormalization", x, ones, small, self.weight(channels, scale=0.1), variance, epsilon=1e-5)

    def layer_norm(self, x: str, width: int) -> str:
        """As opset 11 has to spell it."""
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centred, self.const(2.0, np.float32)), axes=[-1])
        root = self.op("Sqrt", self.op("Add", variance, self.const(1e-5, np.float32)))
        scaled = self.op("Mul", self.op("Div", centred, root), self.weight(width, scale=1.0))
        return self.op("Add", scaled, self.weight(width, scale=0.1))

    def gelu(self, x: str) -> str:
        erf = self.op("Erf", self.op("Div", x, self.const(np.sqrt(2.0), np.float32)))
        half = self.op("Mul", x, self.op("Add", erf, self.const(1.0, np.float32)))
        return self.op("Mul", half, self.const(0.5, np.float32))

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def heads(self, x: str, count: int, width: int) -> str:
        """(b, s, width) -> (b, count, s, width / count), with sizes read from x."""
        split = self.reshape(x, self.dim(x, 0), self.dim(x, 1), count, width // count)
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, x: str, width: int, count: int, mask: str | None = None) -> str:
        q, k, v = (self.heads(self.linear(x, width, width), count, width) for _ in range(3))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Div", scores, self.const(np.sqrt(width / count), np.float32))
        scores = self.op("Add", scores, mask) if mask else scores
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), v)
        joined = self.reshape(self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.dim(x, 0), self.dim(x, 1), width)
        return self.linear(joined, width, width)

    def encoder_layer(self, x: str, width: int, count: int, mask: str | None = None) -> str:
        x = self.layer_norm(self.op("Add", x, self.attention(x, width, count, mask)), width)
        hidden = self.gelu(self.linear(x, width, 3 * width))
        return self.layer_norm(self.op("Add", x, self.linear(hidden, 3 * width, width)), width)

    def graph(self, inputs: Mapping[str, Declared], outputs: Mapping[str, Declared | str]) -> onnx.GraphProto:
        """`inputs`: name -> (type letter, dimensions); `outputs`: the same, or only the letter."""
        ins = [helper.make_tensor_value_info(name, TYPES[t], dims) for name, (t, dims) in inputs.items()]
        given = {name: (d, None) if isinstance(d, str) else d for name, d in outputs.items()}
        outs = [helper.make_tensor_value_info(name, TYPES[t], dims) for name, (t, dims) in given.items()]
        return helper.make_graph(self.nodes, "net", ins, outs, self.weights)

    def model(
        self, inputs: Mapping[str, Declared], outputs: Mapping[str, str], *, opset: int = 17, ms: bool = False
    ) -> onnx.ModelProto:
        imports = [helper.make_opsetid("", opset), *([helper.make_opsetid("com.microsoft", 1)] if ms else [])]
        return helper.make_model(self.graph(inputs, outputs), opset_imports=imports, ir_version=min(10, opset - 7))


# Transformers


def bert(width: int = 60, count: int = 5, layers: int = 2) -> onnx.ModelProto:
    """An encoder with an attention mask, positions cut from a table, and a pooled output."""
    n = Net()
    length = n.dim("input_ids", 1)
    positions = n.op("Slice", n.const(np.arange(512)[None]), n.const([0]), length, n.const([1]))
    x = n.op("Add", n.op("Gather", n.weight(1000, width, scale=1), "input_ids"),
             n.op("Gather", n.weight(512, width, scale=0.3), positions))  # fmt: skip
    x = n.layer_norm(x, width)
    mask = n.op("Cast", n.op("Unsqueeze", n.op("Unsqueeze", "mask", axes=[1]), axes=[2]), to=FLOAT)
    mask = n.op("Mul", n.op("Sub", n.const(1.0, np.float32), mask), n.const(-10000.0, np.float32))
    for _ in range(layers):
        x = n.encoder_layer(x, width, count, mask)
    first = n.op("Gather", x, n.const(0), axis=1)
    pooled = n.op("Tanh", n.op("Gemm", first, n.weight(width, width), n.weight(width), transB=1))
    ids = ["batch", "sequence"]
    return n.model({"input_ids": ("i", ids), "mask": ("i", ids)}, {x: "f", pooled: "f"}, opset=11)


def vit(patch: int = 8, width: int = 48) -> onnx.ModelProto:
    """Patches by convolution, a class token for every picture, position embeddings resized to the grid."""
    n = Net(1)
    grid = n.conv("image", 3, width, patch, norm=False, strides=[patch] * 2, pads=[0] * 4)
    tokens = n.op("Transpose", n.reshape(grid, n.dim(grid, 0), width, -1), perm=[0, 2, 1])
    token = n.op("Expand", n.weight(1, 1, width, scale=1), n.shape(n.dim("image", 0), 1, width))
    sizes = n.shape(1, width, n.op("Slice", n.op("Shape", grid), n.const([2]), n.const([4])))
    table = n.op("Resize", n.weight(1, width, 5, 5, scale=1), "", "", sizes, mode="linear")
    table = n.op("Transpose", n.reshape(table, 1, width, -1), perm=[0, 2, 1])
    x = n.op("Concat", token, n.op("Add", tokens, table), axis=1)
    for _ in range(2):
        x = n.encoder_layer(x, width, 4)
    head = n.linear(n.op("Gather", x, n.const(0), axis=1), width, 10)
    return n.model({"image": ("f", ["batch", 3, "height", "width"])}, {head: "f"})


def gpt(width: int = 64, count: int = 4, shared: int = 2) -> onnx.ModelProto:
    """A decoder with a KV cache, rotary embeddings, grouped heads and a causal mask by Trilu and by Where."""
    n = Net(2)
    head = width // count
    length, past = n.dim("ids", 1), n.dim("past_k", 2)
    total = n.op("Add", length, past)
    scalar = lambda size: n.op("Squeeze", size, n.const([0]))  # noqa: E731
    positions = n.op("Range", scalar(past), scalar(total), n.const(1))
    rates = n.const(10000.0 ** (-np.arange(0, head, 2) / head), np.float32)
    angles = n.op("Mul", n.op("Unsqueeze", n.op("Cast", positions, to=FLOAT), n.const([1])), rates)
    angles = n.op("Concat", angles, angles, axis=-1)
    cos, sin = n.op("Cos", angles), n.op("Sin", angles)

    def rotate(x: str) -> str:
        low = n.op("Slice", x, n.const([0]), n.const([head // 2]), n.const([3]))
        high = n.op("Slice", x, n.const([head // 2]), n.const([2**63 - 1]), n.const([3]))
        turned = n.op("Concat", n.op("Neg", high), low, axis=-1)
        return n.op("Add", n.op("Mul", x, cos), n.op("Mul", turned, sin))

    def repeat(x: str) -> str:
        """(b, shared, t, d) -> (b, count, t, d)."""
        times = count // shared
        wide = n.op("Expand", n.op("Unsqueeze", x, n.const([2])),
                    n.shape(n.dim(x, 0), shared, times, n.dim(x, 2), head))  # fmt: skip
        return n.reshape(wide, n.dim(x, 0), count, n.dim(x, 2), head)

    x = n.op("Gather", n.weight(300, width, scale=1), "ids")
    square = n.op("Expand", n.const(-1e9, np.float32), n.shape(total, total))
    upper = n.op("Slice", n.op("Trilu", square, n.const(1), upper=1), past, total, n.const([0]))
    seen = n.op("LessOrEqual", n.op("Unsqueeze", n.op("Range", n.const(0), scalar(total), n.const(1)), n.const([0])),
                n.op("Unsqueeze", positions, n.const([1])))  # fmt: skip
    presents = []
    for layer, mask in enumerate((upper, seen)):
        h = n.layer_norm(x, width)
        q = rotate(n.heads(n.linear(h, width, width), count, width))
        k = rotate(n.heads(n.linear(h, width, shared * head), shared, shared * head))
        v = n.heads(n.linear(h, width, shared * head), shared, shared * head)
        if layer == 0:
            k, v = (n.op("Concat", old, new, axis=2) for old, new in (("past_k", k), ("past_v", v)))
            presents = [k, v]
        else:
            k, v = (n.op("Concat", old, new, axis=2) for old, new in (("past_v", k), ("past_k", v)))
        scores = n.op("MatMul", q, n.op("Transpose", repeat(k), perm=[0, 1, 3, 2]))
        scores = n.op("Mul", scores, n.const(head**-0.5, np.float32))
        scores = n.op("Add", scores, mask) if layer == 0 else n.op("Where", mask, scores, n.const(-1e9, np.float32))
        mixed = n.op("Transpose", n.op("MatMul", n.op("Softmax", scores, axis=-1), repeat(v)), perm=[0, 2, 1, 3])
        x = n.op("Add", x, n.linear(n.reshape(mixed, 0, 0, width), width, width))
        gate, up = n.op("Split", n.linear(n.layer_norm(x, width), width, 4 * width), outputs=2, axis=-1)
        x = n.op("Add", x, n.linear(n.op("Mul", n.silu(gate), up), 2 * width, width))
    logits = n.linear(n.layer_norm(x, width), width, 300, bias=False)
    cache: Declared = ("f", ["batch", shared, "past", head])
    return n.model({"ids": ("i", ["batch", "step"]), "past_k": cache, "past_v": cache},
                   {logits: "f", presents[0]: "f", presents[1]: "f"}, opset=14)  # fmt: skip


def swin(width: int = 32, window: int = 4) -> onnx.ModelProto:
    """Windows of a rolled grid: Slice and Concat roll, Reshape and Transpose cut windows."""
    n = Net(3)
    height, columns = n.dim("x", 1), n.dim("x", 2)
    size, shift = n.const([window]), window // 2
    rows_of, columns_of = n.op("Div", height, size), n.op("Div", columns, size)

    def roll(x: str, by: int) -> str:
        for axis in (1, 2):
            tail = n.op("Slice", x, n.const([by]), n.const([2**31]), n.const([axis]))
            front = n.op("Slice", x, n.const([0]), n.const([by]), n.const([axis]))
            x = n.op("Concat", tail, front, axis=axis)
        return x

    x = "x"
    for by in (0, shift):
        y = roll(x, by) if by else x
        y = n.reshape(y, n.dim("x", 0), rows_of, window, columns_of, window, width)
        y = n.reshape(n.op("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), -1, window * window, width)
        y = n.attention(y, width, 4)
        y = n.reshape(y, n.dim("x", 0), rows_of, columns_of, window, window, width)
        y = n.reshape(n.op("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), n.dim("x", 0), height, columns, width)
        y = roll(y, -by) if by else y
        x = n.op("LayerNormalization", n.op("Add", x, y), n.weight(width, scale=1), n.weight(width), axis=-1)
    return n.model({"x": ("f", ["batch", "height", "width", width])}, {x: "f"})


def mixture_of_experts(width: int = 24, experts: int = 4) -> onnx.ModelProto:
    """Two experts of four for every token: TopK, weights scattered into a gate, all experts by Einsum."""
    n = Net(4)
    scores = n.op("Softmax", n.linear("x", width, experts), axis=-1)
    best, which = n.op("TopK", scores, n.const([2]), outputs=2, axis=-1)
    best = n.op("Div", best, n.op("ReduceSum", best, n.const([-1])))
    gate = n.op("ScatterElements", n.op("Mul", scores, n.const(0.0, np.float32)), which, best, axis=-1)
    hidden = n.op("Relu", n.op("Einsum", "x", n.weight(experts, width, 2 * width), equation="bsd,edf->bsef"))
    y = n.op("Einsum", hidden, n.weight(experts, 2 * width, width), gate, equation="bsef,efd,bse->bsd")
    return n.model({"x": ("f", ["b", "s", width])}, {y: "f", which: "i"})


# Convolutional networks


def mobilenet() -> onnx.ModelProto:
    """Inverted residuals: pointwise, depthwise, squeeze-and-excite; ReLU6 and hard swish."""
    n = Net(5)
    relu6 = lambda x: n.op("Clip", x, n.const(0.0, np.float32), n.const(6.0, np.float32))  # noqa: E731
    x = relu6(n.conv("image", 3, 12, strides=[2, 2]))
    for channels, out, kernel, stride in ((12, 12, 3, 1), (12, 20, 5, 2), (20, 20, 3, 1), (20, 28, 3, 2)):
        wide = channels * 3
        y = n.op("HardSwish", n.conv(x, channels, wide, 1))
        y = relu6(n.conv(y, wide, wide, kernel, group=wide, strides=[stride] * 2))
        squeezed = n.op("Relu", n.op("Conv", n.op("GlobalAveragePool", y), n.weight(8, wide, 1, 1), n.weight(8)))
        excited = n.op("HardSigmoid", n.op("Conv", squeezed, n.weight(wide, 8, 1, 1), n.weight(wide)), alpha=1 / 6)
        y = n.conv(n.op("Mul", y, excited), wide, out, 1)
        x = n.op("Add", x, y) if (channels, stride) == (out, 1) else y
    flat = n.op("Flatten", n.op("GlobalAveragePool", x))
    scores = n.op("Gemm", flat, n.weight(10, 28), n.weight(10), transB=1)
    return n.model({"image": ("f", ["batch", 3, "height", "width"])}, {scores: "f"})


def resnet() -> onnx.ModelProto:
    """Bottlenecks with projections; a pool with padding in front, at any size."""
    n = Net(6)
    x = n.op("Relu", n.conv("image", 3, 16, 7, strides=[2, 2]))
    x = n.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for channels, out, stride in ((16, 32, 1), (32, 32, 1), (32, 48, 2)):
        y = n.op("Relu", n.conv(x, channels, out // 4, 1))
        y = n.op("Relu", n.conv(y, out // 4, out // 4, strides=[stride] * 2))
        y = n.conv(y, out // 4, out, 1)
        side = x if channels == out else n.conv(x, channels, out, 1, strides=[stride] * 2)
        x = n.op("Relu", n.op("Add", y, side))
    pooled = n.op("ReduceMean", x, axes=[2, 3], keepdims=0)
    scores = n.op("Softmax", n.linear(pooled, 48, 7), axis=1)
    return n.model({"image": ("f", ["n", 3, "h", "w"])}, {scores: "f", x: "f"})


def unet(up: str) -> onnx.ModelProto:
    """Two levels down and up; `up`: by transposed convolution, by Resize with scales, or to the other side's sizes."""
    n = Net(7)

    def block(x: str, channels: int, out: int) -> str:
        return n.op("Relu", n.conv(n.op("Relu", n.conv(x, channels, out)), out, out))

    def enlarge(x: str, like: str, channels: int, out: int) -> str:
        if up == "transposed":
            return n.op("ConvTranspose", x, n.weight(channels, out, 2, 2), n.weight(out), strides=[2, 2])
        if up == "scales":
            big = n.op("Resize", x, "", n.const([1, 1, 2, 2], np.float32), mode="nearest", nearest_mode="floor",
                       coordinate_transformation_mode="asymmetric")  # fmt: skip
        else:
            ends = n.op("Slice", n.op("Shape", like), n.const([2]), n.const([4]))
            sizes = n.op("Concat", n.op("Slice", n.op("Shape", x), n.const([0]), n.const([2])), ends, axis=0)
            big = n.op("Resize", x, "", "", sizes, mode="linear", coordinate_transformation_mode="half_pixel")
        return n.conv(big, channels, out, 1, norm=False)

    a = block("image", 3, 8)
    b = block(n.op("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 8, 16)
    c = block(n.op("MaxPool", b, kernel_shape=[2, 2], strides=[2, 2]), 16, 24)
    x = block(n.op("Concat", b, enlarge(c, b, 24, 16), axis=1), 32, 16)
    x = block(n.op("Concat", a, enlarge(x, a, 16, 8), axis=1), 16, 8)
    mask = n.op("Sigmoid", n.conv(x, 8, 1, 1, norm=False))
    return n.model({"image": ("f", ["batch", 3, "height", "width"])}, {mask: "f"})


def crnn() -> onnx.ModelProto:
    """A text recogniser: convolutions that fold the height, two recurrent layers, log probabilities per column."""
    n = Net(8)
    x = n.op("Relu", n.conv("x", 1, 8))
    x = n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = n.op("LeakyRelu", n.conv(x, 8, 16), alpha=0.1)
    x = n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 1], pads=[0, 1, 0, 1])
    x = n.op("Relu", n.op("Conv", x, n.weight(20, 16, 4, 1), n.weight(20)))
    x = n.op("Transpose", n.op("Squeeze", x, n.const([2])), perm=[2, 0, 1])  # (w, n, c)
    y, _, _ = n.op("LSTM", x, n.weight(2, 48, 20), n.weight(2, 48, 12), n.weight(2, 96, scale=0.1),
                   outputs=3, hidden_size=12, direction="bidirectional")  # fmt: skip
    y = n.reshape(n.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, 24)
    y, last = n.op("GRU", y, n.weight(1, 30, 24), n.weight(1, 30, 10), n.weight(1, 60, scale=0.1),
                   outputs=2, hidden_size=10, linear_before_reset=1)  # fmt: skip
    scores = n.op("LogSoftmax", n.linear(n.op("Squeeze", y, n.const([1])), 10, 17), axis=2)
    return n.model({"x": ("f", ["n", 1, 16, "w"])}, {scores: "f", last: "f"})


def super_resolution() -> onnx.ModelProto:
    n = Net(9)
    x = n.op("PRelu", n.conv("x", 3, 16, 5, norm=False), n.weight(16, 1, 1, scale=0.2))
    x = n.op("DepthToSpace", n.conv(x, 16, 12, norm=False), blocksize=2, mode="CRD")
    grown = n.op("Resize", "x", "", n.const([1, 1, 2, 2], np.float32), mode="cubic", cubic_coeff_a=-0.75)
    y = n.op("Clip", n.op("Add", x, grown), n.const(-1.0, np.float32), n.const(1.0, np.float32))
    return n.model({"x": ("f", ["n", 3, "h", "w"])}, {y: "f"})


def diffusion_block() -> onnx.ModelProto:
    """A residual block with group normalization as exporters spell it, and a sinusoidal time embedding."""
    n = Net(10)

    def group_norm(x: str) -> str:
        flat = n.op("InstanceNormalization", n.reshape(x, 0, 4, -1), n.const(np.ones(4), np.float32),
                    n.const(np.zeros(4), np.float32))  # fmt: skip
        same = n.op("Reshape", flat, n.op("Shape", x))
        return n.op("Add", n.op("Mul", same, n.weight(16, 1, 1, scale=1)), n.weight(16, 1, 1))

    rates = n.const(np.exp(-np.arange(8) / 2), np.float32)
    angle = n.op("Mul", n.op("Unsqueeze", n.op("Cast", "t", to=FLOAT), n.const([1])), rates)
    time = n.silu(n.linear(n.op("Concat", n.op("Sin", angle), n.op("Cos", angle), axis=1), 16, 16))
    y = n.conv(n.silu(group_norm("x")), 16, 16, norm=False)
    y = n.op("Add", y, n.op("Unsqueeze", time, n.const([2, 3])))
    y = n.conv(n.silu(group_norm(y)), 16, 16, norm=False)
    return n.model({"x": ("f", ["b", 16, "h", "w"]), "t": ("i", ["b"])}, {n.op("Add", "x", y): "f"})


def conformer() -> onnx.ModelProto:
    """Along time: reflected padding, dilated and depthwise 1-D convolutions, gated linear units, attention."""
    n = Net(11)
    x = n.op("Conv", n.op("Pad", "x", n.const([0, 0, 2, 0, 0, 2]), mode="reflect"), n.weight(16, 10, 5), strides=[2])
    for dilation in (1, 2, 4):
        wide = n.op("Conv", x, n.weight(32, 16, 3), dilations=[dilation], pads=[dilation, dilation])
        a, b = n.op("Split", wide, n.const([16, 16]), outputs=2, axis=1)
        y = n.op("Mul", a, n.op("Sigmoid", b))
        x = n.op("Add", x, n.op("Conv", y, n.weight(16, 1, 3), group=16, auto_pad="SAME_UPPER"))
    x = n.encoder_layer(n.op("Transpose", x, perm=[0, 2, 1]), 16, 2)
    return n.model({"x": ("f", ["batch", 10, "time"])}, {x: "f"})


def quantized_convolution() -> onnx.ModelProto:
    """Static int8 as exporters write it: QuantizeLinear and DequantizeLinear around a convolution and a product."""
    n = Net(12)

    def fake(x: str, scale: float) -> str:
        s, z = n.const(scale, np.float32), n.const(120, np.uint8)
        return n.op("DequantizeLinear", n.op("QuantizeLinear", x, s, z), s, z)

    weights = n.const(n.rng.integers(-127, 128, (8, 3, 3, 3)), np.int8)
    w = n.op("DequantizeLinear", weights, n.const(np.full(8, 0.01), np.float32), n.const(np.zeros(8), np.int8), axis=0)
    y = fake(n.op("Relu", n.op("Conv", fake("x", 0.02), w, pads=[1] * 4)), 0.05)
    scores = n.linear(n.op("GlobalMaxPool", y) and n.op("ReduceMean", y, axes=[2, 3], keepdims=0), 8, 5)
    return n.model({"x": ("f", ["n", 3, "h", "w"])}, {scores: "f"})


def quantized_recurrence(width: int = 12, hidden: int = 8) -> onnx.ModelProto:
    """What onnxruntime's dynamic quantization makes of a bidirectional LSTM and of the product after it, with weights
    of 7 bits: without VNNI it sums products of pairs in 16 bits, and cuts off those of 8."""
    n = Net(43)

    def weights(*shape: int) -> str:
        return n.const(n.rng.integers(-63, 64, shape), np.int8)

    scales, zeros = n.const([0.004, 0.003], np.float32), n.const([0, 0], np.int8)
    y, h = n.op("DynamicQuantizeLSTM", "x", weights(2, width, 4 * hidden), weights(2, hidden, 4 * hidden),
                n.weight(2, 8 * hidden, scale=0.1), "", "", "", "", scales, zeros, scales, zeros, outputs=2,
                hidden_size=hidden, direction="bidirectional", domain="com.microsoft")  # fmt: skip
    y = n.reshape(n.op("Transpose", y, perm=[0, 2, 1, 3]), 0, 0, 2 * hidden)
    scores = n.op("DynamicQuantizeMatMul", y, weights(2 * hidden, 5), n.const(0.01, np.float32), "",
                  n.weight(5, scale=0.1), domain="com.microsoft")  # fmt: skip
    return n.model({"x": ("f", ["steps", "batch", width])}, {scores: "f", h: "f"}, ms=True)


# Sizes and control flow that depend on data


def all_unnamed() -> onnx.ModelProto:
    """No dimension has a name: equal sizes show only when the model runs."""
    n = Net(13)
    y = n.op("Add", n.op("MatMul", "a", "b"), "c")
    y = n.op("Softmax", n.op("Tanh", y), axis=-1)
    z = n.op("ReduceSum", n.op("MatMul", y, n.op("Transpose", "b", perm=[0, 2, 1])), n.const([0]), keepdims=0)
    return n.model({"a": ("f", [None] * 3), "b": ("f", [None] * 3), "c": ("f", [None])}, {y: "f", z: "f"})


def all_fixed() -> onnx.ModelProto:
    n = Net(14)
    x = n.reshape(n.op("Relu", n.conv("x", 3, 4)), 2, 4 * 6 * 5)
    return n.model({"x": ("f", [2, 3, 6, 5])}, {n.linear(x, 120, 3): "f"})


def sizes_from_shapes() -> onnx.ModelProto:
    """Slice, Gather, Expand, ConstantOfShape, Tile, Range, Split and Pad whose arguments are computed from sizes."""
    n = Net(15)
    rows, columns = n.dim("x", 0), n.dim("x", 1)
    half = n.op("Div", n.op("Add", rows, n.const([1])), n.const([2]))
    top = n.op("Slice", "x", n.const([0]), half, n.const([0]))
    odd = n.op("Slice", "x", n.const([0]), n.const([2**31]), n.const([0]), n.const([2]))
    back = n.op("Slice", "x", n.const([-1]), n.const([-(2**31)]), n.const([1]), n.const([-1]))
    zeros = n.op("ConstantOfShape", n.shape(half, columns), value=numpy_helper.from_array(np.float32([0.5])))
    both = n.op("Add", n.op("Mul", top, zeros), odd)
    last = n.op("Gather", "x", n.op("Sub", rows, n.const([1])), axis=0)
    wide = n.op("Expand", last, n.shape(half, columns))
    tiled = n.op("Tile", n.op("Add", both, wide), n.const([1, 2]))
    mirrored = n.op("Slice", tiled, n.const([0]), columns, n.const([1]))
    numbers = n.op("Range", n.const(0), n.op("Squeeze", columns, n.const([0])), n.const(1))
    padded = n.op("Pad", mirrored, n.op("Concat", n.const([0, 0]), n.op("Sub", rows, half), n.const([0]), axis=0))
    y = n.op("Mul", n.op("Add", padded, back), n.op("Cast", numbers, to=FLOAT))
    return n.model({"x": ("f", ["rows", "columns"])}, {y: "f", mirrored: "f"})


def sizes_from_data() -> onnx.ModelProto:
    """NonZero, Compress, TopK with k from the sizes, OneHot, CumSum: results whose sizes depend on values."""
    n = Net(16)
    positive = n.op("Greater", "x", n.const(0.0, np.float32))
    where = n.op("NonZero", positive)  # (2, k)
    values = n.op("GatherND", "x", n.op("Transpose", where, perm=[1, 0]))
    total = n.op("ReduceSum", n.op("Exp", values), keepdims=1)
    k = n.op("Min", n.dim("x", 1), n.const([3]))
    best, at = n.op("TopK", "x", k, outputs=2, axis=1)
    rows = n.op("Compress", "x", n.op("Greater", n.op("ReduceSum", "x", n.const([1]), keepdims=0),
                                      n.const(0.0, np.float32)), axis=0)  # fmt: skip
    hot = n.op("OneHot", at, n.dim("x", 1), n.const([0.0, 1.0], np.float32))
    counted = n.op("CumSum", n.op("ReduceSum", hot, n.const([0]), keepdims=0), n.const(1))
    return n.model({"x": ("f", ["rows", "columns"])},
                   {where: "i", total: "f", best: "f", rows: "f", counted: "f"})  # fmt: skip


def detection() -> onnx.ModelProto:
    """Boxes and scores of a detector, the best of them, and what non-maximum suppression leaves."""
    n = Net(17)
    corner, size = n.op("Split", "boxes", n.const([2, 2]), outputs=2, axis=2)
    size = n.op("Mul", n.op("Abs", size), n.const(0.5, np.float32))
    boxes = n.op("Concat", n.op("Sub", corner, size), n.op("Add", corner, size), axis=2)
    scores = n.op("Transpose", n.op("Sigmoid", "scores"), perm=[0, 2, 1])
    kept = n.op("NonMaxSuppression", boxes, scores, n.const([20]), n.const([0.4], np.float32),
                n.const([0.3], np.float32))  # fmt: skip
    batch_box = n.op("Gather", kept, n.const([0, 2]), axis=1)
    found = n.op("GatherND", boxes, batch_box)
    return n.model({"boxes": ("f", ["n", "k", 4]), "scores": ("f", ["n", "k", 3])}, {kept: "i", found: "f"})


def graph_network() -> onnx.ModelProto:
    """Messages along edges, added up at their targets."""
    n = Net(18)
    source, target = n.op("Split", "edges", outputs=2, axis=0)
    messages = n.op("Relu", n.linear(n.op("Gather", "x", n.op("Squeeze", source, n.const([0]))), 6, 8))
    zeros = n.op("ConstantOfShape", n.shape(n.dim("x", 0), 8))
    places = n.op("Transpose", target, perm=[1, 0])
    added = n.op("ScatterND", zeros, places, messages, reduction="add")
    y = n.op("Add", n.linear("x", 6, 8), added)
    return n.model({"x": ("f", ["nodes", 6]), "edges": ("i", [2, "edges"])}, {y: "f"}, opset=16)


def branches() -> onnx.ModelProto:
    """If on a value and If on a size; branches read values from outside and give results of different sizes."""
    n = Net(19)
    mean = n.op("ReduceMean", "x", keepdims=0)
    then, other = Net(20), Net(21)
    high = then.op("Mul", "x", then.const(2.0, np.float32))
    low = other.op("Slice", other.op("Tanh", "x"), other.const([0]), other.const([2]), other.const([0]))
    y = n.op("If", n.op("Greater", mean, n.const(0.0, np.float32)),
             then_branch=then.graph({}, {high: "f"}), else_branch=other.graph({}, {low: "f"}))  # fmt: skip
    then, other = Net(22), Net(23)
    summed = then.op("ReduceSum", y, then.const([0]), keepdims=0)
    first = other.op("Gather", y, other.const(0), axis=0)
    many = n.op("Greater", n.op("Squeeze", n.dim(y, 0), n.const([0])), n.const(3))
    z = n.op("If", many, then_branch=then.graph({}, {summed: "f"}), else_branch=other.graph({}, {first: "f"}))
    return n.model({"x": ("f", ["rows", 4])}, {y: "f", z: "f"})


def counted_loop() -> onnx.ModelProto:
    """A Loop with a trip count from the input, a carried state and a scan output; a Scan beside it."""
    body = Net(24)
    state = body.op("Tanh", body.op("Add", body.op("MatMul", "state_in", body.weight(5, 5)), "x"))
    row = body.op("ReduceSum", state, body.const([0]), keepdims=0)
    keep = body.op("Identity", "go")
    n = Net(25)
    loop = body.graph(
        {"i": ("i", []), "go": ("b", []), "state_in": ("f", None)}, {keep: "b", state: "f", row: ("f", [5])}
    )
    final, rows = n.op("Loop", "trips", "", "x", outputs=2, body=loop)
    step = Net(26)
    total = step.op("Add", "total_in", "piece")
    out = step.op("Mul", total, "piece")
    scan = step.graph({"total_in": ("f", [5]), "piece": ("f", [5])}, {total: "f", out: "f"})
    last, scanned = n.op("Scan", n.const(np.zeros(5), np.float32), "x", outputs=2, body=scan, num_scan_inputs=1)
    return n.model({"x": ("f", ["rows", 5]), "trips": ("i", [])},
                   {final: "f", rows: "f", last: "f", scanned: "f"})  # fmt: skip


def greedy_decoder(width: int = 24) -> onnx.ModelProto:
    """A Loop that appends a token to a growing sequence until the end token or the limit comes."""
    body = Net(27)
    embedded = body.op("Gather", body.weight(11, width, scale=1), "tokens")
    context = body.op("Add", body.op("ReduceMean", embedded, axes=[1], keepdims=0), "memory")
    scores = body.linear(body.op("Tanh", body.linear(context, width, width)), width, 11)
    token = body.op("ArgMax", scores, axis=1, keepdims=1)
    longer = body.op("Concat", "tokens", token, axis=1)
    ended = body.op("ReduceMin", body.op("Cast", body.op("Equal", token, body.const(3)), to=INT64), keepdims=0)
    go_on = body.op("Not", body.op("Cast", ended, to=onnx.TensorProto.BOOL))
    graph = body.graph({"i": ("i", []), "go": ("b", []), "tokens": ("i", [None, None])}, {go_on: "b", longer: "i"})
    n = Net(28)
    memory = n.op("ReduceMean", n.linear("x", 7, width), axes=[1], keepdims=0)
    memory = n.op("Identity", memory)
    n.nodes[-1].output[0] = "memory"
    start = n.op("ConstantOfShape", n.shape(n.dim("x", 0), 1), value=numpy_helper.from_array(np.int64([1])))
    tokens = n.op("Loop", n.const(12), n.const(True, np.bool_), start, body=graph)
    return n.model({"x": ("f", ["batch", "frames", 7])}, {tokens: "i"})


def recommender() -> onnx.ModelProto:
    """Embedding bags, crosses of features, a small multilayer perceptron; in double precision at the end."""
    n = Net(29)
    bag = n.op("ReduceSum", n.op("Gather", n.weight(50, 8, scale=1), "items"), n.const([1]), keepdims=0)
    dense = n.op("Relu", n.linear("features", 5, 8))
    cross = n.op("ReduceSum", n.op("Mul", bag, dense), n.const([1]))
    x = n.op("Concat", bag, dense, cross, axis=1)
    x = n.op("Selu", n.op("Elu", n.linear(x, 17, 12)))
    y = n.op("Cast", n.op("Sigmoid", n.linear(x, 12, 1)), to=onnx.TensorProto.DOUBLE)
    y = n.op("Log", n.op("Div", y, n.op("Sub", n.const(1.0, np.float64), y)))
    return n.model({"items": ("i", ["n", "k"]), "features": ("f", ["n", 5])}, {y: "d"})


def contributed_ops(width: int = 32) -> onnx.ModelProto:
    """What onnxruntime's own optimizer writes: fused normalizations, Gelu, FusedMatMul, fused attention."""
    n = Net(30)
    x, mean, deviation, total = n.op("SkipLayerNormalization", "x", "skip", n.weight(width, scale=1), n.weight(width),
                                     outputs=4, domain="com.microsoft")  # fmt: skip
    n.nodes[-1].output[:] = ["" if name in (mean, deviation) else name for name in n.nodes[-1].output]
    x = n.op("Gelu", n.linear(x, width, width), domain="com.microsoft")
    x = n.op("BiasGelu", x, n.weight(width), domain="com.microsoft")
    scores = n.op("FusedMatMul", x, total, transB=1, alpha=0.2, domain="com.microsoft")
    x = n.op("MatMul", n.op("Softmax", scores, axis=-1), x)
    x = n.op("SimplifiedLayerNormalization", x, n.weight(width, scale=1), axis=-1, epsilon=1e-6)
    inputs: Dims = ["batch", "steps", width]
    return n.model({"x": ("f", inputs), "skip": ("f", inputs)}, {x: "f", total: "f"}, ms=True)


def spectrogram() -> onnx.ModelProto:
    """Framing, a Hann window, a Fourier transform, mel filters, logarithm."""
    n = Net(31)
    window = n.op("HannWindow", n.const(64))
    frames = n.op("STFT", n.op("Unsqueeze", "audio", n.const([2])), n.const(32), window, onesided=1)
    power = n.op("ReduceSum", n.op("Mul", frames, frames), n.const([3]), keepdims=0)
    mel = n.op("MatMul", power, n.const(n.rng.random((33, 12)), np.float32))
    log = n.op("Log", n.op("Max", mel, n.const(1e-6, np.float32)))
    centred = n.op("Sub", log, n.op("ReduceMean", log, axes=[1]))
    return n.model({"audio": ("f", ["batch", "samples"])}, {centred: "f"})


def relative_positions(width: int = 32, count: int = 4) -> onnx.ModelProto:
    """As in T5: a bias by bucketed distance (integer comparisons, a logarithm), RMS norm, cross-attention."""
    n = Net(32)
    one = np.float32

    def norm(x: str) -> str:
        mean = n.op("ReduceMean", n.op("Mul", x, x), axes=[-1])
        root = n.op("Sqrt", n.op("Add", mean, n.const(1e-6, one)))
        return n.op("Mul", n.op("Div", x, root), n.weight(width, scale=1))

    def bias(length: str) -> str:
        places = n.op("Range", n.const(0), n.op("Squeeze", length, n.const([0])), n.const(1))
        far = n.op("Sub", n.op("Unsqueeze", places, n.const([0])), n.op("Unsqueeze", places, n.const([1])))
        after = n.op("Mul", n.op("Cast", n.op("Greater", far, n.const(0)), to=INT64), n.const(8))
        far = n.op("Abs", far)
        ratio = n.op("Log", n.op("Div", n.op("Cast", far, to=FLOAT), n.const(4.0, one)))
        steps = n.op("Cast", n.op("Mul", n.op("Div", ratio, n.const(np.log(8.0), one)), n.const(4.0, one)), to=INT64)
        large = n.op("Min", n.op("Add", steps, n.const(4)), n.const(7))
        bucket = n.op("Add", after, n.op("Where", n.op("Less", far, n.const(4)), far, large))
        values = n.op("Gather", n.weight(16, count, scale=1), bucket)
        return n.op("Unsqueeze", n.op("Transpose", values, perm=[2, 0, 1]), n.const([0]))

    x = n.op("Add", "x", n.attention(norm("x"), width, count, bias(n.dim("x", 1))))
    q, k, v = (n.heads(n.linear(y, width, width, bias=False), count, width) for y in (norm(x), "memory", "memory"))
    weights = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    mixed = n.op("Transpose", n.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    y = n.op("Add", x, n.linear(n.reshape(mixed, n.dim(x, 0), n.dim(x, 1), width), width, width))
    shapes: dict[str, Declared] = {"x": ("f", ["b", "s", width]), "memory": ("f", ["b", "t", width])}
    return n.model(shapes, {norm(y): "f"}, opset=15)


def text_tower(width: int = 32) -> onnx.ModelProto:
    """As in CLIP: a causal mask from ConstantOfShape and Trilu, quick GELU, the state at the end token of each text."""
    n = Net(33)
    length = n.dim("ids", 1)
    x = n.op("Gather", n.weight(100, width, scale=1), "ids")
    x = n.op("Add", x, n.op("Slice", n.weight(77, width, scale=1), n.const([0]), length, n.const([0])))
    low = numpy_helper.from_array(np.float32([-3e38]))
    mask = n.op("Trilu", n.op("ConstantOfShape", n.shape(length, length), value=low), n.const(1), upper=1)
    x = n.op("Add", x, n.attention(n.layer_norm(x, width), width, 4, mask))
    hidden = n.linear(x, width, 2 * width)
    hidden = n.op("Mul", hidden, n.op("Sigmoid", n.op("Mul", hidden, n.const(1.702, np.float32))))
    x = n.layer_norm(n.op("Add", x, n.linear(hidden, 2 * width, width)), width)
    end = n.op("ArgMax", "ids", axis=1, keepdims=1)
    rows = n.op("Unsqueeze", n.op("Range", n.const(0), n.op("Squeeze", n.dim("ids", 0), n.const([0])), n.const(1)),
                n.const([1]))  # fmt: skip
    state = n.op("GatherND", x, n.op("Concat", rows, end, axis=1))
    norm = n.op("ReduceL2", state, axes=[1], keepdims=1)
    return n.model({"ids": ("i", ["texts", "length"])}, {n.op("Div", state, norm): "f"}, opset=14)


def yolo_head() -> onnx.ModelProto:
    """Two scales with anchors on a grid made of Range and Expand, joined to one list of boxes."""
    n = Net(34)
    found = []
    x = n.op("Relu", n.conv("image", 3, 12, strides=[4, 4]))
    for stride in (4, 8):
        x = n.silu(n.conv(x, 12, 12, strides=[1, 1] if stride == 4 else [2, 2]))
        raw = n.conv(x, 12, 2 * 7, 1, norm=False)
        height, width = n.dim(raw, 2), n.dim(raw, 3)
        raw = n.op("Transpose", n.reshape(raw, n.dim(raw, 0), 2, 7, height, width), perm=[0, 1, 3, 4, 2])
        lines = [
            n.op("Cast", n.op("Range", n.const(0), n.op("Squeeze", size, n.const([0])), n.const(1)), to=FLOAT)
            for size in (height, width)
        ]
        rows = n.op("Expand", n.op("Unsqueeze", lines[0], n.const([1])), n.shape(height, width))
        columns = n.op("Expand", n.op("Unsqueeze", lines[1], n.const([0])), n.shape(height, width))
        grid = n.op("Concat", *(n.op("Unsqueeze", v, n.const([2])) for v in (columns, rows)), axis=2)
        place, size, scores = n.op("Split", n.op("Sigmoid", raw), n.const([2, 2, 3]), outputs=3, axis=4)
        place = n.op("Mul", n.op("Add", place, grid), n.const(float(stride), np.float32))
        anchors = n.const(n.rng.uniform(4, 40, (1, 2, 1, 1, 2)), np.float32)
        boxes = n.op("Concat", place, n.op("Mul", n.op("Mul", size, size), anchors), scores, axis=4)
        found.append(n.reshape(boxes, n.dim("image", 0), -1, 7))
    return n.model({"image": ("f", ["n", 3, "h", "w"])}, {n.op("Concat", *found, axis=1): "f"})


def two_stage_detector() -> onnx.ModelProto:
    """Regions that pass a threshold are cut out of the features (NonZero, Gather, RoiAlign) and classified."""
    n = Net(35)
    features = n.op("Relu", n.conv("image", 3, 8, strides=[2, 2]))
    chosen = n.op("NonZero", n.op("Greater", "scores", n.const(0.0, np.float32)))
    chosen = n.op("Squeeze", chosen, n.const([0]))
    boxes = n.op("Gather", "boxes", chosen)
    zeros = n.op("ConstantOfShape", n.op("Shape", chosen), value=numpy_helper.from_array(np.int64([0])))
    cut = n.op("RoiAlign", features, boxes, zeros, output_height=3, output_width=3, sampling_ratio=2, spatial_scale=0.5)
    scores = n.op("Softmax", n.linear(n.op("Flatten", cut), 72, 5), axis=1)
    inputs: dict[str, Declared] = {
        "image": ("f", [1, 3, "h", "w"]), "boxes": ("f", ["k", 4]), "scores": ("f", ["k"]),
    }  # fmt: skip
    return n.model(inputs, {scores: "f", boxes: "f"}, opset=16)


def tagger() -> onnx.ModelProto:
    """A bidirectional LSTM over sentences of different lengths, with initial states, and a Viterbi-like maximum."""
    n = Net(36)
    x = n.op("Transpose", n.op("Gather", n.weight(60, 10, scale=1), "ids"), perm=[1, 0, 2])
    state = n.op("ConstantOfShape", n.shape(2, n.dim("ids", 0), 8))
    y, h, _ = n.op("LSTM", x, n.weight(2, 32, 10), n.weight(2, 32, 8), n.weight(2, 64, scale=0.2), "lengths", state,
                   state, outputs=3, hidden_size=8, direction="bidirectional")  # fmt: skip
    y = n.reshape(n.op("Transpose", y, perm=[2, 0, 1, 3]), n.dim("ids", 0), n.dim("ids", 1), 16)
    scores = n.linear(y, 16, 6)
    paths = n.op("ReduceMax", n.op("Add", n.op("Unsqueeze", scores, n.const([3])), n.weight(6, 6, scale=1)), axes=[2])
    inputs: dict[str, Declared] = {"ids": ("i", ["n", "t"]), "lengths": ("i32", ["n"])}
    return n.model(inputs, {paths: "f", h: "f"}, opset=14)


def vocoder() -> onnx.ModelProto:
    """As in HiFi-GAN: transposed 1-D convolutions, dilated residual blocks, a tanh at the end."""
    n = Net(37)
    x = n.op("Conv", "mel", n.weight(16, 20, 7), n.weight(16), pads=[3, 3])
    for channels, rate in ((16, 4), (8, 2)):
        x = n.op("LeakyRelu", x, alpha=0.1)
        kernel = n.weight(channels, channels // 2, 2 * rate)
        x = n.op("ConvTranspose", x, kernel, n.weight(channels // 2), strides=[rate], pads=[rate // 2, rate // 2])
        for dilation in (1, 3):
            y = n.op("LeakyRelu", x, alpha=0.1)
            y = n.op("Conv", y, n.weight(channels // 2, channels // 2, 3), dilations=[dilation], pads=[dilation] * 2)
            x = n.op("Add", x, y)
    wave = n.op("Tanh", n.op("Conv", x, n.weight(1, 4, 7), pads=[3, 3]))
    return n.model({"mel": ("f", ["n", 20, "frames"])}, {wave: "f"})


def video_network() -> onnx.ModelProto:
    """3-D convolutions and pools over time, height and width; a channel shuffle."""
    n = Net(38)
    x = n.op("Relu", n.op("Conv", "video", n.weight(8, 3, 3, 3, 3), pads=[1] * 6, strides=[1, 2, 2]))
    x = n.op("MaxPool", x, kernel_shape=[2, 2, 2], strides=[2, 2, 2], ceil_mode=1)
    split = n.reshape(x, n.dim(x, 0), 2, 4, n.dim(x, 2), n.dim(x, 3), n.dim(x, 4))
    shuffled = n.reshape(n.op("Transpose", split, perm=[0, 2, 1, 3, 4, 5]), 0, 8, n.dim(x, 2), n.dim(x, 3), n.dim(x, 4))
    x = n.op("Conv", shuffled, n.weight(12, 4, 1, 3, 3), group=2, pads=[0, 1, 1, 0, 1, 1])
    pooled = n.op("Flatten", n.op("GlobalAveragePool", n.op("Mish", x)))
    return n.model({"video": ("f", ["n", 3, "t", "h", "w"])}, {n.linear(pooled, 12, 4): "f"}, opset=18)


def warped_features() -> onnx.ModelProto:
    """A flow field moves features: GridSample on a grid of linspaces, Pad at the edges, AveragePool that pads."""
    n = Net(39)
    flow = n.op("Tanh", n.conv("x", 4, 2, norm=False))
    grid = n.op("Mul", n.op("Transpose", flow, perm=[0, 2, 3, 1]), n.const(1.2, np.float32))
    moved = n.op("GridSample", "x", grid, mode="bilinear", padding_mode="border", align_corners=1)
    edged = n.op("Pad", moved, n.const([0, 0, 1, 2, 0, 0, 2, 1]), mode="edge")
    y = n.op("AveragePool", edged, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2], count_include_pad=1)
    z = n.op("AveragePool", edged, kernel_shape=[3, 3], auto_pad="SAME_LOWER", strides=[2, 2])
    return n.model({"x": ("f", ["n", 4, "h", "w"])}, {y: "f", z: "f"}, opset=16)


def folding_pool() -> onnx.ModelProto:
    """A pool that folds what height there is: inputs lower than its window still give one row."""
    n = Net(40)
    x = n.op("AveragePool", n.op("Relu", n.conv("x", 3, 8)), kernel_shape=[3, 2], strides=[3, 2])
    tokens = n.op("Transpose", n.reshape(x, n.dim(x, 0), 8, -1), perm=[0, 2, 1])
    return n.model({"x": ("f", ["n", 3, "h", "w"])}, {n.op("Softmax", n.linear(tokens, 8, 5), axis=-1): "f"})


def latest_opset(width: int = 32, count: int = 4) -> onnx.ModelProto:
    """The operators of opset 23: Attention with a cache, RMSNormalization, RotaryEmbedding, Gelu."""
    n = Net(41)
    head = width // count
    x = n.op("RMSNormalization", "x", n.weight(width, scale=1), axis=-1, epsilon=1e-6)
    q, k, v = (n.linear(x, width, width, bias=False) for _ in range(3))
    cos, sin = (n.const(f(np.arange(64)[:, None] * 0.3 ** np.arange(head // 2)), np.float32) for f in (np.cos, np.sin))
    q, k = (n.op("RotaryEmbedding", y, cos, sin, "positions", num_heads=count) for y in (q, k))
    mixed, keys, values = n.op("Attention", q, k, v, "", "past_k", "past_v", outputs=3, q_num_heads=count,
                               kv_num_heads=count, is_causal=1)  # fmt: skip
    y = n.op("Add", "x", n.op("Gelu", n.linear(mixed, width, width), approximate="tanh"))
    cache: Declared = ("f", ["b", count, "past", head])
    inputs = {"x": ("f", ["b", "s", width]), "positions": ("i", ["b", "s"]), "past_k": cache, "past_v": cache}
    return n.model(inputs, {y: "f", keys: "f", values: "f"}, opset=23)


def old_opset() -> onnx.ModelProto:
    """Opset 9 as older exporters write it: Upsample and Dropout; Slice, TopK, Pad and Clip by attributes."""
    n = Net(42)
    x = n.op("Dropout", n.op("Relu", n.conv("image", 3, 6)), ratio=0.5)
    x = n.op("Upsample", x, n.const([1, 1, 2, 2], np.float32), mode="nearest")
    x = n.op("Slice", x, starts=[0, 1], ends=[2**31, -1], axes=[2, 3])
    x = n.op("Pad", x, mode="constant", pads=[0, 0, 1, 1, 0, 0, 1, 0], value=0.5)
    x = n.op("ReduceMean", n.op("Clip", x, min=0.0, max=1.5), axes=[2, 3], keepdims=0)
    y = n.op("Softmax", n.op("Gemm", x, n.weight(6, 9), n.weight(9)), axis=1)
    best, at = n.op("TopK", y, outputs=2, axis=1, k=3)
    return n.model({"image": ("f", ["n", 3, "h", "w"])}, {y: "f", best: "f", at: "i"}, opset=9)
