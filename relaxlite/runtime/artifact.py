"""One file per compiled model: header, manifest, bytecode, object code, attachments, weights.

    0        header, 64 bytes: magic, format and producer versions, file size, manifest's size and crc32, own crc32
    64       manifest, JSON: entries, target, kernels, metadata, and where every section lies with its crc32
    4096 k   payload: bytecode (JSON), all objects, host functions, the runtime's own code (support.py), attachments
             (such as a tokenizer), weights: the first weight page-aligned, each section 64-byte aligned

Weights are memory-mapped read-only, so that processes share them and loading does not read them.

Integrity: all sections but weights are checked whole. Weights are checked whole up to CHECK_LIMIT bytes in total; in
larger files one page per SAMPLE_STRIDE bytes of each weight is checked, which detects truncated, sparse and mixed-up
files without reading the whole model. `verify=True` checks every byte. Checksums detect accidents, not attacks: object
code of a file is executed.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ArtifactError
from relaxlite.garbage import with_gc_disabled
from relaxlite.runtime import cpu
from relaxlite.runtime.executable import (
    ENTRY,
    Call,
    Const,
    Entry,
    ExecutableData,
    Goto,
    HostCode,
    If,
    Imm,
    Instruction,
    KernelCost,
    KernelInfo,
    LibraryInfo,
    Metadata,
    Operand,
    Reg,
    Ret,
    Signature,
    TargetInfo,
    TensorSpec,
    ValidationContext,
    VMFunction,
    validate,
    validate_functions,
    validate_values,
)
from relaxlite.runtime.mapped_file import MappedFile
from relaxlite.runtime.memory import HUGE_PAGE
from relaxlite.version import __version__

MAGIC = b"\x89RLX\r\n\x1a\n"  # as in PNG: detects changed line ends and stripped eighth bits
FORMAT = 7
CHECK_LIMIT = 64 << 20  # bytes, for a fast load (docs/measurements/backend.md)
DECODE_LIMIT = (
    64 << 10
)  # bytes of bytecode that are decoded and validated at load, not lazily (docs/measurements/backend.md)
SAMPLE_STRIDE = 4 << 20

_MAX_CHECKSUM = (1 << 32) - 1  # widest in JSON
_HEADER = struct.Struct("<8sI20sQQI")  # magic, format, producer, file size, manifest's size, manifest's crc32
_CRC = struct.Struct("<I")  # of the header, right behind it
_HEADER_SIZE = 64
_ALIGNMENT = 64
_PAGE = 4096
_MAX_NAME_BYTES = 230  # of the 255 that file systems allow; the name of the temporary file is 14 longer
_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    RecursionError,
)  # raised by reading malformed data
_CODE_SECTIONS = ("the bytecode", "the object code", "the host functions", "the runtime's own code")


def save(data: ExecutableData, path: str | os.PathLike[str]) -> None:
    """Write an executable to a file, atomically: readers see the old file or the whole new one. ArtifactError."""
    target = Path(os.path.realpath(path))  # a symbolic link is kept, its target replaced
    if os.path.isdir(target):
        raise ArtifactError(f"cannot save to {target}: it is a folder; name a file in it")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ArtifactError(f"cannot save to {target}: it is a device or a pipe, no file that could be replaced")
    validate(data)
    name = target.name.encode("utf-8", "surrogateescape")[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    temporary = target.with_name(f".{name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb", buffering=HUGE_PAGE) as file:
            _write(data, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ArtifactError(f"cannot save to {target}: {error.strerror or error}") from error
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"cannot save to {target}: the metadata is not JSON ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


@with_gc_disabled
def load(path: str | os.PathLike[str], *, verify: bool = False, to_run: bool = True) -> ExecutableData:
    """Load a saved model. ArtifactError for a damaged file, or one that this machine cannot run.

    `verify`: check every byte of the weights. `to_run=False`: for inspection; skips the check of the machine.
    """
    source = Path(path)
    try:
        content = _map(source)
        manifest = _read_manifest(content)
        return _read_data(content, manifest, verify=verify, to_run=to_run)
    except ArtifactError as error:
        raise ArtifactError(f"cannot load {source}: {error}") from error
    except OSError as error:
        raise ArtifactError(f"cannot load {source}: {error.strerror or error}") from error
    except _MALFORMED as error:
        raise ArtifactError(f"cannot load {source}: it is malformed ({type(error).__name__}: {error})") from error


# ---- writing


def _write(data: ExecutableData, file: BinaryIO) -> None:
    """Write sections one at a time, to bound memory, as bytes of weights may be copies; then header and manifest, which
    hold the checksums of the sections."""
    bytecode = _to_json([_function_to_json(function) for function in data.functions.values()])
    hosts = b"".join(entry.host.object_code for entry in data.entries.values())
    code = (b"".join((*data.objects, *data.device_modules)), hosts, b"".join(data.support.values()))
    blobs: list[bytes | np.ndarray] = [bytecode, *code, *data.attachments.values(), *data.constants]
    extents, size = _layout(blobs, len(blobs) - len(data.constants))
    fields = _manifest(data)

    def manifest(checksums: list[tuple[int, int]]) -> bytes:
        sections = [(*extent, *sums) for extent, sums in zip(extents, checksums, strict=True)]
        return _to_json({**fields, "sections": sections})

    manifest_size = len(manifest([(_MAX_CHECKSUM, _MAX_CHECKSUM)] * len(blobs)))
    payload, checksums = _align(_HEADER_SIZE + manifest_size, _PAGE), []
    for (offset, _), blob in zip(extents, blobs, strict=True):
        content = blob if isinstance(blob, bytes) else _bytes_of(blob)
        _append(file, bytes(payload + offset - file.tell()))
        _append(file, content)
        checksums.append((zlib.crc32(content), _sampled_crc(content)))
    _append(file, bytes(payload + size - file.tell()))
    text = manifest(checksums).ljust(manifest_size)
    producer = data.metadata.producer.encode()[:20]
    header = _HEADER.pack(MAGIC, FORMAT, producer, payload + size, manifest_size, zlib.crc32(text))
    file.seek(0)
    file.write((header + _CRC.pack(zlib.crc32(header))).ljust(_HEADER_SIZE, b"\0"))
    file.write(text)


def _append(file: BinaryIO, content: bytes | memoryview) -> None:
    """Append in pieces that end at multiples of a huge page, so that each flush of the file's buffer, which has that
    size, fills one huge page of the page cache where the system supports it (mapped_file.py)."""
    position, start, view = file.tell(), 0, memoryview(content)
    while start < len(view):
        end = start + HUGE_PAGE - (position + start) % HUGE_PAGE
        file.write(view[start:end])
        start = end


def _layout(blobs: list[bytes | np.ndarray], first_weight: int) -> tuple[list[tuple[int, int]], int]:
    """Lay out the sections: (offset in the payload, size) of each, and the size of the payload."""
    extents, end = [], 0
    for index, blob in enumerate(blobs):
        offset = _align(end, _PAGE if index == first_weight else _ALIGNMENT)
        size = len(blob) if isinstance(blob, bytes) else blob.nbytes
        extents.append((offset, size))
        end = offset + size
    return extents, end


def _sampled_crc(blob: bytes | memoryview) -> int:
    """Checksum of one page per SAMPLE_STRIDE bytes."""
    crc = 0
    for start in range(0, len(blob), SAMPLE_STRIDE):
        crc = zlib.crc32(blob[start : start + _PAGE], crc)
    return crc


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _bytes_of(array: np.ndarray) -> memoryview:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8).data


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _manifest(data: ExecutableData) -> dict[str, Any]:
    return {
        "entries": [_entry_to_json(name, entry) for name, entry in data.entries.items()],
        "target": asdict(data.target),
        "kernels": [asdict(kernel) for kernel in data.kernels.values()],
        "objects": [len(item) for item in data.objects],
        "device_modules": [len(item) for item in data.device_modules],
        "libraries": [asdict(library) for library in data.libraries],
        "support": [(key, len(item)) for key, item in data.support.items()],
        "metadata": asdict(data.metadata),
        "attachments": list(data.attachments),
        "constants": [(array.dtype.name, array.shape) for array in data.constants],
    }


def _function_to_json(function: VMFunction) -> list[Any]:
    code = [_instruction_to_json(instruction) for instruction in function.instructions]
    location_numbers = {
        location: at for at, location in enumerate(dict.fromkeys(function.locations))
    }  # many instructions share a location
    locations = [list(location_numbers), [location_numbers[location] for location in function.locations]]
    return [function.name, function.params, function.num_registers, code, locations]


def _instruction_to_json(instruction: Instruction) -> list[Any]:
    match instruction:
        case Call(dst, callee, operands):
            return ["call", dst, callee, *map(_operand_to_json, operands)]
        case Ret(register):
            return ["ret", register]
        case Goto(target):
            return ["goto", target]
        case If(register, else_target):
            return ["if", register, else_target]
    raise TypeError(f"not an instruction: {instruction!r}")


def _operand_to_json(operand: Operand) -> list[Any]:
    match operand:
        case Reg(index):
            return ["r", index]
        case Const(index):
            return ["c", index]
        case Imm(value):
            return ["i", value]
    raise TypeError(f"not an operand: {operand!r}")


# ---- reading


def _map(source: Path) -> np.ndarray:
    if source.is_dir():
        raise ArtifactError("it is a folder")
    if not source.exists():
        raise ArtifactError("there is no such file")
    if not source.is_file():
        raise ArtifactError("it is not a regular file")
    with open(source, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ArtifactError("it is empty")
        return np.frombuffer(MappedFile.of(file), np.uint8)


def _read_manifest(content: np.ndarray) -> dict[str, Any]:
    """Check header and manifest; returns the manifest, with the absolute start of the payload as "payload"."""
    head = content[:_HEADER_SIZE].tobytes()
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise ArtifactError("it is not a relaxlite model")
    if len(head) < _HEADER_SIZE:
        raise ArtifactError(f"it is truncated: {len(head)} bytes do not even hold the header")
    _, version, producer, size, manifest_size, manifest_crc = _HEADER.unpack_from(head)
    if version != FORMAT:
        writer = producer.rstrip(b"\0").decode("ascii", "replace")
        raise ArtifactError(
            f"it has format version {version}, written by relaxlite {writer}; "
            f"relaxlite {__version__} reads version {FORMAT}; compile the model again"
        )
    if _CRC.pack(zlib.crc32(head[: _HEADER.size])) != head[_HEADER.size : _HEADER.size + _CRC.size]:
        raise ArtifactError("it is corrupted: the header does not match its checksum")
    if len(content) != size:
        problem = "truncated" if len(content) < size else "corrupted"
        raise ArtifactError(f"it is {problem}: {len(content)} bytes, where the header says {size}")
    encoded = content[_HEADER_SIZE : _HEADER_SIZE + manifest_size].tobytes()
    if zlib.crc32(encoded) != manifest_crc:
        raise ArtifactError("it is corrupted: the manifest does not match its checksum")
    manifest = json.loads(encoded)
    manifest["payload"] = _align(_HEADER_SIZE + manifest_size, _PAGE)
    return manifest


def _read_data(content: np.ndarray, manifest: dict[str, Any], *, verify: bool, to_run: bool) -> ExecutableData:
    target = TargetInfo(**{**manifest["target"], "features": tuple(manifest["target"]["features"])})
    names = manifest["attachments"]
    if len({str(name) for name in names}) < len(names) or len(names) + len(_CODE_SECTIONS) > len(manifest["sections"]):
        raise ArtifactError(f"it is malformed: its attachments are {names!r}")
    section_names = (*_CODE_SECTIONS, *(f"the attachment {name!r}" for name in names))
    bytecode, code, host_code, support_code, *blobs = _read_sections(content, manifest, section_names, verify=verify)
    attachments, weights = blobs[: len(names)], blobs[len(names) :]
    if to_run and (len(code) or len(host_code)):
        cpu.check(target)
    kinds = manifest["constants"]
    kernels = [_kernel_from_json(item) for item in manifest["kernels"]]
    entries = _entries_from_json(manifest["entries"], host_code.tobytes())
    entry_point = entries.pop(ENTRY)
    code_items = _split(code.tobytes(), [*manifest["objects"], *manifest.get("device_modules", ())])
    support_keys, support_sizes = [key for key, _ in manifest["support"]], [size for _, size in manifest["support"]]
    data = ExecutableData(
        functions={},
        signature=entry_point.signature,
        kernels={kernel.name: kernel for kernel in kernels},
        objects=code_items[: len(manifest["objects"])],
        device_modules=code_items[len(manifest["objects"]) :],
        constants=tuple(
            weight.view(dtypes.to_numpy(dtype)).reshape(shape)
            for weight, (dtype, shape) in zip(weights, kinds, strict=True)
        ),
        libraries=tuple(map(_library_from_json, manifest.get("libraries", ()))),
        host=entry_point.host,
        target=target,
        metadata=Metadata(**manifest["metadata"]),
        attachments={name: blob.tobytes() for name, blob in zip(names, attachments, strict=True)},
        support=dict(zip(support_keys, _split(support_code.tobytes(), support_sizes), strict=True)),
        extra_entries=entries,
    )
    validate_values(data)
    functions = StoredFunctions(bytecode.tobytes(), ValidationContext.of(data))
    has_code = all(entry.host.object_code for entry in data.entries.values())
    if verify or not (to_run and has_code) or len(bytecode) <= DECODE_LIMIT:
        functions.decode()
    return replace(data, functions=functions)


def _entry_to_json(name: str, entry: Entry) -> list[Any]:
    return [name, asdict(entry.signature), len(entry.host.object_code), entry.host.heap_slots, entry.host.reason]


def _entries_from_json(items: list[Any], code: bytes) -> dict[str, Entry]:
    """Entries by name, including ENTRY."""
    objects = _split(code, [size for _, _, size, _, _ in items])
    entries = {}
    for (name, fields, _, heap_slots, reason), host_code in zip(items, objects, strict=True):
        signature = Signature(
            _specs_from_json(fields["inputs"]),
            _specs_from_json(fields["outputs"]),
            tuple(fields["donated"]),
            str(fields.get("structure", "")),
            tuple(fields.get("state", ())),
            tuple((str(name), str(form)) for name, form in fields.get("input_forms", ())),
            tuple((str(name), str(form)) for name, form in fields.get("output_forms", ())),
            tuple(map(str, fields.get("strings", ()))),
        )
        entries[str(name)] = Entry(signature, HostCode(host_code, heap_slots, reason))
    return entries


def _split(code: bytes, sizes: list[int]) -> tuple[bytes, ...]:
    """Split concatenated object files."""
    if sum(sizes) != len(code):
        raise ArtifactError(f"it is malformed: objects of {sum(sizes)} bytes in all, where there are {len(code)}")
    ends = list(itertools.accumulate(sizes))
    return tuple(code[end - size : end] for size, end in zip(sizes, ends, strict=True))


def _read_sections(
    content: np.ndarray, manifest: dict[str, Any], names: tuple[str, ...], *, verify: bool
) -> list[np.ndarray]:
    """Read and check all sections; `names`: of the sections before the weights. ArtifactError names a corrupted one."""
    sections = manifest["sections"]
    checks_whole = verify or sum(size for _, size, _, _ in sections[len(names) :]) <= CHECK_LIMIT
    blobs = []
    for index, (offset, size, crc, sampled_crc) in enumerate(sections):
        start = manifest["payload"] + offset
        blob = content[start : start + size]
        is_good = (
            zlib.crc32(blob.data) == crc
            if checks_whole or index < len(names)
            else _sampled_crc(blob.data) == sampled_crc
        )
        if offset < 0 or len(blob) != size or not is_good:
            number = index - len(names)
            section_name = f"weight {number}" if number >= 0 else names[index]
            raise ArtifactError(f"it is corrupted: {section_name} does not match its checksum")
        blobs.append(blob)
    return blobs


def _kernel_from_json(item: dict[str, Any]) -> KernelInfo:
    cost = item.get("cost")
    parsed_cost = None if cost is None else KernelCost(**{**cost, "symbols": tuple(cost["symbols"])})
    return KernelInfo(**{**item, "checks": tuple(item["checks"]), "cost": parsed_cost})


def _library_from_json(item: dict[str, Any]) -> LibraryInfo:
    return LibraryInfo(item["name"], tuple(item["symbols"]), item["file"], tuple(item["required"]))


def _specs_from_json(items: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            item["name"],
            item["dtype"],
            tuple(item["shape"]),
            {symbol: (lower, upper, divisor) for symbol, (lower, upper, divisor) in item["bounds"].items()},
            str(item.get("element", "")),
        )
        for item in items
    )


class StoredFunctions(Mapping[str, VMFunction]):
    """Bytecode functions of a file, decoded and validated at first access, as host functions need them only for errors.

    Access raises ArtifactError where the bytecode is malformed.
    """

    def __init__(self, encoded: bytes, surroundings: ValidationContext) -> None:
        self._encoded, self._surroundings = encoded, surroundings
        self._functions: Mapping[str, VMFunction] | None = None

    def decode(self) -> Mapping[str, VMFunction]:
        """Decode and validate all functions, once."""
        if self._functions is None:
            try:
                decoded = [_function_from_json(item) for item in json.loads(self._encoded)]
            except _MALFORMED as error:
                raise ArtifactError(f"its bytecode is malformed ({type(error).__name__}: {error})") from error
            functions = {function.name: function for function in decoded}
            validate_functions(functions, self._surroundings)
            self._functions = functions
        return self._functions

    def __getitem__(self, name: str) -> VMFunction:
        return self.decode()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decode())

    def __len__(self) -> int:
        return len(self.decode())


def _function_from_json(item: list[Any]) -> VMFunction:
    name, params, num_registers, code, (locations, location_numbers) = item
    instructions = tuple(map(_instruction_from_json, code))
    return VMFunction(
        name, tuple(params), num_registers, instructions, tuple(locations[number] for number in location_numbers)
    )


def _instruction_from_json(item: list[Any]) -> Instruction:
    match item:
        case ["call", int(dst), str(callee), *operands]:
            return Call(dst, callee, tuple(map(_operand_from_json, operands)))
        case ["ret", int(register)]:
            return Ret(register)
        case ["goto", int(target)]:
            return Goto(target)
        case ["if", int(register), int(else_target)]:
            return If(register, else_target)
    raise ArtifactError(f"it is malformed: {item!r} is not an instruction")


def _operand_from_json(item: list[Any]) -> Operand:
    match item:
        case ["r", int(index)]:
            return Reg(index)
        case ["c", int(index)]:
            return Const(index)
        case ["i", value]:
            return Imm(_freeze(value))
    raise ArtifactError(f"it is malformed: {item!r} is not an operand")


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
