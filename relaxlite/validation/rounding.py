"""Execution with other roundings: perturbed floats, or float64 intermediates. oracle.py measures the effect on results.

Each class configures a run of the interpreter: `value` changes arguments, `call` results of ops, and `run_program` runs
tensor programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Call, Function, GlobalVar
from relaxlite.ir.intrinsics import INTRINSICS
from relaxlite.ir.intrinsics import NARROW as ROUNDED
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.program import Buffer, Cast, IndexValue, Intrinsic, Literal, TensorProgram, Value
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType, Type
from relaxlite.validation.running import run_program
from relaxlite.validation.sum_lengths import num_summed_terms

PERTURBATION_ULPS = {"float16": 1.0, "bfloat16": 1.0, "float32": 4.0, "float64": 4.0}  # units in the last place
NARROW = ("float16", "bfloat16", "float32")
_ROUNDED_ONCE = frozenset((
    "add", "subtract", "multiply", "divide", "sqrt", "cast", "fmod", "floor", "ceil", "round", "sign",
))  # fmt: skip
_EXACT: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "cast": np.positive,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "sign": np.sign,
}  # fmt: skip
_SUMMED_ARGS: Mapping[str, Callable[[Any], Any]] = {
    "sum": lambda args: args[:1], "cumsum": lambda args: args[:1], "arange": lambda args: args[:2],
}  # fmt: skip
_RELATIVE_ERROR = frozenset(("dynamic_quantize_linear",))  # the scale has a relative error only
_MAX_COUNT = 1 << 24  # from here on float32 cannot represent all whole numbers
_TERMS: Mapping[str, Callable[[Any], Any]] = {
    "sum": np.positive, "mean": np.positive, "log_sum": np.positive, "l1_norm": np.abs, "sum_square": np.square,
    "l2_norm": np.square, "log_sum_exp": lambda rows: np.exp(rows - _finite_top(rows)),
}  # fmt: skip
_FROM_TOTAL: Mapping[str, Callable[[Any, Any], Any]] = {
    "mean": lambda total, rows: total / total.dtype.type(rows.shape[1]), "log_sum": lambda total, rows: np.log(total),
    "l2_norm": lambda total, rows: np.sqrt(total),
    "log_sum_exp": lambda total, rows: np.log(total) + _finite_top(rows)[:, 0],
}  # fmt: skip

_ULPS_PER_TERM = 1 / 16  # of a sum in unspecified order (docs/measurements/passb.md)
_DATA_MOVEMENT = frozenset(("gather", "reshape", "transpose"))  # not compared: may move large weights
_NUM_CHECKED = 8
_INTERPOLATIONS = frozenset(("resize", "grid_sample", "roi_align"))  # rounding of a coordinate selects elements


def epsilon(dtype: str) -> float:
    """Unit in the last place of 1.0."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


