"""Loading of ONNX models from a path, bytes or a ModelProto. Unreadable models raise ImportModelError."""

from __future__ import annotations

import mmap
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from relaxlite.errors import ImportModelError, InvalidArgumentError
from relaxlite.frontend.foreign_files import describe_foreign
from relaxlite.frontend.onnx.large_tensors import MIN_FILE, without_large_tensors
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A parsed ONNX model and the file that it was read from."""

    proto: onnx.ModelProto
    path: Path | None  # external data is in its folder; None for a model in memory
    name: str  # for messages
    content: mmap.mmap | None = None  # the mapped file, if large tensors of `proto` are ranges in it


def load_model(model: str | Path | bytes | onnx.ModelProto) -> LoadedModel:
    """Load a model without its external data.

    Raises ImportModelError if the model cannot be read, InvalidArgumentError for another type of argument.
    """
    if isinstance(model, onnx.ModelProto):
        return _check_has_graph(LoadedModel(model, None, "the model"))
    if isinstance(model, bytes | bytearray | memoryview):
        return _check_has_graph(LoadedModel(_parse(bytes(model), "the given bytes"), None, "the model"))
    if not isinstance(model, str | Path):
        raise InvalidArgumentError(f"from_onnx takes a path, bytes or an onnx.ModelProto, not {type(model).__name__}")
    path = Path(model)
    data, content = _read(path)
    return _check_has_graph(LoadedModel(_parse(data, f"'{path}'"), path, f"'{path}'", content))


def _read(path: Path) -> tuple[bytes, mmap.mmap | None]:
    """Return the bytes to parse, and the mapped file if they are without its large tensors."""
    if path.is_dir():
        raise ImportModelError(f"'{path}' is a folder; give the path of the .onnx file in it")
    if not path.exists():
        raise ImportModelError(f"there is no file '{path}'")
    try:
        if path.stat().st_size < MIN_FILE:
            return path.read_bytes(), None
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return without_large_tensors(content), content
        except ValueError:  # the parser reports the damage
            return content[:], None
    except OSError as error:
        raise ImportModelError(f"'{path}' cannot be read: {error.strerror}") from error


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise ImportModelError(f"{what}: empty, not an ONNX model")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        # An ONNX file starts with field 1, the IR version, as a varint.
        damaged = (
            "an ONNX model that is truncated or damaged" if data[0] == 0x08 else "not an ONNX model (not a protobuf)"
        )
        raise ImportModelError(f"{what}: {describe_foreign(data) or damaged}") from error
    foreign = None if proto.HasField("graph") else describe_foreign(data)
    if foreign is not None:  # files of some other formats parse as protobufs
        raise ImportModelError(f"{what}: {foreign}")
    return proto


def _check_has_graph(model: LoadedModel) -> LoadedModel:
    proto = model.proto
    if not proto.HasField("graph"):
        raise ImportModelError(f"{model.name} contains no graph: it is not an ONNX model, or a truncated one")
    if not proto.graph.output:
        raise ImportModelError(f"{model.name}: its graph has no outputs, so there is nothing to compute")
    return model
