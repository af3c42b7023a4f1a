"""Grouped matrix product of floats: each row of x times the matrix of its group, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.program import Buffer, Check, LetIndex, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import TensorType, Type


@register
class GroupedRowsMatmul(Op):
    """Grouped matrix product of floats: out[i] = x[i] @ w[groups[i]], x (m, k), w (groups, k, n), groups int64 (m,)."""

    name = "grouped_rows_matmul"
    operands = ("x", "w", "groups")

    def infer(self, x: Expr, w: Expr, groups: Expr) -> Type:
        xt, wt, gt = self.tensor(x, "x"), self.tensor(w, "w"), self.tensor(groups, "groups")
        if (xt.rank, wt.rank, gt.rank) != (2, 3, 1) or gt.dtype != "int64":
            self.fail(f"takes x (m, k), w (groups, k, n) and int64 groups (m,), got {xt}, {wt}, {gt}")
        if xt.dtype != wt.dtype or not dtypes.is_float(xt.dtype):
            self.fail(f"x and w must be of one float type, got {xt.dtype} and {wt.dtype}")
        assert xt.shape is not None and wt.shape is not None
        return TensorType.of((xt.shape[0], wt.shape[2]), xt.dtype)

    def lower(self, x: Buffer, w: Buffer, groups: Buffer, *, out: Buffer) -> Stmt:
        """For each row, add x[i, k] * w[group, k, :] for each k: the columns are the innermost loop."""

        def row(i: SymExpr) -> Stmt:
            group = SymVar("group")

            def product(k: SymExpr, n: SymExpr) -> Stmt:
                return Store(out, (i, n), (Scalar(x[i, k]) * Scalar(w[group, k, n])).value, "add")

            zeros = loops("n", (w.shape[2],), lambda n: Store(out, (i, n), literal(0, out.dtype)))
            number = Scalar(groups[i])
            is_group = (number >= 0) & (number < index(w.shape[0]))
            check = Check(is_group.value, f"grouped_rows_matmul: a row's group is not among the {w.shape[0]} of w")
            return seq(check, LetIndex(group, groups[i], seq(zeros, loops("kn", (w.shape[1], w.shape[2]), product))))

        pairs = ((groups.shape[0], x.shape[0]), (w.shape[1], x.shape[1]))
        checks = equality_checks("grouped_rows_matmul: rows of groups and x, depths of w and x", *pairs)
        return seq(*checks, loops("i", (x.shape[0],), row))

    def reference(self, x: np.ndarray, w: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return np.einsum("mk,mkn->mn", x, w[groups]) if len(x) else np.zeros((0, w.shape[2]), x.dtype)

    def samples(self) -> Iterable[Sample]:
        def numbers(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
            return rng.integers(0, 3, shape)

        yield Sample((("m", 5), (3, 5, "n"), ("m",)), dtypes=("float32", "float32", "int64"), make={2: numbers})
        yield Sample((("m", "k"), (3, "k", 7), ("m",)), dtypes=("float64", "float64", "int64"), make={2: numbers})
