"""Recognition of normalizations, activations and rotary embeddings that exporters write as chains of simple ops.

    x - mean(x), its mean square, epsilon, sqrt, division      layer_norm, then its scale and bias
    x / sqrt(mean(x * x) + epsilon)                            rms_norm, then its scale
    exp(x - max(x)) / sum(exp(x - max(x)))                     softmax; log_softmax
    0.5 * x * (1 + erf(x / sqrt(2))), the tanh form            gelu
    1 / (1 + exp(-x)), x * sigmoid(x), x * relu6(x + 3) / 6    sigmoid, silu, hard_swish
    x * cos + concat(-x[h:], x[:h]) * sin, and other forms     rotary (recognize_rotary.py)

A rule is a pattern and a function that builds the op from a match, or returns the reason for rejecting it, which is
recorded as a decision. Scale and bias have rules of their own, on the normalization recognized before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Expr, Function, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.pattern import Match, Matcher, Pattern, is_const, is_op, wildcard
from relaxlite.ir.symbolic import SymExpr, as_int
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, body_uses, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph import recognize_rotary
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.records import dataclass

ULPS = 4  # tolerance of constants in patterns, in units in the last place of their dtype


def recognize(module: IRModule, context: PassContext) -> IRModule:
    """Replace chains of simple ops by the normalization, activation or rotary embedding that they compute."""
    used = eliminate_dead(module)  # dead bindings must not count as uses
    return eliminate_dead(map_functions(used, lambda f: _Recognize(context).function(f)))


RuleResult: TypeAlias = "Call | str"  # the replacement, or the reason for rejecting a match


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern, and the function that builds the replacement of a match."""

    name: str
    pattern: Pattern
    build: Callable[[Match, Matcher, _Emit], RuleResult]

    @property
    def roots(self) -> tuple[str, ...]:
        """The ops that can be the root of a match."""
        return self.pattern.root_ops


_Emit: TypeAlias = Callable[[Expr], Expr]


class _Recognize(Rewriter):
    def __init__(self, context: PassContext) -> None:
        super().__init__()
        self._context = context
        self._bound: dict[Var, Expr] = {}
        self._matcher = Matcher(self._bound)

    def function(self, function: Function) -> Function:
        self._matcher.uses = Counter(body_uses(function.body))
        return super().function(function)

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        for rule in _BY_ROOT.get(value.callee.name, ()):
            match = self._matcher.match(rule.pattern, value)
            if match is None:
                continue
            result = self._apply(rule, match, value)
            if isinstance(result, Call):
                self._context.decide(
                    "recognize", f"{var.name} as {rule.name}", True, f"it computes {result.callee.name}"
                )
                return result
            self._context.decide("recognize", f"{var.name} as {rule.name}", False, str(result))
        return None

    def _apply(self, rule: Rule, match: Match, value: Call) -> RuleResult:
        if not match.is_removable:
            return "a value inside is used elsewhere too"
        result = rule.build(match, self._matcher, self.bb.emit)
        if isinstance(result, Call) and result.ty != value.ty:
            return f"it would have the type {result.ty} instead of {value.ty}"
        return result

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        target = self.env.get(var, var)
        if isinstance(target, Var) and target is not value:
            self._bound[target] = value


# Parts of patterns

_X = wildcard("x")


def _add(a: Pattern, b: Pattern) -> Pattern:
    return is_op("add", commutative=True)(a, b)


def _mul(a: Pattern, b: Pattern) -> Pattern:
    return is_op("multiply", commutative=True)(a, b)


def _div(a: Pattern, b: Pattern) -> Pattern:
    return is_op("divide")(a, b)


def _near(value: float) -> Pattern:
    return is_const(value, ulps=ULPS)


def _scaled(x: Pattern, factor: float) -> Pattern:
    """x * factor, or x / (1 / factor)"""
    return _mul(x, _near(factor)) | _div(x, _near(1 / factor))


def _square(x: Pattern) -> Pattern:
    return is_op("multiply")(x, x) | is_op("power")(x, is_const(2))


