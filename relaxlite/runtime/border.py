"""A model's border: arguments and results of all forms (forms.py) from and to the tensors that kernels know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from relaxlite import dtypes, strings
from relaxlite.errors import InputError
from relaxlite.forms import STRING, Form, element_of, inner, maps_labels, num_tensors
from relaxlite.runtime.executable import Signature, TensorSpec

_BY_VALUE = ("int4", "uint4", "int2", "uint2")  # the others are stored by their bits


class Border:
    """Conversion of a model's arguments to its tensors, and of its tensors to results. Immutable."""

    def __init__(self, signature: Signature) -> None:
        self.inputs, self.outputs = signature.input_forms, signature.output_forms
        self.input_names = tuple(name for name, _ in self.inputs)
        self.output_names = tuple(name for name, _ in self.outputs)
        self._input_specs, self._output_specs = signature.inputs, signature.outputs
        self._strings = signature.strings
        elements = [element_of(form) for _, form in (*self.inputs, *self.outputs)]
        self.has_text = bool(self._strings) or STRING in elements

    def call(self) -> Any:
        """A context manager for one call."""
        return strings.table(self._strings) if self.has_text else nullcontext()

    def arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Tensors of the arguments, in the order of the signature. InputError for a value of another form."""
        specs, tensors = iter(self._input_specs), list[Any]()
        for (name, form), value in zip(self.inputs, values, strict=True):
            tensors += _pack(value, form, [next(specs) for _ in range(num_tensors(form))], f"argument '{name}'")
        return tuple(tensors)

    def results(self, tensors: Sequence[np.ndarray]) -> list[Any]:
        """Results in the model's order."""
        parts = iter(tensors)
        return [_unpack(parts, form) for _, form in self.outputs]


def _pack(value: Any, form: Form, specs: Sequence[TensorSpec], what: str) -> list[Any]:
    kind, held = inner(form)
    if kind == "optional":
        if value is None:
            return [np.array(False), *_absent(held, specs[1:])]
        return [np.array(True), *_pack(value, held, specs[1:], what)]
    if kind == "sequence":
        return _pack_sequence(value, held, specs, what)
    return [_to_storage(value, form, what) if form else value]


def _absent(form: Form, specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    shapes = [tuple(d if isinstance(d, int) else 0 for d in spec.shape) for spec in specs]
    return [np.zeros(shape, dtypes.to_numpy(spec.dtype)) for shape, spec in zip(shapes, specs, strict=True)]


def _pack_sequence(value: Any, form: Form, specs: Sequence[TensorSpec], what: str) -> list[np.ndarray]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{what}: expects a list of arrays, got {type(value).__name__}")
    dtype, rank = dtypes.to_numpy(specs[0].dtype), specs[1].shape[1]
    assert isinstance(rank, int)
    arrays = [_to_storage(x, form, what) if form else np.asarray(x) for x in value]
    for place, array in enumerate(arrays):
        if array.dtype != dtype or array.ndim != rank:
            raise InputError(
                f"{what}: element {place} is {array.dtype.name} of rank {array.ndim}, expects {specs[0].dtype} of "
                f"rank {rank}"
            )
    elements = np.concatenate([x.ravel() for x in arrays]) if arrays else np.zeros(0, dtype)
    return [elements, np.array([x.shape for x in arrays], np.int64).reshape(len(arrays), rank)]


def _to_storage(value: Any, element: str, what: str) -> np.ndarray:
    if element == STRING:
        codes, texts = strings.encode(value, what)
        strings.add(texts)
        return codes
    array = np.asarray(value)
    if array.dtype.name != element:
        raise InputError(f"{what}: got {array.dtype.name}, expects {element}")
    if element in _BY_VALUE:
        return array.astype(np.uint8 if element.startswith("u") else np.int8)
    return np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)


def _unpack(parts: Iterator[np.ndarray], form: Form) -> Any:
    kind, held = inner(form)
    if kind == "optional":
        is_present = bool(next(parts))
        value = _unpack(parts, held)
        return value if is_present else None
    if kind == "tensor":
        return _from_storage(next(parts), form)
    if kind == "maps":
        labels = maps_labels(held)
        return [dict(zip(labels, row, strict=True)) for row in next(parts).tolist()]
    elements, shapes = next(parts), next(parts)
    ends = np.cumsum(np.prod(shapes, axis=1, dtype=np.int64)).tolist()
    pieces = [elements[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [_from_storage(x.reshape(shape), held) for x, shape in zip(pieces, shapes.tolist(), strict=True)]


def _from_storage(array: np.ndarray, element: str) -> np.ndarray:
    if not element:
        return array
    if element == STRING:
        return strings.to_texts(array)
    dtype = _ml_dtype(element)
    return array.astype(dtype) if element in _BY_VALUE else np.ascontiguousarray(array).view(dtype)


def _ml_dtype(name: str) -> np.dtype:
    import ml_dtypes  # on first use, to save memory

    return np.dtype(getattr(ml_dtypes, name))
