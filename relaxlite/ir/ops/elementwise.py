"""Unary element-wise ops, one row per op, and `cast` and `where`.

Activation functions are in activations.py, binary ops in binary.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import BITCASTS, NARROW
from relaxlite.ir.op import Attr, Op, Sample, register, register_op
from relaxlite.ir.ops.broadcast import PROVER, broadcast_shapes, compute_broadcast
from relaxlite.ir.ops.scalars import HALF, Scalar, in_float32, select
from relaxlite.ir.program import Buffer, Cast, Intrinsic, Literal, Select, Stmt, Value, compute
from relaxlite.ir.symbolic import SymExpr, as_int, sym
from relaxlite.ir.types import TensorType, Type

BOOL: tuple[DType, ...] = ("bool",)
FLOAT = dtypes.FLOATS
INTEGER = dtypes.INTEGERS
NUMBER = INTEGER + FLOAT
BITS = BOOL + INTEGER
ANY = dtypes.ALL

Objects = NDArray[np.object_]


def check_dtype(op: Op, ty: TensorType, accepts: tuple[DType, ...], name: str = "x") -> None:
    """Fail the op unless the dtype of operand `name` is one of `accepts`."""
    if ty.dtype not in accepts:
        op.fail(f"{name} has dtype {ty.dtype}; it must be one of {', '.join(accepts)}: cast it first")


def map_symbolic(function: Callable[..., SymExpr | bool | None], *operands: Any) -> Objects | None:
    """Map a function over broadcast object arrays, element by element; None if it returns None for any element."""
    arrays = np.broadcast_arrays(*(np.asarray(x, dtype=object) for x in operands))
    out = np.empty(arrays[0].shape, dtype=object)
    for at in np.ndindex(out.shape):
        result = function(*(sym(a[at]) for a in arrays))
        if result is None:
            return None
        out[at] = result
    return out


class UnaryOp(Op):
    """Unary element-wise op: a formula over a Scalar and its NumPy equivalent, in float32 for half-precision floats."""

    operands = ("x",)
    accepts: ClassVar[tuple[DType, ...]]
    result: ClassVar[DType | None]  # None: the dtype of x
    formula: ClassVar[Callable[..., Scalar]]
    numpy: ClassVar[Callable[..., Any]]
    symbolic: ClassVar[Callable[[SymExpr], SymExpr | bool | None] | None]
    positive: ClassVar[bool]

    def infer(self, x: Expr, **attrs: Any) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, self.accepts)
        return TensorType(ty.shape, self.result or ty.dtype, ty.rank)

    def lower(self, x: Buffer, *, out: Buffer, **attrs: Any) -> Stmt:
        formula = type(self).formula
        if self.accepts is FLOAT and self.result is None:
            return compute(out, lambda *i: in_float32(x[i], lambda v: formula(v, **attrs)))
        return compute(out, lambda *i: formula(Scalar(x[i]), **attrs).value)

    def reference(self, x: Any, **attrs: Any) -> Any:
        with np.errstate(all="ignore"):
            wide = x.astype(np.float32) if x.dtype.name in HALF else x
            result = type(self).numpy(wide, **attrs)
        return np.asarray(result).astype(x.dtype if self.result is None else dtypes.to_numpy(self.result))

    def evaluate_symbolic(self, x: Any, **attrs: Any) -> Any:
        function = type(self).symbolic
        return None if function is None else map_symbolic(function, x)

    def samples(self) -> Iterable[Sample]:
        make = {0: draw_positive} if self.positive else {}
        yield Sample((("n", 3),), dtypes=("float32" if "float32" in self.accepts else self.accepts[0],), make=make)
        if self.accepts in (NUMBER, BITS):
            yield Sample(((2, "n"),), dtypes=("int64",))


def draw_positive(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Draw values in [0.05, 0.95), the common domain of log, sqrt, asin and atanh."""
    return rng.uniform(0.05, 0.95, shape).astype(np.float32)


