"""Other roundings than those that a module spells out: what `oracle.py` measures the effect of.

Each class is a way to run a module in the interpreter: `value` changes what goes in, `call` what an op gives, and
`run_program` runs tensor programs.
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
from relaxlite.validation.long_sums import terms_of_sums
from relaxlite.validation.running import run_program

NUDGE = {"float16": 1.0, "bfloat16": 1.0, "float32": 4.0, "float64": 4.0}  # units in the last place
NARROW = ("float16", "bfloat16", "float32")
_ROUNDED_ONCE = frozenset((
    "add", "subtract", "multiply", "divide", "sqrt", "cast", "fmod", "floor", "ceil", "round", "sign",
))  # fmt: skip
_EXACT: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "cast": np.positive,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "sign": np.sign,
}  # fmt: skip
_TERMS_OF_TOTALS: Mapping[str, Callable[[Any], Any]] = {
    "sum": lambda args: args[:1], "cumsum": lambda args: args[:1], "arange": lambda args: args[:2],
}  # fmt: skip
_RELATIVE = frozenset(("dynamic_quantize_linear",))  # the scale: of a difference of numbers of two signs, divided once
_UNCOUNTED = 1 << 24  # from here on float32 leaves out whole numbers
_TERMS: Mapping[str, Callable[[Any], Any]] = {
    "sum": np.positive, "mean": np.positive, "log_sum": np.positive, "l1_norm": np.abs, "sum_square": np.square,
    "l2_norm": np.square, "log_sum_exp": lambda rows: np.exp(rows - _finite_top(rows)),
}  # fmt: skip
_OF_TOTAL: Mapping[str, Callable[[Any, Any], Any]] = {
    "mean": lambda total, rows: total / total.dtype.type(rows.shape[1]), "log_sum": lambda total, rows: np.log(total),
    "l2_norm": lambda total, rows: np.sqrt(total),
    "log_sum_exp": lambda total, rows: np.log(total) + _finite_top(rows)[:, 0],
}  # fmt: skip

_UNITS_PER_TERM = 1 / 16  # of a sum in an order that is the compiler's: what some equal terms take (measured)
_MOVES = frozenset(("gather", "reshape", "transpose"))  # elements of whole weights: not looked at one by one
_SOME = 8
_BETWEEN = frozenset(("resize", "grid_sample", "roi_align"))  # elements: which ones, a rounding of the place decides


def epsilon(dtype: str) -> float:
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


class Nudge:
    """Moves floats by a few units in their last place, and adds up one term after another, where NumPy adds in pairs:
    of equal terms, all roundings of a running sum are in one direction.

    `ties`: moves them onto a grid so wide instead, so that what is equal but for rounding becomes equal. Moved each on
    its own, two numbers near 0 hardly ever meet, of which the terms are near 1; and yet they may be equal in another
    order of the terms, and then `unique` finds one number less.
    """

    run_program = staticmethod(run_program)

    def __init__(self, rng: np.random.Generator, module: IRModule, *, ties: bool = False) -> None:
        self._rng, self._module, self._ties = rng, module, ties

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        if self._ties and isinstance(call.callee, Op) and call.callee.name in _BETWEEN:
            args = [_nan_around(args[0]), *args[1:]]
        result = run(args)
        if isinstance(call.callee, GlobalVar) and isinstance(self._module[call.callee.name], Function):
            return result  # of ops that are nudged one by one
        if not any(map(_float_dtype, result if isinstance(result, tuple) else (result,))):
            return result
        name = call.callee.name if isinstance(call.callee, Op) else ""
        nudged = [self.value(arg) for arg in args]
        if name == "power":  # negative numbers have none with exponents that are not whole
            nudged[1] = np.where(np.rint(args[1]) == args[1], args[1], nudged[1])
        moved = _added_one_by_one(call, nudged, run(nudged))
        if name in _MOVES or (not _adds(call, args, result) and _only_moves(nudged, moved)):
            return result
        results = result if isinstance(result, tuple) else (result,)
        floor = 0.0 if name in _RELATIVE else _magnitude([*args, *results])
        scale = 1 + _UNITS_PER_TERM * terms_of_sums(call, args, result)
        if name in _ROUNDED_ONCE:
            counts = _is_count(name, args, result, is_close=self._ties)
            changed = self._moved(result, floor if self._ties else 0.0)
            return np.where(counts, np.where(result == 0, np.copysign(result, changed), result), changed)
        if name in _TERMS_OF_TOTALS and _adds_counts(_TERMS_OF_TOTALS[name](args), result):
            return np.where(result == 0, np.copysign(result, self._moved(moved, floor, scale)), result)
        if not isinstance(result, tuple):
            return self._moved(moved, floor, scale)
        return tuple(self._moved(m, floor, scale) if _float_dtype(r) else r for m, r in zip(moved, result, strict=True))

    def value(self, value: Any) -> Any:
        """A floating argument, relative to itself."""
        if isinstance(value, tuple):
            return tuple(map(self.value, value))
        return value if _float_dtype(value) is None else self._moved(value, 0.0)

    def _moved(self, value: Any, floor: float, scale: float = 1.0) -> Any:
        """`scale`: by so many times the usual. `floor`: what a unit in the last place is at least relative to, as
        approximations have absolute errors. What is less than such a unit may also come out as 0, as 1 + erf(-6) does:
        no nudge would hit it by chance."""
        dtype = dtypes.from_numpy(value.dtype) or ""
        wide = np.asarray(value, np.float64)
        unit = NUDGE[dtype] * epsilon(dtype) * np.maximum(scale * np.abs(wide), floor)
        with np.errstate(all="ignore"):
            moved = self._on_grid(wide, unit) if self._ties else wide + unit * self._rng.uniform(-1, 1, wide.shape)
            moved = np.where(np.isfinite(wide), moved, wide)
            if floor > 0:
                is_lost = (np.abs(wide) < unit) & (self._rng.random(wide.shape) < 0.5)
                moved = np.where(is_lost, np.copysign(0.0, moved), moved)
            moved = np.where((wide == 0) & (floor == 0) & (self._rng.random(wide.shape) < 0.5), -wide, moved)
            return moved.astype(value.dtype)

    def _on_grid(self, wide: Any, unit: Any) -> Any:
        step = np.exp2(np.ceil(np.log2(unit)))  # the same for all numbers of a binade
        begin = step * self._rng.uniform()
        return np.where(step > 0, np.round((wide - begin) / step) * step + begin, wide)


class Widen:
    """Keeps what ops and programs compute in float64. The interpreter, which checks types, sees it rounded; the op
    `cast` does round."""

    def __init__(self) -> None:
        self._wide: dict[int, tuple[Any, Any]] = {}  # (rounded, wide) by the id of `rounded`, which stays alive with it

    def call(self, call: Call, args: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        if not isinstance(call.callee, Op):
            return run(args)
        result = run([self._widened(arg) for arg in args])
        if not isinstance(result, tuple):
            return self._rounded(result, call.ty)
        types = result_types(call.ty)
        return tuple(map(self._rounded, result, types)) if len(types) == len(result) else result

    def run_program(
        self,
        program: TensorProgram,
        inputs: Sequence[Any],
        symbols: Mapping[SymVar, int] | Sequence[int] | None = None,
        outputs: Sequence[Any] | None = None,
        name: str = "program",
    ) -> list[Any]:
        if outputs is not None:  # memory of a dtype
            return run_program(program, inputs, symbols, outputs, name)
        result = run_program(_widened_program(program), [self._widened(x) for x in inputs], symbols, None, name)
        types = [TensorType.of(b.shape, b.dtype) for b in program.outputs]
        return list(map(self._rounded, result, types))

    def value(self, value: Any) -> Any:
        return value

    def _widened(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._widened, value))
        if _float_dtype(value) is None:
            return value
        known = self._wide.get(id(value))
        return value.astype(np.float64) if known is None else known[1]

    def _rounded(self, wide: Any, ty: Type) -> Any:
        """`wide` as the dtype that the module gives it."""
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


def _is_count(name: str, args: Sequence[Any], result: Any, *, is_close: bool) -> Any:
    """Where a float is a whole number that no rounding made so, as sizes and numbers of steps are: a nudge would make
    500 of 501 where they are cast to integers. `is_close`: sums of fractions are none, which others may be equal to but
    for the rounding of their terms."""
    if name not in _EXACT:
        return np.zeros((), bool)
    number, *terms = (np.asarray(value, np.float64) for value in (result, *args))
    with np.errstate(all="ignore"):
        found = (np.abs(number) < _UNCOUNTED) & (np.rint(number) == number)
        found &= _EXACT[name](*terms) == number
        if len(terms) > 1 and (result.dtype == np.float64 or (is_close and name in ("add", "subtract"))):
            found &= np.logical_and.reduce([np.rint(x) == x for x in np.broadcast_arrays(*terms)])
    return found


def _adds_counts(terms: Sequence[Any], total: Any) -> bool:
    """Whether no order of adding up such terms rounds: all are whole, and no sum of some is so large as to be left
    out."""
    limit = min(2 / epsilon(_float_dtype(total) or "float64"), _UNCOUNTED)
    wide = [np.abs(np.asarray(x, np.float64)) for x in (*terms, total)]
    return max(wide[0].sum(), wide[-1].max(initial=0)) < limit and all((np.rint(x) == x).all() for x in wide)


def _magnitude(values: Sequence[Any]) -> float:
    """The largest finite magnitude of the floats, up to 1."""
    result = 0.0
    for value in values:
        if _float_dtype(value) is not None:
            wide = np.abs(np.asarray(value, np.float64))
            result = max(result, float(wide[np.isfinite(wide)].max(initial=0.0)))
    return min(result, 1.0)


def _only_moves(args: Sequence[Any], result: Any) -> bool:
    """Whether each element is one of the operands', 0 or 1, perhaps negated."""
    if isinstance(result, tuple):
        return all(_only_moves(args, item) for item in result)
    if _float_dtype(result) is None or not result.size:
        return True
    same = [
        np.asarray(a, np.float64).reshape(-1) for a in args if isinstance(a, np.ndarray) and a.dtype == result.dtype
    ]
    known = np.abs(np.concatenate([*same, np.array([0.0, 1.0])]))
    magnitudes = np.abs(np.asarray(result, np.float64))
    magnitudes = magnitudes[~np.isnan(magnitudes)]
    some = magnitudes[:: max(magnitudes.size // _SOME, 1)]  # of most results, the first of these says no
    return all((known == one).any() for one in some) and bool(np.isin(magnitudes, known).all())


def _added_one_by_one(call: Call, args: list[Any], result: Any) -> Any:
    """A sum of many terms in the plainest order; `result` for anything else."""
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
        total = _OF_TOTAL[name](total, rows) if name in _OF_TOTAL else total
        return total.reshape(result.shape).astype(result.dtype)


def _finite_top(rows: Any) -> Any:
    """The largest of each row [rows, 1], 0 where that is infinite."""
    top = rows.max(axis=1, keepdims=True)
    return np.where(np.isinf(top), rows.dtype.type(0), top)


def _nan_around(value: Any) -> Any:
    """NaN also where a neighbour is no finite number: 0 times it is NaN, and to leave it out is not."""
    if _float_dtype(value) is None or np.isfinite(value).all():
        return value
    wrong = ~np.isfinite(value)
    for axis in range(value.ndim):
        at = (slice(None),) * axis
        first, last = (*at, slice(None, -1)), (*at, slice(1, None))
        before, after = wrong.copy(), wrong.copy()
        before[last] |= wrong[first]
        after[first] |= wrong[last]
        wrong = before | after
    return np.where(wrong, value.dtype.type(np.nan), value)


def _adds(call: Call, args: list[Any], result: Any) -> bool:
    """Whether the op adds several terms: the mean of equal numbers may be one of them, and yet it was rounded."""
    name = call.callee.name if isinstance(call.callee, Op) else ""
    return name in _TERMS and isinstance(result, np.ndarray) and args[0].size > result.size > 0


def _running_product(a: Any, b: Any) -> Any:
    """a @ b of dimensions (..., m, k) and (..., k, n); a vector is a matrix of one row, or one column."""
    a, b = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    total = a[..., 0, None] * b[..., 0, None, :]  # (..., m, n)
    for k in range(1, a.shape[-1]):
        total += a[..., k, None] * b[..., k, None, :]
    return total


class _WidenProgram(ProgramRewriter):
    """Every float of a program in float64."""

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
        if isinstance(value, Intrinsic) and INTRINSICS[value.name].result is not None:  # of just these dtypes
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
