"""The loop that makes text: one batch of requests over an engine, token by token."""

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
    """Tokens: of the prompt, how many of these were in the cache already, and new ones; how many of the oldest left a
    context that slides; and how many were guessed, and guessed right, so that they took no step of their own."""

    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    forgotten_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds until the first token was chosen; tokens per second of this sequence, 0 where there were none to time.
    In a batch, sequences share the time: the batch makes that many more."""

    first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What was generated for one prompt, without what ended it.

    finish_reason  "stop": the model ended it; "stop_string": one of `stop` came; "length": max_new_tokens or the
                   context; "closed": the stream was closed before
    logprobs       natural logarithm of the model's probability of each token, before sampling's filters; if asked for
    logits         float32 [new tokens, vocab] that each token was chosen by; if asked for
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
    """One sequence of a batch: what it is to become, and what it has become so far.

    `window`: the tokens that the sequence holds at most; where it is full, the older half of them is forgotten. None:
    prompt and `limit` fit.
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
    sequence: int = 0  # which engines count from 1; 0: it has none, before it begins and when it has ended
    reused: int = 0  # tokens of the prompt that the sequence has already

    begun: int = 0  # tokens of the sequence that were given at once: the prompt, or what was left where it slid
    forgotten: int = 0  # of the first tokens, prompt and new ones, which the sequence has no more
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

    def remembered(self) -> list[int]:
        """All tokens but the forgotten ones."""
        return [*self.prompt, *self.tokens][self.forgotten :]

    def result(self) -> Result:
        new, prefilled = len(self.tokens), len(self.prompt) - self.reused
        waited, decoding = self.first - self.started, self.ended - self.first
        return Result(
            text="".join(self.pieces),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason or "closed",
            usage=Usage(len(self.prompt), self.reused, new, self.forgotten, self.drafted, self.accepted),
            speed=Speed(
                max(waited, 0.0),
                prefilled / waited if waited > 0 else 0.0,
                (new - 1) / decoding if decoding > 0 and new > 1 else 0.0,
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
    """Run requests to their ends; yields pieces of text, each with the number of its request.

    What a request's drafter guesses is computed along with its last token, and stays as far as it is right.

    `begin(request)` gives each its sequence, which holds `reused` tokens at first, and its drafter;
    `release(request, is_sound)` takes the sequence back, also when the generator is closed early or fails; unsound is
    one at which the engine failed.

    Where the cache is full, `make_room` may free some of it; else the last sequence is taken out, and computed again
    when another has ended. CacheFullError: not even one fits.
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
            request.started, request.begun = start, len(request.prompt)
        fed = {id(r): list(r.prompt[r.reused :]) for r in requests}  # what comes next into each sequence
        again: dict[int, int] = {}  # of these, how many of the last were computed one by one before
        while active:
            for request in active:
                if request.window is not None:
                    fed[id(request)] = _slide(engine, request, request.window, fed[id(request)])
            guesses: list[list[int]] = [[]] * len(active)
            if not is_full:
                guesses = [_guess(engine, r, writers[id(r)].tokens, len(fed[id(r)]), len(active)) for r in active]
            try:
                found = engine.forward(
                    [(r.sequence, fed[id(r)] + guess) for r, guess in zip(active, guesses, strict=True)],
                    wanted=[1 + len(guess) for guess in guesses],
                    exact=[1 + len(guess) + again.get(id(r), 0) for r, guess in zip(active, guesses, strict=True)],
                )
                for request in active:
                    again.pop(id(request), None)
            except CacheFullError:
                if any(guesses):
                    is_full = True
                    continue
                if make_room():
                    is_full = False
                    continue
                if len(active) == 1:
                    raise
                waiting.insert(0, last := active.pop())
                engine.drop(last.sequence, engine.length(last.sequence))
                fed[id(last)] = last.remembered()
                again[id(last)] = len(fed[id(last)]) - last.begun
                continue
            for request, logits, guess in zip(active, found, guesses, strict=True):
                yield from _told(engine, request, writers[id(request)], logits, guess, numbers[id(request)])
            finished = [r for r in active if r.finish_reason is not None]
            active = [r for r in active if r.finish_reason is None]
            for request in finished:
                end(request, True)
            is_full = is_full and not finished
            fed |= {id(r): r.tokens[-1:] for r in active}
            if waiting and (finished or not active):
                active.append(waiting.pop(0))
    except GeneratorExit:
        is_sound = True  # between two tokens
        raise
    finally:
        now = time.perf_counter()
        for request in requests:
            if request.finish_reason is None:
                request.ended = now
            if request.sequence:
                with suppress(InvalidArgumentError):  # an interruption came when it had just been removed
                    end(request, is_sound)


def _slide(engine: Engine, request: Request, window: int, given: list[int]) -> list[int]:
    """What comes next into a sequence: the tokens given or, where they do not fit, the newer half of the window, which
    is computed again, as its first token has the first position now."""
    if engine.length(request.sequence) + len(given) <= window:
        return given
    kept = max(1, window // 2)
    request.forgotten = len(request.prompt) + len(request.tokens) - kept
    engine.drop(request.sequence, engine.length(request.sequence))
    request.begun = kept
    return request.remembered()


def _guess(engine: Engine, request: Request, tokens: list[int], given: int, sequences: int) -> list[int]:
    """What may follow all tokens, of which the last ones are given next; nothing behind a prompt alone."""
    if request.drafter is None or not request.tokens:
        return []
    room = request.limit - len(request.tokens) - 1  # the last token is not computed with
    if request.window is not None:
        room = min(room, request.window - engine.length(request.sequence) - given)
    return request.drafter.propose(tokens, room, sequences) if room > 0 else []


def _told(
    engine: Engine, request: Request, writer: _Writer, logits: Array, guess: list[int], number: int
) -> Iterator[tuple[int, str]]:
    """Choose the next tokens by logits [1 + guesses, vocab], up to the first that was not guessed; what may be shown
    with each. Then, or where nobody asks for more, the sequence keeps the guesses that were right."""
    right = 0
    try:
        piece = writer.advance(logits[0])
        if piece:
            yield number, piece
        for token, row in zip(guess, logits[1:], strict=True):
            if request.finish_reason is not None or request.tokens[-1] != token:
                break
            right += 1
            piece = writer.advance(row)
            if piece:
                yield number, piece
    finally:
        if guess:
            engine.drop(request.sequence, len(guess) - right)
            request.drafted += len(guess)
            request.accepted += right
            assert request.drafter is not None
            request.drafter.learn(len(guess), right)


class _Writer:
    """Extends one request by a token at a time. `name`: of its sequence, in errors."""

    def __init__(self, tokenizer: Tokenizer, request: Request, name: str) -> None:
        self._request, self._name = request, name
        self.tokens = list(request.prompt)  # and the new ones
        self._stream = TextStream(tokenizer, request.prompt)
        self._filter = StopFilter(request.stop)

    def advance(self, logits: Array) -> str:
        """Choose the next token by logits [vocab]; what may be shown. Sets the finish reason."""
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
        if self._filter.found is not None:
            self._request.finish_reason = "stop_string"
        elif self._request.finish_reason is not None:
            text += self._filter.finish()
        self._request.pieces.append(text)
        return text


class Stream:
    """Pieces of text as they are made: strings, or (number of the prompt, string) for a list of prompts.

    `close()` ends it early; `results()` reads what is left and returns one Result per prompt.
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
        self._events.close()

    def results(self) -> list[Result]:
        for _ in self._events:
            pass
        return [request.result() for request in self._requests]

    def result(self) -> Result:
        """Of the only prompt."""
        return self.results()[0]
