"""A real language model against transformers: SmolLM2-135M-Instruct, from a GGUF file with weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.llm.model import LanguageModel

pytestmark = [pytest.mark.models, pytest.mark.slow]
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n\n",
)


@pytest.fixture(scope="module")
def checkpoint(model_path: Callable[[str], Path]) -> Path:
    return model_path("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LanguageModel:
    return rl.llm.compile(checkpoint)


def test_greedy_text_and_logits_are_those_of_transformers(llm: LanguageModel, checkpoint: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        str(checkpoint.parent), gguf_file=checkpoint.name, dtype=torch.float32
    ).eval()
    results = llm.generate(list(PROMPTS), max_new_tokens=128, stop_tokens=(), logits=True, temperature=0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        given = llm.tokenizer.encode(prompt)
        with torch.no_grad():  # behind all of our tokens at once: equal choices at each are an equal text
            wanted = oracle(torch.tensor([[*given, *result.tokens]])).logits[0, len(given) - 1 : -1].numpy()
        assert wanted.argmax(axis=1).tolist() == list(result.tokens)
        assert np.abs(wanted - result.logits).max() <= 1e-3 * np.abs(wanted).max()


def test_a_batch_says_what_its_prompts_say_alone(llm: LanguageModel) -> None:
    together = llm.generate(list(PROMPTS), max_new_tokens=16, temperature=0)
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert llm.generate(prompt, max_new_tokens=16, temperature=0).tokens == result.tokens


def test_a_chat_goes_on(llm: LanguageModel) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    first = llm.chat(chat, temperature=0)
    assert (first.text, first.finish_reason) == ("The capital of France is Paris.", "stop")
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And of Italy?"}]
    second = llm.chat(chat, temperature=0)
    assert "Rome" in second.text and second.usage.reused_tokens >= first.usage.prompt_tokens
    llm.forget()
    assert llm.chat(chat, temperature=0).tokens == second.tokens
