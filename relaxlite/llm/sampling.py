"""From logits to the next token, in NumPy.

The steps and their order are those of transformers: repetition penalty, then, where sampled, temperature, top-k, top-p,
min-p. A token that a step removes takes no part in the next ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_LIKELY = 1024  # tokens among which top-p usually finds all of its own, without sorting the vocabulary


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults take the likeliest one.

    temperature         divides the logits; 0: the likeliest token, whatever the filters below say
    top_k               only the k likeliest tokens (and their equals); 0: all
    top_p               only the likeliest tokens whose probabilities first sum to p (Holtzman et al., arXiv 1904.09751)
    min_p               only tokens at least p times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)
    repetition_penalty  divides positive logits of tokens that occurred, multiplies others (Keskar et al., 1909.05858)

    InvalidArgumentError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        numbers = {
            "temperature": _number("temperature", self.temperature, 0, math.inf),
            "top_p": _number("top_p", self.top_p, 0, 1, is_open=True),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0, math.inf, is_open=True),
        }
        if not isinstance(self.top_k, Integral) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise InvalidArgumentError(f"top_k must be a whole number from 0 (all tokens), got {self.top_k!r}")
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        object.__setattr__(self, "top_k", int(self.top_k))


def _number(name: str, value: object, low: float, high: float, *, is_open: bool = False) -> float:
    """Of a fraction or one of NumPy's numbers, too."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not low <= number <= high or (is_open and number == low) or math.isinf(number):
        limits = f"from {low}" + ("" if math.isinf(high) else f" to {high}") + (f", {low} excluded" if is_open else "")
        raise InvalidArgumentError(f"{name} must be a number {limits}, got {value!r}")
    return number


class Sampler:
    """Chooses the tokens of one sequence. Equal seeds, logits and tokens give equal choices."""

    def __init__(self, sampling: Sampling, seed: int | None = None) -> None:
        self.sampling, self._seed = sampling, seed

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made with the first draw: who takes the likeliest token needs neither NumPy's generators nor OpenSSL, which
        they bring along (5 MB)."""
        return np.random.default_rng(self._seed)

    def choose(self, logits: Array, tokens: Sequence[int], *, name: str = "the sequence") -> int:
        """The token behind `tokens`, by logits [vocab]. ExecutionError, which names the sequence, where those hold NaN
        or nothing finite."""
        how = self.sampling
        best = int(np.argmax(logits))  # NaN counts as the largest
        if not math.isfinite(logits[best]):
            bad = np.flatnonzero(~np.isfinite(logits))
            raise ExecutionError(
                f"{name}, position {len(tokens)}: the model computed logits that are no numbers, {bad.size} of "
                f"{logits.size}, the first for token {bad[0]}; are the weights damaged (load with verify=True, or "
                "`relaxlite inspect --verify`), or keys and values too large for a cache of float16 (cache_dtype)?"
            )
        scores = penalized(logits, tokens, how.repetition_penalty)
        if how.temperature == 0:
            return best if scores is logits else int(np.argmax(scores))
        places, probabilities = candidates(scores.astype(np.float64), how)
        sums = np.cumsum(probabilities)
        at = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(places[min(int(at), places.size - 1)])


def penalized(scores: Array, tokens: Sequence[int], penalty: float) -> Array:
    """Scores [vocab] with those of tokens that occurred made less likely (more, where penalty < 1)."""
    if penalty == 1.0 or not len(tokens):
        return scores
    scores = scores.copy()
    seen = np.unique(np.asarray(tokens))
    wide = scores[seen].astype(np.float64)
    most = float(np.finfo(scores.dtype).max)
    with np.errstate(over="ignore"):
        scores[seen] = np.clip(np.where(wide < 0, wide * penalty, wide / penalty), -most, most)
    return scores


def candidates(scores: Array, how: Sampling) -> tuple[Array, Array]:
    """The tokens that may come next, ascending, and their probabilities, which sum to 1. `how.temperature` > 0."""
    places = np.arange(scores.size)
    with np.errstate(over="ignore"):
        scores = (scores - scores.max()) / how.temperature  # the largest is 0: what overflows cannot come
    if 0 < how.top_k < scores.size:
        least = np.partition(scores, scores.size - how.top_k)[scores.size - how.top_k]
        places = np.flatnonzero(scores >= least)
    probabilities = softmax(scores[places])
    if how.top_p < 1.0:
        kept = _nucleus(probabilities, how.top_p)
        places, probabilities = places[kept], softmax(scores[places[kept]])
    if how.min_p > 0.0:
        kept = probabilities >= how.min_p * probabilities.max()
        places, probabilities = places[kept], softmax(scores[places[kept]])
    return places, probabilities


def _nucleus(probabilities: Array, p: float) -> Array:
    """Where the likeliest are, ascending, up to and with the one at which their sum reaches p."""
    ordered = np.sort(_likeliest(probabilities, p))[::-1]  # numbers alone: their places would take ten times as long
    before = np.cumsum(ordered) - ordered
    count = max(1, int(np.count_nonzero(before < p)))
    least = ordered[count - 1]
    above = np.flatnonzero(probabilities > least)
    equal = np.flatnonzero(probabilities == least)[: count - above.size]
    return np.sort(np.concatenate([above, equal]))


def _likeliest(probabilities: Array, p: float) -> Array:
    """The greatest of them, if these reach p, else all."""
    if probabilities.size > _LIKELY:
        found = np.partition(probabilities, probabilities.size - _LIKELY)[probabilities.size - _LIKELY :]
        if found.sum() >= p:
            return found
    return probabilities


def softmax(scores: Array) -> Array:
    """Probabilities of scores [n]."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def log_probability(logits: Array, token: int) -> float:
    """Of a token by the model itself: before penalty, temperature and filters."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[token] - largest - np.log(np.exp(wide - largest).sum()))
