"""Packing constant weights into panels: where it happens, where not, and that the numbers stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.driver import build
from relaxlite.ir import first_difference, ops, verify
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, If, Let, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.types import TensorType, TupleType
from relaxlite.ir.visitor import Rewriter, bodies, map_functions, program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.pack_constants import pack_constants
from relaxlite.runtime.module import Executable
from relaxlite.target import Target
from tests.support.ir_text import assert_becomes, assert_stays
from tests.support.ir_text import module as parsed

PROGRAM = """
        n = symbol("n")
        @program(symbols=(n,), outputs=1{attrs})
        def product(x: f32[n, 2], {w}, out: f32[n, 3]):
            for i in serial(n):
                for j in serial(3):
                    with allocate((), "float32", "local") as acc:
                        acc[()] = float32(0.0)
                        for r in serial(2):
                            acc[()] += x[i, r] * {load}
                        out[i, j] = acc[()]
"""
PLAIN = PROGRAM.format(attrs="", w="w: f32[2, 3]", load="w[r, j]")
WANTED = PROGRAM.format(attrs=", panels=((1, 2),)", w="w: f32[2, 3]", load="w[r, j]")
PACKED = PROGRAM.format(attrs="", w="w: f32[2, 2, 2]", load="w[j // 2, r, j % 2]")


def assert_same(found: IRModule, text: str) -> None:
    difference = first_difference(found, parsed(text))
    assert difference is None, f"{difference}\n\n{found}"


def main(*calls: str) -> str:
    lines = "\n".join(f"            y{k}: f32[n, 3] = call(product, x, {w}, sym=(n,))" for k, w in enumerate(calls))
    return f"""
        n = symbol("n")
        @function
        def main(x: f32[n, 2], v: f32[2, 3]):
{lines}
            return ({", ".join(f"y{k}" for k in range(len(calls)))},)
"""


WEIGHT = 'const([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "float32")'
PANELS = 'const([[[1.0, 2.0], [4.0, 5.0]], [[3.0, 0.0], [6.0, 0.0]]], "float32")'


def test_a_constant_becomes_panels_and_zeros_fill_the_last() -> None:
    assert_becomes(pack_constants, main(WEIGHT) + WANTED, main(PANELS) + PACKED, stage="lowered")


def test_every_call_of_the_program_is_changed() -> None:
    assert_becomes(pack_constants, main(WEIGHT, WEIGHT) + WANTED, main(PANELS, PANELS) + PACKED, stage="lowered")


def test_an_operand_that_some_call_computes_stays_as_it_is() -> None:
    assert_becomes(pack_constants, main(WEIGHT, "v") + WANTED, main(WEIGHT, "v") + PLAIN, stage="lowered")


def test_a_program_that_asks_for_nothing_stays() -> None:
    assert_stays(pack_constants, main(WEIGHT) + PLAIN, stage="lowered")


# Other readers of what is packed


READER = """
        @program(symbols=(), outputs=1)
        def row_of(place: i64[1], {w}, out: f32[3]):
            for j in serial(3):
                with let_index(place[0]) as p:
                    out[j] = {load}
"""
READS = READER.format(w="w: f32[2, 3]", load="w[p, j]")
READS_PANELS = READER.format(w="w: f32[2, 2, 2]", load="w[j // 2, p, j % 2]")


def reading(product: str, *readers: str) -> str:
    lines = "\n".join(f"            z{k}: f32[3] = call(row_of, p, {w})" for k, w in enumerate(readers))
    return f"""
        n = symbol("n")
        @function
        def main(x: f32[n, 2], v: f32[2, 3], p: i64[1]):
            y: f32[n, 3] = call(product, x, {product}, sym=(n,))
{lines}
            return (y, {", ".join(f"z{k}" for k in range(len(readers)))},)
"""


@pytest.fixture
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the constants of these tests were large."""
    monkeypatch.setattr("relaxlite.passes.products.pack_constants.SHARED_BYTES", 1)


def shared(text: str) -> IRModule:
    """The module, with one constant for all that are equal."""
    known: dict[bytes, Constant] = {}

    class Share(Rewriter):
        def rewrite(self, var: Var, value: Expr) -> Expr | None:
            assert isinstance(value, Call)
            args = (known.setdefault(a.value.tobytes(), a) if isinstance(a, Constant) else a for a in value.args)
            return replace(value, args=tuple(args))

    return map_functions(parsed(text), lambda f: Share().function(f))


def readers_of(text: str) -> tuple[IRModule, int]:
    """The module with packed constants, and how many different constants its calls pass."""
    made = pack_constants(shared(text))
    verify(made, "lowered")
    return made, len({id(a.value) for call in program_calls(made) for a in call.args if isinstance(a, Constant)})


@pytest.mark.usefixtures("share_all")
def test_another_program_reads_the_panels_too() -> None:
    made, constants = readers_of(reading(WEIGHT, WEIGHT, WEIGHT) + WANTED + READS)
    assert constants == 1
    assert_same(made, reading(PANELS, PANELS, PANELS) + PACKED + READS_PANELS)


