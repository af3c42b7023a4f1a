"""From logits to the next token, in NumPy.

The steps and their order are those of transformers: repetition penalty, tokens that must not come, then, where sampled,
temperature, top-k, top-p, min-p. A token that a step removes takes no part in the next ones.

A vocabulary is large beside what is likely in it, so nothing is sorted or widened to float64 before few tokens are
left: 49,152 logits take 0.06 to 0.1 ms so, and 0.5 to 1 ms otherwise, where SmolLM2-135M takes 3 ms for a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_ROWS = 32  # of a vocabulary as a matrix, whose columns each have a largest number
_LIKELY = 64  # tokens among which top-p looks for all of its own at first
_MORE = 8  # times as many it looks at then
_BLOCK = 512  # tokens whose probabilities are summed up together
_TEMPERATURES = 1e-6, 1e6  # between which float32 divides well by them


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults take the likeliest one.

    temperature         divides the logits; 0: the likeliest token, whatever the filters below say
    top_k               only the k likeliest tokens (and their equals); 0: all
    top_p               only the likeliest tokens whose probabilities first sum to p (Holtzman et al., arXiv 1904.09751)
    min_p               only tokens at least p times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)
    repetition_penalty  divides positive logits of tokens that occurred, multiplies others (Keskar et al., 1909.05858)
    suppress_tokens     that never come; those that the vocabulary does not have are none

    InvalidArgumentError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()

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
        object.__setattr__(self, "suppress_tokens", _tokens(self.suppress_tokens))


def _tokens(given: object) -> tuple[int, ...]:
    result = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) and int(token) >= 0 for token in result):
        raise InvalidArgumentError(f"suppress_tokens must be numbers of tokens, got {given!r}")
    return tuple(dict.fromkeys(int(token) for token in result))


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
        scores = without(penalized(logits, tokens, how.repetition_penalty), how.suppress_tokens)
        if how.temperature == 0:
            return best if scores is logits else _likeliest(scores, name)
        if how.suppress_tokens:
            _likeliest(scores, name)
        places, weights = candidates(scores, how)
        at = drawn(weights, self._random.random())
        return at if places is None else int(places[at])


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


def without(scores: Array, tokens: Sequence[int]) -> Array:
    """Scores [vocab] of which those of some tokens are -inf."""
    known = [token for token in tokens if token < scores.size]
    if not known:
        return scores
    scores = scores.copy()
    scores[known] = -np.inf
    return scores


def _likeliest(scores: Array, name: str) -> int:
    result = int(np.argmax(scores))
    if scores[result] == -np.inf:
        raise ExecutionError(f"{name}: suppress_tokens leave no token that could come next")
    return result


def candidates(scores: Array, how: Sampling) -> tuple[Array | None, Array]:
    """The tokens that may come next, ascending (None: all), and how likely each is beside the likeliest, which is 1.
    `how.temperature` > 0."""
    places: Array | None = None
    if 0 < how.top_k < scores.size:
        upper = _largest(scores, how.top_k)
        some = scores[upper]
        places = upper[some >= np.partition(some, some.size - how.top_k)[some.size - how.top_k]]
        scores = scores[places].astype(np.float64)
    weights = _weights(scores, how.temperature)
    if how.top_p < 1.0:
        kept = _nucleus(weights, how.top_p)
        places, scores = kept if places is None else places[kept], scores[kept].astype(np.float64)
        weights = _weights(scores, how.temperature)
    if how.min_p > 0.0:
        kept = np.flatnonzero(weights >= how.min_p * (1 - 1e-5))  # some more, as float32 rounds
        exact = _weights(scores[kept].astype(np.float64), how.temperature)
        are_likely = exact >= how.min_p
        kept, weights = kept[are_likely], exact[are_likely]
        places = kept if places is None else places[kept]
    return places, weights


def _weights(scores: Array, temperature: float) -> Array:
    """1 for the largest."""
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
        scores = scores.astype(np.float64)
    with np.errstate(over="ignore"):
        array: Array = np.exp((scores - scores.max()) / temperature)  # what overflows cannot come
    return array


def _largest(numbers: Array, count: int) -> Array:
    """Where the largest of some numbers are, ascending, at least `count`, with all their equals: so many columns of a
    matrix of all of them have a number no smaller than the least of theirs."""
    columns = numbers.size // _ROWS
    if count >= columns:
        return np.arange(numbers.size)
    maxima = numbers[: _ROWS * columns].reshape(_ROWS, columns).max(axis=0)
    return np.flatnonzero(numbers >= np.partition(maxima, columns - count)[columns - count])


def _nucleus(weights: Array, p: float) -> Array:
    """Where the likeliest are, ascending, up to and with the one at which their sum reaches p of all."""
    wanted, count = p * float(_sums(weights)[-1]), _LIKELY
    while True:
        upper = _largest(weights, count)
        some = weights[upper].astype(np.float64)
        if upper.size == weights.size or some.sum() >= wanted:
            break
        count *= _MORE
    ordered = np.sort(some)[::-1]
    before = np.cumsum(ordered) - ordered
    kept = max(1, int(np.count_nonzero(before < wanted)))
    least = ordered[kept - 1]
    above = np.flatnonzero(some > least)
    equal = np.flatnonzero(some == least)[: kept - above.size]
    return np.asarray(upper[np.sort(np.concatenate([above, equal]))])


def _sums(weights: Array) -> Array:
    """Of all weights up to the end of each block, and of those behind the last one, float64."""
    blocks = weights.size // _BLOCK
    whole = weights[: blocks * _BLOCK].reshape(blocks, _BLOCK).sum(axis=1)
    return np.cumsum(np.append(whole, weights[blocks * _BLOCK :].sum()), dtype=np.float64)


def drawn(weights: Array, number: float) -> int:
    """The place that a number from 0 to 1 (excluded) falls on, each place being as wide as its weight."""
    sums = _sums(weights)
    wanted = number * sums[-1]
    block = min(int(np.searchsorted(sums, wanted, side="right")), len(sums) - 1)
    some = weights[block * _BLOCK : (block + 1) * _BLOCK]
    inside = max(wanted - sums[block - 1] if block else wanted, 0.0)
    at = int(np.searchsorted(np.cumsum(some, dtype=np.float64), inside, side="right"))
    if at == some.size:  # sums of blocks round otherwise
        at = int(np.flatnonzero(some)[-1])
    return block * _BLOCK + at


def softmax(scores: Array) -> Array:
    """Probabilities of scores [n]."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def log_probability(logits: Array, token: int) -> float:
    """Of a token by the model itself: before penalty, temperature and filters."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[token] - largest - np.log(np.exp(wide - largest).sum()))
