"""Perplexity of a language model on a text, and KL divergence from another model.

A model reads windows of `window` tokens, `stride` apart, each from its beginning; those of its predictions
count that no earlier window has made. Every token of the text but the first is predicted once, with a
context of more than window - stride tokens (except in the first window). A small stride gives more context
and costs more time. Results depend on both, so `Evaluation` records them.

Predictions are made as in generation. If prefill is of lower precision than the last tokens
(`Engine.has_relaxed_fill`), the context is filled, and few tokens at a time are predicted behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ExecutionError, InvalidArgumentError
from relaxlite.llm.engine import EXACT_TOKENS, Engine
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

_LOGITS_AT_ONCE = 1 << 25  # float32 numbers, 128 MiB
_PREDICTED_AT_ONCE = 32
_WIDENED_AT_ONCE = 1 << 18  # logits converted to float64 at once, so that temporaries reuse memory


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison with a reference model over the same predictions.

    `kl_divergence`: mean of KL(reference || model) in nats, with its standard error. `top1_agreement`: share of
    predictions with the same likeliest token. `perplexity`: of the reference.
    """

    kl_divergence: float
    kl_divergence_error: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of `evaluate` over `tokens` predictions.

    `loss`: mean negative log-likelihood in nats, with its standard error `loss_error`; `perplexity`: exp(loss).
    """

    tokens: int
    window: int
    stride: int
    loss: float
    loss_error: float
    perplexity: float
    accuracy: float  # share of tokens that were predicted as the likeliest
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
    """Evaluate an engine on `tokens`, and compare it with the engine `against`, the reference.

    `stride`: tokens between windows, None for adjacent windows. `prefix` precedes each window (a BOS token) and counts
    as part of it; with a prefix the text's first token is predicted too. `progress` is called with the number of new
    predictions. Raises InvalidArgumentError for fewer than two tokens, a window that does not fit, and vocabularies
    that differ; ExecutionError for logits that are not finite.
    """
    stride = max(window - len(prefix), 1) if stride is None else stride
    _check(engine, tokens, window, stride, prefix, against)
    step = max(1, _LOGITS_AT_ONCE // engine.vocab)
    if engine.has_relaxed_fill or (against is not None and against.has_relaxed_fill):
        step = min(step, _PREDICTED_AT_ONCE)
    losses: list[Array] = []
    hits: list[Array] = []
    compared: list[_Compared] = []
    for context, scored in _windows(len(tokens), window - len(prefix), stride, has_prefix=bool(prefix)):
        context_tokens = [*prefix, *tokens[context.start : context.stop]]
        predicted = tokens[scored.start : scored.stop]
        parts = _log_probabilities(engine, context_tokens, predicted, step)
        reference_parts = None if against is None else _log_probabilities(against, context_tokens, predicted, step)
        for at, result in parts:
            wanted = np.asarray(predicted[at : at + len(result)])
            losses.append(-result[np.arange(len(result)), wanted])
            hits.append(result.argmax(axis=1) == wanted)
            if reference_parts is not None:
                compared.append(_compare(next(reference_parts)[1], result, wanted))
            progress(len(result))
    loss = np.concatenate(losses)
    mean, error = _mean(loss)
    comparison = _comparison(compared) if compared else None
    accuracy = float(np.concatenate(hits).mean())
    return Evaluation(loss.size, window, stride, mean, error, _exp(mean), accuracy, comparison)


def count_predictions(tokens: int, prefix: int) -> int:
    """Return the number of predictions that `evaluate` makes for a text."""
    return tokens if prefix else tokens - 1


def _check(
    engine: Engine, tokens: Sequence[int], window: int, stride: int, prefix: Sequence[int], against: Engine | None
) -> None:
    """Raise InvalidArgumentError for invalid arguments of `evaluate`."""
    min_window = 1 + len(prefix)
    for model in (engine, against):
        if model is not None and not min_window <= window <= model.context:
            raise InvalidArgumentError(
                f"a window of {window} tokens; it must be from {min_window} to the context {model.context}"
            )
    if not 1 <= stride <= window - len(prefix):
        raise InvalidArgumentError(f"a stride of {stride} tokens; it must be from 1 to {window - len(prefix)}")
    if len(tokens) < 2:
        raise InvalidArgumentError(f"a text of {len(tokens)} tokens; at least 2 are needed")
    if against is not None and against.vocab != engine.vocab:
        raise InvalidArgumentError(f"vocabularies of {engine.vocab} and {against.vocab} tokens cannot be compared")


def _windows(count: int, window: int, stride: int, *, has_prefix: bool) -> Iterator[tuple[range, range]]:
    """Yield the context and the predicted range of each window.

    The last predicted token is not read. Without a prefix the text's first token is context only.
    """
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
    """Yield log probabilities of `tokens` behind `before`, float64 [places, vocab], and the index of their first place.

    Logits are computed for `step` places at a time, and yielded in smaller parts.
    """
    inputs, first = [*before, *tokens[:-1]], len(before) - 1
    is_relaxed = engine.has_relaxed_fill
    context = engine.new()  # the sequence of the tokens that are filled before logits are computed
    try:
        for at in range(first, len(inputs), step):
            filled = max(0, at + 1 - EXACT_TOKENS) if is_relaxed else at
            if filled > engine.length(context):
                engine.fill(context, inputs[engine.length(context) : filled])
            sequence = engine.fork(context) if is_relaxed else context
            try:
                new_tokens = inputs[filled : at + step]
                (logits,) = engine.forward([(sequence, new_tokens)], wanted=[len(new_tokens) - (at - filled)])
            finally:
                if is_relaxed:
                    engine.remove(sequence)
            largest = logits.max(axis=1)  # NaN propagates
            if not np.isfinite(largest).all():
                position = at + int(np.argmin(np.isfinite(largest))) + 1
                raise ExecutionError(f"the logits behind token {position} of a window are not finite")
            size = max(1, _WIDENED_AT_ONCE // engine.vocab)
            for part_at in range(0, len(logits), size):
                rows = slice(part_at, part_at + size)
                shifted = logits[rows].astype(np.float64) - largest[rows, None]
                yield at - first + part_at, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    finally:
        engine.remove(context)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Comparison of the predictions of a part of the text."""

    divergence: Array
    is_same: Array
    loss: Array  # of the reference


def _compare(reference: Array, model: Array, wanted: Array) -> _Compared:
    probabilities = np.exp(reference)
    ratios = np.where(probabilities > 0, reference - model, 0)  # a probability of 0 contributes nothing
    return _Compared(
        (probabilities * ratios).sum(axis=1),
        reference.argmax(axis=1) == model.argmax(axis=1),
        -reference[np.arange(len(reference)), wanted],
    )


def _comparison(parts: Sequence[_Compared]) -> Comparison:
    divergence, error = _mean(np.concatenate([part.divergence for part in parts]))
    agreement = float(np.concatenate([part.is_same for part in parts]).mean())
    return Comparison(divergence, error, agreement, _exp(_mean(np.concatenate([p.loss for p in parts]))[0]))


def _mean(values: Array) -> tuple[float, float]:
    """Return the mean and its standard error, which is infinite for one value, or if a value is infinite."""
    mean = float(values.mean())
    if values.size < 2 or math.isinf(mean):
        return mean, math.inf
    return mean, float(values.std(ddof=1)) / math.sqrt(values.size)


def _exp(value: float) -> float:
    """Return exp(value), infinity beyond the range of float64."""
    return math.exp(value) if value < 709 else math.inf  # as far as float64 reaches
