"""Rotary embedding: the forms that exporters write become one op, near misses stay, and the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import TypeInferenceError
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.eliminate import eliminate_common
from relaxlite.passes.graph.recognize import recognize
from relaxlite.target import Target

HEADS, WIDTH = 3, 8
HALF = WIDTH // 2
Form = Callable[["Graph"], Expr]


class Graph:
    """main(x: f32[b, 3, n, 8], cos: f32[n, table], sin: f32[n, table])"""

    def __init__(self, form: Form, table: int) -> None:
        self.bb = BlockBuilder()
        self.b, self.n = self.bb.symbol("b"), self.bb.symbol("n")
        tables = TensorType.of((self.n, table), "float32")
        x = TensorType.of((self.b, HEADS, self.n, WIDTH), "float32")
        with self.bb.function("main", x=x, cos=tables, sin=tables) as (self.x, self.cos, self.sin):
            self.bb.result(form(self))
        self.module = self.bb.module()

    def op(self, name: str, *args: Any, **attrs: Any) -> Var:
        return self.bb.emit(get_op(name)(*args, **attrs))

    def half(self, x: Expr, which: int, *, step: int = 1, size: int = HALF) -> Var:
        """One half of the rows, or with a step of 2 every other element."""
        return self.op("slice", x, (which if step == 2 else which * size,), (size,), axes=(3,), steps=(step,))

    def whole(self, x: Expr, which: int) -> Var:
        """The same as a slice of all axes."""
        return self.op("slice", x, (0, 0, 0, which * HALF), (self.b, HEADS, self.n, HALF))

    def combined(self, turned: Expr) -> Var:
        return self.op("add", self.op("multiply", self.x, self.cos), self.op("multiply", turned, self.sin))

    def stacked(self, a: Expr, b: Expr, axis: int = -1) -> Var:
        wide = [self.op("expand_dims", part, axes=(4,)) for part in (a, b)]
        return self.op("reshape", self.op("concat", *wide, axis=axis), (self.b, HEADS, self.n, WIDTH))

    def parts(self, a: Expr, b: Expr) -> tuple[Var, Var]:
        """a * cos - b * sin, b * cos + a * sin"""
        products = [[self.op("multiply", part, table) for table in (self.cos, self.sin)] for part in (a, b)]
        first = self.op("subtract", products[0][0], products[1][1])
        return first, self.op("add", products[1][0], products[0][1])


def rotated(g: Graph) -> Expr:
    return g.combined(g.op("concat", g.op("neg", g.whole(g.x, 1)), g.whole(g.x, 0), axis=3))


def rotated_by_minus_one(g: Graph) -> Expr:
    turned = g.op("concat", g.op("multiply", g.half(g.x, 1), np.float32(-1)), g.half(g.x, 0), axis=-1)
    return g.op("add", g.op("multiply", g.sin, turned), g.op("multiply", g.cos, g.x))


def halves(g: Graph) -> Expr:
    return g.op("concat", *g.parts(g.half(g.x, 0), g.half(g.x, 1)), axis=3)


def interleaved(g: Graph) -> Expr:
    return g.stacked(*g.parts(g.half(g.x, 0, step=2), g.half(g.x, 1, step=2)))


def interleaved_rotation(g: Graph) -> Expr:
    return g.combined(g.stacked(g.op("neg", g.half(g.x, 1, step=2)), g.half(g.x, 0, step=2)))


FORMS: dict[Form, int] = {
    rotated: WIDTH, rotated_by_minus_one: WIDTH, halves: HALF, interleaved: HALF, interleaved_rotation: WIDTH
}  # fmt: skip


def turned_the_other_way(g: Graph) -> Expr:
    return g.combined(g.op("concat", g.half(g.x, 1), g.op("neg", g.half(g.x, 0)), axis=3))


def parts_in_place(g: Graph) -> Expr:
    return g.combined(g.op("concat", g.op("neg", g.half(g.x, 0)), g.half(g.x, 1), axis=3))


def side_by_side_where_it_should_be_stacked(g: Graph) -> Expr:
    return g.combined(g.op("concat", g.op("neg", g.half(g.x, 1, step=2)), g.half(g.x, 0, step=2), axis=3))


def parts_of_two_tensors(g: Graph) -> Expr:
    return g.combined(g.op("concat", g.op("neg", g.half(g.op("tanh", g.x), 1)), g.half(g.x, 0), axis=3))


def stacked_before_the_rows(g: Graph) -> Expr:
    wide = [g.op("reshape", p, (g.b, HEADS, g.n, 1, HALF)) for p in (g.op("neg", g.half(g.x, 1)), g.half(g.x, 0))]
    return g.combined(g.op("reshape", g.op("concat", *wide, axis=4), (g.b, HEADS, g.n, WIDTH)))


NEAR_MISSES: dict[Form, str] = {
    turned_the_other_way: "",
    parts_in_place: "the parts are not the first and the second half",
    side_by_side_where_it_should_be_stacked: "the parts are not the first and the second half",
    parts_of_two_tensors: "",
    stacked_before_the_rows: "the parts are not every other element",
}


def recognized(module: IRModule) -> tuple[IRModule, list[str]]:
    context = PassContext(Target.parse("llvm -mcpu=x86-64-v3"))
    return recognize(eliminate_common(module), context), context.notes


def op_names(module: IRModule) -> list[str]:
    bindings = module["main"].body.bindings()  # type: ignore[union-attr]
    calls = [b.value for b in bindings if isinstance(b, Let) and isinstance(b.value, Call)]
    return [call.callee.name for call in calls if isinstance(call.callee, Op)]


def arguments(b: int, n: int, table: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    return [rng.standard_normal(s).astype(np.float32) for s in ((b, HEADS, n, WIDTH), (n, table), (n, table))]


@pytest.mark.parametrize("form", FORMS)
def test_form_becomes_one_op(form: Form) -> None:
    table = FORMS[form]
    given = Graph(form, table).module
    made, notes = recognized(given)
    assert op_names(made) == ["rotary"], notes
    exe = rl.compile(given)
    for b, n in [(0, 2), (1, 1), (2, 0), (2, 7), (1, 33)]:
        args = arguments(b, n, table)
        want = Interpreter(given).run("main", *args)
        np.testing.assert_allclose(Interpreter(decompose(made)).run("main", *args), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(exe(*args), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_miss_stays(form: Form) -> None:
    made, notes = recognized(Graph(form, WIDTH).module)
    assert "rotary" not in op_names(made)
    reason = NEAR_MISSES[form]
    assert any(reason in note for note in notes) if reason else not any("rotary" in note for note in notes)


def test_tables_of_another_length_are_refused() -> None:
    """That broadcast is decided at run time; the op wants to know."""
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    x, table = (TensorType.of((size, WIDTH), "float32") for size in (n, m))
    x_, short, odd = Var("x", x), Var("table", table), Var("y", TensorType.of((n, 7), "float32"))
    with pytest.raises(TypeInferenceError, match=r"cos .* is not known to broadcast to x"):
        get_op("rotary")(x_, short, short)
    with pytest.raises(TypeInferenceError, match="rows of a constant, even width, got"):
        get_op("rotary")(odd, odd, odd)