def unary(
    name: str,
    doc: str,
    formula: str | Callable[..., Scalar],
    numpy: Callable[..., Any],
    *,
    accepts: tuple[DType, ...] = FLOAT,
    result: DType | None = None,
    attrs: Mapping[str, Attr] | None = None,
    symbolic: Callable[[SymExpr], SymExpr | bool | None] | None = None,
    positive: bool = False,
) -> None:
    """Register a unary op; `formula` is the name of a scalar function, or a function of a Scalar and the attributes."""
    function = (lambda x: x.unary(formula)) if isinstance(formula, str) else formula
    members = {
        "name": name, "__doc__": doc, "accepts": accepts, "result": result, "attrs": attrs or {}, "positive": positive,
        "formula": staticmethod(function), "numpy": staticmethod(numpy), "is_symbolic": symbolic is not None,
        "symbolic": None if symbolic is None else staticmethod(symbolic),
    }  # fmt: skip
    register_op(type(f"Unary_{name}", (UnaryOp,), members)())


def _symbolic_abs(x: SymExpr) -> SymExpr | None:
    if PROVER.can_prove_le(0, x):
        return x
    return -x if PROVER.can_prove_le(x, 0) else None


def _symbolic_sign(x: SymExpr) -> SymExpr | None:
    if PROVER.can_prove_lt(0, x):
        return sym(1)
    return sym(-1) if PROVER.can_prove_lt(x, 0) else sym(0) if PROVER.can_prove_equal(x, 0) else None


def _symbolic_not(x: SymExpr) -> bool | None:
    return None if as_int(x) is None else not as_int(x)


def _log_to_base(x: Scalar, base: int) -> Scalar:
    """Logarithm in float64, and the integer next to it where the base to that power is x."""
    wide = x.cast("float64")
    value = wide.unary("log") * (1 / math.log(base))
    integer = value.unary("round")
    power = integer.exp2() if base == 2 else Scalar(Literal(float(base), "float64")).binary("pow", integer)
    return select(power.equals(wide), integer, value).cast(x.dtype)


_ERF = np.vectorize(math.erf, otypes=[np.float64])

unary("neg", "-x", "neg", np.negative, accepts=NUMBER, symbolic=lambda x: -x)
unary("abs", "|x|", "abs", np.abs, accepts=NUMBER, symbolic=_symbolic_abs)
unary("sign", "-1, 0 or 1 with the sign of x", "sign", np.sign, accepts=NUMBER, symbolic=_symbolic_sign)
unary("sqrt", "The square root.", "sqrt", np.sqrt, positive=True)
unary("rsqrt", "1 / sqrt(x)", lambda x: 1.0 / x.unary("sqrt"), lambda x: 1 / np.sqrt(x), positive=True)
unary("reciprocal", "1 / x", lambda x: 1.0 / x, lambda x: 1 / x)
unary("floor", "The greatest integer <= x.", "floor", np.floor)
unary("ceil", "The least integer >= x.", "ceil", np.ceil)
unary("trunc", "x rounded towards zero", "trunc", np.trunc)
unary("round", "The nearest integer, halves to even.", "round", np.round)
unary("exp", "e to the power x", "exp", np.exp)
unary("log", "The natural logarithm.", "log", np.log, positive=True)
unary("log2", "The logarithm to base 2, exact for powers of 2.", lambda x: _log_to_base(x, 2), np.log2, positive=True)
unary(
    "log10", "The logarithm to base 10, exact for powers of 10.", lambda x: _log_to_base(x, 10), np.log10, positive=True
)
unary("exp2", "2 to the power x", "exp2", np.exp2)
unary("log1p", "log(1 + x), exact for small x", "log1p", np.log1p, positive=True)
unary("expm1", "exp(x) - 1, exact for small x", "expm1", np.expm1)
unary("sin", "The sine of x in radians.", "sin", np.sin)
unary("cos", "The cosine of x in radians.", "cos", np.cos)
unary("tan", "The tangent of x in radians.", "tan", np.tan, positive=True)
unary("asin", "The inverse sine.", "asin", np.arcsin, positive=True)
unary("acos", "The inverse cosine.", "acos", np.arccos, positive=True)
unary("atan", "The inverse tangent.", "atan", np.arctan)
unary("sinh", "The hyperbolic sine.", "sinh", np.sinh)
unary("cosh", "The hyperbolic cosine.", "cosh", np.cosh)
unary("asinh", "The inverse hyperbolic sine.", "asinh", np.arcsinh)
unary("acosh", "The inverse hyperbolic cosine; NaN below 1.", "acosh", np.arccosh)
unary("atanh", "The inverse hyperbolic tangent.", "atanh", np.arctanh, positive=True)
unary("tanh", "The hyperbolic tangent.", "tanh", np.tanh)
unary("erf", "The error function.", "erf", _ERF)
unary("logical_not", "not x", "not", np.logical_not, accepts=BOOL, symbolic=_symbolic_not)
unary("bitwise_not", "Every bit of x inverted.", "bitwise_not", np.invert, accepts=INTEGER, symbolic=lambda x: -x - 1)
unary("isnan", "Whether x is not a number.", "isnan", np.isnan, result="bool")


