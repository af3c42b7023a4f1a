"""Language models used by several threads, interrupted, and short of memory: nothing is mixed up, cut or lost."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.cli.chat import _interruptible
from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.frontend.llm.gguf_tokenizer import read_tokenizer
from relaxlite.llm import compiled_engine
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.compiling import build_checkpoint
from relaxlite.llm.fork_safe_lock import ForkSafeLock
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.sampling import Sampler, Sampling
from relaxlite.llm.tokenizer import TextStream, Tokenizer
from relaxlite.runtime import kv_cache
from relaxlite.runtime.kv_cache import KVCache
from relaxlite.runtime.module import Executable
from tests.llm.test_fill import FILLS, small
from tests.llm.test_generation import limit
from tests.llm.test_tokenizer import sentence_piece
from tests.support.llm_models import attention_layout
from tests.support.tiny_llm import VOCAB, made, random_logits, tokenizer_json

LAYOUT = attention_layout(layers=3, kv_heads=2, width=4, page=4)


@pytest.fixture(scope="module")
def data() -> Any:
    return build_checkpoint(small())


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, count)).integers(0, VOCAB, count).tolist()


# Threads


def test_threads_take_turns(data: Any) -> None:
    engine = CompiledEngine(Executable(data))
    inside, most, run = 0, 0, engine._run

    def counted(*args: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        found = run(*args)
        inside -= 1
        return found

    engine._run = counted  # type: ignore[assignment]
    found: list[Any] = [None] * 4

    def work(k: int) -> None:
        sequence = engine.new()
        for token in tokens(10, seed=k):
            (found[k],) = engine.forward([(sequence, [token])])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    for k, logits in enumerate(found):
        alone = CompiledEngine(Executable(data))
        sequence = alone.new()
        for token in tokens(10, seed=k):
            (wanted,) = alone.forward([(sequence, [token])])
        np.testing.assert_array_equal(logits, wanted)


def test_threads_chat_at_once_while_the_cache_grows(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "INITIAL_PAGES", 1)
    prompts = [tokens(150, seed=k) for k in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_tokens": ()}
    wanted = [LanguageModel.of(data).generate(prompt, **options).tokens for prompt in prompts]
    llm = LanguageModel.of(data)
    found: list[Any] = [None] * len(prompts)

    def work(k: int) -> None:
        found[k] = llm.generate(prompts[k], **options).tokens

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
    assert llm.engine.cache.used_pages == 0  # type: ignore[attr-defined]


# Interruptions


@pytest.mark.parametrize("after", range(6))
def test_a_growth_that_is_interrupted_goes_on_with_the_next_step(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(LAYOUT, max_bytes=100 * LAYOUT.page_bytes)
    a = cache.new()
    cache.reserve([(a, 20)])
    cache.commit([(a, 20)])
    for k, pool in enumerate(cache.pools):
        pool[:, :5] = k + 1
    calls, make = 0, cache._pool

    def interrupted(number: int, pages: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise KeyboardInterrupt
        return make(number, pages)

    monkeypatch.setattr(cache, "_pool", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.reserve([(a, 60)])
    cache.reserve([(a, 60)])
    assert {pool.shape[1] for pool in cache.pools} == {len(cache._references)} and len(cache._references) >= 20
    assert cache.used_pages == 20 and len(set(cache._sequences[a].pages)) == 20
    for k, pool in enumerate(cache.pools):
        assert (pool[:, :5] == k + 1).all()
    cache.cancel([(a, 60)])
    cache.remove(a)
    assert cache.used_pages == 0 and sorted(cache._free) == list(range(len(cache._references)))


def calls_interrupted(work: Callable[[], object], *events: str, within: str = "") -> Iterator[None]:
    """Interrupts `work` where Python looks for signals, at one place more each time: where functions are entered, and
    where they return to if "return" is among the events; of files whose path has `within` in it."""
    for after in count(1):
        left = after

        def trace(frame: Any, event: str, arg: object) -> Any:
            nonlocal left
            is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)  # whose end may be seen by nobody
            left -= event in events and within in frame.f_code.co_filename and not is_generator
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            work()
            return
        except KeyboardInterrupt:
            sys.settrace(before)
            yield  # while the interruption is on its way
        finally:
            sys.settrace(before)


def test_an_interruption_leaves_no_lock_taken_for_which_other_threads_would_wait_for_ever(data: Any) -> None:
    llm = LanguageModel.of(data)
    engine: Any = llm.engine
    sequence = engine.new()
    places = 0
    for _ in calls_interrupted(lambda: (llm.forget(), engine.drop(sequence, 0)), "call", "return"):
        places += 1
        assert not llm._turn.lock._is_owned() and not engine._turn.lock._is_owned()  # type: ignore[attr-defined]
    assert places > 4


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_is_interrupted_anywhere_leaves_no_lock_taken_and_says_nothing_later(data: Any) -> None:
    engine: Any = CompiledEngine(Executable(data))
    sequences = [engine.new()]
    for _ in calls_interrupted(lambda: engine.forward([(sequences[-1], [1, 2])]), "call", "return"):
        assert engine.length(sequences[-1]) in (0, 2) and not engine._turn.lock._is_owned()
        engine.remove(sequences[-1])
        sequences.append(engine.new())
    gc.collect()
    assert engine.length(sequences[-1]) == 2 and len(sequences) > 30


@pytest.mark.parametrize("kind", ["chat", "batch"])
def test_an_interruption_loses_no_sequence(kind: str) -> None:
    model = made(random_logits)
    talk = [{"role": "user", "content": "ab"}]

    def work() -> None:
        if kind == "chat":
            model.chat(talk, max_new_tokens=2)
        else:
            model.generate(["a", "bc"], max_new_tokens=2)

    for _ in calls_interrupted(work, "call", within="/relaxlite/llm/"):
        kept = model._chat_sequence
        held = set() if kept is None else {kept.sequence}
        assert model.engine._tokens.keys() == held  # type: ignore[attr-defined]
        if kind == "chat":
            model.chat(talk, max_new_tokens=1)
            assert model._chat_sequence is not None and len(model.engine._tokens) == 1  # type: ignore[attr-defined]


def test_a_tokenizer_that_cannot_be_read_loses_no_sequence() -> None:
    model = made(random_logits)
    model.tokenizer = Tokenizer(b"{}")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="the tokenizer cannot be read"):
            model.generate([[1, 2], [3]], max_new_tokens=2)
    assert not model.engine._tokens  # type: ignore[attr-defined]


def test_an_interrupt_stops_a_reply_at_once_before_its_first_word_and_else_after_a_word() -> None:
    def press() -> None:
        os.kill(os.getpid(), 2)
        time.sleep(0.01)  # where Python looks for signals

    with pytest.raises(KeyboardInterrupt), _interruptible():
        press()
    with _interruptible() as interruption:
        interruption.waits = True
        press()
        assert interruption.came
        with pytest.raises(KeyboardInterrupt):
            press()


# A cache that is full


@pytest.mark.skipif(not FILLS, reason="this processor has no products of bytes")
def test_tokens_that_were_computed_one_by_one_are_computed_like_that_again(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the coarse products that fill a cache from a prompt."""
    monkeypatch.setattr(compiled_engine, "MIN_FILL", 4)
    engine = CompiledEngine(Executable(data))
    prompt, reply = tokens(40), tokens(60, seed=1)
    first = engine.new()
    (wanted,) = engine.forward([(first, prompt)])
    for token in reply:
        (wanted,) = engine.forward([(first, [token])])
    again, coarse = engine.new(), engine.new()
    (found,) = engine.forward([(again, prompt + reply)], exact=[1 + len(reply)])
    (other,) = engine.forward([(coarse, prompt + reply)])
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 2e-6 * scale < 1e-4 * scale < np.abs(other - wanted).max()


