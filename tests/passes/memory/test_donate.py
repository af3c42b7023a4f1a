"""Updates in place of donated parameters and of what dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import InputError
from relaxlite.ir import ops
from relaxlite.ir.attributes import DONATED
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, Expr, Tuple, TupleGetItem
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.target import Target

PAGE, PAGES = 4, 3


def build(make: Any, donated: tuple[int, ...] = (0,)) -> IRModule:
    """main(pool, x, slots) = make(builder, pool, x, slots); both pools are of symbolic length."""
    bb = BlockBuilder()
    n, pages = bb.symbol("n"), bb.symbol("pages")
    types = {
        "pool": TensorType.of((2, pages, PAGE, 5), "float32"),
        "x": TensorType.of((n, 2, 5), "float32"),
        "slots": TensorType.of((n,), "int64"),
    }
    with bb.function("main", Attrs({DONATED: donated}), **types) as params:
        bb.result(make(bb, *params))
    return bb.module()


def appended(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
    return bb.emit(ops.kv_append(pool, x, slots))


def arrays(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((2, PAGES, PAGE, 5)).astype(np.float32)
    return pool, rng.standard_normal((n, 2, 5)).astype(np.float32), rng.permutation(PAGE * PAGES)[:n].astype(np.int64)


def compiled(module: IRModule, **options: Any) -> tuple[Any, PassContext]:
    context = PassContext(Target.parse("llvm"))
    return rl.compile(module, context=context, **options), context


def taken(context: PassContext) -> list[bool]:
    return [d.taken for d in context.decisions if d.step == "donate"]


def expect(pool: np.ndarray, x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    made = pool.copy()
    for row, slot in zip(x, slots, strict=True):
        made[:, slot // PAGE, slot % PAGE] = row
    return made


def test_a_donated_parameter_is_updated_where_it_lies() -> None:
    def make(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
        doubled = bb.emit(ops.add(x, x))
        once = appended(bb, pool, x, slots)
        twice = appended(bb, once, doubled, slots)
        return Tuple((bb.emit(ops.sum(twice, axes=(0, 1, 2))), twice))

    exe, context = compiled(build(make))
    assert taken(context) == [True, True]
    assert [spec.name for spec in exe.outputs] == ["output_0"]
    for n in (0, 1, 3, 12):
        pool, x, slots = arrays(n)
        wanted = expect(pool, x + x, slots)
        total = exe(pool, x, slots)
        np.testing.assert_array_equal(pool, wanted)
        np.testing.assert_allclose(total, wanted.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)


def test_old_contents_that_are_read_later_are_kept_until_then() -> None:
    def make(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
        new = appended(bb, pool, x, slots)
        return Tuple((bb.emit(ops.subtract(new, pool)), new))

    exe, context = compiled(build(make))
    assert not any(taken(context))
    pool, x, slots = arrays(3)
    old = pool.copy()
    difference = exe(pool, x, slots)
    np.testing.assert_array_equal(pool, expect(old, x, slots))
    np.testing.assert_array_equal(difference, pool - old)


def test_a_parameter_that_is_not_donated_is_left_alone() -> None:
    exe, context = compiled(build(appended, ()))
    assert not any(taken(context))
    pool, x, slots = arrays(5)
    old = pool.copy()
    np.testing.assert_array_equal(exe(pool, x, slots), expect(old, x, slots))
    np.testing.assert_array_equal(pool, old)


def test_an_intermediate_that_dies_is_updated_where_it_lies() -> None:
    def make(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
        return appended(bb, bb.emit(ops.exp(pool)), x, slots)

    exe, context = compiled(build(make, ()), validate=True)
    assert taken(context) == [True]
    pool, x, slots = arrays(5)
    np.testing.assert_allclose(exe(pool, x, slots), expect(np.exp(pool), x, slots), rtol=1e-6)


def with_states(make: Any) -> IRModule:
    """main(pool, x, spans) = make(pool, what a convolution behind its states gives, the pool with its new states)."""
    bb = BlockBuilder()
    rows, slots, spans = bb.symbol("rows"), bb.symbol("slots"), bb.symbol("spans")
    types = {
        "pool": TensorType.of((1, slots, 2, 5), "float32"),
        "x": TensorType.of((rows, 5), "float32"),
        "spans": TensorType.of((spans, 4), "int64"),
    }
    with bb.function("main", Attrs({DONATED: (0,)}), **types) as (pool, x, found):
        both = bb.emit(get_op("state_convolution")(x, np.full((3, 5), 0.5, np.float32), pool, found))
        y, new = (bb.emit(TupleGetItem(both, k)) for k in range(2))
        bb.result(make(bb, pool, y, new))
    return bb.module()


# A sequence that begins; three whose states move, move without a row, and go nowhere; two that stay in their slots
SPANS = np.array([(0, 4, -1, 1), (4, 1, 0, 2), (5, 0, 3, 4), (5, 1, 3, -1), (6, 0, 5, 5), (6, 1, 6, 6)])


def states_of(pool: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    reference: Any = get_op("state_convolution").reference
    return reference(x, np.full((3, 5), 0.5, np.float32), pool, SPANS)


def test_of_several_results_one_is_updated_where_it_lies() -> None:
    module = with_states(lambda bb, pool, y, new: Tuple((bb.emit(ops.add(y, y)), new)))
    rng = np.random.default_rng(0)
    pool, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 7, 2, 5), (7, 5)))
    exe, context = compiled(module, validate=[(pool.copy(), x, SPANS)])
    assert taken(context) == [True]
    wanted = states_of(pool, x)
    np.testing.assert_allclose(exe(pool, x, SPANS), 2 * wanted[0], rtol=1e-6)
    np.testing.assert_array_equal(pool, wanted[1])


def test_an_update_whose_other_result_nobody_uses_stays() -> None:
    rng = np.random.default_rng(1)
    pool, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 7, 2, 5), (7, 5)))
    module = with_states(lambda bb, pool, y, new: Tuple((new,)))
    exe, context = compiled(module, validate=[(pool.copy(), x, SPANS)])
    assert taken(context) == [True]
    wanted = states_of(pool, x)[1]
    exe(pool, x, SPANS)
    np.testing.assert_array_equal(pool, wanted)


def test_old_states_that_are_read_later_are_kept_until_then() -> None:
    exe, context = compiled(with_states(lambda bb, pool, y, new: Tuple((bb.emit(ops.subtract(new, pool)), new))))
    assert not any(taken(context))
    rng = np.random.default_rng(2)
    pool, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 7, 2, 5), (7, 5)))
    old, wanted = pool.copy(), states_of(pool, x)[1]
    np.testing.assert_array_equal(exe(pool, x, SPANS), wanted - old)
    np.testing.assert_array_equal(pool, wanted)


def test_arrays_that_cannot_be_overwritten_are_refused() -> None:
    exe, _ = compiled(build(lambda bb, pool, x, slots: Tuple((x, appended(bb, pool, x, slots)))))
    pool, x, slots = arrays(2)
    frozen = pool.copy()
    frozen.flags.writeable = False
    for bad in (frozen, pool.astype(np.float64), pool.tolist(), pool.transpose(1, 0, 2, 3)):
        with pytest.raises(InputError, match="argument 'pool' is overwritten: it must be a writable, dense"):
            exe(bad, x, slots)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_result_in_donated_memory_is_copied(is_new: bool) -> None:
    """A model may return its state, before the update or after; later calls leave that result alone."""

    def make(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
        update = appended(bb, pool, x, slots)
        return Tuple((update if is_new else pool, update))

    exe, _ = compiled(build(make))
    for n in (1, 4, 0):
        pool, x, slots = arrays(n)
        before, wanted = pool.copy(), expect(pool, x, slots)
        result = exe(pool, x, slots)
        np.testing.assert_array_equal(pool, wanted)
        pool.fill(-1)
        np.testing.assert_array_equal(result, wanted if is_new else before)


def test_a_donated_parameter_survives_saving(tmp_path: Any) -> None:
    exe, _ = compiled(build(lambda bb, pool, x, slots: Tuple((x, appended(bb, pool, x, slots)))))
    exe.save(tmp_path / "m.rlx")
    again = rl.load(tmp_path / "m.rlx")
    pool, x, slots = arrays(4)
    wanted = expect(pool, x, slots)
    again(pool, x, slots)
    np.testing.assert_array_equal(pool, wanted)
    with pytest.raises(InputError, match="is overwritten"):
        again(pool.tolist(), x, slots)


def test_validation_follows_donated_memory() -> None:
    def make(bb: BlockBuilder, pool: Expr, x: Expr, slots: Expr) -> Expr:
        new = appended(bb, pool, bb.emit(ops.multiply(x, x)), slots)
        return Tuple((bb.emit(ops.sum(new, axes=(0,))), new))

    compiled(build(make), validate=[arrays(3), arrays(0)])
