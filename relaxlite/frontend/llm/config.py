"""Configuration of decoder-only language models: the hyperparameters that distinguish them, as data."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from relaxlite.records import dataclass

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu2"]
Norm = Literal["rms", "layer", "layer_biased"]
Mixing = Literal["attention", "latent", "convolution", "delta", "mamba"]
Scores = Literal["softmax", "sigmoid"]
GELU_SIGMOID = 1.702  # gelu_sigmoid: x * sigmoid(1.702 * x), Hendrycks and Gimpel, arXiv 1606.08415


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of a rotary embedding beyond the context of a model's training.

    linear: positions divided by `factor`. llama3: low frequencies divided, those between `low_frequency_factor` and
    `high_frequency_factor` blended (Llama 3.1). yarn: Peng et al., arXiv 2309.00071, with `beta_fast`, `beta_slow`.
    longrope: Ding et al., arXiv 2402.13753; width / 2 divisors of the frequencies, `long` for contexts beyond
    `original_context`, else `short`.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # factor of cos and sin; None: 0.1 * ln(factor) + 1 for yarn, else 1
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    truncates: bool = True  # yarn: the bounds of the ramp are rounded to whole indices


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al., arXiv 2104.09864) of the first `width` elements of each head, in half-split layout.

    `divisors` [width / 2] divide the frequencies before any scaling, where a checkpoint has them precomputed.
    """

    base: float
    width: int
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] | None = None

    def frequencies(self, context: int) -> tuple[np.ndarray[Any, Any], float]:
        """Compute the frequencies [width / 2] in radians per position, float64, and the factor of cos and sin.

        `context`: the maximum number of tokens of a sequence.
        """
        exponents = np.arange(0, self.width, 2, dtype=np.float64) / self.width
        unscaled = self.base**-exponents
        if self.divisors is not None:
            unscaled = unscaled / np.asarray(self.divisors)
        if self.scaling is None:
            return unscaled, 1.0
        if self.scaling.kind == "longrope":
            divisors = self.scaling.long if context > self.scaling.original_context else self.scaling.short
            return unscaled / np.asarray(divisors), self.scaling.attention_factor or 1.0
        return _SCALED[self.scaling.kind](self, self.scaling, unscaled)


