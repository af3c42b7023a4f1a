"""Activation functions, one row per op, in forms that neither overflow nor lose accuracy for large |x|."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relaxlite.ir.op import Attr
from relaxlite.ir.ops.elementwise import NUMBER, unary
from relaxlite.ir.ops.scalars import Scalar, select
from relaxlite.ir.symbolic import SymExpr, smax

_SQRT_HALF = math.sqrt(0.5)
_GELU_SCALE = math.sqrt(2 / math.pi)
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Scalar) -> Scalar:
    return 1.0 / (1.0 + (-x).exp())


def _softplus(x: Scalar) -> Scalar:
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|)"""
    return x.maximum(0.0) + (-x.abs()).exp().log1p()


def _gelu(x: Scalar, *, approximate: str) -> Scalar:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + (_GELU_SCALE * (x + 0.044715 * x * x * x)).tanh())
    return x.unary("gelu")


def _gelu_numpy(x: Any, *, approximate: str) -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(_GELU_SCALE * (x + 0.044715 * x**3)))
    return np.where(x == -np.inf, 0, 0.5 * x * (1 + _erf(x * _SQRT_HALF)))


def _clip(x: Scalar, *, lower: float | None, upper: float | None) -> Scalar:
    low, high = _clip_bounds(x.dtype, lower, upper)
    x = x if low is None else x.maximum(low)
    return x if high is None else x.minimum(high)


def _clip_bounds(dtype: str, lower: float | None, upper: float | None) -> tuple[float | int | None, float | int | None]:
    """Clip bounds as values of the dtype (uint8 has no -1); None for a bound that all its values satisfy."""
    if "int" not in dtype:
        return (None if lower == -math.inf else lower), (None if upper == math.inf else upper)
    info = np.iinfo(dtype)
    low = None if lower is None or lower <= info.min else min(math.ceil(lower), int(info.max))
    high = None if upper is None or upper >= info.max else max(math.floor(upper), int(info.min))
    return low, high


def _clip_numpy(x: Any, *, lower: float | None, upper: float | None) -> Any:
    low, high = _clip_bounds(x.dtype.name, lower, upper)
    x = x if low is None else np.maximum(x, x.dtype.type(low))
    return x if high is None else np.minimum(x, x.dtype.type(high))


def _symbolic_relu(x: SymExpr) -> SymExpr:
    return smax(x, 0)


unary(
    "relu",
    "max(x, 0)",
    lambda x: x.maximum(0),
    lambda x: np.maximum(x, x.dtype.type(0)),
    accepts=NUMBER,
    symbolic=_symbolic_relu,
)
unary("sigmoid", "1 / (1 + exp(-x))", _sigmoid, lambda x: 1 / (1 + np.exp(-x)))
unary("silu", "x * sigmoid(x), also called swish", lambda x: x / (1.0 + (-x).exp()), lambda x: x / (1 + np.exp(-x)))
unary("softplus", "log(1 + exp(x))", _softplus, lambda x: np.logaddexp(x, x.dtype.type(0)))
unary("softsign", "x / (1 + |x|)", lambda x: x / (1.0 + x.abs()), lambda x: x / (1 + np.abs(x)))
unary(
    "mish",
    "x * tanh(softplus(x))",
    lambda x: x * _softplus(x).tanh(),
    lambda x: x * np.tanh(np.logaddexp(x, x.dtype.type(0))),
)
unary(
    "gelu", "x * Phi(x), the Gaussian error linear unit; `approximate` is \"none\" or \"tanh\"", _gelu, _gelu_numpy,
    attrs={"approximate": Attr("str", "none", ("none", "tanh"))},
)  # fmt: skip
unary(
    "leaky_relu", "x where x > 0, else alpha * x",
    lambda x, *, alpha: select(x > 0.0, x, alpha * x), lambda x, *, alpha: np.where(x > 0, x, alpha * x),
    attrs={"alpha": Attr("float", 0.01)},
)  # fmt: skip
unary(
    "elu", "x where x > 0, else alpha * (exp(x) - 1)",
    lambda x, *, alpha: select(x > 0.0, x, alpha * x.minimum(0.0).expm1()),
    lambda x, *, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    attrs={"alpha": Attr("float", 1.0)},
)  # fmt: skip
unary(
    "selu", "gamma * (x where x > 0, else alpha * (exp(x) - 1))",
    lambda x, *, alpha, gamma: gamma * select(x > 0.0, x, alpha * x.minimum(0.0).expm1()),
    lambda x, *, alpha, gamma: gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    attrs={"alpha": Attr("float", 1.6732632423543772), "gamma": Attr("float", 1.0507009873554805)},
)  # fmt: skip
unary(
    "celu", "max(0, x) + min(0, alpha * (exp(x / alpha) - 1))",
    lambda x, *, alpha: x.maximum(0.0) + alpha * (x.minimum(0.0) / alpha).expm1(),
    lambda x, *, alpha: np.maximum(x, 0) + alpha * np.expm1(np.minimum(x, 0) / alpha),
    attrs={"alpha": Attr("float", 1.0)},
)  # fmt: skip
unary(
    "hard_sigmoid", "max(0, min(1, alpha * x + beta))",
    lambda x, *, alpha, beta: (alpha * x + beta).minimum(1.0).maximum(0.0),
    lambda x, *, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    attrs={"alpha": Attr("float", 0.2), "beta": Attr("float", 0.5)},
)  # fmt: skip
unary(
    "hard_swish", "x * max(0, min(1, x / 6 + 1/2))",
    lambda x: x * (x * (1 / 6) + 0.5).minimum(1.0).maximum(0.0), lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
)  # fmt: skip
unary(
    "thresholded_relu", "x where x > alpha, else 0",
    lambda x, *, alpha: select(x > alpha, x, 0.0), lambda x, *, alpha: np.where(x > alpha, x, 0),
    attrs={"alpha": Attr("float", 1.0)},
)  # fmt: skip
unary(
    "shrink", "x + bias where x < -lambd, x - bias where x > lambd, else 0",
    lambda x, *, lambd, bias: select(x < -lambd, x + bias, select(x > lambd, x - bias, 0)),
    lambda x, *, lambd, bias: np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)),
    accepts=NUMBER, attrs={"lambd": Attr("float", 0.5), "bias": Attr("float", 0.0)},
)  # fmt: skip
unary(
    "clip", "lower <= x <= upper enforced; a bound of None is absent (bounds that are tensors: maximum, minimum)",
    _clip, _clip_numpy, accepts=NUMBER, attrs={"lower": Attr("float", None), "upper": Attr("float", None)},
)  # fmt: skip
