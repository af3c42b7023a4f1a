"""The text of each kernel: its scheduled loops, LLVM IR and assembly, and how texts are kept in a page."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from relaxlite.codegen.llvm.machine_code import to_assembly
from relaxlite.codegen.llvm.module import emit_program
from relaxlite.explain.kernels import Kernel
from relaxlite.ir.program_printer import print_program
from relaxlite.target import Target

PLAIN = 6_000  # characters: longer texts are compressed


@dataclass(frozen=True, slots=True)
class Code:
    """The loops after scheduling, LLVM IR before LLVM's own passes, and assembly after them."""

    loops: str
    llvm: str
    assembly: str


def code_of(kernel: Kernel, target: Target) -> Code:
    """The code of a kernel, made again: what the cache of kernels holds is machine code only."""
    text = emit_program(kernel.name, kernel.program, target)
    return Code(print_program(kernel.name, kernel.program), text, to_assembly(text, target))


def packed(text: str) -> dict[str, str]:
    """{"text": ...}, or of a long text {"zlib": base64 of its UTF-8 bytes, deflated with zlib's header}."""
    if len(text) <= PLAIN:
        return {"text": text}
    return {"zlib": base64.b64encode(zlib.compress(text.encode(), 9)).decode()}


def packed_size(item: Mapping[str, str]) -> int:
    return sum(map(len, item.values()))
