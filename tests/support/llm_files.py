"""Tiny GGUF files, and a forward pass in NumPy on their own names and layout, written from the papers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.gguf_format import TYPE_NAMES

gguf = pytest.importorskip("gguf")

Array = np.ndarray[Any, Any]
VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, INTER, LAYERS, CONTEXT = 40, 256, 4, 2, 64, 256, 2, 128
EPSILON = 1e-5
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
STATE_HEADS, STATE_KEYS, STATE_WIDTH, STATE_LENGTH = 4, 2, 32, 4  # of layers of the gated delta rule
JOINTLY_NORMED, NORMED_BY_HEAD = ("olmo2", "olmoe"), (
    "gemma3", "qwen3", "qwen3moe", "exaone4", "lfm2", "lfm2moe", "glm4moe", *HYBRIDS
)  # fmt: skip
NORMED_WHEN_TURNED = ("hunyuan-dense",)
GEMMAS, POST_NORMED = ("gemma", "gemma2", "gemma3"), ("gemma2", "gemma3", "olmo2", "exaone4", "glm4")
WITHOUT_PRE_NORMS = ("olmo2", "exaone4")
COMMANDS = ("command-r", "cohere2")
INTERLEAVED = (
    "llama", "smollm3", "granite", "granitemoe", "granitehybrid", *COMMANDS, "ernie4_5", "ernie4_5-moe", "chatglm",
    "glm4", "arcee", "mistral3",
)  # fmt: skip
LAYER_NORMED = ("starcoder2", "phi2", "stablelm", "gpt2", "gptneox", *COMMANDS)
UNGATED = ("starcoder2", "phi2", "gpt2", "gptneox", "arcee")
FUSED_QKV = ("phi3", "phi2", "gpt2", "gptneox", "chatglm")
FUSED_GATES = ("phi3", "chatglm", "glm4")
NORMED_BEFORE_MLP_BY = dict.fromkeys(
    ("gpt-oss", "seed_oss", "glm4moe", *HYBRIDS), "post_attention_norm"
)  # else "ffn_norm"
LAST_NORM = dict.fromkeys(("lfm2", "lfm2moe"), "token_embd_norm")  # else "output_norm"
RANK, PLAIN, TURNED, OF_VALUE, QUERY_RANK = 128, 64, 32, 96, 160  # of latent attention
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
BYTES = [chr(b) if b in PRINTABLE else chr(256 + OTHERS.index(b)) for b in range(256)]  # as GPT-2 spells them


def fields(name: str, **more: Any) -> dict[str, Any]:
    """Hyperparameters as llama.cpp's converter writes them."""
    epsilon = "attention.layer_norm_epsilon" if name in LAYER_NORMED else "attention.layer_norm_rms_epsilon"
    common = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        epsilon: EPSILON, "rope.freq_base": 10000.0, "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
    }  # fmt: skip
    if name in (*HYBRIDS, "granitehybrid"):
        common |= {
            "ssm.conv_kernel": STATE_LENGTH, "ssm.state_size": STATE_WIDTH, "ssm.group_count": STATE_KEYS,
            "ssm.time_step_rank": STATE_HEADS, "ssm.inner_size": STATE_HEADS * STATE_WIDTH,
        }  # fmt: skip
    if name == "deepseek2":
        common |= {
            "attention.kv_lora_rank": RANK, "attention.q_lora_rank": QUERY_RANK, "attention.key_length": RANK + TURNED,
            "attention.value_length": RANK, "attention.key_length_mla": PLAIN + TURNED, "attention.head_count_kv": 1,
            "attention.value_length_mla": OF_VALUE, "rope.dimension_count": TURNED,
        }  # fmt: skip
    return {f"{name}.{key}": value for key, value in {**common, **more}.items() if value is not None}


