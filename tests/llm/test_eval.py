"""Perplexity and distance of predictions, against direct computation in NumPy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.cli import main
from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.quantize import quantize, quantize_checkpoint
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.llm import evaluate as module
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.evaluate import count_predictions, evaluate
from tests.support.dense_llm import build_dense
from tests.support.recomputing_engine import RecomputingEngine

VOCAB = 11
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 57).tolist()


class Model:
    """Logits that depend on every token read so far, nearer ones more."""

    def __init__(self, seed: int) -> None:
        self.table = np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)).astype(np.float32)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        state = np.zeros(VOCAB, np.float32)
        found = []
        for token in tokens[0]:
            state = state / 2 + self.table[token]
            found.append(state)
        return np.stack(found)[None]

    def engine(self, context: int = 64) -> RecomputingEngine:
        return RecomputingEngine(self, VOCAB, context)

    def log_probabilities(self, before: Sequence[int]) -> np.ndarray:
        logits = self(np.asarray([before]))[0, -1].astype(np.float64)
        return logits - np.log(np.exp(logits).sum())


def contexts(window: int, stride: int, prefix: list[int]) -> dict[int, list[int]]:
    """What each place of TOKENS is predicted from: the first window that does predict it."""
    found: dict[int, list[int]] = {}
    width = window - len(prefix)
    for begin in range(0, len(TOKENS), stride):
        for place in range(begin, min(begin + width + 1, len(TOKENS))):
            before = prefix + TOKENS[begin:place]
            if before and place not in found:
                found[place] = before
    return found


@pytest.mark.parametrize("prefix", [[], [3], [3, 4]])
@pytest.mark.parametrize(("window", "stride"), [(57, None), (64, None), (16, 14), (16, 5), (16, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_figures_are_those_of_the_definitions(
    window: int, stride: int | None, prefix: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once * VOCAB)
    monkeypatch.setattr(module, "_WIDENED_AT_ONCE", 2 * VOCAB)
    model, other = Model(1), Model(2)
    counted: list[int] = []
    found = evaluate(
        model.engine(), TOKENS, window=window, stride=stride, prefix=prefix, against=other.engine(),
        progress=counted.append,
    )  # fmt: skip
    places = contexts(window, stride or window - len(prefix), prefix)
    assert sorted(places) == list(range(0 if prefix else 1, len(TOKENS)))
    ours = np.stack([model.log_probabilities(places[k]) for k in sorted(places)])
    theirs = np.stack([other.log_probabilities(places[k]) for k in sorted(places)])
    wanted = np.asarray([TOKENS[k] for k in sorted(places)])
    loss = -ours[np.arange(len(wanted)), wanted]
    assert found.tokens == sum(counted) == len(wanted) == count_predictions(len(TOKENS), len(prefix))
    assert found.loss == pytest.approx(loss.mean(), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss.mean()), rel=1e-5)
    assert found.loss_error == pytest.approx(loss.std(ddof=1) / math.sqrt(len(wanted)), rel=1e-5)
    assert found.accuracy == (ours.argmax(1) == wanted).mean()
    assert found.comparison is not None
    divergence = (np.exp(theirs) * (theirs - ours)).sum(1)
    assert found.comparison.kl_divergence == pytest.approx(divergence.mean(), rel=1e-5)
    assert found.comparison.top1_agreement == (ours.argmax(1) == theirs.argmax(1)).mean()
    reference = math.exp(-theirs[np.arange(len(wanted)), wanted].mean())
    assert found.comparison.perplexity == pytest.approx(reference, rel=1e-5)


def test_a_model_agrees_with_itself() -> None:
    found = evaluate(Model(1).engine(), TOKENS, window=8, against=Model(1).engine())
    assert found.comparison is not None
    assert (found.comparison.kl_divergence, found.comparison.top1_agreement) == (0, 1)
    assert found.comparison.perplexity == found.perplexity


def test_probabilities_of_zero_count_nothing() -> None:
    def certain(tokens: np.ndarray) -> np.ndarray:
        return np.where(np.arange(VOCAB) == tokens[..., None], np.float32(0), np.float32(-np.inf))

    engine, other = Model(1).engine(), RecomputingEngine(certain, VOCAB, 64)
    found = evaluate(engine, TOKENS[:9], window=8, against=other).comparison
    losses = [-Model(1).log_probabilities(TOKENS[:k])[TOKENS[k - 1]] for k in range(1, 9)]
    assert found is not None and found.kl_divergence == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.perplexity == math.inf


def test_nothing_stays_in_the_engine_and_bad_requests_are_refused() -> None:
    engine = Model(1).engine(context=16)
    evaluate(engine, TOKENS, window=16)
    assert not engine._tokens
    for options, problem in (
        ({"window": 17}, "a window of 17 tokens; it must be from 1 to the context 16"),
        ({"window": 2, "prefix": [1, 2]}, "from 3 to the context 16"),
        ({"window": 8, "stride": 9}, "a stride of 9 tokens; it must be from 1 to 8"),
        ({"window": 8, "stride": 0}, "a stride of 0 tokens"),
        ({"window": 8, "against": RecomputingEngine(Model(1), 12, 16)}, "vocabularies of 11 and 12 tokens"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            evaluate(engine, TOKENS, **options)
    with pytest.raises(InvalidArgumentError, match="a text of 1 tokens; at least 2 are needed"):
        evaluate(engine, TOKENS[:1], window=8)


def test_logits_that_are_no_numbers_are_an_error_with_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tokens: np.ndarray) -> np.ndarray:
        found = np.zeros((*tokens.shape, VOCAB), np.float32)
        found[0, 5:, 2] = np.nan
        return found

    for at_once in (1, 2, 100):
        monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once * VOCAB)
        engine = RecomputingEngine(broken, VOCAB, 16)
        with pytest.raises(ExecutionError, match="the logits behind token 6 of a window are not finite"):
            evaluate(engine, TOKENS, window=8)
        assert not engine._tokens


def test_a_compiled_engine_gives_the_figures_of_one_that_recomputes() -> None:
    """Windows go through it in steps, which are cut otherwise than the parts whose logits are asked for."""
    from tests.support.llm_models import CONTEXT, small_checkpoint
    from tests.support.llm_models import VOCAB as vocab

    model, other = small_checkpoint("llama"), small_checkpoint("llama", seed=1)
    tokens = np.random.default_rng(1).integers(0, vocab, 90).tolist()
    ours = [CompiledEngine(rl.compile(build_step(m, page=4, step_tokens=16)), chunk=7) for m in (model, other)]
    theirs = [RecomputingEngine(rl.compile(build_dense(m)), vocab, CONTEXT) for m in (model, other)]
    options: dict[str, Any] = {"window": 40, "stride": 17, "prefix": [3]}
    found, wanted = (evaluate(e[0], tokens, against=e[1], **options) for e in (ours, theirs))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5) and found.tokens == wanted.tokens == 90
    assert found.comparison is not None and wanted.comparison is not None
    assert found.comparison.kl_divergence == pytest.approx(wanted.comparison.kl_divergence, rel=1e-3)
    assert found.comparison.top1_agreement == wanted.comparison.top1_agreement
    assert [engine.cache.used_pages for engine in ours] == [0, 0]


# The command


TEXT = "abba ab, a cab\r\nand a bad ab\u00e9 " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    from tests.support import llm_files as files

    folder = tmp_path_factory.mktemp("eval")
    weights = files.tensors("llama", vocab=258)
    metadata = {**files.fields("llama"), **files.byte_tokenizer("<s>")}
    metadata |= {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": True}
    (folder / "text.txt").write_bytes(TEXT.encode())
    return files.write(folder / "m.gguf", "llama", metadata, weights)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


def run(capsys: pytest.CaptureFixture[str], *words: Any, command: str = "eval") -> tuple[int, str, str]:
    code = main([command, *map(str, words)])
    return code, *capsys.readouterr()


@pytest.mark.exhaustive
def test_the_command_computes_what_numpy_does(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support import llm_files as files

    options = ["--text", model.parent / "text.txt", "--window", 30, "--stride", 12, "--json"]
    code, out, err = run(capsys, model, *options, "--quantize", "q4_0", "--against", model)
    assert code == 0, err
    found = json.loads(out)
    data = TEXT.encode()
    tokens: list[int] = []
    while data:
        tokens.append(256 if data[:2] == b"ab" else data[0])
        data = data[2 if data[:2] == b"ab" else 1 :]
    metadata = files.fields("llama")
    whole = read_checkpoint(model)
    losses = {}
    for name, weights in (("whole", files.tensors("llama", vocab=258)), ("blocks", blocks_of(whole))):
        logits = [
            files.forward("llama", metadata, weights, [257, *tokens[begin:end]])[done - begin :]
            for begin, done, end in windows(len(tokens), 29, 12)
        ]
        found_logits = np.concatenate(logits)
        log = found_logits - np.log(np.exp(found_logits).sum(1, keepdims=True))
        losses[name] = -log[np.arange(len(tokens)), tokens].mean()
    assert found["tokens"] == len(tokens)
    assert found["loss"] == pytest.approx(losses["blocks"], rel=1e-4)
    assert found["comparison"]["perplexity"] == pytest.approx(math.exp(losses["whole"]), rel=1e-4)
    assert found["comparison"]["kl_divergence"] > 0
    assert (found["window"], found["stride"], found["quantize"]) == (30, 12, "q4_0")


def windows(count: int, width: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first place predicted, end of the places read) of each window that begins with a prefix."""
    found, done, begin = [], 0, 0
    while done < count:
        end = min(begin + width + 1, count)
        found.append((begin, done, end - 1))
        done, begin = end, begin + stride
    return found


