"""Values of symbols, and random inputs of the sizes that they give."""

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
MORE_STYLES = ("aligned", "larger aligned", "long")  # for networks that halve pictures and add halves, or take sound
MAX_ELEMENTS = 1 << 22  # of one input: what symbols of no bound multiply to stays below
_ALIGNED, _LONG = 32, 2048
_ODD = (3, 7, 5, 9, 11)
_LARGER = (17, 19, 33, 16, 21)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of a function, and the sizes that they have."""

    symbols: Symbols
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(f"{s.name}={value}" for s, value in self.symbols.items()) or "no symbols"


def symbol_values(function: Function, rng: random.Random, styles: Sequence[str] = STYLES) -> Iterator[Symbols]:
    """One assignment for each style that keeps bounds, divisors, and every dimension of every parameter >= 0."""
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
    wanted = {
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
    return nearest_value(symbol, wanted)


def nearest_value(symbol: SymVar, wanted: int) -> int:
    """The value next to `wanted`, rather above it, that the symbol may have."""
    step = symbol.divisor
    least = max(symbol.lower if symbol.lower is not None else 0, 0)
    value = -(-max(wanted, least) // step) * step
    return value if symbol.upper is None else min(value, symbol.upper // step * step)


def _fits(ty: Type, values: Symbols) -> bool:
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
    """Random arguments: normal numbers, integers of magnitude below `integers` (none negative when it is below 3)."""
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
    drawn: Any
    if dtype == "bool":
        drawn = rng.random(shape) < 0.5
    elif dtypes.is_integer(dtype):
        drawn = rng.integers(1 - integers if dtypes.is_signed(dtype) and integers > 2 else 0, integers, shape)
    else:
        drawn = rng.standard_normal(shape)
    return np.asarray(drawn).astype(dtypes.to_numpy(dtype))