def tensors(
    name: str,
    *,
    seed: int = 0,
    tied: bool = False,
    biases: tuple[str, ...] = (),
    vocab: int = VOCAB,
    layers: int = LAYERS,
    experts: int = 0,
    shared: int = 0,
    dense_layers: tuple[int, ...] = (),
    balanced: bool = False,
    parallel: bool = False,
    convolved: tuple[int, ...] = (),
    remembering: tuple[int, ...] = (),
) -> dict[str, Array]:
    """Random weights in float32 for an architecture. `shared`: the width of an expert for all tokens. `convolved`,
    `remembering`: layers without attention."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def of_experts(at: str) -> dict[str, Array]:
        found = {"ffn_gate_inp": matrix(experts, HIDDEN) * 8}
        for kind, rows in (("gate", INTER), ("up", INTER), ("down", HIDDEN)):
            found[f"ffn_{kind}_exps"] = np.stack([matrix(rows, HIDDEN) for _ in range(experts)])
            if shared:
                sizes = (HIDDEN, shared) if kind == "down" else (shared, HIDDEN)
                found[f"ffn_{kind}_shexp"] = matrix(*sizes)
        biases = {}
        if name == "gpt-oss":
            biases = {
                f"{at}{part}.bias": np.stack([vector(len(w)) for w in weight])
                for part, weight in found.items()
                if part.endswith("_exps")
            }
            biases[f"{at}ffn_gate_inp.bias"] = vector(experts)
        if shared and name in ("qwen2moe", *HYBRIDS):
            found["ffn_gate_inp_shexp"] = vector(HIDDEN) * HIDDEN**-0.5
        if balanced:
            biases[f"{at}exp_probs_b.bias"] = vector(experts)
        return {f"{at}{part}.weight": weight for part, weight in found.items()} | biases

    def vector(size: int, around: float = 0.0) -> Array:
        return (around + 0.2 * rng.standard_normal(size)).astype(np.float32)

    def of_state_spaces() -> dict[str, Array]:
        wide, channels = STATE_HEADS * STATE_WIDTH, (STATE_HEADS + 2 * STATE_KEYS) * STATE_WIDTH
        return {
            "ssm_in.weight": matrix(wide + channels + STATE_HEADS, HIDDEN), "ssm_out.weight": matrix(HIDDEN, wide),
            "ssm_conv1d.weight": vector(channels * STATE_LENGTH, 0.2).reshape(channels, STATE_LENGTH),
            "ssm_conv1d.bias": vector(channels), "ssm_dt.bias": vector(STATE_HEADS),
            "ssm_a": -np.abs(vector(STATE_HEADS, 0.5)).reshape(-1, 1), "ssm_d": vector(STATE_HEADS, 1).reshape(-1, 1),
            "ssm_norm.weight": vector(wide, 1).reshape(STATE_KEYS, -1),
        }  # fmt: skip

    def of_latent() -> dict[str, Array]:
        return {
            "attn_q_a_norm.weight": vector(QUERY_RANK, 1), "attn_kv_a_norm.weight": vector(RANK, 1),
            "attn_q_b.weight": matrix(HEADS * (PLAIN + TURNED), QUERY_RANK),
            "attn_k_b.weight": np.stack([matrix(RANK, PLAIN) for _ in range(HEADS)]),
            "attn_v_b.weight": np.stack([matrix(OF_VALUE, RANK) for _ in range(HEADS)]),
            "attn_output.weight": matrix(HIDDEN, HEADS * OF_VALUE),
        }  # fmt: skip

    def of_states() -> dict[str, Array]:
        wide, channels = STATE_HEADS * STATE_WIDTH, (STATE_HEADS + 2 * STATE_KEYS) * STATE_WIDTH
        rows = {"attn_qkv": channels, "attn_gate": wide}
        rows |= (
            {"ssm_ba": 2 * STATE_HEADS} if name == "qwen3next" else {"ssm_beta": STATE_HEADS, "ssm_alpha": STATE_HEADS}
        )
        found = {f"{part}.weight": matrix(n, HIDDEN) for part, n in rows.items()}
        return found | {
            "ssm_out.weight": matrix(HIDDEN, wide),
            "ssm_conv1d.weight": vector(channels * STATE_LENGTH, 0.2).reshape(channels, STATE_LENGTH),
            "ssm_a": -np.abs(vector(STATE_HEADS, 0.5)), "ssm_dt.bias": vector(STATE_HEADS),
            "ssm_norm.weight": vector(STATE_WIDTH, 1),
        }  # fmt: skip

    found = {
        "token_embd.weight": matrix(vocab, HIDDEN) * 4,
        f"{LAST_NORM.get(name, 'output_norm')}.weight": vector(HIDDEN, 1),
    }
    if not tied:
        found["output.weight"] = matrix(vocab, HIDDEN)
    if name in LAYER_NORMED and name not in COMMANDS:
        found["output_norm.bias"] = vector(HIDDEN)
    if name == "phi2":
        found["output.bias"] = vector(vocab)
    if name == "gpt2":
        found["position_embd.weight"] = matrix(CONTEXT, HIDDEN)
    widths = {"attn_q": HEADS * WIDTH, "attn_k": KV_HEADS * WIDTH, "attn_v": KV_HEADS * WIDTH, "attn_output": HIDDEN}
    widths |= {"ffn_gate": INTER, "ffn_up": INTER, "ffn_down": HIDDEN}
    if name in HYBRIDS:
        widths["attn_q"] *= 2
    if name in FUSED_GATES:
        widths["ffn_up"] = 2 * INTER
    if name in (*UNGATED, *FUSED_GATES):
        del widths["ffn_gate"]
    if name in FUSED_QKV:
        widths |= {"attn_qkv": (HEADS + 2 * KV_HEADS) * WIDTH}
        for part in ("attn_q", "attn_k", "attn_v"):
            del widths[part]
    if name == "deepseek2":
        widths = {
            "attn_q_a": QUERY_RANK, "attn_kv_a_mqa": RANK + TURNED,
            **{part: rows for part, rows in widths.items() if part.startswith("ffn")},
        }  # fmt: skip
    norms = ["attn_norm", NORMED_BEFORE_MLP_BY.get(name, "ffn_norm")] if name not in WITHOUT_PRE_NORMS else []
    if parallel:
        norms = ["attn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if name in POST_NORMED else []
    qk_norms = {"attn_q_norm": HEADS * WIDTH, "attn_k_norm": KV_HEADS * WIDTH} if name in JOINTLY_NORMED else {}
    qk_norms |= {"attn_q_norm": WIDTH, "attn_k_norm": WIDTH} if name in (*NORMED_BY_HEAD, *NORMED_WHEN_TURNED) else {}
    for k in range(layers):
        at = f"blk.{k}."
        has_experts = experts > 0 and k not in dense_layers
        if has_experts:
            found |= of_experts(at)
        if name == "gpt-oss":
            found[f"{at}attn_sinks.weight"] = vector(HEADS, 1)
        for part, rows in widths.items():
            if (has_experts and part.startswith("ffn")) or (
                k in (*convolved, *remembering) and part.startswith("attn")
            ):
                continue
            found[f"{at}{part}.weight"] = matrix(rows, HIDDEN)
            if part in biases:
                found[f"{at}{part}.bias"] = vector(rows)
        for part in norms:
            found[f"{at}{part}.weight"] = vector(HIDDEN, 1)
            if name in LAYER_NORMED and name not in COMMANDS:
                found[f"{at}{part}.bias"] = vector(HIDDEN)
        if k in convolved:
            square, rows = {"in_proj": 3 * HIDDEN, "out_proj": HIDDEN}, vector(3 * HIDDEN, 0.3).reshape(HIDDEN, 3)
            found |= {f"{at}shortconv.{part}.weight": matrix(n, HIDDEN) for part, n in square.items()}
            found[f"{at}shortconv.conv.weight"] = rows
            continue
        if k in remembering:
            made = of_state_spaces() if name == "granitehybrid" else of_states()
            found |= {f"{at}{part}": weight for part, weight in made.items()}
            continue
        if name == "deepseek2":
            found |= {f"{at}{part}": weight for part, weight in of_latent().items()}
        for part, size in qk_norms.items():
            found[f"{at}{part}.weight"] = vector(size, 1)
    return found


def write(path: Path, name: str, metadata: Mapping[str, Any], weights: Mapping[str, Any]) -> Path:
    """`weights`: arrays, or (bytes, name of a type)."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in metadata.items():
        add(writer, key, value)
    for key, value in weights.items():
        if isinstance(value, tuple):
            writer.add_tensor(key, value[0], raw_dtype=_type(value[1]))
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(name: str) -> Any:
    """Of a tensor, also where the `gguf` package does not know it."""
    if name in gguf.GGMLQuantizationType.__members__:
        return gguf.GGMLQuantizationType[name]
    number = next(number for number, known in TYPE_NAMES.items() if known == name)
    gguf.GGML_QUANT_SIZES[number] = BLOCK_FORMATS[name].size, BLOCK_FORMATS[name].nbytes
    return number


