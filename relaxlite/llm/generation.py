"""The generation loop: one batch of requests over an engine, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any, Literal, TypeAlias

import numpy as np

from relaxlite.errors import CacheFullError, InvalidArgumentError
from relaxlite.llm.drafts import Drafter
from relaxlite.llm.engine import Engine
from relaxlite.llm.sampling import Sampler, log_probability
from relaxlite.llm.tokenizer import StopFilter, TextStream, Tokenizer
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"
FinishReason = Literal["stop", "stop_string", "length", "closed"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    `prompt_tokens`, of which `reused_tokens` were cached already; `new_tokens`: generated; `forgotten_tokens`: the
    oldest ones, dropped from a sliding context; `drafted_tokens`: draft tokens, of which `accepted_tokens` took no step
    of their own.
    """

    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    forgotten_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Time to the first token in seconds, and rates in tokens per second of this sequence.

    Rates are 0 if there was nothing to time. The sequences of a batch share the time: the batch's rate is their sum.
    """

    first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Generated text of one prompt, without what ended it.

    finish_reason  "stop": a stop token; "stop_string": one of `stop`; "length": max_new_tokens or the context;
                   "closed": the stream was closed
    logprobs       natural logarithm of the model's probability of each token, before sampling's filters; on request
    logits         float32 [new tokens, vocab] that each token was chosen by; on request
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    speed: Speed
    logprobs: tuple[float, ...] | None = None
    logits: Array | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of a batch: its options and its state.

    `window`: the maximum number of tokens of a sliding context, whose older half is dropped when it is full; None if
    prompt and `limit` fit into the context.
    """

    prompt: Sequence[int]
    limit: int  # of new tokens
    sampler: Sampler
    stop_tokens: frozenset[int]
    stop: Sequence[str]
    wants_logprobs: bool = False
    wants_logits: bool = False
    window: int | None = None
    drafter: Drafter | None = None
    sequence: int = 0  # counted from 1 by engines; 0: none, before it begins and after it has ended
    reused: int = 0  # tokens of the prompt that are cached already

    prefilled_tokens: int = 0  # tokens of the sequence that were prefilled: the prompt, or what was left of a window
    forgotten: int = 0  # tokens dropped from the beginning of prompt and reply
    drafted: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    vocab: int = 0
    finish_reason: FinishReason | None = None
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    def context_tokens(self) -> list[int]:
        """Return all tokens but the forgotten ones."""
        return [*self.prompt, *self.tokens][self.forgotten :]

    def result(self) -> Result:
        """Return the result so far."""
        new, prefilled = len(self.tokens), len(self.prompt) - self.reused
        prefill_s, decode_s = self.first - self.started, self.ended - self.first
        return Result(
            text="".join(self.pieces),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason or "closed",
            usage=Usage(len(self.prompt), self.reused, new, self.forgotten, self.drafted, self.accepted),
            speed=Speed(
                max(prefill_s, 0.0),
                prefilled / prefill_s if prefill_s > 0 else 0.0,
                (new - 1) / decode_s if decode_s > 0 and new > 1 else 0.0,
            ),
            logprobs=tuple(self.logprobs) if self.wants_logprobs else None,
            logits=np.array(self.logits, np.float32).reshape(new, self.vocab) if self.wants_logits else None,
        )


def run(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    begin: Callable[[Request], None],
    release: Callable[[Request, bool], None],
    make_room: Callable[[], bool],
) -> Generator[tuple[int, str], None, None]:
    """Run requests to their ends; yield pieces of text, each with the number of its request.

    Draft tokens of a request are computed along with its last token, and kept as far as they are right.

    `begin(request)` assigns its sequence, which holds `reused` tokens, and its drafter. `release(request, is_sound)`
    takes the sequence back, also if the generator is closed or fails; `is_sound` is False if the engine failed.

    If the cache is full, `make_room` may free some of it; otherwise the last sequence is preempted, and recomputed when
    another one has ended. Raises CacheFullError if a single sequence does not fit.
    """
    names = ["the sequence"] if len(requests) == 1 else [f"sequence {k}" for k in range(len(requests))]
    numbers = {id(r): k for k, r in enumerate(requests)}
    active, waiting = list(requests), list[Request]()
    is_sound, is_full = False, False

    def end(request: Request, is_sound: bool) -> None:
        if request.drafter is not None:
            request.drafter.close()
        release(request, is_sound)

    try:
        for request in requests:
            begin(request)
        writers = {id(r): _Writer(tokenizer, r, name) for r, name in zip(requests, names, strict=True)}
        start = time.perf_counter()
        for request in requests:
            request.started, request.prefilled_tokens = start, len(request.prompt)
        next_tokens = {id(r): list(r.prompt[r.reused :]) for r in requests}  # tokens to append to each sequence
        recomputed: dict[int, int] = {}  # of these, how many were decoded before preemption
        while active:
            for request in active:
                if request.window is not None:
                    next_tokens[id(request)] = _slide(engine, request, request.window, next_tokens[id(request)])
            drafts: list[list[int]] = [[]] * len(active)
            if not is_full:
                drafts = [
                    _propose_draft(engine, r, writers[id(r)].tokens, len(next_tokens[id(r)]), len(active))
                    for r in active
                ]
            try:
                batch_logits = engine.forward(
                    [(r.sequence, next_tokens[id(r)] + draft) for r, draft in zip(active, drafts, strict=True)],
                    wanted=[1 + len(draft) for draft in drafts],
                    exact=[1 + len(draft) + recomputed.get(id(r), 0) for r, draft in zip(active, drafts, strict=True)],
                )
                for request in active:
                    recomputed.pop(id(request), None)
            except CacheFullError:
                if any(drafts):
                    is_full = True
                    continue
                if make_room():
                    is_full = False
                    continue
                if len(active) == 1:
                    raise
                waiting.insert(0, last := active.pop())
                engine.drop(last.sequence, engine.length(last.sequence))
                next_tokens[id(last)] = last.context_tokens()
                recomputed[id(last)] = len(next_tokens[id(last)]) - last.prefilled_tokens
                continue
            for request, logits, draft in zip(active, batch_logits, drafts, strict=True):
                yield from _accept_drafts(engine, request, writers[id(request)], logits, draft, numbers[id(request)])
            finished = [r for r in active if r.finish_reason is not None]
            active = [r for r in active if r.finish_reason is None]
            for request in finished:
                end(request, True)
            is_full = is_full and not finished
            next_tokens |= {id(r): r.tokens[-1:] for r in active}
            if waiting and (finished or not active):
                active.append(waiting.pop(0))
    except GeneratorExit:
        is_sound = True  # closed between two tokens
        raise
    finally:
        now = time.perf_counter()
        for request in requests:
            if request.finish_reason is None:
                request.ended = now
            if request.sequence:
                with suppress(InvalidArgumentError):  # interrupted just after the sequence was removed
                    end(request, is_sound)


