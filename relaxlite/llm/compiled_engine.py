"""The `Engine` of a compiled step (frontend/llm/step.py): sequences in a paged cache, one call for a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.llm.engine import EXACT, Array, Batch, check_batch
from relaxlite.llm.sequences import CachedSequences, ReplayedSequences
from relaxlite.llm.turns import Turn
from relaxlite.runtime.executable import TensorSpec
from relaxlite.runtime.kv_cache import CacheLayout, KVCache, PoolLayout
from relaxlite.runtime.module import Executable
from relaxlite.runtime.state_slots import MIN_PROMPT_TOKENS
from relaxlite.version import STEP_VERSION, __version__

CACHE_BYTES = 1 << 30
CHUNK = 128  # tokens of a long prompt in one step, where the step does not say it
FILL = "fill"  # the function that gives no logits
STATES = ("tails_", "states_")  # as frontend/llm/step.py calls what has a slot for each state
MIN_FILL = 64  # tokens that it is for: fewer take little time, and short prompts are to be computed as well as can be
_Found = TypeVar("_Found")
_Part = tuple[int, int, int]  # sequence, first of its new tokens, how many


class CompiledEngine:
    """Runs an executable of `build_step`. Prompts that are longer than a step takes go through it in chunks.

    Where the executable has a function that only fills the cache, and rounds more coarsely for that, it takes all of a
    prompt but the tokens whose logits are wanted and those EXACT - 1 before, which matter most to them. Which tokens
    it takes depends on the sequence alone, not on the batch or on chunks. Threads take turns.

    `max_bytes` bounds the cache, which grows as it is needed; `chunk`: tokens of a step at most (None: what the step is
    best given). When the cache is full, `forward` raises CacheFullError and every sequence is as it was.
    ArtifactError: the step is called in a way that this version of relaxlite does not know.
    """

    def __init__(self, executable: Executable, *, max_bytes: int = CACHE_BYTES, chunk: int | None = None) -> None:
        facts = executable.data.metadata.provenance
        if "attention_block" not in facts:
            raise InvalidArgumentError("the model is not one step of a decoder with a paged cache (build_step)")
        if (version := facts.get("step_version", 0)) != STEP_VERSION:
            raise ArtifactError(
                f"its step of a language model has version {version}, written by relaxlite "
                f"{executable.data.metadata.producer}; relaxlite {__version__} calls version {STEP_VERSION}; "
                "compile the model again"
            )
        self._run = executable
        self._fill = executable.entry(FILL) if FILL in executable.data.entries else None
        self.fills_coarsely = self._fill is not None
        self.cache = KVCache(layout_of(executable.inputs, int(facts["attention_block"])), max_bytes=max_bytes)
        self.context = int(facts["context"])
        self.vocab = int(executable.outputs[0].shape[-1])
        self._chunk = int(facts.get("chunk", CHUNK)) if chunk is None else chunk
        if not 1 <= self._chunk <= int(facts["step_tokens"]):
            raise InvalidArgumentError(f"a step takes 1 to {facts['step_tokens']} tokens, not chunks of {chunk}")
        self._sequences = (ReplayedSequences if self.cache.layout.state_bytes else CachedSequences)(self.cache)
        self._turn = Turn()

    def new(self) -> int:
        with self._turn.lock:
            return self._sequences.new()

    def fork(self, sequence: int, length: int | None = None) -> int:
        with self._turn.lock:
            return self._sequences.fork(sequence, length)

    def drop(self, sequence: int, count: int) -> None:
        with self._turn.lock:
            self._sequences.drop(sequence, count)

    def remove(self, sequence: int) -> None:
        with self._turn.lock:
            self._sequences.remove(sequence)

    def length(self, sequence: int) -> int:
        return self._sequences.length(sequence)

    def held(self, sequence: int) -> int:
        return self.cache.length(sequence)

    def forward(
        self, batch: Batch, *, wanted: Sequence[int] | None = None, exact: Sequence[int] | None = None
    ) -> list[Array]:
        if len(batch) == 1 and (wanted is None or list(wanted) == [1]):
            result = self._next(*batch[0])
            if result is not None:
                return [result]
        check_batch(self, batch, wanted)
        asked = [1] * len(batch) if wanted is None else wanted
        exact = asked if exact is None else exact
        if isinstance(self._sequences, ReplayedSequences):
            return self._in_two_steps(self._sequences, batch, asked, exact)
        return self._appended(batch, lambda: self._logits(batch, asked, exact))

    def _in_two_steps(
        self, sequences: ReplayedSequences, batch: Batch, wanted: Sequence[int], exact: Sequence[int]
    ) -> list[Array]:
        """What `forward` does where sequences have states: one is kept before the last tokens of a prompt, for another
        reply, or a next turn whose template writes the end of this prompt otherwise."""
        before = [(sequence, sequences.tokens(sequence)) for sequence, _ in batch]
        whole = self._with_owed(batch)
        counts = [
            self._first(len(tokens) - max(count, more))
            for (_, tokens), count, more in zip(whole, wanted, exact, strict=True)
        ]
        first = [(sequence, tokens[:n]) for (sequence, tokens), n in zip(whole, counts, strict=True) if n]
        rest = [(sequence, tokens[n:]) for (sequence, tokens), n in zip(whole, counts, strict=True)]
        try:
            if first:
                given = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in first}
                ranges = [(sequence, 0, len(tokens)) for sequence, tokens in first]
                self._appended(first, lambda: self._fill_in(given, ranges))
            return self._appended(rest, lambda: self._logits(rest, wanted, exact))
        except BaseException:
            with self._turn.lock:
                for sequence, tokens in before:
                    sequences.cut_back(sequence, tokens)
            raise

    def _first(self, shown: int) -> int:
        """Of a sequence's tokens, of which those from `shown` on give logits, how many come in a step before."""
        if self._fill is not None:
            return self._filled(shown)
        return shown + 1 - EXACT if shown + 1 - EXACT >= MIN_PROMPT_TOKENS else 0

    def _next(self, sequence: int, tokens: Sequence[int]) -> Array | None:
        """`forward` of one token in few operations: behind a step, whose weights have gone through all caches, each
        that Python does waits for memory (0.3 ms by the general way, 0.14 so). None where it is not that simple, or
        wrong."""
        if len(tokens) != 1 or type(tokens[0]) is not int or not 0 <= tokens[0] < self.vocab:
            return None
        with self._turn.lock:
            if self._sequences.owed(sequence):
                return None
            step = self.cache.decode_step(sequence, tokens[0])
            if step is None or self.cache.length(sequence) >= self.context:
                return None
            result: Any = self._run(step.tokens, *step.inputs, step.wanted, *self.cache.pools)
            self._sequences.extend(sequence, tokens)
            self.cache.commit(((sequence, 1),))
        return result

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        check_batch(self, [(sequence, tokens)], None)
        batch = self._with_owed([(sequence, tokens)])
        given = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in batch}
        self._appended(batch, lambda: self._fill_in(given, [(sequence, 0, len(given[sequence]))]))

    def _with_owed(self, batch: Batch) -> Batch:
        """With the tokens of each sequence that are owed, before the new ones."""
        return [(s, [*owed, *tokens] if (owed := self._sequences.owed(s)) else tokens) for s, tokens in batch]

    def _appended(self, batch: Batch, compute: Callable[[], _Found]) -> _Found:
        """What is computed, by which the sequences are that much longer; they are as they were where it fails."""
        counts = [(sequence, len(tokens)) for sequence, tokens in batch]
        with self._turn.lock:
            try:
                self.cache.reserve(counts)
                result = compute()
            except BaseException:
                self.cache.cancel(counts)
                raise
            for sequence, tokens in batch:  # before the cache: what it has not got is computed again
                self._sequences.extend(sequence, tokens)
            self.cache.commit(counts)
        return result

    def _logits(self, batch: Batch, wanted: Sequence[int], exact: Sequence[int]) -> list[Array]:
        shown = {sequence: len(tokens) - count for (sequence, tokens), count in zip(batch, wanted, strict=True)}
        given = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in batch}
        result: dict[int, list[Array]] = {sequence: [] for sequence in given}
        filled = {
            sequence: self._filled(len(tokens) - max(count, more))
            for (sequence, tokens), count, more in zip(batch, wanted, exact, strict=True)
        }
        self._fill_in(given, [(sequence, 0, count) for sequence, count in filled.items()])
        rest = [(sequence, filled[sequence], len(tokens)) for sequence, tokens in batch]
        for parts in _steps(rest, self._chunk):
            tokens = _joined(given, parts)
            asked = [max(0, min(count, first + count - shown[sequence])) for sequence, first, count in parts]
            ends = np.cumsum([count for _, _, count in parts]).tolist()
            rows = [np.arange(end - number, end) for end, number in zip(ends, asked, strict=True)]
            places = rows[0] if len(rows) == 1 else np.concatenate(rows)
            logits = self._step(tokens, places, parts)
            at = 0  # in the logits
            for (sequence, _, _), number in zip(parts, asked, strict=True):
                if number:
                    result[sequence].append(logits[at : at + number])
                at += number
        return [pieces[-1] if len(pieces) == 1 else np.concatenate(pieces) for pieces in result.values()]

    def _fill_in(self, given: Mapping[int, Array], ranges: Iterable[_Part]) -> None:
        for parts in _steps(ranges, self._chunk):
            tokens = _joined(given, parts)
            if self._fill is None:
                self._step(tokens, np.empty(0, np.int64), parts)
            else:
                self._fill(tokens, *self.cache.describe(parts), *self.cache.pools)

    def _filled(self, shown: int) -> int:
        """How many of a sequence's tokens only the cache needs, where those from `shown` on give logits."""
        count = shown + 1 - EXACT
        return count if self._fill is not None and count >= MIN_FILL else 0

    def _step(self, tokens: Array, wanted: Array, parts: list[_Part]) -> Array:
        if not len(wanted):
            wanted = np.array([len(tokens) - 1])  # a step always computes one row
        result: Any = self._run(tokens, *self.cache.describe(parts), wanted, *self.cache.pools)
        return result


def _joined(given: Mapping[int, Array], parts: list[_Part]) -> Array:
    """The tokens of a step."""
    pieces = [given[sequence][first : first + count] for sequence, first, count in parts]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _steps(ranges: Iterable[_Part], most: int) -> Iterator[list[_Part]]:
    """Tokens (sequence, first, end) in steps of at most `most` of them, sequence after sequence."""
    parts: list[_Part] = []
    room = most
    for sequence, first, end in ranges:
        while first < end:
            count = min(room, end - first)
            parts.append((sequence, first, count))
            first, room = first + count, room - count
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


def layout_of(inputs: Iterable[TensorSpec], block: int) -> CacheLayout:
    """Read off the signature of a step whose attention takes `block` rows at once."""
    specs = [spec for spec in inputs if len(spec.shape) == 4]
    keys = next(spec for spec in specs if spec.name.startswith("keys_"))
    pools = [
        PoolLayout(int(heads), (int(a), int(b)), spec.dtype, spec.name.startswith(STATES))
        for spec in specs
        for heads, _, a, b in [spec.shape]
    ]
    return CacheLayout(tuple(pools), pools[specs.index(keys)].heads, int(keys.shape[3]), keys.dtype, block)
