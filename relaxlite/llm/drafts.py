"""Speculative decoding: draft tokens that the model verifies together in one step.

A step of several tokens reads the weights once, like a step of one token, so draft tokens cost little where decoding is
bound by memory bandwidth. The model chooses each token as it would without drafts, from the logits behind the tokens
before it; the first draft token that differs is dropped with all behind it. The generated text is the same up to the
rounding of sums (kernels for few rows may add in another order), also with sampling, as each token is drawn once, in
order. The rejection sampling of Leviathan et al. (arXiv 2211.17192) is for drafts that are distributions.
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

MAX_DRAFT_TOKENS = 16  # draft tokens in one step
ROW_COST = 0.25
"""The time of one more token in a step, in steps of one token, if all tokens use all weights
(docs/measurements/cpus.md, draft_row_cost)."""


class Drafter(Protocol):
    """Proposes draft tokens for one sequence."""

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        """Propose up to `most` tokens that may follow `tokens`, which extend the tokens of the previous call.

        `sequences`: the number of sequences in the step.
        """
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """Report the number of draft tokens of the last call, and of those before the first wrong one."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


def min_acceptance(cost: float, row_cost: float, sequences: int) -> float:
    """Return the least probability of acceptance at which a draft token saves time, in a step of several sequences.

    `cost`: of the draft token, `row_cost`: of one more sequence, both in steps of one token. An accepted token saves
    this sequence's share of another step.
    """
    return cost * sequences / (1 + row_cost * (sequences - 1))


class PromptLookup:
    """Prompt lookup (Yang et al., arXiv 2304.04487): drafts that repeat what followed the last tokens before.

    That suits quotations, names, code and lists. Of the earlier places of the last two tokens, the one with the longest
    match before it counts. The number of draft tokens follows from the recent rate of acceptance at matches of that
    length.
    """

    _MAX_PLACES = 16  # earlier occurrences that are compared
    _LENGTHS = (2, 4, 8)  # classes of matches: lower bounds of their lengths
    _EXPECTED = (0.4, 0.7, 0.9)  # prior rates of acceptance by class
    _WEIGHT = 2.0  # weight of the prior, in draft tokens
    _FADE = 0.9  # decay of the statistics with each proposal

    def __init__(self, row_cost: float = ROW_COST) -> None:
        self._row_cost = row_cost
        self._last_end: dict[tuple[int, int], int] = {}  # by pair of tokens: the index behind its last occurrence
        self._previous_end = array("q")  # by end of a pair: the end of its previous occurrence; 0: none
        self._accepted = [0.0] * len(self._LENGTHS)
        self._drafted = [0.0] * len(self._LENGTHS)
        self._class = 0

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        self._index(tokens)
        length, at = self._match(tokens)
        if not length:
            return []
        k = self._class = bisect_right(self._LENGTHS, length) - 1
        self._drafted[k] *= self._FADE
        self._accepted[k] *= self._FADE
        period = len(tokens) - at  # a draft that reaches the end of the text continues periodically
        count = self._count(k, min_acceptance(self._row_cost, self._row_cost, sequences))
        return [tokens[at + i % period] for i in range(min(most, count))]

    def learn(self, drafted: int, accepted: int) -> None:
        self._accepted[self._class] += accepted
        self._drafted[self._class] += min(accepted + 1, drafted)

    def close(self) -> None:
        pass

    def _index(self, tokens: Sequence[int]) -> None:
        """Record where each pair ends, except for the last one, which nothing follows yet."""
        for end in range(len(self._previous_end), len(tokens)):
            if end < 2:
                self._previous_end.append(0)
                continue
            pair = (tokens[end - 2], tokens[end - 1])
            self._previous_end.append(self._last_end.get(pair, 0))
            self._last_end[pair] = end

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the best match of the last tokens, and the index behind it."""
        best = (0, 0)
        at = self._last_end.get((tokens[-2], tokens[-1]), 0) if len(tokens) > 2 else 0
        for _ in range(self._MAX_PLACES):
            if not at:
                break
            length = 2
            while length < min(at, self._LENGTHS[-1]) and tokens[at - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best[0]:
                best = (length, at)
            at = self._previous_end[at]
        return best

    def _count(self, k: int, min_probability: float) -> int:
        """Return how many draft tokens are all accepted with a probability of at least `min_probability`."""
        rate = (self._accepted[k] + self._EXPECTED[k] * self._WEIGHT) / (self._drafted[k] + self._WEIGHT)
        return (
            0
            if min_probability >= 1
            else min(MAX_DRAFT_TOKENS, int(math.log(min_probability) / math.log(min(rate, 0.999))))
        )


class DraftModel:
    """Drafts the likeliest tokens of a smaller model while the probability of the whole draft is high enough.

    A text that exceeds the smaller model's context is truncated to its last tokens, half of that context. `step_cost`:
    the time of a step of the smaller model, in steps of the model.
    """

    def __init__(self, engine: Engine, step_cost: float, row_cost: float = ROW_COST) -> None:
        self._engine, self._step_cost, self._row_cost = engine, step_cost, row_cost
        self._sequence: int | None = engine.new()
        self._forgotten = 0  # tokens at the beginning of the text that the context lacks
        self._verified = 0  # tokens of the sequence that are no draft tokens
        self._draft: list[int] = []

    def propose(self, tokens: Sequence[int], most: int, sequences: int) -> list[int]:
        tokens = self._context_tokens(tokens)
        most = min(most, MAX_DRAFT_TOKENS, self._engine.context - len(tokens))
        min_chance = min_acceptance(self._row_cost + self._step_cost, self._row_cost, sequences)
        if self._sequence is None or most < 1 or min_chance >= 1:  # no draft token saves time, however likely
            return []
        self._accept(tokens)
        self._draft, chance = [], 1.0
        new_tokens = list(tokens[self._verified :])
        while len(self._draft) < most:
            try:
                (logits,) = self._engine.forward([(self._sequence, new_tokens)])
            except CacheFullError:
                self.close()
                return []
            token = int(np.argmax(logits[-1]))
            chance *= float(softmax(logits[-1].astype(np.float64))[token])
            if not chance > min_chance:  # or NaN: the verifying model may work nevertheless
                break
            self._draft.append(token)
            new_tokens = [token]
        self._verified = len(tokens)
        return self._draft

    def learn(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        if self._sequence is not None:
            self._engine.remove(self._sequence)
            self._sequence = None

    def _context_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the end of a text that leaves room in the context."""
        if len(tokens) - self._forgotten >= self._engine.context:
            self._forgotten = len(tokens) - self._engine.context // 2
            self._verified, self._draft = 0, []
        return tokens[self._forgotten :]

    def _accept(self, tokens: Sequence[int]) -> None:
        """Keep the draft tokens that were accepted, except for the last token, whose logits are needed."""
        assert self._sequence is not None
        while self._draft and self._verified < len(tokens) - 1 and tokens[self._verified] == self._draft.pop(0):
            self._verified += 1
        held = self._engine.length(self._sequence)
        self._verified = min(self._verified, held, len(tokens) - 1)
        self._engine.drop(self._sequence, held - self._verified)
