"""How far rounding may move what is computed: sums as far as their number of terms says, counts held in floats not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, Tuple, Var
from relaxlite.ir.op import get_op, shape_value
from relaxlite.ir.types import TensorType
from relaxlite.validation.oracle import FailedRun, flatten, measure_rounding_error
from relaxlite.validation.validator import CONFIRMATION_RUNS


def long_sums() -> Iterator[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any], int]]:
    """Ops over one large picture or long text: their operands' shapes, attributes, and how many terms a sum has."""
    picture, text = (1, 8, 96, 96), (1, 4, 256, 32)
    yield "conv", (picture, (8, 8, 3, 3)), {"pads": (1, 1, 1, 1)}, 72
    yield "conv_transpose", (picture, (8, 8, 3, 3)), {"pads": (0, 0, 0, 0)}, 72
    yield "avg_pool", (picture,), {"pads": (0, 0, 0, 0), "kernel": (3, 3)}, 9
    yield "lrn", (picture,), {"size": 5}, 5
    yield "instance_norm", (picture, (8,), (8,)), {}, 96 * 96
    yield "group_norm", (picture, (8,), (8,)), {"groups": 4}, 2 * 96 * 96
    yield "softmax", (text,), {"axis": -1}, 32
    yield "layer_norm", (text, (32,), (32,)), {"axis": -1}, 32
    yield "attention", (text, text, text), {}, 256 + 32
    yield "einsum", (text, (1, 4, 128, 32)), {"equation": "bhqd,bhkd->bhqk"}, 32
    yield "einsum", (text, text), {"equation": "...qd,...qd->..."}, 256 * 32
    yield "cumsum", (text,), {"axis": 3}, 32
    yield "conv", (picture, (8, 2, 3, 3)), {"pads": (1, 1, 1, 1), "groups": 4}, 18
    yield "conv", ((1, 96, 96, 8), (3, 3, 8, 8)), {"pads": (1, 1, 1, 1), "layout": "last"}, 72
    yield "attention", (text, (1, 4, 32, 256), text), {"k_axes": (0, 1, 3, 2)}, 256 + 32
    yield "lp_pool", (picture,), {"pads": (0, 0, 0, 0), "kernel": (3, 3)}, 9
    yield "mean_variance_normalize", (picture,), {"axes": (0, 2, 3)}, 96 * 96
    yield "log_softmax", (text,), {"axis": -1}, 32
    yield "rms_norm", (text, (32,)), {"axis": -1}, 32
    yield "lp_normalize", (text,), {"axis": -1}, 32


@pytest.mark.parametrize(("name", "shapes", "attrs", "terms"), list(long_sums()))
def test_what_large_pictures_and_long_texts_come_to_is_determined(
    name: str, shapes: tuple[tuple[int, ...], ...], attrs: dict[str, Any], terms: int
) -> None:
    """Sums have as many terms as the op says, however large its operands are."""
    given = dict(attrs)
    pads = [shape_value(given.pop("pads"))] if "pads" in given else []
    bb = BlockBuilder()
    with bb.function("main", **{f"x{k}": TensorType.of(shape, "float32") for k, shape in enumerate(shapes)}) as params:
        bb.result(bb.emit(get_op(name)(*params, *pads, **given)))
    rng = np.random.default_rng(0)
    args = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    (value,) = flatten(Interpreter(bb.module()).run("main", *args))
    spread = measure_rounding_error(bb.module(), args, (value,), {}, seed=0)
    assert not isinstance(spread, FailedRun)
    unit = 4 * 2.0**-23 * max(1.0, float(np.abs(value).max()))
    assert spread[0].max() <= unit * (3 + terms / 16)


def counted(count: Var, emit: Callable[[Expr], Var]) -> Expr:
    """(floor(count * 0.5) + 2) / 2, held in floats, as an integer again: 251 of 1000."""
    half = emit(ops.multiply(emit(ops.cast(count, dtype="float32")), np.float32(0.5)))
    steps = emit(ops.add(emit(ops.floor(half)), np.float32(2)))
    return ops.cast(emit(ops.divide(steps, np.float32(2))), dtype="int64")