class Perturb:
    """Random perturbation of floats by a few units in the last place, and sums in sequential order.

    NumPy sums pairwise; in a running sum of equal terms all roundings go in the same direction.

    `ties`: round floats to a wide grid instead, so that numbers that are equal except for rounding become equal.
    Independent perturbations of two numbers near 0 whose terms are near 1 hardly ever coincide; yet the numbers may be
    equal in another order of the terms, and `unique` then finds one number less.
    """

    run_program = staticmethod(run_program)

    def __init__(self, rng: np.random.Generator, module: IRModule, *, ties: bool = False) -> None:
        self._rng, self._module, self._ties = rng, module, ties

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Run a call with perturbed operands and perturb its result."""
        if self._ties and isinstance(call.callee, Op) and call.callee.name in _INTERPOLATIONS:
            args = [_nan_around(args[0]), *args[1:]]
        result = run(args)
        if isinstance(call.callee, GlobalVar) and isinstance(self._module[call.callee.name], Function):
            return result  # the ops of the function are perturbed one by one
        if not any(map(_float_dtype, result if isinstance(result, tuple) else (result,))):
            return result
        name = call.callee.name if isinstance(call.callee, Op) else ""
        perturbed_args = [self.value(arg) for arg in args]
        if name == "power":  # undefined for negative bases with exponents that are not whole
            perturbed_args[1] = np.where(np.rint(args[1]) == args[1], args[1], perturbed_args[1])
        perturbed = _sum_in_order(call, perturbed_args, run(perturbed_args))
        if name in _DATA_MOVEMENT or (
            not _sums_terms(call, args, result) and _only_moves_data(perturbed_args, perturbed)
        ):
            return result
        results = result if isinstance(result, tuple) else (result,)
        floor = 0.0 if name in _RELATIVE_ERROR else _magnitude([*args, *results])
        scale = 1 + _ULPS_PER_TERM * num_summed_terms(call, args, result)
        if name in _ROUNDED_ONCE:
            is_count = _exact_counts(name, args, result, is_close=self._ties)
            changed_result = self._perturb(result, floor if self._ties else 0.0)
            return np.where(
                is_count, np.where(result == 0, np.copysign(result, changed_result), result), changed_result
            )
        if name in _SUMMED_ARGS and _adds_counts(_SUMMED_ARGS[name](args), result):
            return np.where(result == 0, np.copysign(result, self._perturb(perturbed, floor, scale)), result)
        if not isinstance(result, tuple):
            return self._perturb(perturbed, floor, scale)
        return tuple(
            self._perturb(m, floor, scale) if _float_dtype(r) else r for m, r in zip(perturbed, result, strict=True)
        )

    def value(self, value: Any) -> Any:
        """Perturb a floating argument, relative to its own magnitude."""
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        return value if _float_dtype(value) is None else self._perturb(value, 0.0)

    def _perturb(self, value: Any, floor: float, scale: float = 1.0) -> Any:
        """Perturb numbers.

        `scale` multiplies the perturbation. `floor` is the least magnitude to which the perturbation is relative, as
        approximations have absolute errors. A number below one such unit may also become 0, as 1 + erf(-6) does; a
        perturbation would hit 0 only by chance.
        """
        dtype = dtypes.from_numpy(value.dtype) or ""
        wide = np.asarray(value, np.float64)
        unit = PERTURBATION_ULPS[dtype] * epsilon(dtype) * np.maximum(scale * np.abs(wide), floor)
        with np.errstate(all="ignore"):
            perturbed = self._on_grid(wide, unit) if self._ties else wide + unit * self._rng.uniform(-1, 1, wide.shape)
            perturbed = np.where(np.isfinite(wide), perturbed, wide)
            if floor > 0:
                is_lost = (np.abs(wide) < unit) & (self._rng.random(wide.shape) < 0.5)
                perturbed = np.where(is_lost, np.copysign(0.0, perturbed), perturbed)
            perturbed = np.where((wide == 0) & (floor == 0) & (self._rng.random(wide.shape) < 0.5), -wide, perturbed)
            return perturbed.astype(value.dtype)

    def _on_grid(self, wide: Any, unit: Any) -> Any:
        step = np.exp2(np.ceil(np.log2(unit)))  # equal within a binade
        origin = step * self._rng.uniform()
        return np.where(step > 0, np.round((wide - origin) / step) * step + origin, wide)


class Widen:
    """Execution with float64 intermediates.

    The interpreter, which checks types, sees rounded values; the op `cast` does round.
    """

    def __init__(self) -> None:
        self._wide: dict[
            int, tuple[Any, Any]
        ] = {}  # id of the rounded value -> (rounded, wide); the entry keeps the id alive

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        """Run a call on float64 operands."""
        if not isinstance(call.callee, Op):
            return run(args)
        result = run([self._to_wide(arg) for arg in args])
        if not isinstance(result, tuple):
            return self._to_narrow(result, call.ty)
        types = result_types(call.ty)
        return tuple(map(self._to_narrow, result, types)) if len(types) == len(result) else result

    def run_program(
        self,
        program: TensorProgram,
        inputs: Sequence[Any],
        symbols: Mapping[SymVar, int] | Sequence[int] | None = None,
        outputs: Sequence[Any] | None = None,
        name: str = "program",
    ) -> list[Any]:
        """Run a tensor program in float64."""
        if outputs is not None:  # memory has a fixed dtype
            return run_program(program, inputs, symbols, outputs, name)
        result = run_program(_widened_program(program), [self._to_wide(x) for x in inputs], symbols, None, name)
        types = [TensorType.of(b.shape, b.dtype) for b in program.outputs]
        return list(map(self._to_narrow, result, types))

    def value(self, value: Any) -> Any:
        """Arguments stay as they are."""
        return value

    def _to_wide(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._to_wide, value))
        if _float_dtype(value) is None:
            return value
        entry = self._wide.get(id(value))
        return value.astype(np.float64) if entry is None else entry[1]

    def _to_narrow(self, wide: Any, ty: Type) -> Any:
        """Round to the dtype of the module, and remember the float64 value."""
        dtype = _float_dtype(wide)
        if dtype is None or not isinstance(ty, TensorType) or ty.dtype == dtype:
            return wide
        with np.errstate(all="ignore"):
            rounded = wide.astype(dtypes.to_numpy(ty.dtype))
        self._wide[id(rounded)] = (rounded, wide)
        return rounded


def _float_dtype(value: Any) -> str | None:
    dtype = dtypes.from_numpy(value.dtype) if isinstance(value, np.ndarray) else None
    return dtype if dtype is not None and dtypes.is_float(dtype) else None


def _exact_counts(name: str, args: Sequence[Any], result: Any, *, is_close: bool) -> Any:
    """Mask of floats that are exact whole numbers, such as sizes and numbers of steps.

    A perturbation of 501 could give 500 when cast to an integer. `is_close`: sums of fractions are excluded, as other
    sums may equal them except for rounding.
    """
    if name not in _EXACT:
        return np.zeros((), bool)
    number, *terms = (np.asarray(value, np.float64) for value in (result, *args))
    with np.errstate(all="ignore"):
        is_count = (np.abs(number) < _MAX_COUNT) & (np.rint(number) == number)
        is_count &= _EXACT[name](*terms) == number
        if len(terms) > 1 and (result.dtype == np.float64 or (is_close and name in ("add", "subtract"))):
            is_count &= np.logical_and.reduce([np.rint(x) == x for x in np.broadcast_arrays(*terms)])
    return is_count


def _adds_counts(terms: Sequence[Any], total: Any) -> bool:
    """Whether every order of summation is exact: all terms are whole, and no partial sum exceeds the exact range."""
    limit = min(2 / epsilon(_float_dtype(total) or "float64"), _MAX_COUNT)
    wide = [np.abs(np.asarray(x, np.float64)) for x in (*terms, total)]
    return max(wide[0].sum(), wide[-1].max(initial=0)) < limit and all((np.rint(x) == x).all() for x in wide)


def _magnitude(values: Sequence[Any]) -> float:
    """The largest finite magnitude of the floats, at most 1."""
    result = 0.0
    for value in values:
        if _float_dtype(value) is not None:
            wide = np.abs(np.asarray(value, np.float64))
            result = max(result, float(wide[np.isfinite(wide)].max(initial=0.0)))
    return min(result, 1.0)


def _only_moves_data(args: Sequence[Any], result: Any) -> bool:
    """Whether each element is an element of an operand, 0 or 1, up to its sign."""
    if isinstance(result, tuple):
        return all(_only_moves_data(args, item) for item in result)
    if _float_dtype(result) is None or not result.size:
        return True
    operands = [
        np.asarray(a, np.float64).reshape(-1) for a in args if isinstance(a, np.ndarray) and a.dtype == result.dtype
    ]
    operand_magnitudes = np.abs(np.concatenate([*operands, np.array([0.0, 1.0])]))
    magnitudes = np.abs(np.asarray(result, np.float64))
    magnitudes = magnitudes[~np.isnan(magnitudes)]
    checked = magnitudes[:: max(magnitudes.size // _NUM_CHECKED, 1)]  # mostly decides early
    return all((operand_magnitudes == element).any() for element in checked) and bool(
        np.isin(magnitudes, operand_magnitudes).all()
    )


def _sum_in_order(call: Call, args: list[Any], result: Any) -> Any:
    """A sum of many terms in sequential order; `result` for other ops."""
    name = call.callee.name if isinstance(call.callee, Op) else ""
    if (name != "matmul" and name not in _TERMS) or _float_dtype(result) is None or result.size == 0:
        return result
    if not all(arg.size for arg in args):  # no terms
        return result
    wide = [arg.astype(np.float32) if _float_dtype(arg) in HALF else arg for arg in args]
    with np.errstate(all="ignore"):
        if name == "matmul":
            return _running_product(*wide).reshape(result.shape).astype(result.dtype)
        x, axes = wide[0], call.attrs["axes"]
        over = tuple(axis % x.ndim for axis in axes) if isinstance(axes, tuple) else tuple(range(x.ndim))
        rows = np.moveaxis(x, over, range(x.ndim - len(over), x.ndim)).reshape(result.size, -1)
        total = np.add.accumulate(_TERMS[name](rows), axis=1)[:, -1]
        total = _FROM_TOTAL[name](total, rows) if name in _FROM_TOTAL else total
        return total.reshape(result.shape).astype(result.dtype)


def _finite_top(rows: Any) -> Any:
    """Maximum of each row, of shape [rows, 1]; 0 where the maximum is infinite."""
    top = rows.max(axis=1, keepdims=True)
    return np.where(np.isinf(top), rows.dtype.type(0), top)


def _nan_around(value: Any) -> Any:
    """Replace neighbours of non-finite numbers by NaN.

    Interpolation may multiply a non-finite number by 0 (NaN) or skip it.
    """
    if _float_dtype(value) is None or np.isfinite(value).all():
        return value
    is_nonfinite = ~np.isfinite(value)
    for axis in range(value.ndim):
        leading = (slice(None),) * axis
        first, last = (*leading, slice(None, -1)), (*leading, slice(1, None))
        before, after = is_nonfinite.copy(), is_nonfinite.copy()
        before[last] |= is_nonfinite[first]
        after[first] |= is_nonfinite[last]
        is_nonfinite = before | after
    return np.where(is_nonfinite, value.dtype.type(np.nan), value)


def _sums_terms(call: Call, args: list[Any], result: Any) -> bool:
    """Whether the op sums several terms: the mean of equal numbers may equal one of them, and is still rounded."""
    name = call.callee.name if isinstance(call.callee, Op) else ""
    return name in _TERMS and isinstance(result, np.ndarray) and args[0].size > result.size > 0


def _running_product(a: Any, b: Any) -> Any:
    """a @ b of shapes (..., m, k) and (..., k, n), summed in order of k; a vector is a matrix of one row or column."""
    a, b = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    total = a[..., 0, None] * b[..., 0, None, :]  # (..., m, n)
    for k in range(1, a.shape[-1]):
        total += a[..., k, None] * b[..., k, None, :]
    return total


class _WidenProgram(ProgramRewriter):
    """Replace every float dtype of a program by float64."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[Buffer, Buffer] = {}

    def buffer(self, buffer: Buffer) -> Buffer:
        if buffer.dtype not in NARROW:
            return buffer
        return self._buffers.setdefault(buffer, replace(buffer, dtype="float64"))

    def value(self, value: Value) -> Value:
        value = super().value(value)
        if isinstance(value, Intrinsic) and value.name == ROUNDED:
            return value.args[0]
        if isinstance(value, Intrinsic) and INTRINSICS[value.name].result is not None:  # defined for these dtypes only
            args = zip(value.args, INTRINSICS[value.name].args, strict=True)
            result = replace(value, args=tuple(x if x.dtype == dtype else Cast(x, str(dtype)) for x, dtype in args))
            return Cast(result, "float64") if value.dtype in NARROW else result
        if isinstance(value, Literal) and value.dtype in NARROW:
            return Literal(float(dtypes.to_numpy(value.dtype).type(value.value)), "float64")
        if isinstance(value, Cast | IndexValue | Intrinsic) and value.dtype in NARROW:
            return replace(value, dtype="float64")
        return value


@functools.lru_cache(maxsize=64)
def _widened_program(program: TensorProgram) -> TensorProgram:
    rewriter = _WidenProgram()
    return replace(program, params=tuple(map(rewriter.buffer, program.params)), body=rewriter.stmt(program.body))
