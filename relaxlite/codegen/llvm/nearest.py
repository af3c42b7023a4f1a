"""Conversion of float32 to the nearest int32 (`nearest_i32`, ir/intrinsics.py), as cvtps2dq of x86: -2**31 where the
result does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Emitter, Val, int_const
from relaxlite.codegen.llvm.types import literal
from relaxlite.codegen.llvm.widths import widest_lanes
from relaxlite.ir.program import Intrinsic, Value

_INT32_MIN = -(2**31)
_ROUNDING_MODE = int_const(4, "i32")  # rounding mode: MXCSR, which is to nearest even
_INTRINSICS: Mapping[int, str] = {256: "llvm.x86.avx.cvt.ps2dq.256", 128: "llvm.x86.sse2.cvtps2dq"}


def emit_nearest(k: KernelContext, value: Intrinsic, emit_value: Callable[[KernelContext, Value], Val]) -> Val:
    """Emit float32 to nearest int32, ties to even, by cvtps2dq where the target has it."""
    e, x = k.e, emit_value(k, value.args[0])
    supported = {512: e.target.has("avx512f"), 256: e.target.has("avx"), 128: e.target.is_x86}
    width = widest_lanes(e.target, x.lanes, supported.__getitem__)
    return e.by_subvectors([x], width, lambda part: _by_instruction(e, part)) if width else _portable(e, x)


def _by_instruction(e: Emitter, x: Val) -> Val:
    if 32 * x.lanes < 512:
        return e.call(_INTRINSICS[32 * x.lanes], [x], "i32", x.lanes, "nearest")
    operands = [x, e.splat(int_const(0, "i32"), x.lanes), int_const(-1, "i16"), _ROUNDING_MODE]
    return e.call("llvm.x86.avx512.mask.cvtps2dq.512", operands, "i32", x.lanes, "nearest")


def _portable(e: Emitter, x: Val) -> Val:
    """Round by roundeven and fptosi; of magnitude 2**31 only -2**31 fits, which the other arm gives."""
    fits = e.fcmp("olt", e.intrinsic("fabs", x), literal(2.0**31, "float32"))
    in_range = e.select(fits, e.intrinsic("roundeven", x), literal(0.0, "float32"))
    return e.select(fits, e.cast("fptosi", in_range, "i32"), int_const(_INT32_MIN, "i32"))
