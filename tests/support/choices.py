"""Where random things come from: Hypothesis, which shrinks what it drew, or a seed, which is fast."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Choices(Protocol):
    """One choice after the other."""

    def pick(self, options: Sequence[T]) -> T: ...

    def whole(self, low: int, high: int) -> int:
        """Both ends included."""

    def order(self, items: Sequence[T]) -> list[T]:
        """A permutation."""


class Drawn:
    """By Hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))  # type: ignore[no-any-return]

    def whole(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))  # type: ignore[no-any-return]

    def order(self, items: Sequence[T]) -> list[T]:
        return list(self._draw(st.permutations(items)))


class Rolled:
    """By a seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def whole(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def order(self, items: Sequence[T]) -> list[T]:
        return self.rng.sample(list(items), len(items))

    def chance(self, percent: int) -> bool:
        return self.rng.random() * 100 < percent
