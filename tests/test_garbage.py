"""Compiling with the collector of cyclic garbage off, and what it leaves behind."""

from __future__ import annotations

import gc

import pytest

import relaxlite as rl
from relaxlite.errors import InvalidArgumentError
from relaxlite.garbage import with_gc_disabled
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.types import TensorType


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_afterwards(is_on: bool) -> None:
    @with_gc_disabled
    def inner(fails: bool) -> bool:
        if fails:
            raise ValueError("inside")
        return gc.isenabled()

    @with_gc_disabled
    def outer() -> tuple[bool, bool]:
        return inner(False), gc.isenabled()

    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        assert outer() == (False, False) and gc.isenabled() is is_on
        with pytest.raises(ValueError, match="inside"):
            inner(True)
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()


def test_compiling_leaves_the_collector_on() -> None:
    assert gc.isenabled()
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("n"),), "float32")) as (x,):
        bb.result(bb.emit(ops.relu(x)))
    rl.compile(bb.module())
    assert gc.isenabled()
    with pytest.raises(InvalidArgumentError):
        rl.compile(bb.module(), precision="exact")
    assert gc.isenabled()