def blocks_of(whole: Any) -> dict[str, np.ndarray]:
    """Weights by GGUF's names as they are once quantized; queries and keys have their rows moved when they are read, so
    each row is quantized as in the file."""
    from tests.support import llm_files as files

    made = quantize_checkpoint(whole, "q4_0").weights
    found = {}
    for name, values in files.tensors("llama", vocab=258).items():
        kind = made["embed"].block_format if name in ("token_embd.weight", "output.weight") else "Q4_0"
        is_matrix = values.ndim == 2
        found[name] = quantize(Weight(values, values.shape), str(kind)).to_float32() if is_matrix else values
    return found


def test_the_command_for_people_and_its_mistakes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = model.parent / "text.txt"
    code, out, _ = run(capsys, model, "--text", text, "--tokens", 9)
    assert code == 0
    assert "perplexity  " in out and "9 tokens, windows of 128, 127 apart" in out and "against" not in out
    assert run(capsys, model, "--text", text, "--window", 1000)[2].count("it must be from 2 to the context 128") == 1
    (model.parent / "bad.txt").write_bytes(b"a\xff")
    code, _, err = run(capsys, model, "--text", model.parent / "bad.txt")
    assert code == 1 and "no text in UTF-8 (invalid start byte at byte 1)" in err
    code, _, err = run(capsys, model, "--text", model.parent / "none.txt")
    assert code == 1 and "none.txt: No such file or directory" in err
    code, _, err = run(capsys, model.parent / "none.gguf", "--text", text)
    assert code == 1 and "there is no file" in err and "none.gguf" in err
    code, _, err = run(capsys, model, "--text", text, "--against", model.parent / "none.rlx")
    assert code == 1 and "there is no file" in err and "none.rlx" in err


