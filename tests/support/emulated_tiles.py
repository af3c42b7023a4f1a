"""AMX tiles without AMX: each instruction becomes a call of Python, so kernels with tiles run on any processor.

The calls are those that relaxlite/codegen/llvm/amx.py describes, each with numbers, addresses and strides in bytes.
Objects hold the address of the Python function, so they are kept in a folder of their own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from relaxlite.codegen.llvm import extern_call
from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Val
from relaxlite.ir.program import Value
from relaxlite.runtime import cpu, libraries
from relaxlite.target import Target

Array: TypeAlias = "np.ndarray[Any, Any]"

_ROWS, _ROW_BYTES = 16, 64
_BF16 = np.dtype(ml_dtypes.bfloat16)
_OPERANDS: Mapping[str, tuple[DTypeLike, DTypeLike]] = {
    "dot": (np.int8, np.int8),
    "dot_unsigned": (np.int8, np.uint8),
    "dot_of_unsigned": (np.uint8, np.int8),
    "dot_bf16": (_BF16, _BF16),
}
_SIGNATURE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_TILE = np.zeros((_ROWS, _ROW_BYTES), np.uint8)


@dataclass
class Tiles:
    """What the calls of all threads have done."""

    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _threads: threading.local = field(default_factory=threading.local)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, symbol: str, *args: int) -> None:
        with self._lock:
            self.counts[symbol] = self.counts.get(symbol, 0) + 1
        try:
            self._run(symbol, args)
        except Exception as error:
            self.faults.append(f"{symbol}{args}: {error!r}")

    def _run(self, symbol: str, args: tuple[int, ...]) -> None:
        tiles = vars(self._threads)
        if symbol == "configure":
            if tiles:
                raise ValueError("tiles are configured already")
            tiles["depth"] = args[0]
        elif symbol == "release":
            tiles.clear()
        elif symbol == "clear":
            tiles["products", args[0]] = _TILE
        elif symbol == "start":
            tiles["products", args[0]] = np.tile(_memory(args[1], 0, 1, _ROW_BYTES), (_ROWS, 1))
        elif symbol == "take_x":
            tiles["x", args[0]] = _memory(args[1], args[2], _ROWS, tiles["depth"]).copy()
        elif symbol == "take_quads":
            tiles["quads", args[0]] = _memory(args[1], args[2], tiles["depth"] // 4, _ROW_BYTES).copy()
        elif symbol == "keep":
            _memory(args[1], args[2], _ROWS, _ROW_BYTES)[:] = tiles["products", args[0]]
        else:
            total, x, quads = tiles["products", args[0]], tiles["x", args[1]], tiles["quads", args[2]]
            tiles["products", args[0]] = _dot(total, x, quads, *_OPERANDS[symbol])


def _memory(address: int, stride: int, rows: int, width: int) -> Array:
    reach = (ctypes.c_uint8 * (stride * (rows - 1) + width)).from_address(address)
    return np.ndarray((rows, width), np.uint8, reach, strides=(stride, 1))


def _dot(total: Array, x: Array, quads: Array, left: DTypeLike, right: DTypeLike) -> Array:
    wide = np.float32 if left == _BF16 else np.int32
    a, b = x.view(left).astype(wide), quads.view(right).astype(wide)
    group = a.shape[1] // len(b)
    b = b.reshape(len(b), _ROWS, group).swapaxes(1, 2).reshape(-1, _ROWS)
    return (total.view(wide) + a @ b).view(np.uint8)


@contextmanager
def emulated_tiles(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[Target, Tiles]]:
    """This machine's processor with tiles, and what is done with them. Skips where it lacks what comes with tiles.

    No call may fail, and whoever configures tiles releases them. What is compiled inside runs inside only.
    """
    host, tiles = Target.host(), Tiles()
    if not host.has("avx512vnni"):
        pytest.skip("this processor has no VNNI of 512 bits, as all with tiles have")
    functions: dict[str, Any] = {}

    def function(symbol: str) -> Any:
        def call(*args: int) -> None:
            tiles.run(symbol, *args)

        return functions.setdefault(symbol, _SIGNATURE(call))

    def emit(k: KernelContext, symbol: str, values: Sequence[Val], args: Sequence[Value]) -> None:
        address = ctypes.cast(function(symbol), ctypes.c_void_p).value
        words = [f"ptr {v.text}" if v.elem == "ptr" else f"i64 {v.text}" for v in values]
        words += ["i64 0"] * (4 - len(words))
        k.forget_loads()
        k.e.line(f"call void inttoptr (i64 {address} to ptr)({', '.join(words)})")

    lacking: Callable[..., list[str]] = cpu.lacking
    with monkeypatch.context() as patch:
        patch.setenv("RELAXLITE_KERNEL_CACHE", str(folder))
        patch.setattr(extern_call, "emit_amx_routine", emit)
        patch.setattr(libraries, "_request_amx_permission", lambda: None)
        patch.setattr(cpu, "lacking", lambda names: [n for n in lacking(names) if not n.startswith("amx-")])
        has = tuple(f for f in host.features if "amx" not in f)
        try:
            yield replace(host, features=(*has, "+amx-tile", "+amx-int8", "+amx-bf16")), tiles
        finally:
            assert tiles.faults == []
    assert tiles.counts.get("configure", 0) == tiles.counts.get("release", 0)
