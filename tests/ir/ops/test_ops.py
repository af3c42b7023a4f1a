"""Ops on symbols: broadcasting, symbolic values of shape computations, type errors, run-time checks of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.ops.broadcast import broadcast_shapes
from relaxlite.ir.ops.shape import infer_dimension, reshape_index
from relaxlite.ir.symbolic import SymVar, as_int, smin, substitute, syms
from relaxlite.ir.types import ShapeType, TensorType
from tests.ir.ops.test_conformance import program_of

n, m, b = SymVar("n"), SymVar("m"), SymVar("b", lower=1)


def tensor(*shape: Any, dtype: str = "float32") -> Var:
    return Var("x", TensorType.of(shape, dtype))


@contextmanager
def building() -> Iterator[BlockBuilder]:
    """A builder inside a function body."""
    bb = BlockBuilder()
    with bb.body():
        yield bb


# Broadcasting


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((n, 4), (n, 4), "(n, 4)"),
        ((n, 1), (1, m), "(n, m)"),
        ((4,), (n, 4), "(n, 4)"),
        ((n,), (), "(n,)"),
        ((n,), (7,), "(7,)"),  # n is 7 or 1
        ((n,), (m,), "(min(m, n, 1)*max(m, n),)"),
        ((n * 2 + m,), (m + n + n,), "(m + n*2,)"),
        ((SymVar("p", lower=1),), (SymVar("q", lower=1),), "(max(p, q),)"),
    ],
)
def test_broadcast_shapes(a: Any, b: Any, expected: str) -> None:
    shape = ops.add(tensor(*a), tensor(*b)).ty.shape
    assert f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})" == expected


def test_shapes_that_cannot_be_broadcast_are_named() -> None:
    with pytest.raises(
        TypeInferenceError, match=r"add: shapes \(n, 3\) and \(4,\) cannot be broadcast: dimension -1 is 3 in one and 4"
    ):
        ops.add(tensor(n, 3), tensor(4))


def test_sizes_that_can_never_agree_are_refused() -> None:
    with pytest.raises(TypeInferenceError, match="cannot be broadcast"):
        ops.add(tensor(n + 2), tensor(n + 3))


def test_sizes_that_divide_by_a_symbol_broadcast() -> None:
    """Division by zero at import: blocks of t // (t // 4) rows beside u // (t // 4)."""
    t, u = SymVar("t", lower=0), SymVar("u", lower=0)
    for a, b, expected in ((t // (t // 4), u // (t // 4), 4), (t // u, t, 9), (t % u, u, 8)):
        for pair in ((a, b), (b, a)):
            (found,) = broadcast_shapes(*((d,) for d in pair))
            assert as_int(substitute(found, {t: 9, u: 8})) == expected


def test_broadcasting_several_shapes_at_once() -> None:
    assert broadcast_shapes(syms((n, 1)), syms((3,)), syms((1, 1))) == syms((n, 3))


# Reshape indices


def test_reshape_keeps_equal_dimensions_apart() -> None:
    i, j, k, q = (SymVar(c) for c in "ijkq")
    assert str(reshape_index(syms((n, m, 12)), syms((n, m, 3, 4)), (i, j, k, q))) == "(i, j, k*4 + q)"
    assert str(reshape_index(syms((n, 3, 4)), syms((n, 12)), (i, j))) == "(i, (j // 4), (j % 4))"
    assert str(reshape_index(syms((n, m, 4)), syms((n * m, 4)), (i, j))) == "((i // m), (i % m), j)"


def test_the_missing_dimension_of_a_reshape() -> None:
    assert infer_dimension(syms((n, 768)), (n, -1, 64)) == syms((n, 12, 64))
    assert infer_dimension(syms((n, n)), (n, -1)) == syms((n, n))
    assert infer_dimension(syms((n, m, 4)), (-1, 4)) == syms((n * m, 4))


# Symbolic values


def known(build: Callable[[BlockBuilder, Var], Expr], x: Var | None = None) -> list[Any] | None:
    """The symbolic elements of an expression of x: (n, 3, m), as text."""
    with building() as bb:
        value = bb.known_value(build(bb, x or tensor(n, 3, m)))
        return None if value is None else [str(v) for v in value.reshape(-1)]


def test_shape_gather_concat_reshape_is_followed() -> None:
    with building() as bb:
        x = tensor(n, 3, m)
        shape = bb.emit(ops.shape_of(x))
        batch = bb.emit(ops.gather(shape, np.int64(0)))
        rest = bb.emit(ops.multiply(bb.emit(ops.gather(shape, np.int64(1))), bb.emit(ops.gather(shape, np.int64(-1)))))
        parts = [bb.emit(ops.expand_dims(v, axes=(0,))) for v in (batch, rest)]
        target = bb.known_shape(bb.emit(ops.concat(*parts, axis=0)))
        assert target == syms((n, m * 3))
        assert bb.emit(ops.reshape(x, target)).ty == TensorType.of((n, m * 3), "float32")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda s: ops.slice(s, (1,), (2,)), ["3", "m"]),
        (lambda s: ops.slice(s, (2,), (3,), steps=(-1,)), ["m", "3", "n"]),
        (lambda s: ops.prod(s), ["m*n*3"]),
        (lambda s: ops.sum(s, axes=(0,), keepdims=True), ["m + n + 3"]),
        (lambda s: ops.max(s), ["max(m, n, 3)"]),
        (lambda s: ops.maximum(s, np.int64(3)), ["max(n, 3)", "3", "max(m, 3)"]),
        (lambda s: ops.subtract(s, np.array([1, 1, 1])), ["n - 1", "2", "m - 1"]),
        (lambda s: ops.floor_divide(s, np.int64(2)), ["(n // 2)", "1", "(m // 2)"]),
        (lambda s: ops.truncdiv(s, np.int64(2)), ["(n // 2)", "1", "(m // 2)"]),
        (
            lambda s: ops.truncdiv(ops.subtract(s, np.int64(9)), np.int64(2)),
            ["-(max(0, -n + 9) // 2) + (max(0, n - 9) // 2)", "-3", "-(max(0, -m + 9) // 2) + (max(0, m - 9) // 2)"],
        ),
        (
            lambda s: ops.truncdiv(ops.subtract(s, np.int64(1)), np.int64(2)),
            ["(max(0, n - 1) // 2)", "1", "(max(0, m - 1) // 2)"],
        ),
        (lambda s: ops.cast(s, dtype="int32"), ["n", "3", "m"]),
        (lambda s: ops.equal(s, np.int64(-1)), ["False", "False", "False"]),
        (lambda s: ops.tile(s, (2,)), ["n", "3", "m", "n", "3", "m"]),
        (lambda s: ops.cumsum(s, axis=0), ["n", "n + 3", "m + n + 3"]),
        (lambda s: ops.scatter_nd(s, np.array([[1]]), np.array([9])), ["n", "9", "m"]),
        (lambda s: ops.greater_equal(s, np.int64(0)), ["True", "True", "True"]),
    ],
)
def test_symbolic_value(build: Callable[[Expr], Expr], expected: list[str]) -> None:
    assert known(lambda bb, x: bb.emit(build(bb.emit(ops.shape_of(x))))) == expected


