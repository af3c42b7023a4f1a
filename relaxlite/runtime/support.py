"""Native support code of the runtime: thread pool, scratch allocator, array reader.

The code is written in LLVM IR. For x86-64 Linux the compiler stores its object code in every executable, so that
running one needs no LLVM; elsewhere LLVM compiles the IR at first use.

The key of object code contains a checksum of its IR. So a runtime never links code of another version, and any of
several executables may supply it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping

from relaxlite.errors import ArtifactError
from relaxlite.records import dataclass
from relaxlite.runtime import elf, jit, linker

_lock = threading.Lock()
_objects: dict[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class SupportCode:
    """A module of support code. `imports`: system functions that it calls; `exports`: functions that it defines."""

    name: str
    ir: str
    imports: tuple[str, ...]
    exports: tuple[str, ...]

    @property
    def key(self) -> str:
        """Key of the object code, from the checksum of the IR."""
        text = self.ir.encode()  # not hashlib, which loads OpenSSL: memory (docs/measurements/backend.md)
        return f"{self.name}.{len(text)}.{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def register_objects(objects: Mapping[str, bytes]) -> None:
    """Register an executable's support code by key, for modules that are not linked yet."""
    if linker.is_supported():
        with _lock:
            for key, code in objects.items():
                _objects.setdefault(key, code)


def link(code: SupportCode, imports: Mapping[str, int]) -> dict[str, int]:
    """Link a module of support code; returns the addresses of its exports, valid until the process exits.

    `imports`: addresses by name. ArtifactError where registered object code is damaged; it is unregistered then.
    """
    with _lock:
        object_code = _objects.get(code.key)
    if object_code is None:
        return jit.link_text(code.ir, imports=imports, exports=code.exports, name=f"relaxlite_{code.name}")
    try:
        linked = linker.link([elf.read_object(object_code)], imports)
        addresses = {name: linked.address(name) for name in code.exports}
    except ArtifactError as error:
        with _lock:
            _objects.pop(code.key, None)
        raise ArtifactError(f"the runtime's own code ({code.name}) in the executable is damaged: {error}") from error
    linked.keep()  # threads may execute the code until the process exits
    return addresses
