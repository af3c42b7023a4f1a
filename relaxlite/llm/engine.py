"""What generation needs of a compiled model: sequences that grow, fork and shrink, and logits behind them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol, TypeAlias

import numpy as np

from relaxlite.errors import InvalidArgumentError

Array: TypeAlias = "np.ndarray[Any, Any]"
Batch: TypeAlias = "Sequence[tuple[int, Sequence[int]]]"  # (sequence, its next tokens)

EXACT = 8  # tokens up to the first whose logits are wanted that `fill` is not for


class Engine(Protocol):
    """Sequences are numbers that `new` and `fork` give; `forward` appends to them.

    Unknown sequences, tokens outside of the vocabulary and more than `context` tokens are InvalidArgumentErrors that
    leave every sequence as it was.
    """

    vocab: int
    context: int
    fills_coarsely: bool  # what `fill` appends is not what `forward` does of tokens whose logits are wanted

    def new(self) -> int:
        """An empty sequence."""
        ...

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence of the first `length` tokens of another (None: all); what both share is stored once."""
        ...

    def drop(self, sequence: int, count: int) -> None:
        """Forget the last `count` tokens."""
        ...

    def remove(self, sequence: int) -> None: ...

    def length(self, sequence: int) -> int: ...

    def held(self, sequence: int) -> int:
        """How many of its tokens the cache has: those behind them are computed again, along with the next ones."""
        ...

    def forward(
        self, batch: Batch, *, wanted: Sequence[int] | None = None, exact: Sequence[int] | None = None
    ) -> list[Array]:
        """Append tokens to each sequence of the batch, together in one step; float32 logits [wanted, vocab] behind the
        last `wanted` tokens of each (None: behind the last one). `exact`: so many of the last tokens are appended as
        those are whose logits are wanted (None: these alone)."""
        ...

    def fill(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append tokens as `forward` appends the first ones of a long prompt, whose own logits nobody sees."""
        ...


def check_batch(engine: Engine, batch: Batch, wanted: Sequence[int] | None) -> None:
    """InvalidArgumentError for what `forward` does not take."""
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
        bad = next((t for t in tokens if not isinstance(t, Integral) or not 0 <= t < engine.vocab), None)
        if bad is not None:
            raise InvalidArgumentError(f"sequence {sequence}: token {bad} is not in the vocabulary of {engine.vocab}")
