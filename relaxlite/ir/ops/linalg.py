"""Matrix products by NumPy's rules: matmul, and integer matmul with zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import PROVER, Shape, broadcast_checks, broadcast_index, broadcast_shapes, format_shape
from relaxlite.ir.ops.scalars import HALF, Scalar, identity, index
from relaxlite.ir.program import Buffer, Check, Stmt, reduce, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, product, sym
from relaxlite.ir.types import TensorType, Type


def accumulator(dtype: DType) -> DType:
    """Accumulator dtype of sums: float32 for half-precision floats, else the dtype itself."""
    return "float32" if dtype in HALF else dtype


def accumulate(out: Buffer, extents: Iterable[IntLike], value: Callable[..., Scalar]) -> Stmt:
    """Build out[i...] = sum over r... of value(i..., r...), summed in dtype `accumulator(out.dtype)`."""
    dtype = accumulator(out.dtype)
    zero = identity("add", dtype)
    return reduce(
        out, extents, "add", zero, lambda *i: value(*i).value, lambda total, *i: Scalar(total).cast(out.dtype).value
    )


def equality_checks(message: str, *pairs: tuple[IntLike, IntLike]) -> tuple[Check, ...]:
    """Run-time checks that the sizes of each pair are equal; proven pairs need none."""
    return tuple(
        Check(index(a).equals(index(b)).value, f"{message}: {a} against {b}")
        for a, b in pairs
        if not PROVER.can_prove_equal(sym(a), sym(b))
    )


def nonempty_checks(op: str, why: str, x: Buffer, axes: Iterable[int], out: Buffer) -> tuple[Check, ...]:
    """Run-time checks that x is nonempty along `axes` unless `out` is empty; proven axes need none.

    `why` ends the error text: what the op cannot do with an empty dimension.
    """
    out_size = product(out.shape)
    unproven = [k for k in axes if not (PROVER.can_prove_le(1, x.shape[k]) or PROVER.can_prove_equal(out_size, 0))]
    return tuple(
        Check(
            ((index(x.shape[k]) > 0) | (index(out_size) < 1)).value,
            f"{op}: {x.name} is empty along dimension {k}: {why}",
        )
        for k in unproven
    )


def emit_op(bb: BlockBuilder, name: str, *operands: Any, **attrs: Any) -> Expr:
    """Emit a call of the op of this name and return the variable bound to it."""
    return bb.emit(get_op(name)(*operands, **attrs))


def emit_reshape(bb: BlockBuilder, x: Expr, shape: Iterable[IntLike]) -> Expr:
    """Emit a reshape and return the variable bound to it."""
    return emit_op(bb, "reshape", x, shape_value(shape))


def to_accumulator_dtype(x: Any) -> Any:
    """Convert a NumPy array to its accumulator dtype."""
    return x.astype(dtypes.to_numpy(accumulator(dtypes.from_numpy(x.dtype) or "float32")))


class _Product(Op):
    """Base of matmul and matmul_integer: NumPy's shape rule."""

    def product_shape(self, a: TensorType, b: TensorType) -> Shape:
        assert a.shape is not None and b.shape is not None
        if not a.shape or not b.shape:
            self.fail(f"operands must have at least one dimension, got a {a} and b {b}")
        if PROVER.can_prove_ne(a.shape[-1], _inner(b.shape)):
            self.fail(
                f"the inner dimensions differ: a is {format_shape(a.shape)} and b is {format_shape(b.shape)}; the last "
                f"dimension of a must equal the {'second to last' if len(b.shape) > 1 else 'only'} dimension of b"
            )
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return batch + a.shape[-2:-1] + (b.shape[-1:] if len(b.shape) > 1 else ())


def _inner(b: Shape) -> SymExpr:
    return b[-2] if len(b) > 1 else b[-1]


def _lower_product(name: str, a: Buffer, b: Buffer, out: Buffer, value: Callable[..., Scalar]) -> Stmt:
    """Build out[batch..., i, j] = sum over k of value(a[..., i, k], b[..., k, j], batch, (i,), (j,)) with checks."""
    rows, cols = len(a.shape) > 1, len(b.shape) > 1
    rank = len(out.shape) - rows - cols
    batch = out.shape[:rank]

    def term(*i: SymVar) -> Scalar:
        at, row, col, k = i[:rank], i[rank : rank + rows], i[rank + rows : -1], i[-1:]
        left = a[broadcast_index(a.shape[:-2], at, batch) + row + k]
        right = b[broadcast_index(b.shape[:-2], at, batch) + k + col]
        return value(Scalar(left), Scalar(right), at, row, col)

    inner = equality_checks(f"{name}: the inner dimensions differ", (a.shape[-1], _inner(b.shape)))
    outer = broadcast_checks(name, a.shape[:-2], b.shape[:-2])
    return seq(*inner, *outer, accumulate(out, a.shape[-1:], term))


