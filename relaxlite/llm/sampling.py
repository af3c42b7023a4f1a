"""Sampling: from logits to the next token, in NumPy.

The filters and their order are those of transformers: repetition penalty, suppressed tokens; then, if tokens are
sampled, temperature, top-k, top-p, min-p. A token that a filter removes is ignored by the next ones.

Few tokens of a vocabulary are likely, so nothing is sorted or converted to float64 before few tokens are left
(docs/measurements/llm.md).
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

_ROWS = 32  # of the matrix that a vocabulary is reshaped to, to find maxima of its columns
_FIRST_CANDIDATES = 64  # initial number of candidates of top-p
_CANDIDATES_GROWTH = 8  # growth of the number of candidates
_BLOCK = 512  # tokens per partial sum
_TEMPERATURES = 1e-6, 1e6  # range of temperatures for which float32 is precise enough


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of sampling. The defaults are greedy decoding.

    temperature         divides the logits; 0: greedy decoding, whatever the filters below are
    top_k               only the k likeliest tokens (and ties); 0: all
    top_p               only the likeliest tokens whose probabilities first sum to p (Holtzman et al., arXiv 1904.09751)
    min_p               only tokens at least p times as likely as the likeliest (Nguyen et al., arXiv 2407.01082)
    repetition_penalty  divides positive logits of tokens that occurred, multiplies others (Keskar et al., 1909.05858)
    suppress_tokens     tokens that are never chosen; tokens outside of the vocabulary are ignored

    Raises InvalidArgumentError for values out of range.
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


def _tokens(tokens: object) -> tuple[int, ...]:
    """Return token ids as a tuple without duplicates."""
    items = tuple(tokens) if isinstance(tokens, Iterable) and not isinstance(tokens, str) else (tokens,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) and int(token) >= 0 for token in items):
        raise InvalidArgumentError(f"suppress_tokens must be numbers of tokens, got {tokens!r}")
    return tuple(dict.fromkeys(int(token) for token in items))


def _number(name: str, value: object, low: float, high: float, *, is_open: bool = False) -> float:
    """Convert a real number (int, fraction, NumPy scalar) to float, and check its range."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not low <= number <= high or (is_open and number == low) or math.isinf(number):
        limits = f"from {low}" + ("" if math.isinf(high) else f" to {high}") + (f", {low} excluded" if is_open else "")
        raise InvalidArgumentError(f"{name} must be a number {limits}, got {value!r}")
    return number


class Sampler:
    """Chooses the tokens of one sequence, reproducibly for equal seeds, logits and tokens."""

    def __init__(self, sampling: Sampling, seed: int | None = None) -> None:
        self.sampling, self._seed = sampling, seed

    @cached_property
    def _random(self) -> np.random.Generator:
        """The generator, made lazily: greedy decoding needs neither NumPy's generators nor OpenSSL and their memory."""
        return np.random.default_rng(self._seed)

    def choose(self, logits: Array, tokens: Sequence[int], *, name: str = "the sequence") -> int:
        """Choose the token behind `tokens` by logits [vocab].

        Raises ExecutionError, which names the sequence, for NaN and for logits that are all infinite.
        """
        options = self.sampling
        best = int(np.argmax(logits))  # argmax takes NaN for the maximum
        if not math.isfinite(logits[best]):
            bad = np.flatnonzero(~np.isfinite(logits))
            raise ExecutionError(
                f"{name}, position {len(tokens)}: the model computed logits that are no numbers, {bad.size} of "
                f"{logits.size}, the first for token {bad[0]}; are the weights damaged (load with verify=True, or "
                "`relaxlite inspect --verify`), or keys and values too large for a cache of float16 (cache_dtype)?"
            )
        scores = mask_tokens(
            apply_repetition_penalty(logits, tokens, options.repetition_penalty), options.suppress_tokens
        )
        if options.temperature == 0:
            return best if scores is logits else _likeliest(scores, name)
        if options.suppress_tokens:
            _likeliest(scores, name)
        indices, weights = candidates(scores, options)
        at = draw_index(weights, self._random.random())
        return at if indices is None else int(indices[at])


def apply_repetition_penalty(scores: Array, tokens: Sequence[int], penalty: float) -> Array:
    """Apply the repetition penalty to scores [vocab]; a penalty below 1 makes repetition likelier."""
    if penalty == 1.0 or not len(tokens):
        return scores
    scores = scores.copy()
    seen = np.unique(np.asarray(tokens))
    seen_scores = scores[seen].astype(np.float64)
    max_score = float(np.finfo(scores.dtype).max)
    with np.errstate(over="ignore"):
        scores[seen] = np.clip(
            np.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty), -max_score, max_score
        )
    return scores


def mask_tokens(scores: Array, tokens: Sequence[int]) -> Array:
    """Set the scores [vocab] of some tokens to -inf."""
    known = [token for token in tokens if token < scores.size]
    if not known:
        return scores
    scores = scores.copy()
    scores[known] = -np.inf
    return scores


