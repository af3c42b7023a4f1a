"""Guesses of how a text goes on: what is guessed, how often, and that nothing of what is generated changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.errors import CacheFullError, InvalidArgumentError
from relaxlite.frontend.llm.config import Rope, StateLayers
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.llm.description import Description
from relaxlite.llm.drafts import MAX_DRAFT_TOKENS, DraftModel, PromptLookup, min_acceptance
from relaxlite.llm.engine import EXACT_TOKENS
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.runtime import kv_cache, threadpool
from relaxlite.runtime.module import Executable
from tests.llm.test_generation import limit
from tests.support import tiers
from tests.support.recomputing_engine import RecomputingEngine
from tests.support.tiny_llm import END, TEMPLATE, VOCAB, checkpoint, made, random_logits, scripted, tokenizer_json


def proposed(text: str, most: int = MAX_DRAFT_TOKENS, sequences: int = 1) -> str:
    return bytes(PromptLookup(0.15).propose(text.encode(), most, sequences)).decode()


def test_what_followed_the_same_tokens_is_guessed() -> None:
    text = "the quick brown fox. the quick"
    assert " brown fox. the quick".startswith(proposed(text)) and len(proposed(text)) > 4
    assert proposed(text, most=3) == " br"
    assert [proposed(text) for text in ("", "a", "aa", "abcdef", "abxyb")] == [""] * 5


def test_longer_matches_count_before_later_ones_and_these_before_earlier_ones() -> None:
    assert proposed("1abcdX_2cdY_abcd")[0] == "X"
    assert proposed("1cdX_2cdY_cd")[0] == "Y"


def test_guesses_at_the_end_of_the_text_repeat_it() -> None:
    assert proposed("xyzxyzxyzxyz") == "xyzxyzxyzxyzxyzxyz"[:MAX_DRAFT_TOKENS]


def test_what_comes_later_is_read_on_from_where_the_last_look_ended() -> None:
    text = b"one two three four one two three five one two th"
    drafter = PromptLookup()
    for end in range(1, len(text) + 1):
        found = drafter.propose(text[:end], MAX_DRAFT_TOKENS, 1)
        alone = PromptLookup()
        assert found == alone.propose(text[:end], MAX_DRAFT_TOKENS, 1)


def test_wrong_guesses_make_fewer_and_right_ones_more() -> None:
    drafter, text = PromptLookup(0.15), b"abcd" * 8
    counts = []
    for _ in range(6):
        counts.append(len(drafter.propose(text, MAX_DRAFT_TOKENS, 1)))
        drafter.learn(counts[-1], 0)
    assert counts == sorted(counts, reverse=True) and counts[-1] < 3 < counts[0]
    silent = 0
    while not drafter.propose(text, MAX_DRAFT_TOKENS, 1):  # what was seen fades
        drafter.learn(0, 0)
        silent += 1
    assert silent < 50
    for _ in range(6):
        drafter.learn(found := len(drafter.propose(text, MAX_DRAFT_TOKENS, 1)), found)
    assert len(drafter.propose(text, MAX_DRAFT_TOKENS, 1)) > 10


def test_guesses_pay_less_beside_other_sequences() -> None:
    assert min_acceptance(0.25, 0.25, 1) == pytest.approx(0.25)
    assert [min_acceptance(0.25, 0.25, n) < min_acceptance(0.25, 0.25, n + 1) < 1 for n in range(1, 50)] == [True] * 49
    text = "one two three one two"
    counts = [len(proposed(text, sequences=n)) for n in (1, 4, 64)]
    assert counts[0] > counts[1] > counts[2] == 0


# Generation


def repetitive(tokens: Any) -> Any:
    """Logits [1, seq, VOCAB] of a text that mostly goes round in circles of a few letters."""
    found = np.zeros((1, tokens.shape[1], VOCAB), np.float32)
    for k in range(tokens.shape[1]):
        last = int(tokens[0, k])
        seed = [3, last] if k % 7 else [5, *tokens[0, : k + 1]]
        found[0, k, 97:105] = np.random.default_rng(seed).normal(0, 3, 8)
        found[0, k, END] = 2.0
    return found


def counting(model: Any) -> list[int]:
    """How many tokens each step from now on is given."""
    forward, counts = model.engine.forward, []

    def counted(batch: Any, **options: Any) -> Any:
        counts.append(sum(len(tokens) for _, tokens in batch))
        return forward(batch, **options)

    model.engine.forward = counted
    return counts


def test_repeated_text_takes_fewer_steps() -> None:
    reply = b"round and round and round and round it goes, and round and round again"
    model = scripted(lambda _: reply, context=200)
    counts = counting(model)
    plain = model.generate("say: \n", draft=None)
    assert plain.text.encode() == reply and len(counts) == len(reply) + 1 and plain.usage.drafted_tokens == 0
    counts.clear()
    result = model.generate("say: \n")
    assert (result.tokens, result.text, result.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)
    assert len(counts) == len(reply) + 1 - result.usage.accepted_tokens < 0.7 * len(reply)
    assert sum(counts) == 5 + 1 + len(reply) + result.usage.drafted_tokens - result.usage.accepted_tokens
    assert 0 < result.usage.accepted_tokens <= result.usage.drafted_tokens


@settings(max_examples=tiers.examples(60), deadline=None)
@given(
    prompts=st.lists(st.text("abcdefgh", min_size=1, max_size=12), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.2]),
    tokens=st.integers(1, 40),
    room=st.sampled_from([None, 60, 110]),
    other=st.sampled_from(["lookup", "same", "near", "strange"]),
    options=st.sampled_from([{}, {"stop": "ba"}, {"overflow": "slide"}, {"stop_tokens": ()}]),
)
def test_guesses_change_nothing(
    prompts: list[str], temperature: float, penalty: float, tokens: int, room: int | None, other: str, options: Any
) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": tokens, "temperature": temperature, "repetition_penalty": penalty, "seed": 1,
        "logprobs": True, "logits": True, **options,
    }  # fmt: skip
    wanted = made(repetitive, context=52).generate(prompts, draft=None, **asked)
    model = made(repetitive, context=52)
    if room is not None:
        limit(model, room)
    drafts = {"same": repetitive, "near": lambda t: repetitive(t) * np.float32(0.7) + random_logits(t) * 0.3}
    draft = "lookup" if other == "lookup" else made(drafts.get(other, random_logits), context=40)
    found = model.generate(prompts, draft=draft, **asked)
    for a, b in zip(found, wanted, strict=True):
        assert (a.tokens, a.text, a.finish_reason, a.logprobs) == (b.tokens, b.text, b.finish_reason, b.logprobs)
        np.testing.assert_array_equal(a.logits, b.logits)
        assert a.usage.forgotten_tokens == b.usage.forgotten_tokens
    assert model.engine._tokens == {}  # type: ignore[attr-defined]
    assert other == "lookup" or draft.engine._tokens == {}  # type: ignore[union-attr]


def test_chats_keep_what_was_guessed_right_and_nothing_else() -> None:
    def reply(before: Any) -> bytes:
        return b"la la la la la la, " + bytes(t for t in before if 97 <= t < 123)[-12:]

    for draft in ("lookup", None):
        model, chat, seen = scripted(reply, context=400), [{"role": "user", "content": "sing la la la"}], []
        for turn in range(4):
            result = model.chat(chat, draft=draft)
            (sequence,) = model.engine._tokens  # type: ignore[attr-defined]
            held = model.engine._tokens[sequence]  # type: ignore[attr-defined]
            assert held == [*model.encode_chat(chat), *result.tokens][: len(held)]
            seen.append((result.text, result.usage.reused_tokens))
            chat += [{"role": "assistant", "content": result.text}, {"role": "user", "content": f"again {turn}"}]
        assert seen[0][0].startswith("la la la") and seen[3][1] > seen[1][1] > 0
        if draft:
            with_guesses = seen
    assert seen == with_guesses


def test_a_stream_that_is_closed_ends_with_what_was_shown() -> None:
    model = scripted(lambda _: b"ababababababababababababab", context=200)
    for pieces in range(1, 27):
        stream = model.chat([{"role": "user", "content": "x"}], stream=True)
        shown = "".join(next(stream) for _ in range(pieces))
        stream.close()
        result = stream.result()
        assert result.text == shown == "ab" * (pieces // 2) + "a" * (pieces % 2)
        assert len(result.tokens) == pieces
        (held,) = model.engine._tokens.values()  # type: ignore[attr-defined]
        assert len(held) < result.usage.prompt_tokens + pieces
        model.forget()


def test_a_draft_model_that_is_right_leaves_few_steps() -> None:
    reply = b"a long and winding reply without any repetition"
    model, draft = (scripted(lambda _: reply, context=200) for _ in range(2))
    counts = counting(model)
    result = model.generate("say: \n", draft=draft)
    assert result.text.encode() == reply and len(counts) < 8
    assert result.usage.accepted_tokens >= len(reply) - len(counts)
    assert draft.engine._tokens == {}  # type: ignore[attr-defined]


def test_a_draft_model_is_asked_only_for_tokens_it_is_sure_of() -> None:
    engine = RecomputingEngine(lambda t: np.zeros((1, t.shape[1], VOCAB), np.float32), VOCAB, 50)
    assert DraftModel(engine, 0.1).propose([1, 2, 3], 5, 1) == []
    sure = RecomputingEngine(lambda t: np.eye(VOCAB, dtype=np.float32)[None, t[0]] * 99, VOCAB, 50)
    drafter = DraftModel(sure, 0.1)
    assert drafter.propose([1, 2, 3], 5, 1) == [3] * 5
    assert drafter.propose([1, 2, 3, 3, 3, 4], 5, 1) == [4] * 5  # two right, one wrong
    assert drafter.propose([1, 2, 3, 3, 3, 4, *[4] * 5, 6], 5, 1) == [6] * 5  # all right
    assert drafter.propose(list(range(48)), 5, 1) == [47] * 2  # its context is full
    assert drafter.propose(list(range(50)), 5, 1) == [49] * 5  # of half of which it holds the end then
    assert drafter.propose(list(range(55)), 5, 1) == [54] * 5
    assert drafter.propose(list(range(200)), 5, 1) == [199] * 5
    assert sure.length(1) <= 25 + 5
    for steps, cost, sequences in (
        (0, 1.0, 1),
        (0, 0.1, 20),
        (1, 0.1, 1),
    ):  # nor where it would take longer than it saves
        asked: list[int] = []
        counted = RecomputingEngine(lambda t, a=asked: (a.append(1), np.eye(VOCAB)[None, t[0]])[1], VOCAB, 50)
        DraftModel(counted, cost).propose([1, 2, 3], 5, sequences)
        assert len(asked) == steps, (cost, sequences)


def test_a_draft_model_fell_silent_once_the_text_was_longer_than_its_context() -> None:
    def alphabet(tokens: Any) -> Any:
        return np.eye(VOCAB, dtype=np.float32)[None, 97 + (tokens[0] - 96) % 26] * 99

    for overflow, context in (("error", 200), ("slide", 60)):
        model, draft = made(alphabet, context=context), made(alphabet, context=24)
        counts = counting(draft)
        found = model.generate("a", max_new_tokens=150, overflow=overflow, draft=draft)
        assert found.text == ("bcdefghijklmnopqrstuvwxyza" * 6)[:150] and found.usage.accepted_tokens > 100
        assert max(counts) <= 12 and sum(counts) < 500  # what is remembered is read anew
        assert draft.engine._tokens == {}  # type: ignore[attr-defined]


def test_a_draft_model_whose_cache_is_full_guesses_no_more() -> None:
    model, draft = made(repetitive), made(repetitive)
    limit(draft, 12)
    plain = model.generate("abc", max_new_tokens=30, draft=None, stop_tokens=())
    assert model.generate("abc", max_new_tokens=30, draft=draft, stop_tokens=()).tokens == plain.tokens
    assert draft.engine._tokens == {}  # type: ignore[attr-defined]
    limit(model, 20)
    with pytest.raises(CacheFullError):
        model.generate("abc", max_new_tokens=30, stop_tokens=())


def test_guesses_go_on_where_room_was_made_for_them() -> None:
    model = scripted(lambda _: b"la la la la la la la la la la la la", context=200)
    model.chat([{"role": "user", "content": "x" * 40}])  # stays in the cache, until room is needed
    (held,) = map(len, model.engine._tokens.values())  # type: ignore[attr-defined]
    limit(model, max(held + 14, 50))
    found = model.generate("sing: \n")
    assert found.text == "la " * 11 + "la" and found.usage.accepted_tokens > 15


def test_a_draft_model_is_freed_while_the_model_lives_that_it_guessed_for() -> None:
    model, draft = made(repetitive), made(repetitive)
    model.generate("abc", max_new_tokens=5, draft=draft)
    found = weakref.ref(draft)
    del draft
    gc.collect()
    assert found() is None


def test_other_drafts_are_refused() -> None:
    model = made(random_logits)
    with pytest.raises(InvalidArgumentError) as caught:
        model.generate("a", draft="small.gguf")
    assert str(caught.value) == "draft must be 'lookup', a LanguageModel or None, got 'small.gguf'"
    other = made(random_logits)
    other.tokenizer._json = other.tokenizer._json.replace('"a":97', '"a":98').replace('"b":98', '"b":97')  # type: ignore
    with pytest.raises(
        InvalidArgumentError, match=r"draft: tiny has another vocabulary \(258 tokens\) than tiny \(258\)"
    ):
        model.generate("a", draft=other)
    with pytest.raises(InvalidArgumentError, match="draft: a model does not guess for itself, which takes room in its"):
        model.generate("a", draft=model)
    assert model.engine._tokens == {}  # type: ignore[attr-defined]


# The compiled engine


SHAPE: dict[str, Any] = {"hidden": 64, "head_width": 16, "intermediate": 96, "rope": Rope(1e4, 16)}
STATES = {"layers": 3, "has_output_gate": True, "states": StateLayers("delta", 2, 4, 16, 24, 4, (True, False, True))}


@pytest.fixture(scope="module", params=[{}, STATES], ids=["all layers attend", "some have states"])
def compiled(request: pytest.FixtureRequest) -> CompiledEngine:
    made = quantize_checkpoint(checkpoint(**SHAPE, **request.param), "q4_0")
    return CompiledEngine(rl.compile(build_step(made), precision="int12"))


@pytest.mark.each_value("cache_dtype")
@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("more", [{"kv_heads": 1}, {"kv_heads": 2}, {"kv_heads": 4}, STATES])
def test_several_tokens_of_a_step_have_the_logits_of_each_to_the_last_bit(more: Any, cache_dtype: str) -> None:
    """Of 4, 2 and 1 heads that share keys, so of tiles with at least as many rows."""
    tiny = quantize_checkpoint(checkpoint(**SHAPE, **more), "q4_0")
    compiled = CompiledEngine(rl.compile(build_step(tiny, cache_dtype=cache_dtype), precision="int12"))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    sequence = compiled.new()
    alone = np.concatenate([compiled.forward([(sequence, [token])])[0] for token in tokens])
    for begin in (0, 3, 20):
        for count in range(1, MAX_DRAFT_TOKENS + 2):
            compiled.drop(sequence, compiled.length(sequence) - begin)
            given = tokens[begin : begin + count]
            (found,) = compiled.forward([(sequence, given)], wanted=[len(given)])
            np.testing.assert_array_equal(found, alone[begin : begin + count])
    compiled.remove(sequence)


@pytest.mark.parametrize("has_fill", tiers.few([True, False]))
def test_what_is_given_again_as_it_was_has_the_logits_that_it_had(
    has_fill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one head of keys is shared out among two threads in parts, by the position of each token."""
    monkeypatch.setattr(threadpool, "num_threads", lambda: 2)
    shape = {"hidden": 96, "heads": 3, "kv_heads": 1, "head_width": 32, "intermediate": 96, "context": 1024}
    tiny = quantize_checkpoint(checkpoint(**shape, rope=Rope(1e4, 32)), "q4_0")
    engine = CompiledEngine(rl.compile(build_step(tiny, has_fill=has_fill), precision="int12"))
    tokens = np.random.default_rng(0).integers(0, VOCAB, 460).tolist()
    first = engine.new()
    engine.forward([(first, tokens[:300])])
    for token in tokens[300:-1]:
        engine.forward([(first, [token])])
    assert len(engine.cache.describe([(first, 0, 1)]).blocks) == 2
    wanted = engine.forward([(first, tokens[-1:])])[0]
    others = [engine.new() for _ in range(2)]
    batch = [(others[0], tokens), (others[1], tokens[:7])]
    found = engine.forward(batch, exact=[160, 1])[0]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.exhaustive
