"""What is measured: groups of models, each with inputs of several sizes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bench.cpu import onnx_models
from relaxlite import models
from relaxlite.runtime import memory

HUGE_BYTES = 4 << 20  # of an array from which on huge pages hold it
L3_BYTES = 32 << 20  # weights of more than this are read from memory
TEXT = "Quick brown foxes jump over 13 lazy dogs while relaxlite reads every width & height at once. "

MODEL_PEERS = ("relaxlite", "onnxruntime", "openvino", "openvino-default", "torch", "torch-compile", "tvm")
SWEEP_PEERS = ("relaxlite", "relaxlite-compile", *MODEL_PEERS[1:])
MATMUL_PEERS = ("machine", "relaxlite-kernels", "onnxruntime", "onednn", "mkl", "openblas")
KERNEL_PEERS = ("machine", "relaxlite-kernels", "onnxruntime", "openvino", "torch")


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    shape: tuple[int, ...]
    kind: Literal["normal", "tokens", "ones", "zeros", "text"] = "normal"

    def array(self) -> np.ndarray:
        """The same values in every process."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {self.shape}".encode()))
        if self.kind == "tokens":
            return rng.integers(1, 30_000, self.shape)
        if self.kind in ("ones", "zeros"):
            return np.full(self.shape, self.kind == "ones", np.int64)
        if self.kind == "text":
            batch, _, height, width = self.shape
            return np.stack([_text_picture(height, width, k) for k in range(batch)])
        return _placed(rng.standard_normal(self.shape, np.float32))


