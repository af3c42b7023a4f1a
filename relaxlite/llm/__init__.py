"""Compiled language models at run time: text in, text out. Checkpoints are imported by frontend/llm.

  llm = relaxlite.llm.load("SmolLM2.gguf")          # or a Hugging Face folder: compiled once, and cached
  llm = relaxlite.llm.compile("SmolLM2.gguf", max_context=512)
  llm.save("smollm2.rlx"); llm = relaxlite.llm.load("smollm2.rlx")   # needs no compiler
  print(llm.generate("The capital of France is", max_new_tokens=8))

model.py        LanguageModel: generate, chat
loading.py      load: a compiled file, or a checkpoint
compiling.py    from a checkpoint to a LanguageModel; imports the compiler
generation.py   the generation loop over a batch; sampling.py: from logits to a token; drafts.py: draft tokens
tokenizer.py    text to tokens and back, incrementally too; templates.py: a chat as text
description.py  what an artifact says of a language model besides its code
engine.py       the interface between generation and a model; compiled_engine.py: a step over a paged KV cache
evaluate.py     perplexity, and the KL divergence from another model
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "compile": "relaxlite.llm.compiling",
    "load": "relaxlite.llm.loading",
    "LanguageModel": "relaxlite.llm.model",
    "Result": "relaxlite.llm.generation",
    "Stream": "relaxlite.llm.generation",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'relaxlite.llm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
