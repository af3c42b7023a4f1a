"""What architectures share: hyperparameters under one name for both file formats, and the names of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, TypeGuard

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, Rope, RopeScaling, Scores, yarn_attention
from relaxlite.records import dataclass

# ours -> as config.json of Hugging Face calls it, and as GGUF does behind the architecture's name
_KEYS = {
    "vocab": ("vocab_size", "vocab_size"),
    "hidden": ("hidden_size", "embedding_length"),
    "layers": ("num_hidden_layers", "block_count"),
    "heads": ("num_attention_heads", "attention.head_count"),
    "kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_width": ("head_dim", "attention.key_length"),
    "intermediate": ("intermediate_size", "feed_forward_length"),
    "context": ("max_position_embeddings", "context_length"),
    "norm_epsilon": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    "layer_norm_epsilon": ("layer_norm_eps", "attention.layer_norm_epsilon"),
    "rope_base": ("rope_theta", "rope.freq_base"),
    "rope_local_base": ("rope_local_base_freq", "rope.freq_base_swa"),
    "rope_width": ("rotary_dim", "rope.dimension_count"),
    "window": ("sliding_window", "attention.sliding_window"),
    "window_pattern": ("sliding_window_pattern", "attention.sliding_window_pattern"),
    "is_tied": ("tie_word_embeddings", "is_tied"),
    "query_scalar": ("query_pre_attn_scalar", "attention.query_scalar"),
    "activation": ("hidden_act", "activation"),
    "gate_limit": ("swiglu_limit", "swiglu_limit"),
    "logit_cap": ("final_logit_softcapping", "final_logit_softcapping"),
    "score_cap": ("attn_logit_softcapping", "attn_logit_softcapping"),
    "embedding_scale": ("embedding_multiplier", "embedding_scale"),
    "residual_scale": ("residual_multiplier", "residual_scale"),
    "query_scale": ("attention_multiplier", "attention.scale"),
    "logit_divisor": ("logits_scaling", "logit_scale"),
    "qkv_bias": ("attention_bias", "qkv_bias"),
    "o_bias": ("attention_bias", "o_bias"),
    "mlp_bias": ("mlp_bias", "mlp_bias"),
    "mlp_norm": ("mlp_norm", "mlp_norm"),
    "qk_norm": ("use_qk_norm", "qk_norm"),
    "experts": ("num_experts", "expert_count"),
    "experts_chosen": ("num_experts_per_tok", "expert_used_count"),
    "expert_width": ("moe_intermediate_size", "expert_feed_forward_length"),
    "experts_normed": ("norm_topk_prob", "expert_weights_norm"),
    "expert_scale": ("routed_scaling_factor", "expert_weights_scale"),
    "expert_groups": ("n_group", "expert_group_count"),
    "expert_groups_chosen": ("topk_group", "expert_group_used_count"),
    "shared_width": ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
}
_MAX = {"layers": 10_000}  # of any integer: 2**31; a damaged file may say anything
_MAX_EXPERTS = 100_000  # of all layers
_SCORES: Mapping[int, Scores] = {1: "softmax", 2: "sigmoid"}  # as GGUF numbers them; 0: it does not say
_NUMBERED = [f"{number} ({scores})" for number, scores in _SCORES.items()]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Values of a checkpoint by our names. `source` names the file in errors, `raw` has all that the file says, where
    it has keys of its own by the usual ones: `own_keys` are these by the usual ones."""

    source: str
    raw: Mapping[str, Any]
    is_gguf: bool
    prefix: str = ""  # of GGUF's keys: "llama."
    own_keys: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        hugging_face, gguf = _KEYS[name]
        result = self.raw.get(self.prefix + gguf if self.is_gguf else hugging_face)
        return default if result is None else result

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer. ImportModelError: it is missing and has no default, or is none."""
        result = self.get(name, default)
        if isinstance(result, list) and result and all(value == result[0] for value in result):
            result = result[0]  # one for each layer, and all the same
        if not isinstance(result, int) or isinstance(result, bool) or not 0 < result <= _MAX.get(name, 2**31):
            raise self._error(name, result, "a positive integer, the same for all layers")
        return result

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number. ImportModelError: it is missing and has no default, or is none."""
        result: Any = self.get(name, default)
        if _is_positive(result):
            return float(result)
        raise self._error(name, result, "a positive number")

    def optional(self, name: str) -> float | None:
        """A positive number, or None where the checkpoint does not say one; in GGUF 0 says so, too."""
        result = self.get(name)
        return None if result is None or (self.is_gguf and result == 0) else self.number(name)

    def head_width(self, default: int | None) -> int:
        """Of each head, where config.json does not say `default`, in GGUF and without that the share of each."""
        share = self.integer("hidden") // self.integer("heads")
        return self.integer("head_width", share if self.is_gguf or default is None else default)

    def flag(self, name: str) -> bool:
        """False where the checkpoint does not say. ImportModelError: neither true nor false."""
        result = self.get(name, False)
        if isinstance(result, bool):
            return result
        raise self._error(name, result, "true or false")

    def biases(self) -> dict[str, bool]:
        """Which products have them."""
        return {f"has_{part}_bias": self.flag(f"{part}_bias") for part in ("qkv", "o", "mlp")}

    def key(self, name: str) -> str:
        """As the checkpoint calls it."""
        usual = self.prefix + _KEYS[name][1] if self.is_gguf else _KEYS[name][0]
        return self.own_keys.get(usual, usual)

    def size(self, key: str) -> int:
        """A positive integer under a key of the checkpoint's own."""
        result = self.raw.get(key)
        if not isinstance(result, int) or isinstance(result, bool) or not 0 < result < 2**20:
            raise ImportModelError(
                f"{self.source}: the hyperparameter {key!r} is {result!r}; it must be a positive integer"
            )
        return result

    def by_layer(self, name: str) -> tuple[int, ...]:
        """A positive integer of each layer, which the checkpoint gives one by one or once for all."""
        result, layers = self.get(name), self.integer("layers")
        if not isinstance(result, list):
            return (self.integer(name),) * layers
        if len(result) != layers or not all(isinstance(value, int) and 0 < value <= 2**31 for value in result):
            raise self._error(name, result, f"a positive integer for each of {layers} layers")
        return tuple(result)

    def kv_heads_of_some(self) -> int:
        """Of the layers that attend, where GGUF says 0 of the others."""
        counts = self.get("kv_heads")
        some = {count for count in counts if count} if isinstance(counts, list) else {counts}
        (count,) = some if len(some) == 1 else (None,)
        if not isinstance(count, int) or count < 1:
            raise ImportModelError(
                f"{self.source}: {self.key('kv_heads')} must be one number of all layers that attend"
            )
        return count

    def guessing_layers(self) -> int:
        """Of the blocks that GGUF counts, those at the end that guess tokens further ahead: we have other guesses."""
        result = self.raw.get(f"{self.prefix}nextn_predict_layers", 0) if self.is_gguf else 0
        if not isinstance(result, int) or not 0 <= result < self.integer("layers"):
            raise ImportModelError(
                f"{self.source}: {self.prefix}nextn_predict_layers = {result!r} must be fewer than all blocks"
            )
        return result

    def layers_behind(self, key: str, usual: int) -> tuple[bool, ...]:
        """By layer, whether it is none of the first ones, whose number a key of config.json says."""
        first = self._count(key, usual, "layers")
        return tuple(k >= first for k in range(self.integer("layers")))

    def shared_width(self, key: str, usual: int) -> int | None:
        """Of the experts that all tokens go through, together, whose number a key of config.json says."""
        return None if self.is_gguf else self._count(key, usual, "experts") * self.integer("expert_width") or None

    def _count(self, key: str, usual: int, of: str) -> int:
        result = self.raw.get(key, usual)
        if not isinstance(result, int) or result < 0:
            raise ImportModelError(f"{self.source}: {key} = {_short(result)} must be a number of {of}")
        return result

    def window(self) -> int | None:
        """How many last tokens layers see; None: all."""
        result = self.get("window")
        return None if result is None or (self.is_gguf and result == 0) else self.integer("window")

    def local_layers(self, every: int) -> tuple[bool, ...]:
        """By layer, whether it is local: as the checkpoint says, all but each n-th where it says n, or each `every`-th
        where it says nothing."""
        types, pattern, layers = self.layer_types(), self.get("window_pattern", every), self.integer("layers")
        if types is not None:
            return types
        if self.is_gguf and isinstance(pattern, list) and len(pattern) == layers:
            return tuple(map(bool, pattern))
        number = self.integer("window_pattern", every)
        return tuple((k + 1) % number != 0 for k in range(layers))

    def layer_types(self) -> tuple[bool, ...] | None:
        """By layer, whether it is local; None where config.json does not say."""
        types = None if self.is_gguf else self.raw.get("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != self.integer("layers") or set(types) - set(known):
            raise ImportModelError(f"{self.source}: layer_types must name {' or '.join(known)} for each layer")
        return tuple(kind == "sliding_attention" for kind in types)

    def _error(self, name: str, found: Any, wanted: str) -> ImportModelError:
        key = self.key(name)
        if found is None:
            return ImportModelError(f"{self.source}: the hyperparameter {key!r} is missing")
        return ImportModelError(f"{self.source}: the hyperparameter {key!r} is {_short(found)}; it must be {wanted}")

    def refuse(self, **unsupported: Any) -> None:
        """ImportModelError where config.json gives one of these another value than the one that we compute with."""
        for key, value in unsupported.items():
            if not self.is_gguf and self.raw.get(key, value) not in (None, value):
                raise ImportModelError(
                    f"{self.source}: {self.own_keys.get(key, key)} = {_short(self.raw[key])} is not supported, only "
                    f"{value!r} is"
                )

    def rope(
        self, width: int, default_base: float = 10000.0, section: str | None = None, *, has_alpha: bool = False
    ) -> Rope:
        """The rotary embedding; `section` picks the part of `rope_parameters` for one kind of layer. `has_alpha`: what
        they call "dynamic" may be a base stretched by an alpha, for any length alike."""
        if self.is_gguf:
            base = self.number("rope_base", default_base)
            return self._checked(
                Rope(base, self._turned(self.integer("rope_width", width), width), self._gguf_scaling())
            )
        said = self.rope_parameters()
        if section is not None and isinstance(said.get(section), Mapping):
            said = said[section]
        base = said.get("rope_theta", self.get("rope_base", default_base))
        share = said.get("partial_rotary_factor", self.raw.get("partial_rotary_factor")) or 1.0
        if not _is_positive(base) or not _is_positive(share):
            names = [self.own_keys.get(key, key) for key in ("rope_theta", "partial_rotary_factor")]
            raise ImportModelError(
                f"{self.source}: {names[0]} is {_short(base)} and {names[1]} {_short(share)}; both must be positive "
                "numbers"
            )
        kind = said.get("rope_type", said.get("type"))
        if kind == "proportional":
            turned = self._turned(2 * int(width * share // 2), width)
            return self._proportional(said, float(base), turned, self._turned(width, width))
        turned, is_dynamic = self._turned(int(width * share), width), kind == "dynamic"
        if has_alpha and is_dynamic and turned > 2 and _is_positive(said.get("alpha")):
            base, said = base * said["alpha"] ** (turned / (turned - 2)), {}
        return self._checked(Rope(float(base), turned, self._scaling(said)))

    def _proportional(self, said: Mapping[str, Any], base: float, turned: int, width: int) -> Rope:
        """Frequencies of the whole head, but for those behind the first turned / 2, which are 0."""
        factor = said.get("factor", 1.0)
        if not _is_positive(factor):
            raise ImportModelError(f"{self.source}: factor of the rotary embedding (proportional) is {_short(factor)}")
        fixed = (math.inf,) * ((width - turned) // 2)
        return Rope(base, width, divisors=(float(factor),) * (turned // 2) + fixed)

    def _checked(self, rope: Rope) -> Rope:
        if rope.scaling is not None and rope.scaling.kind == "yarn" and rope.base <= 1:
            raise ImportModelError(f"{self.source}: yarn needs a rotary base of more than {rope.base}")
        return rope

    def query_growth(self) -> tuple[float, int] | None:
        """How much queries grow with the logarithm of their position in contexts of how many tokens; None: not at all
        (as in Llama 4, but from the first context on)."""
        if self.is_gguf:
            names = ("attention.temperature_scale", "rope.scaling.original_context_length")
            said, (key, place) = self.raw, [self.prefix + name for name in names]
        else:
            said, key, place = self.rope_parameters(), "llama_4_scaling_beta", "original_max_position_embeddings"
        share, steps = said.get(key) or 0, said.get(place) or self.integer("context")
        if share == 0:
            return None
        if not (_is_positive(share) and _is_positive(steps)):
            raise ImportModelError(f"{self.source}: {key} and {place} must be positive numbers")
        return float(share), int(steps)

    def has_rope_of(self, section: str) -> bool:
        """Whether config.json says it for that kind of layers alone."""
        said = self.raw.get("rope_parameters")
        return isinstance(said, Mapping) and isinstance(said.get(section), Mapping)

    def rope_parameters(self) -> Mapping[str, Any]:
        """As transformers writes them since version 5, with what is added as cards of models say to: `rope_scaling`."""
        named = {key: self.raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
        for key, said in named.items():
            if not isinstance(said, Mapping):
                raise ImportModelError(f"{self.source}: {key} are {_short(said)}, no object")
        usual, added = named.values()
        if added and any(isinstance(value, Mapping) for value in usual.values()):
            raise ImportModelError(
                f"{self.source}: rope_scaling beside rope_parameters for several kinds of layers; put it into these"
            )
        kind = ("rope_type", "type") if added else ()  # the same under two names
        return {key: value for key, value in usual.items() if key not in kind} | dict(added)

    def _turned(self, count: int, width: int) -> int:
        if count % 2 or not 0 < count <= width:
            raise ImportModelError(
                f"{self.source}: rotary embeddings cannot turn {count} of {width} elements of a head"
            )
        return count

    def _scaling(self, said: Mapping[str, Any]) -> RopeScaling | None:
        kind = said.get("rope_type", said.get("type", "default"))
        if kind == "default":
            return None

        def number(key: str, default: float | None = None) -> float:
            result = said.get(key)
            result = default if result is None else result
            if not _is_positive(result):
                raise ImportModelError(f"{self.source}: {key} of the rotary embedding ({kind}) is {_short(result)}")
            return float(result)

        if kind == "linear":
            return RopeScaling("linear", number("factor"))
        original = number(
            "original_max_position_embeddings",
            self.raw.get("original_max_position_embeddings") or self.integer("context"),
        )
        if kind in ("longrope", "su"):
            if original <= 1:
                raise ImportModelError(f"{self.source}: longrope needs an original context of more than {original}")
            factor = number("factor", self.integer("context") / original)
            usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            short, long = (self._divisors(said, f"{length}_factor") for length in ("short", "long"))
            return RopeScaling(
                "longrope", factor, int(original), attention_factor=number("attention_factor", usual), short=short,
                long=long,
            )  # fmt: skip
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise ImportModelError(
                    f"{self.source}: low_freq_factor = {low} must be less than high_freq_factor = {high}"
                )
            return RopeScaling("llama3", number("factor"), int(original), low, high)
        if kind == "yarn":
            factor, attention = number("factor"), None
            if said.get("attention_factor") is not None:
                attention = number("attention_factor")
            elif said.get("mscale") and said.get("mscale_all_dim"):
                attention = yarn_attention(factor, number("mscale")) / yarn_attention(factor, number("mscale_all_dim"))
            return RopeScaling(
                "yarn", factor, int(original), beta_fast=number("beta_fast", 32.0), beta_slow=number("beta_slow", 1.0),
                truncates=bool(said.get("truncate", True)), attention_factor=attention,
            )  # fmt: skip
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, llama3, yarn, "
            "longrope"
        )

    def _divisors(self, said: Mapping[str, Any], key: str) -> tuple[float, ...]:
        result = said.get(key)
        if not isinstance(result, list) or not result or not all(map(_is_positive, result)):
            raise ImportModelError(f"{self.source}: {key} of the rotary embedding (longrope) is {_short(result)}")
        return tuple(map(float, result))

    def _gguf_scaling(self) -> RopeScaling | None:
        place = f"{self.prefix}rope.scaling."
        kind = self.raw.get(place + "type", "linear")
        old = self.raw.get(f"{self.prefix}rope.scale_linear")
        factor = self.raw.get(place + "factor", old) or 1.0
        original = self.raw.get(place + "original_context_length") or self.integer("context")
        fast, slow = self.raw.get(place + "yarn_beta_fast", 32.0), self.raw.get(place + "yarn_beta_slow", 1.0)
        more, rest = self.raw.get(place + "attn_factor", 1.0), self.raw.get(place + "yarn_log_multiplier")
        if not all(_is_positive(value) for value in (factor, original, fast, slow, more, rest or 1.0)):
            raise ImportModelError(f"{self.source}: {place}* must be positive numbers")
        if kind == "longrope":  # the divisors are tensors
            return RopeScaling("longrope", float(factor), int(original), attention_factor=float(more))
        if (kind in ("none", "linear") or factor == 1.0) and more != 1.0:
            raise ImportModelError(f"{self.source}: {place}attn_factor of {more} is only known of yarn and longrope")
        if kind == "none" or factor == 1.0:
            return None
        if kind == "linear":
            return RopeScaling("linear", float(factor))
        if kind == "yarn":
            attention = more * yarn_attention(factor) / (yarn_attention(factor, rest) if rest else 1.0)
            return RopeScaling("yarn", float(factor), int(original), 1.0, 4.0, float(fast), float(slow), attention)
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, yarn, longrope"
        )

    def experts(
        self, *, is_normed: bool, has_shared_gate: bool = False, has_bias: bool = False, scores: Scores = "softmax",
        is_balanced: bool = False, is_scaled: bool = False, layers: int | None = None,
        layers_with: tuple[bool, ...] | None = None, shared: int | None = None,
    ) -> Experts:  # fmt: skip
        """The mixture of experts. `is_normed`, `scores`: where the checkpoint does not say. `has_shared_gate`: of the
        shared expert, where there is one. `has_bias`: of all their matrices. Of config.json: whether they are
        `is_balanced`, and `is_scaled` and in groups where it says so; how many `layers` there are, those `layers_with`
        them, and the width that is `shared`, where it says these in another way."""
        count = self.integer("experts")
        chosen, layers = self.integer("experts_chosen"), layers or self.integer("layers")
        if chosen > count:
            raise ImportModelError(f"{self.source}: {chosen} experts for each token, and there are only {count}")
        is_scaled |= self.is_gguf
        names = ("expert_groups", "expert_groups_chosen")
        groups, chosen_groups = (self.integer(name) if is_scaled and self.get(name) else 1 for name in names)
        if count % groups or chosen_groups > groups or chosen > count // groups * chosen_groups:
            raise ImportModelError(
                f"{self.source}: {chosen} experts for each token, of {chosen_groups} of {groups} groups, and there are "
                f"{count}"
            )
        if self.is_gguf:
            is_balanced = bool(self.raw.get(f"{self.prefix}expert_balance", False))
            if number := self.raw.get(f"{self.prefix}expert_gating_func", 0):
                if number not in _SCORES:
                    raise ImportModelError(
                        f"{self.source}: expert_gating_func = {number!r}; known are {', '.join(_NUMBERED)}"
                    )
                scores = _SCORES[number]
        if count * layers > _MAX_EXPERTS:
            raise ImportModelError(f"{self.source}: {layers} layers of {count} experts are more than anybody has")
        if shared is None and self.get("shared_width"):
            shared = self.integer("shared_width")
        return Experts(
            count,
            chosen,
            self.integer("expert_width", self.get("intermediate")),
            bool(self.get("experts_normed", is_normed)),
            shared,
            has_shared_gate and shared is not None,
            self._expert_layers(layers) if layers_with is None or self.is_gguf else layers_with,
            has_bias,
            scores,
            is_balanced,
            groups,
            chosen_groups,
            (self.optional("expert_scale") if is_scaled else None) or 1.0,
        )

    def _expert_layers(self, layers: int) -> tuple[bool, ...]:
        """Which layers have experts; empty: all of them."""
        if self.is_gguf:
            given = self.raw.get(f"{self.prefix}expert_layers", ())
            result = tuple(k in given for k in range(layers))
            return () if all(result) else result
        without, step = self.raw.get("mlp_only_layers") or [], self.raw.get("decoder_sparse_step") or 1
        if not isinstance(without, list) or not isinstance(step, int) or step < 1:
            raise ImportModelError(
                f"{self.source}: mlp_only_layers = {_short(without)} must be a list of layers, decoder_sparse_step = "
                f"{_short(step)} a positive integer"
            )
        result = tuple(k not in without and (k + 1) % step == 0 for k in range(layers))
        return () if all(result) else result

    def decoder(self, architecture: str, **specific: Any) -> DecoderConfig:
        """The configuration that follows from the usual hyperparameters, but for what is given."""
        self.refuse(is_causal=True)
        hidden, heads = self.integer("hidden"), self.integer("heads")
        width = self.head_width(None)
        kv_heads = specific.get("kv_heads") or self.integer("kv_heads", heads)
        if heads % kv_heads:
            raise ImportModelError(f"{self.source}: {heads} heads cannot share {kv_heads} heads of keys and values")
        value_width = self.raw.get(f"{self.prefix}attention.value_length", width) if self.is_gguf else width
        if value_width != width and specific.get("latent") is None:
            raise ImportModelError(f"{self.source}: values of another width than keys are not supported")
        if self.is_gguf and self.raw.get(f"{self.prefix}attention.causal", True) is not True:
            raise ImportModelError(
                f"{self.source}: a token must not see later ones: {self.prefix}attention.causal is false"
            )
        experts = specific.get("experts")
        if experts is None and self.is_gguf and self.raw.get(f"{self.prefix}expert_count"):
            raise ImportModelError(f"{self.source}: mixtures of experts are not known of {architecture}")
        usual: dict[str, Callable[[], Any]] = {
            "vocab": lambda: self.integer("vocab"),
            "layers": lambda: self.integer("layers"),
            "intermediate": lambda: self.integer("intermediate", None if experts is None else experts.intermediate),
            "context": lambda: self.integer("context"),
            "norm_epsilon": lambda: self.number("norm_epsilon"),
            "is_tied": lambda: self.flag("is_tied"),
        }
        result: dict[str, Any] = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_width": width}
        result |= {name: read() for name, read in usual.items() if name not in specific}
        result |= specific
        if "rope" not in result:
            result["rope"] = self.rope(width)
        scaling = result["rope"].scaling
        if scaling is not None and scaling.kind == "longrope":
            if not self.is_gguf and {len(scaling.short), len(scaling.long)} != {result["rope"].width // 2}:
                raise ImportModelError(
                    f"{self.source}: {result['rope'].width} elements of a head are turned, so that short_factor and "
                    f"long_factor need {result['rope'].width // 2} numbers, got {len(scaling.short)} and "
                    f"{len(scaling.long)}"
                )
            result["usual_context"] = min(scaling.original_context, result["context"])
        if scaling is not None and scaling.kind == "yarn" and result["context"] <= scaling.original_context:
            context = scaling.original_context * scaling.factor  # added as cards of models say to
            if context > 2**31:
                raise ImportModelError(f"{self.source}: a factor of yarn of {scaling.factor} is more than anybody has")
            result["context"] = int(context)
        return DecoderConfig(architecture, **result)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:56] + " ..."


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture, for both kinds of checkpoints.

    `names`: what checkpoints call it. `describe` makes the configuration. `hugging_face` and `gguf` are the names of
    weights in a layer where they differ from the usual ones; `fused`: those of them that are the rows of several
    weights, one after another. `defaults` is what config.json may leave out, by its keys. `is_interleaved`: GGUF stores
    its queries and keys with the two elements that are turned together side by side; `is_interleaved_in_folders`:
    Hugging Face does. `norm_offset`: Hugging Face stores norms less that number. `hugging_face_whole`, `gguf_whole`:
    names of weights of no layer, `prefix`: what comes before a layer's number, `transposed`: those weights that it
    stores as [in, out], `from_folder`, `from_gguf`: make weights by our names of those that lie otherwise there,
    `keys`: the usual keys of config.json, by those that it has.
    """

    names: tuple[str, ...]
    describe: Callable[[Hyperparameters], DecoderConfig]
    hugging_face: Mapping[str, str] | None = None
    gguf: Mapping[str, str] | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_interleaved: bool = False
    is_interleaved_in_folders: bool = False
    norm_offset: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hugging_face_whole: Mapping[str, str] | None = None
    gguf_whole: Mapping[str, str] | None = None
    prefix: str = "model.layers."
    transposed: tuple[str, ...] = ()
    from_folder: Callable[[dict[str, Weight], DecoderConfig, str], dict[str, Weight]] | None = None
    from_gguf: Callable[[dict[str, Weight], DecoderConfig, str], dict[str, Weight]] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


# of a layer: our name -> as Hugging Face calls it behind "model.layers.K.", and GGUF behind "blk.K."; "{}" is an expert
HUGGING_FACE_LAYER = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight", "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias", "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight", "gate_bias": "mlp.gate_proj.bias", "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias", "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm_bias": "post_attention_layernorm.bias", "router": "mlp.gate.weight",
    "experts.{}.gate": "mlp.experts.{}.gate_proj.weight", "experts.{}.up": "mlp.experts.{}.up_proj.weight",
    "experts.{}.down": "mlp.experts.{}.down_proj.weight", "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight", "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight", "sinks": "self_attn.sinks",
    "router_balance": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
POST_NORMED_LAYER = {  # norms of what attention and MLP give instead of what they read
    **{ours: theirs for ours, theirs in HUGGING_FACE_LAYER.items() if ours != "mlp_norm"},
    "attn_post_norm": "post_attention_layernorm.weight", "mlp_post_norm": "post_feedforward_layernorm.weight",
}  # fmt: skip
GGUF_LAYER = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight", "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight",
    "up": "ffn_up.weight", "down": "ffn_down.weight", "gate_bias": "ffn_gate.bias", "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias", "mlp_post_norm": "post_ffw_norm.weight", "attn_norm_bias": "attn_norm.bias",
    "mlp_norm_bias": "ffn_norm.bias", "router": "ffn_gate_inp.weight",
    "experts.gate": "ffn_gate_exps.weight", "experts.up": "ffn_up_exps.weight",
    "experts.down": "ffn_down_exps.weight", "experts.{}.gate": "ffn_gate.{}.weight",
    "experts.{}.up": "ffn_up.{}.weight", "experts.{}.down": "ffn_down.{}.weight",
    "shared.gate": "ffn_gate_shexp.weight", "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight", "shared_router": "ffn_gate_inp_shexp.weight",
    "sinks": "attn_sinks.weight", "router_bias": "ffn_gate_inp.bias",
    "experts.gate_bias": "ffn_gate_exps.bias", "experts.up_bias": "ffn_up_exps.bias",
    "experts.down_bias": "ffn_down_exps.bias", "router_balance": "exp_probs_b.bias",
}  # fmt: skip
HUGGING_FACE_WHOLE = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "norm_bias": "model.norm.bias", "head_bias": "lm_head.bias",
}  # fmt: skip
GGUF_WHOLE = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "norm_bias": "output_norm.bias", "head_bias": "output.bias", "positions": "position_embd.weight",
}  # fmt: skip


def layer_names(layer: Mapping[str, str], config: DecoderConfig) -> Iterator[tuple[int, str, str]]:
    """Layer, our name and theirs of the weights of all layers; where a name stands for one of each expert, of these."""
    for k in range(config.layers):
        experts = config.experts_of(k)
        for ours, theirs in layer.items():
            if not ours.startswith(("router", "experts", "shared")):
                yield k, ours, theirs
            elif experts is not None:
                count = experts.count if "{}" in ours else 1
                yield from ((k, ours.format(e), theirs.format(e)) for e in range(count))