@pytest.mark.parametrize("runs", [2, CONFIRMATION_RUNS])  # of the more, some make equal what is nearly so
def test_counts_that_are_held_in_floats_are_determined(runs: int) -> None:
    bb = BlockBuilder()
    with bb.function("main", count=TensorType.of((1,), "int64")) as (count,):
        bb.result(bb.emit(counted(count, bb.emit)))
    args = (np.array([1000]),)
    values = flatten(Interpreter(bb.module()).run("main", *args))
    assert values[0] == 251
    spread = measure_rounding_error(bb.module(), args, values, {}, seed=0, runs=runs)
    assert not isinstance(spread, FailedRun) and spread[0] == 0


@pytest.mark.parametrize("runs", [2, CONFIRMATION_RUNS])
@pytest.mark.parametrize("total", [lambda x: ops.sum(x, axes=(1,)), lambda x: ops.cumsum(x, axis=1)])
def test_totals_of_counts_that_are_held_in_floats_are_determined(total: Callable[[Expr], Expr], runs: int) -> None:
    """A speech model adds up how many frames each sound lasts, in floats, and makes as many."""
    bb = BlockBuilder()
    with bb.function("main", lengths=TensorType.of((2, 40), "float32")) as (lengths,):
        frames = bb.emit(ops.ceil(lengths))
        whole = bb.emit(ops.cast(bb.emit(total(frames)), dtype="int64"))
        bb.result(Tuple([whole, bb.emit(total(lengths))]))
    lengths = np.random.default_rng(0).uniform(-0.9, 7, (2, 40)).astype(np.float32)
    values = flatten(Interpreter(bb.module()).run("main", lengths))
    spread = measure_rounding_error(bb.module(), (lengths,), values, {}, seed=0, runs=runs)
    assert not isinstance(spread, FailedRun)
    assert spread[0].max() == 0
    assert 0 < spread[1].max() < 1e-3


@pytest.mark.parametrize("runs", [2, CONFIRMATION_RUNS])
def test_numbers_from_0_on_that_are_held_in_floats_are_determined(runs: int) -> None:
    """A speech model asks of each frame, by its number, which sound it belongs to."""
    bb = BlockBuilder()
    with bb.function("main", count=TensorType.of((1,), "float32")) as (count,):
        numbers = bb.emit(ops.arange(np.float32(0), np.float32(1), shape_value((40,))))
        bb.result(bb.emit(ops.less(numbers, count)))
    args = (np.array([17], np.float32),)
    values = flatten(Interpreter(bb.module()).run("main", *args))
    assert values[0].sum() == 17
    spread = measure_rounding_error(bb.module(), args, values, {}, seed=0, runs=runs)
    assert not isinstance(spread, FailedRun)
    assert np.flatnonzero(spread[0]).tolist() in ([], [17])  # 17 is given, and may be another number


def test_what_is_truncated_of_a_rounded_number_is_not_determined() -> None:
    """0.1 * 30 may be less than 3."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((1,), "float32")) as (x,):
        bb.result(bb.emit(ops.cast(bb.emit(ops.multiply(x, np.float32(30))), dtype="int64")))
    spread = measure_rounding_error(
        bb.module(), (np.float32([0.1]),), (np.array([3]),), {}, seed=0, runs=CONFIRMATION_RUNS
    )
    assert not isinstance(spread, FailedRun) and np.isinf(spread[0])


def test_the_square_of_a_negative_number_is_determined() -> None:
    """Exporters write x ** 2 in norms: a power of 2.0000002 would be NaN."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((3,), "float32")) as (x,):
        bb.result(bb.emit(ops.power(x, np.float32(2))))
    x_value = np.float32([-1.7, -0.1, 3])
    spread = measure_rounding_error(bb.module(), (x_value,), (x_value**2,), {}, seed=0)
    assert not isinstance(spread, FailedRun) and (spread[0] < 2e-5).all()


def test_the_scale_of_a_dynamic_quantization_is_determined_to_its_last_digits() -> None:
    """Moved by digits of the numbers that it is the 255th part of, it gave more codes another value."""
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((4, 32), "float32")) as (x,):
        bb.result(bb.emit(ops.dynamic_quantize_linear(x)))
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    values = flatten(Interpreter(bb.module()).run("main", x))
    spread = measure_rounding_error(bb.module(), (x,), values, {}, seed=0)
    assert not isinstance(spread, FailedRun)
    assert 0 < float(spread[1]) < 16 * 2.0**-23 * float(values[1])
