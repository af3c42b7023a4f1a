"""Resizing of any dimensions: nearest, linear and cubic, with every coordinate transformation of ONNX's Resize.

Nearest is one nest whose indices stay symbolic integers where the scale is a whole factor. Linear and cubic work one
dimension at a time: a small table of source coordinates and weights, then a nest that reads a few neighbours of each.
Coordinates are computed in float32, as onnxruntime does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, ShapeValue
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.linalg import emit_op
from relaxlite.ir.ops.scalars import Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, LetIndex, Stmt, Store, Value, compute, loops, reduce, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, floordiv, smax, smin, sym
from relaxlite.ir.types import TensorType, Type

COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)  # fmt: skip
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension being resized from `size` to `out` elements."""

    k: int
    size: SymExpr
    out: SymExpr
    scale: float | None  # None: out / size
    roi: tuple[float, float]
    attrs: Mapping[str, Any]

    @property
    def crops(self) -> bool:
        return bool(self.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize")

    def is_identity(self) -> bool:
        same = PROVER.can_prove_equal(self.size, self.out) and self.scale in (None, 1.0)
        return same and (not self.crops or self.roi == (0.0, 1.0))

    def scale_value(self) -> Scalar:
        if self.scale is not None:
            return Scalar(literal(float(np.float32(self.scale)), "float32"))
        return index(self.out).cast("float32") / index(self.size).cast("float32")

    def coordinate(self, o: SymExpr) -> Scalar:
        """Where element o of the result lies in x (float32)."""
        at, scale = index(o).cast("float32"), self.scale_value()
        out, size = index(self.out).cast("float32"), index(self.size).cast("float32")
        return _coordinate(at, scale, out, size, self.roi, self.attrs, select)

    def factor(self) -> tuple[int, int]:
        """(up, down) where the size grows or shrinks by a whole factor that float32 represents; (0, 0) otherwise."""
        up, down = as_int(_quotient(self.out, self.size)) or 0, as_int(_quotient(self.size, self.out)) or 0
        if up >= 1 and self.out is self.size * up and self.scale in (None, up):
            return up, 1
        if down > 1 and self.size is self.out * down and down & (down - 1) == 0 and self.scale in (None, 1 / down):
            return 1, down
        return 0, 0

    def nearest(self, o: SymExpr) -> SymExpr | None:
        """The nearest element as integer arithmetic; None when the scale is not a whole factor."""
        mode, (up, down) = self.attrs["coordinate_transformation_mode"], self.factor()
        halves = ("half_pixel", "half_pixel_symmetric") + (("pytorch_half_pixel",) if down == 1 else ())
        if up == 0 or mode not in ("asymmetric", "tf_half_pixel_for_nn", *halves):
            return None

        def source(i: SymExpr) -> SymExpr:
            if mode == "asymmetric":
                return _rounded(i * down, up, self.attrs["nearest_mode"])
            shift = up if mode in halves else 0
            return _rounded((i * 2 + 1) * down - shift, 2 * up, self.attrs["nearest_mode"])

        found = source(o)
        if int(source(sym(0))) < 0:
            found = smax(0, found)
        return found if int(source(sym(-1))) < 0 else smin(found, self.size - 1)


def _quotient(a: SymExpr, b: SymExpr) -> SymExpr:
    return sym(0) if as_int(b) == 0 else floordiv(a, b)


def _rounded(p: SymExpr, q: int, mode: str) -> SymExpr:
    """p / q rounded to an integer."""
    if mode == "floor":
        return p // q
    if mode == "ceil":
        return ceildiv(p, q)
    if mode == "round_prefer_ceil":
        return (p * 2 + q) // (2 * q)
    return ceildiv(p * 2 - q, 2 * q)


def _coordinate(
    at: Any, scale: Any, out: Any, size: Any, roi: tuple[float, float], attrs: Mapping[str, Any], choose: Callable[..., Any]
) -> Any:
    """ONNX's coordinate transformations, on float32 Scalars or NumPy arrays."""
    mode = attrs["coordinate_transformation_mode"]
    half = (at + 0.5) / scale - 0.5
    if mode == "half_pixel":
        return half
    if mode == "asymmetric":
        return at / scale
    if mode == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale
    if mode == "half_pixel_symmetric":
        return size * 0.5 * (1.0 - out / (scale * size)) + half
    if mode == "pytorch_half_pixel":
        return choose(out > 1.0, half, 0.0)
    if mode == "align_corners":
        return choose(out > 1.0, at * (size - 1.0) / (out - 1.0), 0.0)
    start, end = (float(np.float32(v)) for v in roi)
    inside = (size - 1.0) * start + at * float(np.float32(end) - np.float32(start)) * (size - 1.0) / (out - 1.0)
    return choose(out > 1.0, inside, (size - 1.0) * (0.5 * (start + end)))


def _nearest(x: Any, mode: str, floor: Any, choose: Callable[..., Any]) -> Any:
    """x rounded to a whole number, still a float32; `floor` is floor(x)."""
    if mode == "floor":
        return floor
    above = {"ceil": lambda rest: rest > 0.0, "round_prefer_ceil": lambda rest: rest >= 0.5}.get(mode, lambda rest: rest > 0.5)
    return choose(above(x - floor), floor + 1.0, floor)


def _cubic(distance: Any, a: float, choose: Callable[..., Any]) -> Any:
    """Keys' kernel at a distance >= 0; 0 from 2 on."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1.0
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return choose(distance <= 1.0, near, choose(distance < 2.0, far, 0.0))


def _triangle(distance: Any, choose: Callable[..., Any]) -> Any:
    return choose(distance < 1.0, 1.0 - distance, 0.0)