def _isinf(x: Scalar, *, detect_negative: bool, detect_positive: bool) -> Scalar:
    if detect_negative and detect_positive:
        return x.unary("isinf")
    if not detect_negative and not detect_positive:
        return x.differs(x) & ~x.differs(x)
    return x.equals(float("inf") if detect_positive else float("-inf"))


def _isinf_numpy(x: Any, *, detect_negative: bool, detect_positive: bool) -> Any:
    return (np.isneginf(x) & detect_negative) | (np.isposinf(x) & detect_positive)


unary(
    "isinf", "Whether x is an infinity of a sign that is to be detected.", _isinf, _isinf_numpy, result="bool",
    attrs={"detect_negative": Attr("bool", True), "detect_positive": Attr("bool", True)},
)  # fmt: skip


@register
class CastOp(Op):
    """Convert x to another dtype.

    Floats to integers truncate and saturate (NaN: 0); integers wrap; to bool is x != 0. With `flushes`, subnormal
    results in bfloat16 (below 2**-126) may be flushed to zero, as the one instruction that converts from float32 does.
    """

    name = "cast"
    operands = ("x",)
    attrs = {"dtype": Attr("dtype"), "flushes": Attr("bool", False)}
    is_symbolic = True

    def infer(self, x: Expr, *, dtype: DType, flushes: bool) -> Type:
        ty = self.tensor(x, "x")
        if dtype not in ANY:
            self.fail(f"unknown dtype {dtype!r}; it must be one of {', '.join(ANY)}")
        return TensorType(ty.shape, dtype, ty.rank)

    def lower(self, x: Buffer, *, out: Buffer, dtype: DType, flushes: bool) -> Stmt:
        def element(value: Value) -> Value:
            if value.dtype == dtype:
                return value
            may_flush = flushes and (value.dtype, dtype) == ("float32", "bfloat16")
            return Intrinsic(NARROW, (value,), dtype) if may_flush else Cast(value, dtype)

        return compute(out, lambda *i: element(x[i]))

    def reference(self, x: Any, *, dtype: DType, flushes: bool = False) -> Any:
        return cast_array(x, dtype)

    def evaluate_symbolic(self, x: Any, *, dtype: DType, flushes: bool = False) -> Any:
        return map_symbolic(_symbolic_bool if dtype == "bool" else lambda v: v, x)

    def samples(self) -> Iterable[Sample]:
        for source in ("float32", "int64", "bool"):
            for target in ("float32", "float16", "float64", "int64", "int8", "uint8", "bool"):
                yield Sample((("n", 3),), {"dtype": target}, (source,))


