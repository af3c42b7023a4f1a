"""The `Engine` of a compiled step (frontend/llm/step.py): sequences in a paged cache, one call for a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relaxlite.errors import ArtifactError, InvalidArgumentError
from relaxlite.llm.engine import Array, Batch, check_batch
from relaxlite.runtime.kv_cache import CacheLayout, KVCache
from relaxlite.runtime.module import Executable
from relaxlite.version import STEP_VERSION, __version__

CACHE_BYTES = 1 << 30
CHUNK = 128  # tokens of a long prompt in one step: more take memory and, as caches overflow, 10 to 20 % more time
_Part = tuple[int, int, int]  # sequence, first of its new tokens, how many


class CompiledEngine:
    """Runs an executable of `build_step`. Prompts that are longer than a step takes go through it in chunks.

    `max_bytes` bounds the cache, which grows as it is needed; `chunk`: tokens of a step at most. When the cache is
    full, `forward` raises CacheFullError and every sequence is as it was.
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
        self.cache = KVCache(_layout_of(executable), max_bytes=max_bytes)
        self.context = int(facts["context"])
        self.vocab = int(executable.outputs[0].shape[-1])
        self._chunk = min(CHUNK, int(facts["step_tokens"])) if chunk is None else chunk
        if not 1 <= self._chunk <= int(facts["step_tokens"]):
            raise InvalidArgumentError(f"a step takes 1 to {facts['step_tokens']} tokens, not chunks of {chunk}")
        self.new, self.fork, self.drop = self.cache.new, self.cache.fork, self.cache.drop
        self.remove, self.length = self.cache.remove, self.cache.length

    def forward(self, batch: Batch, *, wanted: Sequence[int] | None = None) -> list[Array]:
        check_batch(self, batch, wanted)
        counts = [(sequence, len(tokens)) for sequence, tokens in batch]
        self.cache.reserve(counts)
        try:
            found = self._logits(batch, [1] * len(batch) if wanted is None else wanted)
        except BaseException:
            self.cache.cancel(counts)
            raise
        self.cache.commit(counts)
        return found

    def _logits(self, batch: Batch, wanted: Sequence[int]) -> list[Array]:
        shown = {sequence: len(tokens) - count for (sequence, tokens), count in zip(batch, wanted, strict=True)}
        given = {sequence: np.asarray(tokens, np.int64) for sequence, tokens in batch}
        found: dict[int, list[Array]] = {sequence: [] for sequence in given}
        for parts in _steps(batch, self._chunk):
            pieces = [given[sequence][first : first + count] for sequence, first, count in parts]
            tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            asked = [max(0, min(count, first + count - shown[sequence])) for sequence, first, count in parts]
            ends = np.cumsum([count for _, _, count in parts]).tolist()
            rows = [np.arange(end - number, end) for end, number in zip(ends, asked, strict=True)]
            places = rows[0] if len(rows) == 1 else np.concatenate(rows)
            # A step always computes one row: that of its last token, if nobody asks for any.
            logits = self._step(tokens, places if len(places) else np.array([len(tokens) - 1]), parts)
            at = 0
            for (sequence, _, _), number in zip(parts, asked, strict=True):
                if number:
                    found[sequence].append(logits[at : at + number])
                at += number
        return [pieces[-1] if len(pieces) == 1 else np.concatenate(pieces) for pieces in found.values()]

    def _step(self, tokens: Array, wanted: Array, parts: list[_Part]) -> Array:
        made: Any = self._run(tokens, *self.cache.describe(parts), wanted, *self.cache.pools)
        return made


def _steps(batch: Batch, most: int) -> Iterator[list[_Part]]:
    """The batch in steps of at most `most` tokens, sequence after sequence."""
    parts: list[_Part] = []
    room = most
    for sequence, tokens in batch:
        first = 0
        while first < len(tokens):
            count = min(room, len(tokens) - first)
            parts.append((sequence, first, count))
            first, room = first + count, room - count
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


def _layout_of(executable: Executable) -> CacheLayout:
    """Read off the signature of a step."""
    specs = {spec.name: spec for spec in executable.inputs}
    keys = specs["keys_0"]
    heads, _, width, page = keys.shape
    layers = sum(name.startswith("keys_") for name in specs)
    block = int(executable.data.metadata.provenance["attention_block"])
    return CacheLayout(layers, int(heads), int(width), int(page), keys.dtype, block)
