"""Steps of one op or a few: elementwise chains, reductions, views, products, and every op of the registry by its
samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir import ops
from relaxlite.ir.expr import Constant, Expr, ShapeValue, TupleGetItem
from relaxlite.ir.op import Op, Sample, all_ops
from relaxlite.ir.symbolic import SymExpr, as_int, product, sym, syms
from relaxlite.ir.types import TensorType, TupleType
from tests.fuzz.generator import Generator, rank_of, shape_of, step, type_of
from tests.ir.ops.test_conformance import dims_of, draw, operand_dtypes, sample_symbols

UNARY = (
    "tanh", "sigmoid", "relu", "neg", "abs", "gelu", "exp", "sqrt", "silu", "erf", "sin", "floor", "round", "sign",
    "reciprocal", "rsqrt", "log1p", "hard_swish", "softplus", "isnan", "ceil", "cos",
)  # fmt: skip
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "add", "multiply")
INTEGER_BINARY = ("add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "floormod", "bitwise_and")
COMPARE = ("less", "greater", "equal", "not_equal", "less_equal", "greater_equal")
REDUCE = ("sum", "mean", "max", "min", "prod", "sum", "max", "sum_square", "log_sum_exp", "l2_norm", "argmax", "argmin")
LEFT_OUT = ("memory.", "vm.", "nms_select", "nms_collect", "prod")  # not for graphs; floats overflow in some order

ROUNDED = ("grouped_matmul",)  # by its precision, which is not to be told from a mistake

SAMPLES: list[tuple[Op, Sample]] = [
    (op, sample)
    for op in all_ops()
    if not op.name.startswith(LEFT_OUT) and op.name not in ROUNDED
    for sample in op.samples()
]


@step(14)
def unary(g: Generator) -> Expr | None:
    x = g.floating() or g.value()
    return None if x is None else ops.get_op(g.roll.pick(UNARY))(x)


@step(16)
def binary(g: Generator) -> Expr | None:
    x = g.value()
    y = None if x is None else partner(g, x)
    if x is None or y is None:
        return None
    names = BINARY if dtypes.is_float(type_of(x).dtype) else INTEGER_BINARY
    a, b = (x, y) if g.roll.chance(70) else (y, x)
    name = g.roll.pick(names)
    if name == "divide":  # whether what was computed is 0 or nearly so, rounding decides
        b = g.emit("add", g.emit("abs", b), Constant.of(0.5, type_of(b).dtype))
    return ops.get_op(name)(a, b)


def partner(g: Generator, x: Expr) -> Expr | None:
    """A second operand that broadcasts with x."""
    ty = type_of(x)
    kind = g.roll.whole(0, 9)
    if kind <= 3:
        return g.value(lambda other: other.dtype == ty.dtype and broadcasts(other.shape or (), ty.shape or ()))
    if kind <= 5:
        return g.constant(g.type((), ty.dtype))
    if kind == 6 and g.roll.chance(20):  # a dimension that may be 1 or the other's size: only run time tells
        return g.value(lambda other: other.dtype == ty.dtype and other.rank == ty.rank)
    shape = [d if g.roll.chance(65) else sym(1) for d in (ty.shape or ())[g.roll.whole(0, rank_of(x)) :]]
    return g.like(g.type(shape, ty.dtype))


def broadcasts(a: tuple[SymExpr, ...], b: tuple[SymExpr, ...]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(x is y or as_int(x) == 1 or as_int(y) == 1 for x, y in pairs)


@step(5)
def compare(g: Generator) -> Expr | None:
    x = g.value()
    y = None if x is None else partner(g, x)
    if x is None or y is None:
        return None
    cond = g.emit(g.roll.pick(COMPARE), x, y)
    return ops.where(cond, x, y) if g.roll.chance(70) else cond


@step(7)
def reduction(g: Generator) -> Expr | None:
    x = g.value()
    if x is None:
        return None
    name, rank = g.roll.pick(REDUCE), rank_of(x)
    if name.startswith("arg"):
        return None if rank == 0 else ops.get_op(name)(x, axis=g.roll.whole(-rank, rank - 1))
    if name == "prod" and dtypes.is_float(type_of(x).dtype):
        x = g.emit("tanh", x)  # whose partial products do not overflow in any order
    axes = tuple(sorted(g.roll.order(range(rank))[: g.roll.whole(0, rank)]))
    return ops.get_op(name)(x, axes=axes or None, keepdims=g.roll.chance(50))


@step(4)
def softmax(g: Generator) -> Expr | None:
    x = g.floating()
    if x is None or rank_of(x) == 0:
        return None
    axis = g.roll.pick((-1, -1, -1, 0))
    return ops.get_op(g.roll.pick(("softmax", "log_softmax")))(x, axis=axis)


@step(4)
def norm(g: Generator) -> Expr | None:
    """A normalization as one op, or as exporters write it."""
    x = g.floating()
    if x is None or rank_of(x) == 0:
        return None
    dtype, last = type_of(x).dtype, shape_of(x)[-1]
    scale = g.like(g.type((last,), dtype))
    kind = g.roll.whole(0, 4)
    if kind == 0:
        return ops.layer_norm(x, scale, g.like(g.type((last,), dtype)), axis=-1)
    if kind == 1:
        return ops.rms_norm(x, scale, axis=-1)
    two = Constant.of(2, dtype)
    if kind == 2:
        mean = g.emit("mean", x, axes=(-1,), keepdims=True)
        centered = g.emit("subtract", x, mean)
        variance = g.emit("mean", g.emit("multiply", centered, centered), axes=(-1,), keepdims=True)
        scaled = g.emit("divide", centered, g.emit("sqrt", g.emit("add", variance, Constant.of(1e-3, dtype))))
        return ops.multiply(scaled, scale)
    if kind == 3:
        square = g.emit("mean", g.emit("power", x, two), axes=(-1,), keepdims=True)
        root = g.emit("rsqrt", g.emit("add", square, Constant.of(1e-3, dtype)))
        return ops.multiply(g.emit("multiply", x, root), scale)
    most = g.emit("max", x, axes=(-1,), keepdims=True)
    powers = g.emit("exp", g.emit("subtract", x, most))
    return ops.divide(powers, g.emit("sum", powers, axes=(-1,), keepdims=True))


@step(3)
def activation_chain(g: Generator) -> Expr | None:
    """GELU and SiLU taken apart."""
    x = g.floating()
    if x is None:
        return None
    dtype = type_of(x).dtype
    if g.roll.chance(50):
        return ops.multiply(x, g.emit("sigmoid", x))
    inner = g.emit("erf", g.emit("divide", x, Constant.of(2**0.5, dtype)))
    half = g.emit("multiply", x, Constant.of(0.5, dtype))
    return ops.multiply(half, g.emit("add", inner, Constant.of(1, dtype)))


# Views and other rearrangements


@step(8)
def reshape(g: Generator) -> Expr | None:
    x = g.value()
    if x is None:
        return None
    shape, rank = list(shape_of(x)), rank_of(x)
    kind = g.roll.whole(0, 4)
    if kind == 0:
        return ops.reshape(x, (product(shape),))
    if kind == 1 and rank >= 2:
        k = g.roll.whole(0, rank - 2)
        return ops.reshape(x, (*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :]))
    if kind == 2:
        k = g.roll.whole(0, rank)
        return ops.reshape(x, (*shape[:k], 1, *shape[k:]))
    if kind == 3 and rank:
        for k in g.roll.order(range(rank)):
            for parts in (2, 4, 3):
                whole = shape[k] // parts
                if whole * parts is shape[k]:
                    return ops.reshape(x, (*shape[:k], *g.roll.order([whole, sym(parts)]), *shape[k + 1 :]))
    axes = tuple(k for k, d in enumerate(shape) if as_int(d) == 1)
    return ops.squeeze(x, axes=axes) if axes else ops.expand_dims(x, axes=(g.roll.whole(0, rank),))


@step(5)
def transpose(g: Generator) -> Expr | None:
    x = g.value(lambda ty: (ty.rank or 0) >= 2)
    return None if x is None else ops.transpose(x, axes=tuple(g.roll.order(range(rank_of(x)))))


@step(6)
def slice_(g: Generator) -> Expr | None:
    """A part of one axis or of all: contiguous, strided or backwards."""
    x = g.value(lambda ty: (ty.rank or 0) >= 1)
    if x is None:
        return None
    shape = shape_of(x)
    axes = sorted(g.roll.order(range(len(shape)))[: g.roll.whole(1, len(shape))])
    begins, sizes, steps = [], [], []
    for axis in axes:
        begin, size, stride = window(g, shape[axis])
        begins.append(begin)
        sizes.append(size)
        steps.append(stride)
    return ops.slice(x, tuple(begins), tuple(sizes), axes=tuple(axes), steps=tuple(steps))


def window(g: Generator, d: SymExpr) -> tuple[SymExpr, SymExpr, int]:
    kind = g.roll.whole(0, 5)
    if kind == 0:
        return sym(0), d // 2, 1
    if kind == 1:
        return d // 2, d - d // 2, 1
    if kind == 2:
        return sym(0), (d + 1) // 2, 2
    if kind == 3:
        return d - 1, d, -1
    known = as_int(d)
    if known and kind == 4:
        begin = g.roll.whole(0, known - 1)
        return sym(begin), sym(g.roll.whole(0, known - begin)), 1
    return sym(0), d, 1


@step(4)
def split_and_join(g: Generator) -> Expr | None:
    """Halves of an axis, changed on their own, put together again in some order."""
    x = g.value(lambda ty: (ty.rank or 0) >= 1 and dtypes.is_float(ty.dtype))
    if x is None:
        return None
    axis = g.roll.whole(0, rank_of(x) - 1)
    d = shape_of(x)[axis]
    first = g.emit("slice", x, (0,), (d // 2,), axes=(axis,))
    second = g.emit("slice", x, (d // 2,), (d - d // 2,), axes=(axis,))
    if g.roll.chance(50):
        second = g.emit("neg", second)
    return ops.concat(*g.roll.order([first, second]), axis=axis)


@step(4)
def concat(g: Generator) -> Expr | None:
    x = g.value(lambda ty: (ty.rank or 0) >= 1)
    if x is None:
        return None
    axis = g.roll.whole(0, rank_of(x) - 1)
    parts: list[Expr] = [x]
    for _ in range(g.roll.whole(1, 2)):
        shape = list(shape_of(x))
        shape[axis] = g.roll.pick((shape[axis], g.dim()))
        parts.append(g.like(g.type(shape, type_of(x).dtype)) or x)
    return ops.concat(*g.roll.order(parts), axis=axis)


@step(3)
def pad(g: Generator) -> Expr | None:
    x = g.value(lambda ty: (ty.rank or 0) >= 1)
    if x is None:
        return None
    before, after = (tuple(g.roll.whole(0, 2) for _ in shape_of(x)) for _ in range(2))
    return ops.pad(x, before, after)


@step(3)
def broadcast(g: Generator) -> Expr | None:
    x = g.value()
    if x is None:
        return None
    shape = [g.dim() if as_int(d) == 1 else d for d in shape_of(x)]
    return ops.broadcast_to(x, (*([g.dim()] if g.roll.chance(60) else []), *shape))


@step(4)
def gather(g: Generator) -> Expr | None:
    """Places that are made to lie inside, or now and then whatever they are."""
    x = g.value(lambda ty: (ty.rank or 0) >= 1)
    if x is None:
        return None
    axis = g.roll.whole(0, rank_of(x) - 1)
    raw = g.like(g.type([g.dim() for _ in range(g.roll.whole(0, 2))], g.roll.pick(("int64", "int32"))), is_new=True)
    return None if raw is None else ops.gather(x, inside(g, raw, shape_of(x)[axis]), axis=axis)


def inside(g: Generator, raw: Expr, d: SymExpr) -> Expr:
    if g.roll.chance(8):
        return raw
    dtype = type_of(raw).dtype
    limit = g.emit("maximum", g.emit("cast", g.emit("shape_to_tensor", (d,)), dtype=dtype), Constant.of([1], dtype))
    return g.emit("floormod", raw, g.emit("reshape", limit, ()))


@step(4)
def cast(g: Generator) -> Expr | None:
    x = g.value()
    if x is None:
        return None
    target = g.roll.pick(("float32", "float32", "float16", "bfloat16", "float64", "int32", "int64", "bool", "int8"))
    if dtypes.is_float(type_of(x).dtype) and not dtypes.is_float(target) and target != "bool":
        x = g.emit("clip", x, lower=-9.0, upper=9.0)  # what does not fit an integer is undefined
    return ops.cast(x, dtype=target)


@step(2)
def sorting(g: Generator) -> Expr | None:
    x = g.value(lambda ty: (ty.rank or 0) >= 1 and ty.dtype != "bool")
    if x is None:
        return None
    axis = g.roll.whole(-rank_of(x), -1)
    if g.roll.chance(50):
        return ops.get_op(g.roll.pick(("sort", "argsort", "cumsum")))(x, axis=axis)
    size = shape_of(x)[axis]
    pair = g.emit("top_k", x, (g.roll.pick((size, (size + 1) // 2, size // 2)),), axis=axis)
    return TupleGetItem(pair, g.roll.whole(0, 1))


# Products


def weight(g: Generator, shape: list[Any], dtype: str) -> Expr | None:
    """A constant where it can be one."""
    ty = g.type(shape, dtype)
    if all(as_int(d) is not None for d in ty.shape or ()) and g.roll.chance(85):
        return g.constant(ty)
    return g.like(ty)


@step(9)
def matmul(g: Generator) -> Expr | None:
    """A product with a constant, transposed, converted or dequantized weight, and what follows it in models."""
    x = g.floating()
    if x is None or rank_of(x) == 0:
        return None
    dtype, inner, columns = type_of(x).dtype, shape_of(x)[-1], g.roll.pick((g.dim(), sym(16), sym(24), sym(33), sym(1)))
    y = ops.matmul(x, operand(g, inner, columns, dtype))
    for _ in range(g.roll.whole(0, 3)):
        y = g.bb.emit(y)
        kind = g.roll.whole(0, 3)
        if kind == 0:
            y = ops.add(y, weight(g, [columns], dtype))
        elif kind == 1:
            y = ops.get_op(g.roll.pick(("relu", "tanh", "gelu", "sigmoid")))(y)
        elif kind == 2:
            y = ops.multiply(y, Constant.of(0.125, dtype))
        else:
            y = ops.add(y, g.like(y.ty) or y)
    return y


def operand(g: Generator, inner: SymExpr, columns: SymExpr, dtype: str) -> Expr | None:
    kind = g.roll.whole(0, 7)
    if kind == 0:
        return g.emit("transpose", weight(g, [columns, inner], dtype), axes=(1, 0))
    if kind == 1:
        return g.emit("cast", weight(g, [inner, columns], g.roll.pick(("float16", "bfloat16", "float64"))), dtype=dtype)
    if kind == 2 and dtype == "float32":
        stored = weight(g, [inner, columns], g.roll.pick(("int8", "uint8")))
        scale = Constant.of(np.float32(0.05))
        return g.emit("dequantize_linear", stored, scale)
    return weight(g, [inner, columns], dtype)


@step(3)
def shared_input(g: Generator) -> Expr | None:
    """Two or three products of one value, as queries, keys and values are."""
    x = g.floating()
    if x is None or rank_of(x) < 2:
        return None
    dtype, inner = type_of(x).dtype, shape_of(x)[-1]
    made = []
    for _ in range(g.roll.whole(2, 3)):
        y = g.emit("matmul", x, weight(g, [inner, g.roll.pick((8, 16, 8, 5))], dtype))
        if g.roll.chance(40):
            y = g.emit("add", y, weight(g, [shape_of(y)[-1]], dtype))
        made.append(y)
        g.pool.append(y)
    if all(m.ty == made[0].ty for m in made) and g.roll.chance(70):
        return ops.multiply(g.emit("silu", made[0]), made[1])
    return made[-1]


@step(3)
def batched_product(g: Generator) -> Expr | None:
    """x @ x^T, attention, or einsum-like products of values."""
    x = g.floating()
    if x is None or rank_of(x) < 2:
        return None
    rank = rank_of(x)
    swapped = g.emit("transpose", x, axes=(*range(rank - 2), rank - 1, rank - 2))
    scores = g.emit("matmul", x, swapped)
    if g.roll.chance(40):
        return ops.multiply(scores, Constant.of(0.1, type_of(x).dtype))
    scaled = g.emit("multiply", scores, Constant.of(0.25, type_of(x).dtype))
    if g.roll.chance(30):
        mask = g.like(g.type(shape_of(scores)[-2:], type_of(x).dtype))
        scaled = scaled if mask is None else g.emit("add", scaled, mask)
    return ops.matmul(g.emit("softmax", scaled, axis=-1), x)


@step(3)
def convolution(g: Generator) -> Expr | None:
    dtype = "float32"
    batch, height, width = g.roll.pick((sym(1), g.dim())), g.dim(), g.roll.pick((g.dim(), sym(9)))
    channels, filters, groups = g.roll.pick((1, 3, 4, 8, 16)), g.roll.pick((1, 4, 8, 16, 17)), 1
    if g.roll.chance(25):
        filters = groups = channels
    x = g.value(lambda ty: ty.rank == 4 and ty.dtype == dtype and as_int((ty.shape or ())[1]) == channels)
    x = x or g.like(g.type((batch, channels, height, width), dtype))
    if x is None:
        return None
    kernel = g.roll.pick(((1, 1), (3, 3), (3, 3), (2, 3), (5, 1)))
    pads = tuple(g.roll.whole(0, k - 1) for k in (*kernel, *kernel))
    w = weight(g, [filters, channels // groups, *kernel], dtype)
    strides = g.roll.pick(((1, 1), (1, 1), (2, 2), (1, 2)))
    y: Any = ops.conv(x, w, pads, strides=strides, groups=groups)
    if g.roll.chance(60):
        y = ops.add(g.bb.emit(y), weight(g, [filters, 1, 1], dtype))
    if g.roll.chance(50):
        y = ops.relu(g.bb.emit(y))
    return y


# Any op, as its samples use it


@step(26)
def from_registry(g: Generator) -> Expr | None:
    op, sample = g.roll.pick(SAMPLES)
    types = operand_dtypes(sample)
    symbols = sample_symbols(sample)
    values: dict[str, Any] = {}
    size = g.roll.whole(1, 4)  # of all symbols, as what a sample makes may count on it
    if not sample.make:
        values = unified(g, sample, types, symbols)
    for name in symbols:
        if name not in values:
            values[name] = size if sample.make else g.dim()
    operands: list[Any] = []
    is_narrow = not sample.make and all(t == "float32" for t in types) and g.roll.chance(20)
    other = g.roll.pick(("float16", "bfloat16", "float64", "int32")) if is_narrow else "float32"
    for k, (shape, dtype) in enumerate(zip(sample.shapes, types, strict=True)):
        dims = dims_of(shape, values)
        if dtype == "shape":
            operands.append(ShapeValue(syms(dims)))
        elif k in sample.make:
            data = np.asarray(sample.make[k](dims, g.numbers)).astype(dtypes.to_numpy(dtype))
            operands.append(Constant.of(np.ascontiguousarray(data).reshape(data.shape), dtype))
        else:
            operands.append(g.like(g.type(dims, other if is_narrow else dtype)))
    if any(x is None for x in operands):
        return None
    most = sum((product(shape_of(x)) for x in operands if isinstance(x.ty, TensorType)), sym(0))
    return chosen(g, g.bb.emit(op(*operands, **sample.attrs)), most)


def unified(g: Generator, sample: Sample, types: tuple[str, ...], symbols: Any) -> dict[str, Any]:
    """Sizes of a sample's symbols so that one of its operands is a value that exists."""
    for k in g.roll.order(range(len(types))):
        shape = sample.shapes[k]
        for x in g.roll.order(g.pool):
            if type_of(x).dtype == types[k] and rank_of(x) == len(shape):
                values: dict[str, Any] = {}
                pairs = list(zip(shape, shape_of(x), strict=True))
                for want, found in pairs:
                    if isinstance(want, str) and want in symbols:
                        values.setdefault(want, found)
                if all(_agrees(want, found, values) for want, found in pairs):
                    return values
    return {}


