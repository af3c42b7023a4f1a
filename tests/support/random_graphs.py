"""Random graphs for tests: a few ops over tensors of symbolic sizes, well-behaved on every input.

All sizes come from two symbols, n and m, that may be 0. Values stay small, so that float32 results can be compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, If, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr, as_int, product
from relaxlite.ir.types import TensorType, TupleType

MAX_RANK = 3
UNARY = ("tanh", "sigmoid", "relu", "neg", "abs", "gelu")
BINARY = ("add", "subtract", "maximum", "minimum")
KINDS = (
    "unary", "binary", "binary", "product", "where", "sum", "max", "transpose", "slice", "pad", "flatten", "concat",
    "gather", "broadcast", "cumsum", "matmul", "softmax", "match",
    "positive",
)  # fmt: skip
CONTROL = ("if", "loop")


class Graph:
    """Draws a function main(x: f32[n, m], v: f32[m], places: i64[n], flag: bool[])."""

    def __init__(self, draw: Any, *, control: bool) -> None:
        self.draw, self.bb = draw, BlockBuilder()
        self.kinds = (*KINDS, *CONTROL) if control else KINDS
        self.n, self.m = self.bb.symbol("n"), self.bb.symbol("m")
        self.places = Var("places", TensorType.of((self.n,), "int64"))
        self.flag = Var("flag", TensorType.of((), "bool"))
        self.pool: list[Expr] = [
            Var("x", TensorType.of((self.n, self.m), "float32")),
            Var("v", TensorType.of((self.m,), "float32")),
        ]

    def module(self, size: int) -> IRModule:
        params = (*self.pool, self.places, self.flag)
        with self.bb.function_with_params("main", params):  # type: ignore[arg-type]
            self.steps(size)
            count = self.draw(st.integers(1, 3))
            results = [self.pool[-1], *(self.pick() for _ in range(count - 1))]
            self.bb.result(results[0] if count == 1 else Tuple(tuple(results)))
        return self.bb.module()

    def steps(self, size: int) -> None:
        for _ in range(size):
            made = getattr(self, "_" + self.draw(st.sampled_from(self.kinds)))(self.pick())
            if made is not None:
                self.pool.append(self.bb.leaf(made))

    def pick(self) -> Expr:
        """An operand; a recent one more often, so that chains come about."""
        return self.pool[-1 - min(self.draw(st.integers(0, len(self.pool) - 1)), self.draw(st.integers(0, 3)))]

    # each gives an expression, or None where it does not apply

    def _unary(self, x: Expr) -> Expr:
        return ops.get_op(self.draw(st.sampled_from(UNARY)))(x)

    def _binary(self, x: Expr) -> Expr | None:
        y = self.pick()
        return ops.get_op(self.draw(st.sampled_from(BINARY)))(x, y) if broadcasts(x, y) else None

    def _product(self, x: Expr) -> Expr | None:
        y = self.pick()
        return ops.multiply(self.bb.emit(ops.tanh(x)), self.bb.emit(ops.tanh(y))) if broadcasts(x, y) else None

    def _where(self, x: Expr) -> Expr | None:
        y = self.pick()
        return ops.where(self.bb.emit(ops.less(x, y)), x, y) if broadcasts(x, y) else None

    def _sum(self, x: Expr) -> Expr:
        return ops.sum(self.bb.emit(ops.tanh(x)), **self._axes(x))

    def _max(self, x: Expr) -> Expr:
        return ops.tanh(self.bb.emit(ops.max(x, **self._axes(x))))

    def _axes(self, x: Expr) -> dict[str, Any]:
        axes = self.draw(st.sets(st.sampled_from(range(rank(x))))) if rank(x) else set()
        return {"axes": tuple(sorted(axes)), "keepdims": self.draw(st.booleans())}

    def _transpose(self, x: Expr) -> Expr:
        return ops.transpose(x, axes=tuple(self.draw(st.permutations(range(rank(x))))))

    def _slice(self, x: Expr) -> Expr:
        begins = tuple(d // 2 if self.draw(st.booleans()) else d - d for d in dims(x))
        return ops.slice(x, begins, tuple(d - b for d, b in zip(dims(x), begins, strict=True)))

    def _pad(self, x: Expr) -> Expr:
        amounts = st.integers(0, 2)
        before, after = (tuple(self.draw(amounts) for _ in dims(x)) for _ in range(2))
        return ops.pad(x, before, after)

    def _flatten(self, x: Expr) -> Expr:
        return ops.reshape(x, (product(dims(x)),))

    def _concat(self, x: Expr) -> Expr | None:
        return ops.concat(x, x, axis=self.draw(st.integers(0, rank(x) - 1))) if rank(x) else None

    def _gather(self, x: Expr) -> Expr | None:
        axes = [k for k, d in enumerate(dims(x)) if d is self.n]
        return ops.gather(x, self.places, axis=self.draw(st.sampled_from(axes))) if axes else None

    def _broadcast(self, x: Expr) -> Expr | None:
        return ops.broadcast_to(x, (2, *dims(x))) if rank(x) < MAX_RANK else None

    def _cumsum(self, x: Expr) -> Expr | None:
        return ops.cumsum(self.bb.emit(ops.tanh(x)), axis=rank(x) - 1) if rank(x) else None

    def _matmul(self, x: Expr) -> Expr | None:
        if rank(x) != 2:
            return None
        x = self.bb.emit(ops.tanh(x))
        return ops.tanh(self.bb.emit(ops.matmul(x, self.bb.emit(ops.transpose(x, axes=(1, 0))))))

    def _softmax(self, x: Expr) -> Expr | None:
        return ops.softmax(x, axis=rank(x) - 1) if rank(x) else None

    def _match(self, x: Expr) -> Expr | None:
        """The same tensor with symbols of its own, which later ops then use."""
        if rank(x) == 0 or any(as_int(d) is not None for d in dims(x)):
            return None
        return self.bb.match_shape(x, tuple(self.bb.symbol(f"k{k}") for k in range(rank(x))))

    def _positive(self, x: Expr) -> Expr:
        """The elements that are greater than 0: how many, only the data tells."""
        flat = self.bb.emit(ops.reshape(x, (product(dims(x)),)))
        count = self.bb.symbol("count")
        places = self.bb.match_shape(self.bb.emit(ops.non_zero(self.bb.emit(ops.relu(flat)))), (1, count))
        return ops.gather(flat, self.bb.emit(ops.reshape(places, (count,))), axis=0)

    def _if(self, x: Expr) -> Expr:
        bodies = []
        for _ in range(2):
            outer = list(self.pool)
            with self.bb.body() as scope:
                self.steps(self.draw(st.integers(0, 2)))
                same = [y for y in self.pool if y.ty == x.ty]
                self.bb.result(self.draw(st.sampled_from(same)))
            self.pool = outer
            bodies.append(self.bb.finish(scope))
        return If(self.flag, bodies[0], bodies[1], x.ty)

    def _loop(self, x: Expr) -> Expr:
        """Three times, or not at all."""
        outer = list(self.pool)
        carried, count = Var("carried", x.ty), Var("count", TensorType.of((), "int64"))
        self.pool.append(carried)
        with self.bb.body() as scope:
            self.steps(self.draw(st.integers(0, 2)))
            same = [y for y in self.pool if y.ty == x.ty]
            left = self.bb.emit(ops.subtract(count, np.array(1)))
            again = self.bb.emit(ops.greater(left, np.array(0)))
            self.bb.result(Tuple((again, self.draw(st.sampled_from(same)), left)))
        self.pool = outer
        ty = TupleType((x.ty, count.ty))
        inits = (x, Constant.of(3, "int64"))
        loop = self.bb.emit(Loop((carried, count), inits, self.flag, self.bb.finish(scope), ty))
        return TupleGetItem(loop, 0)


def dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return x.ty.shape


def rank(x: Expr) -> int:
    return len(dims(x))


def broadcasts(x: Expr, y: Expr) -> bool:
    """Whether the two are known to broadcast."""
    pairs = zip(reversed(dims(x)), reversed(dims(y)), strict=False)
    return all(a is b or as_int(a) == 1 or as_int(b) == 1 for a, b in pairs)


@st.composite
def graphs(draw: Any, *, size: int = 7, control: bool = False) -> IRModule:
    return Graph(draw, control=control).module(draw(st.integers(1, size)))


def arguments(n: int, m: int, *, flag: bool = True, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    places = rng.integers(0, max(n, 1), n)
    return rng.standard_normal((n, m), np.float32), rng.standard_normal(m, np.float32), places, np.array(flag)


def assert_same_results(got: Any, expected: Any) -> None:
    """Tensors or tuples of them, within float32's reach."""
    both = [r if isinstance(r, tuple) else (r,) for r in (got, expected)]
    for a, b in zip(*both, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
