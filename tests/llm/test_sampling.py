"""Sampling against straightforward references, and against transformers where that is installed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import ExecutionError
from relaxlite.llm.sampling import Sampler, Sampling, apply_repetition_penalty, candidates, draw_index, log_probability

CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.95},
    {"temperature": 0.5, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-6, "top_k": 3},
]


def reference(scores: np.ndarray[Any, Any], how: Sampling) -> np.ndarray[Any, Any]:
    """Probabilities [vocab], one filter after the other over the whole vocabulary, by loops."""
    weights = np.exp((scores - scores.max()) / how.temperature)
    order = sorted(range(scores.size), key=lambda k: (-scores[k], k))
    if how.top_k:
        least = scores[order[: how.top_k][-1]]
        weights = np.where(scores >= least, weights, 0)
    if how.top_p < 1:
        total, kept = 0.0, []
        for k in order:
            if kept and total >= how.top_p * weights.sum():
                break
            kept.append(k)
            total += weights[k]
        weights = np.where(np.isin(np.arange(scores.size), kept), weights, 0)
    if how.min_p:
        weights = np.where(weights >= how.min_p * weights.max(), weights, 0)
    return weights / weights.sum()


def spread(scores: np.ndarray[Any, Any], how: Sampling) -> np.ndarray[Any, Any]:
    places, weights = candidates(scores, how)
    assert weights.max() == 1
    found = np.zeros(scores.size)
    found[slice(None) if places is None else places] = weights / weights.sum()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 300, 5000])
def test_filters_are_those_of_the_reference(case: dict[str, Any], vocab: int) -> None:
    how = Sampling(**case)
    for seed in range(3):
        scores = np.random.default_rng(seed).normal(0, 3, vocab)
        np.testing.assert_allclose(spread(scores, how), reference(scores, how), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_filters_are_those_of_transformers(case: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(1)
    scores, tokens = rng.normal(0, 3, 500), [3, 5, 5, 499]
    steps = [process.RepetitionPenaltyLogitsProcessor(1.3), process.TemperatureLogitsWarper(case["temperature"])]
    if "top_k" in case:
        steps.append(process.TopKLogitsWarper(case["top_k"]))
    if "top_p" in case:
        steps.append(process.TopPLogitsWarper(case["top_p"]))
    if "min_p" in case:
        steps.append(process.MinPLogitsWarper(case["min_p"]))
    wanted = torch.tensor(scores)[None]
    for step in steps:
        wanted = step(torch.tensor(tokens)[None], wanted)
    found = spread(apply_repetition_penalty(scores, tokens, 1.3), Sampling(**case))
    np.testing.assert_allclose(found, torch.softmax(wanted, -1)[0].numpy(), rtol=1e-9, atol=1e-300)


def test_settings_may_be_numbers_of_any_kind() -> None:
    how = Sampling(np.float32(0.5), np.uint8(5), Fraction(1, 2), 0, 1)  # type: ignore[arg-type]
    scores = np.random.default_rng(0).normal(0, 3, 300)
    np.testing.assert_array_equal(spread(scores, how), spread(scores, Sampling(0.5, 5, 0.5, 0.0, 1.0)))


def test_of_equals_at_the_edge_of_top_p_the_first_stay() -> None:
    for size in (10, 3000):
        scores = np.zeros(size)
        scores[7] = -1.0
        found = np.flatnonzero(spread(scores, Sampling(1.0, top_p=0.5)))
        np.testing.assert_array_equal(found, np.flatnonzero(reference(scores, Sampling(1.0, top_p=0.5))))


def test_equals_at_the_edge_of_top_k_stay() -> None:
    found = spread(np.array([1.0, 2.0, 1.0, 0.0, 1.0]), Sampling(temperature=1.0, top_k=2))
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 4]


def test_logits_of_minus_infinity_are_never_chosen() -> None:
    scores = np.full(10, -np.inf)
    scores[[2, 7]] = 1.0
    choose = Sampler(Sampling(temperature=5.0), seed=0).choose
    assert {choose(scores, []) for _ in range(50)} == {2, 7}


def test_penalties_push_away_what_occurred_on_both_sides_of_zero() -> None:
    scores = np.array([2.0, -2.0, 1.0, -1.0])
    assert apply_repetition_penalty(scores, [0, 1, 1], 2.0).tolist() == [1.0, -4.0, 1.0, -1.0]
    assert apply_repetition_penalty(scores, [0, 1], 0.5).tolist() == [4.0, -1.0, 1.0, -1.0]
    assert scores.tolist() == [2.0, -2.0, 1.0, -1.0]


@pytest.mark.parametrize("how", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"repetition_penalty": 1e-38}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_never_come(how: dict[str, Any], temperature: float) -> None:
    """Also where their logits are the largest, and a penalty bounds them; the logits stay as they are."""
    scores = np.array([3.0, 9.0, 2.0, 8.0], np.float32)
    sampler = Sampler(Sampling(temperature=temperature, suppress_tokens=(1, 3, 99), **how), seed=0)
    assert {sampler.choose(scores, [1, 3]) for _ in range(50)} <= {0, 2}
    assert scores.tolist() == [3.0, 9.0, 2.0, 8.0]
    with pytest.raises(ExecutionError, match="the sequence: suppress_tokens leave no token that could come next"):
        Sampler(Sampling(temperature=temperature, suppress_tokens=range(4), **how), seed=0).choose(scores, [])


def test_temperature_zero_takes_the_likeliest_whatever_the_seed() -> None:
    scores = np.random.default_rng(0).normal(0, 1, 50).astype(np.float32)
    for seed in (None, 0, 1):
        assert Sampler(Sampling(top_k=3, top_p=0.1), seed).choose(scores, []) == int(scores.argmax())
    assert Sampler(Sampling(repetition_penalty=100.0)).choose(scores, [int(scores.argmax())]) != int(scores.argmax())


def test_equal_seeds_choose_equally() -> None:
    scores, how = np.zeros(1000, np.float32), Sampling(temperature=1.0)
    first, second, other = (
        [sampler.choose(scores, []) for _ in range(20)] for sampler in (Sampler(how, 4), Sampler(how, 4), Sampler(how))
    )
    assert first == second != other


def test_tokens_come_as_often_as_they_are_likely() -> None:
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    sampler = Sampler(Sampling(temperature=1.0), seed=0)
    counts = np.bincount([sampler.choose(scores, []) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.1, 0.2, 0.3, 0.4], atol=0.03)


def test_log_probabilities_do_not_overflow() -> None:
    logits = np.array([1000.0, 1000.0, -1000.0], np.float32)
    assert log_probability(logits, 0) == pytest.approx(np.log(0.5))
    assert log_probability(logits, 2) == pytest.approx(-2000 - np.log(2))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab", [300, 40_000])
@pytest.mark.parametrize("spread_by", [0.01, 3.0])
def test_logits_in_float32_are_filtered_as_in_float64(case: dict[str, Any], vocab: int, spread_by: float) -> None:
    how = Sampling(**case)
    scores = np.random.default_rng(2).normal(0, spread_by, vocab).astype(np.float32)
    found, wanted = spread(scores, how), spread(scores.astype(np.float64), how)
    edge = 2e-6 / vocab if "top_p" in case else 0  # one more or less, where sums in float32 differ
    assert (abs(found - wanted) > edge + 1e-5 * wanted).sum() <= (2 if "top_p" in case else 0)


@pytest.mark.parametrize("size", [1, 5, 511, 512, 513, 3000])
def test_each_place_is_as_wide_as_its_weight(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = np.where(rng.random(size) < 0.3, 0, rng.random(size)).astype(np.float32)
    weights[rng.integers(size)] = 1
    ends = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    for number in (0.0, *rng.random(200), np.nextafter(1.0, 0.0)):
        at = draw_index(weights, float(number))
        assert weights[at] > 0
        assert ends[at] - weights[at] / weights.sum() - 1e-6 <= number <= ends[at] + 1e-6


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-7, 1e30, 1e300])
def test_any_temperature_leaves_tokens(temperature: float) -> None:
    scores = np.array([1.0, 3.0, 2.0, 3.0, -np.inf], np.float32)
    chosen = {Sampler(Sampling(temperature), seed).choose(scores, []) for seed in range(60)}
    assert chosen == ({1, 3} if temperature < 1 else {0, 1, 2, 3})


def test_equals_all_over_a_large_vocabulary() -> None:
    scores = np.zeros(50_000, np.float32)
    assert np.flatnonzero(spread(scores, Sampling(1.0, top_k=40))).size == 50_000
    assert np.flatnonzero(spread(scores, Sampling(1.0, top_p=0.25))).tolist() == list(range(12_500))
