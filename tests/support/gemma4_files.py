"""Tiny GGUF files of Gemma 4, and a forward pass in NumPy on their own names and layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.llm_files import EPSILON, VOCAB

Array = np.ndarray[Any, Any]
HIDDEN, HEADS, INTER, LAYERS, WINDOW = 64, 4, 96, 6, 5
WIDTH, LOCAL_WIDTH, TURNED = 64, 32, 16  # of global heads, of which so many elements are turned, and of local ones
LOCAL = (True, False, True, False, True, False)
SHARED, OF_LAYER = 2, 32
KV_HEADS, LOCAL_KV_HEADS = 1, 2
EXPERTS, CHOSEN, OF_EXPERT = 5, 2, 32


def fields(*, is_small: bool, has_experts: bool = False, **more: Any) -> dict[str, Any]:
    """Hyperparameters as llama.cpp's converter writes them. `is_small`: layers have inputs of their own, and the last
    ones keys and values of others."""
    wide = [INTER] * (LAYERS - SHARED) + [2 * INTER] * SHARED
    counts = [LOCAL_KV_HEADS if is_local else KV_HEADS for is_local in LOCAL]
    common = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS, "attention.head_count": HEADS,
        "feed_forward_length": wide if is_small else INTER, "attention.layer_norm_rms_epsilon": EPSILON,
        "attention.head_count_kv": LOCAL_KV_HEADS if is_small else counts, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4, "attention.key_length": WIDTH, "attention.value_length": WIDTH,
        "attention.key_length_swa": LOCAL_WIDTH, "attention.value_length_swa": LOCAL_WIDTH,
        "rope.dimension_count": WIDTH, "rope.dimension_count_swa": LOCAL_WIDTH, "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": list(LOCAL), "attention.shared_kv_layers": SHARED if is_small else 0,
        "embedding_length_per_layer_input": OF_LAYER if is_small else 0, "final_logit_softcapping": 3.0,
    }  # fmt: skip
    if has_experts:
        common |= {"expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": OF_EXPERT}
    return {f"gemma4.{key}": value for key, value in {**common, **more}.items() if value is not None}


def tensors(metadata: Mapping[str, Any], *, vocab: int = VOCAB, seed: int = 0) -> dict[str, Array]:
    """Random weights in float32. Global layers have keys for values where layers have no inputs of their own."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def vector(size: int) -> Array:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    of_layer, shared = (metadata[f"gemma4.{key}"] for key in (_PER_LAYER, "attention.shared_kv_layers"))
    fixed = np.full((WIDTH - TURNED) // 2, 1e30)
    found = {
        "token_embd.weight": matrix(vocab, HIDDEN), "output_norm.weight": vector(HIDDEN),
        "rope_freqs.weight": np.concatenate([np.ones(TURNED // 2), fixed]).astype(np.float32),
    }  # fmt: skip
    if of_layer:
        found["per_layer_token_embd.weight"] = matrix(vocab, LAYERS * of_layer)
        found["per_layer_model_proj.weight"] = matrix(LAYERS * of_layer, HIDDEN)
        found["per_layer_proj_norm.weight"] = vector(of_layer)
    for k, is_local in enumerate(LOCAL):
        width, kv_heads = LOCAL_WIDTH if is_local else WIDTH, _of_layer(metadata, "attention.head_count_kv", k)
        wide = _of_layer(metadata, "feed_forward_length", k)
        layer = {
            "attn_q.weight": matrix(HEADS * width, HIDDEN), "attn_output.weight": matrix(HIDDEN, HEADS * width),
            "attn_q_norm.weight": vector(width) * np.float32(width**-0.5), "ffn_gate.weight": matrix(wide, HIDDEN),
            "ffn_up.weight": matrix(wide, HIDDEN), "ffn_down.weight": matrix(HIDDEN, wide),
            "layer_output_scale.weight": vector(1),
        }  # fmt: skip
        norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
        if k < LAYERS - shared:
            layer |= {"attn_k.weight": matrix(kv_heads * width, HIDDEN), "attn_k_norm.weight": vector(width)}
            if of_layer or is_local:
                layer["attn_v.weight"] = matrix(kv_heads * width, HIDDEN)
        if of_layer:
            layer |= {"inp_gate.weight": matrix(of_layer, HIDDEN), "proj.weight": matrix(HIDDEN, of_layer)}
            norms.append("post_norm")
        if "gemma4.expert_count" in metadata:
            layer |= {
                "ffn_gate_inp.weight": matrix(EXPERTS, HIDDEN) * 32, "ffn_gate_inp.scale": vector(HIDDEN),
                "ffn_gate_up_exps.weight": matrix(EXPERTS, 2 * OF_EXPERT, HIDDEN),
                "ffn_down_exps.weight": matrix(EXPERTS, HIDDEN, OF_EXPERT), "ffn_down_exps.scale": vector(EXPERTS),
            }  # fmt: skip
            norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"]
        layer |= {f"{norm}.weight": vector(HIDDEN) for norm in norms}
        found |= {f"blk.{k}.{name}": weight for name, weight in layer.items()}
    return found


_PER_LAYER = "embedding_length_per_layer_input"


def _of_layer(metadata: Mapping[str, Any], key: str, k: int) -> int:
    found = metadata[f"gemma4.{key}"]
    return int(found[k] if isinstance(found, list) else found)


def forward(metadata: Mapping[str, Any], weights: Mapping[str, Array], tokens: list[int]) -> Array:
    """Logits [tokens, vocab] in float64."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    x = w["token_embd.weight"][tokens] * HIDDEN**0.5
    of_layer, inputs = metadata[f"gemma4.{_PER_LAYER}"], None
    if of_layer:
        own = w["per_layer_token_embd.weight"][tokens].reshape(len(x), LAYERS, of_layer) * of_layer**0.5
        shared = (x @ w["per_layer_model_proj.weight"].T * HIDDEN**-0.5).reshape(own.shape)
        inputs = (own + _norm(shared) * w["per_layer_proj_norm.weight"]) / 2**0.5
    seen: dict[bool, tuple[Array, Array]] = {}
    for k, is_local in enumerate(LOCAL):
        p = {name.removeprefix(f"blk.{k}."): weight for name, weight in w.items() if name.startswith(f"blk.{k}.")}
        h = _norm(x) * p["attn_norm.weight"]
        divisors = np.ones(LOCAL_WIDTH // 2) if is_local else w["rope_freqs.weight"]
        a = _attention(p, h, is_local, 1e4 if is_local else 1e6, divisors, seen)
        x = x + _norm(a) * p["post_attention_norm.weight"]
        fed = _gated(p, _norm(x) * p["ffn_norm.weight"])
        if "ffn_gate_inp.weight" in p:
            fed = _norm(fed) * p["post_ffw_norm_1.weight"] + _norm(_experts(p, x)) * p["post_ffw_norm_2.weight"]
        x = x + _norm(fed) * p["post_ffw_norm.weight"]
        if inputs is not None:
            given = (_gelu(x @ p["inp_gate.weight"].T) * inputs[:, k]) @ p["proj.weight"].T
            x = x + _norm(given) * p["post_norm.weight"]
        x = x * p["layer_output_scale.weight"]
    logits = _norm(x) * w["output_norm.weight"] @ w["token_embd.weight"].T
    return np.asarray(3 * np.tanh(logits / 3))


def _attention(
    p: Mapping[str, Array],
    x: Array,
    is_local: bool,
    base: float,
    divisors: Array,
    seen: dict[bool, tuple[Array, Array]],
) -> Array:
    """`seen`: keys and values of the last layer of each kind that has its own."""
    width, places = LOCAL_WIDTH if is_local else WIDTH, np.arange(len(x))
    angles = places[:, None] * base ** (-np.arange(0, width, 2) / width) / divisors

    def normed_and_turned(y: Array, kind: str) -> Array:
        y = _norm(y.reshape(len(x), -1, width)) * p[f"attn_{kind}_norm.weight"]
        turned = (y[..., : width // 2] + 1j * y[..., width // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    q = normed_and_turned(x @ p["attn_q.weight"].T, "q")
    if "attn_k.weight" in p:
        keys = x @ p["attn_k.weight"].T
        values = x @ p["attn_v.weight"].T if "attn_v.weight" in p else keys
        seen[is_local] = normed_and_turned(keys, "k"), _norm(values.reshape(len(x), -1, width))
    keys, values = seen[is_local]
    can_see = places[None] <= places[:, None]
    if is_local:
        can_see &= places[None] > places[:, None] - WINDOW
    heads = []
    for head in range(HEADS):
        of = head * keys.shape[1] // HEADS
        scores = np.where(can_see, q[:, head] @ keys[:, of].T, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(shares / shares.sum(-1, keepdims=True) @ values[:, of])
    return np.concatenate(heads, -1) @ p["attn_output.weight"].T


def _experts(p: Mapping[str, Array], x: Array) -> Array:
    """Token by token."""
    likes = np.exp((_norm(x) * p["ffn_gate_inp.scale"] * HIDDEN**-0.5) @ p["ffn_gate_inp.weight"].T)
    given, found = _norm(x) * p["pre_ffw_norm_2.weight"], np.zeros_like(x)
    for row, token in enumerate(given):
        best = np.argsort(-likes[row])[:CHOSEN]
        for e in best:
            gate, up = np.split(p["ffn_gate_up_exps.weight"][e], 2)
            fed = p["ffn_down_exps.weight"][e] @ (_gelu(gate @ token) * (up @ token))
            found[row] += likes[row, e] / likes[row, best].sum() * p["ffn_down_exps.scale"][e] * fed
    return found


def _gated(p: Mapping[str, Array], x: Array) -> Array:
    return (_gelu(x @ p["ffn_gate.weight"].T) * (x @ p["ffn_up.weight"].T)) @ p["ffn_down.weight"].T


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
