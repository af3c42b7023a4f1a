"""The text of each kernel: its scheduled loops, LLVM IR and assembly, and how texts are kept in a page."""

from __future__ import annotations

import base64
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from relaxlite.codegen.llvm.machine_code import to_assembly
from relaxlite.codegen.llvm.module import emit_program
from relaxlite.config import usable_cores
from relaxlite.explain.kernels import Kernel
from relaxlite.ir.program_printer import print_program
from relaxlite.records import dataclass
from relaxlite.target import Target

PLAIN = 6_000  # characters: longer texts are compressed


@dataclass(frozen=True, slots=True)
class Code:
    """The loops after scheduling, LLVM IR before LLVM's own passes, and assembly after them."""

    loops: str
    llvm: str
    assembly: str


def codes_of(kernels: Iterable[Kernel], target: Target) -> Iterator[Code]:
    """The code of each kernel, made again, as the cache of kernels holds machine code only. One thread emits, since
    symbolic integers are interned; LLVM works on all cores, ahead of who takes the codes by as many kernels."""
    width = usable_cores()
    pending: deque[tuple[Kernel, str, Future[str]]] = deque()
    with ThreadPoolExecutor(width, "relaxlite-assembly") as pool:
        for kernel in kernels:
            text = emit_program(kernel.name, kernel.program, target)
            pending.append((kernel, text, pool.submit(to_assembly, text, target)))
            if len(pending) > width:
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())


def _finished(kernel: Kernel, text: str, assembly: Future[str]) -> Code:
    return Code(print_program(kernel.name, kernel.program), text, assembly.result())


def packed(text: str) -> dict[str, str]:
    """{"text": ...}, or of a long text {"zlib": base64 of its UTF-8 bytes, deflated with zlib's header}."""
    if len(text) <= PLAIN:
        return {"text": text}
    return {"zlib": base64.b64encode(zlib.compress(text.encode(), 9)).decode()}


def packed_size(item: Mapping[str, str]) -> int:
    return sum(map(len, item.values()))
