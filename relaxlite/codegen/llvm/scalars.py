"""Instructions of the scalar functions of tensor programs (ir/program.py), for scalars and vectors.

ir/scalar_functions.py is the NumPy reference. Both define the edge cases: integer division by zero gives quotient and
remainder 0, shifts by the width or more shift all bits out, min and max propagate NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relaxlite import dtypes
from relaxlite.codegen.llvm import math
from relaxlite.codegen.llvm.emitter import FALSE, TRUE, Emitter, Val, bits_of, float_const, int_const, mangle
from relaxlite.codegen.llvm.indices import divide_floor
from relaxlite.dtypes import DType
from relaxlite.errors import CodegenError

_ROUNDING = {"floor": "floor", "ceil": "ceil", "round": "roundeven", "trunc": "trunc"}
_PREDICATES = {  # op -> predicate of floats, signed integers, unsigned integers
    "eq": ("oeq", "eq", "eq"),
    "ne": ("une", "ne", "ne"),
    "lt": ("olt", "slt", "ult"),
    "le": ("ole", "sle", "ule"),
    "gt": ("ogt", "sgt", "ugt"),
    "ge": ("oge", "sge", "uge"),
}


# One operand


def unary(e: Emitter, op: str, dtype: DType, x: Val) -> Val:
    """Emit a unary function; CodegenError where it is not defined for the dtype."""
    if dtypes.is_float(dtype):
        return _unary_float(e, op, x)
    if dtype == "bool":
        return _unary_bool(e, op, x)
    return _unary_int(e, op, x, signed=dtypes.is_signed(dtype))


def _unary_float(e: Emitter, op: str, x: Val) -> Val:
    zero = e.number(0, x)
    if op in math.FUNCTIONS:
        return math.apply(e, op, x)
    if op in _ROUNDING:
        return e.intrinsic(_ROUNDING[op], x)
    if op == "neg":
        return e.neg(x)
    if op == "abs":
        return e.intrinsic("fabs", x)
    if op == "sqrt":
        return e.intrinsic("sqrt", x)
    if op == "isnan":
        return e.fcmp("uno", x, x)
    if op == "isinf":
        return e.fcmp("oeq", e.intrinsic("fabs", x), e.number(float("inf"), x))
    if op == "not":
        return e.fcmp("oeq", x, zero)
    if op == "sign":
        signed = e.select(
            e.fcmp("ogt", x, zero), e.number(1, x), e.select(e.fcmp("olt", x, zero), e.number(-1, x), zero)
        )
        return e.select(e.fcmp("uno", x, x), x, signed)
    raise CodegenError(f"{op} of a float has no meaning")


def _unary_bool(e: Emitter, op: str, x: Val) -> Val:
    if op in ("not", "bitwise_not"):
        return e.binary("xor", x, TRUE)
    if op in ("isnan", "isinf"):
        return FALSE
    if op in ("abs", "sign", "neg", *_ROUNDING):
        return x
    raise CodegenError(f"{op} of a bool has no meaning")


def _unary_int(e: Emitter, op: str, x: Val, *, signed: bool) -> Val:
    zero = int_const(0, x.elem)
    if op == "neg":
        return e.binary("sub", zero, x)
    if op == "not":
        return e.icmp("eq", x, zero)
    if op == "bitwise_not":
        return e.binary("xor", x, int_const(-1, x.elem))
    if op == "abs":
        return e.intrinsic("abs", x, extra=[FALSE]) if signed else x
    if op == "sign":
        is_set = e.cast("zext", e.icmp("ne", x, zero), x.elem)
        return e.select(e.icmp("slt", x, zero), int_const(-1, x.elem), is_set) if signed else is_set
    if op in ("isnan", "isinf"):
        return FALSE
    if op in _ROUNDING:
        return x
    raise CodegenError(f"{op} of an integer has no meaning; cast it to a float first")


# Two operands


def binary(e: Emitter, op: str, dtype: DType, a: Val, b: Val) -> Val:
    """Emit a binary function of operands of one dtype; CodegenError where it is not defined for the dtype."""
    if dtypes.is_float(dtype):
        return _binary_float(e, op, a, b)
    if dtype == "bool":
        return _binary_bool(e, op, a, b)
    return _binary_int(e, op, a, b, signed=dtypes.is_signed(dtype))


def _binary_float(e: Emitter, op: str, a: Val, b: Val) -> Val:
    if op in ("add", "sub", "mul", "div"):
        return e.binary(f"f{op}", a, b)
    if op in ("min", "max"):
        return _extremum(e, op, a, b)
    if op in _FLOAT_FUNCTIONS:
        return _FLOAT_FUNCTIONS[op](e, a, b)
    raise CodegenError(f"{op} of floats has no meaning")


def _extremum(e: Emitter, op: str, a: Val, b: Val) -> Val:
    """min or max that propagates NaN: `a < b ? a : b` is one instruction and gives b if either is NaN, then fix NaN in
    a."""
    if b.is_const and not a.is_const:
        a, b = b, a
    chosen = e.select(e.fcmp("olt" if op == "min" else "ogt", a, b), a, b)
    return chosen if a.is_const and "0x7FF8" not in a.text else e.select(e.fcmp("uno", a, a), a, chosen)


def _float_floormod(e: Emitter, a: Val, b: Val) -> Val:
    """Python's %: the remainder has the sign of b."""
    remainder = math.fmod(e, a, b)
    adjusted = e.select(_signs_differ(e, remainder, b), e.fadd(remainder, b), remainder)
    return e.select(e.fcmp("oeq", remainder, e.number(0, a)), e.intrinsic("copysign", e.number(0, a), b), adjusted)


