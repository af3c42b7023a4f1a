"""Language models for tests: a byte-level tokenizer, random weights, and logits made in NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from relaxlite.frontend.llm.architectures.weight_names import HUGGING_FACE_LAYER, HUGGING_FACE_WHOLE
from relaxlite.frontend.llm.checkpoint import Checkpoint, TokenizerData, Weight, expected_weights
from relaxlite.frontend.llm.config import DecoderConfig, Rope
from relaxlite.llm.description import Description
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.tokenizer import Tokenizer
from tests.support.recomputing_engine import RecomputingEngine

SPECIAL = ("<|start|>", "<|end|>")
VOCAB = 256 + len(SPECIAL)
START, END = 256, 257
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer_json() -> str:
    """A token for each byte, so that characters of several bytes are several tokens; token k < 256 is byte k."""
    readable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in readable]
    letters = {byte: chr(byte) for byte in readable} | {byte: chr(256 + k) for k, byte in enumerate(others)}
    made = Library(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made.to_str()


def config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "architecture": "llama", "vocab": VOCAB, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 8,
        "intermediate": 48, "context": 64, "norm_epsilon": 1e-5, "rope": Rope(1e4, 8), "is_tied": True,
    }  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})


def checkpoint(**changes: Any) -> Checkpoint:
    c = config(**changes)
    rng = np.random.default_rng(0)
    shapes = expected_weights(c)
    weights = {name: Weight(rng.normal(0, 0.2, shape).astype(np.float32), shape) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if name.endswith(".delta_rate"):
            weight.data[:] = -np.abs(weight.data)  # what is remembered fades
    data = TokenizerData(tokenizer_json(), TEMPLATE, START, (END,), False, {"bos_token": SPECIAL[0]})
    return Checkpoint(c, weights, data, {"source": "tiny", "license": "apache-2.0"})


def scripted(replies: Callable[[Sequence[int]], bytes], **fields: Any) -> LanguageModel:
    """A model whose likeliest next token is the next byte of what `replies` makes of the sequence's tokens at its last
    newline, and then the end of the reply."""

    def logits(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        row = [int(t) for t in tokens[0]]
        found = np.zeros((1, len(row), VOCAB), np.float32)
        for count in range(1, len(row) + 1):
            start = max((k for k, t in enumerate(row[:count]) if t == ord("\n")), default=-1) + 1
            said, reply = row[start:count], replies(row[:start])
            found[0, count - 1, reply[len(said)] if len(said) < len(reply) else END] = 9
        return found

    return made(logits, **fields)


def random_logits(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits [1, seq, VOCAB] that follow from the tokens so far."""
    rows = [np.random.default_rng([7, *tokens[0, : k + 1]]).normal(0, 2, VOCAB) for k in range(tokens.shape[1])]
    return np.array([rows], np.float32)


def made(logits: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], **fields: Any) -> LanguageModel:
    given = {"stop": (END,), "chat_template": TEMPLATE, "context": 64, **fields}
    description = Description("tiny", VOCAB, **given)
    tokenizer = Tokenizer(tokenizer_json(), bos=description.bos, adds_bos=description.adds_bos)
    return LanguageModel(RecomputingEngine(logits, VOCAB, description.context), tokenizer, description)


def save_folder(folder: Path) -> None:
    """The random checkpoint as transformers would save it."""
    folder.mkdir()
    made, layer = checkpoint(), {ours: theirs for ours, theirs in HUGGING_FACE_LAYER.items()}
    header: dict[str, Any] = {}
    blobs, end = [], 0
    for name, weight in made.weights.items():
        _, _, kind = name.rpartition(".")
        prefix = f"model.layers.{name.split('.')[1]}." if name.startswith("layers.") else ""
        theirs = f"{prefix}{layer[kind]}" if prefix else HUGGING_FACE_WHOLE[name]
        blob = weight.data.tobytes()
        header[theirs] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    c = made.config
    described = {
        "model_type": "llama", "vocab_size": c.vocab, "hidden_size": c.hidden, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_width,
        "intermediate_size": c.intermediate, "max_position_embeddings": c.context, "rms_norm_eps": c.norm_epsilon,
        "rope_theta": 1e4, "tie_word_embeddings": True, "bos_token_id": START, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": SPECIAL[0]}))
