"""Importer of GGUF files (github.com/ggml-org/ggml, docs/gguf.md) as checkpoints with memory-mapped weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures import Hyperparameters, find_architecture
from relaxlite.frontend.llm.architectures.base import Architecture
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, GGUF_WHOLE, layer_names
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight, check_weights, deinterleave_rotary, split_fused
from relaxlite.frontend.llm.config import DecoderConfig, Rope
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.gguf_format import TensorInfo, read_parts
from relaxlite.frontend.llm.gguf_tokenizer import read_tokenizer
from relaxlite.frontend.llm.hf_generation import are_tokens
from relaxlite.frontend.llm.quantized import GroupedWeight, GroupScales, PackedRows, RowIndex

_DIVISORS = {"all": "rope_freqs.weight", "short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PROVENANCE = ("name", "author", "organization", "license", "url", "source.url", "version", "description", "size_label")


def read_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint in a GGUF file, or in a split model given any of its files; weights stay memory-mapped.

    Raises ImportModelError for other files, unknown architectures and tensor types, and missing weights.
    """
    source = os.fspath(path)
    files = read_parts(source)
    raw = dict(files[0].metadata)
    name = str(raw.get("general.architecture", ""))
    architecture = find_architecture(name, source)
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    raw |= {f"{name}.{key}": value for key, value in _inferred_hyperparameters(tensors).items()}
    hyperparameters = Hyperparameters(source, raw, True, f"{name}.")
    config = architecture.describe(hyperparameters)
    divisors = {
        kind: _frequency_divisors(config, _weight(tensors.pop(name), source), name, source)
        for kind, name in _DIVISORS.items()
        if name in tensors
    }
    config = replace(config, rope=_with_divisors(config, divisors, source))
    factors = _pop_scale_factors(tensors, source)
    names = {theirs: ours for ours, theirs in _names(config, architecture).items()}
    unused = tuple(f"blk.{k}." for k in range(config.layers, hyperparameters.integer("layers")))
    weights = {
        names.get(theirs, theirs): _scale_rows(_weight(tensor, source), factors.get(theirs))
        for theirs, tensor in tensors.items()
        if not theirs.startswith(unused)
    }
    if architecture.from_gguf is not None:
        weights = architecture.from_gguf(weights, config, source)
    weights = split_fused(config, weights, architecture.fused, source)
    check_weights(config, weights, source)
    if architecture.is_interleaved:
        weights = deinterleave_rotary(weights, config)
    fields = {key: raw.get(f"general.{key}") for key in _PROVENANCE}
    provenance = {"source": os.path.basename(source)} | {key: str(value) for key, value in fields.items() if value}
    return Checkpoint(config, weights, read_tokenizer(raw, source), provenance, _generation(raw, source))


