"""Signatures of compiled functions: names, dtypes and symbolic shapes of what callers pass and get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from relaxlite import forms
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.attributes import (
    CALL_STRUCTURE,
    INPUT_FORMS,
    INPUT_NAMES,
    OUTPUT_FORMS,
    OUTPUT_NAMES,
    STATE,
    STRINGS,
)
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Function
from relaxlite.ir.symbolic import Division, SymExpr, SymVar, to_text
from relaxlite.ir.types import TensorType, Type, type_symbols
from relaxlite.passes.memory.donate import donated_params
from relaxlite.runtime.executable import Signature, TensorSpec


def signature_of(function: Function) -> Signature:
    """Names, dtypes and symbolic shapes of a function's parameters and results.

    Different symbols of one name get suffixes.
    """
    input_names = function.attrs.get(INPUT_NAMES) or tuple(p.name for p in function.params)
    result_type = function.body.result.ty
    types = result_types(result_type)
    output_names = function.attrs.get(OUTPUT_NAMES) or tuple(f"output_{k}" for k in range(len(types)))
    assert isinstance(input_names, tuple) and isinstance(output_names, tuple)
    donated = donated_params(function)  # the last results are stored in the caller's arrays
    types, output_names = types[: len(types) - len(donated)], output_names[: len(types) - len(donated)]
    symbol_names = unique_names(s for ty in (*(p.ty for p in function.params), *types) for s in type_symbols(ty))
    inputs = tuple(_spec(str(name), p.ty, symbol_names) for name, p in zip(input_names, function.params, strict=True))
    outputs = tuple(_spec(str(name), ty, symbol_names) for name, ty in zip(output_names, types, strict=True))
    input_forms, output_forms = _forms(function, INPUT_FORMS), _forms(function, OUTPUT_FORMS)
    if input_forms or output_forms:
        inputs, outputs = _with_elements(inputs, input_forms), _with_elements(outputs, output_forms)
    donated_names = tuple(str(input_names[function.params.index(param)]) for param in donated)
    structure, state = function.attrs.get(CALL_STRUCTURE, ""), function.attrs.get(STATE, ())
    assert isinstance(structure, str) and isinstance(state, tuple)
    strings = function.attrs.get(STRINGS, ())
    assert isinstance(strings, tuple)
    return Signature(
        inputs,
        outputs,
        donated_names,
        structure,
        tuple(map(str, state)),
        input_forms,
        output_forms,
        tuple(map(str, strings)),
    )


def _forms(function: Function, attribute: str) -> tuple[tuple[str, str], ...]:
    pairs = function.attrs.get(attribute, ())
    assert isinstance(pairs, tuple)
    return tuple((str(name), str(form)) for name, form in pairs)  # type: ignore[misc, str-unpack]


def _with_elements(specs: tuple[TensorSpec, ...], value_forms: tuple[tuple[str, str], ...]) -> tuple[TensorSpec, ...]:
    """Specs with the element types that the forms of the values give them."""
    elements = [element for _, form in value_forms for element in forms.part_elements(form)]
    return tuple(replace(spec, element=element) for spec, element in zip(specs, elements, strict=True))


def unique_names(symbols: Iterable[SymVar]) -> dict[SymVar, str]:
    """Unique names of symbols."""
    names: dict[SymVar, str] = {}
    for symbol in symbols:
        if symbol not in names:
            name, count = symbol.name, 1
            while name in names.values():
                name, count = f"{symbol.name}_{count}", count + 1
            names[symbol] = name
    return names


def _spec(name: str, ty: Type, names: dict[SymVar, str]) -> TensorSpec:
    if not isinstance(ty, TensorType):
        raise InvalidArgumentError(f"'{name}' is no tensor but {ty}; a compiled model takes and gives tensors")
    dims = ty.shape if ty.shape is not None else ("?",) * (ty.rank or 0)
    shape = tuple(d if isinstance(d, str) else int(d) if d.is_const else _dim_text(d, names) for d in dims)
    bounds = {names[s]: (s.lower, s.upper, s.divisor) for s in type_symbols(ty)}
    return TensorSpec(name, ty.dtype, shape, bounds)


def _dim_text(dim: SymExpr, names: dict[SymVar, str]) -> str:
    text = to_text(dim, names.__getitem__)
    return text[1:-1] if isinstance(dim, Division) else text  # without the parentheses of an atom
