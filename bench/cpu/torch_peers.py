"""PyTorch: eager, compiled, and the two libraries inside of it that multiply matrices (MKL and oneDNN).

PyTorch does not read ONNX, so each form of workload is written here as a PyTorch user would, over the weights of the
ONNX file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import onnx
import torch
import torch.nn.functional as F

from bench.cpu.cases import Case, Workload
from bench.cpu.peers import Peer, Prepared, Unsupported, weights_of

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Network: TypeAlias = Callable[..., Any]  # tensors in the model's order -> a tensor or several


class Torch(Peer):
    title = "PyTorch, eager"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def version(self) -> str:
        return str(torch.__version__)

    def open(self, workload: Workload) -> None:
        self.network = network(workload)

    def prepare(self, case: Case) -> Prepared:
        values = [torch.from_numpy(array) for array in case.arrays().values()]
        return Prepared(lambda: self.network(*values), _arrays)


class TorchCompile(Torch):
    """Weights are constants of the compiled function, as in the other peers (inductor's "freezing")."""

    title = "PyTorch, compile(dynamic=True)"

    def open(self, workload: Workload) -> None:
        import torch._inductor.config as inductor

        inductor.freezing = True
        torch._dynamo.reset()
        self.network = torch.compile(network(workload), dynamic=True)


def _arrays(result: Any) -> list[Any]:
    tensors = result if isinstance(result, list | tuple) else [result]
    return [tensor.numpy() for tensor in tensors]


def network(workload: Workload) -> Network:
    """The workload as PyTorch functions over its weights."""
    weights = {name: torch.from_numpy(array.copy()) for name, array in weights_of(workload).items()}
    form, *numbers = workload.form.split("-")
    if workload.form == "bert":
        return Bert(_parameters(workload, weights))
    if form == "conv":
        stride, groups = map(int, numbers)
        pad = weights["w"].shape[-1] // 2
        return lambda x: F.relu(F.conv2d(x, weights["w"], weights["b"], stride, pad, groups=groups))
    if form in _OPERATORS:
        return _OPERATORS[form](weights)
    raise Unsupported(f"nobody has written {workload.name} in PyTorch here")


_OPERATORS: dict[str, Callable[[Tensors], Network]] = {
    "softmax": lambda w: lambda x: F.softmax(x, -1),
    "layer_norm": lambda w: lambda x: F.layer_norm(x, x.shape[-1:], w["scale"], w["bias"]),
    "gelu": lambda w: F.gelu,
    "relu": lambda w: F.relu,
    "add": lambda w: torch.add,
    "chain": lambda w: lambda x, z: F.relu(x * w["scale"] + w["bias"]) + z,
    "transpose": lambda w: lambda x: x.t().contiguous(),
    "attention": lambda w: F.scaled_dot_product_attention,
}


class Bert(torch.nn.Module):
    """MiniLM's encoder; tensors of (batch, seq, hidden)."""

    def __init__(self, parameters: Tensors) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_buffer(name.replace(".", "_"), value)
        self.heads = 12
        self.num_layers = 1 + max(int(name.split(".")[2]) for name in parameters if name.startswith("encoder.layer."))

    def _p(self, name: str) -> torch.Tensor:
        return getattr(self, name.replace(".", "_"))

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._p(f"{name}.weight"), self._p(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self._p(f"{name}.weight"), self._p(f"{name}.bias"), 1e-12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        at = "embeddings"
        x = F.embedding(ids, self._p(f"{at}.word_embeddings.weight"))
        x = x + F.embedding(types, self._p(f"{at}.token_type_embeddings.weight"))
        x = x + self._p(f"{at}.position_embeddings.weight")[: ids.shape[1]]
        x = self._norm(x, f"{at}.LayerNorm")
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in range(self.num_layers):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(x, f"{at}.attention.self.{part}").unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            values = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
            x = self._norm(x + self._linear(values, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
            inner = F.gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return x


def _parameters(workload: Workload, weights: Tensors) -> dict[str, torch.Tensor]:
    """By the names of the checkpoint. The exporter has transposed the matrices of linear layers, and left them without
    a name of their own: the bias that is added to their product has it."""
    graph = onnx.load(workload.model, load_external_data=False).graph
    found = {name: value for name, value in weights.items() if name.endswith((".weight", ".bias"))}
    reader = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            add = reader[node.output[0]]
            bias = next(name for name in add.input if name in weights)
            found[bias.removesuffix("bias") + "weight"] = weights[node.input[1]].t().contiguous()
    return found


class Mkl(Torch):
    """MKL's sgemm, as PyTorch's mm calls it; outputs preallocated."""

    title = "MKL (PyTorch mm)"

    def version(self) -> str:
        if not torch.backends.mkl.is_available():
            raise Unsupported("this PyTorch is built without MKL")
        text = torch.__config__.show()
        line = next(line for line in text.splitlines() if "Math Kernel Library" in line)
        return f"{line.split('Version')[1].split('-')[0].strip()} in torch {torch.__version__}"

    def open(self, workload: Workload) -> None:
        self.gelu, self.layers = linear_layers(workload)

    def prepare(self, case: Case) -> Prepared:
        (x,) = (torch.from_numpy(array) for array in case.arrays().values())
        outputs = [torch.empty(x.shape[0], w.shape[1]) for w, _ in self.layers]
        layers = [(w, b, y) for (w, b), y in zip(self.layers, outputs, strict=True)]

        def plain() -> Any:
            for w, _, y in layers:
                torch.mm(x, w, out=y)
            return outputs

        def with_gelu() -> Any:
            return [F.gelu(torch.addmm(b, x, w, out=y)) for w, b, y in layers if b is not None]

        return Prepared(with_gelu if self.gelu else plain, _arrays)


class OneDnn(Torch):
    """oneDNN's matrix multiplication with weights packed beforehand and the epilogue fused, as inductor calls it."""

    title = "oneDNN (PyTorch)"

    def version(self) -> str:
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            raise Unsupported("this PyTorch is built without oneDNN")
        line = next((s for s in torch.__config__.show().splitlines() if "MKL-DNN" in s), "MKL-DNN v?")
        return f"{line.split(' v')[1].split(' ')[0]} in torch {torch.__version__}"

    def open(self, workload: Workload) -> None:
        self.gelu, self.layers = linear_layers(workload)

    def prepare(self, case: Case) -> Prepared:
        (x,) = (torch.from_numpy(array) for array in case.arrays().values())
        operators, epilogue = torch.ops.mkldnn, "gelu" if self.gelu else "none"
        packed = [(operators._reorder_linear_weight(w.t().contiguous(), x.shape[0]), b) for w, b in self.layers]

        def run() -> Any:
            return [operators._linear_pointwise(x, w, b, epilogue, [], "none") for w, b in packed]

        return Prepared(run, _arrays)


def linear_layers(workload: Workload) -> tuple[bool, list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Whether GELU follows, and each layer's weights of (k, n) with its bias."""
    if not workload.form.startswith("linear"):
        raise Unsupported("matrix products only")
    weights = {name: torch.from_numpy(array.copy()) for name, array in weights_of(workload).items()}
    layers = [(weights[f"w{k}"], weights.get(f"b{k}")) for k in range(workload.layers)]
    return workload.form == "linear-gelu", layers
