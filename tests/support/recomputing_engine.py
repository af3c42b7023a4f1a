"""The simplest engine of a language model, as an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relaxlite.errors import InvalidArgumentError
from relaxlite.llm.engine import Array, Batch, check_batch


class RecomputingEngine:
    """The simplest engine: it keeps tokens, and computes each sequence from its beginning.

    `logits` maps tokens int64 [1, seq] to float32 [1, seq, vocab].
    """

    def __init__(self, logits: Callable[[Array], Array], vocab: int, context: int) -> None:
        self.vocab, self.context, self.has_relaxed_fill = vocab, context, False
        self._logits, self._next = logits, 0
        self._tokens: dict[int, list[int]] = {}

    def new(self) -> int:
        self._next += 1
        self._tokens[self._next] = []
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        tokens = self._of(sequence)
        if length is not None and not 0 <= length <= len(tokens):
            raise InvalidArgumentError(f"sequence {sequence} has {len(tokens)} tokens, not {length} to fork")
        made = self.new()
        self._tokens[made] = tokens[:length]
        return made

    def drop(self, sequence: int, count: int) -> None:
        tokens = self._of(sequence)
        if not 0 <= count <= len(tokens):
            raise InvalidArgumentError(f"sequence {sequence} has {len(tokens)} tokens, not {count} to drop")
        del tokens[len(tokens) - count :]

    def remove(self, sequence: int) -> None:
        self._of(sequence)
        del self._tokens[sequence]

    def length(self, sequence: int) -> int:
        return len(self._of(sequence))

    cached_length = length

    def forward(
        self, batch: Batch, *, wanted: Sequence[int] | None = None, exact: Sequence[int] | None = None
    ) -> list[Array]:
        check_batch(self, batch, wanted)
        found = []
        for k, (sequence, tokens) in enumerate(batch):
            whole = self._of(sequence)
            whole.extend(int(t) for t in tokens)
            logits = self._logits(np.asarray([whole], np.int64))[0]
            found.append(logits[-(1 if wanted is None else wanted[k]) :])
        return found

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        check_batch(self, [(sequence, tokens)], None)
        self._of(sequence).extend(map(int, tokens))

    def _of(self, sequence: int) -> list[int]:
        if sequence not in self._tokens:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        return self._tokens[sequence]
