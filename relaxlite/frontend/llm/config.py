"""What distinguishes one decoder-only language model from another, as data."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from relaxlite.records import dataclass

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu2"]
Norm = Literal["rms", "layer", "layer_biased"]
Mixing = Literal["attention", "latent", "convolution", "delta", "mamba"]
Scores = Literal["softmax", "sigmoid"]
GELU_SIGMOID = 1.702  # of gelu_sigmoid: x * sigmoid(1.702 * x), Hendrycks and Gimpel, arXiv 1606.08415


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a rotary embedding is stretched beyond the context that a model was trained on.

    linear: positions divided by `factor`. llama3: low frequencies divided, those between `low_frequency_factor` and
    `high_frequency_factor` blended (Llama 3.1). yarn: Peng et al., arXiv 2309.00071, with `beta_fast`, `beta_slow`.
    longrope: Ding et al., arXiv 2402.13753; divisors of the frequencies, `long` for contexts beyond `original_context`,
    else `short`, width / 2 of each.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of cos and sin; None: 0.1 * ln(factor) + 1 for yarn, else 1
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    truncates: bool = True  # yarn: the first and last frequency that is divided in part, to whole places


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al., arXiv 2104.09864) of the first `width` elements of each head, in halves.

    `divisors` (width / 2 of them) divide the frequencies one by one, before they are scaled, where a checkpoint brings
    them ready made.
    """

    base: float
    width: int
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] | None = None

    def frequencies(self, context: int) -> tuple[np.ndarray[Any, Any], float]:
        """Radians per position [width / 2] in float64, and the factor of cos and sin, for sequences of up to `context`
        tokens."""
        steps = np.arange(0, self.width, 2, dtype=np.float64) / self.width
        plain = self.base**-steps
        if self.divisors is not None:
            plain = plain / np.asarray(self.divisors)
        if self.scaling is None:
            return plain, 1.0
        if self.scaling.kind == "longrope":
            divisors = self.scaling.long if context > self.scaling.original_context else self.scaling.short
            return plain / np.asarray(divisors), self.scaling.attention_factor or 1.0
        return _SCALED[self.scaling.kind](self, self.scaling, plain)


