"""Packing tensors of symbolic sizes: nothing overlaps at any sizes, and little is wasted."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, sym
from relaxlite.passes.memory import arena_layers
from relaxlite.passes.memory.arena_order import (
    GOOD_RATIO,
    ArenaTensor,
    PackingProblem,
    nearest_legal_value,
    priorities,
    representative_values,
    search,
)
from relaxlite.passes.memory.pack_arena import ALIGNMENT, Packing, pack
from tests.support import tiers

N, M, FEW = SymVar("n"), SymVar("m", lower=1), SymVar("few", upper=24, divisor=8)
SIZES = (N * 4, N * 400, M * 64, N * M * 4, N * N + M, (N + 2) // 3 * 8, FEW * 100, sym(1000), sym(0), (N - 5) * 4)


@st.composite
def tensors(draw: st.DrawFn, most: int = 14) -> list[ArenaTensor]:
    found = []
    for _ in range(draw(st.integers(1, most))):
        steps = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True).map(sorted))
        pairs = list(zip(steps[::2], [*steps[1::2], steps[-1]], strict=False))
        spans = [pair for k, pair in enumerate(pairs) if k == 0 or pair[0] > pairs[k - 1][1]]
        found.append(ArenaTensor(draw(st.sampled_from(SIZES)), tuple(spans)))
    return found


def values_of_names(packing: Packing, at: dict[SymVar, int]) -> dict[SymVar, int]:
    """The values with those of the names that the packing gives, computed in the order that it says."""
    values = at | {name: evaluate(room, at) for room, name in packing.sizes.items()}
    for base in packing.bases:
        values[base.name] = evaluate(base.expr, values)
    return values


def value(expr: SymExpr, values: dict[SymVar, int]) -> int:
    return evaluate(expr, values)


@settings(max_examples=tiers.examples(60), deadline=None)
@given(
    tensors(), st.lists(st.tuples(st.integers(0, 700), st.integers(1, 700), st.integers(0, 3)), min_size=4, max_size=4)
)
def test_nothing_overlaps_at_any_sizes(given: list[ArenaTensor], sizes: list[tuple[int, int, int]]) -> None:
    packing = pack(given)
    for n, m, few in [(0, 1, 0), (1, 1, 3), *sizes]:
        at = {N: n, M: m, FEW: 8 * few}
        values = values_of_names(packing, at)
        offsets = [value(place.expr, values) for place in packing.offsets]
        assert offsets == [value(place.full, at) for place in packing.offsets]  # names or not
        assert value(packing.end.expr, values) == value(packing.end.full, at)
        ends = [place + max(0, value(t.size, at)) for place, t in zip(offsets, given, strict=True)]
        assert all(place >= 0 and place % ALIGNMENT == 0 for place in offsets)
        assert max(ends) <= value(packing.end.full, at)
        for j, k in combinations(range(len(given)), 2):
            if given[j].overlaps_in_time(given[k]):
                assert ends[j] <= offsets[k] or ends[k] <= offsets[j]


def test_bases_are_in_an_order_in_which_they_can_be_computed() -> None:
    given = [ArenaTensor(size, ((k, k + 2),)) for k, size in enumerate(SIZES * 3)]
    packing = pack(given)
    known: set[SymVar] = {N, M, FEW, *packing.sizes.values()}
    levels = {base.name: base.level for base in packing.bases}
    assert packing.bases
    for base in packing.bases:
        assert set(base.expr.free_vars()) <= known
        assert all(levels.get(symbol, 0) < base.level for symbol in base.expr.free_vars())
        known.add(base.name)


def test_the_same_tenants_are_packed_the_same_way() -> None:
    given = [ArenaTensor(SIZES[k % 7], ((k % 11, k % 11 + k % 4),)) for k in range(40)]
    assert [str(place.full) for place in pack(given).offsets] == [str(place.full) for place in pack(given).offsets]


def test_no_one_order_of_allocation_is_best_at_all_sizes_but_one_orientation_is() -> None:
    """a and b meet c, which is between them in time: below c there is room for the larger of both."""
    a, c, b = ArenaTensor(N * 64, ((0, 1),)), ArenaTensor(sym(640), ((1, 2),)), ArenaTensor(M * 64, ((2, 3),))
    packing = pack([a, c, b])
    assert packing.worst_ratio == pytest.approx(1.0)
    for n, m in ((1, 100), (100, 1), (7, 7), (0, 1)):
        assert value(packing.end.full, {N: n, M: m}) == 640 + 64 * max(n, m)


def test_the_search_finds_what_no_simple_order_does() -> None:
    """Many lives of random length: each priority alone wastes more than the search leaves."""
    rng = np.random.default_rng(3)
    given = []
    for _ in range(60):
        first = int(rng.integers(0, 40))
        given.append(ArenaTensor(N * int(rng.integers(1, 30)) * 64, ((first, first + int(rng.integers(1, 9))),)))
    problem = PackingProblem(given, np.array([[evaluate(tenant.size, {N: 1})] for tenant in given], float))
    simple = min(float(problem.ratios(problem.place(p, 0)).max()) for p in priorities(problem, 0))
    assert 1.0 <= pack(given).worst_ratio < min(simple, 1.05)


def test_representative_values_keep_bounds_and_divisors() -> None:
    for values in representative_values((N, M, FEW)):
        assert values[N] >= 0 and values[M] >= 1 and values[FEW] in (0, 8, 16, 24)
    assert nearest_legal_value(FEW, 1000) == 24 and nearest_legal_value(M, 0) == 1 and nearest_legal_value(FEW, 9) == 16
    assert {values[FEW] for values in representative_values((N, M, FEW))} >= {0, 8, 24}
    assert {values[N] for values in representative_values((N, M, FEW))} >= {0, 1, 16, 1024}


def of_layers(count: int, *, is_last_other: bool = False) -> list[ArenaTensor]:
    """What layers ask for: a residual that lives through a layer, wide values in between, a sum that goes on; beside
    them something that all layers read."""
    found = [ArenaTensor(M * 64, ((0, 10 * count + 2),)), ArenaTensor(N * 4, ((1, 3),))]
    for start in range(3, 3 + 10 * count, 10):
        wide = N * 4096 if is_last_other and start == 10 * count - 7 else N * 1024
        lives = [(N * 256, 0, 11), (wide, 1, 3), (N * M * 4, 2, 4), (N * 512, 3, 6), (N * 1024, 6, 8), (N * 64, 5, 9)]
        found += [ArenaTensor(size, ((start + first, start + last),)) for size, first, last in lives]
    return [*found, ArenaTensor(N * 2048, ((10 * count + 3, 10 * count + 5),))]


@pytest.mark.parametrize("is_last_other", [False, True])
def test_layers_that_repeat_are_packed_as_a_few_of_them_are(
    is_last_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def counted(problem: PackingProblem) -> tuple[list[int], float]:
        searched.append(len(problem.tensors))
        return search(problem)

    monkeypatch.setattr(arena_layers, "search", counted)
    few, many = of_layers(7, is_last_other=is_last_other), of_layers(60, is_last_other=is_last_other)
    packing = pack(many)
    assert len(searched) == 1 and searched[0] <= len(few)
    assert packing.worst_ratio <= GOOD_RATIO
    for n, m in ((1, 1), (7, 300), (512, 2)):
        values = values_of_names(packing, {N: n, M: m})
        offsets = [value(place.expr, values) for place in packing.offsets]
        ends = [place + value(t.size, {N: n, M: m}) for place, t in zip(offsets, many, strict=True)]
        assert value(packing.end.expr, values) == value(pack(few).end.full, {N: n, M: m})
        for j, k in combinations(range(len(many)), 2):
            assert not many[j].overlaps_in_time(many[k]) or ends[j] <= offsets[k] or ends[k] <= offsets[j]


@settings(max_examples=tiers.examples(15), deadline=None)
@given(tensors(3), tensors(4), tensors(3), st.integers(7, 9), st.integers(1, 14))
def test_nothing_overlaps_whatever_repeats(
    before: list[ArenaTensor], layer: list[ArenaTensor], after: list[ArenaTensor], count: int, step: int
) -> None:
    def shifted(some: list[ArenaTensor], by: int) -> list[ArenaTensor]:
        return [ArenaTensor(t.size, tuple((first + by, last + by) for first, last in t.spans)) for t in some]

    given = [*before, ArenaTensor(N * 8, ((0, count * step), (count * step + 2, count * step + 9)))]
    given += [tenant for k in range(count) for tenant in shifted(layer, 5 + k * step)] + shifted(after, count * step)
    packing = pack(given)
    for at in ({N: 0, M: 1, FEW: 0}, {N: 3, M: 70, FEW: 8}, {N: 600, M: 2, FEW: 24}):
        offsets = [value(place.full, at) for place in packing.offsets]
        ends = [place + max(0, value(t.size, at)) for place, t in zip(offsets, given, strict=True)]
        assert max(ends) <= value(packing.end.full, at)
        for j, k in combinations(range(len(given)), 2):
            assert not given[j].overlaps_in_time(given[k]) or ends[j] <= offsets[k] or ends[k] <= offsets[j]