@register
class Bitcast(Op):
    """Reinterpret the bits of numbers as another dtype of the same size."""

    name = "bitcast"
    operands = ("x",)
    attrs = {"dtype": Attr("dtype")}

    def infer(self, x: Expr, *, dtype: DType) -> Type:
        ty = self.tensor(x, "x")
        if "bool" in (dtype, ty.dtype) or dtypes.itemsize(dtype) != dtypes.itemsize(ty.dtype):
            self.fail(f"the bits of {ty.dtype} are not those of a {dtype}")
        return TensorType(ty.shape, dtype, ty.rank)

    def lower(self, x: Buffer, *, out: Buffer, dtype: DType) -> Stmt:
        bits = f"int{8 * dtypes.itemsize(dtype)}"

        def element(value: Value) -> Value:
            if dtypes.is_float(value.dtype) and value.dtype != dtype:
                value = Intrinsic(BITCASTS[value.dtype, bits], (value,), bits)
            elif not dtypes.is_float(value.dtype) and dtypes.is_float(dtype):
                value = Scalar(value).cast(bits).value
            if value.dtype == dtype:
                return value
            return Intrinsic(BITCASTS[bits, dtype], (value,), dtype) if dtypes.is_float(dtype) else Cast(value, dtype)

        return compute(out, lambda *i: element(x[i]))

    def reference(self, x: Any, *, dtype: DType) -> Any:
        return np.ascontiguousarray(x).view(dtypes.to_numpy(dtype)).reshape(x.shape)

    def samples(self) -> Iterable[Sample]:
        for source, target in (
            ("float32", "int32"), ("int32", "float32"), ("float64", "int64"), ("float16", "uint16"),
            ("bfloat16", "int16"), ("int16", "bfloat16"), ("uint8", "int8"), ("float16", "bfloat16"),
        ):  # fmt: skip
            yield Sample((("n", 3),), {"dtype": target}, (source,))


def _symbolic_bool(x: SymExpr) -> bool | None:
    if PROVER.can_prove_ne(x, 0):
        return True
    return False if PROVER.can_prove_equal(x, 0) else None


def cast_array(x: Any, dtype: DType) -> Any:
    """Convert a NumPy array as `Cast` does; see `cast`."""
    target = dtypes.to_numpy(dtype)
    source = dtypes.from_numpy(x.dtype)
    if dtype == "bool":
        return x != 0
    if source is None or not dtypes.is_float(source) or not dtypes.is_integer(dtype):
        with np.errstate(all="ignore"):
            return x.astype(target)
    wide, info = x.astype(np.float64), np.iinfo(target)
    with np.errstate(all="ignore"):
        in_range = np.where(np.isfinite(wide) & (wide > float(info.min)) & (wide < float(info.max)), wide, 0).astype(
            target
        )
    saturated_low = np.where(wide <= float(info.min), target.type(info.min), in_range)
    return np.where(wide >= float(info.max), target.type(info.max), saturated_low)


@register
class Where(Op):
    """Select a where cond is true, else b; all three operands broadcast."""

    name = "where"
    operands = ("cond", "a", "b")
    is_symbolic = True

    def infer(self, cond: Expr, a: Expr, b: Expr) -> Type:
        types = [self.tensor(x, name) for x, name in zip((cond, a, b), self.operands, strict=True)]
        check_dtype(self, types[0], BOOL, "cond")
        if types[1].dtype != types[2].dtype:
            self.fail(f"a has dtype {types[1].dtype} and b {types[2].dtype}; cast one of them")
        return TensorType.of(broadcast_shapes(*(t.shape or () for t in types), fail=self.fail), types[1].dtype)

    def lower(self, cond: Buffer, a: Buffer, b: Buffer, *, out: Buffer) -> Stmt:
        return compute_broadcast("where", out, (cond, a, b), Select)

    def reference(self, cond: Any, a: Any, b: Any) -> Any:
        return np.where(cond, a, b)

    def evaluate_symbolic(self, cond: Any, a: Any, b: Any) -> Any:
        return map_symbolic(_symbolic_where, cond, a, b)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3), ("n", 3), ("n", 3)), dtypes=("bool", "float32", "float32"))
        yield Sample((("n", 1), (3,), ()), dtypes=("bool", "int64", "int64"))


def _symbolic_where(cond: SymExpr, a: SymExpr, b: SymExpr) -> SymExpr | None:
    known = as_int(cond)
    if known is None:
        return a if a is b else None
    return a if known else b
