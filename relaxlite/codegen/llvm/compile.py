"""Compile programs to object files, one per distinct program, by the on-disk cache and on all cores.

A kernel's key is a hash of its program, the target, LLVM's version and the source of the code generator (with the IR).
The kernel's symbol contains the key, so equal programs of a model share one object, and objects of several models can
be linked together.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import llvmlite

from relaxlite import config
from relaxlite.codegen.kernel_cache import open_cache, sources_key
from relaxlite.codegen.llvm import isolated, machine_code
from relaxlite.codegen.llvm.module import KernelText, emit_kernel
from relaxlite.errors import CodegenError
from relaxlite.ir.encoding import fingerprint
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.program_printer import print_program
from relaxlite.records import dataclass
from relaxlite.runtime.executable import KernelInfo
from relaxlite.target import Target
from relaxlite.version import __version__

_SOURCES = (
    "codegen/**/*.py",
    "ir/*.py",
    "dtypes.py",
    "target.py",
    "cpus.py",
    "gpus.py",
    "llvm_names.py",
    "runtime/executable.py",
    "runtime/host.py",
    "runtime/libraries.py",
)  # all sources that decide about generated code
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """Relocatable object files of kernels, PTX of their launches, and the kernels' symbols by program name."""

    objects: tuple[bytes, ...]
    device_modules: tuple[bytes, ...]
    kernels: dict[str, KernelInfo]
    num_compiled: int  # objects that LLVM compiled; the others come from the cache
    timings: dict[str, float]  # seconds: "look_up", "emit", "llvm"


@dataclass(frozen=True, slots=True)
class _Object:
    """A cache entry: object code, the messages of the kernel's checks, and PTX of its launches."""

    checks: tuple[str, ...]
    code: bytes
    launches: int = 0
    device: bytes = b""

    def pack(self) -> bytes:
        head = json.dumps((self.checks, self.launches, len(self.device))).encode()
        return _LENGTH.pack(len(head)) + head + self.device + self.code

    @staticmethod
    def unpack(content: bytes) -> _Object:
        start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        checks, launches, length = json.loads(content[_LENGTH.size : start])
        return _Object(tuple(checks), content[start + length :], launches, content[start : start + length])


def compile_programs(programs: Mapping[str, TensorProgram], target: Target) -> ObjectCode:
    """Compile programs by name for a target.

    CodegenError names the program that cannot be compiled, and the file with its text.
    """
    start = time.perf_counter()
    keys = {name: _key_of(name, program, target) for name, program in programs.items()}
    store = open_cache()
    objects: dict[str, _Object] = {}
    uncached: dict[str, str] = {}  # key -> name of its first program
    for name, key in keys.items():
        if key in objects or key in uncached:
            continue
        content = store.get(key) if store else None
        if content is None:
            uncached[key] = name
        else:
            objects[key] = _Object.unpack(content)
    looked_up = time.perf_counter()
    texts = {key: _emit(name, programs[name], target, _symbol(key)) for key, name in uncached.items()}
    emitted = time.perf_counter()
    compiled = _compile_texts(texts, uncached, target)
    objects |= compiled
    if store and compiled:
        store.put({key: item.pack() for key, item in compiled.items()})
    done = time.perf_counter()
    in_order = [objects[key] for key in dict.fromkeys(keys.values())]
    return ObjectCode(
        objects=tuple(item.code for item in in_order),
        device_modules=tuple(item.device for item in in_order if item.device),
        kernels={name: _kernel_info(name, programs[name], key, objects[key]) for name, key in keys.items()},
        num_compiled=len(compiled),
        timings={"look_up": looked_up - start, "emit": emitted - looked_up, "llvm": done - emitted},
    )


def _kernel_info(name: str, program: TensorProgram, key: str, item: _Object) -> KernelInfo:
    counts = len(program.params), len(program.symbols)
    return KernelInfo(name, _symbol(key), item.checks, *counts, launches=item.launches)


