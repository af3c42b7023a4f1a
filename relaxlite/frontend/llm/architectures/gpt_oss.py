"""GPT-OSS (arXiv 2508.10925): experts with biases and clamped gates, attention sinks, every other layer local.

OpenAI's folders hold experts in MXFP4, with codes and scales in separate tensors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.weight_names import GGUF_LAYER, HUGGING_FACE_LAYER
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import GELU_SIGMOID, DecoderConfig
from relaxlite.frontend.llm.quantized import PackedRows, decode_mxfp4

_GATE_LIMIT = 7.0  # default if a checkpoint has none
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}  # default if a config.json has none


def _gpt_oss(h: Hyperparameters) -> DecoderConfig:
    h.require(hidden_act="silu", attention_bias=True, swiglu_alpha=GELU_SIGMOID)
    rope = h.rope(h.head_width(64))
    if h.is_gguf and rope.scaling is not None:  # GGUF has no field for it
        rope = replace(rope, scaling=replace(rope.scaling, truncates=False))
    return h.decoder(
        "gpt_oss",
        rope=rope,
        has_qkv_bias=True,
        has_o_bias=True,
        has_sinks=True,
        window=h.window(),
        is_local=h.local_layers(2),
        activation="gelu_sigmoid",
        gate_limit=h.number("gate_limit", _GATE_LIMIT),
        experts=h.experts(is_normed=True, has_bias=True),
    )


def _from_folder(weights: dict[str, Weight], config: DecoderConfig, source: str) -> dict[str, Weight]:
    """Transpose the experts' matrices to [out, in], and split interleaved columns of gate and up.

    Matrices of unexpected shapes stay as they are, to be refused later.
    """
    converted: dict[str, Weight] = {}
    for name, weight in weights.items():
        begin, _, kind = name.rpartition(".")
        if not begin.endswith(".experts"):
            converted[name] = weight
            continue
        if kind.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in weights:
            continue
        if kind.endswith("_blocks"):
            kind, result = kind.removesuffix("_blocks"), _decode_mxfp4(weight, weights, name, source)
        else:
            transposed = weight.data.swapaxes(1, 2) if weight.data.ndim == 3 else weight.data
            result = Weight(transposed, transposed.shape)
        if not kind.startswith("gate_up"):
            converted[f"{begin}.{kind}"] = result
            continue
        bias = kind.removeprefix("gate_up")
        converted |= {
            f"{begin}.{part}{bias}": _alternate_rows(result, k, source) for k, part in enumerate(("gate", "up"))
        }
    return converted


def _decode_mxfp4(weight: Weight, weights: dict[str, Weight], name: str, source: str) -> Weight:
    """Make a weight of codes uint8 [experts, rows, blocks, 16] and exponents uint8 [experts, rows, blocks]."""
    scales = weights.get(f"{name.removesuffix('_blocks')}_scales")
    if (
        scales is None
        or not weight.data.dtype == scales.data.dtype == np.uint8
        or len(weight.shape) != 4
        or weight.shape[3] != 16
        or scales.shape != weight.shape[:3]
    ):
        raise ImportModelError(
            f"{source}: weight {name} has shape {weight.shape}; it needs blocks of 16 bytes, and bytes "
            f"{weight.shape[:3]} as scales, got {None if scales is None else scales.shape}"
        )
    experts, rows, blocks, size = weight.shape
    pairs, exponents = weight.data.reshape(experts * rows, blocks * size), scales.data.reshape(experts * rows, blocks)
    packed = PackedRows.of(
        len(pairs), weight.nbytes + scales.nbytes, lambda selected: decode_mxfp4(pairs[selected], exponents[selected])
    )
    return Weight(packed, (experts, rows, 2 * blocks * size), "MXFP4")


def _alternate_rows(weight: Weight, first: int, source: str) -> Weight:
    """Select rows first, first + 2, ... of each expert."""
    if weight.block_format is None:
        data = weight.data[:, first::2] if weight.data.ndim > 1 else weight.data
        return Weight(data, data.shape)
    experts, rows, columns = weight.shape
    if rows % 2:
        raise ImportModelError(f"{source}: experts of {rows} rows, of which every other one is a gate's")
    return weight.take_rows(slice(first, None, 2), (experts, rows // 2, columns))


_HUGGING_FACE = {
    **HUGGING_FACE_LAYER,
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "experts.down": "mlp.experts.down_proj",
    "experts.gate_up_blocks": "mlp.experts.gate_up_proj_blocks",
    "experts.gate_up_scales": "mlp.experts.gate_up_proj_scales",
    "experts.down_blocks": "mlp.experts.down_proj_blocks",
    "experts.down_scales": "mlp.experts.down_proj_scales",
    "experts.down_bias": "mlp.experts.down_proj_bias",
}
_GGUF = {**GGUF_LAYER, "mlp_norm": "post_attention_norm.weight"}
del _GGUF["attn_post_norm"]

GPT_OSS = Architecture(
    ("gpt_oss", "gpt-oss"),
    _gpt_oss,
    hugging_face=_HUGGING_FACE,
    gguf=_GGUF,
    from_folder=_from_folder,
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_experts": 128, "num_experts_per_tok": 4,
        "rope_theta": 150000.0, "rope_parameters": _ROPE, "sliding_window": 128, "head_dim": 64,
        "num_key_value_heads": 8,
    },
)  # fmt: skip
