"""Parsing of large ONNX files without copies of their large tensors.

Parsing a whole file copies its weights three times: into memory, into the message, and out of the message. Instead, a
file is mapped, and its message is rewritten so that each large tensor of the graph refers to its range in the file:
data_location EXTERNAL, with the one entry KEY = "OFFSET,SIZE" (Protocol Buffers, "Encoding"; onnx.proto3).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from onnx import StringStringEntryProto, TensorProto

from relaxlite.records import dataclass

KEY = "relaxlite_range"
MIN_FILE, MIN_TENSOR = 32 << 20, 16 << 10  # bytes; smaller files and tensors are parsed as usual
_GRAPH, _INITIALIZER = 7, 5  # numbers of the fields of ModelProto and GraphProto
_DATA_TYPE, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 2, 9, 13, 14  # of TensorProto
_BYTES = 2  # wire type of length-delimited fields
_PLAIN_TYPES = {
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    wire: int
    start: int  # of its tag
    value: int  # of its content
    end: int


def without_large_tensors(data: mmap.mmap) -> bytes:
    """Return the serialized model without the bytes of its large tensors. Raises ValueError for a malformed message."""
    return b"".join(
        _graph(data, field) if field.number == _GRAPH and field.wire == _BYTES else data[field.start : field.end]
        for field in _fields(data, 0, len(data))
    )


def tensor_file_range(tensor: TensorProto) -> tuple[int, int] | None:
    """Return (offset, size) in the file of a tensor that `without_large_tensors` removed, None for other tensors."""
    entries = tensor.external_data
    if len(entries) != 1 or entries[0].key != KEY:
        return None
    offset, size = entries[0].value.split(",")
    return int(offset), int(size)


def _graph(data: mmap.mmap, graph: _Field) -> bytes:
    """Return the serialized field of the graph, without large tensors."""
    content = b"".join(
        _tensor(data, field) if _is_large_tensor(field) else data[field.start : field.end]
        for field in _fields(data, graph.value, graph.end)
    )
    return _with_length(_GRAPH, content)


def _is_large_tensor(field: _Field) -> bool:
    return field.number == _INITIALIZER and field.wire == _BYTES and field.end - field.value >= MIN_TENSOR


def _tensor(data: mmap.mmap, tensor: _Field) -> bytes:
    """Return the serialized field of a tensor, with a file range in place of its bytes."""
    fields = {field.number: field for field in _fields(data, tensor.value, tensor.end)}
    raw, kind = fields.get(_RAW_DATA), fields.get(_DATA_TYPE)
    is_plain = kind is not None and kind.wire == 0 and _varint(data, kind.value)[0] in _PLAIN_TYPES
    if raw is None or not is_plain or _EXTERNAL_DATA in fields or _DATA_LOCATION in fields:
        return data[tensor.start : tensor.end]
    entry = StringStringEntryProto(key=KEY, value=f"{raw.value},{raw.end - raw.value}")
    location = TensorProto(data_location=TensorProto.EXTERNAL, external_data=[entry]).SerializeToString()
    return _with_length(_INITIALIZER, data[tensor.value : raw.start] + data[raw.end : tensor.end] + location)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    while start < end:
        tag, value = _varint(data, start)
        wire = tag & 7
        if wire == _BYTES:
            size, value = _varint(data, value)
            stop = value + size
        elif wire == 0:
            stop = _varint(data, value)[1]
        elif wire in (1, 5):
            stop = value + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise ValueError("a field ends behind what holds it")
        yield _Field(tag >> 3, wire, start, value, stop)
        start = stop


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Decode the varint at a position; return its value and the next position."""
    value = shift = 0
    while True:
        if position >= len(data):
            raise ValueError("the end of the file in a number")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _with_length(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
