"""Programs to object code, one object for each that differs: from the cache, else emitted and compiled on all cores.

A kernel's key is a hash of its program, the target, the LLVM that is used and the source of the code generator itself
(with the IR that it reads). The key is also the kernel's symbol, so that equal programs of a model share one object and
objects of several models can be linked together.
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
from relaxlite.codegen.llvm.module import KernelText, emit_kernel, emit_program
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
    "llvm_names.py",
    "runtime/host.py",
    "runtime/libraries.py",
)  # all that decides about code
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """Machine code of kernels as relocatable object files, and what to call in them, by program name."""

    objects: tuple[bytes, ...]
    kernels: dict[str, KernelInfo]
    num_compiled: int  # of the objects: by LLVM, now; the others came from the cache
    timings: dict[str, float]  # seconds: "look_up", "emit", "llvm"


@dataclass(frozen=True, slots=True)
class _Object:
    checks: tuple[str, ...]
    code: bytes

    def pack(self) -> bytes:
        checks = json.dumps(self.checks).encode()
        return _LENGTH.pack(len(checks)) + checks + self.code

    @staticmethod
    def unpack(content: bytes) -> _Object:
        start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        return _Object(tuple(json.loads(content[_LENGTH.size : start])), content[start:])


def compile_programs(programs: Mapping[str, TensorProgram], target: Target) -> ObjectCode:
    """Object code for `target`. CodegenError names the program that could not be compiled, and where its code is."""
    start = time.perf_counter()
    keys = {name: _key_of(name, program, target) for name, program in programs.items()}
    store = open_cache()
    objects: dict[str, _Object] = {}
    missing: dict[str, str] = {}  # the first program of a key
    for name, key in keys.items():
        if key in objects or key in missing:
            continue
        content = store.get(key) if store else None
        if content is None:
            missing[key] = name
        else:
            objects[key] = _Object.unpack(content)
    looked_up = time.perf_counter()
    texts = {key: _emit(name, programs[name], target, _symbol(key)) for key, name in missing.items()}
    emitted = time.perf_counter()
    result = _compile_texts(texts, missing, target)
    objects |= result
    if store and result:
        store.put({key: item.pack() for key, item in result.items()})
    done = time.perf_counter()
    return ObjectCode(
        objects=tuple(objects[key].code for key in dict.fromkeys(keys.values())),
        kernels={
            name: KernelInfo(
                name, _symbol(key), objects[key].checks, len(programs[name].params), len(programs[name].symbols)
            )
            for name, key in keys.items()
        },
        num_compiled=len(result),
        timings={"look_up": looked_up - start, "emit": emitted - looked_up, "llvm": done - emitted},
    )


def emit_assembly(programs: Mapping[str, TensorProgram], target: Target) -> str:
    """The machine code as text, for people."""
    return "\n".join(machine_code.to_assembly(emit_program(name, p, target), target) for name, p in programs.items())


def _key_of(name: str, program: TensorProgram, target: Target) -> str:
    try:
        return hashlib.sha256(f"{generator_key(target)} {fingerprint(program)}".encode()).hexdigest()
    except TypeError as error:
        raise CodegenError(f"program {name!r}: {error}") from error


def _symbol(key: str) -> str:
    return f"kernel_{key[:32]}"


@cache
def generator_key(target: Target) -> str:
    """Everything but the program that the code of a kernel or a host function depends on."""
    parts = [__version__, llvmlite.__version__, machine_code.llvm_version(), repr(target)]
    return hashlib.sha256("\n".join([*parts, *map(sources_key, _SOURCES)]).encode()).hexdigest()


def _emit(name: str, program: TensorProgram, target: Target, symbol: str) -> KernelText:
    try:
        return emit_kernel(name, program, target, symbol)
    except CodegenError as error:
        raise CodegenError(
            f"{error}\n  hint: the program is in {_keep(name, '.py', print_program(name, program))}"
        ) from error


def _compile_texts(texts: Mapping[str, KernelText], names: Mapping[str, str], target: Target) -> dict[str, _Object]:
    """LLVM's part, on several threads: the most text first, so that no thread is left with much at the end."""
    if not texts:
        return {}
    threads = min(config.compile_threads(), len(texts))
    with isolated.Compilers(target) if config.get("isolate_codegen") else _InProcess(target) as to_object:
        in_order = sorted(texts, key=lambda key: -len(texts[key].text))
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
    result = dict(zip(in_order, codes, strict=True))
    return {key: _Object(text.checks, result[key]) for key, text in texts.items()}


def _compile_one(
    to_object: Callable[[str], bytes], texts: Mapping[str, KernelText], names: Mapping[str, str], key: str
) -> bytes:
    text = texts[key].text
    try:
        return to_object(text)
    except CodegenError as error:
        raise CodegenError(
            f"program {names[key]!r}: {error}\n  hint: its LLVM IR is in {_keep(names[key], '.ll', text)}"
        ) from error


def _keep(name: str, suffix: str, text: str) -> str:
    """Write a program that failed, or its code, to where a person finds it."""
    folder = config.get("dump_dir") or tempfile.gettempdir()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"relaxlite-{re.sub(r'[^A-Za-z0-9_]', '_', name)[:80]}{suffix}"
    path.write_text(text)
    return str(path)


class _InProcess:
    """The plain way to use LLVM, in the form of isolated.Compilers."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __enter__(self) -> Callable[[str], bytes]:
        return partial(machine_code.to_object, target=self._target)

    def __exit__(self, *_: object) -> None:
        pass
