"""The border of an imported model: inputs and outputs that are sequences, optionals, text or of narrow types."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import onnx

from relaxlite.errors import ImportModelError
from relaxlite.forms import Form, inner, maps_form, part_names
from relaxlite.frontend.onnx.narrow_types import NarrowType
from relaxlite.frontend.onnx.sequences import (
    AbsentOptional,
    MapSequence,
    RaggedSequence,
    RuntimeOptional,
    empty_sequence,
    leaves,
    to_ragged,
)
from relaxlite.frontend.onnx.symbols import SymbolTable
from relaxlite.frontend.onnx.tensors import element_type, narrow_type, tensor_type_of
from relaxlite.ir import ops
from relaxlite.ir.attributes import INPUT_FORMS, INPUT_NAMES, OUTPUT_FORMS, OUTPUT_NAMES
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import AttrValue, Constant, Expr, Tuple, Var
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

Narrow = MutableMapping[Expr, NarrowType]


@dataclass(frozen=True, slots=True)
class BorderValue:
    """An input or output: its name, its form, the tensors that it stands in and the value that nodes see."""

    name: str
    form: Form
    parts: tuple[Expr, ...]
    value: Expr


def declared_form(ty: onnx.TypeProto) -> Form:
    """Return the form of a declared type."""
    kind = ty.WhichOneof("value")
    if kind == "sequence_type":
        return f"sequence({declared_form(ty.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({declared_form(ty.optional_type.elem_type)})"
    narrow = narrow_type(ty.tensor_type.elem_type)
    return narrow.numpy if narrow is not None else ""


# Inputs


def input_value(
    info: onnx.ValueInfoProto, ty: TensorType, bb: BlockBuilder, table: SymbolTable, narrow: Narrow
) -> BorderValue:
    """Return the parameters of an input, and the value that they are; `ty`: of its tensor, or of its elements."""
    form = declared_form(info.type)
    names, types = part_names(info.name, form), _part_types(info.name, form, ty, table)
    params = tuple(Var(bb.unique_name(name), part) for name, part in zip(names, types, strict=True))
    value = _value_of(form, params)
    mark = narrow_type(tensor_type_of(info).elem_type)
    if mark is not None:
        narrow[value] = mark
    if isinstance(value, RuntimeOptional) and mark is not None:
        narrow[value.value] = mark
    return BorderValue(info.name, form, params, value)


def _part_types(name: str, form: Form, ty: TensorType, table: SymbolTable) -> list[TensorType]:
    kind, held = inner(form)
    if kind == "tensor":
        return [ty]
    if kind == "optional":
        return [TensorType.of((), "bool"), *_part_types(name, held, ty, table)]
    if inner(held)[0] != "tensor":
        raise ImportModelError(f"input '{name}' is a sequence of {inner(held)[0]}s; sequences hold tensors only")
    total, length = table.fresh(f"{name}_total"), table.fresh(f"{name}_length")
    return [TensorType.of((total,), ty.dtype), TensorType.of((length, ty.rank or 0), "int64")]


def _value_of(form: Form, parts: tuple[Expr, ...]) -> Expr:
    kind, held = inner(form)
    if kind == "optional":
        return RuntimeOptional((parts[0], _value_of(held, parts[1:])))
    return RaggedSequence(parts) if kind == "sequence" else parts[0]


# Outputs


def output_value(info: onnx.ValueInfoProto, value: Expr, bb: BlockBuilder, narrow: Narrow) -> BorderValue:
    """Return the tensors that an output stands in: those of its declared kind, or else of its value's."""
    mark = narrow.get(value) or next((narrow[x] for x in _fields(value) if x in narrow), None)
    element = mark.numpy if mark is not None else ""
    kind = info.type.WhichOneof("value")
    if kind == "optional_type":
        held = info.type.optional_type.elem_type
        value = as_optional(bb, value, held)
    elif isinstance(value, Tuple) and not isinstance(value, RuntimeOptional | AbsentOptional | MapSequence):
        value = to_ragged(bb, value, declared_element(info.type))
    elif isinstance(value, AbsentOptional):
        raise ImportModelError(f"output '{info.name}' is an optional that is absent, but not declared as optional")
    form = _form_of(value, element)
    return BorderValue(info.name, form, tuple(leaves(value)), value)


def _fields(value: Expr) -> Sequence[Expr]:
    return [field for x in value.fields for field in (x, *_fields(x))] if isinstance(value, Tuple) else ()


def _form_of(value: Expr, element: str) -> Form:
    if isinstance(value, RuntimeOptional):
        return f"optional({_form_of(value.value, element)})"
    if isinstance(value, MapSequence):
        return maps_form(value.labels)
    return f"sequence({element})" if isinstance(value, Tuple) else element


def declared_element(ty: onnx.TypeProto) -> tuple[str, int]:
    """Return dtype and rank of the elements of a declared sequence."""
    tensor = ty.sequence_type.elem_type.tensor_type if ty.HasField("sequence_type") else ty.tensor_type
    dtype = element_type(tensor.elem_type, "an output") if tensor.elem_type else "float32"
    return dtype, len(tensor.shape.dim)


def as_optional(bb: BlockBuilder, value: Expr, held: onnx.TypeProto) -> RuntimeOptional:
    """Return an optional, or a value that is known to be present, as a flag and a value of the declared type."""
    if isinstance(value, RuntimeOptional):
        return value
    is_sequence = held.HasField("sequence_type")
    if not isinstance(value, AbsentOptional):
        present = to_ragged(bb, value, declared_element(held)) if is_sequence else value
        return RuntimeOptional((Constant.of(True, "bool"), present))
    dtype, rank = declared_element(held)
    if is_sequence:
        return RuntimeOptional((Constant.of(False, "bool"), empty_sequence(dtype, rank)))
    dims = [d.dim_value if d.HasField("dim_value") else 0 for d in held.tensor_type.shape.dim]
    zeros = bb.emit(ops.full(tuple(dims), Constant.of(0, dtype)))
    return RuntimeOptional((Constant.of(False, "bool"), zeros))


# Signature


def signature(inputs: Sequence[BorderValue], outputs: Sequence[BorderValue]) -> Mapping[str, AttrValue]:
    """Return the attributes of the entry function: names, and forms where a value is no plain tensor."""
    values: dict[str, AttrValue] = {
        INPUT_NAMES: tuple(name for v in inputs for name in part_names(v.name, v.form)),
        OUTPUT_NAMES: tuple(name for v in outputs for name in part_names(v.name, v.form)),
    }
    if any(v.form for v in (*inputs, *outputs)):
        values[INPUT_FORMS] = tuple((v.name, v.form) for v in inputs)
        values[OUTPUT_FORMS] = tuple((v.name, v.form) for v in outputs)
    return values
