"""The interface between generation and a model: sequences that grow, fork and shrink, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol, TypeAlias

import numpy as np

from relaxlite.errors import InvalidArgumentError

Array: TypeAlias = "np.ndarray[Any, Any]"
Batch: TypeAlias = "Sequence[tuple[int, Sequence[int]]]"  # (sequence, its next tokens)

EXACT_TOKENS = 8  # the last tokens before wanted logits, the first wanted one included, that are never filled


class Engine(Protocol):
    """A model that holds sequences. Sequences are numbers from `new` and `fork`; `forward` appends tokens.

    Unknown sequences, tokens outside of the vocabulary and more than `context` tokens raise InvalidArgumentError and
    leave all sequences unchanged.
    """

    vocab: int
    context: int
    has_relaxed_fill: bool  # `fill` is of lower precision than `forward` for tokens whose logits are wanted

    def new(self) -> int:
        """Create an empty sequence."""
        ...

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Create a sequence of the first `length` tokens of another one (None: all), which share memory."""
        ...

    def drop(self, sequence: int, count: int) -> None:
        """Remove the last `count` tokens of a sequence."""
        ...

    def remove(self, sequence: int) -> None:
        """Remove a sequence."""
        ...

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        ...

    def cached_length(self, sequence: int) -> int:
        """Return how many tokens of a sequence are cached; others are recomputed along with the next ones."""
        ...

    def forward(
        self, batch: Batch, *, wanted: Sequence[int] | None = None, exact: Sequence[int] | None = None
    ) -> list[Array]:
        """Append tokens to each sequence of the batch in one step, and return logits float32 [wanted, vocab] of each.

        `wanted`: logits of that many last tokens of each sequence (None: one). `exact`: that many last tokens are
        computed as precisely as tokens with wanted logits (None: as `wanted`).
        """
        ...

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens without logits, as `forward` appends the first tokens of a long prompt."""
        ...


def check_batch(engine: Engine, batch: Batch, wanted: Sequence[int] | None) -> None:
    """Raise InvalidArgumentError for arguments that `forward` does not accept."""
    if wanted is not None and len(wanted) != len(batch):
        raise InvalidArgumentError(f"a batch of {len(batch)} sequences, and the logits wanted of {len(wanted)}")
    if len({sequence for sequence, _ in batch}) < len(batch):
        raise InvalidArgumentError("a sequence occurs twice in one batch")
    for k, (sequence, tokens) in enumerate(batch):
        length = engine.length(sequence)
        if not len(tokens):
            raise InvalidArgumentError(f"sequence {sequence} is given no tokens")
        if length + len(tokens) > engine.context:
            raise InvalidArgumentError(
                f"sequence {sequence} has {length} tokens and is given {len(tokens)} more; the model's context holds "
                f"{engine.context}"
            )
        if wanted is not None and not 1 <= wanted[k] <= len(tokens):
            raise InvalidArgumentError(
                f"sequence {sequence} is given {len(tokens)} tokens, and the logits of {wanted[k]} are wanted"
            )
        invalid = next((t for t in tokens if not isinstance(t, Integral) or not 0 <= t < engine.vocab), None)
        if invalid is not None:
            raise InvalidArgumentError(
                f"sequence {sequence}: token {invalid} is not in the vocabulary of {engine.vocab}"
            )
