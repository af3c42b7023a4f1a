"""A real language model against transformers: SmolLM2-135M-Instruct, from a GGUF file with weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.llm.model import LanguageModel
from relaxlite.target import Target
from tests.support.paths import ROOT

pytestmark = [pytest.mark.models, pytest.mark.exhaustive]
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n\n",
)
TEXTS = (ROOT / "tests" / "data" / "alice.txt", ROOT / "LICENSE")
MAX_TOKENS = 700  # of each


@pytest.fixture(scope="module")
def checkpoint(model_path: Callable[[str], Path]) -> Path:
    return model_path("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LanguageModel:
    return rl.llm.compile(checkpoint)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), (None, 1e-2)])
def test_greedy_text_and_logits_are_those_of_transformers(
    checkpoint: Path, precision: str | None, tolerance: float
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # which transformers reads GGUF files with
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        str(checkpoint.parent), gguf_file=checkpoint.name, dtype=torch.float32
    ).eval()
    llm = rl.llm.compile(checkpoint, precision=precision)
    results = llm.generate(list(PROMPTS), max_new_tokens=128, stop_tokens=(), logits=True, temperature=0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        given = llm.tokenizer.encode(prompt)
        with torch.no_grad():  # behind all of our tokens at once: equal choices at each are an equal text
            wanted = oracle(torch.tensor([[*given, *result.tokens]])).logits[0, len(given) - 1 : -1].numpy()
        assert np.abs(wanted - result.logits).max() <= tolerance * np.abs(wanted).max()
        lost = wanted.max(axis=1) - wanted[np.arange(len(wanted)), list(result.tokens)]
        if precision == "float32":
            assert not lost.any()
        else:  # activations of 12 bits may choose the other one of two tokens that are as likely
            assert lost.max() <= 1e-3 * np.abs(wanted).max() and np.count_nonzero(lost) <= 1


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


# Precision: what the rounding of activations does to predictions, over a book's beginning and a license


@pytest.fixture(scope="module")
def texts(llm: LanguageModel) -> list[list[int]]:
    found = [list(llm.tokenizer.encode(path.read_text("utf-8")))[:MAX_TOKENS] for path in TEXTS]
    assert sum(map(len, found)) >= 1000
    return found


def logits_of(llm: LanguageModel, *batch: Sequence[int], pieces: Sequence[int] = ()) -> list[np.ndarray]:
    """Behind all tokens of each sequence [tokens, vocab], computed together; of one also in pieces that begin there."""
    engine = llm.engine
    sequences = [engine.new() for _ in batch]
    ends = [*pieces, max(map(len, batch))]
    steps = [[given[begin:end] for given in batch] for begin, end in zip([0, *pieces], ends, strict=True)]
    made = [engine.forward(list(zip(sequences, step, strict=True)), wanted=[*map(len, step)]) for step in steps]
    for sequence in sequences:
        engine.remove(sequence)
    return [np.concatenate(parts) for parts in zip(*made, strict=True)]


@pytest.fixture(scope="module")
def logits(llm: LanguageModel, texts: list[list[int]]) -> list[np.ndarray]:
    """With the default precision, each text as a whole."""
    return [logits_of(llm, tokens)[0] for tokens in texts]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, texts: list[list[int]]) -> list[np.ndarray]:
    """Without any rounding of activations."""
    llm = rl.llm.compile(checkpoint, precision="float32")
    return [logits_of(llm, tokens)[0] for tokens in texts]


def perplexity(logits: list[np.ndarray], texts: list[list[int]]) -> float:
    losses = []
    for found, tokens in zip(logits, texts, strict=True):
        shifted = found[:-1].astype(np.float64) - found[:-1].max(axis=1, keepdims=True)
        chosen = shifted[np.arange(len(tokens) - 1), tokens[1:]]
        losses.append(np.log(np.exp(shifted).sum(axis=1)) - chosen)
    return float(np.exp(np.concatenate(losses).mean()))


def compared(found: list[np.ndarray], wanted: list[np.ndarray]) -> tuple[float, float]:
    """How many of the most likely tokens agree, and the largest difference relative to the largest logit."""
    ours, theirs = np.concatenate(found), np.concatenate(wanted)
    agreement = (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()
    return float(agreement), float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def test_the_default_precision_predicts_what_float32_does(
    logits: list[np.ndarray], plain: list[np.ndarray], texts: list[list[int]]
) -> None:
    """Measured on 1314 tokens: the same choice at 99.7 %, perplexity within 0.02 %, logits within 0.4 %."""
    agreement, distance = compared(logits, plain)
    assert agreement >= 0.99 and distance <= 1e-2
    assert perplexity(logits, texts) == pytest.approx(perplexity(plain, texts), rel=2e-3)


def test_sixteen_bits_are_as_good_as_floats(checkpoint: Path, plain: list[np.ndarray], texts: list[list[int]]) -> None:
    """Measured: the same choice at each token, perplexity within 0.002 %, logits within 2.4e-4 of the largest."""
    llm = rl.llm.compile(checkpoint, precision="int16")
    found = [logits_of(llm, tokens)[0] for tokens in texts]
    agreement, distance = compared(found, plain)
    assert agreement >= 0.99 and distance <= 1e-3
    assert perplexity(found, texts) == pytest.approx(perplexity(plain, texts), rel=1e-3)


def test_what_eight_bits_cost(checkpoint: Path, plain: list[np.ndarray], texts: list[list[int]]) -> None:
    """Measured: the same choice at 96.9 %, perplexity within 0.4 %, logits within 13 % of the largest."""
    llm = rl.llm.compile(checkpoint, precision="int8")
    found = [logits_of(llm, tokens)[0] for tokens in texts]
    agreement, distance = compared(found, plain)
    assert 0.95 <= agreement < 1 and 1e-3 < distance <= 0.25
    assert perplexity(found, texts) == pytest.approx(perplexity(plain, texts), rel=1e-2)


def check_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """In integers each row is rounded alike in any company: to the last bit. Sums of floats go in another order."""
    atol = 0.0 if Target.host().has_dp4a else 1e-4 * float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_a_prompt_in_pieces_is_a_whole_prompt(
    llm: LanguageModel, logits: list[np.ndarray], texts: list[list[int]]
) -> None:
    check_same(logits_of(llm, texts[0], pieces=(1, 3, 6, 23, 123, 251, 379, 579))[0], logits[0])
    check_same(logits_of(llm, texts[0][:130], pieces=range(1, 130))[0], logits[0][:130])


def test_ragged_batches_are_their_sequences(llm: LanguageModel, texts: list[list[int]]) -> None:
    tokens = texts[0]
    batch = [tokens[:5], tokens[5:6], tokens[6:100], tokens[100:400], texts[1][:1]]
    for found, given in zip(logits_of(llm, *batch), batch, strict=True):
        check_same(found, logits_of(llm, given)[0])