def test_an_evicted_sequence_is_given_again_as_it_was_given_first() -> None:
    model = made(random_logits)
    limit(model, 30)
    asked: list[tuple[int, int]] = []
    forward = model.engine.forward

    def noted(batch: Any, *, wanted: Any, exact: Any) -> Any:
        found = forward(batch, wanted=wanted, exact=exact)
        asked.extend((len(given), count) for (_, given), count in zip(batch, exact, strict=True))
        return found

    model.engine.forward = noted  # type: ignore[method-assign]
    prompts = ["ab", "cdefg", "h", "ijk"]
    results = model.generate(prompts, max_new_tokens=10, stop_tokens=(), draft=None)
    assert [result.usage.new_tokens for result in results] == [10] * 4
    assert {given for given, count in asked if count == 1 and given > 1} == {2, 5, 3}  # as "h", replies are one token
    again = [(given, count) for given, count in asked if count > 1]
    assert again and all(given - count + 1 in map(len, prompts) for given, count in again)


# Arguments


def test_parts_of_tokens_are_refused(data: Any) -> None:
    engine = CompiledEngine(Executable(data))
    sequence = engine.new()
    engine.forward([(sequence, [1, 2, 3])])
    for wrong in (lambda: engine.drop(sequence, 1.5), lambda: engine.fork(sequence, 1.5)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=r"has 3 tokens, not 1\.5"):
            wrong()
    with pytest.raises(InvalidArgumentError, match=r"token 1\.9 is not in the vocabulary"):
        engine.forward([(sequence, [1.9])])  # type: ignore[list-item]
    assert engine.length(sequence) == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stop": None}, "stop must be texts of at least one character, got None"),
        ({"stop": 5}, "stop must be texts of at least one character, got 5"),
        ({"draft": np.array([1, 2])}, "draft must be 'lookup', a LanguageModel or None"),
        ({"stop_tokens": 5}, "stop_tokens must be numbers of tokens, got 5"),
    ],
)
def test_options_of_other_kinds_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        made(random_logits).generate("a", **options)


