"""A language model as it lies on disk: hyperparameters, named weights, tokenizer, provenance; whatever the file format.

Weights have our names, whatever the checkpoint calls them:

    embed [vocab, hidden]    norm [hidden]    head [vocab, hidden]    head_bias [vocab]    positions [context, hidden]
    layer_embed, layer_project, layer_project_norm: of what layers are given of each token (layer_inputs.py)
    layers.K.: attn_norm, q, k, v, o, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, q_gate, attn_post_norm,
               mlp_norm, gate, up, down, gate_bias, up_bias, down_bias, mlp_post_norm; of a mixture of experts
               router [experts, hidden], router_balance [experts], experts.E.(gate, up, down), shared.(gate, up, down),
               shared_router [hidden],
               and where these are beside an MLP router_norm, experts_norm, experts_post_norm, experts_scale [experts],
               dense_post_norm; input_gate, input_project, input_norm, scale [1];
               in place of attention conv_*, delta_*, mamba_*, or q, q_down, kv_down, latent_keys.H, latent_values.H
               (`expected_weights` has their shapes)

Norms that are no RMS norms may have a bias, attn_norm_bias and the like. Matrices are [out, in], as in both kinds of
checkpoints. Rotary embeddings work on halves of a head.
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
    """A weight of a checkpoint. `stored` are its numbers (float32, float16, bfloat16), rows of blocks as bytes, or rows
    that lie otherwise in a file. `block_format`: of rows of blocks one of BLOCK_FORMATS, of others what packed their
    codes; None: they are floats."""

    stored: Array | PackedRows
    shape: tuple[int, ...]
    block_format: str | None = None

    @property
    def data(self) -> Array:
        """Its numbers, which packed rows make anew each time, or rows of blocks as bytes."""
        return self.stored if isinstance(self.stored, np.ndarray) else self.floats()

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def floats(self, rows: slice = slice(None)) -> Array:
        """Some rows of a weight in floats."""
        assert self.block_format is None
        result = self.stored[rows]
        assert isinstance(result, np.ndarray)
        return result

    def grouped(self, rows: slice = slice(None)) -> GroupedWeight:
        """Codes, scales and offsets of a weight that has them, or of some of its rows."""
        assert self.block_format is not None
        result = self.stored[rows]
        return result if isinstance(result, GroupedWeight) else BLOCK_FORMATS[self.block_format].unpack(result)

    def to_float32(self) -> Array:
        result = self.data if self.block_format is None else self.grouped().dequantize()
        return result.astype(np.float32).reshape(self.shape)

    def part(self, begin: int, end: int) -> Weight:
        """Some of its rows, not copied."""
        return self.picked(slice(begin, end), (end - begin, *self.shape[1:]))

    def member(self, index: int) -> Weight:
        """One of several along the first axis, not copied."""
        n = math.prod(self.shape[1:-1])
        if self.block_format is None and isinstance(self.stored, np.ndarray):
            return Weight(self.stored[index], self.shape[1:])
        return self.picked(slice(index * n, (index + 1) * n), self.shape[1:])

    @property
    def transposed(self) -> Weight:
        """A matrix of floats, not copied; packed rows are those of [out, in] whatever the file has."""
        return Weight(self.stored.T, self.shape[::-1]) if isinstance(self.stored, np.ndarray) else self

    def rows(self, order: Array) -> Weight:
        """With its rows in another order."""
        return self.picked(order, self.shape)

    def picked(self, rows: slice | Array, shape: tuple[int, ...]) -> Weight:
        """Some of its rows, those of all experts counted on, as a weight of another shape."""
        result = self.stored.picked(rows) if isinstance(self.stored, PackedRows) else self.stored[rows]
        return Weight(result, shape, self.block_format)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """`json` is a tokenizer of the `tokenizers` library in its own format. `stop` ends a reply."""

    json: str
    chat_template: str | None = None
    bos: int | None = None
    stop: tuple[int, ...] = ()
    adds_bos: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token and the like, for the template
    other_templates: Mapping[str, str] = field(default_factory=dict)  # by name: "tool_use"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `read_checkpoint` gives. `provenance` names source, licence and authors."""

    config: DecoderConfig
    weights: Mapping[str, Weight]
    tokenizer: TokenizerData | None
    provenance: Mapping[str, str]
    generation: Mapping[str, Any] = field(default_factory=dict)  # defaults: temperature, top_p, ...


