"""The `Engine` of a compiled step (frontend/llm/step.py): sequences in a paged KV cache, one call per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.llm.engine import EXACT_TOKENS, Array, Batch, check_batch
from relaxlite.llm.fork_safe_lock import ForkSafeLock
from relaxlite.llm.sequences import CachedSequences, ReplayedSequences
from relaxlite.runtime.executable import TensorSpec
from relaxlite.runtime.kv_cache import CacheLayout, KVCache, PoolLayout
from relaxlite.runtime.module import Executable
from relaxlite.runtime.state_slots import MIN_PROMPT_TOKENS
from relaxlite.version import STEP_VERSION, __version__

CACHE_BYTES = 1 << 30
CHUNK = 128  # default number of tokens of a long prompt in one step
FILL = "fill"  # the function that fills the cache only, as frontend/llm/step.py names it
STATE_PREFIXES = ("tails_", "states_")  # prefixes of pools with a slot for each state, as in frontend/llm/step.py
MIN_FILL = 64  # least number of tokens for FILL: fewer take little time, and short prompts stay exact
_Result = TypeVar("_Result")
_Part = tuple[int, int, int]  # sequence, index of the first of its new tokens, count


class CompiledEngine:
    """Runs an executable of `build_step`. Prompts longer than a step are prefilled in chunks.

    If the executable has a function that only fills the cache, in relaxed precision, prefill uses it for
    all tokens but those whose logits are wanted and the EXACT_TOKENS - 1 before these, which matter most. The
    choice depends on the sequence alone, not on the batch or on chunks. Concurrent calls are serialized.

    `max_bytes` bounds the cache, which grows on demand; `chunk`: the maximum number of tokens of a step
    (None: the step's own). If the cache is full, `forward` raises CacheFullError and leaves all sequences
    unchanged. Raises ArtifactError if the step's signature is of another version of relaxlite.
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
        self.has_relaxed_fill = self._fill is not None
        self.cache = KVCache(cache_layout(executable.inputs, int(facts["attention_block"])), max_bytes=max_bytes)
        self.context = int(facts["context"])
        self.vocab = int(executable.outputs[0].shape[-1])
        self._chunk = int(facts.get("chunk", CHUNK)) if chunk is None else chunk
        if not 1 <= self._chunk <= int(facts["step_tokens"]):
            raise InvalidArgumentError(f"a step takes 1 to {facts['step_tokens']} tokens, not chunks of {chunk}")
        self._sequences = (ReplayedSequences if self.cache.layout.state_bytes else CachedSequences)(self.cache)
        self._turn = ForkSafeLock()

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

    def cached_length(self, sequence: int) -> int:
        return self.cache.length(sequence)

    def forward(
        self, batch: Batch, *, wanted: Sequence[int] | None = None, exact: Sequence[int] | None = None
    ) -> list[Array]:
        if len(batch) == 1 and (wanted is None or list(wanted) == [1]):
            result = self._next(*batch[0])
            if result is not None:
                return [result]
        check_batch(self, batch, wanted)
        logit_counts = [1] * len(batch) if wanted is None else wanted
        exact = logit_counts if exact is None else exact
        if isinstance(self._sequences, ReplayedSequences):
            return self._forward_with_states(self._sequences, batch, logit_counts, exact)
        return self._append(batch, lambda: self._logits(batch, logit_counts, exact))

    def _forward_with_states(
        self, sequences: ReplayedSequences, batch: Batch, wanted: Sequence[int], exact: Sequence[int]
    ) -> list[Array]:
        """Run `forward` for sequences with states, in two steps.

        A state is stored before the last tokens of a prompt: for another reply, or for a next turn whose template
        writes the end of this prompt in another way.
        """
        before = [(sequence, sequences.tokens(sequence)) for sequence, _ in batch]
        full_batch = self._with_uncached(batch)
        counts = [
            self._leading_tokens(len(tokens) - max(count, exact_count))
            for (_, tokens), count, exact_count in zip(full_batch, wanted, exact, strict=True)
        ]
        first = [(sequence, tokens[:n]) for (sequence, tokens), n in zip(full_batch, counts, strict=True) if n]
        rest = [(sequence, tokens[n:]) for (sequence, tokens), n in zip(full_batch, counts, strict=True)]
        try:
            if first:
                token_arrays = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in first}
                ranges = [(sequence, 0, len(tokens)) for sequence, tokens in first]
                self._append(first, lambda: self._run_fill(token_arrays, ranges))
            return self._append(rest, lambda: self._logits(rest, wanted, exact))
        except BaseException:
            with self._turn.lock:
                for sequence, tokens in before:
                    sequences.truncate(sequence, tokens)
            raise

    def _leading_tokens(self, shown: int) -> int:
        """Return how many tokens form the first of two steps, where those from index `shown` on have logits."""
        if self._fill is not None:
            return self._relaxed_tokens(shown)
        return shown + 1 - EXACT_TOKENS if shown + 1 - EXACT_TOKENS >= MIN_PROMPT_TOKENS else 0

    def _next(self, sequence: int, tokens: Sequence[int]) -> Array | None:
        """Run `forward` for one token of one sequence in few Python operations; None if the general path is needed.

        After a step, whose weights have displaced everything else from the CPU's caches, each operation of Python waits
        for memory (docs/measurements/llm.md).
        """
        if len(tokens) != 1 or type(tokens[0]) is not int or not 0 <= tokens[0] < self.vocab:
            return None
        with self._turn.lock:
            if self._sequences.uncached(sequence):
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
        batch = self._with_uncached([(sequence, tokens)])
        token_arrays = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in batch}
        self._append(batch, lambda: self._run_fill(token_arrays, [(sequence, 0, len(token_arrays[sequence]))]))

    def _with_uncached(self, batch: Batch) -> Batch:
        """Prepend the tokens of each sequence that the cache lacks to its new ones."""
        return [(s, [*old, *tokens] if (old := self._sequences.uncached(s)) else tokens) for s, tokens in batch]

    def _append(self, batch: Batch, compute: Callable[[], _Result]) -> _Result:
        """Reserve slots, compute, then extend the sequences; they stay unchanged if `compute` fails."""
        counts = [(sequence, len(tokens)) for sequence, tokens in batch]
        with self._turn.lock:
            try:
                self.cache.reserve(counts)
                result = compute()
            except BaseException:
                self.cache.cancel(counts)
                raise
            for sequence, tokens in batch:  # before the commit: tokens that the cache lacks are recomputed
                self._sequences.extend(sequence, tokens)
            self.cache.commit(counts)
        return result

    def _logits(self, batch: Batch, wanted: Sequence[int], exact: Sequence[int]) -> list[Array]:
        """Prefill, then compute logits [wanted, vocab] of each sequence."""
        shown = {sequence: len(tokens) - count for (sequence, tokens), count in zip(batch, wanted, strict=True)}
        token_arrays = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in batch}
        result: dict[int, list[Array]] = {sequence: [] for sequence in token_arrays}
        filled = {
            sequence: self._relaxed_tokens(len(tokens) - max(count, exact_count))
            for (sequence, tokens), count, exact_count in zip(batch, wanted, exact, strict=True)
        }
        self._run_fill(token_arrays, [(sequence, 0, count) for sequence, count in filled.items()])
        rest = [(sequence, filled[sequence], len(tokens)) for sequence, tokens in batch]
        for parts in _steps(rest, self._chunk):
            tokens = _step_tokens(token_arrays, parts)
            row_counts = [max(0, min(count, first + count - shown[sequence])) for sequence, first, count in parts]
            ends = np.cumsum([count for _, _, count in parts]).tolist()
            rows = [np.arange(end - number, end) for end, number in zip(ends, row_counts, strict=True)]
            places = rows[0] if len(rows) == 1 else np.concatenate(rows)
            logits = self._step(tokens, places, parts)
            at = 0  # in the logits
            for (sequence, _, _), number in zip(parts, row_counts, strict=True):
                if number:
                    result[sequence].append(logits[at : at + number])
                at += number
        return [pieces[-1] if len(pieces) == 1 else np.concatenate(pieces) for pieces in result.values()]

    def _run_fill(self, token_arrays: Mapping[int, Array], ranges: Iterable[_Part]) -> None:
        """Append tokens in ranges (sequence, first, end) without computing logits."""
        for parts in _steps(ranges, self._chunk):
            tokens = _step_tokens(token_arrays, parts)
            if self._fill is None:
                self._step(tokens, np.empty(0, np.int64), parts)
            else:
                self._fill(tokens, *self.cache.describe(parts), *self.cache.pools)

    def _relaxed_tokens(self, shown: int) -> int:
        """Return how many tokens FILL may take of a sequence whose tokens from index `shown` on have logits."""
        count = shown + 1 - EXACT_TOKENS
        return count if self._fill is not None and count >= MIN_FILL else 0

    def _step(self, tokens: Array, wanted: Array, parts: list[_Part]) -> Array:
        if not len(wanted):
            wanted = np.array([len(tokens) - 1])  # a step computes at least one row
        result: Any = self._run(tokens, *self.cache.describe(parts), wanted, *self.cache.pools)
        return result


