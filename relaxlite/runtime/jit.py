"""LLVM in the runtime, for linking and for host detection; llvmlite is imported lazily, and only here.

Loading LLVM is expensive (docs/measurements/backend.md). Running a saved model needs no LLVM where the runtime links
objects itself (linker.py) and the artifact contains the runtime's own code (support.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from relaxlite.errors import ArtifactError

_numbers = itertools.count()
_lock = threading.Lock()


@cache
def _llvm() -> Any:
    """Import and initialize llvmlite's binding. ArtifactError where llvmlite is not installed."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise ArtifactError(f"this needs LLVM here ({error}); `pip install llvmlite` adds it") from error

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def _linking_jit() -> Any:
    return _llvm().create_lljit_compiler(suppress_errors=True)


class JitCode:
    """Code linked by LLVM. Addresses are valid until `close`, or until the object is garbage-collected."""

    def __init__(self, jit: Any, tracker: Any, name: str, addresses: dict[str, int]) -> None:
        self._jit, self._tracker, self._name, self._addresses = jit, tracker, name, addresses

    def address(self, symbol: str) -> int:
        """Address of a function. ArtifactError where the symbol is not defined, or the library is closed."""
        if self._tracker is None:
            raise ArtifactError(f"symbol {symbol!r} asked of a library that is closed")
        if symbol not in self._addresses:
            try:
                addresses = self._jit.lookup(self._name, symbol)
            except RuntimeError as error:
                raise ArtifactError(f"no function {symbol!r} can be had from the object code: {error}") from error
            self._addresses[symbol] = int(addresses[symbol])
            addresses.detach()  # closing the lookup result would unload the library
        return self._addresses[symbol]

    def close(self) -> None:
        """Unload the code, which must not be running."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None
            self._addresses.clear()


def link_objects(objects: Sequence[bytes], symbols: Mapping[str, int], *, exports: Iterable[str] = ()) -> JitCode:
    """Link object files as one library. ArtifactError where LLVM fails.

    `symbols`: addresses of external symbols. `exports`: symbols to look up in bulk, which is faster than one by one.
    """
    builder = _llvm().JITLibraryBuilder()
    for code in objects:
        builder.add_object_img(code)
    for name, address in symbols.items():
        builder.import_symbol(name, address)
    exported = tuple(dict.fromkeys(exports))
    for name in exported:
        builder.export_symbol(name)
    with _lock:
        jit = _linking_jit()
        library = f"relaxlite.{next(_numbers)}"
        try:
            tracker = builder.link(jit, library)
        except RuntimeError as error:
            raise ArtifactError(f"object code could not be linked: {error}") from error
    return JitCode(jit, tracker, library, {name: int(tracker[name]) for name in exported})


def link_text(ir: str, *, imports: Mapping[str, int], exports: Sequence[str], name: str) -> dict[str, int]:
    """Compile LLVM IR for this machine and link it; returns the addresses of `exports`.

    The code is never unloaded, as threads may execute it until the process exits.
    """
    llvm = _llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, reloc="pic", jit=True
    )
    library = llvm.JITLibraryBuilder().add_object_img(_object_of(ir, machine))
    for symbol, address in imports.items():
        library.import_symbol(symbol, address)
    for symbol in exports:
        library.export_symbol(symbol)
    jit = llvm.create_lljit_compiler(machine)
    tracker = library.link(jit, name)
    addresses = {symbol: int(tracker[symbol]) for symbol in exports}
    tracker.detach()
    jit.detach()
    return addresses


def compile_text(ir: str, triple: str, cpu: str) -> bytes:
    """Compile LLVM IR to an object file, also for other machines than this one."""
    llvm = _llvm()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2, reloc="pic", codemodel="small")
    return _object_of(ir, machine)


def _object_of(ir: str, machine: Any) -> bytes:
    llvm = _llvm()
    module = llvm.parse_assembly(ir)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0))
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def host_cpu_name() -> str:
    """LLVM's name of this processor."""
    return str(_llvm().get_host_cpu_name())


def host_features() -> dict[str, bool]:
    """LLVM's feature names of this architecture -> whether this processor has the feature."""
    return dict(_llvm().get_host_cpu_features())
