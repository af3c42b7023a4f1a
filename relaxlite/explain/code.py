"""Code of each kernel (scheduled loops, LLVM IR, assembly), and compression of texts for the page."""

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

MAX_UNCOMPRESSED = 6_000  # characters; longer texts are compressed


@dataclass(frozen=True, slots=True)
class Code:
    """Scheduled loops, LLVM IR before optimization, and assembly of a kernel."""

    loops: str
    llvm: str
    assembly: str


def codes_of(kernels: Iterable[Kernel], target: Target) -> Iterator[Code]:
    """Generate the code of each kernel again, as the kernel cache holds machine code only.

    One thread emits LLVM IR, since symbolic integers are interned; LLVM compiles on all cores, as many kernels ahead of
    the consumer.
    """
    num_cores = usable_cores()
    pending: deque[tuple[Kernel, str, Future[str]]] = deque()
    with ThreadPoolExecutor(num_cores, "relaxlite-assembly") as pool:
        for kernel in kernels:
            text = emit_program(kernel.name, kernel.program, target)
            pending.append((kernel, text, pool.submit(to_assembly, text, target)))
            if len(pending) > num_cores:
                yield _finished(*pending.popleft())
        while pending:
            yield _finished(*pending.popleft())


def _finished(kernel: Kernel, text: str, assembly: Future[str]) -> Code:
    return Code(print_program(kernel.name, kernel.program), text, assembly.result())


def pack_text(text: str) -> dict[str, str]:
    """Pack a text for the page: {"text": ...}, or {"zlib": base64 of the deflated UTF-8 bytes} for a long text."""
    if len(text) <= MAX_UNCOMPRESSED:
        return {"text": text}
    return {"zlib": base64.b64encode(zlib.compress(text.encode(), 9)).decode()}


def packed_size(item: Mapping[str, str]) -> int:
    """Characters of a packed text."""
    return sum(map(len, item.values()))
