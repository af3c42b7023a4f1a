"""Operators of PyTorch that move, index, scatter and sort elements: a few programs, compiled once, at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import relaxlite as rl

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def check(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Compile for the first call's arguments, with all sizes above 1 dynamic, and compare all calls with eager."""
    first = calls[0]
    dynamic = tuple({d: torch.export.Dim.AUTO for d, size in enumerate(a.shape) if size > 1} for a in first)
    program = torch.export.export(Call(function), first, dynamic_shapes=(dynamic,), strict=False)
    exe = rl.compile(rl.from_torch(program))
    for args in calls:
        got, expected = (torch.utils._pytree.tree_leaves(f(*args)) for f in (exe, function))
        for own, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(own, wanted, equal_nan=True)


def test_indices_at_places_that_are_not_adjacent_move_to_the_front() -> None:
    def function(x: Any, i: Any, j: Any, mask: Any) -> Any:
        return (
            x[:, i, :, j],
            x[i[:, None], ..., j],
            x[0, :, j % 3],
            x[mask],
            x[:, mask[0, :2]],
            x[mask, ..., -1],
            x[..., i[0]],
        )

    def arguments(n: int) -> tuple[Any, ...]:
        i, j = torch.randint(-2, 2, (n,)), torch.randint(-4, 4, (n,))
        return torch.randn(n, 2, 3, 4), i % n, j, torch.rand(n, 2) > 0.5

    def bounded(x: Any, i: Any, j: Any, mask: Any) -> Any:
        return function(x, i % 2, j, mask)

    check(bounded, *(arguments(n) for n in (3, 2, 5)))


def test_writes_at_masks_indices_and_slices() -> None:
    def function(x: Any, i: Any, v: Any) -> Any:
        filled, added, sliced, masked = x.clone(), x.clone(), x.clone(), x.clone()
        filled[x > 0] = -1
        added.index_put_((i,), v, accumulate=True)
        sliced[::2, 1:-1] = v[:1, 1:-1]
        masked[x < 0] = x[x < 0] * 2
        return filled, added, sliced, masked, (x > 0).index_fill(0, i, True), x.slice_scatter(v[:1], 0, -1)

    check(function, *((torch.randn(n, 4), torch.randint(-n, n, (m,)), torch.randn(m, 4)) for n, m in ((5, 3), (4, 7))))


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce_with_and_without_the_tensor_itself(reduce: str) -> None:
    def function(x: Any, i: Any, source: Any) -> Any:
        results = [x.scatter_reduce(0, i, source, reduce, include_self=k) for k in (True, False)]
        whole, numbers = x.long(), source.long()
        return results, [whole.scatter_reduce(0, i, numbers, reduce, include_self=k) for k in (True, False)]

    def arguments(n: int, m: int) -> tuple[Any, ...]:
        return torch.randn(n, 3) * 5, torch.randint(0, n, (m, 3)), torch.randn(m + 1, 3) * 5

    check(function, arguments(4, 6), arguments(7, 2))


def test_moves_of_elements_and_pads() -> None:
    def function(x: Any) -> Any:
        pads = [F.pad(x, (1, 2), mode=mode) for mode in ("reflect", "replicate", "circular")]
        cropped = F.pad(x, (-1, 2), mode="circular"), F.pad(x, (1, -2, -1, 0), value=2.5)
        windows = x.unfold(2, 3, 2), x.diagonal(1, 1, 2), torch.diag_embed(x[0], -1, 0, 2)
        return pads, cropped, windows, x.roll((1, -2), (0, 2)), x.flip(0, 2), x.repeat(2, 1, 1), x.chunk(2, 2)

    check(function, *((torch.randn(2, n, 6),) for n in (3, 5, 2)))


def test_strides_read_the_memory_of_a_transposed_tensor() -> None:
    x = torch.randn(4, 6)
    check(lambda x: (x.t().as_strided((3, 2), (2, 1), 1), x.as_strided((2, 3), (1, 6), 2)), (x,))


def test_nan_is_greatest_and_equal_to_nothing() -> None:
    def function(x: Any, i: Any) -> Any:
        ordered = x.sort(1), x.topk(2, 1, largest=False), x.median(), x.nanmedian(1)[0], i.mode(1)
        running = x.cummax(0), i.cummin(1)
        found = torch.searchsorted(i.sort(1)[0], i, right=True), torch.bucketize(x, torch.tensor([-1.0, 0, 1]))
        return ordered, running, found, torch.unique(x), torch.unique(i, return_inverse=True, return_counts=True)

    def arguments(n: int) -> tuple[Any, ...]:
        x = torch.randn(n, 4)
        x[0, 1] = x[1, 2] = float("nan")
        return x, torch.randint(-3, 3, (n, 4))

    check(function, arguments(3), arguments(6))


def test_sizes_that_depend_on_data() -> None:
    def function(i: Any) -> Any:
        rows = torch.unique(i, dim=0, return_counts=True), torch.unique_consecutive(i[0], return_inverse=True)
        counts = torch.bincount(i.flatten(), minlength=2), torch.nonzero_static(i, size=5)
        repeated = torch.arange(3).repeat_interleave(i[0, :3]), i.repeat_interleave(2, 1)
        return rows, counts, repeated, i.nonzero(), i[i > 1]

    check(function, *((torch.randint(0, 4, (n, 3)),) for n in (4, 2, 9)))


def test_bags_leave_out_padding() -> None:
    def function(weight: Any, indices: Any, offsets: Any) -> Any:
        return [F.embedding_bag(indices, weight, offsets, mode=m, padding_idx=1) for m in ("sum", "mean", "max")]

    def arguments(n: int) -> tuple[Any, ...]:
        return torch.randn(5, 3), torch.randint(0, 5, (n,)), torch.tensor([0, 2, 2, n - 1])

    check(function, arguments(6), arguments(9))


def test_views_of_another_type_reinterpret_bits() -> None:
    def function(x: Any) -> Any:
        numbers = x.view(torch.int32)
        return (
            numbers,
            numbers.view(torch.float32),
            x.view(torch.uint8),
            x.bfloat16().view(torch.int32),
            numbers.view(torch.float64),
        )

    check(function, (torch.randn(3, 4),), (torch.randn(5, 4),))


def test_classes_out_of_range_are_an_error() -> None:
    exe = rl.compile(rl.from_torch(Call(lambda x: F.one_hot(x, 4)), (torch.tensor([0, 3]),)))
    assert exe(torch.tensor([2, 1])).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    for wrong in (4, -1):
        with pytest.raises(rl.RelaxliteError, match="a class is negative"):
            exe(torch.tensor([wrong, 0]))