@pytest.mark.usefixtures("share_all")
@pytest.mark.parametrize("other", ["v", 'const([[0.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "float32")'])
@pytest.mark.parametrize("other_first", [True, False])
def test_a_program_that_also_reads_something_else_stays(other: str, other_first: bool) -> None:
    given = (other, WEIGHT, WEIGHT) if other_first else (WEIGHT, other, WEIGHT)
    made, _ = readers_of(reading(WEIGHT, *given) + WANTED + READS)
    assert_same(made, reading(PANELS, *given) + PACKED + READS)


def test_small_constants_are_kept_twice() -> None:
    made, constants = readers_of(reading(WEIGHT, WEIGHT) + WANTED + READS)
    assert constants == 2
    assert_same(made, reading(PANELS, WEIGHT) + PACKED + READS)


@pytest.mark.usefixtures("share_all")
def test_what_is_packed_for_nobody_stays_for_its_readers() -> None:
    made, _ = readers_of(reading("v", WEIGHT) + WANTED + READS)
    assert_same(made, reading("v", WEIGHT) + PLAIN + READS)


def steps(until: str) -> list[Pass]:
    names = [step.name for step in default_pipeline()]
    return list(default_pipeline()[: names.index(until) + 1])


def model(columns: int, *, in_bodies: bool) -> IRModule:
    """x @ w + bias with a constant w, and the same inside of a branch and a loop."""
    rng = np.random.default_rng(0)
    w = Constant.of(rng.standard_normal((columns, columns), np.float32) / columns)
    bias = Constant.of(rng.standard_normal(columns, np.float32))
    bb = BlockBuilder()
    n = bb.symbol("n")
    ty = TensorType.of((n, columns), "float32")

    def layer(x: Var) -> Var:
        return bb.emit(ops.relu(bb.emit(ops.add(bb.emit(ops.matmul(x, w)), bias))))

    with bb.function("main", x=ty, c=TensorType.of((), "bool")) as (x, c):
        y = layer(x)
        if in_bodies:
            made = []
            for deep in (True, False):
                with bb.body() as scope:
                    bb.result(layer(y) if deep else y)
                made.append(bb.finish(scope))
            y = bb.emit(If(c, made[0], made[1], ty))
            v = Var("v", ty)
            with bb.body() as scope:
                bb.result(Tuple((Constant.of(False), layer(v))))
            y = bb.emit(TupleGetItem(bb.emit(Loop((v,), (y,), c, bb.finish(scope), TupleType((ty,)))), 0))
        bb.result(y)
    return bb.module()


@pytest.mark.parametrize("level", [2, 3, 4])
@pytest.mark.parametrize("columns", [65, 130])
def test_numbers_stay_and_weights_are_packed_once(columns: int, level: int) -> None:
    given = model(columns, in_bodies=True)
    target = Target.parse(f"llvm -mcpu=x86-64-v{level}")
    made = run_passes(given, steps("pack_constants"), PassContext(target, verify=True))
    found = [
        b.value for f in made.functions().values() for body in bodies(f) for b in body.bindings() if isinstance(b, Let)
    ]
    calls = [v for v in found if isinstance(v, Call) and not isinstance(v.callee, Op)]
    weights = {id(a) for c in calls for a in c.args if isinstance(a, Constant) and a.value.ndim == 3}
    assert len(weights) == 1
    for rows in (0, 1, 5):
        for flag in (True, False):
            args = np.random.default_rng(rows).standard_normal((rows, columns), np.float32), np.array(flag)
            want = Interpreter(given).run("main", *args)
            np.testing.assert_allclose(Interpreter(made).run("main", *args), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 16, 40, 65, 130])
def test_packed_kernels_compiled(columns: int) -> None:
    given = model(columns, in_bodies=False)
    exe = rl.compile(given)
    for rows in (0, 1, 3, 33):
        args = np.random.default_rng(rows).standard_normal((rows, columns), np.float32), np.array(True)
        np.testing.assert_allclose(exe(*args), Interpreter(given).run("main", *args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("columns", "is_view"), [(64, True), (96, True), (50, False)])
def test_panels_are_copied_when_a_model_is_loaded_only(columns: int, is_view: bool) -> None:
    """Where nothing fills the last panel: weights are there once until then."""
    weight = np.random.default_rng(0).standard_normal((40, columns)).astype(np.float32)
    bb = BlockBuilder()
    with bb.function("main", x=TensorType.of((bb.symbol("m"), 40), "float32")) as (x,):
        bb.result(bb.emit(ops.matmul(x, weight)))
    data = build(bb.module(), "llvm -mcpu=x86-64-v3")
    (panels,) = data.constants
    assert panels.ndim == 3 and np.shares_memory(panels, weight) == is_view
    (loaded,) = Executable(data).data.constants
    assert loaded.flags.c_contiguous and not np.shares_memory(loaded, panels)
    np.testing.assert_array_equal(loaded, panels)