def test_chunks_change_no_logits_of_contexts_that_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what is one token in one step, and one of many in another."""
    monkeypatch.setattr(threadpool, "num_threads", lambda: 2)
    shape = {"hidden": 96, "heads": 9, "kv_heads": 3, "head_width": 32, "intermediate": 96, "context": 1024}
    tiny = quantize_checkpoint(checkpoint(**shape, rope=Rope(1e4, 32)), "q4_0")
    run = rl.compile(build_step(tiny), precision="int12")
    tokens = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
    found = []
    for chunk in (512, 128, 37, 1):
        engine = CompiledEngine(run, chunk=chunk)
        found.append(engine.forward([(engine.new(), tokens)], wanted=[150])[0])
    engine = CompiledEngine(run)
    both = engine.forward([(engine.new(), tokens[:101]), (engine.new(), tokens)], wanted=[1, 150])
    for logits in (*found[1:], both[1]):
        np.testing.assert_array_equal(logits, found[0])


@pytest.mark.parametrize("window", tiers.few([100, None]))
def test_several_tokens_of_a_step_after_a_long_context_and_beside_others_have_the_logits_of_each(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is shared out among threads, and where blocks of rows end within pages and beyond."""
    monkeypatch.setattr(kv_cache, "MIN_PART_PAGES", 2)
    monkeypatch.setattr(threadpool, "num_threads", lambda: 2)
    shape = {"hidden": 96, "heads": 6, "kv_heads": 3, "head_width": 32, "intermediate": 96, "context": 1024}
    tiny = quantize_checkpoint(checkpoint(**shape, rope=Rope(1e4, 32), window=window), "q4_0")
    engine = CompiledEngine(rl.compile(build_step(tiny), precision="int12"))
    for length in (120, 250, 507):
        tokens = np.random.default_rng(length).integers(0, VOCAB, length + MAX_DRAFT_TOKENS + 1).tolist()
        first = engine.new()
        engine.forward([(first, tokens[:length])])
        other = engine.fork(first)
        alone = np.concatenate([engine.forward([(first, [token])])[0] for token in tokens[length:]])
        for count in (1, 2, 7, MAX_DRAFT_TOKENS + 1):
            for beside in (0, 2):
                forks = [engine.fork(other) for _ in range(1 + beside)]
                given = tokens[length : length + count]
                found = engine.forward([(fork, given) for fork in forks], wanted=[count] * len(forks))
                for logits in found:
                    np.testing.assert_array_equal(logits, alone[:count], err_msg=f"{length} {count} {beside}")
                for fork in forks:
                    engine.remove(fork)
        engine.remove(first)
        engine.remove(other)


