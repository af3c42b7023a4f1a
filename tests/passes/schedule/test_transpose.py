"""Transposes in tiles: what is scheduled that way, and that every element gets where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.fuse_ops import fuse_ops
from relaxlite.passes.fuse.fuse_programs import fuse_programs
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.reachable import drop_unused
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.support.native_kernel import NativeKernel

Shape = tuple[int | str, ...]
SIZES = {"n": (0, 1, 15, 16, 17, 40, 512), "m": (1, 16, 31, 100), "k": (3,)}


def scheduled(
    shapes: list[Shape], make: Callable[..., Expr], dtype: str = "float32", target: Target | None = None
) -> TensorProgram:
    bb = BlockBuilder()
    symbols = {d: bb.symbol(d) for shape in shapes for d in shape if isinstance(d, str)}
    types = {
        f"x{k}": TensorType.of(tuple(symbols[d] if isinstance(d, str) else d for d in shape), dtype)
        for k, shape in enumerate(shapes)
    }
    with bb.function("main", **types) as params:
        bb.result(make(bb.emit, *params))
    context = PassContext(target or Target.host())
    merged = drop_unused(fuse_programs(fuse_ops(legalize(decompose(bb.module())), context)))
    (program,) = merged.programs().values()
    return schedule_program(program, context.target)


def is_tiled(program: TensorProgram) -> bool:
    return "_tile" in print_module(IRModule({"kernel": program}))


def combinations(program: TensorProgram) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for symbol in program.symbols:
        found = [{**values, symbol.name: size} for values in found for size in SIZES[symbol.name]]
    return found


def check(shapes: list[Shape], make: Callable[..., Expr], numpy: Callable[..., Any], dtype: str = "float32") -> None:
    program = scheduled(shapes, make, dtype)
    assert is_tiled(program)
    kernel, rng = NativeKernel(program), np.random.default_rng(0)
    for values in combinations(program):
        args = [
            rng.integers(
                0, 2 if dtype == "bool" else 100, [values[d] if isinstance(d, str) else d for d in shape]
            ).astype(dtypes.to_numpy(dtype))
            for shape in shapes
        ]
        wanted = np.ascontiguousarray(numpy(*args))
        got = np.zeros_like(wanted)
        assert kernel([*args, got], [values[s.name] for s in program.symbols]) == 0
        np.testing.assert_array_equal(got, wanted, err_msg=str(values))


PERMUTED: list[tuple[Shape, tuple[int, ...]]] = [
    (("n", "m"), (1, 0)),
    (("n", 64), (1, 0)),
    ((48, 33), (1, 0)),
    (("k", "n", "m"), (0, 2, 1)),
    (("n", "k", "m"), (2, 1, 0)),
    (("k", "n", 2, "m"), (0, 2, 3, 1)),
    (("k", "n", 5, 16), (0, 3, 1, 2)),
    (("k", 16, 5, "m"), (0, 2, 3, 1)),
    ((1024, "m"), (1, 0)),
    (("k", 512, 70), (0, 2, 1)),
]


@pytest.mark.parametrize(("shape", "axes"), PERMUTED)
def test_transposes(shape: Shape, axes: tuple[int, ...]) -> None:
    check([shape], lambda emit, x: emit(ops.transpose(x, axes=axes)), lambda x: x.transpose(axes))


@pytest.mark.parametrize("dtype", ["float64", "int64", "int32", "float16", "bfloat16", "int8", "uint8", "bool"])
def test_dtypes(dtype: str) -> None:
    check([("n", "m")], lambda emit, x: emit(ops.transpose(x, axes=(1, 0))), lambda x: x.T, dtype)


def test_rows_of_the_result_that_start_alike_get_some_tiles_each_at_a_time() -> None:
    """Where the size decides, there are both ways: a loop over tiles that are read one after another, and two."""

    def loops(width: int | str) -> int:
        program = scheduled([(width, "m")], lambda emit, x: emit(ops.transpose(x, axes=(1, 0))))
        return print_module(IRModule({"kernel": program})).count("in serial(min(4, ")

    assert [loops(width) for width in (500, 512, "n")] == [1, 2, 3]


def test_what_is_fused_runs_on_the_tile() -> None:
    def make(emit: Any, x: Var, y: Var, z: Var) -> Expr:
        turned = emit(ops.transpose(emit(ops.multiply(x, x)), axes=(1, 0)))
        return emit(ops.add(emit(ops.relu(emit(ops.subtract(turned, y)))), z))

    check([("n", "m"), ("m", "n"), ("n",)], make, lambda x, y, z: np.maximum((x * x).T - y, 0) + z)


def test_two_turned_operands() -> None:
    def make(emit: Any, x: Var, y: Var) -> Expr:
        return emit(ops.transpose(emit(ops.subtract(x, y)), axes=(1, 0)))

    check([("n", "m"), ("n", "m")], make, lambda x, y: (x - y).T)


UNTILED: dict[str, tuple[list[Shape], Callable[..., Expr]]] = {
    "the last axis stays": ([("n", "m", 8)], lambda emit, x: emit(ops.transpose(x, axes=(1, 0, 2)))),
    "fewer columns than a tile": ([("n", 3)], lambda emit, x: emit(ops.transpose(x, axes=(1, 0)))),
    "elementwise": ([("n", "m")], lambda emit, x: emit(ops.relu(x))),
    "a column for each row": ([("n", "m"), ("n", 1)], lambda emit, x, y: emit(ops.add(x, y))),
    "every second element": (
        [("n", 64)],
        lambda emit, x: emit(ops.slice(x, (0,), (32,), axes=(1,), steps=(2,))),
    ),
}


@pytest.mark.parametrize("name", UNTILED)
def test_is_not_tiled(name: str) -> None:
    assert not is_tiled(scheduled(*UNTILED[name]))


def test_tiles_change_places_in_registers() -> None:
    """... and no element on its own, nor a tile in memory."""
    target = Target.parse("llvm -mcpu=znver4")
    made = scheduled([(64, 64)], lambda emit, x: emit(ops.transpose(x, axes=(1, 0))), target=target)
    text = emit_assembly({"turn": made}, target)
    stores = [line for line in text.splitlines() if "vmovups\t%zmm" in line]
    assert len(stores) == 16 and not any("%rsp" in line for line in stores)
    assert "vmovss" not in text and "vinsertps" not in text
