"""The tokens of sequences whose cache cannot be cut back anywhere: those that it has no more are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from relaxlite.errors import InvalidArgumentError


class Told:
    """All tokens of each sequence; a cache holds the first of them."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def begin(self, sequence: int, tokens: Sequence[int] = ()) -> None:
        """From here on it has these."""
        self._tokens[sequence] = list(tokens)

    def end(self, sequence: int) -> None:
        del self._tokens[sequence]

    def length(self, sequence: int) -> int:
        return len(self._of(sequence))

    def first(self, sequence: int, count: int | None = None) -> list[int]:
        """The first `count` tokens (None: all). InvalidArgumentError: it has not as many."""
        tokens = self._of(sequence)
        return tokens[:] if count is None else tokens[: self._checked(tokens, sequence, count, "fork")]

    def without(self, sequence: int, count: int) -> list[int]:
        """All but the last `count` tokens. InvalidArgumentError: it has not as many."""
        tokens = self._of(sequence)
        return tokens[: len(tokens) - self._checked(tokens, sequence, count, "drop")]

    def _checked(self, tokens: Sequence[int], sequence: int, count: int, what: str) -> int:
        if not isinstance(count, Integral) or not 0 <= count <= len(tokens):
            raise InvalidArgumentError(f"sequence {sequence} has {len(tokens)} tokens, not {count} to {what}")
        return int(count)

    def behind(self, sequence: int, length: int) -> list[int]:
        return self._of(sequence)[length:]

    def extend(self, sequence: int, length: int, tokens: Sequence[int]) -> None:
        """The first `length` tokens are followed by these."""
        self._of(sequence)[length:] = tokens

    def _of(self, sequence: int) -> list[int]:
        found = self._tokens.get(sequence)
        if found is None:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        return found
