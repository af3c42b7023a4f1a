"""A checkpoint in memory: hyperparameters, named weights, tokenizer and provenance, independent of the file format.

Weights are named alike for all checkpoints:

    embed [vocab, hidden]    norm [hidden]    head [vocab, hidden]    head_bias [vocab]    positions [context, hidden]
    layer_embed, layer_project, layer_project_norm: per-layer embeddings (per_layer_inputs.py)
    layers.K.: attn_norm, q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, q_gate, attn_post_norm,
               mlp_norm, gate, up, down, gate_bias, up_bias, down_bias, mlp_post_norm;
               mixture of experts: router [experts, hidden], router_balance [experts], experts.E.(gate, up, down),
               shared.(gate, up, down), shared_router [hidden];
               experts beside an MLP: router_norm, experts_norm, experts_post_norm, experts_scale [experts],
               dense_post_norm; per-layer embeddings: input_gate, input_project, input_norm, scale [1];
               in place of attention conv_*, delta_*, mamba_*, or q, q_down, kv_down, latent_keys.H, latent_values.H
               (`expected_weights` has their shapes)

Norms other than RMS norms may have a bias, attn_norm_bias and the like. Matrices are [out, in], as in both file
formats. Rotary embeddings rotate element i of a head with element i + width / 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.config import DecoderConfig
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.quantized import GroupedWeight, PackedRows
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a checkpoint, in floats or in blocks.

    `stored` is an array of float32, float16 or bfloat16; or uint8 [rows, bytes], the blocks of each row; or
    `PackedRows` that decode a file's tensors. `block_format` is None for floats, a key of BLOCK_FORMATS for rows of
    blocks, and the name of the quantization method for packed rows of codes.
    """

    stored: Array | PackedRows
    shape: tuple[int, ...]
    block_format: str | None = None

    @property
    def data(self) -> Array:
        """Floats (decoded at each access if the rows are packed), or rows of blocks as bytes."""
        return self.stored if isinstance(self.stored, np.ndarray) else self.floats()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def floats(self, rows: slice = slice(None)) -> Array:
        """Return some rows of a float weight, in the type of the checkpoint."""
        assert self.block_format is None
        result = self.stored[rows]
        assert isinstance(result, np.ndarray)
        return result

    def grouped(self, rows: slice = slice(None)) -> GroupedWeight:
        """Return codes, scales and offsets of some rows of a blocked weight."""
        assert self.block_format is not None
        result = self.stored[rows]
        return result if isinstance(result, GroupedWeight) else BLOCK_FORMATS[self.block_format].unpack(result)

    def to_float32(self) -> Array:
        """Return the dequantized weight in float32, of shape `shape`."""
        result = self.data if self.block_format is None else self.grouped().dequantize()
        return result.astype(np.float32).reshape(self.shape)

    def row_range(self, begin: int, end: int) -> Weight:
        """Return rows `begin` to `end` as a view."""
        return self.take_rows(slice(begin, end), (end - begin, *self.shape[1:]))

    def slice_at(self, index: int) -> Weight:
        """Return the weight at `index` along the first axis (one expert, one head) as a view."""
        n = math.prod(self.shape[1:-1])
        if self.block_format is None and isinstance(self.stored, np.ndarray):
            return Weight(self.stored[index], self.shape[1:])
        return self.take_rows(slice(index * n, (index + 1) * n), self.shape[1:])

    @property
    def transposed(self) -> Weight:
        """The transposed matrix as a view; packed rows stay [out, in], whatever the file has."""
        return Weight(self.stored.T, self.shape[::-1]) if isinstance(self.stored, np.ndarray) else self

    def reorder_rows(self, order: Array) -> Weight:
        """Return the weight with its rows in another order."""
        return self.take_rows(order, self.shape)

    def take_rows(self, rows: slice | Array, shape: tuple[int, ...]) -> Weight:
        """Select rows, numbered through all experts, and return them as a weight of shape `shape`."""
        result = self.stored.take_rows(rows) if isinstance(self.stored, PackedRows) else self.stored[rows]
        return Weight(result, shape, self.block_format)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer, in the JSON format of the `tokenizers` library, with its special tokens and chat templates.

    A token of `stop` ends a reply.
    """

    json: str
    chat_template: str | None = None
    bos: int | None = None
    stop: tuple[int, ...] = ()
    adds_bos: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # by name ("bos_token"), for chat templates
    other_templates: Mapping[str, str] = field(default_factory=dict)  # by name: "tool_use"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as `read_checkpoint` returns it. `provenance` names source, licence and authors."""

    config: DecoderConfig
    weights: Mapping[str, Weight]
    tokenizer: TokenizerData | None
    provenance: Mapping[str, str]
    generation: Mapping[str, Any] = field(default_factory=dict)  # defaults: temperature, top_p, ...


