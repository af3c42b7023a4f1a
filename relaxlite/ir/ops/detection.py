"""Non-maximum suppression: from many overlapping boxes the best ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, TupleGetItem
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import Shape
from relaxlite.ir.ops.data_dependent import ONE, ZERO, advance, bind_count, counter
from relaxlite.ir.ops.elementwise import FLOAT, check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.scalars import Scalar, index, literal, select
from relaxlite.ir.ops.slicing import only_element
from relaxlite.ir.ops.sorting import argsort_reference
from relaxlite.ir.program import Allocate, Buffer, IfThenElse, LetIndex, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.ir.types import TensorType, TupleType, Type


@register
class NmsSelect(Op):
    """Per batch and class, the boxes that survive, best first: (kept (b, c, n), counts (b, c)), both int64.

    `order` sorts the scores in descending order; only the first counts[b, c] elements of kept[b, c] mean anything.
    """

    name = "nms_select"
    operands = ("boxes", "scores", "order", "iou_threshold", "score_threshold", "limit")
    attrs = {"center_point_box": Attr("bool", False)}

    def infer(self, boxes: Expr, scores: Expr, *rest: Expr, center_point_box: bool) -> Type:
        shape = self.tensor(scores, "scores").shape or ()
        return TupleType((TensorType.of(shape, "int64"), TensorType.of(shape[:2], "int64")))

    def lower(
        self, boxes: Buffer, scores: Buffer, order: Buffer, iou_threshold: Buffer, score_threshold: Buffer,
        limit: Shape, *, out: tuple[Buffer, Buffer], center_point_box: bool,
    ) -> Stmt:  # fmt: skip
        kept, counts = out
        overlaps = Buffer.of("overlaps", (1,), "bool", "local")
        zero = (sym(0),)

        def row(b: SymExpr, c: SymExpr) -> Stmt:
            def consider(p: SymVar, m: SymVar) -> Stmt:
                def compare(s: SymExpr) -> Stmt:
                    q = SymVar("q")
                    iou = _iou(_corners(boxes, b, p, center_point_box), _corners(boxes, b, q, center_point_box))
                    hit = iou > Scalar(only_element(iou_threshold))
                    return LetIndex(q, kept[b, c, s], Store(overlaps, zero, hit.value, "or"))

                keep = seq(Store(kept, (b, c, m), index(p).value), Store(counts, (b, c), ONE, "add"))
                return seq(
                    Store(overlaps, zero, literal(False, "bool")),
                    loops("s", (m,), compare),
                    IfThenElse((~Scalar(overlaps[0])).value, keep),
                )

            def visit(t: SymExpr) -> Stmt:
                p, m = SymVar("p"), SymVar("m")
                good = Scalar(scores[b, c, p]) > Scalar(only_element(score_threshold))
                entry = IfThenElse((good & (index(m) < limit[0])).value, consider(p, m))
                return LetIndex(p, order[b, c, t], LetIndex(m, counts[b, c], entry))

            return seq(Store(counts, (b, c), ZERO), loops("t", (scores.shape[2],), visit))

        pairs = [(boxes.shape[0], scores.shape[0]), (boxes.shape[1], scores.shape[2]), (boxes.shape[2], sym(4))]
        ones = [(d, sym(1)) for threshold in (iou_threshold, score_threshold) for d in threshold.shape]
        checks = (
            *equality_checks("non_max_suppression: boxes (b, n, 4) and scores (b, c, n) do not fit", *pairs),
            *equality_checks("non_max_suppression: a threshold must have one element", *ones),
        )
        return seq(*checks, Allocate(overlaps, loops("bc", scores.shape[:2], row)))

    def reference(
        self, boxes: Any, scores: Any, order: Any, iou_threshold: Any, score_threshold: Any, limit: Any,
        *, center_point_box: bool,
    ) -> Any:  # fmt: skip
        kept, counts = np.zeros(scores.shape, np.int64), np.zeros(scores.shape[:2], np.int64)
        for b, c in np.ndindex(scores.shape[:2]):
            chosen = _select_reference(
                boxes[b], scores[b, c], order[b, c], float(iou_threshold.reshape(-1)[0]),
                float(score_threshold.reshape(-1)[0]), int(limit[0]), center_point_box,
            )  # fmt: skip
            kept[b, c, : len(chosen)], counts[b, c] = chosen, len(chosen)
        return kept, counts


def _corners(boxes: Buffer, b: SymExpr, p: SymExpr, center: bool) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """(low, high) of both sides; corner boxes may name any two opposite corners."""
    v = [Scalar(boxes[b, p, k]) for k in range(4)]
    if center:
        return v[0] - v[2] / 2.0, v[0] + v[2] / 2.0, v[1] - v[3] / 2.0, v[1] + v[3] / 2.0
    return v[0].minimum(v[2]), v[0].maximum(v[2]), v[1].minimum(v[3]), v[1].maximum(v[3])


def _iou(a: tuple[Scalar, ...], b: tuple[Scalar, ...]) -> Scalar:
    """Intersection over union; 0 for boxes without area."""
    sides = [(a[k + 1].minimum(b[k + 1]) - a[k].maximum(b[k])).maximum(0.0) for k in (0, 2)]
    common = sides[0] * sides[1]
    union = (a[1] - a[0]) * (a[3] - a[2]) + (b[1] - b[0]) * (b[3] - b[2]) - common
    return select(union > 0.0, common / union, 0.0)


def _select_reference(
    boxes: Any, scores: Any, order: Any, iou_threshold: float, score_threshold: float, limit: int, center: bool
) -> list[int]:
    corners = boxes.astype(np.float64)
    if center:
        half = corners[:, 2:] / 2
        corners = np.concatenate([corners[:, :2] - half, corners[:, :2] + half], 1)
    low, high = np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])
    area = np.prod(high - low, axis=1)
    chosen: list[int] = []
    for p in order:
        common = [np.prod(np.maximum(np.minimum(high[p], high[q]) - np.maximum(low[p], low[q]), 0)) for q in chosen]
        ious = [c / max(area[p] + area[q] - c, 1e-30) for c, q in zip(common, chosen, strict=True)]
        if len(chosen) < limit and scores[p] > score_threshold and all(v <= iou_threshold for v in ious):
            chosen.append(int(p))
    return chosen


@register
class NmsCollect(Op):
    """The survivors of every batch and class as rows (batch, class, box): int64 (count, 3)."""

    name = "nms_collect"
    operands = ("kept", "counts", "count")

    def infer(self, kept: Expr, counts: Expr, count: Expr) -> Type:
        return TensorType.of((*self.shape(count, "count"), 3), "int64")

    def lower(self, kept: Buffer, counts: Buffer, count: Shape, *, out: Buffer) -> Stmt:
        result = counter()

        def visit(b: SymExpr, c: SymExpr, s: SymExpr) -> Stmt:
            r = SymVar("r")
            row = (index(b).value, index(c).value, kept[b, c, s])
            stores = [Store(out, (r, sym(k)), value) for k, value in enumerate(row)]
            is_kept = (index(s) < Scalar(counts[b, c])) & (Scalar(result[0]) < count[0])
            return IfThenElse(is_kept.value, LetIndex(r, result[0], seq(*stores, advance(result))))

        return Allocate(result, seq(Store(result, (sym(0),), ZERO), loops("bcs", kept.shape, visit)))

    def reference(self, kept: Any, counts: Any, count: Any) -> Any:
        rows = [(b, c, kept[b, c, s]) for b, c in np.ndindex(counts.shape) for s in range(counts[b, c])]
        return np.array(rows, np.int64).reshape(-1, 3)


@register
class NonMaxSuppression(Op):
    """The boxes that survive non-maximum suppression: int64 rows (batch, class, box), best first in each class.

    boxes (b, n, 4), scores (b, c, n). A box goes when its score is not above `score_threshold`, when it overlaps a
    better one by more than `iou_threshold`, or when its class has `limit` (a shape of one value) boxes already. Boxes
    are (y1, x1, y2, x2), or (x, y, width, height) with `center_point_box`. The type has no shape: bind it with a
    MatchShape.
    """

    name = "non_max_suppression"
    operands = ("boxes", "scores", "iou_threshold", "score_threshold", "limit")
    attrs = {"center_point_box": Attr("bool", False)}

    def infer(
        self, boxes: Expr, scores: Expr, iou_threshold: Expr, score_threshold: Expr, limit: Expr, **attrs: Any
    ) -> Type:
        for operand, name, rank in ((boxes, "boxes", 3), (scores, "scores", 3)):
            ty = self.tensor(operand, name)
            check_dtype(self, ty, FLOAT, name)
            if ty.rank != rank:
                self.fail(f"{name} must have rank {rank}, got {ty}")
        if len(self.shape(limit, "limit")) != 1:
            self.fail("limit must be a shape of one value")
        return TensorType(None, "int64", 2)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        boxes, scores, iou_threshold, score_threshold, limit = call.args
        order = bb.emit(get_op("argsort")(scores, descending=True))
        select_op = get_op("nms_select")
        selected = bb.emit(
            select_op(
                boxes,
                scores,
                order,
                iou_threshold,
                score_threshold,
                limit,
                center_point_box=call.attrs["center_point_box"],
            )
        )
        kept, counts = bb.emit(TupleGetItem(selected, 0)), bb.emit(TupleGetItem(selected, 1))
        total = bb.emit(get_op("sum")(counts))
        size = bind_count(bb, bb.emit(get_op("reshape")(total, shape_value((1,)))), "selected")
        return get_op("nms_collect")(kept, counts, shape_value((size,)))

    def reference(
        self, boxes: Any, scores: Any, iou_threshold: Any, score_threshold: Any, limit: Any, *, center_point_box: bool
    ) -> Any:
        order = argsort_reference(scores, -1, descending=True)
        kept, counts = NmsSelect().reference(
            boxes, scores, order, iou_threshold, score_threshold, limit, center_point_box=center_point_box
        )
        return NmsCollect().reference(kept, counts, None)

    def samples(self) -> Iterable[Sample]:
        def boxes(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return np.concatenate([rng.integers(0, 5, (*shape[:2], 2)), rng.integers(5, 12, (*shape[:2], 2))], -1)

        draws = {0: boxes, 2: lambda shape, rng: np.full(shape, 0.4), 3: lambda shape, rng: np.full(shape, -0.5)}
        types = ("float32", "float32", "float32", "float32", "shape")
        shapes = ((2, "n", 4), (2, 3, "n"), (), (1,), (2,))
        yield Sample(shapes, {}, types, make=draws)
        yield Sample(shapes, {"center_point_box": True}, types, make=draws)
