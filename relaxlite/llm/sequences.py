"""Sequences of an engine over a KV cache, with or without recurrent states.

A state cannot be truncated to an arbitrary token. If a sequence ends behind the last stored state, the tokens between
are not cached (`CachedSequences.owed`): they are recomputed along with the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from relaxlite.errors import InvalidArgumentError
from relaxlite.runtime.kv_cache import KVCache


class CachedSequences:
    """Sequences of a cache that can be truncated anywhere. Not thread-safe."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def new(self) -> int:
        """Create an empty sequence."""
        return self._cache.new()

    def fork(self, sequence: int, length: int | None) -> int:
        """Create a sequence of the first `length` tokens of another one (None: all)."""
        return self._cache.fork(sequence, length)

    def drop(self, sequence: int, count: int) -> None:
        """Remove the last `count` tokens of a sequence."""
        self._cache.drop(sequence, count)

    def remove(self, sequence: int) -> None:
        """Remove a sequence."""
        self._cache.remove(sequence)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._cache.length(sequence)

    def uncached(self, sequence: int) -> Sequence[int]:
        """Return the tokens of a sequence that the cache lacks."""
        return ()

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record tokens that are about to follow the cached ones."""


class ReplayedSequences(CachedSequences):
    """Sequences of a cache with states: all tokens are recorded, of which the cache has the first ones."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self._tokens: dict[int, list[int]] = {}

    def new(self) -> int:
        result = super().new()
        self._tokens[result] = []
        return result

    def fork(self, sequence: int, length: int | None) -> int:
        tokens = self.tokens(sequence)
        forked = tokens if length is None else tokens[: _checked(tokens, sequence, length, "fork")]
        result = super().fork(sequence, min(len(forked), self._cache.length(sequence)))
        self._tokens[result] = forked
        return result

    def drop(self, sequence: int, count: int) -> None:
        tokens = self.tokens(sequence)
        self.truncate(sequence, tokens[: len(tokens) - _checked(tokens, sequence, count, "drop")])

    def truncate(self, sequence: int, tokens: Sequence[int]) -> None:
        """Truncate a sequence to `tokens`, of which the cache has a prefix, or all and more."""
        super().drop(sequence, max(0, self._cache.length(sequence) - len(tokens)))
        self._tokens[sequence] = list(tokens)

    def remove(self, sequence: int) -> None:
        super().remove(sequence)
        del self._tokens[sequence]

    def length(self, sequence: int) -> int:
        return len(self._of(sequence))

    def tokens(self, sequence: int) -> list[int]:
        """Return a copy of the tokens of a sequence."""
        return self._of(sequence)[:]

    def uncached(self, sequence: int) -> Sequence[int]:
        return self._of(sequence)[self._cache.length(sequence) :]

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        self._of(sequence)[self._cache.length(sequence) :] = tokens

    def _of(self, sequence: int) -> list[int]:
        tokens = self._tokens.get(sequence)
        if tokens is None:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        return tokens


def _checked(tokens: Sequence[int], sequence: int, count: int, action: str) -> int:
    """Return a number of tokens. Raises InvalidArgumentError if a sequence has fewer."""
    if not isinstance(count, Integral) or not 0 <= count <= len(tokens):
        raise InvalidArgumentError(f"sequence {sequence} has {len(tokens)} tokens, not {count} to {action}")
    return int(count)
