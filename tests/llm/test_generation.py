"""Generation: pieces of text, what ends them, batches, chats; with logits made in NumPy: nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import CacheFullError, ExecutionError, InvalidArgumentError
from relaxlite.llm.tokenizer import StopFilter, TextStream, Tokenizer
from tests.support.tiny_llm import START, VOCAB, made, random_logits, scripted, tokenizer_json


def saying(text: str, **fields: Any) -> Any:
    return scripted(lambda _: text.encode(), **fields)


def test_text_ends_where_the_model_ends_it() -> None:
    result = saying("Paris.").generate("Q:\n")
    assert (result.text, result.finish_reason, str(result)) == ("Paris.", "stop", "Paris.")
    assert result.tokens == tuple(b"Paris.")
    assert (result.usage.prompt_tokens, result.usage.reused_tokens, result.usage.new_tokens) == (3, 0, 6)
    assert result.speed.first_token_s > 0 and result.speed.decode_tokens_per_s > 0
    assert result.logprobs is None and result.logits is None


def test_a_length_ends_it_too() -> None:
    result = saying("Paris.").generate("Q:\n", max_new_tokens=3)
    assert (result.text, result.finish_reason) == ("Par", "length")
    assert saying("x" * 99, context=10).generate("Q:\n").usage.new_tokens == 7  # what the context leaves


def test_pieces_hold_unfinished_characters_back() -> None:
    text = "né 日本 🦊!"
    pieces = list(saying(text).generate("Q:\n", stream=True))
    assert "".join(pieces) == text and pieces == list(text)


def test_a_cut_character_is_shown_at_the_end() -> None:
    result = saying("a日").generate("Q:\n", max_new_tokens=3)
    assert result.text == "a\ufffd" and result.finish_reason == "length"


def test_bytes_that_never_make_a_character_do_not_hold_text_for_ever() -> None:
    pieces = list(scripted(lambda _: b"a" + b"\xff" * 6 + b"b").generate("Q:\n", stream=True))
    assert "".join(pieces) == "a" + "\ufffd" * 6 + "b" and len(pieces) > 2


def test_stray_bytes_before_a_character_of_several_tokens_are_shown_once() -> None:
    tokenizer = Tokenizer(tokenizer_json())
    rng = np.random.default_rng(0)
    for _ in range(300):
        letters = [bytes([byte]) for byte in rng.integers(128, 256, 4)] + ["日".encode(), "🦊".encode(), b"a"]
        text = b"".join(letters[k] for k in rng.integers(0, len(letters), 8))
        stream = TextStream(tokenizer)
        shown = "".join(stream.push(byte) for byte in text) + stream.finish()
        assert shown == tokenizer.decode(list(text)), text


@pytest.mark.parametrize("token", [0x80, 0xF0, START, 999])
def test_tokens_without_text_cost_the_same_however_many_came_before(
    token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, decoded = Tokenizer(tokenizer_json()), 0
    decode = tokenizer.decode

    def counting(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    stream = TextStream(tokenizer, [65])
    tokens = [token] * 1000 + tokenizer.encode("é")
    shown = "".join(map(stream.push, tokens)) + stream.finish()
    assert decoded < 100 * len(tokens)
    assert shown == decode(tokens)


@pytest.mark.parametrize("text", ["naïve 日本語 🦊", "plain", ""])
def test_a_stream_of_tokens_reads_as_all_of_them(text: str) -> None:
    tokenizer = Tokenizer(tokenizer_json())
    stream = TextStream(tokenizer)
    tokens = tokenizer.encode(text)
    assert "".join([*(stream.push(t) for t in tokens), stream.finish()]) == text == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        ("END", "one two ", "stop_string"),
        (["three", "two"], "one ", "stop_string"),
        ("o", "", "stop_string"),
        ("ENDs", "one two END", "stop"),
        ([], "one two END", "stop"),
    ],
)
def test_stop_strings_are_never_shown(stop: Any, shown: str, reason: str) -> None:
    model = saying("one two END")
    pieces = model.generate("Q:\n", stop=stop, stream=True)
    texts = list(pieces)
    assert "".join(texts) == shown and pieces.result().text == shown and pieces.result().finish_reason == reason
    assert pieces.result().text == model.generate("Q:\n", stop=stop).text


def test_the_first_stop_string_counts_wherever_pieces_end() -> None:
    for cut in range(9):
        found = StopFilter(["<end>", "<e"])
        shown = found.push("ab<en d>"[:cut]) + found.push("ab<en d>"[cut:]) + found.finish()
        assert (shown, found.match) == ("ab", "<e")
        whole = StopFilter(["<end>"])
        text = whole.push("ab<en d>"[:cut]) + whole.push("ab<en d>"[cut:]) + whole.finish()
        assert (text, whole.match) == ("ab<en d>", None)


def test_a_batch_is_what_its_prompts_are_alone() -> None:
    model = made(random_logits)
    prompts = ["a", "bcd", "efghij"]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "stop_tokens": ()}
    together = model.generate(prompts, seed=5, **options)
    alone = [model.generate(text, seed=5 + k, **options) for k, text in enumerate(prompts)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert together[0].tokens != model.generate("a", seed=99, **options).tokens


def test_finished_sequences_leave_the_batch() -> None:
    steps: list[int] = []
    model = scripted(lambda before: b"long reply" if before.count(ord("x")) else b"no")
    forward = model.engine.forward

    def counted(batch: Any, **options: Any) -> Any:
        steps.append(len(batch))
        return forward(batch, **options)

    model.engine.forward = counted  # type: ignore[method-assign]
    results = model.generate(["a\n", "x\n"])
    assert [r.text for r in results] == ["no", "long reply"]
    assert steps == [2, 2, 2, *[1] * 8]
    pieces = list(model.generate(["a\n", "x\n"], stream=True))
    assert pieces[:3] == [(0, "n"), (1, "l"), (0, "o")]


def test_no_sequence_is_left_behind() -> None:
    model = saying("Paris.")
    model.generate(["a\n", "b\n"])
    stream = model.generate("a\n", stream=True)
    next(stream)
    stream.close()
    assert stream.result().finish_reason == "closed" and stream.result().text == "P"
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    model.chat([{"role": "user", "content": "x"}])
    assert len(model.engine._tokens) == 1  # type: ignore[attr-defined]
    model.forget()
    assert model.engine._tokens == {}  # type: ignore[attr-defined]


def test_logits_and_log_probabilities_on_request() -> None:
    model = made(random_logits)
    result = model.generate("ab", max_new_tokens=4, stop_tokens=(), logprobs=True, logits=True, temperature=0.7, seed=1)
    tokens = np.array([[*b"ab", *result.tokens]])
    wanted = random_logits(tokens)[0, 1:-1]
    np.testing.assert_array_equal(result.logits, wanted)
    shares = np.exp(wanted.astype(np.float64)) / np.exp(wanted.astype(np.float64)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(result.logprobs, np.log(shares[np.arange(4), result.tokens]), rtol=1e-9)


def test_the_logits_of_an_empty_reply_are_none_of_so_many_tokens() -> None:
    result = saying("").generate("Q:\n", logits=True, logprobs=True)
    assert result.logits.shape == (0, VOCAB) and result.logprobs == () and result.finish_reason == "stop"


def test_the_checkpoints_own_settings_are_the_defaults() -> None:
    greedy = made(random_logits, generation={"temperature": 0.8, "top_k": 5})
    assert greedy._sampling().temperature == 0
    sampled = made(random_logits, generation={"do_sample": True, "temperature": 0.8, "top_k": 5})._sampling
    assert (sampled(top_k=None).temperature, sampled(top_p=0.5).top_k) == (0.8, 5)
    assert sampled(temperature=0).temperature == 0
    assert made(random_logits, generation={"do_sample": True})._sampling().temperature == 1


def test_a_tokenizer_may_begin_texts() -> None:
    with_start = made(random_logits, bos=START, adds_bos=True)
    assert with_start.tokenizer.encode("a") == [START, 97]
    assert with_start.tokenizer.encode("<|start|>a") == [START, 97]
    assert with_start.tokenizer.encode("a", marks=False) == [97]
    assert with_start.generate("", max_new_tokens=1).usage.prompt_tokens == 1


def test_where_the_cache_is_full_requests_wait_and_say_the_same() -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "stop_tokens": (), "temperature": 1.0, "seed": 1}
    prompts = ["ab", "cdefg", "h", "ijk"]
    wanted = [r.tokens for r in made(random_logits).generate(prompts, **options)]
    for room in (16, 20, 30, 60):
        model = made(random_logits)
        model.chat([{"role": "user", "content": ""}], max_new_tokens=1)  # which is forgotten when room is needed
        widths = limit(model, room)
        assert [r.tokens for r in model.generate(prompts, **options)] == wanted
        assert (widths == [4] * 10) == (room == 60)


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    model = made(random_logits)
    limit(model, 12)
    with pytest.raises(CacheFullError, match="full"):
        model.generate(["ab", "x" * 13])
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    assert model.generate("ab", max_new_tokens=5).finish_reason == "length"


def limit(model: Any, room: int) -> list[int]:
    """Let the engine hold at most `room` tokens; the list gets how many sequences each step had."""
    forward, widths, engine = model.engine.forward, [], model.engine

    def bounded(batch: Any, **options: Any) -> Any:
        if sum(map(len, engine._tokens.values())) + sum(len(tokens) for _, tokens in batch) > room:
            raise CacheFullError("full")
        widths.append(len(batch))
        return forward(batch, **options)

    engine.forward = bounded
    return widths


# Contexts that are too short


def test_a_context_slides_where_that_is_asked_for_and_says_what_it_forgot() -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "stop_tokens": (), "overflow": "slide", "logits": True}
    prompts = [b"abc", b"d" * 15, b"e"]
    results = made(random_logits, context=16).generate([p.decode() for p in prompts], **options)
    for prompt, result in zip(prompts, results, strict=True):
        held, gone = list(prompt), 0
        for token, logits in zip(result.tokens, result.logits, strict=True):
            if len(held) > 16:
                gone += len(held) - 8
                held = held[-8:]
            np.testing.assert_array_equal(logits, random_logits(np.array([held]))[0, -1])
            assert token == logits.argmax()
            held.append(token)
        assert (result.usage.new_tokens, result.finish_reason) == (40, "length")
        assert result.usage.forgotten_tokens == gone > 0
    for room in (17, 20, 33):  # and where the cache is full, too
        model = made(random_logits, context=16)
        limit(model, room)
        again = model.generate([p.decode() for p in prompts], **options)
        assert [r.tokens for r in again] == [r.tokens for r in results]
        assert [r.usage.forgotten_tokens for r in again] == [r.usage.forgotten_tokens for r in results]
    fitting = made(random_logits).generate("abc", max_new_tokens=40, stop_tokens=(), overflow="slide")
    assert fitting.usage.forgotten_tokens == 0
    assert len(made(random_logits, context=16).generate("a", stop_tokens=(), overflow="slide").tokens) == 256


def test_a_chat_whose_context_slid_is_computed_anew() -> None:
    model, chat = made(random_logits, context=32), [{"role": "user", "content": "a"}]
    reply = model.chat(chat, max_new_tokens=30, overflow="slide", stop="\0")
    assert reply.usage.forgotten_tokens > 0
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    assert model.chat(chat, max_new_tokens=3).usage.reused_tokens == 0


# Chats


def test_a_chat_computes_only_what_is_new() -> None:
    seen: list[int] = []
    model = saying("fine", context=200)
    forward = model.engine.forward

    def watched(batch: Any, **options: Any) -> Any:
        seen.append(len(batch[0][1]))
        return forward(batch, **options)

    model.engine.forward = watched  # type: ignore[method-assign]
    chat = [{"role": "user", "content": "How are you?"}]
    first = model.chat(chat)
    assert first.text == "fine" and first.usage.reused_tokens == 0
    assert seen == [first.usage.prompt_tokens, 1, 1, 1, 1]
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And now?"}]
    seen.clear()
    second = model.chat(chat)
    assert second.usage.reused_tokens == first.usage.prompt_tokens + 4
    assert seen[0] == second.usage.prompt_tokens - second.usage.reused_tokens
    again = model.chat(chat)  # the whole prompt is there: its last token is computed again
    assert again.usage.reused_tokens == again.usage.prompt_tokens - 1 and again.tokens == second.tokens
    other = model.chat([{"role": "user", "content": "Hello"}])
    assert other.text == "fine" and other.usage.reused_tokens == len([START, *b"user\nH"])


def test_reuse_changes_no_reply() -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "seed": 3}
    model, chat = made(random_logits, context=200), [{"role": "user", "content": "a"}]
    for turn in range(3):
        reply = model.chat(chat, **options)
        assert reply.tokens == made(random_logits, context=200).chat(chat, **options).tokens
        assert (reply.usage.reused_tokens > 0) == (turn > 0)
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "b" * turn}]


def test_interleaved_chats_do_not_share_a_sequence() -> None:
    model = scripted(lambda before: b"yes" if ord("x") in before else b"nope", context=200)
    streams = [model.chat([{"role": "user", "content": text}], stream=True) for text in "xa"]
    texts = ["", ""]
    for _ in range(3):
        for k, stream in enumerate(streams):
            texts[k] += next(stream)
    assert texts == ["yes", "nop"] and [stream.result().text for stream in streams] == ["yes", "nope"]
    assert len(model.engine._tokens) == 1  # type: ignore[attr-defined]


def test_a_chat_that_was_stopped_goes_on() -> None:
    model = saying("a long reply", context=200)
    stream = model.chat([{"role": "user", "content": "x"}], stream=True)
    shown = "".join(next(stream) for _ in range(4))
    stream.close()
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": shown}, {"role": "user", "content": "y"}]
    reply = model.chat(chat)
    assert reply.text == "a long reply" and reply.usage.reused_tokens >= stream.result().usage.prompt_tokens + 3


# Errors


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        (["a", ""], {}, "prompt 1 is empty"),
        ([], {}, "there is no prompt: the list is empty"),
        (3, {}, "a prompt is text or a list of tokens, got int"),
        (np.array(3), {}, "a prompt is text or a list of tokens, got ndarray"),
        ({"a": 1}, {}, "a prompt is text or a list of tokens, got dict"),
        ([True, False], {}, "prompt 0 is True; a prompt is text or a list of tokens"),
        ("a", {"seed": True}, "seed must be a whole number from 0, got True"),
        ("a", {"stop_tokens": [True]}, "stop_tokens: True is not in the vocabulary"),
        (["a", 3], {}, "prompt 1 is 3; a prompt is text or a list of tokens"),
        ("x" * 64, {}, "the prompt has 64 tokens, and the context holds 64"),
        ("x" * 60, {"max_new_tokens": 5}, "has 60 tokens, and max_new_tokens=5 more do not fit into the context of 64"),
        (["a", "x" * 70], {}, "prompt 1 has 70 tokens, and the context holds 64"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1, got 0"),
        ("a", {"temperature": -1}, "temperature must be a number from 0, got -1"),
        ("a", {"temperature": 10**400}, "temperature must be a number from 0, got 1000"),
        ("a", {"repetition_penalty": Fraction(1, 10**400)}, "repetition_penalty must be a number from 0, 0 excluded"),
        ("a", {"temperature": float("nan")}, "temperature must be a number from 0, got nan"),
        ("a", {"top_k": 1.5}, "top_k must be a whole number from 0"),
        ("a", {"top_p": 0}, "top_p must be a number from 0 to 1, 0 excluded, got 0"),
        ("a", {"min_p": 1.1}, "min_p must be a number from 0 to 1, got 1.1"),
        ("a", {"suppress_tokens": [3, -1]}, "suppress_tokens must be numbers of tokens, got [3, -1]"),
        ("a", {"suppress_tokens": 3.5}, "suppress_tokens must be numbers of tokens, got 3.5"),
        ("a", {"repetition_penalty": 0}, "repetition_penalty must be a number from 0, 0 excluded, got 0"),
        ("x" * 64, {"overflow": "slide"}, "the prompt has 64 tokens, and the context holds 64"),
        ("a", {"overflow": "wrap"}, "overflow must be 'error' or 'slide', got 'wrap'"),
        ("a", {"stop_tokens": [3, VOCAB]}, f"stop_tokens: {VOCAB} is not in the vocabulary of {VOCAB}"),
        ("a", {"stop_tokens": ["x"]}, f"stop_tokens: 'x' is not in the vocabulary of {VOCAB}"),
        ([1, -1], {}, f"token -1 is not in the vocabulary of {VOCAB}"),
        ("a", {"seed": -1}, "seed must be a whole number from 0, got -1"),
        ("a", {"stop": ["a", ""]}, "stop must be texts of at least one character, got ''"),
        ([1, VOCAB], {}, f"token {VOCAB} is not in the vocabulary of {VOCAB}"),
    ],
)
def test_bad_requests_are_refused(prompt: Any, options: dict[str, Any], message: str) -> None:
    model = saying("x")
    with pytest.raises(InvalidArgumentError) as caught:
        model.generate(prompt, **options)
    assert message in str(caught.value)
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    assert model.generate("a\n").text == "x"


def test_logits_that_are_no_numbers_are_an_error_that_leaves_the_model_usable() -> None:
    broken = [True]

    def logits(tokens: Any) -> Any:
        found = random_logits(tokens)
        if broken[0]:
            found[0, -1, 5] = np.nan
        return found

    model = made(logits)
    problem = f"the model computed logits that are no numbers, 1 of {VOCAB}, the first for token 5; are the weights"
    with pytest.raises(ExecutionError, match=f"^the sequence, position 20: {problem}"):
        model.chat([{"role": "user", "content": "a"}])
    with pytest.raises(ExecutionError, match=f"^sequence 0, position 2: {problem}"):
        model.generate(["ab", "c"], temperature=1.0, top_k=3)
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    broken[0] = False
    assert model.chat([{"role": "user", "content": "a"}], max_new_tokens=2).usage.reused_tokens == 0