def _float_floordiv(e: Emitter, a: Val, b: Val) -> Val:
    """Python's //: (a - a % b) / b, rounded to the nearest integer; a // 0 is a / 0."""
    quotient, remainder = e.fdiv(a, b), math.fmod(e, a, b)
    zero, one = e.number(0, a), e.number(1, a)
    whole = e.fdiv(e.fsub(a, remainder), b)
    needs_adjustment = e.binary("and", _signs_differ(e, remainder, b), e.fcmp("une", remainder, zero))
    whole = e.select(needs_adjustment, e.fsub(whole, one), whole)
    floor = e.intrinsic("floor", whole)
    floor = e.select(e.fcmp("ogt", e.fsub(whole, floor), e.number(0.5, a)), e.fadd(floor, one), floor)
    floor = e.select(e.fcmp("oeq", whole, zero), e.intrinsic("copysign", zero, quotient), floor)
    return e.select(e.fcmp("oeq", b, zero), quotient, floor)


def _signs_differ(e: Emitter, a: Val, b: Val) -> Val:
    elem = f"i{bits_of(a.elem)}"
    signs = e.binary("xor", e.cast("bitcast", a, elem), e.cast("bitcast", b, elem))
    return e.icmp("slt", signs, int_const(0, elem))


def _float_pow(e: Emitter, x: Val, y: Val) -> Val:
    """x**y; strength-reduced for constant exponents -1, -0.5, 0, 0.5, 1, 2 and 3."""
    special_cases: dict[str, Callable[[], Val]] = {
        e.number(0, y).text: lambda: e.number(1, x),
        e.number(1, y).text: lambda: x,
        e.number(2, y).text: lambda: e.fmul(x, x),
        e.number(3, y).text: lambda: e.fmul(e.fmul(x, x), x),
        e.number(-1, y).text: lambda: e.fdiv(e.number(1, x), x),
        e.number(0.5, y).text: lambda: _pow_half(e, x),
        e.number(-0.5, y).text: lambda: e.fdiv(e.number(1, x), _pow_half(e, x)),
    }
    return special_cases[y.text]() if y.text in special_cases else math.power(e, x, y)


def _pow_half(e: Emitter, x: Val) -> Val:
    """x**0.5 by sqrt, with pow(-inf, 0.5) == inf and pow(-0.0, 0.5) == 0.0."""
    root = e.fadd(e.intrinsic("sqrt", x), e.number(0, x))
    return e.select(e.fcmp("oeq", x, e.number(float("-inf"), x)), e.number(float("inf"), x), root)


_FLOAT_FUNCTIONS: Mapping[str, Callable[[Emitter, Val, Val], Val]] = {
    "floordiv": _float_floordiv,
    "floormod": _float_floormod,
    "truncdiv": lambda e, a, b: e.intrinsic("trunc", e.fdiv(a, b)),
    "fmod": math.fmod,
    "pow": _float_pow,
    "atan2": math.atan2,
}