def add(writer: Any, key: str, value: Any) -> None:
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def forward(name: str, metadata: Mapping[str, Any], w: Mapping[str, Array], tokens: list[int]) -> Array:
    """Logits [tokens, VOCAB] in float64."""
    positions = np.arange(len(tokens))
    x = w["token_embd.weight"][tokens].astype(np.float64)
    if "position_embd.weight" in w:
        x += w["position_embd.weight"][positions]
    x *= HIDDEN**0.5 if name in GEMMAS else metadata.get(f"{name}.embedding_scale", 1.0)
    added = metadata.get(f"{name}.residual_scale", 1.0)
    for k in range(metadata[f"{name}.block_count"]):
        part = {key.removeprefix(f"blk.{k}."): v.astype(np.float64) for key, v in w.items() if f"blk.{k}." in key}
        if name in FUSED_QKV:
            counts = {"attn_q": HEADS * WIDTH, "attn_k": KV_HEADS * WIDTH, "attn_v": KV_HEADS * WIDTH}
            for kind in {"weight", "bias"} & {key.partition(".")[2] for key in part if key.startswith("attn_qkv")}:
                rows = np.split(part[f"attn_qkv.{kind}"], np.cumsum([*counts.values()])[:-1])
                part |= {f"{of}.{kind}": some for of, some in zip(counts, rows, strict=True)}
        if name in NORMED_BEFORE_MLP_BY:
            part["ffn_norm.weight"] = part[f"{NORMED_BEFORE_MLP_BY[name]}.weight"]
        if name in FUSED_GATES:
            part["ffn_gate.weight"], part["ffn_up.weight"] = np.split(part["ffn_up.weight"], 2)
        h = _normed(name, part, "attn_norm", x) if "attn_norm.weight" in part else x
        if "shortconv.conv.weight" in part:
            a = _convolution(part, h)
        elif "ssm_conv1d.weight" in part:
            a = _state_space(part, h) if name == "granitehybrid" else _remembered(name, part, h)
        elif "attn_kv_a_mqa.weight" in part:
            a = _latent_attention(metadata, part, h, positions)
        else:
            a = _attention(name, metadata, part, h, positions, k, w.get("rope_freqs.weight"))
        given, x = x, x + added * (_norm(a, part["post_attention_norm.weight"]) if name in POST_NORMED else a)
        if "ffn_norm.weight" in part or "attn_norm.weight" not in part:  # else both read the same
            is_parallel = metadata.get(f"{name}.use_parallel_residual") and name != "stablelm"
            before = given if is_parallel else x
            h = _normed(name, part, "ffn_norm", before) if "ffn_norm.weight" in part else before
        fed = _experts(name, metadata, part, h) if "ffn_gate_inp.weight" in part else _gated(name, part, h, "")
        x = x + added * (_norm(fed, part["post_ffw_norm.weight"]) if name in POST_NORMED else fed)
    head = w.get("output.weight", w["token_embd.weight"]).astype(np.float64)
    scale = metadata.get(f"{name}.logit_scale", 1.0)
    logits = (
        _normed(name, w, LAST_NORM.get(name, "output_norm"), x) @ head.T * (scale if name in COMMANDS else 1 / scale)
    )
    logits += w.get("output.bias", np.float32(0))
    return _capped(logits, metadata.get(f"{name}.final_logit_softcapping"))


