"""Patterns of rotary embeddings in the forms that exporters write.

    x * cos + concat(-x[h:], x[:h]) * sin                       halves, tables of full width
    concat(a*cos - b*sin, a*sin + b*cos), a and b halves        halves, tables of half the width
    the same with x[::2] and x[1::2], interleaved               interleaved pairs

All become rotary(x, cos, sin).
"""

from __future__ import annotations

from relaxlite.errors import TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Expr, ShapeValue
from relaxlite.ir.pattern import Match, Matcher, Pattern, is_const, is_op, wildcard
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass


def _add(a: Pattern, b: Pattern) -> Pattern:
    return is_op("add", commutative=True)(a, b)


def _mul(a: Pattern, b: Pattern) -> Pattern:
    return is_op("multiply", commutative=True)(a, b)


def _neg(x: Pattern) -> Pattern:
    return is_op("neg")(x) | _mul(x, is_const(-1))


def _unit(x: Pattern) -> Pattern:
    """x with a trailing dimension of size 1."""
    return is_op("expand_dims")(x) | is_op("reshape")(x, wildcard())


def _joined(a: Pattern, b: Pattern) -> Pattern:
    """a and b concatenated along the last axis, or interleaved element by element."""
    concatenated = is_op("concat")(a, b).named("halves")
    interleaved = is_op("reshape")(is_op("concat")(_unit(a), _unit(b)).named("pairs"), wildcard())
    return concatenated | interleaved


_X, _COS, _SIN = wildcard("x"), wildcard("cos"), wildcard("sin")
_FIRST, _SECOND = (is_op("slice")(_X, wildcard(), wildcard()).named(name) for name in ("first", "second"))

ROTATE_HALF_FORM = _add(_mul(_X, _COS), _mul(_joined(_neg(_SECOND), _FIRST), _SIN))
CONCAT_FORM = _joined(
    is_op("subtract")(_mul(_FIRST, _COS), _mul(_SECOND, _SIN)), _add(_mul(_FIRST, _SIN), _mul(_SECOND, _COS))
)


def rotary(match: Match, matcher: Matcher, emit: object) -> Call | str:
    """Build the rotary op from a match, or return the reason for rejecting it."""
    parts = [_part(matcher.value_of(match[name])) for name in ("first", "second")]
    if any(isinstance(part, str) for part in parts):
        return next(part for part in parts if isinstance(part, str))
    first, second = (part for part in parts if isinstance(part, _Part))
    x = match["x"]
    shape = _shape(x)
    half = first.size
    if len(shape) == 0 or as_int(half * 2) != as_int(shape[-1]) or second.size is not half:
        return "the parts are not halves of the rows"
    interleaved = "pairs" in match.captures
    starts = (0, 1, 2) if interleaved else (0, as_int(half), 1)
    if (as_int(first.begin), as_int(second.begin), first.step) != starts or first.step != second.step:
        return f"the parts are not {'every other element' if interleaved else 'the first and the second half'}"
    joined = matcher.value_of(match["pairs" if interleaved else "halves"])
    if not _is_joined(joined, (*shape[:-1], half) if interleaved else None, len(shape)):
        return "the parts are not put together again along the rows"
    if matcher.value_of(match["cos"]) is matcher.value_of(match["sin"]):
        return "cos and sin are the same"
    try:
        return ops.rotary(x, match["cos"], match["sin"], interleaved=interleaved)
    except TypeInferenceError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class _Part:
    """The slice x[..., begin : begin + size*step : step]."""

    begin: SymExpr
    size: SymExpr
    step: int


def _part(call: Expr) -> _Part | str:
    assert isinstance(call, Call)
    x, begins, sizes = call.args
    shape, axes, steps = _shape(x), call.attrs["axes"], call.attrs["steps"]
    over = tuple(range(len(shape))) if not isinstance(axes, tuple) else tuple(int(a) % len(shape) for a in axes)  # type: ignore[arg-type]
    strides = steps if isinstance(steps, tuple) else (1,) * len(over)
    if not isinstance(begins, ShapeValue) or not isinstance(sizes, ShapeValue) or len(shape) - 1 not in over:
        return "its parts are not slices of the last dimension"
    last = None
    for axis, begin, size, step in zip(over, begins.values, sizes.values, strides, strict=True):
        assert isinstance(step, int)
        if axis == len(shape) - 1:
            last = _Part(begin, size, step)
        elif as_int(begin) != 0 or size is not shape[axis] or step != 1:
            return "its parts are slices of other dimensions too"
    assert last is not None
    return last


def _is_joined(concat: Expr, pair: tuple[SymExpr, ...] | None, rank: int) -> bool:
    """Whether a concat joins its operands along the last axis; with `pair`, the shape of one operand without its
    trailing dimension of size 1, whether it interleaves two of them."""
    assert isinstance(concat, Call)
    axis = concat.attrs["axis"]
    assert isinstance(axis, int)
    if pair is None:
        return axis in (-1, rank - 1)
    shape = _shape(concat)
    return axis in (-1, rank) and shape[:-1] == pair and as_int(shape[-1]) == 2


def _shape(expr: Expr) -> tuple[SymExpr, ...]:
    return expr.ty.shape or () if isinstance(expr.ty, TensorType) else ()
