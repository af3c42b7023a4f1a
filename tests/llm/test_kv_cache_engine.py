"""The compiled engine over paged caches against one that computes every sequence from its beginning."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import relaxlite as rl
from relaxlite import driver
from relaxlite.errors import CacheFullError, InvalidArgumentError
from relaxlite.frontend.llm.config import Rope
from relaxlite.frontend.llm.step import MAX_PARTS, build_step
from relaxlite.llm.compiled_engine import CompiledEngine
from relaxlite.runtime import kv_cache, state_slots, threadpool
from relaxlite.runtime.kv_cache import CacheLayout, KVCache, PoolLayout
from relaxlite.runtime.module import Executable
from tests.support import tiers
from tests.support.dense_llm import build_dense
from tests.support.llm_models import ARCHITECTURES, CONTEXT, VOCAB, attention_layout, small_checkpoint
from tests.support.recomputing_engine import RecomputingEngine

PAGE = 4
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "int8": 6e-2}  # of the largest logit


@cache
def dense(architecture: str) -> Executable:
    return rl.compile(build_dense(small_checkpoint(architecture)))


@cache
def step(architecture: str, dtype: str = "float32") -> Executable:
    """The one compilation of an architecture and kind of cache, which serves all tests."""
    return rl.compile(build_step(small_checkpoint(architecture), page=PAGE, cache_dtype=dtype, step_tokens=32))


def engines(architecture: str, dtype: str = "float32", **options: Any) -> tuple[CompiledEngine, RecomputingEngine]:
    return CompiledEngine(step(architecture, dtype), **options), RecomputingEngine(dense(architecture), VOCAB, CONTEXT)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, count)).integers(0, VOCAB, count).tolist()


def close(found: np.ndarray, wanted: np.ndarray, dtype: str = "float32") -> None:
    assert found.shape == wanted.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def test_one_compilation_serves_every_batch_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_step(small_checkpoint("qwen3"), page=PAGE, step_tokens=32)
    oracle = RecomputingEngine(dense("qwen3"), VOCAB, CONTEXT)
    compilations: list[int] = []
    make_code = driver.compile_programs

    def counted(programs: Any, *args: Any, **options: Any) -> Any:
        compilations.append(len(programs))
        return make_code(programs, *args, **options)

    monkeypatch.setattr(driver, "compile_programs", counted)
    exe = rl.compile(module)
    whole = oracle.forward([(oracle.new(), tokens(CONTEXT))], wanted=[CONTEXT])[0]
    for length in (*range(1, 20), 31, 32, 33, 63, 64, 65, CONTEXT):
        prompt = tokens(CONTEXT)[:length]
        for chunk in (32, 5, 1):  # at once as far as a step goes, in chunks, token by token
            engine = CompiledEngine(exe, chunk=chunk)
            close(engine.forward([(engine.new(), prompt)], wanted=[len(prompt)])[0], whole[:length])
    engine = CompiledEngine(exe)
    prompts = [tokens(n, seed=n) for n in (1, 17, 40, 8, 3, 30, 5, 90)]
    for batch in range(1, 9):
        found = engine.forward([(engine.new(), prompt) for prompt in prompts[:batch]])
        for logits, prompt in zip(found, prompts, strict=False):
            close(logits, engine.forward([(engine.new(), prompt)])[0])
    first, fork = engine.new(), oracle.new()
    engine.forward([(first, tokens(50))])
    oracle.forward([(fork, tokens(50)[:21])])
    ours = engine.fork(first, 30)
    engine.drop(ours, 9)
    close(engine.forward([(ours, [7, 8, 9])])[0], oracle.forward([(fork, [7, 8, 9])])[0])
    assert len(compilations) == 1 and compilations[0] > 5


# Others are covered by these, by tests of files, and by those of the ops.
BY_DEFAULT = ("llama", "qwen3", "gemma3", "gpt2", "qwen3_5")


@pytest.mark.parametrize("architecture", tiers.only(BY_DEFAULT, ARCHITECTURES))
def test_whole_prefill_is_chunked_prefill_is_token_by_token(architecture: str) -> None:
    prompt = tokens(31)
    _, oracle = engines(architecture)
    wanted = oracle.forward([(oracle.new(), prompt)], wanted=[len(prompt)])[0]
    for chunk in (32, 7, 1):
        engine, _ = engines(architecture, chunk=chunk)
        sequence = engine.new()
        close(engine.forward([(sequence, prompt)], wanted=[len(prompt)])[0], wanted)
        assert engine.length(sequence) == len(prompt)
        close(engine.forward([(engine.new(), prompt)])[0], wanted[-1:])
    engine, _ = engines(architecture)
    sequence, at = engine.new(), 0
    for count in (1, 1, 5, 13, 2, 9):  # single tokens, and several at once as when a draft is verified
        close(engine.forward([(sequence, prompt[at : at + count])], wanted=[count])[0], wanted[at : at + count])
        at += count
    assert at == len(prompt)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_prompts_longer_than_a_step(architecture: str) -> None:
    engine, oracle = engines(architecture)
    prompt = tokens(CONTEXT)
    wanted = oracle.forward([(oracle.new(), prompt)], wanted=[len(prompt)])[0]
    close(engine.forward([(engine.new(), prompt)], wanted=[len(prompt)])[0], wanted)


@pytest.mark.parametrize("architecture", tiers.only(BY_DEFAULT, ARCHITECTURES))
def test_a_ragged_batch_is_one_by_one(architecture: str) -> None:
    engine, oracle = engines(architecture)
    prompts = [tokens(n, seed=n) for n in (1, 17, 4, 8, 3, 30, 5, 12)]
    ours, theirs = ([e.new() for _ in prompts] for e in (engine, oracle))
    for more in (prompts, [[3]] * 8, [[5, 6], [1], [2, 4, 8], [9], [7], [1, 2], [3], [0]]):
        found = engine.forward(list(zip(ours, more, strict=True)))
        wanted = oracle.forward(list(zip(theirs, more, strict=True)))
        for a, b in zip(found, wanted, strict=True):
            close(a, b)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "lfm2", "qwen3_5", "gemma4", "deepseek_v2"])
def test_forks_and_drops_are_recomputation(architecture: str, dtype: str) -> None:
    engine, oracle = engines(architecture, dtype)
    ours, theirs = engine.new(), oracle.new()
    for e, s in ((engine, ours), (oracle, theirs)):
        e.forward([(s, tokens(18))])
    for length in (18, 16, 6, 0, None):
        a, b = engine.fork(ours, length), oracle.fork(theirs, length)
        assert engine.length(a) == oracle.length(b)
        close(engine.forward([(a, [7, 8, 9])])[0], oracle.forward([(b, [7, 8, 9])])[0], dtype)
    close(engine.forward([(ours, [1, 2])])[0], oracle.forward([(theirs, [1, 2])])[0], dtype)
    for count in (1, 0, 6, 13):
        engine.drop(ours, count)
        oracle.drop(theirs, count)
        close(engine.forward([(ours, [11])])[0], oracle.forward([(theirs, [11])])[0], dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "lfm2", "qwen3_5", "deepseek_v2"])
def test_narrow_caches_are_close(architecture: str, dtype: str) -> None:
    engine, oracle = engines(architecture, dtype)
    prompt = tokens(40)
    found = engine.forward([(engine.new(), prompt)], wanted=[len(prompt)])[0]
    wanted = oracle.forward([(oracle.new(), prompt)], wanted=[len(prompt)])[0]
    close(found, wanted, dtype)
    assert engine.cache.layout.dtype == dtype
    assert np.abs(found - wanted).max() > 1e-6 * np.abs(wanted).max()  # it is not float32 after all


def test_keys_with_an_element_that_is_much_larger_than_others_are_close_in_8_bits() -> None:
    """As Gemma 3 has some: the largest element decides what the others are rounded to."""
    checkpoint = small_checkpoint("llama", head_width=64, rope=Rope(1e4, 64))
    for name, weight in checkpoint.weights.items():
        if name.endswith((".q", ".k")):
            weight.data[::64] *= 0.03 if name.endswith(".q") else 30
    engine = CompiledEngine(rl.compile(build_step(checkpoint, page=PAGE, step_tokens=32, cache_dtype="int8")))
    wide = CompiledEngine(rl.compile(build_step(checkpoint, page=PAGE, step_tokens=32)))
    prompt = tokens(30)
    found, wanted = (e.forward([(e.new(), prompt)], wanted=[len(prompt)])[0] for e in (engine, wide))
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()  # 0.06; 0.2 where they are rounded as they are


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_long_contexts_are_shared_out_among_threads(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MIN_PART_PAGES", 1)
    monkeypatch.setattr(threadpool, "num_threads", lambda: 7)
    engine, oracle = engines(architecture)
    ours, theirs = engine.new(), oracle.new()
    for count in (30, 1, 3, 1, 2, 40, 1):
        given = tokens(count)
        close(engine.forward([(ours, given)])[0], oracle.forward([(theirs, given)])[0])
    engine.cache.reserve([(ours, 1)])
    parts = engine.cache.describe([(ours, 0, 1)]).blocks[:, 4:]
    assert parts.tolist() == [[k, 7] for k in range(7)]
    engine.cache.cancel([(ours, 1)])


def test_parts_of_many_long_contexts_are_no_more_than_a_step_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MIN_PART_PAGES", 1)
    monkeypatch.setattr(threadpool, "num_threads", lambda: 251)
    cache = kv_cache.KVCache(attention_layout(1, 1, 4, page=1, block=4), max_bytes=1 << 30)
    batch = [(cache.new(), 300) for _ in range(20)]
    cache.reserve(batch)
    cache.commit(batch)
    step = [(sequence, 0, 33 if k % 2 else 1) for k, (sequence, _) in enumerate(batch)]
    cache.reserve([(sequence, count) for sequence, _, count in step])
    blocks = cache.describe(step).blocks
    assert len(blocks) <= sum(count for *_, count in step) + MAX_PARTS
    assert len(blocks) > 500, "contexts are parted"
    cache.cancel([(sequence, count) for sequence, _, count in step])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_one_more_token_is_described_as_any_step(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadpool, "num_threads", lambda: threads)
    cache = KVCache(attention_layout(1, 3, 4, page=PAGE, block=4), max_bytes=1 << 20)
    other, sequence = cache.new(), cache.new()
    taken = 0
    for length in range(100):
        for one in (other, sequence):
            step = cache.decode_step(one, 7)
            assert (step is None) == (length % PAGE == 0), "one that takes a page goes the usual way"
            cache.reserve([(one, 1)])
            if step is not None:
                found = [x.copy() for x in (step.tokens, step.wanted, *step.inputs)]
                for x, wanted in zip(found, ([7], [0], *cache.describe([(one, 0, 1)])), strict=True):
                    np.testing.assert_array_equal(x, wanted, strict=isinstance(wanted, np.ndarray))
                taken += 1
            cache.commit([(one, 1)])
    assert taken == 150
    shared = cache.fork(sequence, 99)
    assert cache.decode_step(shared, 7) is None and cache.decode_step(sequence, 7) is None, (
        "99 tokens end within a page"
    )
    cache.remove(shared)
    assert cache.decode_step(shared, 7) is None, "there is no such sequence"
    cache.drop(sequence, 1)
    assert cache.decode_step(sequence, 7) is not None, "its page is its own again"


@pytest.mark.parametrize(
    ("given", "wanted", "message"),
    [
        ([VOCAB], None, f"token {VOCAB} is not in the vocabulary"),
        ([-1], [1], "token -1 is not in the vocabulary"),
        ([1.5], None, "token 1.5 is not in the vocabulary"),
        ([3], [1, 1], "a batch of 1 sequences, and the logits wanted of 2"),
        ([3], [], "a batch of 1 sequences, and the logits wanted of 0"),
        ([3], [2], "is given 1 tokens, and the logits of 2 are wanted"),
    ],
)
def test_one_more_token_is_checked_as_any_step(given: list[Any], wanted: list[int] | None, message: str) -> None:
    engine, _ = engines("llama")
    sequence = engine.new()
    engine.forward([(sequence, tokens(6))])
    with pytest.raises(InvalidArgumentError, match=message):
        engine.forward([(sequence, given)], wanted=wanted)
    full = engine.new()
    engine.forward([(full, tokens(CONTEXT))])
    with pytest.raises(InvalidArgumentError, match=f"has {CONTEXT} tokens and is given 1 more"):
        engine.forward([(full, [3])])
    assert (engine.length(sequence), engine.length(full)) == (6, CONTEXT)


def test_one_more_token_of_any_kind_of_number() -> None:
    engine, _ = engines("llama")
    sequence = engine.new()
    engine.forward([(sequence, tokens(6))])
    found = []
    for token in (3, np.int32(3)):
        found.append(engine.forward([(sequence, [token])], wanted=[1])[0])
        engine.drop(sequence, 1)
    assert found[0].shape == (1, VOCAB)
    np.testing.assert_array_equal(*found)


def test_signs_of_rotated_keys_are_held_once() -> None:
    checkpoint = small_checkpoint("llama", head_width=64, rope=Rope(1e4, 64))
    data = rl.compile(build_step(checkpoint, page=PAGE, step_tokens=32, cache_dtype="int8")).data
    wide = rl.compile(build_step(checkpoint, page=PAGE, step_tokens=32)).data
    more = sum(array.nbytes for array in data.constants) - sum(array.nbytes for array in wide.constants)
    assert 64 * 4 <= more < 2 * 64 * 4 and checkpoint.config.layers > 1


def test_what_forks_share_is_stored_once() -> None:
    engine, _ = engines("llama")
    sequence = engine.new()
    engine.forward([(sequence, tokens(10))])
    assert engine.cache.used_pages == 3
    forks = [engine.fork(sequence) for _ in range(3)]
    assert engine.cache.used_pages == 3
    engine.forward([(s, [1]) for s in forks])
    assert engine.cache.used_pages == 3 + 3  # each has the last page of its own now
    for s in (*forks, sequence):
        engine.remove(s)
    assert engine.cache.used_pages == 0


def test_new_pages_hold_no_numbers_that_are_slow_to_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def of_freed_memory(*args: Any, **options: Any) -> Any:
        made = empty(*args, **options)
        made.reshape(-1).view(np.uint8)[:] = 1
        return made

    engine, _ = engines("llama")
    with monkeypatch.context() as patched:
        patched.setattr(np, "empty", of_freed_memory)
        engine.forward([(engine.new(), tokens(PAGE + 1))])
    for pool in engine.cache.pools:
        assert np.all((pool == 0) | (np.abs(pool) >= np.finfo(np.float32).tiny))


def test_a_full_cache_refuses_and_the_others_go_on() -> None:
    engine, oracle = engines("llama", max_bytes=6 * CompiledEngine(step("llama")).cache.layout.page_bytes)
    a, b = engine.new(), engine.new()
    twin = oracle.new()
    engine.forward([(a, tokens(9)), (b, tokens(8))])
    oracle.forward([(twin, tokens(9))])
    with pytest.raises(CacheFullError, match="the cache is full: 2 more pages of 4 tokens are needed, 1 of 6 are free"):
        engine.forward([(b, tokens(8))])
    fork = engine.fork(a)
    with pytest.raises(CacheFullError, match="remove sequences, or give it more than"):
        engine.forward([(fork, [1]), (b, [1])])  # a copy of the page that a and its fork share, and a page for b
    assert [engine.length(s) for s in (a, b, fork)] == [9, 8, 9]
    assert engine.cache.used_pages == 5
    close(engine.forward([(a, [4])])[0], oracle.forward([(twin, [4])])[0])
    engine.remove(b)
    engine.remove(fork)
    close(engine.forward([(a, tokens(10))])[0], oracle.forward([(twin, tokens(10))])[0])


def interrupted(call: Callable[[], Any], line: int) -> bool:
    """Whether the call reaches so many lines of the cache, before which a KeyboardInterrupt then comes."""
    lines = itertools.count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in (kv_cache.__file__, state_slots.__file__):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("what", ["reserve", "fork", "drop", "remove"])
def test_an_interruption_loses_no_page_and_shares_none_that_is_written(what: str) -> None:
    for line in itertools.count():
        layout = attention_layout(1, 1, 2, 4, "float32", 4)
        cache = KVCache(layout, max_bytes=12 * layout.page_bytes)
        first = cache.new()
        for count in (6, 11):
            cache.reserve([(first, count)])
            cache.commit([(first, count)])
        others = [cache.fork(first), cache.fork(first, 9)]
        step = [(first, 5), (others[1], 3), (others[0], 1)]
        calls = {
            "reserve": lambda c=cache, s=step: c.reserve(s),
            "fork": lambda c=cache, s=first: c.fork(s, 7),
            "drop": lambda c=cache, s=others[1]: c.drop(s, 6),
            "remove": lambda c=cache, s=first: c.remove(s),
        }
        came = interrupted(calls[what], line)
        if what == "reserve":
            cache.cancel(step)
        held = Counter(page for sequence in cache._sequences.values() for page in sequence.pages)
        for sequence in cache._sequences.values():
            assert sequence.table[: len(sequence.pages)].tolist() == sequence.pages, line
        assert all(cache._references[page] >= count for page, count in held.items()), line
        assert not held.keys() & set(cache._free), line
        for sequence in list(cache._sequences):
            cache.remove(sequence)
        whole = cache.new()
        cache.reserve([(whole, 12 * 4)])
        assert sorted(cache._sequences[whole].pages) == list(range(12)), line
        if not came:
            break
    assert line > 5


@pytest.mark.parametrize("what", ["reserve", "commit", "cancel", "fork", "drop", "remove"])
def test_an_interruption_leaves_states_that_stand_for_the_tokens_there_are(what: str) -> None:
    """Whatever comes then: no slot that somebody reads is written, and none is lost."""
    for line in itertools.count():
        paged = attention_layout(1, 1, 2, 4, "float32", 4)
        layout = CacheLayout((*paged.pools, PoolLayout(2, (3, 5), "float32", is_state=True)), 1, 4, "float32", 4)
        cache = KVCache(layout, max_bytes=12 * layout.page_bytes + 9 * layout.state_bytes)
        first = cache.new()
        for count in (18, 1, 1):
            cache.reserve([(first, count)])
            cache.commit([(first, count)])
        others = [cache.fork(first), cache.fork(first, 19)]
        step = [(first, 5), (others[1], 3), (others[0], 1)]
        if what in ("commit", "cancel"):
            cache.reserve(step)
        calls = {
            "reserve": lambda c=cache, s=step: c.reserve(s),
            "commit": lambda c=cache, s=step: c.commit(s),
            "cancel": lambda c=cache, s=step: c.cancel(s),
            "fork": lambda c=cache, s=first: c.fork(s, 18),
            "drop": lambda c=cache, s=first: c.drop(s, 2),
            "remove": lambda c=cache, s=first: c.remove(s),
        }
        came = interrupted(calls[what], line)
        if what == "reserve":
            cache.cancel(step)
        states = cache._states
        assert states is not None
        for sequence in list(cache._sequences):
            assert cache.length(sequence) == states.length(sequence), line
            assert len(cache._sequences[sequence].pages) >= -(-cache.length(sequence) // 4), line
            before = [state.slot for kept in states._sequences.values() for state in kept.states]
            cache.reserve([(sequence, 1)])
            (_, _, read, written) = cache.describe([(sequence, 0, 1)])[4][0].tolist()
            assert written not in {read, *(s for s in before if before.count(s) > 1)}, line
            cache.commit([(sequence, 1)])
        for sequence in list(cache._sequences):
            cache.remove(sequence)
        states.recount_references()
        assert sorted(states._free) == list(range(states.count)), line
        if not came:
            break
    assert line > 3


def test_guesses_that_are_dropped_cost_no_more_than_their_step() -> None:
    engine, oracle = engines("qwen3_5")
    ours, theirs = engine.new(), oracle.new()
    for given in (tokens(20), [1], [2, 3, 4, 5]):  # a prompt, a token, and one with three guesses
        close(engine.forward([(ours, given)])[0], oracle.forward([(theirs, given)])[0])
    engine.drop(ours, 2)
    oracle.drop(theirs, 2)
    assert (engine.length(ours), engine.cache.length(ours)) == (23, 21)  # the two that stay are computed again
    close(engine.forward([(ours, [7])])[0], oracle.forward([(theirs, [7])])[0])
    for given in ([8], [9]):
        close(engine.forward([(ours, given)])[0], oracle.forward([(theirs, given)])[0])
    engine.drop(ours, 4)  # another reply: back to the end of the prompt
    oracle.drop(theirs, 4)
    assert (engine.length(ours), engine.cache.length(ours)) == (22, 20)
    close(engine.forward([(ours, [7])])[0], oracle.forward([(theirs, [7])])[0])


def test_states_that_find_no_room_are_refused_and_the_others_go_on() -> None:
    layout = CompiledEngine(step("qwen3_5")).cache.layout
    engine, oracle = engines("qwen3_5", max_bytes=20 * layout.page_bytes + 3 * layout.state_bytes)
    ours, theirs, others = engine.new(), oracle.new(), [engine.new() for _ in range(9)]
    engine.forward([(ours, tokens(6))])
    oracle.forward([(theirs, tokens(6))])
    held = []
    with pytest.raises(CacheFullError, match=r"the cache is full: there is no room for more than \d+ states"):
        for other in others:
            engine.forward([(other, [1])])
            held.append(other)
    assert [engine.length(s) for s in (ours, *others)] == [6, *([1] * len(held)), *([0] * (9 - len(held)))]
    for other in held:
        engine.remove(other)
    for _ in range(3):
        close(engine.forward([(ours, [5])])[0], oracle.forward([(theirs, [5])])[0])
    with pytest.raises(InvalidArgumentError, match="does not hold one page of 4 tokens and 3 states, which takes"):
        engines("qwen3_5", max_bytes=layout.page_bytes + layout.state_bytes)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_step_that_fails_leaves_all_as_it_was(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, oracle = engines(architecture, chunk=4)
    ours, theirs = engine.new(), oracle.new()
    engine.forward([(ours, tokens(6))])
    oracle.forward([(theirs, tokens(6))])
    run, calls = engine._run, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(engine, "_run", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.forward([(ours, tokens(12))])
    assert engine.length(ours) == 6 and engine.cache.used_pages == 2
    close(engine.forward([(ours, [5])])[0], oracle.forward([(theirs, [5])])[0])


def test_errors_name_what_is_wrong() -> None:
    engine, _ = engines("llama")
    sequence = engine.new()
    engine.forward([(sequence, tokens(10))])
    with pytest.raises(InvalidArgumentError, match="has 10 tokens and is given 87 more; the model's context holds 96"):
        engine.forward([(sequence, tokens(87))])
    with pytest.raises(InvalidArgumentError, match="token 61 is not in the vocabulary of 61"):
        engine.forward([(sequence, [61])])
    with pytest.raises(InvalidArgumentError, match="there is no sequence 99"):
        engine.forward([(99, [1])])
    with pytest.raises(InvalidArgumentError, match="has 10 tokens, not 11 to fork"):
        engine.fork(sequence, 11)
    with pytest.raises(InvalidArgumentError, match="has 10 tokens, not 11 to drop"):
        engine.drop(sequence, 11)
    remembering, _ = engines("qwen3_5")
    other = remembering.new()
    remembering.forward([(other, tokens(10))])
    for call in (lambda: remembering.fork(other, 11), lambda: remembering.drop(other, 11)):
        with pytest.raises(InvalidArgumentError, match=r"has 10 tokens, not 11 to (fork|drop)"):
            call()
    with pytest.raises(InvalidArgumentError, match="there is no sequence 99"):
        remembering.forward([(99, [1])])
    with pytest.raises(InvalidArgumentError, match="a step takes 1 to 32 tokens, not chunks of 33"):
        engines("llama", chunk=33)
    with pytest.raises(InvalidArgumentError, match="does not hold one page of 4 tokens, which takes 1024"):
        engines("llama", max_bytes=1000)
    with pytest.raises(InvalidArgumentError, match="not one step of a decoder with a paged cache"):
        CompiledEngine(dense("llama"))
    with pytest.raises(InvalidArgumentError, match="a cache holds float32, float16, int8, not 'int4'"):
        build_step(small_checkpoint("llama"), cache_dtype="int4")
    assert engine.length(sequence) == 10


@pytest.mark.exhaustive
def test_every_pass_keeps_what_a_step_computes() -> None:
    for dtype in ("float32", "float16"):
        engine = CompiledEngine(step("mistral", dtype))
        a, b = engine.new(), engine.new()
        engine.forward([(a, tokens(9)), (b, tokens(3))])
        engine.cache.reserve([(a, 2), (b, 3)])
        inputs = [np.arange(5), *engine.cache.describe([(a, 0, 2), (b, 0, 3)]), np.array([1, 4])]
        # what was never written may be anything, which random nudges of the oracle would make overflow
        pools = [np.clip(np.nan_to_num(pool), -9, 9) for pool in engine.cache.pools]
        module = build_step(small_checkpoint("mistral"), page=PAGE, cache_dtype=dtype, step_tokens=32)
        assert rl.compile(module, validate=[(*inputs, *pools)])(*inputs, *pools).shape == (2, VOCAB)


def test_an_engine_runs_from_a_saved_model(tmp_path: Any) -> None:
    step("gemma3").save(tmp_path / "model.rlx")
    engine = CompiledEngine(rl.load(tmp_path / "model.rlx"))
    _, oracle = engines("gemma3")
    close(engine.forward([(engine.new(), tokens(20))])[0], oracle.forward([(oracle.new(), tokens(20))])[0])


class Sequences(RuleBasedStateMachine):
    """Any order of operations; pages are neither lost nor used twice."""

    sequences = st.integers(0, 10**6)
    architecture = "mistral"

    def __init__(self) -> None:
        super().__init__()
        layout = engines(self.architecture)[0].cache.layout
        room = 24 * layout.page_bytes + 12 * layout.state_bytes
        self.ours, self.theirs = engines(self.architecture, max_bytes=room)
        self.pairs: list[tuple[int, int]] = []

    def pick(self, number: int) -> tuple[int, int]:
        return self.pairs[number % len(self.pairs)]

    @precondition(lambda self: len(self.pairs) < 6)
    @rule()
    def new(self) -> None:
        self.pairs.append((self.ours.new(), self.theirs.new()))

    @precondition(lambda self: self.pairs)
    @rule(
        number=sequences, counts=st.lists(st.integers(1, 14), min_size=1, max_size=4), last=st.sampled_from([1, 3, 14])
    )
    def forward(self, number: int, counts: list[int], last: int) -> None:
        chosen = dict.fromkeys(self.pick(number + k) for k in range(len(counts)))
        given = [tokens(count, seed=number) for count in counts]
        room = CONTEXT - max(self.ours.length(a) for a, _ in chosen)
        if max(counts) > room:
            return
        before = [self.ours.length(a) for a, _ in self.pairs]
        wanted_rows = [min(last, len(t)) for t, _ in zip(given, chosen, strict=False)]
        try:
            found = self.ours.forward([(a, t) for (a, _), t in zip(chosen, given, strict=False)], wanted=wanted_rows)
        except CacheFullError:
            assert [self.ours.length(a) for a, _ in self.pairs] == before
            return
        wanted = self.theirs.forward([(b, t) for (_, b), t in zip(chosen, given, strict=False)], wanted=wanted_rows)
        for a, b in zip(found, wanted, strict=True):
            self.compare(a, b)

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        close(found, wanted)

    @precondition(lambda self: 0 < len(self.pairs) < 6)
    @rule(number=sequences, share=st.floats(0, 1))
    def fork(self, number: int, share: float) -> None:
        a, b = self.pick(number)
        length = int(share * self.ours.length(a))
        self.pairs.append((self.ours.fork(a, length), self.theirs.fork(b, length)))

    @precondition(lambda self: self.pairs)
    @rule(number=sequences, share=st.floats(0, 1))
    def drop(self, number: int, share: float) -> None:
        a, b = self.pick(number)
        count = int(share * self.ours.length(a))
        self.ours.drop(a, count)
        self.theirs.drop(b, count)

    @precondition(lambda self: self.pairs)
    @rule(number=sequences)
    def remove(self, number: int) -> None:
        a, b = self.pairs.pop(number % len(self.pairs))
        self.ours.remove(a)
        self.theirs.remove(b)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        cache_ = self.ours.cache
        held: dict[int, int] = {}
        for sequence in cache_._sequences.values():
            assert len(sequence.pages) == -(-sequence.length // PAGE)
            assert sequence.table[: len(sequence.pages)].tolist() == sequence.pages
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        assert {k: n for k, n in enumerate(cache_._references) if n} == held
        assert sorted([*cache_._free, *held]) == list(range(len(cache_._references)))
        assert [self.ours.length(a) for a, _ in self.pairs] == [self.theirs.length(b) for _, b in self.pairs]


class SequencesWithStates(Sequences):
    """The same of a model with states, which cannot be cut back: slots are not lost, nor shared by what is written.

    Small queries and keys are made as long as others, and so is what rounded them: once in 600 sequences logits are
    1e-4 from those of another program. So whole sequences go through the same one; that gives the same bits.
    """

    architecture = "qwen3_5"

    def __init__(self) -> None:
        super().__init__()
        whole = CompiledEngine(step(self.architecture))

        def logits(given: np.ndarray) -> np.ndarray:
            sequence = whole.new()
            (found,) = whole.forward([(sequence, given[0].tolist())], wanted=[given.shape[1]])
            whole.remove(sequence)
            return found[None]

        self.theirs = RecomputingEngine(logits, VOCAB, CONTEXT)

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        np.testing.assert_array_equal(found, wanted)

    @invariant()
    def slots_are_accounted_for(self) -> None:
        states = self.ours.cache._states
        assert states is not None
        held = Counter(state.slot for kept in states._sequences.values() for state in kept.states)
        held.update(kept.next for kept in states._sequences.values() if kept.next is not None)
        assert {k: n for k, n in enumerate(states._references) if n} == held
        assert sorted([*states._free, *held]) == list(range(states.count))
        for kept in states._sequences.values():
            lengths = [state.length for state in kept.states]
            assert lengths == sorted(set(lengths)) and len(lengths) <= 3
            assert kept.next is None or held[kept.next] == 1


TestSequences, TestSequencesWithStates = Sequences.TestCase, SequencesWithStates.TestCase
TestSequences.settings = TestSequencesWithStates.settings = settings(
    max_examples=tiers.examples(25), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