def _latent_attention(metadata: Mapping[str, Any], part: Mapping[str, Array], x: Array, positions: Array) -> Array:
    """With all keys and values of all heads."""
    q = _linear(part, "attn_q_b", _norm(_linear(part, "attn_q_a", x), part["attn_q_a_norm.weight"]))
    q = q.reshape(len(x), HEADS, PLAIN + TURNED)
    latent, shared = np.split(_linear(part, "attn_kv_a_mqa", x), [RANK], axis=-1)
    latent = _norm(latent, part["attn_kv_a_norm.weight"])
    steps, scale = np.arange(0, TURNED, 2) / TURNED, (PLAIN + TURNED) ** -0.5
    frequencies = metadata["deepseek2.rope.freq_base"] ** -steps
    if "deepseek2.rope.scaling.type" in metadata:  # yarn: divided are those that turn once in the context, or less
        factor, context, share = (
            metadata[f"deepseek2.rope.scaling.{key}"]
            for key in ("factor", "original_context_length", "yarn_log_multiplier")
        )
        base = metadata["deepseek2.rope.freq_base"]
        first, last = (TURNED * np.log(context / (n * 2 * np.pi)) / (2 * np.log(base)) for n in (32, 1))
        first = max(np.floor(first), 0)
        ramp = np.clip((np.arange(TURNED // 2) - first) / (np.ceil(last) - first), 0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / factor * ramp
        scale *= (1 + share * np.log(factor)) ** 2
    angles = positions[:, None] * frequencies
    turned = _turn(q[..., PLAIN:], angles, interleaved=True)
    shared = _turn(shared[:, None], angles, interleaved=True)[:, 0]
    seen, found = positions[None] <= positions[:, None], []
    for h, (keys, values) in enumerate(zip(part["attn_k_b.weight"], part["attn_v_b.weight"], strict=True)):
        scores = (q[:, h, :PLAIN] @ (latent @ keys).T + turned[:, h] @ shared.T) * scale
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(weights / weights.sum(-1, keepdims=True) @ (latent @ values.T))
    return _linear(part, "attn_output", np.concatenate(found, axis=-1))


def _convolution(part: Mapping[str, Array], x: Array) -> Array:
    """Token by token."""
    before, after, given = np.split(_linear(part, "shortconv.in_proj", x), 3, axis=-1)
    return _linear(part, "shortconv.out_proj", after * _filtered(before * given, part["shortconv.conv.weight"]))


def _filtered(x: Array, filters: Array) -> Array:
    length, found = filters.shape[1], np.zeros_like(x)
    for t in range(len(x)):
        for j in range(max(0, length - 1 - t), length):
            found[t] += filters[:, j] * x[t - (length - 1) + j]
    return found


def _state_space(part: Mapping[str, Array], x: Array) -> Array:
    """Token by token, head by head."""
    wide, keys, shared = STATE_HEADS * STATE_WIDTH, STATE_KEYS * STATE_WIDTH, STATE_HEADS // STATE_KEYS
    gate, given, step = np.split(_linear(part, "ssm_in", x), [wide, 2 * wide + 2 * keys], axis=1)
    mixed = _filtered(given, part["ssm_conv1d.weight"]) + part["ssm_conv1d.bias"]
    value, key, query = (
        y.reshape(len(x), -1, STATE_WIDTH) for y in np.split(mixed / (1 + np.exp(-mixed)), [wide, wide + keys], axis=1)
    )
    step, found = np.log1p(np.exp(step + part["ssm_dt.bias"])), np.zeros_like(value)
    for h in range(STATE_HEADS):
        state = np.zeros((STATE_WIDTH, STATE_WIDTH))
        for t in range(len(x)):
            state = np.exp(step[t, h] * part["ssm_a"][h]) * state
            state += np.outer(step[t, h] * value[t, h], key[t, h // shared])
            found[t, h] = state @ query[t, h // shared] + part["ssm_d"][h] * value[t, h]
    gated = found.reshape(len(x), -1) * gate / (1 + np.exp(-gate))
    normed = _norm(gated.reshape(len(x), STATE_KEYS, -1), part["ssm_norm.weight"])
    return _linear(part, "ssm_out", normed.reshape(len(x), -1))


def _remembered(name: str, part: Mapping[str, Array], x: Array) -> Array:
    """Token by token, head by head."""
    keys, shared = STATE_KEYS * STATE_WIDTH, STATE_HEADS // STATE_KEYS
    mixed = _filtered(_linear(part, "attn_qkv", x), part["ssm_conv1d.weight"])
    q, k, v = (
        y.reshape(len(x), -1, STATE_WIDTH) for y in np.split(mixed / (1 + np.exp(-mixed)), [keys, 2 * keys], axis=1)
    )
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    if name == "qwen3next":
        of_keys = _linear(part, "ssm_ba", x).reshape(len(x), STATE_KEYS, 2, shared)
        beta, alpha = (of_keys[:, :, j].reshape(len(x), STATE_HEADS) for j in range(2))
    else:
        beta, alpha = _linear(part, "ssm_beta", x), _linear(part, "ssm_alpha", x)
    decay = np.exp(part["ssm_a"] * np.log1p(np.exp(alpha + part["ssm_dt.bias"])))
    beta, found = 1 / (1 + np.exp(-beta)), np.zeros_like(v)
    for h in range(STATE_HEADS):
        state, of = np.zeros((STATE_WIDTH, STATE_WIDTH)), h // shared if name == "qwen3next" else h % STATE_KEYS
        for t in range(len(x)):
            state = decay[t, h] * state
            state += np.outer(k[t, of], beta[t, h] * (v[t, h] - k[t, of] @ state))
            found[t, h] = q[t, of] @ state / STATE_WIDTH**0.5
    gate = _linear(part, "attn_gate", x)
    normed = _norm(found, part["ssm_norm.weight"]).reshape(len(x), -1)
    return _linear(part, "ssm_out", normed * gate / (1 + np.exp(-gate)))


def _gated(name: str, part: Mapping[str, Array], x: Array, suffix: str) -> Array:
    up = _linear(part, f"ffn_up{suffix}", x)
    gate, up = (up, 1.0) if name in UNGATED else (_linear(part, f"ffn_gate{suffix}", x), up)
    if name == "gpt-oss":
        gate = np.minimum(gate, 7)
        gate = gate / (1 + np.exp(-1.702 * gate))
        return _linear(part, f"ffn_down{suffix}", gate * (np.clip(up, -7, 7) + 1))
    if name == "arcee":
        return _linear(part, f"ffn_down{suffix}", np.maximum(gate, 0) ** 2)
    gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    if name == "gptneox":
        gelu = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / 2**0.5))
    return _linear(
        part, f"ffn_down{suffix}", (gelu if name in (*GEMMAS, *UNGATED) else gate / (1 + np.exp(-gate))) * up
    )


def _experts(name: str, metadata: Mapping[str, Any], part: Mapping[str, Array], x: Array) -> Array:
    """Token by token."""
    likes, chosen = np.exp(_linear(part, "ffn_gate_inp", x)), metadata[f"{name}.expert_used_count"]
    is_sigmoid = metadata.get(f"{name}.expert_gating_func", 1) == 2
    shares = likes / (1 + likes) if is_sigmoid else likes / likes.sum(-1, keepdims=True)
    preferred = shares + part.get("exp_probs_b.bias", 0.0)
    groups = preferred.reshape(len(x), metadata.get(f"{name}.expert_group_count", 1), -1)
    for row, found in enumerate(np.sort(groups, axis=-1)[..., -2:].sum(-1)):
        groups[row, np.argsort(-found)[metadata.get(f"{name}.expert_group_used_count", 1) :]] = -np.inf
    fed = np.zeros_like(x)
    for row, token in enumerate(x):
        best = np.argsort(-preferred[row])[:chosen]
        is_normed = metadata.get(f"{name}.expert_weights_norm", name not in ("olmoe", "qwen2moe", "deepseek2"))
        total = (shares[row, best].sum() if is_normed else 1.0) / metadata.get(f"{name}.expert_weights_scale", 1.0)
        for e in best:
            kinds = [(kind, of) for kind in ("gate", "up", "down") for of in ("weight", "bias")]
            own = {
                f"ffn_{kind}.{of}": part[f"ffn_{kind}_exps.{of}"][e]
                for kind, of in kinds
                if f"ffn_{kind}_exps.{of}" in part
            }
            fed[row] += shares[row, e] / total * _gated(name, own, token, "")
    if "ffn_up_shexp.weight" in part:
        gate = part.get("ffn_gate_inp_shexp.weight")
        fed += _gated(name, part, x, "_shexp") * (1.0 if gate is None else 1 / (1 + np.exp(-x @ gate))[:, None])
    return fed


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def _normed(name: str, w: Mapping[str, Array], norm: str, x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True) if name in LAYER_NORMED else x
    return _norm(x, w[f"{norm}.weight"].astype(np.float64)) + w.get(f"{norm}.bias", 0.0)


def _norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def _linear(part: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ part[f"{name}.weight"].T + part.get(f"{name}.bias", 0.0)


def _attention(
    name: str, metadata: Mapping[str, Any], part: Mapping[str, Array], x: Array, positions: Array, k: int,
    divisors: Array | None,
) -> Array:  # fmt: skip
    q, keys, values = (_linear(part, f"attn_{c}", x) for c in "qkv")
    if name in HYBRIDS:
        q, gate = (y.reshape(len(x), -1) for y in np.split(q.reshape(len(x), HEADS, -1), 2, axis=-1))
    if name in JOINTLY_NORMED:
        q, keys = _norm(q, part["attn_q_norm.weight"]), _norm(keys, part["attn_k_norm.weight"])
    q, keys, values = (y.reshape(len(x), -1, WIDTH) for y in (q, keys, values))
    if name in NORMED_BY_HEAD:
        q, keys = _norm(q, part["attn_q_norm.weight"]), _norm(keys, part["attn_k_norm.weight"])
    window = metadata.get(f"{name}.attention.sliding_window")
    every = {
        "gemma3": metadata.get("gemma3.attention.sliding_window_pattern", 6),
        "gemma2": 2,
        "gpt-oss": 2,
        "olmo2": 4,
        "exaone4": 4,
        "cohere2": 4,
    }
    is_local = window is not None and (k + 1) % every.get(name, k + 2) != 0
    base = 10000.0 if is_local else metadata[f"{name}.rope.freq_base"]
    width = metadata.get(f"{name}.rope.dimension_count", WIDTH)
    angles = positions[:, None] * base ** (-np.arange(0, width, 2) / width)
    if divisors is not None:
        angles = angles / divisors
    if not is_local and metadata.get(f"{name}.rope.scaling.type") == "linear":
        angles = angles / metadata[f"{name}.rope.scaling.factor"]
    is_unturned = name in ("gpt2", "granitehybrid") or (name == "smollm3" and (k + 1) % 4 == 0)
    if not (is_unturned or (name in ("exaone4", "cohere2") and window is not None and not is_local)):
        q, keys = (_turn(y, angles, interleaved=name in INTERLEAVED) for y in (q, keys))
    if share := metadata.get(f"{name}.attention.temperature_scale"):
        steps = metadata[f"{name}.rope.scaling.original_context_length"]
        q = q * (1 + share * np.log(1 + positions // steps))[:, None, None]
    if name in NORMED_WHEN_TURNED:
        q, keys = _norm(q, part["attn_q_norm.weight"]), _norm(keys, part["attn_k_norm.weight"])
    seen = positions[None] <= positions[:, None]
    if is_local:
        seen &= positions[None] > positions[:, None] - window
    heads = []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ keys[:, shared].T * metadata.get(f"{name}.attention.scale", WIDTH**-0.5)
        scores = np.where(seen, _capped(scores, metadata.get(f"{name}.attn_logit_softcapping")), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        if name == "gpt-oss":
            total += np.exp(part["attn_sinks.weight"][head] - scores.max(-1, keepdims=True))
        heads.append(weights / total @ values[:, shared])
    found = np.concatenate(heads, -1)
    return _linear(part, "attn_output", found / (1 + np.exp(-gate)) if name in HYBRIDS else found)


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