def _slide(engine: Engine, request: Request, window: int, new_tokens: list[int]) -> list[int]:
    """Return the tokens to append to a sequence: `new_tokens` or, if these do not fit, the newer half of its window.

    That half is recomputed, as positions start anew with its first token.
    """
    if engine.length(request.sequence) + len(new_tokens) <= window:
        return new_tokens
    kept_count = max(1, window // 2)
    request.forgotten = len(request.prompt) + len(request.tokens) - kept_count
    engine.drop(request.sequence, engine.length(request.sequence))
    request.prefilled_tokens = kept_count
    return request.context_tokens()


def _propose_draft(engine: Engine, request: Request, tokens: list[int], appended: int, sequences: int) -> list[int]:
    """Return draft tokens behind `tokens`, none behind a prompt alone.

    `appended`: how many tokens the step appends before the draft; `sequences`: how many sequences it has.
    """
    if request.drafter is None or not request.tokens:
        return []
    room = request.limit - len(request.tokens) - 1  # the last token is never appended
    if request.window is not None:
        room = min(room, request.window - engine.length(request.sequence) - appended)
    return request.drafter.propose(tokens, room, sequences) if room > 0 else []


def _accept_drafts(
    engine: Engine, request: Request, writer: _Writer, logits: Array, draft: list[int], number: int
) -> Iterator[tuple[int, str]]:
    """Choose tokens by logits [1 + draft tokens, vocab] up to the first that differs from the draft; yield their text.

    Finally, also if the generator is closed early, the rejected draft tokens are dropped from the sequence.
    """
    accepted = 0
    try:
        piece = writer.advance(logits[0])
        if piece:
            yield number, piece
        for token, row in zip(draft, logits[1:], strict=True):
            if request.finish_reason is not None or request.tokens[-1] != token:
                break
            accepted += 1
            piece = writer.advance(row)
            if piece:
                yield number, piece
    finally:
        if draft:
            engine.drop(request.sequence, len(draft) - accepted)
            request.drafted += len(draft)
            request.accepted += accepted
            assert request.drafter is not None
            request.drafter.learn(len(draft), accepted)


class _Writer:
    """Extends one request by a token at a time. `name`: of its sequence, in errors."""

    def __init__(self, tokenizer: Tokenizer, request: Request, name: str) -> None:
        self._request, self._name = request, name
        self.tokens = list(request.prompt)  # prompt and generated tokens
        self._stream = TextStream(tokenizer, request.prompt)
        self._filter = StopFilter(request.stop)

    def advance(self, logits: Array) -> str:
        """Choose the next token by logits [vocab], set the finish reason, and return text to show."""
        r = self._request
        r.vocab = logits.size
        token = r.sampler.choose(logits, self.tokens, name=self._name)
        r.ended = time.perf_counter()
        r.first = r.first or r.ended
        if token in r.stop_tokens:
            r.finish_reason = "stop"
            return self._show(self._filter.push(self._stream.finish()))
        r.tokens.append(token)
        self.tokens.append(token)
        if r.wants_logprobs:
            r.logprobs.append(log_probability(logits, token))
        if r.wants_logits:
            r.logits.append(logits.astype(np.float32))
        text = self._filter.push(self._stream.push(token))
        if len(r.tokens) == r.limit:
            r.finish_reason = "length"
            text += self._filter.push(self._stream.finish())
        return self._show(text)

    def _show(self, text: str) -> str:
        if self._filter.match is not None:
            self._request.finish_reason = "stop_string"
        elif self._request.finish_reason is not None:
            text += self._filter.finish()
        self._request.pieces.append(text)
        return text


class Stream:
    """An iterator of pieces of text: strings, or (number of the prompt, string) for a list of prompts.

    `close()` ends generation; `results()` runs it to the end and returns one Result per prompt.
    """

    def __init__(
        self, events: Generator[tuple[int, str], None, None], requests: Sequence[Request], is_list: bool
    ) -> None:
        self._events, self._requests, self._is_list = events, requests, is_list

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number, piece = next(self._events)
        return (number, piece) if self._is_list else piece

    def close(self) -> None:
        """End generation."""
        self._events.close()

    def results(self) -> list[Result]:
        """Run generation to the end and return one Result per prompt."""
        for _ in self._events:
            pass
        return [request.result() for request in self._requests]

    def result(self) -> Result:
        """Run generation to the end and return the Result of the only prompt."""
        return self.results()[0]