def test_where_follows_a_decided_condition() -> None:
    """Expand's idiom: where(shape == -1, ones, shape)."""

    def build(bb: BlockBuilder, x: Var) -> Expr:
        shape = bb.emit(ops.shape_of(x))
        ones = bb.emit(ops.full((3,), np.int64(1)))
        return bb.emit(ops.where(bb.emit(ops.equal(shape, np.int64(-1))), ones, shape))

    assert known(build) == ["n", "3", "m"]


def test_arange_of_a_constant_count_is_followed() -> None:
    assert known(lambda bb, x: bb.emit(ops.arange(np.int64(2), np.int64(3), (3,)))) == ["2", "5", "8"]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: ops.equal(s, np.int64(4)),
        lambda s: ops.less(s, np.array([5, 5, 5])),
        lambda s: ops.truncdiv(ops.subtract(s, np.int64(9)), s),
        lambda s: ops.cast(s, dtype="bool"),
    ],
)
def test_what_only_run_time_knows_is_not_guessed(build: Callable[[Expr], Expr]) -> None:
    def emit(bb: BlockBuilder, x: Var) -> Expr:
        return bb.emit(build(bb.emit(ops.shape_of(x))))

    assert known(emit) is None


def test_an_index_that_is_a_symbol_has_no_symbolic_value() -> None:
    def build(bb: BlockBuilder, x: Var) -> Expr:
        shape = bb.emit(ops.shape_of(x))
        return bb.emit(ops.gather(np.arange(10), shape))

    assert known(build) is None


def test_tensor_to_shape_knows_its_length() -> None:
    assert ops.tensor_to_shape(tensor(3, dtype="int64")).ty == ShapeType(None, 3)
    assert ops.tensor_to_shape(Constant.of(np.array([2, 3]))).ty == ShapeType.of((2, 3))


# Type errors