def _linear(rope: Rope, scaling: RopeScaling, plain: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    return plain / scaling.factor, 1.0


def _llama3(rope: Rope, scaling: RopeScaling, plain: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    turns = scaling.original_context * plain / (2 * math.pi)  # of each frequency over the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = np.clip((turns - low) / (high - low), 0, 1)  # 1: kept, 0: divided
    return plain * blend + plain / scaling.factor * (1 - blend), 1.0


def _yarn(rope: Rope, scaling: RopeScaling, plain: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    def place_of(turns: float) -> float:
        """The (fractional) index of the frequency that turns so often over the original context."""
        return rope.width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = place_of(scaling.beta_fast), place_of(scaling.beta_slow)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    ramp = np.clip((np.arange(rope.width // 2) - first) / max(last - first, 0.001), 0, 1)  # 0: kept, 1: divided
    factor = yarn_attention(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
    return plain * (1 - ramp) + plain / scaling.factor * ramp, factor


def yarn_attention(factor: float, share: float = 1.0) -> float:
    """What cos and sin are multiplied by where positions are stretched by a factor (section 3.4 of YaRN's paper)."""
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs (Shazeer et al., arXiv 1701.06538): each token goes through those `chosen` of `count` to
    which a softmax over all of them gives most, or a `sigmoid` of each, weighted by that; `is_normed`: by its share of
    what they have together; times `scale`.

    `is_balanced`: a number of each expert is added where they are chosen, not where they are weighed (DeepSeek-V3,
    arXiv 2412.19437); `groups`: only those of the `chosen_groups` are chosen whose two best have most together (there).
    `shared`: the width of one more that all tokens go through; `has_shared_gate`: times a sigmoid of its own.
    `has_bias`: of the matrix that chooses, and of those of all experts. `is_beside`: the layer has an MLP too; MLP,
    experts and what chooses them read the same, each by a norm of its own, and what MLP and experts give is normed and
    added (Gemma 4). `has_scales`: what an expert gives is multiplied by a number of its own.
    """

    count: int
    chosen: int
    intermediate: int
    is_normed: bool
    shared: int | None = None
    has_shared_gate: bool = False
    layers: tuple[bool, ...] = ()  # which have them, others one MLP; empty: all
    has_bias: bool = False
    scores: Scores = "softmax"
    is_balanced: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    is_beside: bool = False
    has_scales: bool = False


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Layers that mix tokens by a convolution of each channel along the last `length` tokens, between two gates, in
    place of attention (LFM2): out(after(x) * convolution(before(x) * given(x)))."""

    length: int
    layers: tuple[bool, ...]
    has_bias: bool = False  # of the convolution, and of the products around it


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that keep one matrix of each head for all past tokens, in place of attention.

    delta: changed by the gated delta rule (Yang et al., arXiv 2412.06464; Qwen3-Next, Qwen3.5). mamba: a state space
    (Dao and Gu, "Mamba-2", arXiv 2405.21060), whose B and C are keys and queries; `has_bias`: of the products around
    it, `has_conv_bias`: of the convolution.

    `length`: tokens that a convolution of queries, keys and values sees before. Each head of queries and keys serves
    heads / key_heads in a row, or, `tiled`, every key_heads-th.
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
        """Of queries, keys and values, side by side."""
        return 2 * self.key_heads * self.key_width + self.heads * self.width


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over one vector of each token, of which all heads make their keys and values (latent.py).

    `rank`: how wide it is. Queries and keys of a head have `plain` elements that come of it, and `turned` ones under
    the rotary embedding, whose keys all heads share; its values are `width` wide. `query_rank`: queries come by way of
    a vector of that width, too. `norm_epsilon`: of the norms of both vectors.
    """

    rank: int
    plain: int
    turned: int
    width: int
    query_rank: int | None
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: token embedding, `layers` times (attention or what stands for it, MLP or experts), norm, logits.

    Heads are `head_width` wide; `kv_heads` of them hold keys and values. `context`: the most tokens it was made for;
    `usual_context`: those that it is compiled for unless more are asked for, where that costs something.
    `layer_input`: each layer is given so many numbers of each token, from an embedding of all layers (layer_inputs.py).
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
    is_parallel: bool = False  # attention and MLP read the same, what the layer is given
    has_one_norm: bool = False  # there: one norm before both
    has_positions: bool = False  # a vector learned for each position is added to the embedding
    has_qk_norm: bool = False  # RMS norm of each head's query and key
    is_qk_norm_joint: bool = False  # it goes over all heads together
    is_qk_norm_last: bool = False  # it comes behind the rotary embedding
    has_value_norm: bool = False  # RMS norm of each head's value, without a weight
    has_pre_norms: bool = True  # norms of what attention and MLP read
    has_post_norms: bool = False  # norms of what they give, before it is added
    has_output_gate: bool = False  # what attention gives, times a sigmoid of another product
    has_sinks: bool = False  # a score of each head that the softmax of attention counts, with a value of 0
    query_scale: float | None = None  # None: head_width**-0.5
    query_growth: tuple[float, int] | None = None  # (a, n): at position p times 1 + a * ln(1 + p // n)
    embedding_scale: float | None = None
    residual_scale: float | None = None  # of what attention and MLP give, before it is added
    score_cap: float | None = None  # c * tanh(scores / c) of attention
    window: int | None = None  # local layers see that many last tokens, themselves included
    is_local: tuple[bool, ...] = ()  # by layer; empty: all of them where there is a window
    local_rope: Rope | None = None  # of local layers, where it differs
    local_head_width: int | None = None  # of local layers, where it differs
    local_kv_heads: int | None = None  # of local layers, where they differ
    keys_of: tuple[int, ...] = ()  # by layer, whose keys and values it reads; empty: its own
    unvalued: tuple[bool, ...] = ()  # by layer, those whose values are their keys, before these are normed; empty: none
    intermediates: tuple[int, ...] = ()  # by layer; empty: all have `intermediate`
    layer_input: int | None = None
    has_layer_scale: bool = False  # what a layer gives, with what it was given, times a number
    unturned: tuple[bool, ...] = ()  # by layer, those without a rotary embedding; empty: none
    logit_divisor: float | None = None
    logit_cap: float | None = None  # c * tanh(logits / c)
    usual_context: int | None = None
    experts: Experts | None = None
    convolutions: Convolutions | None = None
    states: StateLayers | None = None
    latent: Latent | None = None  # in place of attention; its vectors are one head of keys, `head_width` wide

    def mixing(self, layer: int) -> Mixing:
        """How its tokens look at those before."""
        if self.convolutions is not None and self.convolutions.layers[layer]:
            return "convolution"
        if self.states is not None and self.states.layers[layer]:
            return self.states.kind
        return "attention" if self.latent is None else "latent"

    def is_local_layer(self, layer: int) -> bool:
        if self.window is None:
            return False
        return self.is_local[layer] if self.is_local else True

    def keys_from(self, layer: int) -> int:
        """The layer whose keys and values it reads."""
        return self.keys_of[layer] if self.keys_of else layer

    def head_width_of(self, layer: int) -> int:
        return self.local_head_width or self.head_width if self.is_local_layer(layer) else self.head_width

    def value_width_of(self, layer: int) -> int:
        return self.head_width_of(layer) if self.latent is None else self.latent.rank

    def kv_heads_of(self, layer: int) -> int:
        return self.local_kv_heads or self.kv_heads if self.is_local_layer(layer) else self.kv_heads

    def is_unvalued(self, layer: int) -> bool:
        return bool(self.unvalued) and self.unvalued[layer]

    def intermediate_of(self, layer: int) -> int:
        return self.intermediates[layer] if self.intermediates else self.intermediate

    def experts_of(self, layer: int) -> Experts | None:
        if self.experts is None or (self.experts.layers and not self.experts.layers[layer]):
            return None
        return self.experts

    def rope_of(self, layer: int) -> Rope | None:
        if self.unturned and self.unturned[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.is_local_layer(layer) else self.rope
