"""What an engine's sequences are made of: what a cache holds of them, or, where it holds states, the tokens told to it.

A state cannot be cut back anywhere. The tokens behind the one that a sequence is cut back to are *owed*: they are
computed again with the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from relaxlite.errors import InvalidArgumentError
from relaxlite.runtime.kv_cache import KVCache


class CachedSequences:
    """Of a cache that can be cut back anywhere. Not for several threads at once."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def new(self) -> int:
        return self._cache.new()

    def fork(self, sequence: int, length: int | None) -> int:
        return self._cache.fork(sequence, length)

    def drop(self, sequence: int, count: int) -> None:
        self._cache.drop(sequence, count)

    def remove(self, sequence: int) -> None:
        self._cache.remove(sequence)

    def length(self, sequence: int) -> int:
        return self._cache.length(sequence)

    def owed(self, sequence: int) -> Sequence[int]:
        """The tokens that come before the next ones and that the cache does not have."""
        return ()

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """These are about to follow what the cache has."""


class ReplayedSequences(CachedSequences):
    """All tokens of each sequence, of which a cache with states has the first ones."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self._tokens: dict[int, list[int]] = {}

    def new(self) -> int:
        result = super().new()
        self._tokens[result] = []
        return result

    def fork(self, sequence: int, length: int | None) -> int:
        tokens = self.tokens(sequence)
        kept = tokens if length is None else tokens[: _checked(tokens, sequence, length, "fork")]
        result = super().fork(sequence, min(len(kept), self._cache.length(sequence)))
        self._tokens[result] = kept
        return result

    def drop(self, sequence: int, count: int) -> None:
        tokens = self.tokens(sequence)
        self.cut_back(sequence, tokens[: len(tokens) - _checked(tokens, sequence, count, "drop")])

    def cut_back(self, sequence: int, tokens: Sequence[int]) -> None:
        """To these tokens, of which the cache has the first ones, or all and more."""
        super().drop(sequence, max(0, self._cache.length(sequence) - len(tokens)))
        self._tokens[sequence] = list(tokens)

    def remove(self, sequence: int) -> None:
        super().remove(sequence)
        del self._tokens[sequence]

    def length(self, sequence: int) -> int:
        return len(self._of(sequence))

    def tokens(self, sequence: int) -> list[int]:
        return self._of(sequence)[:]

    def owed(self, sequence: int) -> Sequence[int]:
        return self._of(sequence)[self._cache.length(sequence) :]

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        self._of(sequence)[self._cache.length(sequence) :] = tokens

    def _of(self, sequence: int) -> list[int]:
        token = self._tokens.get(sequence)
        if token is None:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        return token


def _checked(tokens: Sequence[int], sequence: int, count: int, what: str) -> int:
    if not isinstance(count, Integral) or not 0 <= count <= len(tokens):
        raise InvalidArgumentError(f"sequence {sequence} has {len(tokens)} tokens, not {count} to {what}")
    return int(count)