@pytest.mark.parametrize("options", [5, {"messages": []}, {"template": "hi"}])
def test_options_of_templates_are_other_variables(options: Any) -> None:
    model = made(random_logits, chat_template="x")
    with pytest.raises(
        InvalidArgumentError, match="template_options are other variables of the template than its mess"
    ):
        model.chat([{"role": "user", "content": "a"}], template_options=options)


@pytest.mark.parametrize("wrong", ["1", None, 1.5, True, float("inf"), float("nan")])
def test_bytes_of_a_cache_are_a_number(wrong: Any, data: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="cache_bytes must be a whole number of bytes, got"):
        LanguageModel.of(data, cache_bytes=wrong)
    assert LanguageModel.of(data, cache_bytes=1e9).generate("a", max_new_tokens=2)  # type: ignore[arg-type]


def test_a_prompt_may_be_an_iterator() -> None:
    model = made(random_logits)
    found = model.generate([iter([97, 98])], max_new_tokens=3, stop_tokens=())[0].tokens
    assert found == model.generate([97, 98], max_new_tokens=3, stop_tokens=()).tokens


def test_tokens_to_stop_at_may_be_an_iterator() -> None:
    model = made(random_logits)
    last = model.generate("ab", max_new_tokens=9, stop_tokens=()).tokens[4]
    assert model.generate("ab", max_new_tokens=9, stop_tokens=iter([last])).finish_reason == "stop"


def test_a_token_outside_of_the_vocabulary_names_its_prompt() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt 1: token 999 is not in the vocabulary of 258"):
        made(random_logits).generate([[97], [999]])


@pytest.mark.parametrize("text", ["\ud800", "a\udce9b"])
def test_text_that_is_no_unicode_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the text is not valid Unicode: a surrogate stands alone at"):
        made(random_logits).generate(text)