ERRORS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: ops.exp(tensor(3, dtype="int64")),
        r"exp: x has dtype int64; it must be one of float16, bfloat16, float32, float64: cast",
    ),
    (
        lambda: ops.add(tensor(3), tensor(3, dtype="int64")),
        "add: operands have dtypes float32 and int64; cast one of them",
    ),
    (
        lambda: ops.reshape(tensor(b, 4), (b, 5)),
        r"reshape: cannot reshape \(b, 4\) \(b\*4 elements\) to \(b, 5\) \(b\*5\)",
    ),
    (lambda: ops.reshape(tensor(4), (-1,)), "reshape: the shape .* has a negative size; a -1 is resolved before"),
    (lambda: ops.sum(tensor(n, 4), axes=(2,)), "sum: axis 2 does not exist in a tensor of rank 2"),
    (lambda: ops.sum(tensor(n, 4), axes=(1, -1)), "sum: axes .* name the same axis twice"),
    (lambda: ops.transpose(tensor(n, 4), axes=(0, 0)), "transpose: axes .* are not a permutation of the 2 dimensions"),
    (
        lambda: ops.concat(tensor(n, 4), tensor(n, 5), axis=0),
        "concat: dimension 1 is 4 in one operand and 5 in another",
    ),
    (lambda: ops.squeeze(tensor(n, 4), axes=(1,)), r"squeeze: dimension 1 of \(n, 4\) has size 4, not 1"),
    (lambda: ops.broadcast_to(tensor(3), (n, 4)), r"broadcast_to: \(3,\) cannot be broadcast to \(n, 4\)"),
    (lambda: ops.slice(tensor(n, 4), (2,), (3,), axes=(1,)), "slice: axis 1 of .* begin 2, size 3 and step 1 leave it"),
    (lambda: ops.slice(tensor(4), (2,), (1,), steps=(0,)), "slice: axis 0: the step must not be 0"),
    (lambda: ops.gather(tensor(4), tensor(2)), "gather: indices has dtype float32"),
    (
        lambda: ops.gather_nd(tensor(4), tensor(2, n, dtype="int64")),
        "gather_nd: the last dimension of indices .* must be a constant",
    ),
    (lambda: ops.pad(tensor(4), (1,), (1, 2)), "pad: x has rank 1, but before and after have 1 and 2 values"),
    (lambda: ops.depth_to_space(tensor(1, 6, 2, 2), blocksize=2), "depth_to_space: the 6 channels"),
    (lambda: ops.top_k(tensor(4), (5,)), "top_k: k .* must be one value, at most the size 4 of axis 0"),
    (lambda: ops.non_zero(tensor()), "non_zero: x must have at least one dimension"),
    (lambda: ops.cast(tensor(3), dtype="float8"), "cast: unknown dtype 'float8'"),
]


@pytest.mark.parametrize(("build", "message"), ERRORS)
def test_type_errors_name_what_is_wrong(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeInferenceError, match=message):
        build()


def test_an_unknown_op_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="relaxlite has no op named 'frobnicate'"):
        _ = ops.frobnicate


# Run-time checks (tests/ir/ops/test_conformance.py runs those that fail)


def test_a_slice_inside_its_axis_is_not_checked() -> None:
    """The usual slices are proven: x[-1:], x[:min(k, n)], x[::-1]."""
    for begin, size, step in ((b - 1, 1, 1), (0, smin(3, b), 1), (b - 1, b, -1), (1, b - 1, 1)):
        program, _ = program_of(ops.slice(tensor(b, 4), (begin,), (size,), axes=(0,), steps=(step,)))
        assert type(program.body).__name__ == "For"


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "lstm_scan", "gru_scan", "rnn_scan", "unique"])
def test_types_without_a_meaning_are_refused_when_a_call_is_built(name: str) -> None:
    """Not by a pass, long after the place where the mistake was made."""
    op = ops.get_op(name)
    sample = next(iter(op.samples()))
    dtype = "bool" if name == "unique" else "int32"
    operands = [Var(f"x{k}", TensorType.of((3,) * len(shape), dtype)) for k, shape in enumerate(sample.shapes)]
    with pytest.raises(TypeInferenceError, match="dtype"):
        op(*operands, **sample.attrs)


@pytest.mark.parametrize("axes", [None, (1,), (0, 1)])
def test_the_reference_of_log_sum_exp_takes_what_has_no_exp(axes: tuple[int, ...] | None) -> None:
    x = np.float64([[-50731, -50732], [900, -np.inf]])
    last = np.log1p(np.exp(-1)) - 50731
    wanted = {None: 900.0, (0, 1): 900.0, (1,): [last, 900.0]}[axes]
    found = ops.get_op("log_sum_exp").reference(x, axes=axes, keepdims=False)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