def _step_tokens(token_arrays: Mapping[int, Array], parts: list[_Part]) -> Array:
    """Concatenate the tokens of the parts of a step."""
    pieces = [token_arrays[sequence][first : first + count] for sequence, first, count in parts]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _steps(ranges: Iterable[_Part], max_tokens: int) -> Iterator[list[_Part]]:
    """Split ranges (sequence, first, end) into steps of at most `max_tokens` tokens, sequence after sequence."""
    parts: list[_Part] = []
    room = max_tokens
    for sequence, first, end in ranges:
        while first < end:
            count = min(room, end - first)
            parts.append((sequence, first, count))
            first, room = first + count, room - count
            if not room:
                yield parts
                parts, room = [], max_tokens
    if parts:
        yield parts


def cache_layout(inputs: Iterable[TensorSpec], block: int) -> CacheLayout:
    """Derive the layout of the cache from the signature of a step. `block`: rows of an attention block."""
    specs = [spec for spec in inputs if len(spec.shape) == 4]
    keys = next(spec for spec in specs if spec.name.startswith("keys_"))
    pools = [
        PoolLayout(int(heads), (int(a), int(b)), spec.dtype, spec.name.startswith(STATE_PREFIXES))
        for spec in specs
        for heads, _, a, b in [spec.shape]
    ]
    return CacheLayout(tuple(pools), pools[specs.index(keys)].heads, int(keys.shape[3]), keys.dtype, block)