def test_the_smallest_penalty_blames_no_weights() -> None:
    logits = np.array([3.0, -2.0, 1.0], np.float32)
    for temperature in (0.0, 1.0):
        sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=1e-38), seed=0)
        assert sampler.choose(logits, [0, 1]) == 0


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_saving_replaces_no_pipe_and_keeps_links(kind: str, data: Any, tmp_path: Path) -> None:
    target, file = tmp_path / "target.rlx", tmp_path / "file.rlx"
    llm = LanguageModel.of(data)
    if kind == "pipe":
        os.mkfifo(target)
        with pytest.raises(ArtifactError, match="it is a device or a pipe, no file that could be replaced"):
            llm.save(target)
        assert target.is_fifo()
        return
    target.symlink_to(file)
    llm.save(target)
    assert target.is_symlink() and file.is_file() and not file.is_symlink()
    assert rl.llm.load(target).description == llm.description


# Text of tokens


def bytes_tokenizer() -> Tokenizer:
    """Each character as its bytes, which SentencePiece's decoder reads together."""
    found = read_tokenizer(sentence_piece(["▁", "a", "▁a"], [-1.0, -2.0, -0.5], prefix=True), "f")
    assert found is not None
    return Tokenizer(found.json)


@pytest.mark.parametrize("make", [bytes_tokenizer, lambda: Tokenizer(tokenizer_json())])
def test_a_reply_that_begins_behind_or_within_a_character_shows_whole_ones(make: Any) -> None:
    tokenizer = make()
    for text in ("世界。", "😀 ok한국", "a世a😀a", "한국어!", "é"):
        tokens = tokenizer.encode(text)
        for begin in range(len(tokens) + 1):
            stream = TextStream(tokenizer, tokens[:begin])
            shown = "".join(stream.push(token) for token in tokens[begin:]) + stream.finish()
            parts = [text[:k] for k in range(len(text) + 1)]
            known = max((part for part in parts if len(tokenizer.encode(part)) <= begin), key=len, default="")
            assert shown == text[len(known) :], (text, begin)


@pytest.mark.parametrize("make", [bytes_tokenizer, lambda: Tokenizer(tokenizer_json())])
def test_marks_before_a_character_do_not_cut_it(make: Any) -> None:
    tokenizer = make()
    mark = tokenizer.encode("<turn>" if make is bytes_tokenizer else "<|start|>", marks=False)[-1]
    tokens = tokenizer.encode("😀", marks=False)[-4:]
    stream = TextStream(tokenizer, tokenizer.encode("a"))
    pieces = [stream.push(token) for token in (mark, mark, mark, *tokens)]
    assert pieces == [""] * 6 + ["😀"]


@pytest.mark.parametrize("make", [bytes_tokenizer, lambda: Tokenizer(tokenizer_json())])
def test_long_runs_of_bytes_that_are_no_text_read_as_all_of_them_do(make: Any) -> None:
    """In SentencePiece's decoder one such byte spoils the characters behind it, up to the next token that is none."""
    tokenizer = make()
    first = 4 if make is bytes_tokenizer else 0
    rng = np.random.default_rng(0)
    for _ in range(50):
        stray = [b"\x80", b"\xf0", b"\x9f", b"\xff", *(bytes([byte]) for byte in rng.integers(128, 256, 4))]
        letters = [*stray, "é".encode()]
        text = b"\xff" + b"".join(letters[k] for k in rng.integers(0, len(letters), 100))
        tokens = [first + byte for byte in text] + tokenizer.encode("a é", marks=False)
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, tokens)) + stream.finish() == tokenizer.decode(tokens), text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    turn, entered, left = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn.lock:
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        with turn.lock, turn.lock:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    left.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_what_a_prompt_leaves_unfinished_is_not_shown_twice() -> None:
    tokenizer = Tokenizer(tokenizer_json())
    tokens = tokenizer.encode("é")
    stream = TextStream(tokenizer, [*tokenizer.encode("a"), tokens[0]])
    assert stream.push(tokenizer.encode("b")[0]) + stream.finish() == "b"