def _scaled_square(x: Pattern, factor: float) -> Pattern:
    """factor * x * x in any order of multiplication"""
    return _scaled(_square(x), factor) | _mul(_scaled(x, factor), x)


def _scaled_cube(x: Pattern, factor: float) -> Pattern:
    """factor * x * x * x in any order of multiplication"""
    cube = is_op("power")(x, is_const(3)) | _mul(_square(x), x)
    return _scaled(cube, factor) | _mul(_scaled_square(x, factor), x) | _mul(_square(x), _scaled(x, factor))


def _product(x: Pattern, y: Pattern, factor: float) -> Pattern:
    """factor * x * y in any order of multiplication"""
    return _scaled(_mul(x, y), factor) | _mul(_scaled(x, factor), y) | _mul(x, _scaled(y, factor))


def _root(x: Pattern) -> Pattern:
    return is_op("sqrt")(x) | is_op("power")(x, is_const(0.5))


def _inverse(x: Pattern) -> Pattern:
    return is_op("reciprocal")(x) | _div(is_const(1), x)


def _inverse_root(x: Pattern) -> Pattern:
    return is_op("rsqrt")(x) | is_op("power")(x, is_const(-0.5)) | _inverse(_root(x))


def _with_epsilon(x: Pattern) -> Pattern:
    return _add(x, is_const().named("epsilon")) | x


# Normalizations

_MEAN = is_op("mean")(_X).named("mean")
_CENTERED = is_op("subtract")(_X, _MEAN).named("centered")
_VARIANCE = _with_epsilon(is_op("mean")(_square(_CENTERED)).named("mean_square"))
_FACTOR = _mul(_inverse_root(_VARIANCE), wildcard("scale")).named("factor")
_NORM = is_op("layer_norm", "rms_norm")(_X).named("norm")
_SCALED_NORM = is_op("layer_norm")(_X, wildcard("scale")).named("norm")
_MEAN_SQUARE = _with_epsilon(is_op("mean")(_square(_X)).named("mean_square"))


