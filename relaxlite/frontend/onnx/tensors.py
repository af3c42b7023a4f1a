"""Conversion of ONNX tensors to constants: element types, raw and external data, without copies where possible."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from relaxlite import dtypes, strings
from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.large_tensors import tensor_file_range
from relaxlite.frontend.onnx.narrow_types import NARROW_TYPES, NarrowType
from relaxlite.ir.expr import Constant

_ALONE_FROM = 16 << 20  # tensors of at least this size have an allocation of their own
_CACHE_LINE = 64  # bytes
_DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16", TensorProto.BOOL: "bool",
    TensorProto.INT8: "int8", TensorProto.INT16: "int16", TensorProto.INT32: "int32", TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8", TensorProto.UINT16: "uint16", TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
}  # fmt: skip


def element_type_name(elem_type: int) -> str:
    """Return ONNX's name of an element type, for messages."""
    return _names().get(elem_type, f"number {elem_type}")


@cache
def _names() -> dict[int, str]:
    return {value: key for key, value in TensorProto.DataType.items()}


def narrow_type(elem_type: int) -> NarrowType | None:
    """Return the narrow type of an ONNX element type, or None if the type is not narrow."""
    return NARROW_TYPES.get(element_type_name(elem_type))


def element_type(elem_type: int, what: str) -> str:
    """Return the dtype of an ONNX element type, of a narrow type the dtype of its storage.

    Raises ImportModelError, which names `what`, for a type without a dtype.
    """
    narrow = narrow_type(elem_type)
    dtype = _DTYPES.get(elem_type) if narrow is None else narrow.storage
    if dtype is None:
        name = element_type_name(elem_type)
        raise ImportModelError(
            f"{what} has element type {name}, which relaxlite does not have; it has {', '.join(dtypes.ALL)}"
        )
    return dtype


def tensor_type_of(info: onnx.ValueInfoProto) -> onnx.TypeProto.Tensor:
    """Return the type of a tensor, or of the elements of a sequence or optional. ImportModelError for other values."""
    ty = info.type
    while ty.WhichOneof("value") in ("sequence_type", "optional_type"):
        ty = ty.sequence_type.elem_type if ty.HasField("sequence_type") else ty.optional_type.elem_type
    kind = ty.WhichOneof("value")
    if kind != "tensor_type":
        raise ImportModelError(f"input '{info.name}' is a {kind or 'value without a type'}, not a tensor")
    return ty.tensor_type


