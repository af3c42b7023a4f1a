"""Reader of the GGUF container (github.com/ggml-org/ggml, docs/gguf.md): metadata and the places of tensors.

The `gguf` package reads a large vocabulary many times more slowly (docs/measurements/llm.md).
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relaxlite.errors import ImportModelError
from relaxlite.frontend.foreign_files import SIGNATURE_BYTES, describe_foreign
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_RANK = 4
_MAX_PARTS = 1000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: `shape`, outermost dimension first, and its place in bytes from the beginning of the file.

    `end` is where the next tensor, or the end of the file, follows.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    end: int
    data: Array  # all bytes of its file, mapped read-only


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The metadata and tensors of one GGUF file."""

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


class _Reader:
    """A cursor over the bytes of a mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.take("Q")
        if size > len(self.data) - self.position:
            raise ValueError(f"a text of {size} bytes at byte {self.position} goes beyond the end")
        text = self.data[self.position : self.position + size]
        self.position += size
        return text.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_scalar(kind))
        inner, count = self.take("I"), self.take("Q")
        min_bytes = {_STRING: 8, _ARRAY: 12}.get(inner) or struct.calcsize("<" + _scalar(inner))  # bytes of each value
        if count * min_bytes > len(self.data) - self.position:
            raise ValueError(f"a list of {count} values at byte {self.position} goes beyond the end")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        result = np.frombuffer(self.data, np.dtype("<" + _scalar(inner)), count, self.position)
        self.position += result.nbytes
        return result.tolist()


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"{kind} is no type of a metadata value")
    return _SCALARS[kind]


def read_file(path: str | os.PathLike[str]) -> GgufFile:
    """Read metadata and tensors of a GGUF file of version 2 or 3.

    Raises ImportModelError for other files and truncated ones.
    """
    source = os.fspath(path)
    try:
        with open(source, "rb") as file:
            head = file.read(SIGNATURE_BYTES)
            if head[:4] != b"GGUF":
                kind_of_file = describe_foreign(head) or "it does not begin with 'GGUF'"
                raise ImportModelError(f"{source}: no GGUF file: {kind_of_file}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ImportModelError(f"{source}: cannot be read: {error.strerror}") from error
    try:
        return _read(_Reader(mapped))
    except (struct.error, ValueError, RecursionError) as error:
        raise ImportModelError(f"{source}: a damaged or truncated GGUF file: {error}") from error


def read_parts(path: str | os.PathLike[str]) -> list[GgufFile]:
    """Read a file, or all parts of a split model (llama.cpp's gguf-split) given any one of them.

    The first part, which has the metadata, comes first. Raises ImportModelError if a part is missing, and as
    `read_file`.
    """
    source = Path(path)
    file = read_file(source)
    count, number = (file.metadata.get(f"split.{key}", 0) for key in ("count", "no"))
    if count in (0, 1):
        return [file]
    paths = split_files(source)
    if not isinstance(count, int) or len(paths) != count:
        raise ImportModelError(
            f"{source}: part {number} of a model in {count} files, which are named NAME-00001-of-{count:05}.gguf; put "
            "them side by side under such names, or join them by llama.cpp's `llama-gguf-split --merge`"
        )
    missing = next((part.name for part in paths if not part.is_file()), None)
    if missing is not None:
        raise ImportModelError(f"{source}: one of {count} files; {missing} is missing beside it")
    parts = [read_file(part) for part in paths]
    for k, (part, name) in enumerate(zip(parts, paths, strict=True)):
        if (part.metadata.get("split.count"), part.metadata.get("split.no")) != (count, k):
            raise ImportModelError(f"{name}: no part {k} of a model in {count} files, as its name says")
    names = Counter(tensor.name for part in parts for tensor in part.tensors)
    duplicate = next((name for name, times in names.items() if times > 1), None)
    if duplicate is not None:
        raise ImportModelError(f"{source}: there are two tensors {duplicate!r} in the parts of the model")
    return parts


def split_files(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model given one of them; an empty list for other names."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name, re.IGNORECASE)
    if match is None or int(match[3]) > _MAX_PARTS:
        return []
    return [path.with_name(f"{match[1]}-{k:05}-of-{match[3]}{path.suffix}") for k in range(1, int(match[3]) + 1)]


def _read(reader: _Reader) -> GgufFile:
    reader.position = 4
    version, tensors, values = reader.take("I"), reader.take("Q"), reader.take("Q")
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            raise ValueError("it is written for machines with the highest byte first, which is not read")
        raise ValueError(f"version {version} is not read, 2 and 3 are (convert the model again)")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        name = reader.string()
        metadata[name] = reader.value(reader.take("I"))
    infos = []
    for _ in range(tensors):
        name, rank = reader.string(), reader.take("I")
        if rank > _MAX_RANK:
            raise ValueError(f"tensor {name!r} has {rank} dimensions")
        dims = [reader.take("Q") for _ in range(rank)]
        if not all(dims):
            raise ValueError(f"tensor {name!r} has no elements: {dims}")
        kind, offset = reader.take("I"), reader.take("Q")
        infos.append((name, tuple(reversed(dims)), TYPE_NAMES.get(kind, f"number {kind}"), offset))
    names = [name for name, *_ in infos]
    duplicate = next((name for name, count in Counter(names).items() if count > 1), None)
    if duplicate is not None:
        raise ValueError(f"there are two tensors {duplicate!r}")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"an alignment of {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    data = np.frombuffer(reader.data, np.uint8)
    starts = sorted({start + offset for *_, offset in infos})
    ends = dict(itertools.pairwise([*starts, data.size]))
    tensor_infos = tuple(
        TensorInfo(name, shape, kind, start + offset, ends[start + offset], data) for name, shape, kind, offset in infos
    )
    return GgufFile(metadata, tensor_infos)