def _layer_norm(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    tail = _tail(match, matcher, "mean", "mean_square")
    epsilon = _epsilon(match)
    if isinstance(tail, str) or isinstance(epsilon, str):
        return tail if isinstance(tail, str) else str(epsilon)
    return ops.layer_norm(match["x"], axis=-tail, epsilon=epsilon)


def _rms_norm(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    tail = _tail(match, matcher, "mean_square")
    epsilon = _epsilon(match)
    if isinstance(tail, str) or isinstance(epsilon, str):
        return tail if isinstance(tail, str) else str(epsilon)
    return ops.rms_norm(match["x"], axis=-tail, epsilon=epsilon)


def _folded_layer_norm(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    """x * factor + (bias - mean * factor), factor = scale / sqrt(variance + epsilon)"""
    norm = _layer_norm(match, matcher, emit)
    if isinstance(norm, str):
        return norm
    weights = [_weight(match[name], norm, emit) for name in ("scale", "bias")]
    wrong = [w for w in weights if isinstance(w, str)]
    return wrong[0] if wrong else ops.layer_norm(norm.args[0], *weights, **dict[str, Any](norm.attrs))


def _scaled_norm(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    norm = matcher.value_of(match["norm"])
    assert isinstance(norm, Call) and isinstance(norm.callee, Op)
    scale = _weight(match["scale"], norm, emit)
    return scale if isinstance(scale, str) else norm.callee(*norm.args, scale, **dict[str, Any](norm.attrs))


def _shifted_norm(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    norm = matcher.value_of(match["norm"])
    assert isinstance(norm, Call) and isinstance(norm.callee, Op)
    bias = _weight(match["bias"], norm, emit)
    return bias if isinstance(bias, str) else norm.callee(*norm.args, bias, **dict[str, Any](norm.attrs))


def _tail(match: Match, matcher: Matcher, *names: str) -> int | str:
    """The number of trailing axes that all the named means reduce, with keepdims; or the reason for rejecting the
    match."""
    rank = _shape(match["x"])
    if rank is None:
        return "the shape of x is unknown"
    counts = []
    for name in names:
        mean = matcher.value_of(match[name])
        axes = _last_axes(mean, len(rank))
        if axes is None:
            return "it is not over the last axes, or does not keep them"
        counts.append(axes)
    return counts[0] if len(set(counts)) == 1 else "its means are over different axes"


def _last_axes(reduction: Expr, rank: int) -> int | None:
    """The number of reduced axes, if they are the trailing ones and kept (keepdims); else None."""
    assert isinstance(reduction, Call)
    axes, keeps = reduction.attrs["axes"], reduction.attrs["keepdims"]
    if axes is None:
        axes = tuple(range(rank))
    assert isinstance(axes, tuple)
    over = sorted(a % rank for a in axes if isinstance(a, int))
    return len(over) if keeps and over and over == list(range(rank - len(over), rank)) else None


def _epsilon(match: Match) -> float | str:
    epsilon = match.captures.get("epsilon")
    if epsilon is None:
        return 0.0
    if not isinstance(epsilon, Constant) or epsilon.value.size != 1:
        return "epsilon is not one number"
    return float(epsilon.value.reshape(-1)[0])


def _weight(weight: Expr, norm: Call, emit: _Emit) -> Expr | str:
    """A scale or bias reshaped to the normalized axes, without leading dimensions of size 1; or the reason for
    rejecting."""
    given_shape, shape = _shape(weight), _shape(norm)
    axis = norm.attrs["axis"]
    assert isinstance(axis, int) and shape is not None
    tail = shape[axis:]
    if given_shape is None or len(given_shape) < len(tail) or given_shape[len(given_shape) - len(tail) :] != tail:
        return "scale or bias has another shape than the normalized axes"
    if any(as_int(d) != 1 for d in given_shape[: len(given_shape) - len(tail)]):
        return "scale or bias differs from row to row"
    if len(given_shape) == len(tail):
        return weight
    if isinstance(weight, Constant):
        return Constant.of(weight.value.reshape(weight.value.shape[-len(tail) :]), weight.ty.dtype)
    return emit(ops.reshape(weight, ShapeValue(tail)))


def _shape(expr: Expr) -> tuple[SymExpr, ...] | None:
    return expr.ty.shape if isinstance(expr.ty, TensorType) else None


# Softmax

_TOP = is_op("max")(_X).named("top")
_SHIFTED = is_op("subtract")(_X, _TOP).named("shifted")
_EXPS = is_op("exp")(_SHIFTED).named("exps") | is_op("exp")(_X).named("exps")
_SUM = is_op("sum")(_EXPS).named("sum")


def _softmax(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    axis = _one_axis(match, matcher)
    return axis if isinstance(axis, str) else ops.softmax(match["x"], axis=axis)


def _log_softmax(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    axis = _one_axis(match, matcher)
    return axis if isinstance(axis, str) else ops.log_softmax(match["x"], axis=axis)


def _log_of_softmax(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    softmax = matcher.value_of(match["softmax"])
    assert isinstance(softmax, Call)
    return ops.log_softmax(*softmax.args, **dict[str, Any](softmax.attrs))


def _one_axis(match: Match, matcher: Matcher) -> int | str:
    """The axis of the sum and of the maximum, if any; or the reason for rejecting the match."""
    shape = _shape(match["x"])
    if shape is None:
        return "the shape of x is unknown"
    chosen: set[int] = set()
    for name in ("sum", "top"):
        if name in match.captures:
            reduction = matcher.value_of(match[name])
            assert isinstance(reduction, Call)
            axes = reduction.attrs["axes"]
            if not isinstance(axes, tuple) or len(axes) != 1 or not reduction.attrs["keepdims"]:
                return "its reductions are not over one axis that is kept"
            (axis,) = axes
            assert isinstance(axis, int)
            chosen.add(axis % len(shape))
    return chosen.pop() if len(chosen) == 1 else "its reductions are over different axes"


# Activations

_ERF = _add(is_op("erf")(_scaled(_X, math.sqrt(0.5))), is_const(1))
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_OF = (
    _scaled(_add(_X, _scaled_cube(_X, 0.044715)), _TANH_SCALE)
    | _product(_X, _add(_scaled_square(_X, 0.044715), is_const(1)), _TANH_SCALE)
    | _mul(_X, _add(_scaled_square(_X, 0.044715 * _TANH_SCALE), _near(_TANH_SCALE)))
)
_TANH = _add(is_op("tanh")(_TANH_OF), is_const(1))
_EXP_OF_NEGATIVE = _add(is_op("exp")(is_op("neg")(_X)), is_const(1))
_RELU6 = is_op("clip")(_add(_X, is_const(3))).has_attr(lower=0.0, upper=6.0)


def _unary(op: Op, **attrs: str) -> Callable[[Match, Matcher, _Emit], RuleResult]:
    return lambda match, matcher, emit: op(match["x"], **attrs)


def _hard_swish_of(match: Match, matcher: Matcher, emit: _Emit) -> RuleResult:
    gate = matcher.value_of(match["gate"])
    assert isinstance(gate, Call)
    alpha, beta = gate.attrs["alpha"], gate.attrs["beta"]
    assert isinstance(alpha, float)
    if beta != 0.5 or abs(alpha - 1 / 6) > 1e-6:
        return f"its slope {alpha} and offset {beta} are not 1/6 and 1/2"
    return ops.hard_swish(match["x"])


def _op(name: str) -> Op:
    op = getattr(ops, name)
    assert isinstance(op, Op)
    return op


RULES = (
    Rule(
        "layer_norm",
        _div(_CENTERED, _root(_VARIANCE)) | _mul(_CENTERED, _inverse_root(_VARIANCE)),
        _layer_norm,
    ),
    Rule(
        "layer_norm",
        _add(_mul(_X, _FACTOR), is_op("subtract")(wildcard("bias"), _mul(_MEAN, _FACTOR))),
        _folded_layer_norm,
    ),
    Rule("rms_norm", _div(_X, _root(_MEAN_SQUARE)) | _mul(_X, _inverse_root(_MEAN_SQUARE)), _rms_norm),
    Rule("scale of a norm", _mul(_NORM, wildcard("scale")), _scaled_norm),
    Rule("bias of a norm", _add(_SCALED_NORM, wildcard("bias")), _shifted_norm),
    Rule("softmax", _div(_EXPS, _SUM) | _mul(_EXPS, _inverse(_SUM)), _softmax),
    Rule(
        "log_softmax",
        is_op("subtract")(_SHIFTED, is_op("log")(is_op("sum")(is_op("exp")(_SHIFTED)).named("sum"))),
        _log_softmax,
    ),
    Rule("log_softmax", is_op("log")(is_op("softmax").named("softmax")), _log_of_softmax),
    Rule("gelu", _product(_X, _ERF, 0.5), _unary(_op("gelu"), approximate="none")),
    Rule("gelu", _product(_X, _TANH, 0.5), _unary(_op("gelu"), approximate="tanh")),
    Rule("sigmoid", _inverse(_EXP_OF_NEGATIVE), _unary(_op("sigmoid"))),
    Rule("silu", _mul(_X, is_op("sigmoid")(_X)) | _div(_X, _EXP_OF_NEGATIVE), _unary(_op("silu"))),
    Rule("hard_swish", _product(_X, _RELU6, 1 / 6), _unary(_op("hard_swish"))),
    Rule("hard_swish", _mul(_X, is_op("hard_sigmoid")(_X).named("gate")), _hard_swish_of),
    Rule("rotary", recognize_rotary.ROTATE_HALF_FORM, recognize_rotary.rotary),
    Rule("rotary", recognize_rotary.CONCAT_FORM, recognize_rotary.rotary),
)
_BY_ROOT: dict[str, tuple[Rule, ...]] = {
    root: tuple(rule for rule in RULES if root in rule.roots) for rule in RULES for root in rule.roots
}
