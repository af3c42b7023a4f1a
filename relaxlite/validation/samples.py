"""Sampled sizes for symbols, and random inputs of these sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.expr import Function
from relaxlite.ir.symbolic import SymVar, evaluate
from relaxlite.ir.types import ShapeType, TensorType, TupleType, Type, defined_symbols, type_symbols
from relaxlite.records import dataclass

Symbols = dict[SymVar, int]

STYLES = ("least", "one", "odd", "larger", "same", "mixed")
EXTRA_STYLES = ("aligned", "larger aligned", "long")  # for networks that downsample images, or process audio
MAX_ELEMENTS = 1 << 22  # of one input; limits unbounded symbols
_ALIGNED, _LONG = 32, 2048
_ODD = (3, 7, 5, 9, 11)
_LARGER = (17, 19, 33, 16, 21)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of a function, and the sizes of their symbols."""

    symbols: Symbols
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(f"{s.name}={value}" for s, value in self.symbols.items()) or "no symbols"


def symbol_values(function: Function, rng: random.Random, styles: Sequence[str] = STYLES) -> Iterator[Symbols]:
    """One assignment per style, legal for bounds and divisors, with every dimension of every parameter >= 0."""
    symbols = [s for p in function.params for s in defined_symbols(p.ty)]
    seen: list[Symbols] = []
    for style in styles:
        for _ in range(8):  # compound dimensions such as n - m forbid some assignments
            values = {s: _value(s, style, k, rng) for k, s in enumerate(dict.fromkeys(symbols))}
            if all(_fits(p.ty, values) for p in function.params):
                break
            style = "mixed"
        else:
            continue
        if values not in seen:
            seen.append(values)
            yield values


def _value(symbol: SymVar, style: str, position: int, rng: random.Random) -> int:
    target = {
        "least": 0,
        "one": 1,
        "odd": _ODD[position % len(_ODD)],
        "same": 4,
        "larger": _LARGER[position % len(_LARGER)],
        "aligned": _ALIGNED,
        "larger aligned": _ALIGNED * (1 + position % 3),
        "long": _LONG if position else 1,
        "mixed": rng.choice((0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 17)),
    }[style]
    return nearest_value(symbol, target)


def nearest_value(symbol: SymVar, wanted: int) -> int:
    """The legal value of a symbol that is nearest to `wanted`, preferably above it."""
    divisor = symbol.divisor
    lower = max(symbol.lower if symbol.lower is not None else 0, 0)
    value = -(-max(wanted, lower) // divisor) * divisor
    return value if symbol.upper is None else min(value, symbol.upper // divisor * divisor)


def _fits(ty: Type, values: Symbols) -> bool:
    """Whether all dimensions are defined and not negative, and the inputs are of moderate size."""
    if any(s not in values for s in type_symbols(ty)):
        raise InvalidArgumentError(f"no parameter of the function binds the symbols of {ty}")
    if isinstance(ty, TupleType):
        return all(_fits(field, values) for field in ty.fields)
    try:
        dims = [evaluate(d, values) for d in (ty.shape or () if isinstance(ty, TensorType) else ())]
    except ZeroDivisionError:
        return False
    return all(d >= 0 for d in dims) and int(np.prod(dims, dtype=object)) <= MAX_ELEMENTS


def draw_sample(function: Function, values: Symbols, rng: np.random.Generator, integers: int = 10) -> Sample:
    """Draw random arguments: normal numbers, and integers below `integers` in magnitude.

    Integers are not negative if `integers` is below 3.
    """
    return Sample(values, tuple(_draw(p.ty, values, rng, integers) for p in function.params))


def _draw(ty: Type, values: Symbols, rng: np.random.Generator, integers: int) -> Any:
    if isinstance(ty, TupleType):
        return tuple(_draw(field, values, rng, integers) for field in ty.fields)
    if isinstance(ty, ShapeType) and ty.values is not None:
        return tuple(evaluate(v, values) for v in ty.values)
    if not isinstance(ty, TensorType) or ty.shape is None:
        raise InvalidArgumentError(f"there are no random values of type {ty}; give example inputs")
    return draw_array(tuple(evaluate(d, values) for d in ty.shape), ty.dtype, rng, integers)


def draw_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator, integers: int = 10) -> Any:
    """Draw a random array as `draw_sample` does."""
    array: Any
    if dtype == "bool":
        array = rng.random(shape) < 0.5
    elif dtypes.is_integer(dtype):
        array = rng.integers(1 - integers if dtypes.is_signed(dtype) and integers > 2 else 0, integers, shape)
    else:
        array = rng.standard_normal(shape)
    return np.asarray(array).astype(dtypes.to_numpy(dtype))