def _linear(rope: Rope, scaling: RopeScaling, unscaled: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    return unscaled / scaling.factor, 1.0


def _llama3(rope: Rope, scaling: RopeScaling, unscaled: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    turns = scaling.original_context * unscaled / (2 * math.pi)  # full rotations over the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = np.clip((turns - low) / (high - low), 0, 1)  # 1: unscaled, 0: divided
    return unscaled * blend + unscaled / scaling.factor * (1 - blend), 1.0


def _yarn(rope: Rope, scaling: RopeScaling, unscaled: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    def index_of(turns: float) -> float:
        """Return the (fractional) index of the frequency with that many full rotations over the original context."""
        return rope.width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    ramp = np.clip((np.arange(rope.width // 2) - first) / max(last - first, 0.001), 0, 1)  # 0: unscaled, 1: divided
    factor = yarn_attention(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
    return unscaled * (1 - ramp) + unscaled / scaling.factor * ramp, factor


def yarn_attention(factor: float, share: float = 1.0) -> float:
    """Return YaRN's factor of cos and sin for positions scaled by `factor` (section 3.4 of the paper)."""
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` gated MLPs, of which each token uses `top_k` (Shazeer et al., arXiv 1701.06538).

    The router's scores are a softmax over all experts or a sigmoid of each. The `top_k` experts of
    highest score are weighted by their scores, with `is_normed` divided by the sum of these, then
    multiplied by `scale`.

    `is_balanced`: a bias per expert is added to the scores for the choice only (DeepSeek-V3, arXiv
    2412.19437). `groups`: experts are chosen among the `top_k_groups` groups whose two highest scores
    have the largest sum.

    `shared`: the width of an expert that all tokens use; `has_shared_gate`: its result is multiplied by a
    sigmoid gate. `has_bias`: of the router and all matrices of experts. `has_output_scales`: an expert's result
    is multiplied by a learned number.

    `has_dense_mlp`: the layer has a dense MLP as well. MLP, experts and router have a norm each of the same
    input, and the normed results of MLP and experts are added (Gemma 4).
    """

    count: int
    top_k: int
    intermediate: int
    is_normed: bool
    shared: int | None = None
    has_shared_gate: bool = False
    layers: tuple[bool, ...] = ()  # by layer, whether it has experts or one MLP; empty: all have experts
    has_bias: bool = False
    scores: Scores = "softmax"
    is_balanced: bool = False
    groups: int = 1
    top_k_groups: int = 1
    scale: float = 1.0
    has_dense_mlp: bool = False
    has_output_scales: bool = False


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Layers with a gated short convolution in place of attention (LFM2).

    Each channel is convolved along the last `length` tokens: out(after(x) * convolution(before(x) * given(x))).
    """

    length: int
    layers: tuple[bool, ...]
    has_bias: bool = False  # of the convolution and of its projections


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers with a recurrent state, one matrix per head for all past tokens, in place of attention.

    delta: the gated delta rule (Yang et al., arXiv 2412.06464; Qwen3-Next, Qwen3.5). mamba: a state space model (Dao
    and Gu, "Mamba-2", arXiv 2405.21060) whose B and C are keys and queries; `has_bias`: of its projections,
    `has_conv_bias`: of its convolution.

    `length`: tokens that the convolution of queries, keys and values covers. Each head of queries and keys serves heads
    / key_heads consecutive heads of values or, if `tiled`, every key_heads-th.
    """

    kind: Literal["delta", "mamba"]
    key_heads: int
    heads: int
    key_width: int
    width: int
    length: int
    layers: tuple[bool, ...]
    tiled: bool = False
    has_bias: bool = False
    has_conv_bias: bool = False

    @property
    def channels(self) -> int:
        """Total width of queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.heads * self.width


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values of all heads are projections of one cached vector (latent.py).

    `rank`: width of the vector. `nope_width`, `rope_width`: numbers of elements of a head's queries and keys
    without and with rotary embedding; all heads share the latter of the keys. `width`: of a head's
    values. `query_rank`: width of the vector that queries are projected from, None if from the hidden
    state. `norm_epsilon`: of the norms of both vectors.
    """

    rank: int
    nope_width: int
    rope_width: int
    width: int
    query_rank: int | None
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Hyperparameters of a decoder: token embedding, `layers` times (token mixer, MLP or experts), norm, logits.

    Heads are `head_width` wide; `kv_heads` of them have keys and values. `context`: the maximum number of
    tokens; `default_context`: the default, if a longer one costs accuracy. `per_layer_input`: the width of
    per-layer embeddings.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    context: int
    norm_epsilon: float
    rope: Rope
    is_tied: bool  # the logits use the token embedding
    activation: Activation = "silu"
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False  # of gate, up and down
    has_head_bias: bool = False
    is_gated: bool = True  # down(activation(gate(x)) * up(x)); else down(activation(up(x)))
    gate_limit: float | None = None  # c: down(activation(min(gate(x), c)) * (1 + up(x) between -c and c))
    norm: Norm = "rms"  # Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450
    is_parallel: bool = False  # attention and MLP both read the layer's input
    has_one_norm: bool = False  # of parallel layers: attention and MLP share one norm
    has_positions: bool = False  # a vector learned for each position is added to the embedding
    has_qk_norm: bool = False  # RMS norm of each head's query and key
    is_qk_norm_joint: bool = False  # over all heads together
    is_qk_norm_last: bool = False  # after the rotary embedding
    has_value_norm: bool = False  # RMS norm of each head's value, without a weight
    has_pre_norms: bool = True  # norms of the inputs of attention and MLP
    has_post_norms: bool = False  # norms of their outputs, before the residual is added
    has_output_gate: bool = False  # attention's output times the sigmoid of a projection
    has_sinks: bool = False  # attention sinks: a learned score per head in the softmax, with a value of 0
    query_scale: float | None = None  # None: head_width**-0.5
    query_log_scaling: tuple[float, int] | None = None  # (a, n): at position p times 1 + a * ln(1 + p // n)
    embedding_scale: float | None = None
    residual_scale: float | None = None  # of the outputs of attention and MLP, before the residual is added
    score_cap: float | None = None  # soft cap of attention scores: c * tanh(scores / c)
    window: int | None = None  # local layers attend to that many tokens, the current one included
    is_local: tuple[bool, ...] = ()  # by layer; empty: all of them where there is a window
    local_rope: Rope | None = None  # of local layers, where it differs
    local_head_width: int | None = None  # of local layers, where it differs
    local_kv_heads: int | None = None  # of local layers, where they differ
    kv_shared_from: tuple[int, ...] = ()  # by layer, the layer whose keys and values it reads; empty: its own
    k_is_v_layers: tuple[bool, ...] = ()  # by layer, whether values are the keys before their norm; empty: none
    intermediates: tuple[int, ...] = ()  # by layer; empty: all have `intermediate`
    per_layer_input: int | None = None
    has_layer_scale: bool = False  # the residual stream behind a layer is multiplied by a learned number
    nope_layers: tuple[bool, ...] = ()  # by layer, whether it has no rotary embedding; empty: none
    logit_divisor: float | None = None
    logit_cap: float | None = None  # soft cap of logits: c * tanh(logits / c)
    default_context: int | None = None
    experts: Experts | None = None
    convolutions: Convolutions | None = None
    states: StateLayers | None = None
    latent: LatentAttention | None = None  # the cached vectors are one head of keys, `head_width` wide

    def mixing(self, layer: int) -> Mixing:
        """Return the kind of token mixer of a layer."""
        if self.convolutions is not None and self.convolutions.layers[layer]:
            return "convolution"
        if self.states is not None and self.states.layers[layer]:
            return self.states.kind
        return "attention" if self.latent is None else "latent"

    def is_local_layer(self, layer: int) -> bool:
        if self.window is None:
            return False
        return self.is_local[layer] if self.is_local else True

    def kv_layer_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself unless they are shared."""
        return self.kv_shared_from[layer] if self.kv_shared_from else layer

    def head_width_of(self, layer: int) -> int:
        return self.local_head_width or self.head_width if self.is_local_layer(layer) else self.head_width

    def value_width_of(self, layer: int) -> int:
        return self.head_width_of(layer) if self.latent is None else self.latent.rank

    def kv_heads_of(self, layer: int) -> int:
        return self.local_kv_heads or self.kv_heads if self.is_local_layer(layer) else self.kv_heads

    def is_k_is_v_layer(self, layer: int) -> bool:
        """Return whether a layer uses its keys as values (K-is-V)."""
        return bool(self.k_is_v_layers) and self.k_is_v_layers[layer]

    def intermediate_of(self, layer: int) -> int:
        return self.intermediates[layer] if self.intermediates else self.intermediate

    def experts_of(self, layer: int) -> Experts | None:
        """Return the mixture of experts of a layer; None if it has a dense MLP only."""
        if self.experts is None or (self.experts.layers and not self.experts.layers[layer]):
            return None
        return self.experts

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None for a NoPE layer."""
        if self.nope_layers and self.nope_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.is_local_layer(layer) else self.rope
