"""Every architecture with small random weights against transformers, from the folder that it saves.

transformers and torch are no dependencies of the tests: these are skipped where they are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.frontend.llm.dense import build_dense
from relaxlite.frontend.llm.read import read_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, heads of their own": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama, tied, llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, all biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn rope": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral, window": ("MistralConfig", {"sliding_window": 8}),
    "mistral, no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, windows in upper layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3, biases": ("Qwen3Config", {"head_dim": 32, "attention_bias": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma3, biases": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "attention_bias": True}),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))  # norms and biases too
    model.save_pretrained(tmp_path)
    exe = rl.compile(build_dense(read_checkpoint(tmp_path)))
    for batch, seq in ((1, 1), (2, 7), (1, 70)):
        tokens = np.random.default_rng(seq).integers(0, SIZES["vocab_size"], (batch, seq))
        wanted = model(torch.tensor(tokens)).logits.detach().numpy()
        np.testing.assert_allclose(exe(tokens), wanted, atol=2e-5 * np.abs(wanted).max())
