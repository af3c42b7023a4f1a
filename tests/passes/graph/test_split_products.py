"""Products whose columns are used in parts: computed apart where that costs nothing, and right at every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, Let, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.graph.split_products import split_products
from relaxlite.target import Target

DEPTH, HEADS, WIDTH = 20, 2, 12
INNER = HEADS * WIDTH
Form = Callable[["Graph"], Expr]


class Graph:
    """main(x: f32[b, n, 20]) whose product with constant weights has `columns`."""

    def __init__(self, form: Form, columns: int) -> None:
        self.bb, self.columns, self.rng = BlockBuilder(), columns, np.random.default_rng(0)
        self.b, self.n = self.bb.symbol("b"), self.bb.symbol("n")
        with self.bb.function("main", x=TensorType.of((self.b, self.n, DEPTH), "float32")) as (self.x,):
            self.bb.result(form(self))
        self.module = self.bb.module()

    def op(self, name: str, *args: Any, **attrs: Any) -> Var:
        return self.bb.emit(get_op(name)(*args, **attrs))

    def array(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    @property
    def product(self) -> Var:
        return self.op("matmul", self.x, self.array(DEPTH, self.columns))

    def part(self, y: Expr, begin: int, size: int, axis: int = -1) -> Var:
        return self.op("slice", y, (begin,), (size,), axes=(axis,))


def gate_and_up(g: Graph) -> Expr:
    y, half = g.op("add", g.product, g.array(g.columns)), g.columns // 2
    return g.op("multiply", g.op("silu", g.part(y, 0, half)), g.part(y, half, half))


def queries_keys_and_values(g: Graph) -> Expr:
    """As of a fused projection: of other widths, one in another layout; some columns are never used."""
    y = g.op("multiply", g.op("add", g.product, g.array(1, g.columns)), np.float32(0.5))
    q, k, v = g.part(y, 0, 24), g.part(y, 24, 16), g.part(y, 40, 16)
    return Tuple((q, g.op("transpose", k, axes=(0, 2, 1)), g.op("tanh", v)))


def as_heads(g: Graph, take: Callable[[Expr, int], Expr]) -> Expr:
    y = g.op("reshape", g.op("add", g.product, g.array(g.columns)), (g.b, g.n, 3, HEADS, WIDTH))
    y = g.op("transpose", y, axes=(2, 0, 3, 1, 4))
    q, k, v = (take(y, which) for which in range(3))
    return Tuple((q, g.op("neg", k), v))


def stacked_heads(g: Graph) -> Expr:
    return as_heads(g, lambda y, which: g.op("gather", y, np.array(which - 3), axis=0))


def sliced_heads(g: Graph) -> Expr:
    return as_heads(g, lambda y, which: g.op("squeeze", g.part(y, which, 1, axis=0), axes=(0,)))


FORMS: dict[Form, tuple[int, int]] = {  # columns, products afterwards
    gate_and_up: (66, 2),
    queries_keys_and_values: (60, 3),
    stacked_heads: (3 * INNER, 3),
    sliced_heads: (3 * INNER, 3),
}


def used_twice(g: Graph) -> Expr:
    y = g.product
    return Tuple((g.part(y, 0, 16), g.part(y, 16, 16), y))


def overlapping(g: Graph) -> Expr:
    y = g.product
    return Tuple((g.part(y, 0, 20), g.part(y, 12, 20)))


def narrow(g: Graph) -> Expr:
    y = g.product
    return Tuple((g.part(y, 0, 28), g.part(y, 28, 4)))


def inner_dimension(g: Graph) -> Expr:
    """Every other group of columns: the sliced dimension is not the outermost that the columns became."""
    y = g.op("reshape", g.product, (g.b, g.n, 2, 2, 8))
    return Tuple((g.part(y, 0, 1, axis=3), g.part(y, 1, 1, axis=3)))


def rows_too(g: Graph) -> Expr:
    y = g.product
    return Tuple(tuple(g.op("slice", y, (0, 0, k * 16), (g.b, 1, 16)) for k in range(2)))


def softmax_between(g: Graph) -> Expr:
    y = g.op("softmax", g.product, axis=-1)
    return Tuple((g.part(y, 0, 16), g.part(y, 16, 16)))


STAY: dict[Form, str] = {
    used_twice: "the whole result is used too",
    overlapping: "parts overlap",
    narrow: "a part has 4 columns",
    inner_dimension: "",
    rows_too: "",
    softmax_between: "",
}


def split(module: IRModule) -> tuple[IRModule, list[str]]:
    context = PassContext(Target.host())
    return eliminate_dead(split_products(module, context)), context.notes


def op_names(module: IRModule) -> list[str]:
    bindings = module["main"].body.bindings()  # type: ignore[union-attr]
    calls = [b.value for b in bindings if isinstance(b, Let) and isinstance(b.value, Call)]
    return [call.callee.name for call in calls if isinstance(call.callee, Op)]


def assert_same(got: Any, want: Any) -> None:
    both = [r if isinstance(r, tuple) else (r,) for r in (got, want)]
    for a, b in zip(*both, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_parts_become_products(form: Form) -> None:
    columns, count = FORMS[form]
    given = Graph(form, columns).module
    made, notes = split(given)
    names = op_names(made)
    assert names.count("matmul") == count and "slice" not in names and "gather" not in names, notes
    exe = rl.compile(given)
    for b, n in [(0, 2), (1, 1), (2, 0), (2, 7), (1, 33)]:
        x = np.random.default_rng(n).standard_normal((b, n, DEPTH)).astype(np.float32)
        want = Interpreter(given).run("main", x)
        assert_same(Interpreter(made).run("main", x), want)
        assert_same(exe(x), want)


@pytest.mark.parametrize("form", STAY)
def test_what_would_cost_something_stays_and_says_why(form: Form) -> None:
    given = Graph(form, 32).module
    made, notes = split(given)
    assert op_names(made) == op_names(given)
    assert any(STAY[form] in note for note in notes) if STAY[form] else not notes
