"""Mathematical functions of float64 on GPUs, which have no library to call, and what has no code there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NoReturn

from relaxlite.codegen.llvm import math_double as double
from relaxlite.codegen.llvm.emitter import Emitter, Val, float_const
from relaxlite.errors import CodegenError

_LIMIT = 700.0  # up to which math_double.exp is accurate
_TINY, _LIFT = 2.0**-1022, 54  # below _TINY numbers are denormal; 2**_LIFT makes them normal


def double_function(e: Emitter, name: str, x: Val) -> Val:
    """Emit a function of a double. CodegenError for a function that has no code on GPUs."""
    function = _DOUBLE.get(name)
    return refuse(name, "float64") if function is None else function(e, x)


def refuse(name: str, dtype: str) -> NoReturn:
    """Raise CodegenError: a function has no code on GPUs."""
    raise CodegenError(f"{name} of {dtype} has no code on GPUs; cast the operand to float32, or compile for a CPU")


def _exp(e: Emitter, x: Val) -> Val:
    """Beyond the limit exp(x/2)**2, which overflows, and underflows, as exp(x) does."""
    root = double.exp(e, e.fmul(x, float_const(0.5, "double")))
    is_near = e.fcmp("olt", e.intrinsic("fabs", x), float_const(_LIMIT, "double"))
    return e.select(is_near, double.exp(e, x), e.fmul(root, root))


def _log(e: Emitter, x: Val) -> Val:
    is_tiny = e.fcmp("olt", x, float_const(_TINY, "double"))
    lifted = e.fmul(x, float_const(2.0**_LIFT, "double"))
    y = double.log(e, e.select(is_tiny, lifted, x))
    return e.select(is_tiny, e.fsub(y, float_const(_LIFT * math.log(2), "double")), y)


_DOUBLE: Mapping[str, Callable[[Emitter, Val], Val]] = {"exp": _exp, "log": _log}
