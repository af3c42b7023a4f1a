"""Guesses of how a sequence goes on, which one step of the model checks together (speculative decoding).

A step of several tokens reads the weights once, as one of a single token does, so that guesses cost little where
reading is what takes the time. The model chooses each token as it would have without them, from the logits behind the
tokens before it: a guess that is not chosen is dropped with all that follow it. What is generated stays the same (up to
the rounding of sums, where kernels for few rows add in another order), also where tokens are sampled, for each is drawn
once, in order; the rejections of Leviathan et al. (arXiv 2211.17192) are for guesses that are distributions.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from relaxlite.errors import CacheFullError
from relaxlite.llm.engine import Engine
from relaxlite.llm.sampling import softmax

MAX = 16  # guesses in one step
ROW_COST = 0.25
"""Of one more token in a step, in steps of one token, where all tokens use all weights (docs/measurements/cpus.md,
draft_row_cost)."""


class Drafter(Protocol):
    """Makes guesses for one sequence."""

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, which go on from those of the last call, where it is one of
        some sequences in a step."""
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """How many of the last guesses there were, and were right before the first wrong one."""
        ...

    def close(self) -> None: ...


def worth(cost: float, row_cost: float, sequences: int) -> float:
    """How likely to be right a guess must be to pay, for one of some sequences. `cost`: of the guess, `row_cost`: of
    another sequence, in steps of one. A guess saves one of so many tokens of another step."""
    return cost * sequences / (1 + row_cost * (sequences - 1))


class Lookup:
    """Guesses that what followed the last tokens before follows them again ("prompt lookup"; Yang et al., arXiv
    2304.04487): quotations, names, code, lists.

    Of the last places where the last two tokens stood, the one counts before which most tokens are the same. How many
    tokens are guessed follows from how often guesses behind so long a match were right of late.
    """

    _PLACES = 16  # that are looked at
    _LENGTHS = (2, 4, 8)  # of matches: from each to the next they are one class
    _EXPECTED = (0.4, 0.7, 0.9)  # shares of guesses that are right, before any were seen
    _WEIGHT = 2.0  # of these, in guesses
    _FADE = 0.9  # of what was seen, with each look

    def __init__(self, row_cost: float = ROW_COST) -> None:
        self._row_cost = row_cost
        self._last: dict[tuple[int, int], int] = {}  # where a pair of tokens ended last
        self._before = array("q")  # where the pair that ends there ended before; 0: nowhere
        self._right = [0.0] * len(self._LENGTHS)
        self._seen = [0.0] * len(self._LENGTHS)
        self._class = 0

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        self._index(tokens)
        length, at = self._match(tokens)
        if not length:
            return []
        k = self._class = bisect_right(self._LENGTHS, length) - 1
        self._seen[k] *= self._FADE
        self._right[k] *= self._FADE
        period = len(tokens) - at  # guesses that reach the end of the text repeat themselves
        count = self._count(k, worth(self._row_cost, self._row_cost, sequences))
        return [tokens[at + i % period] for i in range(min(most, count))]

    def learn(self, drafted: int, accepted: int) -> None:
        self._right[self._class] += accepted
        self._seen[self._class] += min(accepted + 1, drafted)

    def close(self) -> None:
        pass

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each pair ends, except for the last one, behind which nothing stands yet."""
        for end in range(len(self._before), len(tokens)):
            if end < 2:
                self._before.append(0)
                continue
            pair = (tokens[end - 2], tokens[end - 1])
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = end

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many of the last tokens stood before some place, and that place."""
        best = (0, 0)
        at = self._last.get((tokens[-2], tokens[-1]), 0) if len(tokens) > 2 else 0
        for _ in range(self._PLACES):
            if not at:
                break
            length = 2
            while length < min(at, self._LENGTHS[-1]) and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best[0]:
                best = (length, at)
            at = self._before[at]
        return best

    def _count(self, k: int, least: float) -> int:
        """How many guesses are so likely to be right, each with all before it."""
        share = (self._right[k] + self._EXPECTED[k] * self._WEIGHT) / (self._seen[k] + self._WEIGHT)
        return 0 if least >= 1 else min(MAX, int(math.log(least) / math.log(min(share, 0.999))))


class DraftModel:
    """Guesses the likeliest tokens of a smaller model, as long as that is sure enough of all of them together.

    A text that outgrows the smaller model's context is forgotten but for as much as half of that holds.
    `step_cost`: of a step of its own, in steps of the model.
    """

    def __init__(self, engine: Engine, step_cost: float, row_cost: float = ROW_COST) -> None:
        self._engine, self._step_cost, self._row_cost = engine, step_cost, row_cost
        self._sequence: int | None = engine.new()
        self._first = 0  # tokens of the text that are forgotten
        self._sure = 0  # tokens of the sequence that are no guesses
        self._guesses: list[int] = []

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        tokens = self._remembered(tokens)
        most = min(most, MAX, self._engine.context - len(tokens))
        least = worth(self._row_cost + self._step_cost, self._row_cost, sequences)
        if self._sequence is None or most < 1 or least >= 1:  # then no guess pays, however sure
            return []
        self._catch_up(tokens)
        self._guesses, chance = [], 1.0
        given = list(tokens[self._sure :])
        while len(self._guesses) < most:
            try:
                (logits,) = self._engine.forward([(self._sequence, given)])
            except CacheFullError:
                self.close()
                return []
            guess = int(np.argmax(logits[-1]))
            chance *= float(softmax(logits[-1].astype(np.float64))[guess])
            if not chance > least:  # or NaN: the other model may be sound
                break
            self._guesses.append(guess)
            given = [guess]
        self._sure = len(tokens)
        return self._guesses

    def learn(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        if self._sequence is not None:
            self._engine.remove(self._sequence)
            self._sequence = None

    def _remembered(self, tokens: Sequence[int]) -> Sequence[int]:
        """The end of a text that leaves room in the context."""
        if len(tokens) - self._first >= self._engine.context:
            self._first = len(tokens) - self._engine.context // 2
            self._sure, self._guesses = 0, []
        return tokens[self._first :]

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Keep the guesses that came true, but for the last token, whose logits are wanted."""
        assert self._sequence is not None
        while self._guesses and self._sure < len(tokens) - 1 and tokens[self._sure] == self._guesses.pop(0):
            self._sure += 1
        held = self._engine.length(self._sequence)
        self._sure = min(self._sure, held, len(tokens) - 1)
        self._engine.drop(self._sequence, held - self._sure)