def _placed(array: np.ndarray) -> np.ndarray:
    """A large array where the peer "machine" has its own: on huge pages, and two of them at no special distance. As
    NumPy lays them, 128 MB and a page apart, reading both takes a fifth longer: they share the memory's banks."""
    if array.nbytes < HUGE_BYTES:
        return array
    block = memory.allocate(array.nbytes, "a benchmark's input")
    found = block.raw[block.ptr - block.base :][: array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def _text_picture(height: int, width: int, number: int) -> np.ndarray:
    """Lines of dark text, (3, height, width) float32 in -1 .. 1. A detector that sees no text answers with scores of
    1e-7, whose differences say nothing."""
    picture = Image.new("L", (width, height), 245)
    draw, size = ImageDraw.Draw(picture), min(28, int(height * 0.62))
    for line, y in enumerate(range(4, height - size // 2, int(size * 1.5))):
        start = 7 * (line + number) % len(TEXT)
        draw.text((6, y), (TEXT[start:] + TEXT) * (1 + width // 400), 20, ImageFont.load_default(size=size))
    return np.repeat((np.asarray(picture, np.float32) / 127.5 - 1)[None], 3, axis=0)


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a run has to do, of what limits it. fma: floating-point operations; read, copy: bytes moved."""

    kind: Literal["fma", "read", "copy"]
    amount: float


@dataclass(frozen=True, slots=True)
class Case:
    label: str
    inputs: tuple[Input, ...]
    work: Work | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        return {item.name: item.array() for item in self.inputs}


@dataclass(frozen=True, slots=True)
class Workload:
    """One ONNX model at several sizes. `form` names what computes the same in libraries that do not read ONNX."""

    group: str
    name: str
    model: Path
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    threads: int
    form: str = ""
    layers: int = 1  # equal kernels in the model, so that a call's own cost is shared
    is_kernel: bool = False  # kernels get their outputs' memory from the caller where a peer can do that
    cache: Path | None = None  # where peers may keep what they compile, for their next process


@dataclass(frozen=True, slots=True)
class Options:
    threads: int
    quick: bool
    folder: Path  # for the models that are made


Group = Callable[[Options], Iterator[Workload]]


# Whole models


def _minilm(options: Options) -> Iterator[Workload]:
    sizes = [(1, 16), (1, 128)] if options.quick else [(1, 16), (1, 128), (8, 64), (1, 512)]
    cases = tuple(minilm_case(*size) for size in sizes)
    path = models.fetch("minilm-l6-onnx", progress=False)
    peers = ("machine", *MODEL_PEERS[:1], "relaxlite-bf16", *MODEL_PEERS[1:])
    yield Workload("minilm", "minilm-l6", path, cases, peers, options.threads, "bert")


def minilm_case(batch: int, seq: int) -> Case:
    """6 layers of width 384: four projections and two of 1536, and two products of attention."""
    tokens, hidden = batch * seq, 384
    flops = 6 * (2.0 * tokens * hidden * (4 * hidden + 2 * 4 * hidden) + 4.0 * tokens * seq * hidden)
    kinds = {"input_ids": "tokens", "attention_mask": "ones", "token_type_ids": "zeros"}
    inputs = tuple(Input(name, (batch, seq), kind) for name, kind in kinds.items())  # type: ignore[arg-type]
    return Case(f"{batch}x{seq}", inputs, Work("fma", flops))


def sweep_cases(count: int) -> list[Case]:
    """Shapes of minilm that differ from each other: what a server of short texts meets."""
    rng = np.random.default_rng(20)
    found: dict[tuple[int, int], Case] = {}
    while len(found) < count:
        batch, seq = int(rng.integers(1, 9)), int(rng.integers(4, 257))
        found.setdefault((batch, seq), minilm_case(batch, seq))
    return list(found.values())


def _pictures(name: str, model: str, sizes: list[tuple[int, int, int]], options: Options) -> Iterator[Workload]:
    """(batch, height, width)"""
    kept = sizes[:1] if options.quick else sizes
    cases = tuple(Case("x".join(map(str, s)), (Input("x", (s[0], 3, *s[1:]), "text"),)) for s in kept)
    yield Workload(name, model, models.fetch(model, progress=False), cases, MODEL_PEERS, options.threads)


def _resnet(options: Options) -> Iterator[Workload]:
    cases = tuple(Case(f"{n}x224x224", (Input("input:0", (n, 224, 224, 3)),)) for n in (1, 4)[: 2 - options.quick])
    path = models.fetch("open-nsfw-resnet50", progress=False)
    yield Workload("resnet50", "open-nsfw-resnet50", path, cases, MODEL_PEERS, options.threads)


def _int8(options: Options) -> Iterator[Workload]:
    """Static quantization (QDQ), and dynamic; results differ by codes that go either way, and more once they do."""
    models_of: dict[str, list[Case]] = {
        "smart-turn-qdq": [Case(f"{n}x80x800", (Input("input_features", (n, 80, 800)),)) for n in (1, 2)],
        "moonshine-tiny-encoder": [Case(f"1x{n}", (Input("input_values", (1, n)),)) for n in (16_000, 40_000)],
    }
    for name, cases in models_of.items():
        peers = ("relaxlite", "onnxruntime", "openvino-default")
        path, kept = models.fetch(name, progress=False), tuple(cases[: 2 - options.quick])
        yield Workload("int8", name, path, kept, peers, options.threads)


def _stream(options: Options) -> Iterator[Workload]:
    """Models of sound that take one step per call and hand their state on."""
    case = Case("1 step", (Input("input_2", (1, 1, 257)), Input("input_3", (1, 2, 128, 2))))
    path = models.fetch("dtln-denoise-1", progress=False)
    yield Workload("stream", "dtln-denoise-1", path, (case,), ("relaxlite", "onnxruntime", "openvino"), options.threads)


# Single kernels

KN = ((384, 384), (384, 1536), (1536, 384), (768, 3072), (2048, 2048), (2048, 5632))
ROWS = (1, 4, 16, 64, 128, 512)


def _matmul(options: Options) -> Iterator[Workload]:
    shapes, rows = (KN[:1], (1, 16)) if options.quick else (KN, ROWS)
    for (k, n), threads, epilogue in product(shapes, _thread_counts(options), ("", "-gelu")):
        weights = 4 * k * n
        layers = 2 if weights > L3_BYTES else max(1, min(16, (20 << 20) // weights))
        path = onnx_models.save(options.folder, f"matmul-{k}x{n}{epilogue}", onnx_models.matmul(k, n, layers, epilogue))
        cases = tuple(Case(f"m={m}", (Input("x", (m, k)),), _matmul_work(m, k, n, layers)) for m in rows)
        name = f"{k}x{n}{epilogue}"
        yield Workload(f"matmul{epilogue}", name, path, cases, MATMUL_PEERS, threads, f"linear{epilogue}", layers, True)


def _quantized(options: Options) -> Iterator[Workload]:
    """Weights in fewer bits, many times the L3 cache: at m = 1 their bytes limit, at large m the arithmetic."""
    (k, n), rows = ((512, 512), (1, 16)) if options.quick else ((2048, 5632), (1, 4, 16, 64, 512))
    for kind, threads in product(onnx_models.STORED_BITS, _thread_counts(options)):
        size = k * n * onnx_models.STORED_BITS[kind] / 8
        layers = 1 if options.quick else max(2, math.ceil(2 * L3_BYTES / size))
        path = onnx_models.save(options.folder, f"{kind}-{k}x{n}", onnx_models.stored_matmul(kind, k, n, layers))
        cases = tuple(
            Case(
                f"m={m}",
                (Input("x", (m, k)),),
                Work("read", size * layers) if m == 1 else Work("fma", 2.0 * m * k * n * layers),
            )
            for m in rows
        )
        peers = ("machine", "relaxlite-kernels", "onnxruntime")
        yield Workload("quantized", f"{kind}-{k}x{n}", path, cases, peers, threads, "", layers, True)


def _thread_counts(options: Options) -> list[int]:
    return sorted({1, options.threads})


def _matmul_work(m: int, k: int, n: int, layers: int) -> Work:
    return Work("read", 4.0 * k * n * layers) if m == 1 else Work("fma", 2.0 * m * k * n * layers)


def _rows(options: Options) -> Iterator[Workload]:
    """Memory-bound operators on 4 MB and 128 MB; the traffic counts what is read once and written once."""
    sizes = {"4MB": (1024, 1024), "128MB": (32768, 1024)}
    kept = dict(list(sizes.items())[:1]) if options.quick else sizes
    for form, threads in product(onnx_models.ROW_OPERATORS, _thread_counts(options)):
        path = onnx_models.save(options.folder, form, onnx_models.row_operator(form))
        names = onnx_models.ROW_OPERATORS[form].inputs
        cases = tuple(
            Case(
                label, tuple(Input(n, shape) for n in names), Work("copy", 4.0 * shape[0] * shape[1] * (len(names) + 1))
            )
            for label, shape in kept.items()
        )
        yield Workload("rows", form, path, cases, KERNEL_PEERS, threads, form, is_kernel=True)


def _attention(options: Options) -> Iterator[Workload]:
    sizes = [(1, 12, 128, 32), (8, 12, 64, 32), (1, 12, 512, 32), (1, 32, 512, 64), (1, 12, 1024, 64)]
    by_heads: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for size in sizes[:1] if options.quick else sizes:
        by_heads.setdefault((size[1], size[3]), []).append(size)
    for (heads, width), found in by_heads.items():
        name = f"{heads}-heads-of-{width}"
        path = onnx_models.save(options.folder, f"attention-{name}", onnx_models.attention(heads, width))
        cases = tuple(
            Case(f"{b}x{s}", tuple(Input(n, (b, h, s, d)) for n in "qkv"), Work("fma", 4.0 * b * h * s * s * d))
            for b, h, s, d in found
        )
        yield Workload("attention", name, path, cases, KERNEL_PEERS, options.threads, "attention", is_kernel=True)


def _conv(options: Options) -> Iterator[Workload]:
    for conv in onnx_models.CONVOLUTIONS[: 1 if options.quick else None]:
        path = onnx_models.save(options.folder, f"conv-{conv.name}", onnx_models.convolution(conv))
        sizes = [(1, conv.size)] if options.quick else [(1, conv.size), (4, conv.size), (1, conv.size * 2 + 1)]
        cases = tuple(
            Case(f"{n}x{size}x{size}", (Input("x", (n, conv.channels, size, size)),), Work("fma", conv.flops(n, size)))
            for n, size in sizes
        )
        form = f"conv-{conv.stride}-{conv.groups}"
        yield Workload("conv", conv.name, path, cases, KERNEL_PEERS, options.threads, form, is_kernel=True)


def _overhead(options: Options) -> Iterator[Workload]:
    """What a call and a kernel cost when there is nothing to compute."""
    for count in (1, 60):
        path = onnx_models.save(options.folder, f"tiny-{count}", onnx_models.chain_of_matmuls(count, width=16))
        case = Case("1x16", (Input("x", (1, 16)),))
        peers = ("relaxlite", "relaxlite-kernels", "onnxruntime", "openvino")
        yield Workload("overhead", f"{count}-tiny-kernels", path, (case,), peers, options.threads, layers=count)


GROUPS: dict[str, Group] = {
    "minilm": _minilm,
    "det": partial(_pictures, "det", "ppocrv4-det", [(1, 320, 480), (1, 640, 640), (1, 96, 96)]),
    "rec": partial(_pictures, "rec", "ppocrv4-rec", [(1, 48, 320), (1, 48, 100), (1, 48, 640)]),
    "resnet50": _resnet,
    "int8": _int8,
    "stream": _stream,
    "matmul": _matmul,
    "quantized": _quantized,
    "rows": _rows,
    "attention": _attention,
    "conv": _conv,
    "overhead": _overhead,
}
