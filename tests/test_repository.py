"""The rules of the house: layers, import time, and a README whose code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "relaxlite"

# What each part may import of relaxlite, beside itself.
BASE = {"errors", "config", "dtypes", "target", "version"}
LAYERS = {
    "errors": set(),
    "version": set(),
    "config": {"errors"},
    "dtypes": {"errors"},
    "target": {"errors", "config", "dtypes"},
    "models": {"errors", "config"},
    "ir": BASE,
    "runtime": {"errors", "config", "dtypes", "version"},
    "passes": BASE | {"ir"},
    "frontend": BASE | {"ir"},
    "codegen": BASE | {"ir", "runtime"},
    "driver": BASE | {"ir", "passes", "codegen", "runtime"},
    "cli": BASE | {"ir", "passes", "codegen", "runtime", "frontend", "driver", "models"},
}


def imported_parts(path: Path) -> set[str]:
    """The first-level parts of relaxlite that a file imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            base = node.module
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "relaxlite" else [base]
        found |= {n.split(".")[1] for n in names if n.startswith("relaxlite.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    above = imported_parts(path) - LAYERS[part] - {part}
    assert not above, f"{path.name} in {part} must not import {sorted(above)}"


def test_import_relaxlite_is_quick_and_light() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import relaxlite; took = time.perf_counter() - start;"
        "heavy = [m for m in ('sympy', 'onnx', 'llvmlite', 'numpy') if m in sys.modules]; assert not heavy, heavy;"
        "assert took < 0.3, took"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_compiling_never_imports_sympy() -> None:
    code = (
        "import sys, relaxlite as rl; bb = rl.BlockBuilder(); n = bb.symbol('n')\n"
        "with bb.function('main', x=rl.TensorType.of((n, n * 2), 'float32')) as (x,): bb.result(rl.ops.relu(x))\n"
        "rl.compile(bb.module()); assert 'sympy' not in sys.modules and 'onnx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_runtime_loads_without_the_compiler(tmp_path: Path) -> None:
    make = (
        "import relaxlite as rl; bb = rl.BlockBuilder(); n = bb.symbol('n')\n"
        "with bb.function('main', x=rl.TensorType.of((n,), 'float32')) as (x,): bb.result(rl.ops.relu(x))\n"
        f"rl.compile(bb.module()).save({str(tmp_path / 'm.rlx')!r})"
    )
    subprocess.run([sys.executable, "-c", make], check=True, cwd=ROOT)
    use = (
        f"import sys, relaxlite as rl; exe = rl.load({str(tmp_path / 'm.rlx')!r}); print(exe([1.5, -2.0]).tolist())\n"
        "bad = [m for m in sys.modules if m.startswith(('relaxlite.ir', 'relaxlite.passes', 'relaxlite.codegen',"
        " 'relaxlite.frontend', 'onnx', 'sympy'))]; assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", use], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[1.5, 0.0]"


README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(README_BLOCKS)))
def test_readme_code_runs(number: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", README_BLOCKS[number]], check=True, cwd=tmp_path, env=_with_path())


def _with_path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_no_source_file_is_too_long_to_read_in_one_sitting() -> None:
    long = {str(p.relative_to(ROOT)): n for p in PACKAGE.rglob("*.py") if (n := p.read_text("utf-8").count("\n")) > 600}
    assert not long, long
