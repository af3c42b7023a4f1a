"""Operator registry: one declaration per op.

To add an op, write one class in one file of relaxlite/ir/ops/ (or in your own package) and call `register` on it:

    @register
    class Square(Op):
        '''x * x, element by element.'''
        name = "square"
        operands = ("x",)

        def infer(self, x):                                   # operand expressions -> result type
            return x.ty

        def lower(self, x, *, out):                           # buffers -> loops
            return compute(out, lambda *i: Binary("mul", x[i], x[i]))

        def reference(self, x):                               # NumPy arrays -> NumPy array
            return x * x

        def samples(self):                                    # operand types for the conformance tests
            yield Sample(("n", 3))

The builder function `ops.square(x)`, printing, parsing, validation, the documentation table and the conformance tests
(reference against compiled code, at several sizes of every symbol) all derive from the declaration.
An op composed of other ops overrides `decompose` instead of `lower`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from relaxlite.dtypes import DType
from relaxlite.errors import InvalidArgumentError, TypeInferenceError
from relaxlite.ir.expr import Attrs, AttrValue, Call, Constant, Expr, ShapeValue, Var, make_attrs
from relaxlite.ir.program import Stmt
from relaxlite.ir.symbolic import IntLike, SymExpr, syms
from relaxlite.ir.types import ShapeType, TensorType, Type
from relaxlite.records import dataclass

if TYPE_CHECKING:
    from relaxlite.ir.builder import BlockBuilder


class _Required:
    """Type of `REQUIRED`, the default of a mandatory attribute."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Attr:
    """Keyword-only attribute of an op: kind, default, and allowed values (`choices`; empty: any).

    Kinds: "int", "float", "str", "bool", "ints", "floats", "dtype", or "tuple" (of any values).
    A default of None makes the attribute optional.
    """

    kind: str
    default: AttrValue | _Required = REQUIRED
    choices: tuple[AttrValue, ...] = ()

    def check(self, op: str, name: str, value: Any) -> AttrValue:
        """Value in canonical form: lists become tuples, NumPy scalars Python numbers.

        Raises InvalidArgumentError for a value of another kind or not among the choices.
        """
        if value is None and self.default is None:
            return None
        try:
            canonical = _COERCE[self.kind](value)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{op}: attribute {name}={value!r} is not of kind {self.kind}") from error
        if self.choices and canonical not in self.choices:
            raise InvalidArgumentError(f"{op}: attribute {name}={canonical!r} is not one of {self.choices}")
        return canonical


def _as_int(value: Any) -> int:
    if int(value) != value:
        raise ValueError(value)
    return int(value)


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