def expected_weights(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights that a decoder of this configuration has."""
    c = config
    before_mixing = ["attn_norm"] if c.has_pre_norms else []
    around_mlp = ["mlp_norm"] if c.has_pre_norms and not c.has_one_norm else []
    around_mlp += ["attn_post_norm", "mlp_post_norm"] if c.has_post_norms else []
    result: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.hidden), "norm": (c.hidden,)}
    if not c.is_tied:
        result["head"] = (c.vocab, c.hidden)
    if c.has_head_bias:
        result["head_bias"] = (c.vocab,)
    if c.has_positions:
        result["positions"] = (c.context, c.hidden)
    if c.per_layer_input is not None:
        all_layers_width = c.layers * c.per_layer_input
        result |= {"layer_embed": (c.vocab, all_layers_width), "layer_project": (all_layers_width, c.hidden)}
        result["layer_project_norm"] = (c.per_layer_input,)
    is_biased = c.norm == "layer_biased"
    if is_biased:
        result["norm_bias"] = (c.hidden,)
    for k in range(c.layers):
        mixing = _MIXING[c.mixing(k)](c, k)
        layer = (
            _norms(before_mixing, c.hidden, is_biased)
            | mixing
            | _norms(around_mlp, c.hidden, is_biased)
            | _mlp_weights(c, k)
        )
        if c.per_layer_input is not None:
            layer |= {"input_gate": (c.per_layer_input, c.hidden), "input_project": (c.hidden, c.per_layer_input)}
            layer["input_norm"] = (c.hidden,)
        if c.has_layer_scale:
            layer["scale"] = (1,)
        result |= {f"layers.{k}.{name}": shape for name, shape in layer.items()}
    return result


def _norms(names: Iterable[str], width: int, is_biased: bool) -> dict[str, tuple[int, ...]]:
    endings = ("", "_bias") if is_biased else ("",)
    return {f"{name}{ending}": (width,) for name in names for ending in endings}


def _attention_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    width = c.head_width_of(layer)
    queries, keys = c.heads * width, c.kv_heads_of(layer) * width
    result: dict[str, tuple[int, ...]] = {
        "q": (queries, c.hidden), "k": (keys, c.hidden), "v": (keys, c.hidden), "o": (c.hidden, queries)
    }  # fmt: skip
    if c.has_qkv_bias:
        result |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if c.has_o_bias:
        result |= {"o_bias": (c.hidden,)}
    if c.has_qk_norm:
        joint = c.is_qk_norm_joint
        result |= {"q_norm": (queries if joint else width,), "k_norm": (keys if joint else width,)}
    if c.has_sinks:
        result["sinks"] = (c.heads,)
    if c.has_output_gate:
        result["q_gate"] = (queries, c.hidden)
    absent = ("k", "v") if c.kv_layer_of(layer) != layer else ("v",) if c.is_k_is_v_layer(layer) else ()
    return {name: shape for name, shape in result.items() if name.partition("_")[0] not in absent}


def _latent_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.latent is not None
    mla, query_input = c.latent, c.latent.query_rank or c.hidden
    result: dict[str, tuple[int, ...]] = (
        {} if mla.query_rank is None else {"q_down": (mla.query_rank, c.hidden), "q_down_norm": (mla.query_rank,)}
    )
    result |= {
        "q": (c.heads * (mla.nope_width + mla.rope_width), query_input),
        "kv_down": (mla.rank + mla.rope_width, c.hidden),
        "kv_norm": (mla.rank,),
        "o": (c.hidden, c.heads * mla.width),
    }
    for h in range(c.heads):
        result |= {f"latent_keys.{h}": (mla.rank, mla.nope_width), f"latent_values.{h}": (mla.width, mla.rank)}
    if c.has_qkv_bias:
        result |= {f"{name}_bias": result[name][:1] for name in ("q_down", "kv_down") if name in result}
    if c.has_o_bias:
        result["o_bias"] = (c.hidden,)
    return result


def _convolution_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.convolutions is not None
    square = (c.hidden, c.hidden)
    result: dict[str, tuple[int, ...]] = {
        "conv_before": square, "conv_after": square, "conv_given": square, "conv_out": square,
        "conv": (c.hidden, c.convolutions.length),
    }  # fmt: skip
    if c.convolutions.has_bias:
        result |= {f"{name}_bias": (c.hidden,) for name in result}
    return result


def _delta_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.states is not None
    heads, channels, values = c.states.heads, c.states.channels, c.states.heads * c.states.width
    return {
        "delta_qkv": (channels, c.hidden), "delta_gate": (values, c.hidden), "delta_beta": (heads, c.hidden),
        "delta_alpha": (heads, c.hidden), "delta_out": (c.hidden, values), "delta_conv": (channels, c.states.length),
        "delta_rate": (heads,), "delta_step": (heads,), "delta_scale": (c.states.width,),
    }  # fmt: skip


def _mamba_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.states is not None
    heads, channels, values = c.states.heads, c.states.channels, c.states.heads * c.states.width
    products: dict[str, tuple[int, ...]] = {
        "mamba_gate": (values, c.hidden), "mamba_given": (channels, c.hidden), "mamba_time": (heads, c.hidden),
        "mamba_out": (c.hidden, values),
    }  # fmt: skip
    result = products | {
        "mamba_conv": (channels, c.states.length), "mamba_rate": (heads,), "mamba_step": (heads,),
        "mamba_skip": (heads,), "mamba_scale": (values,),
    }  # fmt: skip
    if c.states.has_conv_bias:
        result["mamba_conv_bias"] = (channels,)
    if c.states.has_bias:
        result |= {f"{name}_bias": shape[:1] for name, shape in products.items()}
    return result


_MIXING = {
    "attention": _attention_weights, "latent": _latent_weights, "convolution": _convolution_weights,
    "delta": _delta_weights, "mamba": _mamba_weights,
}  # fmt: skip


def _mlp_weights(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    def gated(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        inward = (width, config.hidden)
        return {f"{prefix}gate": inward, f"{prefix}up": inward, f"{prefix}down": (config.hidden, width)}

    experts = config.experts_of(layer)
    if experts is None:
        result = gated("", config.intermediate_of(layer))
        if not config.is_gated:
            del result["gate"]
        if config.has_mlp_bias:
            result |= {f"{name}_bias": shape[:1] for name, shape in result.items()}
        return result
    result = {"router": (experts.count, config.hidden)}
    if experts.has_dense_mlp:
        norms = ("router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        result |= gated("", config.intermediate_of(layer)) | {name: (config.hidden,) for name in norms}
    if experts.has_output_scales:
        result["experts_scale"] = (experts.count,)
    for e in range(experts.count):
        result |= gated(f"experts.{e}.", experts.intermediate)
    if experts.has_bias:
        result |= {f"{name}_bias": shape[:1] for name, shape in result.items()}
    if experts.is_balanced:
        result["router_balance"] = (experts.count,)
    if experts.shared is not None:
        result |= gated("shared.", experts.shared)
        if experts.has_shared_gate:
            result["shared_router"] = (config.hidden,)
    return result


def split_fused(
    config: DecoderConfig, weights: Mapping[str, Weight], fused: Mapping[str, tuple[str, ...]], source: str
) -> dict[str, Weight]:
    """Split fused weights: stacked experts into one weight per expert, then the rows of each weight that `fused` names.

    Raises ImportModelError if a weight has another number of experts or rows than its parts together.
    """
    result, expected = _split_experts(config, weights, source), expected_weights(config)
    for name in list(result):
        begin, _, kind = name.rpartition(".")
        if kind not in fused or f"{begin}.{fused[kind][0]}" not in expected:
            continue
        weight, parts = result.pop(name), fused[kind]
        counts = [expected[f"{begin}.{part}"][0] for part in parts]
        if weight.shape[:1] != (sum(counts),):
            raise ImportModelError(
                f"{source}: weight {name} has shape {weight.shape}; as {', '.join(parts)} it would have "
                f"{' + '.join(map(str, counts))} rows"
            )
        at = 0
        for part, count in zip(parts, counts, strict=True):
            result[f"{begin}.{part}"] = weight.row_range(at, at + count)
            at += count
    return result


def _split_experts(config: DecoderConfig, weights: Mapping[str, Weight], source: str) -> dict[str, Weight]:
    """Split the weights of layers.K.experts, [experts, ...], into one weight for each expert."""
    result = dict(weights)
    for name, weight in weights.items():
        begin, _, kind = name.rpartition(".")
        if not begin.endswith(".experts") or config.experts is None:
            continue
        kind_of_weight = "vector" if kind.endswith("_bias") else "matrix"
        if len(weight.shape) != (2 if kind_of_weight == "vector" else 3) or weight.shape[0] != config.experts.count:
            raise ImportModelError(
                f"{source}: weight {name} has shape {weight.shape}; it needs a {kind_of_weight} for each of "
                f"{config.experts.count} experts"
            )
        del result[name]
        result |= {f"{begin}.{e}.{kind}": weight.slice_at(e) for e in range(config.experts.count)}
    return result


def deinterleave_rotary(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Permute the rows of queries and keys from interleaved to half-split rotary embeddings.

    Pairs of elements that are rotated together lie side by side in the checkpoint; here the first elements of all pairs
    of a head come before the second ones.
    """
    result = dict(weights)
    width = config.rope.width
    for kind, heads in (("q", config.heads), ("k", config.kv_heads)):
        row_numbers = np.arange(heads * config.head_width).reshape(heads, config.head_width)
        rotated = row_numbers[:, :width].reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(heads, width)
        order = np.concatenate([rotated, row_numbers[:, width:]], axis=1).reshape(-1)
        for k in range(config.layers):
            for name in (f"layers.{k}.{kind}", f"layers.{k}.{kind}_bias"):
                if name in result:
                    result[name] = result[name].reorder_rows(order)
    return result


def check_weights(config: DecoderConfig, weights: Mapping[str, Weight], source: str) -> None:
    """Raise ImportModelError for weights that are missing, of another shape than expected, or unknown."""
    expected = expected_weights(config)
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    if missing:
        hint = f"; {_some(unknown)} there and unknown" if unknown else ""
        if missing == ["head"]:
            hint += "; if the embedding is used for it, config.json says so by tie_word_embeddings"
        raise ImportModelError(
            f"{source}: {_some(missing)} missing; a {config.architecture} of {config.layers} layers has "
            f"{len(expected)} weights, the file {len(weights)}{hint}"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ImportModelError(
                f"{source}: weight {name} has shape {weights[name].shape}, the hyperparameters say {shape}"
            )
    if unknown:
        raise ImportModelError(f"{source}: {_some(unknown)} unknown to the architecture {config.architecture}")


def _some(names: Iterable[str]) -> str:
    """Name up to four weights, with the number of the others, as the subject of a sentence."""
    listed = list(names)
    text = ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
    return f"weight {text} is" if len(listed) == 1 else f"weights {text} are"