@register
class Matmul(_Product):
    """Matrix product a @ b by NumPy's rules: batch dimensions broadcast, a 1-D operand is a row or a column.

    Half-precision floats accumulate in float32 and are rounded once, to `dtype` (None: their own; float32: not at all);
    integers wrap.
    """

    name = "matmul"
    operands = ("a", "b")
    attrs: ClassVar[Mapping[str, Attr]] = {"dtype": Attr("dtype", None)}

    def infer(self, a: Expr, b: Expr, *, dtype: DType | None) -> Type:
        x, y = self.tensor(a, "a"), self.tensor(b, "b")
        if x.dtype != y.dtype or x.dtype == "bool":
            self.fail(f"operands must have one numeric dtype, got {x.dtype} and {y.dtype}; cast one of them")
        if dtype not in (None, x.dtype, accumulator(x.dtype)):
            self.fail(f"the product of {x.dtype} can be {x.dtype} or {accumulator(x.dtype)}, not {dtype}")
        return TensorType.of(self.product_shape(x, y), dtype or x.dtype)

    def lower(self, a: Buffer, b: Buffer, *, out: Buffer, dtype: DType | None) -> Stmt:
        wide = accumulator(out.dtype)
        return _lower_product(self.name, a, b, out, lambda x, y, *_: x.cast(wide) * y.cast(wide))

    def reference(self, a: Any, b: Any, *, dtype: DType | None) -> Any:
        result_dtype = a.dtype if dtype is None else dtypes.to_numpy(dtype)
        return np.asarray(np.matmul(to_accumulator_dtype(a), to_accumulator_dtype(b))).astype(result_dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("m", "k"), ("k", "n")))
        yield Sample((("b", 1, "m", 5), (2, 5, "n")))
        yield Sample(((2, "m", "k"), ("k",)))
        yield Sample((("k",), ("b", "k", 3)))
        yield Sample((("k",), ("k",)))
        yield Sample((("m", "k"), ("k", 4)), dtypes=("float16", "float16"), tolerance=2e-3)
        yield Sample((("m", 3), (3, "n")), dtypes=("bfloat16", "bfloat16"), tolerance=2e-2)
        yield Sample((("m", 6), (6, "n")), {"dtype": "float32"}, dtypes=("bfloat16", "bfloat16"))
        yield Sample((("m", 3), (3, "n")), dtypes=("int32", "int32"))


PRODUCT_DTYPES = ("int8", "uint8", "int16")  # dtypes of the operands of integer products