def emit_assembly(programs: Mapping[str, TensorProgram], target: Target) -> str:
    """Assembly text of programs, for inspection: PTX of launches, and machine code of programs without launches."""
    return "\n".join(_assembly_of(name, program, target) for name, program in programs.items())


def _assembly_of(name: str, program: TensorProgram, target: Target) -> str:
    kernel = emit_kernel(name, program, target, re.sub(r"[^A-Za-z0-9_]", "_", f"kernel_{name}"))
    if kernel.device:
        return machine_code.to_assembly(kernel.device, target)
    return machine_code.to_assembly(kernel.text, target.host_part)


def _key_of(name: str, program: TensorProgram, target: Target) -> str:
    try:
        return hashlib.sha256(f"{generator_key(target)} {fingerprint(program)}".encode()).hexdigest()
    except TypeError as error:
        raise CodegenError(f"program {name!r}: {error}") from error


def _symbol(key: str) -> str:
    return f"kernel_{key[:32]}"


@cache
def generator_key(target: Target) -> str:
    """Hash of everything except the program that generated code depends on: versions, target, sources."""
    parts = [__version__, llvmlite.__version__, machine_code.llvm_version(), repr(target), repr(target.host_part)]
    return hashlib.sha256("\n".join([*parts, *map(sources_key, _SOURCES)]).encode()).hexdigest()


def _emit(name: str, program: TensorProgram, target: Target, symbol: str) -> KernelText:
    try:
        return emit_kernel(name, program, target, symbol)
    except CodegenError as error:
        raise CodegenError(
            f"{error}\n  hint: the program is in {_dump(name, '.py', print_program(name, program))}"
        ) from error


def _compile_texts(texts: Mapping[str, KernelText], names: Mapping[str, str], target: Target) -> dict[str, _Object]:
    """Compile kernels to objects: the host's parts, and the launches."""
    hosts = {key: text.text for key, text in texts.items()}
    devices = {key: text.device for key, text in texts.items() if text.device}
    codes = _compile_all(hosts, names, target.host_part, is_isolated=bool(config.get("isolate_codegen")))
    modules = _compile_all(devices, names, target, is_isolated=True)  # LLVM's NVPTX aborts on some input
    return {key: _Object(text.checks, codes[key], text.launches, modules.get(key, b"")) for key, text in texts.items()}


def _compile_all(
    texts: Mapping[str, str], names: Mapping[str, str], target: Target, *, is_isolated: bool
) -> dict[str, bytes]:
    """Compile LLVM IR on several threads, the longest text first for even load."""
    if not texts:
        return {}
    threads = min(config.compile_threads(), len(texts))
    with isolated.Compilers(target) if is_isolated else _InProcess(target) as to_object:
        in_order = sorted(texts, key=lambda key: -len(texts[key]))
        work = partial(_compile_one, to_object, texts, names)
        if threads == 1:
            codes = list(map(work, in_order))
        else:
            with ThreadPoolExecutor(threads, "relaxlite-codegen") as pool:
                try:
                    codes = list(pool.map(work, in_order))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    return dict(zip(in_order, codes, strict=True))


def _compile_one(
    to_object: Callable[[str], bytes], texts: Mapping[str, str], names: Mapping[str, str], key: str
) -> bytes:
    text = texts[key]
    try:
        return to_object(text)
    except CodegenError as error:
        raise CodegenError(
            f"program {names[key]!r}: {error}\n  hint: its LLVM IR is in {_dump(names[key], '.ll', text)}"
        ) from error


def _dump(name: str, suffix: str, text: str) -> str:
    """Write a program that failed, or its IR, to the dump folder; returns the path."""
    folder = config.get("dump_dir") or tempfile.gettempdir()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"relaxlite-{re.sub(r'[^A-Za-z0-9_]', '_', name)[:80]}{suffix}"
    path.write_text(text)
    return str(path)


class _InProcess:
    """LLVM in this process, with the interface of isolated.Compilers."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> Callable[[str], bytes]:
        return partial(machine_code.to_object, target=self._target)

    def __exit__(self, *_: object) -> None:
        pass
