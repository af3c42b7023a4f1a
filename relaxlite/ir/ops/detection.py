"""Non-maximum suppression of overlapping boxes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, TupleGetItem
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import Shape
from relaxlite.ir.ops.data_dependent import ONE, ZERO, bind_count, increment, make_counter
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
    """Greedy non-maximum suppression per batch and class: (box indices (b, c, n), counts (b, c)), both int64.

    `order` is the descending argsort of the scores. Only the first counts[b, c] indices of each (b, c) are defined, in
    the order of their scores. See `non_max_suppression` for the other operands.
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
        selected, counts = out
        overlaps = Buffer.of("overlaps", (1,), "bool", "local")
        zero = (sym(0),)

        def row(b: SymExpr, c: SymExpr) -> Stmt:
            def consider(p: SymVar, m: SymVar) -> Stmt:
                def compare(s: SymExpr) -> Stmt:
                    q = SymVar("q")
                    iou = _iou(_corners(boxes, b, p, center_point_box), _corners(boxes, b, q, center_point_box))
                    is_overlap = iou > Scalar(only_element(iou_threshold))
                    return LetIndex(q, selected[b, c, s], Store(overlaps, zero, is_overlap.value, "or"))

                select_box = seq(Store(selected, (b, c, m), index(p).value), Store(counts, (b, c), ONE, "add"))
                return seq(
                    Store(overlaps, zero, literal(False, "bool")),
                    loops("s", (m,), compare),
                    IfThenElse((~Scalar(overlaps[0])).value, select_box),
                )

            def visit(t: SymExpr) -> Stmt:
                p, m = SymVar("p"), SymVar("m")
                passes_threshold = Scalar(scores[b, c, p]) > Scalar(only_element(score_threshold))
                entry = IfThenElse((passes_threshold & (index(m) < limit[0])).value, consider(p, m))
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
        selected, counts = np.zeros(scores.shape, np.int64), np.zeros(scores.shape[:2], np.int64)
        for b, c in np.ndindex(scores.shape[:2]):
            boxes_of_class = _select_reference(
                boxes[b], scores[b, c], order[b, c], float(iou_threshold.reshape(-1)[0]),
                float(score_threshold.reshape(-1)[0]), int(limit[0]), center_point_box,
            )  # fmt: skip
            selected[b, c, : len(boxes_of_class)], counts[b, c] = boxes_of_class, len(boxes_of_class)
        return selected, counts


def _corners(boxes: Buffer, b: SymExpr, p: SymExpr, center: bool) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Bounds (low, high, low, high) of a box along both axes; corner boxes may name any two opposite corners."""
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
    selected: list[int] = []
    for p in order:
        common = [np.prod(np.maximum(np.minimum(high[p], high[q]) - np.maximum(low[p], low[q]), 0)) for q in selected]
        ious = [c / max(area[p] + area[q] - c, 1e-30) for c, q in zip(common, selected, strict=True)]
        if len(selected) < limit and scores[p] > score_threshold and all(v <= iou_threshold for v in ious):
            selected.append(int(p))
    return selected


@register
class NmsCollect(Op):
    """Compact the boxes selected by `nms_select` to rows (batch, class, box): int64 (count, 3)."""

    name = "nms_collect"
    operands = ("kept", "counts", "count")

    def infer(self, selected: Expr, counts: Expr, count: Expr) -> Type:
        return TensorType.of((*self.shape(count, "count"), 3), "int64")

    def lower(self, selected: Buffer, counts: Buffer, count: Shape, *, out: Buffer) -> Stmt:
        filled = make_counter()

        def visit(b: SymExpr, c: SymExpr, s: SymExpr) -> Stmt:
            r = SymVar("r")
            row = (index(b).value, index(c).value, selected[b, c, s])
            stores = [Store(out, (r, sym(k)), value) for k, value in enumerate(row)]
            is_selected = (index(s) < Scalar(counts[b, c])) & (Scalar(filled[0]) < count[0])
            return IfThenElse(is_selected.value, LetIndex(r, filled[0], seq(*stores, increment(filled))))

        return Allocate(filled, seq(Store(filled, (sym(0),), ZERO), loops("bcs", selected.shape, visit)))

    def reference(self, selected: Any, counts: Any, count: Any) -> Any:
        rows = [(b, c, selected[b, c, s]) for b, c in np.ndindex(counts.shape) for s in range(counts[b, c])]
        return np.array(rows, np.int64).reshape(-1, 3)


@register
class NonMaxSuppression(Op):
    """Non-maximum suppression: int64 rows (batch, class, box) of the selected boxes, best first in each class.

    boxes (b, n, 4), scores (b, c, n). A box is dropped if its score is not above `score_threshold`, if its IoU with a
    selected box is above `iou_threshold`, or if its class already has `limit` (a shape of one value) boxes. Boxes are
    (y1, x1, y2, x2), or (x, y, width, height) with `center_point_box`. The type has no shape: bind it by a MatchShape.
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
        result = bb.emit(
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
        indices, counts = bb.emit(TupleGetItem(result, 0)), bb.emit(TupleGetItem(result, 1))
        total = bb.emit(get_op("sum")(counts))
        size = bind_count(bb, bb.emit(get_op("reshape")(total, shape_value((1,)))), "selected")
        return get_op("nms_collect")(indices, counts, shape_value((size,)))

    def reference(
        self, boxes: Any, scores: Any, iou_threshold: Any, score_threshold: Any, limit: Any, *, center_point_box: bool
    ) -> Any:
        order = argsort_reference(scores, -1, descending=True)
        indices, counts = NmsSelect().reference(
            boxes, scores, order, iou_threshold, score_threshold, limit, center_point_box=center_point_box
        )
        return NmsCollect().reference(indices, counts, None)

    def samples(self) -> Iterable[Sample]:
        def boxes(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return np.concatenate([rng.integers(0, 5, (*shape[:2], 2)), rng.integers(5, 12, (*shape[:2], 2))], -1)

        draws = {0: boxes, 2: lambda shape, rng: np.full(shape, 0.4), 3: lambda shape, rng: np.full(shape, -0.5)}
        types = ("float32", "float32", "float32", "float32", "shape")
        shapes = ((2, "n", 4), (2, 3, "n"), (), (1,), (2,))
        yield Sample(shapes, {}, types, make=draws)
        yield Sample(shapes, {"center_point_box": True}, types, make=draws)
