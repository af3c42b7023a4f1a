"""Tiny GGUF files, and a forward pass in NumPy on their own names and layout, written from the papers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

Array = np.ndarray[Any, Any]
VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, INTER, LAYERS, CONTEXT = 40, 256, 4, 2, 64, 256, 2, 128
EPSILON = 1e-5
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
BYTES = [chr(b) if b in PRINTABLE else chr(256 + OTHERS.index(b)) for b in range(256)]  # as GPT-2 spells them


def fields(name: str, **more: Any) -> dict[str, Any]:
    """Hyperparameters as llama.cpp's converter writes them."""
    common = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": EPSILON, "rope.freq_base": 10000.0, "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
    }  # fmt: skip
    return {f"{name}.{key}": value for key, value in {**common, **more}.items()}


def tensors(
    name: str, *, seed: int = 0, tied: bool = False, biases: tuple[str, ...] = (), vocab: int = VOCAB
) -> dict[str, Array]:
    """Random weights in float32 for an architecture."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def vector(size: int, around: float = 0.0) -> Array:
        return (around + 0.2 * rng.standard_normal(size)).astype(np.float32)

    found = {"token_embd.weight": matrix(vocab, HIDDEN) * 4, "output_norm.weight": vector(HIDDEN, 1)}
    if not tied:
        found["output.weight"] = matrix(vocab, HIDDEN)
    widths = {"attn_q": HEADS * WIDTH, "attn_k": KV_HEADS * WIDTH, "attn_v": KV_HEADS * WIDTH, "attn_output": HIDDEN}
    widths |= {"ffn_gate": INTER, "ffn_up": INTER, "ffn_down": HIDDEN}
    norms = ["attn_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if name == "gemma3" else []
    for k in range(LAYERS):
        at = f"blk.{k}."
        for part, rows in widths.items():
            found[f"{at}{part}.weight"] = matrix(rows, HIDDEN)
            if part in biases:
                found[f"{at}{part}.bias"] = vector(rows)
        for part in norms:
            found[f"{at}{part}.weight"] = vector(HIDDEN, 1)
        for part in ("attn_q_norm", "attn_k_norm") if name in ("gemma3", "qwen3") else ():
            found[f"{at}{part}.weight"] = vector(WIDTH, 1)
    return found


def write(path: Path, name: str, metadata: Mapping[str, Any], weights: Mapping[str, Any]) -> Path:
    """`weights`: arrays, or (bytes, name of a type)."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata.items():
        add(writer, key, value)
    for key, value in weights.items():
        if isinstance(value, tuple):
            writer.add_tensor(key, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, key: str, value: Any) -> None:
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def forward(name: str, metadata: Mapping[str, Any], w: Mapping[str, Array], tokens: list[int]) -> Array:
    """Logits [tokens, VOCAB] in float64."""
    positions = np.arange(len(tokens))
    x = w["token_embd.weight"][tokens].astype(np.float64)
    if name == "gemma3":
        x *= HIDDEN**0.5
    for k in range(LAYERS):
        part = {key.removeprefix(f"blk.{k}."): v.astype(np.float64) for key, v in w.items() if f"blk.{k}." in key}
        a = _attention(
            name, metadata, part, _norm(x, part["attn_norm.weight"]), positions, k, w.get("rope_freqs.weight")
        )
        x = x + (_norm(a, part["post_attention_norm.weight"]) if name == "gemma3" else a)
        h = _norm(x, part["ffn_norm.weight"])
        gate, up = _linear(part, "ffn_gate", h), _linear(part, "ffn_up", h)
        gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        fed = _linear(part, "ffn_down", (gelu if name == "gemma3" else gate / (1 + np.exp(-gate))) * up)
        x = x + (_norm(fed, part["post_ffw_norm.weight"]) if name == "gemma3" else fed)
    head = w.get("output.weight", w["token_embd.weight"]).astype(np.float64)
    return _norm(x, w["output_norm.weight"].astype(np.float64)) @ head.T


def _norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def _linear(part: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ part[f"{name}.weight"].T + part.get(f"{name}.bias", 0.0)


def _attention(
    name: str, metadata: Mapping[str, Any], part: Mapping[str, Array], x: Array, positions: Array, k: int,
    divisors: Array | None,
) -> Array:  # fmt: skip
    q, keys, values = (_linear(part, f"attn_{c}", x).reshape(len(x), -1, WIDTH) for c in "qkv")
    if "attn_q_norm.weight" in part:
        q, keys = _norm(q, part["attn_q_norm.weight"]), _norm(keys, part["attn_k_norm.weight"])
    is_local = name == "gemma3" and (k + 1) % metadata.get("gemma3.attention.sliding_window_pattern", 6) != 0
    base = 10000.0 if is_local else metadata[f"{name}.rope.freq_base"]
    width = metadata.get(f"{name}.rope.dimension_count", WIDTH)
    angles = positions[:, None] * base ** (-np.arange(0, width, 2) / width)
    if divisors is not None:
        angles = angles / divisors
    if not is_local and metadata.get(f"{name}.rope.scaling.type") == "linear":
        angles = angles / metadata[f"{name}.rope.scaling.factor"]
    q, keys = (_turn(y, angles, interleaved=name == "llama") for y in (q, keys))
    seen = positions[None] <= positions[:, None]
    if is_local:
        seen &= positions[None] > positions[:, None] - metadata["gemma3.attention.sliding_window"]
    heads = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = np.where(seen, q[:, head] @ keys[:, shared].T * WIDTH**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ values[:, shared])
    return _linear(part, "attn_output", np.concatenate(heads, -1))


def _turn(x: Array, angles: Array, *, interleaved: bool) -> Array:
    """Pairs of elements of each head [seq, heads, width] as complex numbers, turned."""
    count = angles.shape[1]
    first, second = (np.s_[0 : 2 * count : 2], np.s_[1 : 2 * count : 2]) if interleaved else (
        np.s_[:count], np.s_[count : 2 * count]
    )  # fmt: skip
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    y = x.copy()
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def byte_tokenizer(*more: str) -> dict[str, Any]:
    """Fields of a tokenizer of all bytes without merges but one, and control tokens."""
    tokens = [*BYTES, "ab", *more]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3] * len(more), "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