def _generation(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the generation defaults that the file sets."""
    suppressed = raw.get("tokenizer.ggml.suppress_tokens", [])
    if not are_tokens(suppressed):
        raise ImportModelError(f"{source}: tokenizer.ggml.suppress_tokens is {suppressed!r}, no list of tokens")
    return {"suppress_tokens": suppressed} if suppressed else {}


def _inferred_hyperparameters(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Infer hyperparameters that GGUF has no field for from names and shapes of tensors."""
    embedding = tensors.get(GGUF_WHOLE["embed"])
    result: dict[str, Any] = {"is_tied": GGUF_WHOLE["head"] not in tensors}
    if embedding is not None and embedding.shape:
        result["vocab_size"] = embedding.shape[0]
    for key, *names in (
        ("qkv_bias", GGUF_LAYER["q_bias"], "attn_qkv.bias"),
        ("o_bias", GGUF_LAYER["o_bias"]),
        ("mlp_bias", GGUF_LAYER["down_bias"]),
        ("mlp_norm", GGUF_LAYER["mlp_norm"]),
        ("qk_norm", GGUF_LAYER["q_norm"]),
    ):
        result[key] = any(f"blk.0.{name}" in tensors for name in names)
    routers = [name.split(".") for name in tensors if name.endswith(GGUF_LAYER["router"])]
    result["expert_layers"] = [int(layer) for _, layer, *_ in routers if layer.isdecimal()]
    shared = next((tensor for name, tensor in tensors.items() if name.endswith(GGUF_LAYER["shared.up"])), None)
    if shared is not None and shared.shape:
        result["expert_shared_feed_forward_length"] = shared.shape[0]
    result["expert_balance"] = any(name.endswith(GGUF_LAYER["router_balance"]) for name in tensors)
    values = [name.split(".") for name in tensors if name.endswith(GGUF_LAYER["v"])]
    result["value_layers"] = [int(layer) for _, layer, *_ in values if layer.isdecimal()]
    if _DIVISORS["short"] in tensors:
        result["rope.scaling.type"] = "longrope"
    return result


def _names(config: DecoderConfig, architecture: Architecture) -> dict[str, str]:
    """Map the weight names of this package to the tensor names of the architecture in GGUF."""
    result = dict(architecture.gguf_whole or GGUF_WHOLE)
    for k, ours, theirs in layer_names(architecture.gguf or GGUF_LAYER, config):
        result[f"layers.{k}.{ours}"] = f"blk.{k}.{theirs}"
    return result


def _weight(tensor: TensorInfo, source: str) -> Weight:
    """Make a weight of a tensor. Raises ImportModelError for types that are not read and truncated data."""
    subject = f"{source}: tensor {tensor.name!r}"
    if tensor.kind in BLOCK_FORMATS:
        block = BLOCK_FORMATS[tensor.kind]
        if len(tensor.shape) not in (2, 3) or tensor.shape[-1] % block.size:
            raise ImportModelError(
                f"{subject}: {tensor.kind} needs rows of whole blocks of {block.size}, got {tensor.shape}"
            )
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        return Weight(_bytes(tensor, rows, columns // block.size * block.nbytes, subject), tensor.shape, tensor.kind)
    if tensor.kind not in _FLOATS:
        known = ", ".join([*_FLOATS, *BLOCK_FORMATS])
        raise ImportModelError(f"{subject} is of type {tensor.kind}, which is not read; known are {known}")
    dtype = dtypes.to_numpy(_FLOATS[tensor.kind])
    data = _bytes(tensor, 1, math.prod(tensor.shape) * dtype.itemsize, subject)
    return Weight(data.view(dtype).reshape(tensor.shape), tensor.shape)


def _pop_scale_factors(tensors: dict[str, TensorInfo], source: str) -> dict[str, np.ndarray[Any, Any]]:
    """Remove the scale tensors of NVFP4 weights from `tensors`; return the factors by the weights' names.

    A weight has one factor, or one for each expert. Scales of activations are dropped: `precision` decides about those.
    """
    result = {}
    for name in [name for name, tensor in tensors.items() if tensor.kind == "NVFP4"]:
        stem = name.removesuffix(".weight")
        tensors.pop(f"{stem}.input_scale", None)
        scale = tensors.pop(f"{stem}.scale", None)
        if scale is None:
            continue
        factors = _weight(scale, source).to_float32().reshape(-1)
        counts = {1, tensors[name].shape[0] if len(tensors[name].shape) == 3 else 1}
        if len(factors) not in counts or not all(0 < factor < math.inf for factor in factors.tolist()):
            raise ImportModelError(
                f"{source}: tensor {scale.name!r} must have {' or '.join(map(str, sorted(counts)))} positive numbers "
                f"for {name!r}, and has {len(factors)}, the least {factors.min(initial=math.inf):g}"
            )
        result[name] = factors
    return result


def _scale_rows(weight: Weight, factors: np.ndarray[Any, Any] | None) -> Weight:
    """Multiply the rows of a blocked weight by its factors: one for all, or one for each run of equally many rows."""
    if factors is None:
        return weight
    stored = weight.data
    row_factors = np.repeat(factors, len(stored) // len(factors))
    block = BLOCK_FORMATS[str(weight.block_format)]

    def read(rows: RowIndex) -> GroupedWeight:
        result = block.unpack(stored[rows])
        return replace(result, scales=GroupScales(result.scales.to_float32() * row_factors[rows, None]))

    return replace(weight, stored=PackedRows.of(len(stored), stored.nbytes, read))


def _bytes(tensor: TensorInfo, rows: int, row_bytes: int, subject: str) -> np.ndarray[Any, Any]:
    """Return the bytes [rows, row_bytes] of a tensor. `subject` begins the message of an ImportModelError."""
    end = tensor.offset + rows * row_bytes
    if end > tensor.data.size:
        raise ImportModelError(f"{subject} ends at byte {end} of {tensor.data.size}: the file is truncated")
    if end > tensor.end:
        raise ImportModelError(
            f"{subject} has {rows * row_bytes} bytes by its type {tensor.kind}, and the next one begins after "
            f"{tensor.end - tensor.offset}: the file is damaged, or its {tensor.kind} is not llama.cpp's"
        )
    return tensor.data[tensor.offset : end].reshape(rows, row_bytes)


def _frequency_divisors(config: DecoderConfig, weight: Weight, name: str, source: str) -> tuple[float, ...]:
    """Return the divisors of rotary frequencies [rope.width / 2] that a tensor holds."""
    if weight.shape != (config.rope.width // 2,) or weight.block_format is not None:
        raise ImportModelError(
            f"{source}: tensor {name!r} has shape {weight.shape}; {config.rope.width} elements of a head are turned, "
            f"so it needs {config.rope.width // 2} numbers"
        )
    result = tuple(map(float, weight.data))
    if not all(0 < divisor < math.inf for divisor in result):
        raise ImportModelError(f"{source}: tensor {name!r} holds numbers that no frequency can be divided by")
    return result


def _with_divisors(config: DecoderConfig, divisors: Mapping[str, tuple[float, ...]], source: str) -> Rope:
    """Return the rotary embedding with the frequency divisors that tensors hold."""
    rope, scaling = config.rope, config.rope.scaling
    if scaling is not None and scaling.kind == "longrope":
        missing = [_DIVISORS[kind] for kind in ("short", "long") if kind not in divisors]
        if missing:
            raise ImportModelError(f"{source}: rotary embeddings scaled by 'longrope' need tensors, {missing[0]!r} too")
        return replace(rope, scaling=replace(scaling, short=divisors["short"], long=divisors["long"]))
    return replace(rope, divisors=divisors["all"]) if "all" in divisors else rope