@pytest.mark.exhaustive
def test_another_reply_goes_back_to_the_state_before_the_last_tokens_of_the_prompt() -> None:
    tiny = quantize_checkpoint(checkpoint(**SHAPE, **STATES, context=512), "q4_0")
    for has_fill in (False, True):
        run = rl.compile(build_step(tiny, has_fill=has_fill), precision="int12")

        def model(run: Executable = run) -> LanguageModel:
            return LanguageModel(CompiledEngine(run), Tokenizer(tokenizer_json()), Description("tiny", VOCAB, 512))

        talking = model()
        prompts = [[{"role": "user", "content": "word " * 30 + name}] for name in ("one", "one", "two", "three")]
        for k, messages in enumerate(prompts):
            found = talking.chat(messages, template=TEMPLATE, max_new_tokens=9, temperature=0)
            fresh = model().chat(messages, template=TEMPLATE, max_new_tokens=9, temperature=0)
            assert found.tokens == fresh.tokens
            # each token is a byte: prompts differ before the state that is kept but for the second one
            assert found.usage.reused_tokens == (fresh.usage.prompt_tokens - EXACT_TOKENS if k == 1 else 0)
            assert fresh.usage.reused_tokens == 0
        assert talking.engine.cache._states.count <= 3  # type: ignore[attr-defined]


def test_guesses_change_no_reply_of_a_compiled_model(compiled: CompiledEngine) -> None:
    tokenizer = Tokenizer(tokenizer_json())
    model = LanguageModel(compiled, tokenizer, Description("tiny", VOCAB, 64, row_cost=1e-6))
    prompts = ["abababababab", "one two one two one", "x"]
    for options in ({}, {"temperature": 0.05, "seed": 3}):
        wanted = model.generate(prompts, max_new_tokens=30, draft=None, **options)
        for draft in ("lookup", LanguageModel(compiled, tokenizer, Description("tiny", VOCAB, 64))):
            found = model.generate(prompts, max_new_tokens=30, draft=draft, **options)
            assert [r.tokens for r in found] == [r.tokens for r in wanted]
            assert draft == "lookup" or sum(r.usage.accepted_tokens for r in found) > 0
    assert compiled.cache.used_pages == 0
