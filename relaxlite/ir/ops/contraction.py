"""Einstein summation: pairs of operands with a contracted index become matrix products, the rest one loop nest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import PROVER, Shape, broadcast_checks, broadcast_dim, broadcast_index
from relaxlite.ir.ops.linalg import accumulate, accumulator, emit_op, emit_reshape, to_accumulator_dtype
from relaxlite.ir.ops.scalars import Scalar
from relaxlite.ir.program import Buffer, Stmt, Value, compute, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, product, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

_ELLIPSIS_LABELS = "0123456789"  # labels of the dimensions of "...", the last one "9"


@dataclass(frozen=True, slots=True)
class _Equation:
    """Parsed equation: one label per dimension of each operand and of the result."""

    inputs: tuple[str, ...]
    output: str

    @property
    def summed(self) -> str:
        """Contracted labels, those missing in the result, in order of appearance."""
        return "".join(label for label in dict.fromkeys("".join(self.inputs)) if label not in self.output)

    def __str__(self) -> str:
        """Format text that parses to the same equation; the digits of ellipses become unused letters."""
        letters = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in "".join(self.inputs)]
        used = "".join(label for label in _ELLIPSIS_LABELS if label in "".join(self.inputs))
        text = f"{','.join(self.inputs)}->{self.output}"
        return text.translate(str.maketrans(used, "".join(letters[: len(used)])))


def _parse(op: Op, text: str, ranks: Sequence[int]) -> _Equation:
    """Parse an equation for operands of these ranks; fail the op if they do not fit."""
    left, arrow, output = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        op.fail(f"equation {text!r} has {len(terms)} terms for {len(ranks)} operands")
    inputs = []
    for k, (term, rank) in enumerate(zip(terms, ranks, strict=True)):
        letters = term.replace("...", "", 1)
        ellipsis_rank = rank - len(letters)
        if ellipsis_rank < 0 or (ellipsis_rank > 0 and "..." not in term) or (letters and not letters.isalpha()):
            op.fail(f"term {term!r} of equation {text!r} does not fit operand {k} of rank {rank}")
        inputs.append(
            term.replace("...", _ELLIPSIS_LABELS[len(_ELLIPSIS_LABELS) - ellipsis_rank :] if ellipsis_rank else "")
        )
    ellipsis = "".join(label for label in _ELLIPSIS_LABELS if label in "".join(inputs))
    if not arrow:
        labels = sorted(label for label in set("".join(inputs)) if "".join(inputs).count(label) == 1)
        return _Equation(tuple(inputs), ellipsis + "".join(label for label in labels if label not in ellipsis))
    output = output.replace("...", ellipsis)
    unknown = [label for label in output if label not in "".join(inputs)]
    if unknown or len(set(output)) != len(output):
        op.fail(f"the result of equation {text!r} must name labels of the operands, each once")
    return _Equation(tuple(inputs), output)


@register
class Einsum(Op):
    """Einstein summation in NumPy's notation, such as "bij,bjk->bik", including "..." and the implicit form.

    Dimensions of size 1 broadcast. A label that occurs twice in one term selects the diagonal.
    """

    name = "einsum"
    operands = ("*xs",)
    attrs: ClassVar[Mapping[str, Attr]] = {"equation": Attr("str")}

    def infer(self, *xs: Expr, equation: str) -> Type:
        types = [self.tensor(x, f"operand {k}") for k, x in enumerate(xs)]
        parsed = _parse(self, equation, [t.rank or 0 for t in types])
        if any(t.dtype != types[0].dtype or t.dtype == "bool" for t in types):
            self.fail(f"operands must have one numeric dtype, got {', '.join(t.dtype for t in types)}")
        sizes = self.sizes(parsed, [t.shape or () for t in types])
        return TensorType.of(tuple(sizes[label] for label in parsed.output), types[0].dtype)

    def sizes(self, equation: _Equation, shapes: Sequence[Shape]) -> dict[str, SymExpr]:
        """Infer the size of every label; fail if terms disagree."""
        exprs: dict[str, SymExpr] = {}
        for k, (labels, shape) in enumerate(zip(equation.inputs, shapes, strict=True)):
            for label, dim in zip(labels, shape, strict=True):
                size = broadcast_dim(exprs.get(label, sym(1)), dim)
                if size is None:
                    name = "..." if label in _ELLIPSIS_LABELS else label
                    self.fail(f"index {name!r} has size {exprs[label]} in one term and {dim} in operand {k}")
                exprs[label] = size
        return exprs

    def terms(self, equation: str, shapes: Sequence[Sequence[int]]) -> int:
        """Number of products summed per element of the result, for operands of these constant shapes."""
        parsed, sizes = _parse(self, equation, [len(shape) for shape in shapes]), dict[str, int]()
        for labels, shape in zip(parsed.inputs, shapes, strict=True):
            for label, size in zip(labels, shape, strict=True):
                sizes[label] = max(sizes.get(label, 1), size)
        return math.prod(sizes[label] for label in parsed.summed)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        xs = call.args
        shapes = [self.tensor(x).shape or () for x in xs]
        equation = _parse(self, str(call.attrs["equation"]), [len(s) for s in shapes])
        if len(xs) > 2:
            return self._first_two(bb, xs, equation)
        if len(xs) == 1:
            (labels,) = equation.inputs
            if sorted(labels) != sorted(equation.output):
                return None
            return get_op("transpose")(xs[0], axes=[labels.index(label) for label in equation.output])
        return self._as_matmul(bb, xs, equation, shapes)

    def _first_two(self, bb: BlockBuilder, xs: Sequence[Expr], equation: _Equation) -> Expr:
        """Contract the first two operands, then their result with the remaining ones."""
        used_later = "".join(equation.inputs[2:]) + equation.output
        labels = dict.fromkeys("".join(equation.inputs[:2]))
        pair = _Equation(equation.inputs[:2], "".join(label for label in labels if label in used_later))
        rest = _Equation((pair.output, *equation.inputs[2:]), equation.output)
        return self(emit_op(bb, "einsum", *xs[:2], equation=str(pair)), *xs[2:], equation=str(rest))

    def _as_matmul(
        self, bb: BlockBuilder, xs: Sequence[Expr], equation: _Equation, shapes: Sequence[Shape]
    ) -> Expr | None:
        """Rewrite to one matmul, (batch, left, contracted) @ (batch, contracted, right); None if impossible."""
        a, b = equation.inputs
        output = equation.output
        contracted = [label for label in a if label in b and label not in output]
        if not contracted or len(set(a)) != len(a) or len(set(b)) != len(b):
            return None
        if any(not PROVER.can_prove_equal(shapes[0][a.index(c)], shapes[1][b.index(c)]) for c in a if c in b):
            return None
        own_labels = [[c for c in term if c in other + output] for term, other in ((a, b), (b, a))]
        if len(own_labels[0]) != len(a) or len(own_labels[1]) != len(b):
            terms = tuple("".join(labels) for labels in own_labels)
            sums = [str(_Equation((term,), own)) for term, own in zip((a, b), terms, strict=True)]
            summed = [emit_op(bb, "einsum", x, equation=text) for x, text in zip(xs, sums, strict=True)]
            return self(*summed, equation=str(_Equation(terms, output)))
        sizes = self.sizes(equation, shapes)
        batch = [c for c in output if c in a and c in b]
        left, right = [c for c in output if c not in b], [c for c in output if c not in a]
        matrices = [
            _matrix(bb, xs[0], a, sizes, (batch, left, contracted)),
            _matrix(bb, xs[1], b, sizes, (batch, contracted, right)),
        ]
        order = batch + left + right
        result = emit_op(bb, "matmul", *matrices)
        result = emit_reshape(bb, result, [sizes[c] for c in order])
        return get_op("transpose")(result, axes=[order.index(c) for c in output])

    def lower(self, *xs: Buffer, out: Buffer, equation: str) -> Stmt:
        parsed = _parse(self, equation, [len(x.shape) for x in xs])
        sizes, wide = self.sizes(parsed, [x.shape for x in xs]), accumulator(out.dtype)
        checks: list[Stmt] = []
        for label in sizes:
            terms = zip(xs, parsed.inputs, strict=True)
            dims = [x.shape[k] for x, term in terms for k, c in enumerate(term) if c == label]
            checks += broadcast_checks(f"einsum, index {label!r}", *((d,) for d in dims))

        def value(*i: SymVar) -> Scalar:
            at = dict(zip(parsed.output + parsed.summed, i, strict=True))
            factors = []
            for x, term in zip(xs, parsed.inputs, strict=True):
                where = broadcast_index(x.shape, [at[c] for c in term], tuple(sizes[c] for c in term))
                factors.append(Scalar(x[where]).cast(wide))
            result = factors[0]
            for factor in factors[1:]:
                result = result * factor
            return result

        def element(*i: SymVar) -> Value:
            return value(*i).cast(out.dtype).value

        extents = [sizes[label] for label in parsed.summed]
        return seq(*checks, accumulate(out, extents, value) if extents else compute(out, element))

    def reference(self, *xs: Any, equation: str) -> Any:
        wide = [to_accumulator_dtype(x) for x in xs]
        return np.asarray(np.einsum(equation, *wide)).astype(xs[0].dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "m"),), {"equation": "ij->ji"})
        yield Sample((("n", 3, "n"),), {"equation": "iji->j"}, tolerance=1e-4)
        yield Sample((("n", "m"), ("n", "m")), {"equation": "ij,ij->ij"})
        yield Sample((("n", "m"), ("m", 3)), {"equation": "ij,jk"}, tolerance=1e-4)
        yield Sample((("b", "n", 2, 3), ("b", "m", 2, 3)), {"equation": "bnhd,bmhd->bhnm"}, tolerance=1e-4)
        yield Sample(((2, "n", "m"), (1, "m", 3)), {"equation": "...ij,...jk->...ik"}, tolerance=1e-4)
        yield Sample((("n", 2), (2, "m", 3), (3,)), {"equation": "ab,bcd,d->ac"}, tolerance=1e-4)
        yield Sample((("n", 4, 3), (3, "m")), {"equation": "iaj,jk->ki"}, tolerance=1e-4)
        yield Sample((("n",), ("n",)), {"equation": "i,i"}, ("float16", "float16"), tolerance=4e-3)


def _matrix(bb: BlockBuilder, x: Expr, labels: str, sizes: Mapping[str, SymExpr], groups: Sequence[list[str]]) -> Expr:
    """Transpose and reshape x to (batch..., rows, columns); no-ops are left out."""
    batch, rows, columns = groups
    order = [labels.index(c) for c in (*batch, *rows, *columns)]
    if order != list(range(len(order))):
        x = emit_op(bb, "transpose", x, axes=order)
    if len(rows) == len(columns) == 1:
        return x
    merged = [product(sizes[c] for c in group) for group in (rows, columns)]
    return bb.emit(get_op("reshape")(x, shape_value([*(sizes[c] for c in batch), *merged])))
