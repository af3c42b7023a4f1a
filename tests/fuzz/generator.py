"""A module under construction: the values that its steps may use, its symbols, and the functions beside "main"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError, TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder, result_types
from relaxlite.ir.expr import Block, Body, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, evaluate, product, sym
from relaxlite.ir.types import TensorType, defined_symbols
from relaxlite.ir.visitor import body_uses
from relaxlite.validation.samples import draw_array
from tests.support.choices import Rolled

DTYPES = ("float32",) * 10 + (
    "float64", "float16", "bfloat16", "int64", "int64", "int32", "int8", "uint8", "int16", "uint32", "bool",
)  # fmt: skip
MAX_ELEMENTS = {7: 3000, 20: 40_000}  # of one tensor, where every symbol is this
MAX_STEPS = {7: 30_000, 20: 400_000}  # of a program's innermost loop, likewise: a microsecond each for the interpreter
MAX_RANK = 5

Step = Callable[["Generator"], "Expr | None"]
STEPS: list[tuple[int, Step]] = []


def step(weight: int) -> Callable[[Step], Step]:
    """Decorator: one kind of thing that a module may contain, and how often. A step gives an expression that others may
    use, or None where it does not apply."""

    def add(function: Step) -> Step:
        STEPS.append((weight, function))
        return function

    return add


class Generator:
    """Builds one module."""

    def __init__(self, seed: int) -> None:
        self.roll = Rolled(random.Random(seed))
        self.numbers = np.random.default_rng(seed)
        self.bb = BlockBuilder()
        self.functions: dict[str, Function] = {}
        self.params: list[Var] = []
        self.pool: list[Expr] = []
        self.symbols: list[SymVar] = [self._symbol(name) for name in "nmk"[: self.roll.whole(1, 3)]]
        self.main_symbols = list(self.symbols)  # which a parameter's shape may mention
        self.most: dict[SymVar, SymExpr] = {}  # what stands for other sizes is at most this
        self.is_main = True
        self.depth = 0  # of bodies

    # what there is

    def _symbol(self, name: str) -> SymVar:
        facts: dict[str, Any] = {}
        if self.roll.chance(25):
            facts["lower"] = self.roll.pick((1, 1, 2, 4))
        if self.roll.chance(25):
            facts["upper"] = self.roll.pick((8, 12, 64, 1024))
        if self.roll.chance(15):
            facts["divisor"] = self.roll.pick((2, 4, 8))
        return self.bb.symbol(name, **facts)

    def dim(self) -> SymExpr:
        """A dimension: mostly a symbol, sometimes a constant or an expression."""
        kind = self.roll.whole(0, 9)
        if kind <= 4 and self.symbols:
            return self.roll.pick(self.symbols)
        if kind <= 7 or not self.symbols:
            return sym(self.roll.pick((1, 1, 2, 3, 4, 5, 8, 16, 17)))
        return self.compound()

    def compound(self) -> SymExpr:
        n, m = self.roll.pick(self.symbols), self.roll.pick(self.symbols)
        return self.roll.pick((n + m, n * 2, n // 2, n + 1, n * 3 + 2, n * m, (n + 1) // 2, n * 4))

    def fits(self, ty: TensorType) -> bool:
        """Whether a tensor is small enough to be computed in no time."""
        if ty.shape is None or len(ty.shape) > MAX_RANK:
            return False
        total = product(ty.shape)
        try:
            return all(self.largest(total, n) <= most for n, most in MAX_ELEMENTS.items())
        except ZeroDivisionError:
            return False

    def largest(self, size: SymExpr, n: int) -> int:
        """A size where every symbol of a parameter's shape is n, and others are the most that they can be."""
        return evaluate(size, {s: self.largest(self.most[s], n) if s in self.most else n for s in size.free_vars()})

    def values(self, accept: Callable[[TensorType], bool] = lambda ty: True) -> list[Expr]:
        return [x for x in self.pool if accept(type_of(x))]

    def value(self, accept: Callable[[TensorType], bool] = lambda ty: True) -> Expr | None:
        """A value of the pool; a recent one more often, so that chains come about."""
        found = self.values(accept)
        if not found:
            return None
        return found[-1 - min(self.roll.whole(0, len(found) - 1), self.roll.whole(0, len(found) - 1))]

    def floating(self, rank: int | None = None) -> Expr | None:
        return self.value(lambda ty: dtypes.is_float(ty.dtype) and rank in (None, ty.rank))

    # making operands

    def type(self, shape: Sequence[SymExpr | int], dtype: str) -> TensorType:
        return TensorType.of(tuple(shape), dtype)

    def like(self, ty: TensorType, *, is_new: bool = False) -> Expr | None:
        """A value of this type: one that exists, a parameter, a constant, or a scalar that is broadcast."""
        same = [] if is_new and self.roll.chance(70) else self.values(lambda other: other == ty)
        if same:
            return self.roll.pick(same)
        if not self.fits(ty):
            return None
        if all(as_int(d) is not None for d in ty.shape or ()) and self.roll.chance(50):
            return self.constant(ty)
        if self.is_main and self.can_be_param(ty):
            return self.param(ty)
        scalar = self.constant(self.type((), ty.dtype))
        return self.emit("broadcast_to", scalar, ty.shape)

    def can_be_param(self, ty: TensorType) -> bool:
        return all(v in self.main_symbols for d in ty.shape or () for v in d.free_vars())

    def param(self, ty: TensorType) -> Var:
        var = Var(self.bb.unique_name(f"x{len(self.params)}"), ty)
        self.params.append(var)
        return var

    def constant(self, ty: TensorType) -> Constant:
        shape = tuple(as_int(d) or 0 for d in ty.shape or ())
        array = draw_array(shape, ty.dtype, self.numbers)
        if self.roll.chance(10):
            array = np.full(shape, self.roll.pick((0, 1)), array.dtype)
        return Constant.of(np.ascontiguousarray(array).reshape(shape), ty.dtype)

    def emit(self, op: str, *operands: Any, **attrs: Any) -> Expr:
        return self.bb.emit(ops.get_op(op)(*operands, **attrs))

    # bodies

    def grow(self, count: int) -> None:
        weights = [weight for weight, _ in STEPS]
        steps = [function for _, function in STEPS]
        for function in self.roll.rng.choices(steps, weights, k=count):
            self.add(function)

    def add(self, function: Step) -> None:
        """One step. What the type rules refuse, or is too large, is left out."""
        scope = self.bb._scope
        before = list(scope.blocks), list(scope.open), list(self.pool), list(self.symbols)
        try:
            made = function(self)
            if made is not None:
                leaf = self.bb.leaf(made)
                if isinstance(leaf.ty, TensorType) and leaf.ty.shape is not None:
                    self.pool.append(leaf)
        except (TypeInferenceError, InvalidArgumentError):
            made = None
        added = [b for block in scope.blocks[len(before[0]) :] for b in block.bindings] + scope.open
        types = [t for b in added for t in result_types(b.var.ty) if isinstance(t, TensorType) and t.shape is not None]
        if made is None or not all(map(self.fits, types)):
            scope.blocks, scope.open, self.pool, self.symbols = before

    @contextmanager
    def nested(self) -> Iterator[Any]:
        """A body inside: what it defines ends with it."""
        pool, symbols = list(self.pool), list(self.symbols)
        self.depth += 1
        with self.bb.body() as scope:
            yield scope
        params = [p for p in self.pool if p in self.params and p not in pool]
        self.pool, self.symbols, self.depth = [*pool, *params], symbols, self.depth - 1

    def finish(self, scope: Any) -> Body:
        return self.bb.finish(scope)

    # the whole

    def module(self, size: int) -> IRModule:
        with self.bb.body() as scope:
            for _ in range(self.roll.whole(1, 3)):
                ty = self.type([self.dim() for _ in range(self.roll.whole(0, 3))], self.roll.pick(DTYPES))
                if self.fits(ty):
                    self.pool.append(self.param(ty))
            if self.roll.chance(60):
                self.pool.append(self.param(self.type((self.symbols[0], self.dim()), "float32")))
            self.grow(size)
            self.bb.result(self._result(scope))
        body = self.bb.finish(scope)
        self._bind_symbols(body)
        main = Function(tuple(self.params), body)
        return IRModule({**self.bb.module(), **self.functions, "main": main})

    def _result(self, scope: Any) -> Expr:
        """One tensor or several: what nothing uses, recent ones, parameters, one value twice, a constant."""
        if not self.pool:
            self.pool.append(self.param(self.type((self.symbols[0],), "float32")))
        fields = [self.pool[-1]]
        if self.roll.chance(70):
            done = Body((*scope.blocks, Block(tuple(scope.open))), fields[0])
            used = set(body_uses(done))
            ends = [x for x in self.pool if x not in used and x not in self.params]
            fields.extend(self.roll.order(ends)[: self.roll.whole(1, 4)])
        for _ in range(self.roll.pick((0, 0, 1, 1, 2, 3))):
            value = self.value()
            assert value is not None
            fields.append(self.roll.pick((value, value, value, fields[0])))
        if self.params and self.roll.chance(10):
            fields.append(self.roll.pick(self.params))
        if self.roll.chance(3):
            fields.append(self.constant(self.type((2,), "float32")))
        return fields[0] if len(fields) == 1 else Tuple(tuple(fields))

    def _bind_symbols(self, body: Body) -> None:
        """A parameter whose shape binds the symbols that no other does."""
        bound = {s for p in self.params for s in defined_symbols(p.ty)}
        missing = [s for s in self.main_symbols if s not in bound]
        if missing:
            self.param(self.type(missing, "bool"))


def type_of(x: Expr) -> TensorType:
    assert isinstance(x.ty, TensorType)
    return x.ty


def shape_of(x: Expr) -> tuple[SymExpr, ...]:
    return type_of(x).shape or ()


def rank_of(x: Expr) -> int:
    return len(shape_of(x))


def random_module(seed: int, size: int | None = None) -> IRModule:
    """The module of a seed: `size` steps, or as many as the seed says."""
    generator = Generator(seed)
    return generator.module(size if size is not None else generator.roll.pick((1, 2, 3, 4, 5, 6, 8, 10, 14)))