def _likeliest(scores: Array, name: str) -> int:
    """Return the token of highest score. Raises ExecutionError if all scores are -inf."""
    result = int(np.argmax(scores))
    if scores[result] == -np.inf:
        raise ExecutionError(f"{name}: suppress_tokens leave no token that could come next")
    return result


def candidates(scores: Array, how: Sampling) -> tuple[Array | None, Array]:
    """Apply top-k, top-p and min-p to scores [vocab], with how.temperature > 0.

    Return the remaining tokens, ascending (None: all), and their probabilities relative to the likeliest token.
    """
    indices: Array | None = None
    if 0 < how.top_k < scores.size:
        top = _largest(scores, how.top_k)
        top_scores = scores[top]
        indices = top[top_scores >= np.partition(top_scores, top_scores.size - how.top_k)[top_scores.size - how.top_k]]
        scores = scores[indices].astype(np.float64)
    weights = _weights(scores, how.temperature)
    if how.top_p < 1.0:
        selected = _nucleus(weights, how.top_p)
        indices, scores = selected if indices is None else indices[selected], scores[selected].astype(np.float64)
        weights = _weights(scores, how.temperature)
    if how.min_p > 0.0:
        selected = np.flatnonzero(weights >= how.min_p * (1 - 1e-5))  # with a margin for the rounding of float32
        exact = _weights(scores[selected].astype(np.float64), how.temperature)
        are_likely = exact >= how.min_p
        selected, weights = selected[are_likely], exact[are_likely]
        indices = selected if indices is None else indices[selected]
    return indices, weights


def _weights(scores: Array, temperature: float) -> Array:
    """Return probabilities relative to the highest score's, which is 1."""
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
        scores = scores.astype(np.float64)
    with np.errstate(over="ignore"):
        array: Array = np.exp((scores - scores.max()) / temperature)  # an overflow is -inf, of probability 0
    return array


def _largest(numbers: Array, count: int) -> Array:
    """Return the ascending indices of at least the `count` largest numbers, with all ties.

    The threshold is the `count`-th largest column maximum of a matrix of the numbers, which at least `count` numbers
    reach.
    """
    columns = numbers.size // _ROWS
    if count >= columns:
        return np.arange(numbers.size)
    maxima = numbers[: _ROWS * columns].reshape(_ROWS, columns).max(axis=0)
    return np.flatnonzero(numbers >= np.partition(maxima, columns - count)[columns - count])


def _nucleus(weights: Array, p: float) -> Array:
    """Return the ascending indices of the likeliest tokens whose weights first sum to p of the total."""
    wanted, count = p * float(_sums(weights)[-1]), _FIRST_CANDIDATES
    while True:
        top = _largest(weights, count)
        top_weights = weights[top].astype(np.float64)
        if top.size == weights.size or top_weights.sum() >= wanted:
            break
        count *= _CANDIDATES_GROWTH
    ordered = np.sort(top_weights)[::-1]
    preceding = np.cumsum(ordered) - ordered
    kept_count = max(1, int(np.count_nonzero(preceding < wanted)))
    min_weight = ordered[kept_count - 1]
    above = np.flatnonzero(top_weights > min_weight)
    equal = np.flatnonzero(top_weights == min_weight)[: kept_count - above.size]
    return np.asarray(top[np.sort(np.concatenate([above, equal]))])


def _sums(weights: Array) -> Array:
    """Return cumulative sums of weights at the end of each block, and of the rest, float64."""
    blocks = weights.size // _BLOCK
    block_sums = weights[: blocks * _BLOCK].reshape(blocks, _BLOCK).sum(axis=1)
    return np.cumsum(np.append(block_sums, weights[blocks * _BLOCK :].sum()), dtype=np.float64)


def draw_index(weights: Array, number: float) -> int:
    """Return the index whose interval contains `number` from [0, 1), intervals being proportional to weights."""
    sums = _sums(weights)
    wanted = number * sums[-1]
    block = min(int(np.searchsorted(sums, wanted, side="right")), len(sums) - 1)
    block_weights = weights[block * _BLOCK : (block + 1) * _BLOCK]
    inside = max(wanted - sums[block - 1] if block else wanted, 0.0)
    at = int(np.searchsorted(np.cumsum(block_weights, dtype=np.float64), inside, side="right"))
    if at == block_weights.size:  # the sums of blocks round differently
        at = int(np.flatnonzero(block_weights)[-1])
    return block * _BLOCK + at


def softmax(scores: Array) -> Array:
    """Return the probabilities of scores [n]."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def log_probability(logits: Array, token: int) -> float:
    """Return the model's log probability of a token, before penalty, temperature and filters."""
    scores = logits.astype(np.float64)
    largest = scores.max()
    return float(scores[token] - largest - np.log(np.exp(scores - largest).sum()))
