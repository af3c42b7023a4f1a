"""relaxlite: a compiler for machine-learning models whose tensor sizes are known only at run time.

    import relaxlite as rl
    module = rl.from_onnx("model.onnx")      # an IRModule; print(module) shows it
    exe = rl.compile(module)                 # native code for this processor
    y = exe(x)                               # NumPy arrays, or anything with DLPack
    exe.save("model.rlx"); exe = rl.load("model.rlx")
    exe = rl.load("model.onnx")              # all of that, and kept for the next process

Names are imported on first use: `import relaxlite` is fast, and running a saved model never imports the compiler.
"""

from __future__ import annotations

import importlib
from typing import Any

from relaxlite.version import __version__

_HOME = {
    "from_onnx": "relaxlite.frontend.onnx",
    "from_torch": "relaxlite.frontend.torch",
    "torch_op": "relaxlite.frontend.torch",
    "compile": "relaxlite.driver",
    "load": "relaxlite.loading",
    "register_library": "relaxlite.library",
    "register_function": "relaxlite.runtime.libraries",
    "tune": "relaxlite.tuner",
    "Tuning": "relaxlite.passes.schedule.tuning",
    "Executable": "relaxlite.runtime.module",
    "Target": "relaxlite.target",
    "IRModule": "relaxlite.ir.module",
    "BlockBuilder": "relaxlite.ir.builder",
    "TensorType": "relaxlite.ir.types",
    "SymVar": "relaxlite.ir.symbolic",
    "to_sympy": "relaxlite.ir.sympy_bridge",
    "from_sympy": "relaxlite.ir.sympy_bridge",
    "RelaxliteError": "relaxlite.errors",
}
_SUBMODULES = (
    "ir",
    "errors",
    "config",
    "driver",
    "runtime",
    "frontend",
    "passes",
    "codegen",
    "models",
    "machine",
    "llm",
    "torch",
)

__all__ = ["__version__", *_HOME, "ops"]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("relaxlite.ir.ops")
    if name in _SUBMODULES:
        return importlib.import_module(f"relaxlite.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'relaxlite' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