_COERCE: dict[str, Callable[[Any], AttrValue]] = {
    "int": _as_int,
    "float": float,
    "bool": bool,
    "str": _as_text,
    "dtype": _as_text,
    "ints": lambda v: tuple(_as_int(x) for x in v),
    "floats": lambda v: tuple(float(x) for x in v),
    "tuple": lambda v: v,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Test case of an op for the conformance tests: operand shapes, dtypes, data, attributes.

    `shapes`: one tuple per operand, of ints or symbol names (for a shape operand: its values).
    `dtypes`: one per operand, "float32" by default; "shape" marks a shape operand.
    `make`: operand index -> generator of its data, (shape, rng) -> array.
    `tolerance`: absolute and relative, against the reference.
    """

    shapes: tuple[tuple[int | str, ...], ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    dtypes: tuple[DType, ...] = ()
    make: Mapping[int, Callable[[tuple[int, ...], np.random.Generator], Any]] = field(default_factory=dict)
    tolerance: float = 1e-5


class Op:
    """Operator. Subclasses are singletons created by `register`; calling an op builds a typed `Call`."""

    name: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]  # "*xs": variadic, last; "x?": optional, trailing
    attrs: ClassVar[Mapping[str, Attr]] = {}
    is_symbolic: ClassVar[bool] = False  # `reference` also works on object arrays of SymExpr (shape computations)
    is_pure: ClassVar[bool] = True
    reads_apart: ClassVar[bool] = False  # with a result in place of an operand, no element is read after its store

    # Declared by each op. Operands are positional, attributes are keywords.

    def infer(self, *operands: Any, **attrs: Any) -> Type:
        """Infer the result type from operand expressions; a TupleType for several results. Raises through `fail`."""
        raise TypeError(f"op {self.name} declares no type rule")

    def lower(self, *operands: Any, **out_and_attrs: Any) -> Stmt:
        """Lower to loops that fill `out`, one or several buffers. Operands: buffers, or shapes as SymExpr tuples."""
        raise TypeError(f"op {self.name} has no loops of its own")

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        """Decompose a call into other ops; None keeps the op."""
        return None

    def reference(self, *operands: Any, **attrs: Any) -> Any:
        """Compute the result with NumPy: an array or tuple of arrays. Shape operands are tuples of int."""
        raise TypeError(f"op {self.name} has no NumPy reference")

    def evaluate_symbolic(self, *operands: Any, **attrs: Any) -> Any:
        """Evaluate on object arrays of SymExpr, as `reference` does on numbers; None without a symbolic value."""
        return self.reference(*operands, **attrs) if self.is_symbolic else None

    def samples(self) -> Iterable[Sample]:
        """Test cases for the conformance tests; an op without samples is tested elsewhere."""
        return ()

    # Derived from the declaration.

    @property
    def has_lowering(self) -> bool:
        """Whether the op overrides `lower`."""
        return type(self).lower is not Op.lower

    def __call__(self, *operands: Any, loc: str | None = None, **attrs: Any) -> Call:
        """Build a typed call. Numbers and arrays become constants, tuples of ints shape values.

        Raises InvalidArgumentError for wrong operand counts or attributes, TypeInferenceError for wrong types.
        """
        args = tuple(as_expr(x) for x in operands if x is not None)
        self.check_count(len(args))
        checked = self.check_attrs(attrs)
        return Call(self, args, checked, (), self.infer(*args, **checked), loc)

    def check_attrs(self, attrs: Mapping[str, Any]) -> Attrs:
        """Canonical attributes with defaults. Raises InvalidArgumentError for unknown, missing or wrong attributes."""
        for name in attrs:
            if name not in self.attrs:
                raise InvalidArgumentError(f"{self.name}: unknown attribute {name!r}; it takes {sorted(self.attrs)}")
        values: dict[str, AttrValue] = {}
        for name, attr in self.attrs.items():
            value = attrs.get(name, attr.default)
            if isinstance(value, _Required):
                raise InvalidArgumentError(f"{self.name}: attribute {name!r} ({attr.kind}) is missing")
            values[name] = attr.check(self.name, name, value)
        return make_attrs(values)

    def check_count(self, count: int) -> None:
        """Raise InvalidArgumentError unless the op takes this number of operands."""
        minimum = sum(1 for o in self.operands if o[0] != "*" and o[-1] != "?")
        maximum = None if any(o[0] == "*" for o in self.operands) else len(self.operands)
        if count < minimum or (maximum is not None and count > maximum):
            raise InvalidArgumentError(f"{self.name}: takes operands ({', '.join(self.operands)}), got {count}")

    def fail(self, message: str) -> NoReturn:
        """Raise TypeInferenceError with the name of the op."""
        raise TypeInferenceError(f"{self.name}: {message}")

    def tensor(self, operand: Expr, name: str = "operand") -> TensorType:
        """Type of a tensor operand of known shape. Raises TypeInferenceError for any other operand."""
        ty = operand.ty
        if not isinstance(ty, TensorType):
            self.fail(f"{name} must be a tensor, got {ty}")
        if ty.shape is None:
            self.fail(f"the shape of {name} is unknown; bind it with match_shape first")
        return ty

    def shape(self, operand: Expr, name: str = "shape") -> tuple[SymExpr, ...]:
        """Symbolic values of a shape operand. Raises TypeInferenceError for any other operand or unknown values."""
        ty = operand.ty
        if not isinstance(ty, ShapeType):
            self.fail(f"{name} must be a shape, got {ty}")
        if ty.values is None:
            self.fail(f"the values of {name} are unknown; bind them with match_shape first")
        return ty.values

    def __repr__(self) -> str:
        return f"<op {self.name}>"


OpClass = TypeVar("OpClass", bound=type[Op])
_registry: dict[str, Op] = {}


def register(cls: OpClass) -> OpClass:
    """Class decorator: register an instance of the op under its name. The docstring is the op's documentation."""
    register_op(cls())
    return cls


def register_op(op: Op) -> Op:
    """Register an op. Raises InvalidArgumentError for a missing docstring or a name that is taken."""
    if not op.__doc__ and sys.flags.optimize < 2:  # python -OO strips docstrings
        raise InvalidArgumentError(f"op {op.name} needs a docstring")
    if op.name in _registry:
        raise InvalidArgumentError(f"op {op.name} is registered twice")
    _registry[op.name] = op
    return op


def get_op(name: str) -> Op:
    """Registered op of this name. Raises KeyError for an unknown name."""
    return _registry[name]


def all_ops() -> Iterator[Op]:
    """All registered ops, sorted by name."""
    return iter([_registry[name] for name in sorted(_registry)])


_LISTS, _NUMBERS, _LEAVES = tuple | list, int | float | np.ndarray | np.generic, Var | Constant | ShapeValue


def as_expr(value: Any) -> Expr:
    """Convert an operand: numbers and arrays to constants, tuples of (symbolic) integers to shape values."""
    if isinstance(value, _LISTS):
        return ShapeValue(syms(value))
    if isinstance(value, _NUMBERS) and not isinstance(value, SymExpr):
        return Constant.of(value)
    return value  # type: ignore[no-any-return]


def is_leaf(expr: object) -> bool:
    """Whether an expression is a variable, constant or shape value."""
    return isinstance(expr, _LEAVES)


def shape_value(values: Iterable[IntLike]) -> ShapeValue:
    """Shape operand of integers, symbolic or not."""
    return ShapeValue(syms(values))