def expected_weights(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The weights that a decoder of this configuration has, with their shapes."""
    c = config
    first = ["attn_norm"] if c.has_pre_norms else []
    others = ["mlp_norm"] if c.has_pre_norms and not c.has_one_norm else []
    others += ["attn_post_norm", "mlp_post_norm"] if c.has_post_norms else []
    whole: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.hidden), "norm": (c.hidden,)}
    if not c.is_tied:
        whole["head"] = (c.vocab, c.hidden)
    if c.has_head_bias:
        whole["head_bias"] = (c.vocab,)
    if c.has_positions:
        whole["positions"] = (c.context, c.hidden)
    if c.layer_input is not None:
        wide = c.layers * c.layer_input
        whole |= {"layer_embed": (c.vocab, wide), "layer_project": (wide, c.hidden)}
        whole["layer_project_norm"] = (c.layer_input,)
    is_biased = c.norm == "layer_biased"
    if is_biased:
        whole["norm_bias"] = (c.hidden,)
    for k in range(c.layers):
        mixing = _MIXING[c.mixing(k)](c, k)
        layer = _norms(first, c.hidden, is_biased) | mixing | _norms(others, c.hidden, is_biased) | _mlp_weights(c, k)
        if c.layer_input is not None:
            layer |= {"input_gate": (c.layer_input, c.hidden), "input_project": (c.hidden, c.layer_input)}
            layer["input_norm"] = (c.hidden,)
        if c.has_layer_scale:
            layer["scale"] = (1,)
        whole |= {f"layers.{k}.{name}": shape for name, shape in layer.items()}
    return whole


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
    without = ("k", "v") if c.keys_from(layer) != layer else ("v",) if c.is_unvalued(layer) else ()
    return {name: shape for name, shape in result.items() if name.partition("_")[0] not in without}


def _latent_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.latent is not None
    net, given = c.latent, c.latent.query_rank or c.hidden
    result: dict[str, tuple[int, ...]] = (
        {} if net.query_rank is None else {"q_down": (net.query_rank, c.hidden), "q_down_norm": (net.query_rank,)}
    )
    result |= {
        "q": (c.heads * (net.plain + net.turned), given), "kv_down": (net.rank + net.turned, c.hidden),
        "kv_norm": (net.rank,), "o": (c.hidden, c.heads * net.width),
    }  # fmt: skip
    for h in range(c.heads):
        result |= {f"latent_keys.{h}": (net.rank, net.plain), f"latent_values.{h}": (net.width, net.rank)}
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
    heads, channels, wide = c.states.heads, c.states.channels, c.states.heads * c.states.width
    return {
        "delta_qkv": (channels, c.hidden), "delta_gate": (wide, c.hidden), "delta_beta": (heads, c.hidden),
        "delta_alpha": (heads, c.hidden), "delta_out": (c.hidden, wide), "delta_conv": (channels, c.states.length),
        "delta_rate": (heads,), "delta_step": (heads,), "delta_scale": (c.states.width,),
    }  # fmt: skip


def _mamba_weights(c: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    assert c.states is not None
    heads, channels, wide = c.states.heads, c.states.channels, c.states.heads * c.states.width
    products: dict[str, tuple[int, ...]] = {
        "mamba_gate": (wide, c.hidden), "mamba_given": (channels, c.hidden), "mamba_time": (heads, c.hidden),
        "mamba_out": (c.hidden, wide),
    }  # fmt: skip
    result = products | {
        "mamba_conv": (channels, c.states.length), "mamba_rate": (heads,), "mamba_step": (heads,),
        "mamba_skip": (heads,), "mamba_scale": (wide,),
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
    if experts.is_beside:
        norms = ("router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        result |= gated("", config.intermediate_of(layer)) | {name: (config.hidden,) for name in norms}
    if experts.has_scales:
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
    """The weights with those taken apart, by layer, that are several: one for each expert, then the rows of `fused`.
    ImportModelError: one has not as many experts or rows."""
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
            result[f"{begin}.{part}"] = weight.part(at, at + count)
            at += count
    return result


def _split_experts(config: DecoderConfig, weights: Mapping[str, Weight], source: str) -> dict[str, Weight]:
    """Those of layers.K.experts, which hold one matrix for each expert, by expert."""
    result = dict(weights)
    for name, weight in weights.items():
        begin, _, kind = name.rpartition(".")
        if not begin.endswith(".experts") or config.experts is None:
            continue
        what = "vector" if kind.endswith("_bias") else "matrix"
        if len(weight.shape) != (2 if what == "vector" else 3) or weight.shape[0] != config.experts.count:
            raise ImportModelError(
                f"{source}: weight {name} has shape {weight.shape}; it needs a {what} for each of "
                f"{config.experts.count} experts"
            )
        del result[name]
        result |= {f"{begin}.{e}.{kind}": weight.member(e) for e in range(config.experts.count)}
    return result


def in_halves(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Queries and keys with the first elements of all turned pairs of a head before the second ones."""
    result = dict(weights)
    width = config.rope.width
    for kind, heads in (("q", config.heads), ("k", config.kv_heads)):
        places = np.arange(heads * config.head_width).reshape(heads, config.head_width)
        turned = places[:, :width].reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(heads, width)
        order = np.concatenate([turned, places[:, width:]], axis=1).reshape(-1)
        for k in range(config.layers):
            for name in (f"layers.{k}.{kind}", f"layers.{k}.{kind}_bias"):
                if name in result:
                    result[name] = result[name].rows(order)
    return result


def check_weights(config: DecoderConfig, weights: Mapping[str, Weight], source: str) -> None:
    """ImportModelError for what is missing, has another shape, or is there but means nothing to us."""
    expected = expected_weights(config)
    missing = [name for name in expected if name not in weights]
    unknown = [name for name in weights if name not in expected]
    if missing:
        instead = f"; {_some(unknown)} there and unknown" if unknown else ""
        if missing == ["head"]:
            instead += "; if the embedding is used for it, config.json says so by tie_word_embeddings"
        raise ImportModelError(
            f"{source}: {_some(missing)} missing; a {config.architecture} of {config.layers} layers has "
            f"{len(expected)} weights, the file {len(weights)}{instead}"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ImportModelError(
                f"{source}: weight {name} has shape {weights[name].shape}, the hyperparameters say {shape}"
            )
    if unknown:
        raise ImportModelError(f"{source}: {_some(unknown)} unknown to the architecture {config.architecture}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
    return f"weight {text} is" if len(listed) == 1 else f"weights {text} are"
