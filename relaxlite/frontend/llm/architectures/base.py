"""Shared parts of architectures: hyperparameters under one name for both file formats, and names of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, TypeGuard

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import DecoderConfig, Experts, Rope, RopeScaling, Scores, yarn_attention
from relaxlite.records import dataclass

# our name -> key in Hugging Face's config.json, key in GGUF without the prefix of the architecture
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
_MAX = {"layers": 10_000}  # sanity limits for damaged files; 2**31 for other integers
_MAX_EXPERTS = 100_000  # of all layers
_SCORES: Mapping[int, Scores] = {1: "softmax", 2: "sigmoid"}  # by their numbers in GGUF; 0: unspecified
_NUMBERED = [f"{number} ({scores})" for number, scores in _SCORES.items()]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of a checkpoint, under the names of this package.

    `source` names the file in errors. `raw` has all fields of the file under the usual keys; `own_keys` maps usual keys
    to the keys that the file has instead.
    """

    source: str
    raw: Mapping[str, Any]
    is_gguf: bool
    prefix: str = ""  # of keys in GGUF: "llama."
    own_keys: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a hyperparameter as it is in the file, or a default."""
        hugging_face, gguf = _KEYS[name]
        result = self.raw.get(self.prefix + gguf if self.is_gguf else hugging_face)
        return default if result is None else result

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ImportModelError for other values, and if it is missing without default."""
        result = self.get(name, default)
        if isinstance(result, list) and result and all(value == result[0] for value in result):
            result = result[0]  # given per layer, the same for all
        if not isinstance(result, int) or isinstance(result, bool) or not 0 < result <= _MAX.get(name, 2**31):
            raise self._error(name, result, "a positive integer, the same for all layers")
        return result

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises ImportModelError for other values, and if it is missing without default."""
        result: Any = self.get(name, default)
        if _is_positive(result):
            return float(result)
        raise self._error(name, result, "a positive number")

    def optional_number(self, name: str) -> float | None:
        """Return a positive number; None if it is missing, or 0 in GGUF."""
        result = self.get(name)
        return None if result is None or (self.is_gguf and result == 0) else self.number(name)

    def head_width(self, default: int | None) -> int:
        """Return the width of a head: as in the file, else `default`; in GGUF, or if that is None, hidden / heads."""
        share = self.integer("hidden") // self.integer("heads")
        return self.integer("head_width", share if self.is_gguf or default is None else default)

    def flag(self, name: str) -> bool:
        """Return a boolean, False if it is missing. Raises ImportModelError for other values."""
        result = self.get(name, False)
        if isinstance(result, bool):
            return result
        raise self._error(name, result, "true or false")

    def biases(self) -> dict[str, bool]:
        """Return which projections have biases, as fields of `DecoderConfig`."""
        return {f"has_{part}_bias": self.flag(f"{part}_bias") for part in ("qkv", "o", "mlp")}

    def key(self, name: str) -> str:
        """Return the key of a hyperparameter in the file."""
        usual = self.prefix + _KEYS[name][1] if self.is_gguf else _KEYS[name][0]
        return self.own_keys.get(usual, usual)

    def size(self, key: str) -> int:
        """Return a positive integer by its key in the file. Raises ImportModelError for other values."""
        result = self.raw.get(key)
        if not isinstance(result, int) or isinstance(result, bool) or not 0 < result < 2**20:
            raise ImportModelError(
                f"{self.source}: the hyperparameter {key!r} is {result!r}; it must be a positive integer"
            )
        return result

    def by_layer(self, name: str) -> tuple[int, ...]:
        """Return a positive integer for each layer; the file has one for each, or one for all."""
        result, layers = self.get(name), self.integer("layers")
        if not isinstance(result, list):
            return (self.integer(name),) * layers
        if len(result) != layers or not all(isinstance(value, int) and 0 < value <= 2**31 for value in result):
            raise self._error(name, result, f"a positive integer for each of {layers} layers")
        return tuple(result)

    def attention_kv_heads(self) -> int:
        """Return the number of KV heads of the attention layers, where GGUF has 0 for other layers."""
        counts = self.get("kv_heads")
        distinct = {count for count in counts if count} if isinstance(counts, list) else {counts}
        (count,) = distinct if len(distinct) == 1 else (None,)
        if not isinstance(count, int) or count < 1:
            raise ImportModelError(
                f"{self.source}: {self.key('kv_heads')} must be one number of all layers that attend"
            )
        return count

    def mtp_layers(self) -> int:
        """Return how many of the last blocks in GGUF are for multi-token prediction, which is not imported."""
        result = self.raw.get(f"{self.prefix}nextn_predict_layers", 0) if self.is_gguf else 0
        if not isinstance(result, int) or not 0 <= result < self.integer("layers"):
            raise ImportModelError(
                f"{self.source}: {self.prefix}nextn_predict_layers = {result!r} must be fewer than all blocks"
            )
        return result

    def layers_from(self, key: str, usual: int) -> tuple[bool, ...]:
        """Return for each layer whether its index is at least the number under a key of config.json."""
        first = self._count(key, usual, "layers")
        return tuple(k >= first for k in range(self.integer("layers")))

    def shared_width(self, key: str, usual: int) -> int | None:
        """Return the total width of the shared experts, whose number is under a key of config.json; None for none."""
        return None if self.is_gguf else self._count(key, usual, "experts") * self.integer("expert_width") or None

    def _count(self, key: str, usual: int, of: str) -> int:
        """Return an integer from 0 on; `of` names what is counted in errors."""
        result = self.raw.get(key, usual)
        if not isinstance(result, int) or result < 0:
            raise ImportModelError(f"{self.source}: {key} = {_short(result)} must be a number of {of}")
        return result

    def window(self) -> int | None:
        """Return the width of sliding-window attention in tokens; None for full attention."""
        result = self.get("window")
        return None if result is None or (self.is_gguf and result == 0) else self.integer("window")

    def local_layers(self, every: int) -> tuple[bool, ...]:
        """Return for each layer whether it has a sliding window.

        That is what the file lists, or all but every n-th layer where the file says n, or all but every `every`-th.
        """
        types, pattern, layers = self.layer_types(), self.get("window_pattern", every), self.integer("layers")
        if types is not None:
            return types
        if self.is_gguf and isinstance(pattern, list) and len(pattern) == layers:
            return tuple(map(bool, pattern))
        number = self.integer("window_pattern", every)
        return tuple((k + 1) % number != 0 for k in range(layers))

    def layer_types(self) -> tuple[bool, ...] | None:
        """Return for each layer whether it has a sliding window, by `layer_types` of config.json; None without it."""
        types = None if self.is_gguf else self.raw.get("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != self.integer("layers") or set(types) - set(known):
            raise ImportModelError(f"{self.source}: layer_types must name {' or '.join(known)} for each layer")
        return tuple(kind == "sliding_attention" for kind in types)

    def _error(self, name: str, value: Any, requirement: str) -> ImportModelError:
        """Make the error about a hyperparameter that is missing or has an invalid value."""
        key = self.key(name)
        if value is None:
            return ImportModelError(f"{self.source}: the hyperparameter {key!r} is missing")
        return ImportModelError(
            f"{self.source}: the hyperparameter {key!r} is {_short(value)}; it must be {requirement}"
        )

    def require(self, **unsupported: Any) -> None:
        """Raise ImportModelError if config.json has another value for one of these keys than the supported one."""
        for key, value in unsupported.items():
            if not self.is_gguf and self.raw.get(key, value) not in (None, value):
                raise ImportModelError(
                    f"{self.source}: {self.own_keys.get(key, key)} = {_short(self.raw[key])} is not supported, only "
                    f"{value!r} is"
                )

    def rope(
        self, width: int, default_base: float = 10000.0, section: str | None = None, *, has_alpha: bool = False
    ) -> Rope:
        """Return the rotary embedding of heads of `width` elements.

        `section`: the entry of `rope_parameters` for one kind of layers. `has_alpha`: the type "dynamic" means a base
        scaled by an alpha, for any length.
        """
        if self.is_gguf:
            base = self.number("rope_base", default_base)
            return self._check_rope(
                Rope(base, self._rotary_width(self.integer("rope_width", width), width), self._gguf_scaling())
            )
        parameters = self.rope_parameters()
        if section is not None and isinstance(parameters.get(section), Mapping):
            parameters = parameters[section]
        base = parameters.get("rope_theta", self.get("rope_base", default_base))
        share = parameters.get("partial_rotary_factor", self.raw.get("partial_rotary_factor")) or 1.0
        if not _is_positive(base) or not _is_positive(share):
            names = [self.own_keys.get(key, key) for key in ("rope_theta", "partial_rotary_factor")]
            raise ImportModelError(
                f"{self.source}: {names[0]} is {_short(base)} and {names[1]} {_short(share)}; both must be positive "
                "numbers"
            )
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind == "proportional":
            rotary_width = self._rotary_width(2 * int(width * share // 2), width)
            return self._proportional(parameters, float(base), rotary_width, self._rotary_width(width, width))
        rotary_width, is_dynamic = self._rotary_width(int(width * share), width), kind == "dynamic"
        if has_alpha and is_dynamic and rotary_width > 2 and _is_positive(parameters.get("alpha")):
            base, parameters = base * parameters["alpha"] ** (rotary_width / (rotary_width - 2)), {}
        return self._check_rope(Rope(float(base), rotary_width, self._scaling(parameters)))

    def _proportional(self, parameters: Mapping[str, Any], base: float, rotary_width: int, width: int) -> Rope:
        """Return a rotary embedding of the whole head whose frequencies are 0 from rotary_width / 2 on."""
        factor = parameters.get("factor", 1.0)
        if not _is_positive(factor):
            raise ImportModelError(f"{self.source}: factor of the rotary embedding (proportional) is {_short(factor)}")
        unrotated = (math.inf,) * ((width - rotary_width) // 2)
        return Rope(base, width, divisors=(float(factor),) * (rotary_width // 2) + unrotated)

    def _check_rope(self, rope: Rope) -> Rope:
        """Return a rotary embedding. Raises ImportModelError if its base does not suit YaRN."""
        if rope.scaling is not None and rope.scaling.kind == "yarn" and rope.base <= 1:
            raise ImportModelError(f"{self.source}: yarn needs a rotary base of more than {rope.base}")
        return rope

    def query_log_scaling(self) -> tuple[float, int] | None:
        """Return (a, n) of queries that are multiplied by 1 + a * ln(1 + position // n), None for none.

        The scaling is that of Llama 4.
        """
        if self.is_gguf:
            names = ("attention.temperature_scale", "rope.scaling.original_context_length")
            fields, (key, length_key) = self.raw, [self.prefix + name for name in names]
        else:
            fields, key, length_key = self.rope_parameters(), "llama_4_scaling_beta", "original_max_position_embeddings"
        share, steps = fields.get(key) or 0, fields.get(length_key) or self.integer("context")
        if share == 0:
            return None
        if not (_is_positive(share) and _is_positive(steps)):
            raise ImportModelError(f"{self.source}: {key} and {length_key} must be positive numbers")
        return float(share), int(steps)

    def has_rope_section(self, section: str) -> bool:
        """Return whether `rope_parameters` has an entry for one kind of layers."""
        parameters = self.raw.get("rope_parameters")
        return isinstance(parameters, Mapping) and isinstance(parameters.get(section), Mapping)

    def rope_parameters(self) -> Mapping[str, Any]:
        """Return `rope_parameters` (transformers 5), updated by `rope_scaling`.

        Users add `rope_scaling` as model cards suggest.
        """
        sections = {key: self.raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
        for key, section in sections.items():
            if not isinstance(section, Mapping):
                raise ImportModelError(f"{self.source}: {key} are {_short(section)}, no object")
        usual, added = sections.values()
        if added and any(isinstance(value, Mapping) for value in usual.values()):
            raise ImportModelError(
                f"{self.source}: rope_scaling beside rope_parameters for several kinds of layers; put it into these"
            )
        kind = ("rope_type", "type") if added else ()  # two names of one parameter
        return {key: value for key, value in usual.items() if key not in kind} | dict(added)

    def _rotary_width(self, count: int, width: int) -> int:
        """Return the number of elements of a head under the rotary embedding, `count`.

        Raises ImportModelError unless it is even and at most `width`.
        """
        if count % 2 or not 0 < count <= width:
            raise ImportModelError(
                f"{self.source}: rotary embeddings cannot turn {count} of {width} elements of a head"
            )
        return count

    def _scaling(self, parameters: Mapping[str, Any]) -> RopeScaling | None:
        """Return the scaling of the rotary embedding by config.json."""
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return None

        def number(key: str, default: float | None = None) -> float:
            result = parameters.get(key)
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
            short, long = (self._divisors(parameters, f"{length}_factor") for length in ("short", "long"))
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
            if parameters.get("attention_factor") is not None:
                attention = number("attention_factor")
            elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
                attention = yarn_attention(factor, number("mscale")) / yarn_attention(factor, number("mscale_all_dim"))
            return RopeScaling(
                "yarn", factor, int(original), beta_fast=number("beta_fast", 32.0), beta_slow=number("beta_slow", 1.0),
                truncates=bool(parameters.get("truncate", True)), attention_factor=attention,
            )  # fmt: skip
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, llama3, yarn, "
            "longrope"
        )

    def _divisors(self, parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
        """Return the frequency divisors of longrope."""
        result = parameters.get(key)
        if not isinstance(result, list) or not result or not all(map(_is_positive, result)):
            raise ImportModelError(f"{self.source}: {key} of the rotary embedding (longrope) is {_short(result)}")
        return tuple(map(float, result))

    def _gguf_scaling(self) -> RopeScaling | None:
        """Return the scaling of the rotary embedding by GGUF."""
        scope = f"{self.prefix}rope.scaling."
        kind = self.raw.get(scope + "type", "linear")
        legacy_factor = self.raw.get(f"{self.prefix}rope.scale_linear")
        factor = self.raw.get(scope + "factor", legacy_factor) or 1.0
        original = self.raw.get(scope + "original_context_length") or self.integer("context")
        fast, slow = self.raw.get(scope + "yarn_beta_fast", 32.0), self.raw.get(scope + "yarn_beta_slow", 1.0)
        attn, log_mul = self.raw.get(scope + "attn_factor", 1.0), self.raw.get(scope + "yarn_log_multiplier")
        if not all(_is_positive(value) for value in (factor, original, fast, slow, attn, log_mul or 1.0)):
            raise ImportModelError(f"{self.source}: {scope}* must be positive numbers")
        if kind == "longrope":  # the divisors are in tensors
            return RopeScaling("longrope", float(factor), int(original), attention_factor=float(attn))
        if (kind in ("none", "linear") or factor == 1.0) and attn != 1.0:
            raise ImportModelError(f"{self.source}: {scope}attn_factor of {attn} is only known of yarn and longrope")
        if kind == "none" or factor == 1.0:
            return None
        if kind == "linear":
            return RopeScaling("linear", float(factor))
        if kind == "yarn":
            attention = attn * yarn_attention(factor) / (yarn_attention(factor, log_mul) if log_mul else 1.0)
            return RopeScaling("yarn", float(factor), int(original), 1.0, 4.0, float(fast), float(slow), attention)
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, yarn, longrope"
        )

    def experts(
        self, *, is_normed: bool, has_shared_gate: bool = False, has_bias: bool = False, scores: Scores = "softmax",
        is_balanced: bool = False, is_scaled: bool = False, layers: int | None = None,
        layers_with: tuple[bool, ...] | None = None, shared: int | None = None,
    ) -> Experts:  # fmt: skip
        """Return the mixture of experts.

        `is_normed`, `scores`: defaults where the file does not say. `has_shared_gate`: of the shared expert, if there
        is one. `has_bias`: of router and experts. For config.json only: `is_balanced`; `is_scaled`, whether scale and
        groups are read; `layers_with`, the layers that have experts; `shared`, the width of the shared expert.
        `layers`: the number of layers, if not all blocks of the file are layers.
        """
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
            (self.optional_number("expert_scale") if is_scaled else None) or 1.0,
        )

    def _expert_layers(self, layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts; empty if all have."""
        if self.is_gguf:
            expert_layers = self.raw.get(f"{self.prefix}expert_layers", ())
            result = tuple(k in expert_layers for k in range(layers))
            return () if all(result) else result
        dense, step = self.raw.get("mlp_only_layers") or [], self.raw.get("decoder_sparse_step") or 1
        if not isinstance(dense, list) or not isinstance(step, int) or step < 1:
            raise ImportModelError(
                f"{self.source}: mlp_only_layers = {_short(dense)} must be a list of layers, decoder_sparse_step = "
                f"{_short(step)} a positive integer"
            )
        result = tuple(k not in dense and (k + 1) % step == 0 for k in range(layers))
        return () if all(result) else result

    def decoder(self, architecture: str, **specific: Any) -> DecoderConfig:
        """Return the configuration by the usual hyperparameters, with the fields `specific` of the architecture."""
        self.require(is_causal=True)
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
        defaults: dict[str, Callable[[], Any]] = {
            "vocab": lambda: self.integer("vocab"),
            "layers": lambda: self.integer("layers"),
            "intermediate": lambda: self.integer("intermediate", None if experts is None else experts.intermediate),
            "context": lambda: self.integer("context"),
            "norm_epsilon": lambda: self.number("norm_epsilon"),
            "is_tied": lambda: self.flag("is_tied"),
        }
        result: dict[str, Any] = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_width": width}
        result |= {name: read() for name, read in defaults.items() if name not in specific}
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
            result["default_context"] = min(scaling.original_context, result["context"])
        if scaling is not None and scaling.kind == "yarn" and result["context"] <= scaling.original_context:
            context = scaling.original_context * scaling.factor  # YaRN was added as model cards suggest
            if context > 2**31:
                raise ImportModelError(f"{self.source}: a factor of yarn of {scaling.factor} is more than anybody has")
            result["context"] = int(context)
        return DecoderConfig(architecture, **result)


def _is_positive(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite positive number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _short(value: Any) -> str:
    """Return the repr of a value, abbreviated to 60 characters."""
    text = repr(value)
    return text if len(text) < 60 else text[:56] + " ..."


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture, for both file formats.

    `names`: its names in checkpoints. `describe`: makes the configuration. `hugging_face`, `gguf`: names of a layer's
    weights where they differ from the usual ones, `hugging_face_whole`, `gguf_whole`: of weights outside of layers,
    `prefix`: what precedes the number of a layer. `fused`: weights that are the concatenated rows of several.
    `transposed`: weights that Hugging Face stores as [in, out]. `norm_offset`: Hugging Face stores norms less this
    number. `is_interleaved`: in GGUF, pairs of elements under the rotary embedding are adjacent;
    `is_interleaved_in_folders`: in Hugging Face folders. `from_folder`, `from_gguf`: convert weights of another layout.
    `defaults`: hyperparameters that config.json may omit, by its keys. `keys`: the keys of a config.json that differ ->
    the usual keys.
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