def _binary_bool(e: Emitter, op: str, a: Val, b: Val) -> Val:
    direct = {
        "and": "and",
        "min": "and",
        "mul": "and",
        "or": "or",
        "max": "or",
        "add": "or",
        "xor": "xor",
        "sub": "xor",
    }
    if op in direct:
        return e.binary(direct[op], a, b)
    wide = _binary_int(e, op, e.cast("zext", a, "i8"), e.cast("zext", b, "i8"), signed=False)
    return e.icmp("ne", wide, int_const(0, "i8"))


def _binary_int(e: Emitter, op: str, a: Val, b: Val, *, signed: bool) -> Val:
    if op in ("add", "sub", "mul", "and", "or", "xor"):
        return e.binary(op, a, b)
    if op in ("min", "max"):
        return e.intrinsic(("s" if signed else "u") + op, a, b)
    if op in ("floordiv", "floormod"):
        is_div = op == "floordiv"
        if signed:
            return divide_floor(e, a, b, is_div=is_div, is_positive=False)
        return _truncating(e, a, b, is_div=is_div, signed=False)
    if op in ("truncdiv", "fmod"):
        return _truncating(e, a, b, is_div=op == "truncdiv", signed=signed)
    if op in ("shift_left", "shift_right"):
        return _shift(e, op, a, b, signed=signed)
    if op == "pow":
        return _int_pow(e, a, b, signed=signed)
    raise CodegenError(f"{op} of integers has no meaning; cast them to floats first")


def _truncating(e: Emitter, a: Val, b: Val, *, is_div: bool, signed: bool) -> Val:
    """Division rounded towards zero, or its remainder; 0 for b == 0, and INT_MIN / -1 wraps."""
    zero, one = int_const(0, a.elem), int_const(1, a.elem)
    opcode = ("s" if signed else "u") + ("div" if is_div else "rem")
    if b.is_const and b.text not in ("0", "-1", "zeroinitializer"):
        return e.binary(opcode, a, b)
    is_zero = e.icmp("eq", b, zero)
    if not signed:
        return e.select(is_zero, zero, e.binary(opcode, a, e.select(is_zero, one, b)))
    is_special = e.binary("or", is_zero, e.icmp("eq", b, int_const(-1, a.elem)))
    result = e.binary(opcode, a, e.select(is_special, one, b))
    special = e.select(is_zero, zero, e.binary("sub", zero, a)) if is_div else zero
    return e.select(is_special, special, result)


def _shift(e: Emitter, op: str, a: Val, b: Val, *, signed: bool) -> Val:
    """Shift; a count that is negative or at least the width shifts all bits out."""
    bits, zero = bits_of(a.elem), int_const(0, a.elem)
    is_inside = e.icmp("ult", b, int_const(bits, b.elem))
    if op == "shift_left":
        return e.select(is_inside, e.binary("shl", a, e.select(is_inside, b, zero)), zero)
    if signed:
        return e.binary("ashr", a, e.select(is_inside, b, int_const(bits - 1, a.elem)))
    return e.select(is_inside, e.binary("lshr", a, e.select(is_inside, b, zero)), zero)


