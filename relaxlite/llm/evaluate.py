"""How well a language model predicts a text, and how close its predictions are to another's.

A model reads windows of `window` tokens, `stride` apart, each from its beginning; of its predictions those count that
no window before has made. So every token of the text but the first is predicted once, and behind the first window from
more than window - stride tokens. A small stride gives each more context, and costs more: what is reported depends on
both, so they stand in the result.

Predictions are made as those of a reply are: an engine may compute what only its cache needs of a prompt more coarsely
than the last tokens (`Engine.fills_coarsely`); then context is filled in, and some tokens at a time are predicted
behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.llm.engine import EXACT, Engine
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_LOGITS_AT_ONCE = 1 << 25  # float32 numbers, 128 MiB
_PREDICTED_AT_ONCE = 32
_WIDENED_AT_ONCE = 1 << 18  # of them to float64: several such arrays fit into memory that is used again


@dataclass(frozen=True, slots=True)
class Comparison:
    """With a reference, over the same predictions: the mean of KL(reference || model) in nats, the share of those with
    the same likeliest token, and the reference's perplexity."""

    kl_divergence: float
    kl_divergence_error: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`tokens` predictions counted; `loss` is their mean negative log-likelihood in nats, `loss_error` its standard
    error, `perplexity` its exponential."""

    tokens: int
    window: int
    stride: int
    loss: float
    loss_error: float
    perplexity: float
    accuracy: float  # share of tokens that were the likeliest
    comparison: Comparison | None = None


def evaluate(
    engine: Engine,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    prefix: Sequence[int] = (),
    against: Engine | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Predict `tokens` with an engine, and with another one to compare it `against`.

    `stride`: tokens between windows; None: as far apart as they are long. `prefix` begins each window (the token for
    the beginning of a text, where a model wants it) and counts as part of it; with it the text's first token is
    predicted too. `progress` is told how many more predictions are made. Raises InvalidArgumentError for fewer than two
    tokens, a window that does not fit, vocabularies that differ; ExecutionError for logits that are NaN.
    """
    stride = max(window - len(prefix), 1) if stride is None else stride
    _check(engine, tokens, window, stride, prefix, against)
    step = max(1, _LOGITS_AT_ONCE // engine.vocab)
    if engine.fills_coarsely or (against is not None and against.fills_coarsely):
        step = min(step, _PREDICTED_AT_ONCE)
    losses: list[Array] = []
    hits: list[Array] = []
    compared: list[_Compared] = []
    for context, scored in _windows(len(tokens), window - len(prefix), stride, has_prefix=bool(prefix)):
        before = [*prefix, *tokens[context.start : context.stop]]
        predicted = tokens[scored.start : scored.stop]
        parts = _log_probabilities(engine, before, predicted, step)
        others = None if against is None else _log_probabilities(against, before, predicted, step)
        for at, result in parts:
            wanted = np.asarray(predicted[at : at + len(result)])
            losses.append(-result[np.arange(len(result)), wanted])
            hits.append(result.argmax(axis=1) == wanted)
            if others is not None:
                compared.append(_compare(next(others)[1], result, wanted))
            progress(len(result))
    loss = np.concatenate(losses)
    mean, error = _mean(loss)
    comparison = _joined(compared) if compared else None
    accuracy = float(np.concatenate(hits).mean())
    return Evaluation(loss.size, window, stride, mean, error, _exp(mean), accuracy, comparison)


def count_predictions(tokens: int, prefix: int) -> int:
    """How many predictions `evaluate` counts."""
    return tokens if prefix else tokens - 1


def _check(
    engine: Engine, tokens: Sequence[int], window: int, stride: int, prefix: Sequence[int], against: Engine | None
) -> None:
    least = 1 + len(prefix)
    for one in (engine, against):
        if one is not None and not least <= window <= one.context:
            raise InvalidArgumentError(
                f"a window of {window} tokens; it must be from {least} to the context {one.context}"
            )
    if not 1 <= stride <= window - len(prefix):
        raise InvalidArgumentError(f"a stride of {stride} tokens; it must be from 1 to {window - len(prefix)}")
    if len(tokens) < 2:
        raise InvalidArgumentError(f"a text of {len(tokens)} tokens; at least 2 are needed")
    if against is not None and against.vocab != engine.vocab:
        raise InvalidArgumentError(f"vocabularies of {engine.vocab} and {against.vocab} tokens cannot be compared")


def _windows(count: int, window: int, stride: int, *, has_prefix: bool) -> Iterator[tuple[range, range]]:
    """For each window: the places that are only read, and those behind them that are predicted, of which the last is
    not read. Without a prefix the text's first token is only read."""
    done = 0 if has_prefix else 1
    begin = 0
    while done < count:
        end = min(begin + window + 1, count)
        yield range(begin, done), range(done, end)
        done = end
        begin += stride


def _log_probabilities(
    engine: Engine, before: Sequence[int], tokens: Sequence[int], step: int
) -> Iterator[tuple[int, Array]]:
    """Of every token of the vocabulary at each place of `tokens`, behind `before`, computed for `step` places at a time
    and given in parts of these: the first place, and float64 [places, vocab]."""
    given, first = [*before, *tokens[:-1]], len(before) - 1
    is_coarse = engine.fills_coarsely
    context = engine.new()  # of as many tokens as an engine fills in before it computes logits
    try:
        for at in range(first, len(given), step):
            filled = max(0, at + 1 - EXACT) if is_coarse else at
            if filled > engine.length(context):
                engine.fill(context, given[engine.length(context) : filled])
            sequence = engine.fork(context) if is_coarse else context
            try:
                part = given[filled : at + step]
                (logits,) = engine.forward([(sequence, part)], wanted=[len(part) - (at - filled)])
            finally:
                if is_coarse:
                    engine.remove(sequence)
            largest = logits.max(axis=1)  # NaN where one of them is
            if not np.isfinite(largest).all():
                read = at + int(np.argmin(np.isfinite(largest))) + 1
                raise ExecutionError(f"the logits behind token {read} of a window are not finite")
            size = max(1, _WIDENED_AT_ONCE // engine.vocab)
            for part_at in range(0, len(logits), size):
                rows = slice(part_at, part_at + size)
                shifted = logits[rows].astype(np.float64) - largest[rows, None]
                yield at - first + part_at, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    finally:
        engine.remove(context)


@dataclass(frozen=True, slots=True)
class _Compared:
    divergence: Array
    is_same: Array
    loss: Array  # of the reference


def _compare(reference: Array, model: Array, wanted: Array) -> _Compared:
    shares = np.exp(reference)
    ratios = np.where(shares > 0, reference - model, 0)  # a share of 0 counts nothing, whatever the ratio
    return _Compared(
        (shares * ratios).sum(axis=1),
        reference.argmax(axis=1) == model.argmax(axis=1),
        -reference[np.arange(len(reference)), wanted],
    )


def _joined(parts: Sequence[_Compared]) -> Comparison:
    divergence, error = _mean(np.concatenate([part.divergence for part in parts]))
    agreement = float(np.concatenate([part.is_same for part in parts]).mean())
    return Comparison(divergence, error, agreement, _exp(_mean(np.concatenate([p.loss for p in parts]))[0]))


def _mean(values: Array) -> tuple[float, float]:
    """And its standard error, which is unknown (infinite) for one value, or where a value is infinite."""
    mean = float(values.mean())
    if values.size < 2 or math.isinf(mean):
        return mean, math.inf
    return mean, float(values.std(ddof=1)) / math.sqrt(values.size)


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf  # as far as float64 reaches
