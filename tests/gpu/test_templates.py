"""Templates of schedules for GPUs: every one at rows from 0 on, in the oracle and on the simulated device."""

from __future__ import annotations

import pytest

from relaxlite.ir.expr import ShapeValue
from relaxlite.ir.launch import launches
from relaxlite.ir.op import get_op
from relaxlite.ir.symbolic import syms
from relaxlite.passes.schedule.gpu.programs import schedule_program
from tests.gpu.templates import check, lowered


@pytest.mark.parametrize("width", [33, 1500])
def test_softmax(width: int) -> None:
    program = lowered(lambda x: get_op("softmax")(x, axis=-1), x=(("n", width), "float32"))
    device = check(program)
    assert ("bar.sync" in device.ptx) == (width > 1024) and "shfl.sync.bfly" in device.ptx


def test_softmax_of_a_symbolic_length() -> None:
    program = lowered(lambda x: get_op("softmax")(x, axis=-1), x=((3, "n"), "float32"))
    check(program, (0, 1, 7, 129, 1030))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layer_norm(dtype: str) -> None:
    op = get_op("layer_norm")
    program = lowered(
        lambda x, w, b: op(x, w, b, axis=-1, epsilon=1e-5), x=(("n", 70), dtype), w=((70,), dtype), b=((70,), dtype)
    )
    check(program, tolerance=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(("depth", "width"), [(33, 70), (64, 5)])
def test_matmul_in_float32(depth: int, width: int) -> None:
    program = lowered(lambda a, b: get_op("matmul")(a, b), a=(("n", depth), "float32"), b=((depth, width), "float32"))
    device = check(program, tolerance=1e-4)
    assert "ld.shared" in device.ptx


def test_batched_matmul_of_symbolic_depth() -> None:
    program = lowered(lambda a, b: get_op("matmul")(a, b), a=((2, 5, "n"), "float32"), b=((2, "n", 9), "float32"))
    check(program, (0, 1, 17, 64), tolerance=1e-4)


def test_convolution() -> None:
    conv = get_op("conv")
    program = lowered(
        lambda x, w: conv(x, w, ShapeValue(syms((0, 0, 0, 0))), strides=(2, 1)),
        x=(("n", 3, 9, 7), "float32"),
        w=((5, 3, 3, 3), "float32"),
    )
    check(program, (0, 1, 3), tolerance=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matmul_on_tensor_cores(dtype: str) -> None:
    """With an epilogue, and sizes that fill no tile."""
    program = lowered(
        lambda a, b, c: get_op("relu")(get_op("add")(get_op("matmul")(a, b), c)),
        a=(("n", 40), dtype),
        b=((40, 70), dtype),
        c=((70,), dtype),
    )
    device = check(program, (0, 1, 65), tolerance=2e-2)
    for instruction in ("ldmatrix.sync.aligned.m8n8.x4.shared", "ldmatrix.sync.aligned.m8n8.x4.trans", "mma.sync"):
        assert instruction in device.ptx
    assert device.driver.counts["#shared cycles"] <= 1.5 * device.driver.counts["#shared accesses"]


@pytest.mark.parametrize(("rows", "depth"), [(("n", 100), "float32"), ((3, "n"), "float32"), (("n", 130), "float16")])
def test_sums_along_rows(rows: tuple[object, ...], depth: str) -> None:
    program = lowered(lambda x: get_op("mean")(x, axes=(1,)), x=(rows, depth))
    device = check(program, (0, 1, 7, 300), tolerance=1e-4 if depth == "float32" else 1e-2)
    assert "shfl.sync.bfly" in device.ptx


def test_products_of_few_rows_with_transposed_weights() -> None:
    """A warp for each result up to 8 rows, then tiles."""
    program = lowered(
        lambda a, b: get_op("matmul")(a, get_op("transpose")(b, axes=(1, 0))),
        a=(("n", 96), "float32"),
        b=((20, 96), "float32"),
    )
    device = check(program, (0, 1, 8, 9), tolerance=1e-4)
    assert device.ptx.count(".entry") == 3, "blocks and warps for few rows, tiles for others"


def test_sums_in_one_order_where_batches_must_not_matter() -> None:
    """Neither few rows nor few results have a variant of their own."""
    product = lowered(
        lambda a, b: get_op("matmul")(a, get_op("transpose")(b, axes=(1, 0))),
        a=(("n", 96), "float32"),
        b=((20, 96), "float32"),
    )
    mean = lowered(lambda x: get_op("mean")(x, axes=(1,)), x=(("n", 100), "float32"))
    for program in (product, mean):
        free, fixed = (schedule_program(program, one_order=one_order) for one_order in (False, True))
        assert len(list(launches(free.body))) > 1 and len(list(launches(fixed.body))) == 1