def _int_pow(e: Emitter, base: Val, exponent: Val, *, signed: bool) -> Val:
    """Integer power by repeated squaring, modulo 2**bits; negative exponents give the truncated reciprocal, 0 for 0."""
    base, exponent = e.match_lanes(base, exponent)
    zero, one = int_const(0, base.elem), int_const(1, base.elem)
    start_exponent = e.select(e.icmp("slt", exponent, zero), zero, exponent) if signed else exponent
    start, (body, done) = e.label, (e.fresh("pow_loop"), e.fresh("pow_done"))
    e.branch(body)
    e.start(body)
    names = [e.fresh(hint) for hint in ("left", "square", "power")]
    nexts = [e.fresh(f"{hint}_next") for hint in ("left", "square", "power")]
    exponent_left, square, power = (Val(f"%{name}", base.elem, base.lanes) for name in names)
    inits = (start_exponent, base, e.splat(one, base.lanes))
    for value, init, following in zip((exponent_left, square, power), inits, nexts, strict=True):
        e.line(f"{value.text} = phi {value.ty} [ {init.text}, %{start} ], [ %{following}, %{body} ]")
    is_odd = e.cast("trunc", exponent_left, "i1")
    factor = e.select(is_odd, square, one)
    e.line(f"%{nexts[2]} = mul {power}, {factor.text}")
    e.line(f"%{nexts[1]} = mul {square}, {square.text}")
    e.line(f"%{nexts[0]} = lshr {exponent_left}, {e.splat(one, base.lanes).text}")
    continues = e.any_lane(e.icmp("ne", Val(f"%{nexts[0]}", base.elem, base.lanes), zero))
    e.branch_if(continues, body, done)
    e.start(done)
    result = Val(f"%{nexts[2]}", base.elem, base.lanes)
    if not signed:
        return result
    minus_one = int_const(-1, base.elem)
    odd_sign = e.select(e.cast("trunc", exponent, "i1"), minus_one, one)
    inverse = e.select(e.icmp("eq", base, minus_one), odd_sign, zero)
    inverse = e.select(e.icmp("eq", base, one), one, inverse)
    return e.select(e.icmp("slt", exponent, zero), inverse, result)


# Comparisons and reductions


def compare(e: Emitter, op: str, dtype: DType, a: Val, b: Val) -> Val:
    """Emit a comparison of operands of one dtype, as i1."""
    of_float, of_signed, of_unsigned = _PREDICATES[op]
    if dtypes.is_float(dtype):
        return e.fcmp(of_float, a, b)
    return e.icmp(of_signed if dtypes.is_signed(dtype) else of_unsigned, a, b)


def combine(e: Emitter, op: str, dtype: DType, a: Val, b: Val) -> Val:
    """One step of a reduction: combine an element `b` into the accumulator `a`."""
    if op == "maxnum":  # one instruction for floats; yields `a` if either is NaN
        return e.select(compare(e, "gt", dtype, b, a), b, a)
    return binary(e, op, dtype, a, b)


def identity(op: str, dtype: DType) -> Val:
    """Neutral element of a reduction."""
    if dtype == "bool":
        return TRUE if op in ("and", "mul", "min") else FALSE
    if dtypes.is_float(dtype):
        elem = "double" if dtype == "float64" else "float"
        values = {"add": -0.0, "mul": 1.0, "max": float("-inf"), "min": float("inf"), "maxnum": float("-inf")}
        return float_const(values[op], elem)
    bits = 8 * dtypes.itemsize(dtype)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtypes.is_signed(dtype) else (0, (1 << bits) - 1)
    return int_const({"add": 0, "mul": 1, "max": low, "min": high, "and": -1, "or": 0, "maxnum": low}[op], f"i{bits}")


def reduce_lanes(e: Emitter, op: str, dtype: DType, x: Val) -> Val:
    """Horizontal reduction of a vector to a scalar; floats are reassociated."""
    suffix = mangle(x.elem, x.lanes)
    if op == "maxnum":
        if dtypes.is_float(dtype):  # a lane is NaN only where its accumulator started as NaN
            x = e.select(e.fcmp("uno", x, x), identity(op, dtype), x)
        op = "max"
    if not dtypes.is_float(dtype):
        names = {"add": "or", "mul": "and", "min": "and", "max": "or"} if dtype == "bool" else {}
        sign = ("s" if dtypes.is_signed(dtype) else "u") if op in ("min", "max") and dtype != "bool" else ""
        return e.call(f"llvm.vector.reduce.{sign}{names.get(op, op)}.{suffix}", [x], x.elem, 0, "total")
    if op in ("add", "mul"):
        name, start = f"llvm.vector.reduce.f{op}.{suffix}", identity(op, dtype)
        e.module.declare(name, x.elem, [x.elem, x.ty])
        return e.op(f"call reassoc {x.elem} @{name}({start}, {x})", x.elem, 0, "total")
    name = f"llvm.vector.reduce.f{op}.{suffix}"
    e.module.declare(name, x.elem, [x.ty])
    extreme = e.op(
        f"call nnan {x.elem} @{name}({x})", x.elem, 0, "extreme"
    )  # poison where a lane is NaN, and not selected then
    is_nan = e.any_lane(e.fcmp("uno", x, x))
    return e.select(is_nan, e.number(float("nan"), x), extreme)
