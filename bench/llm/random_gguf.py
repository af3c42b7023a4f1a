"""GGUF files of random weights, at the size and in the types of a real model.

Types are those that llama.cpp's own quantizer gives a model for Q4_0: matrices and token embedding Q4_0, the logits'
matrix Q6_K, norms F32. Blocks are random bytes with scales that keep activations at the size of a trained model's: time
does not depend on values, as long as they are finite. The vocabulary is SentencePiece's: special tokens, bytes, and
tokens that no text has.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from bench.llm.peers import Array
from relaxlite import config

VERSION = 1  # of what is written; another one is another file
FILE_TYPE = 2  # mostly Q4_0
Q4_0_RMS = 4.637  # of a random code less 8
Q6_K_RMS = 18.48  # of a random code less 32
MIN_SCALE, MAX_SCALE, SCALE_RMS = 32, 127, 84.2  # of Q6_K's eight-bit scales
EMBEDDING_SIZE, LOGIT_SIZE = 1.0, 2.0  # standard deviations
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama, or with `experts`, of which each token takes `chosen`, of a Mixtral; hidden and intermediate sizes
    are multiples of 256."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    context: int = 2048
    experts: int = 0
    chosen: int = 0


SHAPES = {
    "llama-1.1b": Shape(2048, 22, 32, 4, 5632, 32000),
    "llama-tiny": Shape(256, 2, 4, 2, 512, 512),
    "mixture-1.3b": Shape(1024, 24, 16, 8, 512, 32000, experts=32, chosen=8),  # as Granite's 1b-a400m
    "mixture-tiny": Shape(256, 2, 4, 2, 256, 512, experts=4, chosen=2),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A matrix [rows, columns], `count` of them if not 0, or a vector of ones where `rows` is 0; `deviation` of its
    values."""

    name: str
    rows: int
    columns: int
    kind: str = "Q4_0"
    deviation: float = 0.0
    count: int = 0


def random_gguf(name: str, folder: Path | None = None) -> Path:
    """The file of a name in SHAPES, written into the user's cache folder (or `folder`) when it is not there yet."""
    home = config.user_cache_folder() / "bench" if folder is None else folder
    path = home / f"{name}-q4_0-v{VERSION}.gguf"
    if path.exists():
        return path
    home.mkdir(parents=True, exist_ok=True)
    scratch = home / f".{path.name}.{os.getpid()}"
    try:
        _write(scratch, name, SHAPES[name])
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _write(path: Path, name: str, shape: Shape) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, name, shape)
    tensors = list(_tensors(shape))
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        if not tensor.rows:
            writer.add_tensor_info(tensor.name, (tensor.columns,), np.dtype(np.float32), 4 * tensor.columns, kind)
            continue
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        row, number = tensor.columns // size * nbytes, tensor.count or 1
        shape, dtype = (tensor.rows, row), np.dtype(np.uint8)
        if tensor.kind == "F32":
            shape, dtype = (tensor.rows, tensor.columns), np.dtype(np.float32)
        shape = (tensor.count, *shape) if tensor.count else shape
        writer.add_tensor_info(tensor.name, shape, dtype, number * tensor.rows * row, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:  # one at a time in memory
        writer.write_tensor_data(_values(tensor))
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, name: str, shape: Shape) -> None:
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(FILE_TYPE)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens = special + [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(f"token{place:05d}", NORMAL) for place in range(len(tokens), shape.vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(s: Shape) -> Iterator[_Tensor]:
    keys, branch = s.kv_heads * (s.hidden // s.heads), (2 * s.layers) ** -0.5  # what a layer adds, less with depth

    def matrix(name: str, rows: int, columns: int, size: float = 1.0, kind: str = "Q4_0", count: int = 0) -> _Tensor:
        return _Tensor(f"{name}.weight", rows, columns, kind, size * columns**-0.5, count)

    yield _Tensor("token_embd.weight", s.vocab, s.hidden, "Q4_0", EMBEDDING_SIZE)
    for k in range(s.layers):
        at = f"blk.{k}."
        yield _Tensor(f"{at}attn_norm.weight", 0, s.hidden, "F32")
        yield matrix(f"{at}attn_q", s.hidden, s.hidden)
        yield matrix(f"{at}attn_k", keys, s.hidden)
        yield matrix(f"{at}attn_v", keys, s.hidden)
        yield matrix(f"{at}attn_output", s.hidden, s.hidden, branch)
        yield _Tensor(f"{at}ffn_norm.weight", 0, s.hidden, "F32")
        kinds = ("ffn_gate", "ffn_up", "ffn_down")
        if s.experts:
            yield matrix(f"{at}ffn_gate_inp", s.experts, s.hidden, kind="F32")
            kinds = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        yield matrix(f"{at}{kinds[0]}", s.intermediate, s.hidden, count=s.experts)
        yield matrix(f"{at}{kinds[1]}", s.intermediate, s.hidden, count=s.experts)
        yield matrix(f"{at}{kinds[2]}", s.hidden, s.intermediate, branch, count=s.experts)
    yield _Tensor("output_norm.weight", 0, s.hidden, "F32")
    yield matrix("output", s.vocab, s.hidden, LOGIT_SIZE, "Q6_K")


def _values(tensor: _Tensor) -> Array:
    """The same in every file."""
    if not tensor.rows:
        return np.ones(tensor.columns, np.float32)
    rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    rows = tensor.rows * (tensor.count or 1)
    if tensor.kind == "F32":
        return (tensor.deviation * rng.standard_normal((rows, tensor.columns))).astype(np.float32)
    blocks = _BLOCKS[tensor.kind](rng, rows * tensor.columns, tensor.deviation)
    return blocks.reshape(*([tensor.count] if tensor.count else []), tensor.rows, -1)


def _random_bytes(rng: np.random.Generator, blocks: int, nbytes: int) -> Array:
    return np.frombuffer(bytearray(rng.bytes(blocks * nbytes)), np.uint8).reshape(blocks, nbytes)


def _q4_0(rng: np.random.Generator, count: int, deviation: float) -> Array:
    """Half of the scales are negative, so that the mean of a row is 0 though codes go from -8 to 7."""
    blocks = _random_bytes(rng, count // 32, 18)
    scales = np.where(blocks[:, 0] & 1, deviation, -deviation) / Q4_0_RMS
    blocks[:, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> Array:
    blocks = _random_bytes(rng, count // 256, 210)
    scales = rng.integers(MIN_SCALE, MAX_SCALE, (len(blocks), 16), np.int8, endpoint=True)
    scales *= rng.choice(np.array([-1, 1], np.int8), scales.shape)
    blocks[:, 192:208] = scales.view(np.uint8)
    blocks[:, 208:] = np.array([deviation / (Q6_K_RMS * SCALE_RMS)], np.float16).view(np.uint8)
    return blocks


_BLOCKS: dict[str, Callable[[np.random.Generator, int, float], Array]] = {"Q4_0": _q4_0, "Q6_K": _q6_k}