@pytest.mark.exhaustive
def test_the_command_takes_compiled_models(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled, text = model.parent / "m.rlx", ["--text", model.parent / "text.txt"]
    assert run(capsys, model, "-o", compiled, "--quantize", "q4_0", command="compile")[0] == 0
    found, wanted = (
        json.loads(run(capsys, *words, *text, "--against", model, "--json")[1])
        for words in ([compiled], [model, "--quantize", "q4_0"])
    )
    assert {**found, "model": None, "quantize": None} == {**wanted, "model": None, "quantize": None}
    code, out, err = run(capsys, model, *text, "--against", compiled)
    assert code == 0, err
    assert f"against {compiled}\n" in out and "  KL divergence   " in out
    assert f"  same top token  {wanted['comparison']['top1_agreement']:.2%}\n" in out
    code, _, err = run(capsys, compiled, *text, "--quantize", "q8_0", "--cache-dtype", "int8")
    assert code == 2 and "--cache-dtype and --quantize need a checkpoint, and" in err and "compiled already" in err


def test_a_narrow_cache_is_measured_too(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--text", model.parent / "text.txt", "--against", model, "--json"]
    whole, narrow = (json.loads(run(capsys, model, *options, *more)[1]) for more in ([], ["--cache-dtype", "int8"]))
    assert whole["comparison"]["kl_divergence"] == 0 and whole["comparison"]["top1_agreement"] == 1
    assert narrow["cache_dtype"] == "int8" and 0 < narrow["comparison"]["kl_divergence"] < 0.1
