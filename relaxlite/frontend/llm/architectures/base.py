"""What architectures share: hyperparameters under one name for both file formats, and the names of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.config import DecoderConfig, Rope, RopeScaling

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
    "rope_base": ("rope_theta", "rope.freq_base"),
    "rope_local_base": ("rope_local_base_freq", "rope.freq_base_swa"),
    "rope_width": ("rotary_dim", "rope.dimension_count"),
    "window": ("sliding_window", "attention.sliding_window"),
    "window_pattern": ("sliding_window_pattern", "attention.sliding_window_pattern"),
    "is_tied": ("tie_word_embeddings", "is_tied"),
    "query_scalar": ("query_pre_attn_scalar", "attention.query_scalar"),
    "activation": ("hidden_activation", "activation"),
}


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Values of a checkpoint by our names. `source` names the file in errors, `raw` has all that the file says."""

    source: str
    raw: Mapping[str, Any]
    is_gguf: bool
    prefix: str = ""  # of GGUF's keys: "llama."

    def get(self, name: str, default: Any = None) -> Any:
        hugging_face, gguf = _KEYS[name]
        found = self.raw.get(self.prefix + gguf if self.is_gguf else hugging_face)
        return default if found is None else found

    def need(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            key = self.prefix + _KEYS[name][1] if self.is_gguf else _KEYS[name][0]
            raise ImportModelError(f"{self.source}: the hyperparameter {key!r} is missing")
        return found

    def rope(self, width: int, default_base: float = 10000.0, section: str | None = None) -> Rope:
        """The rotary embedding; `section` picks the part of `rope_parameters` for one kind of layer."""
        if self.is_gguf:
            return Rope(
                float(self.get("rope_base", default_base)), int(self.get("rope_width", width)), self._gguf_scaling()
            )
        said: Mapping[str, Any] = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if section is not None and isinstance(said.get(section), Mapping):
            said = said[section]
        base = said.get("rope_theta", self.get("rope_base", default_base))
        share = said.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0))
        return Rope(float(base), int(width * share), self._scaling(said))

    def _scaling(self, said: Mapping[str, Any]) -> RopeScaling | None:
        kind = said.get("rope_type", said.get("type", "default"))
        if kind == "default":
            return None
        original = said.get("original_max_position_embeddings", self.get("context", 0))
        if kind == "linear":
            return RopeScaling("linear", float(said["factor"]))
        if kind == "llama3":
            low, high = said["low_freq_factor"], said["high_freq_factor"]
            return RopeScaling("llama3", float(said["factor"]), int(original), float(low), float(high))
        if kind == "yarn":
            fast, slow = said.get("beta_fast") or 32.0, said.get("beta_slow") or 1.0
            found = said.get("attention_factor")
            return RopeScaling(
                "yarn", float(said["factor"]), int(original), beta_fast=float(fast), beta_slow=float(slow),
                attention_factor=None if found is None else float(found),
            )  # fmt: skip
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, llama3, yarn"
        )

    def _gguf_scaling(self) -> RopeScaling | None:
        kind = self.raw.get(f"{self.prefix}rope.scaling.type", "none")
        factor = float(self.raw.get(f"{self.prefix}rope.scaling.factor", 1.0))
        original = int(self.raw.get(f"{self.prefix}rope.scaling.original_context_length", self.get("context", 0)))
        if kind == "none" or factor in (0.0, 1.0):
            return None
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn":
            return RopeScaling("yarn", factor, original)
        raise ImportModelError(
            f"{self.source}: rotary embeddings scaled by {kind!r} are not known; known are linear, yarn"
        )

    def decoder(self, architecture: str, **specific: Any) -> DecoderConfig:
        """The configuration that follows from the usual hyperparameters, but for what is given."""
        hidden, heads = int(self.need("hidden")), int(self.need("heads"))
        width = int(self.get("head_width", hidden // heads))
        found: dict[str, Any] = {
            "vocab": int(self.need("vocab")), "hidden": hidden, "layers": int(self.need("layers")), "heads": heads,
            "kv_heads": int(self.get("kv_heads", heads)), "head_width": width,
            "intermediate": int(self.need("intermediate")), "context": int(self.need("context")),
            "norm_epsilon": float(self.need("norm_epsilon")), "is_tied": bool(self.get("is_tied", False)),
        }  # fmt: skip
        found |= specific
        if "rope" not in found:
            found["rope"] = self.rope(width)
        return DecoderConfig(architecture, **found)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`names`: what checkpoints call it. `describe` makes the configuration; `hugging_face` has the names of weights in
    a layer that differ from the usual ones; `is_interleaved`: GGUF stores its queries and keys with the two
    elements that are turned together side by side; `norm_offset`: Hugging Face stores norms less that number;
    `ties_by_default`: the logits use the token embedding where config.json says nothing."""

    names: tuple[str, ...]
    describe: Callable[[Hyperparameters], DecoderConfig]
    hugging_face: Mapping[str, str] | None = None
    is_interleaved: bool = False
    norm_offset: float = 0.0
    ties_by_default: bool = False


# of a layer: our name -> as Hugging Face calls it behind "model.layers.K.", and GGUF behind "blk.K."
HUGGING_FACE_LAYER = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight", "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
GGUF_LAYER = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight",
    "o": "attn_output.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight", "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}  # fmt: skip
HUGGING_FACE_WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
GGUF_WHOLE = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
