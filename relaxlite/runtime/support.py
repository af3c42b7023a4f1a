"""The runtime's own machine code: the thread pool, scratch memory, and the reader of arrays.

It is written as LLVM IR. For x86-64 Linux the compiler puts its object code into every executable, so that a process
that only runs one links that and needs no LLVM; elsewhere LLVM compiles the text when it is first needed.

Object code goes by a checksum of the text that it was made from. So a runtime never takes what another version of it
was compiled from, and it does not matter which of several executables a process has linked it from.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping

from relaxlite.errors import ArtifactError
from relaxlite.records import dataclass
from relaxlite.runtime import elf, jit, linker

_lock = threading.Lock()
_offered: dict[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class SupportCode:
    """A piece of it. `imports`: the functions of the system that it calls; `exports`: those that it defines."""

    name: str
    ir: str
    imports: tuple[str, ...]
    exports: tuple[str, ...]

    @property
    def key(self) -> str:
        text = self.ir.encode()  # not by hashlib, which brings OpenSSL along: 4 MB of memory
        return f"{self.name}.{len(text)}.{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def offer(objects: Mapping[str, bytes]) -> None:
    """Object code of an executable, by key, for pieces that have not been linked so far."""
    if linker.is_supported():
        with _lock:
            for key, code in objects.items():
                _offered.setdefault(key, code)


def link(code: SupportCode, imports: Mapping[str, int]) -> dict[str, int]:
    """The addresses of its exports, which stay valid until the process ends. `imports`: addresses, by name.

    ArtifactError when the object code that an executable has brought is damaged; the next one does without it.
    """
    with _lock:
        result = _offered.get(code.key)
    if result is None:
        return jit.link_text(code.ir, imports=imports, exports=code.exports, name=f"relaxlite_{code.name}")
    try:
        linked = linker.link([elf.read_object(result)], imports)
        addresses = {name: linked.address(name) for name in code.exports}
    except ArtifactError as error:
        with _lock:
            _offered.pop(code.key, None)
        raise ArtifactError(f"the runtime's own code ({code.name}) in the executable is damaged: {error}") from error
    linked.keep()  # threads may be inside of it until the very end
    return addresses