def _agrees(want: int | str, found: SymExpr, values: dict[str, Any]) -> bool:
    return as_int(found) == want if isinstance(want, int) else values.get(want) is found


def chosen(g: Generator, made: Expr, most: SymExpr | None = None) -> Expr | None:
    """One result of an op, its unknown sizes, none above `most`, bound to new symbols."""
    if isinstance(made.ty, TupleType):
        picked = g.roll.whole(0, len(made.ty.fields) - 1)
        return chosen(g, g.bb.emit(TupleGetItem(made, picked)), most)
    if isinstance(made.ty, TensorType) and made.ty.shape is None and made.ty.rank is not None:
        return bound(g, made, most)
    return made if isinstance(made.ty, TensorType) else None


def bound(g: Generator, x: Expr, most: SymExpr | None = None) -> Expr:
    """The same tensor with a symbol for each dimension, which later steps use; unknown ones are `most` at most."""
    ty = type_of(x)
    names = [g.bb.symbol(f"d{len(g.symbols)}_{k}") for k in range(ty.rank or 0)]
    g.symbols.extend(names)
    for name, dim in zip(names, ty.shape or (most,) * len(names), strict=True):
        if dim is not None:
            g.most[name] = dim
    return g.bb.match_shape(x, names)


__all__ = ["bound", "chosen", "draw", "inside", "partner"]
