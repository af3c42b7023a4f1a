"""Products of transposed operands: no copy of the right one, the same numbers at all sizes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.target import Target
from tests.support import tiers

TARGETS = ("llvm", "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v2")


def product_of(kind: str) -> IRModule:
    """gelu(x @ y.T) of (m, k) and (n, k), alone or in a batch; x.T @ y; or x @ y.T whose copy is a result as well."""
    bb = BlockBuilder()
    m, n, k, b = (bb.symbol(name) for name in "mnkb")
    batch = (b,) if kind == "batch" else ()
    rows = (k, m) if kind == "left" else (*batch, m, k)
    columns = (k, n) if kind == "left" else (*batch, n, k)
    swap = (0, 2, 1) if batch else (1, 0)
    with bb.function("main", x=TensorType.of(rows, "float32"), y=TensorType.of(columns, "float32")) as (x, y):
        left = bb.emit(ops.transpose(x, axes=swap)) if kind == "left" else x
        right = y if kind == "left" else bb.emit(ops.transpose(y, axes=swap))
        out = bb.emit(ops.gelu(bb.emit(ops.matmul(left, right))))
        bb.result(Tuple((out, right)) if kind == "copied" else out)
    return bb.module()


@cache
def compiled(kind: str, target: str = "llvm") -> tuple[rl.Executable, Interpreter, PassContext]:
    module, context = product_of(kind), PassContext(Target.parse(target), verify=True)
    return rl.compile(module, target, context=context, libraries="none"), Interpreter(module), context


def arguments(kind: str, m: int, n: int, k: int, b: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + n + k)
    batch = (b,) if kind == "batch" else ()
    shapes = ((k, m), (k, n)) if kind == "left" else ((*batch, m, k), (*batch, n, k))
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x / np.float32(max(k, 1) ** 0.5), y


def assert_same(kind: str, target: str, m: int, n: int, k: int) -> None:
    exe, reference, _ = compiled(kind, target)
    args = arguments(kind, m, n, k)
    np.testing.assert_allclose(exe(*args), reference.run("main", *args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [0, 1, 4, 5, 17])
def test_sizes_at_which_the_code_changes(m: int, target: str) -> None:
    for n in (0, 1, 16, 65):
        for k in (0, 1, 16, 129, 255, 256, 300):
            assert_same("right", target, m, n, k)


@settings(max_examples=tiers.examples(60), deadline=None)
@given(
    kind=st.sampled_from(["right", "batch", "left"]),
    m=st.integers(0, 40),
    n=st.integers(0, 140),
    k=st.integers(0, 400),
)
def test_any_sizes(kind: str, m: int, n: int, k: int) -> None:
    assert_same(kind, "llvm", m, n, k)


def test_many_rows_share_panels() -> None:
    assert_same("right", "llvm", 500, 70, 33)


def test_the_right_operand_is_not_copied_and_the_left_one_is() -> None:
    for kind, copies in (("right", False), ("batch", False), ("left", True)):
        exe, _, context = compiled(kind)
        assert any("transpose" in name for name in exe.data.kernels) is copies
        (decision,) = [d for d in context.decisions if d.step == "fuse_prologues"]
        assert decision.taken is not copies and decision.figures


def test_a_copy_that_something_else_reads_is_made_and_used() -> None:
    exe, reference, context = compiled("copied")
    assert not any(d.step == "fuse_prologues" for d in context.decisions)
    args = arguments("copied", 3, 5, 7)
    for got, want in zip(exe(*args), reference.run("main", *args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