class TensorReader:
    """Reads a model's tensors as constants.

    model_path: the model's file, whose folder holds external data. content: the mapped file, or None.
    """

    def __init__(self, model_path: Path | None, content: mmap.mmap | None = None) -> None:
        self._model_path, self._content = model_path, content
        self._block, self._taken = np.empty(0 if content is None else len(content), np.uint8), 0
        self.strings: dict[str, None] = {}  # text in the tensors that were read
        self.external: dict[str, None] = {}  # names, in the model, of the external data files that were read

    def constant(self, tensor: TensorProto, name: str | None = None) -> Constant:
        """Return the tensor as a constant, called `name` if the tensor has no name."""
        name = tensor.name or name
        what = f"tensor '{name}'" if name else "a tensor"
        array = self._array(tensor, what)
        return Constant.of(array if array.flags.aligned else array.copy(), name=name)

    def _array(self, tensor: TensorProto, what: str) -> Any:
        narrow, dtype = narrow_type(tensor.data_type), dtypes.to_numpy(element_type(tensor.data_type, what))
        shape = tuple(tensor.dims)
        if any(d < 0 for d in shape):
            raise ImportModelError(f"{what} has a negative dimension: {shape}")
        if tensor.HasField("segment"):
            raise ImportModelError(f"{what} is stored in segments, which no known version of ONNX uses")
        file_range = tensor_file_range(tensor) if self._content is not None else None
        if file_range is not None:
            return self._copy_large(file_range, dtype, shape, what)
        if tensor.data_location == TensorProto.EXTERNAL:
            if narrow is not None:
                return self._external_narrow(tensor, narrow, what)
            return self._external(tensor, dtype, shape, what)
        if narrow is not None and narrow.is_text:
            return self._codes(tensor, shape, what)
        if narrow is not None:
            return _decoded(tensor, narrow.dtype, shape, what, narrow)
        if not tensor.HasField("raw_data"):
            return _decoded(tensor, dtype, shape, what)
        return _from_bytes(tensor.raw_data, dtype, shape, what)

    def _codes(self, tensor: TensorProto, shape: tuple[int, ...], what: str) -> Any:
        """Return the codes of a tensor of text, whose strings the model keeps."""
        if len(tensor.string_data) != math.prod(shape):
            raise ImportModelError(f"{what} of shape {shape} holds {len(tensor.string_data)} strings")
        texts = [s.decode("utf-8", "replace") for s in tensor.string_data]
        return self.codes(texts).reshape(shape)

    def codes(self, texts: Sequence[str]) -> Any:
        """Return the codes, int64 (n,), of strings that the model is to keep."""
        self.strings.update(dict.fromkeys(texts))
        return strings.encode(np.array([*texts], dtype=object))[0]

    def _copy_large(self, file_range: tuple[int, int], dtype: np.dtype, shape: tuple[int, ...], what: str) -> Any:
        """Copy a range of the mapped file, which may be rewritten while the model is in use.

        Copies are consecutive in one block of huge pages (docs/measurements/frontend.md). The largest have allocations
        of their own, which a loaded model can keep.
        """
        assert self._content is not None
        offset, size = file_range
        source = _from_bytes(memoryview(self._content)[offset : offset + size], dtype, shape, what)
        if size >= _ALONE_FROM:
            block = np.empty(size + _CACHE_LINE, np.uint8)
            copy = block[-block.ctypes.data % _CACHE_LINE :][:size].view(dtype).reshape(shape)
            copy[...] = source
            copy.flags.writeable = False
            return copy
        start = -(-self._taken // dtype.itemsize) * dtype.itemsize
        if start + size > len(self._block):  # as when a tensor is read twice
            return source.copy()
        self._taken = start + size
        copy = self._block[start : start + size].view(dtype).reshape(shape)
        copy[...] = source
        return copy

    def _external(self, tensor: TensorProto, dtype: np.dtype, shape: tuple[int, ...], what: str) -> Any:
        size = math.prod(shape) * dtype.itemsize
        path, offset = self._external_range(tensor, size, what)
        if size == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)

    def _external_narrow(self, tensor: TensorProto, narrow: NarrowType, what: str) -> Any:
        size = (math.prod(tensor.dims) * narrow.bits + 7) // 8
        path, offset = self._external_range(tensor, size, what)
        inline = TensorProto(data_type=tensor.data_type, dims=tensor.dims)
        with path.open("rb") as file:
            file.seek(offset)
            inline.raw_data = file.read(size)
        return _decoded(inline, narrow.dtype, tuple(tensor.dims), what, narrow)

    def _external_range(self, tensor: TensorProto, size: int, what: str) -> tuple[Path, int]:
        """Return the file and the offset of an external tensor of `size` bytes.

        Raises ImportModelError unless the file is in the model's folder and has these bytes.
        """
        info = {entry.key: entry.value for entry in tensor.external_data}
        path = self._external_path(info.get("location", ""), what)
        offset, length = _number(info, "offset", 0, what), _number(info, "length", size, what)
        if length != size:
            raise ImportModelError(
                f"external data of {what} has a length of {length} bytes, but shape {tuple(tensor.dims)} of "
                f"{element_type_name(tensor.data_type)} needs {size}"
            )
        if offset + size > path.stat().st_size:
            raise ImportModelError(
                f"external data file '{path.name}' is too short for {what}: {path.stat().st_size} bytes, but it needs "
                f"{size} bytes at offset {offset}; the file is truncated or belongs to another model"
            )
        return path, offset

    def _external_path(self, location: str, what: str) -> Path:
        if self._model_path is None:
            raise ImportModelError(
                f"{what} is stored in external file '{location}', but the model was given as bytes; give its path"
            )
        if not location:
            raise ImportModelError(f"{what} is stored externally, but names no file")
        if _leaves_folder(location):
            raise ImportModelError(f"external data of {what} points outside the model's folder: '{location}'")
        folder = self._model_path.parent
        path = folder / location
        # Download caches may hold the model and its data as links into another folder.
        allowed = (folder.resolve(), self._model_path.resolve().parent)
        if not any(path.resolve().is_relative_to(parent) for parent in allowed):
            raise ImportModelError(
                f"external data of {what} points outside the model's folder: '{location}' links to '{path.resolve()}'"
            )
        if not path.is_file():
            raise ImportModelError(f"external data file '{location}' of {what} is missing in folder '{folder}'")
        self.external[location] = None
        return path


def _leaves_folder(location: str) -> bool:
    for path in (PurePosixPath(location), PureWindowsPath(location)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            return True
    return False


def _number(info: dict[str, str], key: str, default: int, what: str) -> int:
    text = info.get(key)
    if text is None:
        return default
    if not text.isdigit():
        raise ImportModelError(f"external data of {what} has {key}={text!r}, which is no number of bytes")
    return int(text)


def _from_bytes(data: bytes | memoryview, dtype: np.dtype, shape: tuple[int, ...], what: str) -> Any:
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise ImportModelError(
            f"{what} of shape {shape} and type {dtype.name} needs {needed} bytes of data, but has {len(data)}"
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _decoded(
    tensor: TensorProto, dtype: np.dtype, shape: tuple[int, ...], what: str, narrow: NarrowType | None = None
) -> Any:
    """Return the array of a tensor with elements in a typed field, or packed several to a byte."""
    try:
        array = np.ascontiguousarray(numpy_helper.to_array(tensor).astype(dtype, copy=False)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise ImportModelError(
            f"{what} of shape {shape} does not hold as many elements as its shape says: {error}"
        ) from error
    return array if narrow is None else narrow.to_storage(array)


def sparse_constant(sparse: onnx.SparseTensorProto, reader: TensorReader) -> Constant:
    """Return a sparse tensor as a dense constant; indices are linear (nnz,), or coordinates (nnz, rank).

    Raises ImportModelError for an index outside the shape.
    """
    values, indices = reader.constant(sparse.values), reader.constant(sparse.indices)
    shape = tuple(sparse.dims)
    positions = indices.value
    if positions.ndim == 2:
        positions = np.ravel_multi_index(tuple(positions.T), shape) if positions.size else positions.reshape(-1)
    dense = np.zeros(math.prod(shape), values.value.dtype)
    if positions.size and (positions.min() < 0 or positions.max() >= dense.size):
        raise ImportModelError(f"sparse tensor '{sparse.values.name}' has an index outside its shape {shape}")
    dense[positions] = values.value
    return Constant.of(dense.reshape(shape), name=sparse.values.name or None)


def attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[TensorProto]:
    """Yield the tensors of an attribute."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def onnx_type(dtype: str) -> int:
    """Return the number of ONNX's element type for a dtype."""
    return next(number for number, name in _DTYPES.items() if name == dtype)
