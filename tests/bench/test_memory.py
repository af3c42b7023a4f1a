"""The benchmark of activation memory: its baseline, and the goals on the decoder's plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.decoder import DecoderConfig
from bench.memory import GOALS, OVER_MIN, PAGE, Pool, measure, phases, plan_of, run_with_pool, saving, table
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.passes.memory.plan import MemoryPlan, PlannedTensor
from tests.support import tiers


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    return plan_of(DecoderConfig())


def test_a_pool_reuses_blocks_of_the_same_class_only() -> None:
    pool = Pool()
    blocks = [pool.allocate(size) for size in (1, PAGE, PAGE + 1)]
    assert blocks == [PAGE, PAGE, 2 * PAGE] and pool.total == 4 * PAGE
    for block in blocks:
        pool.release(block)
    assert [pool.allocate(size) for size in (2 * PAGE, 7)] == [2 * PAGE, PAGE] and pool.total == 4 * PAGE
    pool.allocate(3 * PAGE)  # the free page is of no use
    assert pool.total == 7 * PAGE


def test_a_call_returns_blocks_after_the_last_use() -> None:
    n = SymVar("n")
    tensors = (
        PlannedTensor("a", n * PAGE, sym(0), 0, 1),
        PlannedTensor("part", n, sym(0), 0, 1, inside="a"),
        PlannedTensor("b", n * PAGE, n * PAGE, 1, 2),
        PlannedTensor("c", n * PAGE, sym(0), 2, 3),
    )
    made, pool = MemoryPlan("main", ("",) * 4, n * 2 * PAGE, tensors), Pool()
    for size, expected in ((1, 2), (1, 2), (3, 8), (1, 8)):
        run_with_pool(made, {n: size}, pool)
        assert pool.total == expected * PAGE


@pytest.mark.parametrize("phase", GOALS)
def test_the_decoder_needs_less_than_the_pool_and_little_more_than_the_least(plan: MemoryPlan, phase: str) -> None:
    rows = measure(plan, phases(512)[phase])
    assert saving(rows) >= GOALS[phase]
    assert all(row.least <= row.arena <= OVER_MIN * row.least for row in rows)
    assert "less than the pool" in table(phase, rows)


@settings(max_examples=tiers.examples(60), deadline=None)
@given(st.integers(1, 64), st.integers(1, 2048), st.integers(0, 2048))
def test_the_arena_is_near_the_least_at_every_size(plan: MemoryPlan, batch: int, seq: int, past: int) -> None:
    values = {"batch": batch, "seq": seq, "past": past}
    sizes = {symbol: values[symbol.name] for symbol in plan.arena.free_vars()}
    assert plan.arena_bytes(sizes) <= OVER_MIN * plan.lower_bound(sizes)
