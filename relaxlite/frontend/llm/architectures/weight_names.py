"""Names of weights in Hugging Face folders and GGUF files, by our names: the usual ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relaxlite.frontend.llm.config import DecoderConfig

# of a layer: our name -> name in Hugging Face behind "model.layers.K.", in GGUF behind "blk.K."; "{}" is an expert
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
POST_NORMED_LAYER = {  # norms of the outputs of attention and MLP instead of their inputs
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
    """Yield the layer, our name and the file's name of the weights of all layers.

    Names with "{}" stand for one weight of each expert.
    """
    for k in range(config.layers):
        experts = config.experts_of(k)
        for ours, theirs in layer.items():
            if not ours.startswith(("router", "experts", "shared")):
                yield k, ours, theirs
            elif experts is not None:
                count = experts.count if "{}" in ours else 1
                yield from ((k, ours.format(e), theirs.format(e)) for e in range(count))
