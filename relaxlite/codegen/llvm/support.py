"""Compile the runtime's own functions for a target; executables contain the code, so that running needs no LLVM."""

from __future__ import annotations

import hashlib
from functools import cache

from relaxlite.codegen.kernel_cache import open_cache
from relaxlite.codegen.llvm.machine_code import llvm_version
from relaxlite.runtime import array_reader, jit, scratch, threadpool
from relaxlite.runtime.support import SupportCode
from relaxlite.target import Target

_TRIPLE, _CPU = "x86_64-unknown-linux-gnu", "x86-64"  # generic x86-64, as no extension makes this code faster


def compile_support(target: Target) -> dict[str, bytes]:
    """Object code by key (runtime/support.py); empty for targets where loading needs LLVM anyway."""
    is_linked = target.architecture == "x86_64" and "linux" in target.triple
    return dict(_compiled()) if is_linked else {}


@cache
def _compiled() -> dict[str, bytes]:
    codes = (
        threadpool.support_code("futex", "x86_64"),
        scratch.support_code("linux"),
        array_reader.support_code(),
    )
    return {code.key: _object_of(code) for code in codes}


def _object_of(code: SupportCode) -> bytes:
    """Object code of one part, by the kernel cache."""
    key = hashlib.sha256(f"support {llvm_version()} {_TRIPLE} {_CPU} {code.key}".encode()).hexdigest()
    store = open_cache()
    compiled = store.get(key) if store else None
    if compiled is None:
        compiled = jit.compile_text(code.ir, _TRIPLE, _CPU)
        if store:
            store.put({key: compiled})
    return compiled