@register
class MatmulInteger(_Product):
    """Integer matrix product (a - a_zero) @ (b - b_zero) of int8, uint8 or int16 in int32; sums wrap.

    a_zero is a scalar or has one value per row of a (m,), b_zero a scalar or one value per column of b (n,); both may
    also have the rank of their operand, with 1 in the contracted dimension. b_zero requires a_zero.
    """

    name = "matmul_integer"
    operands = ("a", "b", "a_zero?", "b_zero?")

    def infer(self, a: Expr, b: Expr, a_zero: Expr | None = None, b_zero: Expr | None = None) -> Type:
        x, y = self.tensor(a, "a"), self.tensor(b, "b")
        if x.dtype not in PRODUCT_DTYPES or y.dtype not in PRODUCT_DTYPES:
            self.fail(f"operands must be int8, uint8 or int16, got {x.dtype} and {y.dtype}")
        for operand, zero, name in ((x, a_zero, "a_zero"), (y, b_zero, "b_zero")):
            if zero is not None and self.tensor(zero, name).dtype != operand.dtype:
                self.fail(f"{name} must have the dtype of its operand, {operand.dtype}, got {zero.ty}")
        return TensorType.of(self.product_shape(x, y), "int32")

    def lower(
        self, a: Buffer, b: Buffer, a_zero: Buffer | None = None, b_zero: Buffer | None = None, *, out: Buffer
    ) -> Stmt:
        batch = out.shape[: max(len(a.shape), len(b.shape)) - 2]

        def term(x: Scalar, y: Scalar, at: Shape, row: Shape, col: Shape) -> Scalar:
            left, right = x.cast("int32"), y.cast("int32")
            if a_zero is not None:
                left = left - _zero_point(a_zero, at, batch, (*row, sym(0)), zip(a.shape[-2:-1], row, strict=True))
            if b_zero is not None:
                right = right - _zero_point(b_zero, at, batch, (sym(0), *col), zip(b.shape[-1:], col, strict=False))
            return left * right

        pairs = [
            *_zero_sizes(a_zero, (*a.shape[:-1], sym(1))),
            *_zero_sizes(b_zero, (*b.shape[:-2], sym(1), b.shape[-1])),
        ]
        message = "matmul_integer: a zero point per row of a, or per column of b"
        checks = equality_checks(message, *pairs)
        vectors = [
            *_vector_checks(message, a_zero, a.shape[-2:-1]),
            *_vector_checks(message, b_zero, b.shape[-1:] if len(b.shape) > 1 else ()),
        ]
        return seq(*checks, *vectors, _lower_product(self.name, a, b, out, term))

    def reference(self, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
        left, right = a.astype(np.int32), b.astype(np.int32)
        if a_zero is not None:
            left = left - (a_zero[:, None] if a_zero.ndim == 1 and a_zero.size != 1 else a_zero).astype(np.int32)
        if b_zero is not None:
            right = right - b_zero.astype(np.int32)
        return np.asarray(np.matmul(left, right))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("m", "k"), ("k", "n")), dtypes=("uint8", "int8"))
        yield Sample((("m", "k"), ("k", "n")), dtypes=("int16", "int16"))
        yield Sample((("m", "k"), ("k", "n"), (), ()), dtypes=("uint8", "int8", "uint8", "int8"))
        yield Sample((("b", 5, "k"), ("k", 4), (5,), (4,)), dtypes=("int8", "uint8", "int8", "uint8"))
        yield Sample((("m", "k"), ("k", "n"), ("m",), ("n",)), dtypes=("uint8", "int8", "uint8", "int8"))
        yield Sample(((2, 3, "k"), (2, "k", 4), (2, 3, 1), (2, 1, 4)), dtypes=("uint8",) * 4)


def _is_vector(zero: Buffer) -> bool:
    return len(zero.shape) == 1 and as_int(zero.shape[0]) != 1


def _zero_sizes(zero: Buffer | None, expected: Shape) -> Iterable[tuple[SymExpr, SymExpr]]:
    """Pairs of sizes, of a zero point of the rank of its operand and of the operand, that must be equal."""
    if zero is None or len(expected) < 2 or _is_vector(zero) or all(as_int(d) == 1 for d in zero.shape):
        return ()
    batch_pairs = zip(reversed(zero.shape[:-2]), reversed(expected[:-2]), strict=False)
    return (*zip(zero.shape[-2:], expected[-2:], strict=True), *(pair for pair in batch_pairs if as_int(pair[0]) != 1))


def _vector_checks(message: str, zero: Buffer | None, lines: Shape) -> Iterable[Check]:
    """Run-time check that a zero-point vector of unknown size has one value, or one per row or column."""
    if zero is None or not _is_vector(zero) or any(PROVER.can_prove_equal(zero.shape[0], n) for n in lines):
        return
    size = index(zero.shape[0])
    is_valid = size.equals(1)
    for n in lines:
        is_valid = is_valid | size.equals(index(n))
    yield Check(is_valid.value, f"{message}: {', '.join(map(str, lines)) or 1} against {zero.shape[0]}, which is not 1")


def _zero_point(
    zero: Buffer, at: Shape, batch: Shape, matrix: Shape, vector: Iterable[tuple[SymExpr, SymExpr]]
) -> Scalar:
    """Load a zero point per tensor, per row or column, or per row or column of each matrix of the batch.

    vector: (number of rows or columns, index); empty if the operand is a vector without them.
    """
    if all(as_int(d) == 1 for d in zero.shape):
        where: Shape = (sym(0),) * len(zero.shape)
    elif _is_vector(zero):
        lines, line = next(iter(vector), (sym(1), sym(0)))
        where = broadcast_index(zero.shape, (line,), (lines,))
    else:
        where = broadcast_index(zero.shape[:-2], at, batch) + matrix
    return Scalar(zero[where]).cast("int32")
