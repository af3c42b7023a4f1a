"""The cost model of fusion: which amounts decide, at which sizes, and what the verdict says."""

from __future__ import annotations

from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.fuse.cost import (
    REPRESENTATIVE_SIZES,
    THREADS,
    FusionVerdict,
    KernelWork,
    compare_work,
    representative_sizes,
    tensor_bytes,
)


def work(flops: SymExpr | int, moved: SymExpr | int, parallel: SymExpr | int = 1) -> KernelWork:
    return KernelWork(sym(flops), sym(moved), sym(parallel))


def test_less_traffic_and_no_more_arithmetic_pays_at_all_sizes() -> None:
    n = SymVar("n", lower=0)
    found = compare_work([work(n, n * 8, n), work(n, n * 8, n)], work(n * 2, n * 8, n), {"bytes_saved": n * 8})
    assert found == FusionVerdict(
        True, "less is moved and nothing is computed twice, at all sizes", {"bytes_saved": n * 8}
    )


def test_recomputation_is_weighed_at_representative_sizes() -> None:
    """exp of m values, of each of them again for n rows: free for one row, costly for many."""
    n, m = SymVar("n", lower=0), SymVar("m", lower=0)
    apart = [work(m * 20, m * 8, m), work(n * m, (n * m * 2 + m) * 4, n * m)]
    found = compare_work(apart, work(n * m * 21, n * m * 8, n * m), {})
    assert not found.taken
    assert found.reason == "one kernel is slower on the whole, but not at m = 1, n = 1"


def test_a_bound_of_a_symbol_decides() -> None:
    n, m = SymVar("n", lower=1, upper=1), SymVar("m", lower=0)
    apart = [work(m * 20, m * 8, m), work(n * m, (n * m * 2 + m) * 4, n * m)]
    found = compare_work(apart, work(n * m * 21, n * m * 8, n * m), {})
    assert found.taken and found.reason == "one kernel is faster at all sizes tried"


def test_sizes_at_which_a_tensor_would_have_less_than_no_elements_are_not_tried() -> None:
    """Frames of sound: a cast was not merged into the sum that reads it, as that is slower for -2 frames."""
    for step in (384, 16000):
        frames = SymVar("n", lower=0) // step - 2
        apart = [work(frames * 10**5, frames * 50_000, frames), work(frames * 10**5, frames * 40_400, frames)]
        found = compare_work(apart, work(frames * 2 * 10**5, frames * 10_400, frames), {})
        assert found.taken and found.reason == "one kernel is faster at all sizes tried"
        assert not compare_work(apart, work(frames * 2 * 10**5, frames * 140_400, frames), {}).taken


def test_threads_that_are_lost_count() -> None:
    """A million operations side by side do not move into a kernel of one iteration to save 4 bytes each."""
    many = 1 << 20
    alone = work(many * 30, many * 4, many)
    total = work(many, many * 4, 1)
    assert not compare_work([alone, total], work(many * 31, many * 4, 1), {}).taken
    assert compare_work([alone, total], work(many * 31, many * 4, many), {}).taken
    assert alone.time({}) * THREADS < work(many * 30, many * 4, 1).time({}) * (1 + 1 / many) + THREADS * 50


def test_representative_sizes_lie_within_bounds_and_are_divisible() -> None:
    n, m = SymVar("n", lower=3, upper=40), SymVar("m", lower=0, divisor=8)
    found = representative_sizes((n, m))
    assert all(3 <= values[n] <= 40 and values[m] % 8 == 0 and values[m] > 0 for values in found)
    assert {values[n] for values in found} == {3, 16, 40}
    assert max(values[m] for values in found) == REPRESENTATIVE_SIZES[-1]
    assert {n: 3, m: 1024} in found and {n: 40, m: 8} in found


def test_sizes_of_symbols_that_may_only_be_zero() -> None:
    n = SymVar("n", lower=0, upper=0)
    assert representative_sizes((n,)) == [{n: 0}]


def test_tensor_bytes() -> None:
    n = SymVar("n", lower=0)
    assert tensor_bytes((n, sym(3)), "float16") is n * 6
