"""The rules of the house: layers, import time, knobs, examples. Documents: test_documents.py."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import relaxlite
from relaxlite import config
from tests.support.paths import ROOT

PACKAGE = ROOT / "relaxlite"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

# What each part may import of relaxlite, beside itself.
BASE = {"errors", "config", "cpus", "dtypes", "features", "gpus", "records", "target", "version"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "garbage": set(),
    "records": set(),
    "config": {"errors", "records"},
    "forms": set(),
    "strings": {"errors"},
    "dtypes": {"errors"},
    "features": set(),
    "cpus": {"records"},
    "gpus": {"records"},
    "llvm_names": {"features"},
    "target": {"errors", "cpus", "features", "gpus", "llvm_names", "records"},
    "nesting": {"errors", "dtypes", "records"},
    "models": {"errors", "config", "records"},
    "ir": BASE,
    "runtime": {"errors", "config", "dtypes", "features", "garbage", "nesting", "records", "version"}
    | {"forms", "strings"},
    "model_cache": {"errors", "config", "records", "version", "runtime"},
    "passes": BASE | {"ir"},
    "frontend": BASE | {"ir", "garbage", "nesting", "forms", "strings"},
    "codegen": BASE | {"ir", "runtime"},
    "validation": BASE | {"ir", "passes", "codegen", "runtime"},
    "library": BASE | {"ir", "passes", "runtime"},
    "updatable": BASE | {"ir", "runtime"},
    "weights_update": BASE | {"ir", "runtime", "frontend", "nesting", "updatable"},
    "signature": BASE | {"forms", "ir", "passes", "runtime"},
    "driver": BASE
    | {"garbage", "ir", "passes", "codegen", "runtime", "signature", "updatable", "weights_update", "validation"}
    | {"library"},
    "torch": BASE | {"ir", "runtime", "frontend", "driver", "nesting"},
    "loading": BASE | {"ir", "model_cache", "runtime", "frontend", "driver", "passes"},
    "revalidate": BASE | {"ir", "passes", "driver", "validation"},
    "machine": BASE | {"ir", "runtime", "driver"},
    "tuner": BASE | {"ir", "passes", "runtime", "driver", "signature"},
    "llm": BASE | {"ir", "passes", "runtime", "frontend", "driver", "signature", "model_cache", "loading"},
    "explain": BASE | {"ir", "passes", "codegen", "runtime", "driver"},
    "__main__": {"cli"},
    "cli": BASE
    | {"ir", "passes", "codegen", "runtime", "frontend", "driver", "models", "machine", "tuner", "llm", "explain"}
    | {"library", "model_cache", "loading", "signature", "validation"},
}
# Files that stand above their part, which must not import them: interfaces of others, on top of the compiler.
INTERFACES = {"frontend/onnx/backend.py": {"driver"}}
# The rooms of passes/, lowest first: each imports those before it, and the files that stand above all rooms.
ROOMS = ("loops", "schedule.primitives", "products", "schedule", "graph", "fuse", "memory")
ABOVE_ROOMS = ("context", "cost", "manager", "pipeline")
# Imports inside functions: of optional packages, and these.
LATE_IMPORTS = {
    "relaxlite/cli/bench.py": {"onnxruntime"},
    "relaxlite/cli/chat.py": {"readline"},  # not on every platform
    "relaxlite/cli/compile.py": {"relaxlite.cli.compiling_llm"},  # tokenizers and templates, for language models only
    "relaxlite/cli/compiling.py": {"relaxlite.cli.compiling_llm"},  # the same
    "relaxlite/cli/demo.py": {"relaxlite.cli.demo_pictures"},  # Pillow and the ONNX importer
    "relaxlite/cli/language.py": {"relaxlite.cli.compiling_llm"},  # the compiler, see cli/__init__.py
    "relaxlite/cli/inspect.py": {"relaxlite.cli.inspect_ir"},  # the compiler, see cli/__init__.py
    "relaxlite/cli/opening.py": {"relaxlite.cli.compiling"},  # the compiler, see cli/__init__.py
    "relaxlite/cli/profile.py": {"relaxlite.machine"},  # the compiler, see cli/__init__.py
    "relaxlite/driver.py": {"relaxlite.weights_update"},  # the readers of checkpoints, for other weights only
    "relaxlite/dtypes.py": {"ml_dtypes"},  # 2 MB, for bfloat16 only
    "relaxlite/frontend/llm/gguf_grids.py": {"gguf"},  # 0.2 s to import, for formats that few files have
    "relaxlite/frontend/llm/gguf_tokenizer.py": {"tokenizers"},  # half a second to import
    "relaxlite/ir/sympy_bridge.py": {"sympy"},  # optional
    "relaxlite/ir/module.py": {"relaxlite.ir.printer"},  # the printer knows every node
    "relaxlite/llm/loading.py": {"relaxlite.llm.compiling", "relaxlite.model_cache"},  # as relaxlite/loading.py
    "relaxlite/llm/model.py": {"relaxlite.llm.templates"},  # Jinja2, and with it OpenSSL: 7 MB, for chats only
    "relaxlite/strings.py": {"hashlib"},  # OpenSSL again, for models with text only
    "relaxlite/llm/tokenizer.py": {"tokenizers"},  # 5 MB, which giving and taking tokens does without
    # the compiler; OpenSSL by the cache's hashes: 4 MB, which opening a compiled file does without
    "relaxlite/loading.py": {
        *("relaxlite.driver", "relaxlite.frontend.onnx", "relaxlite.frontend.torch", "relaxlite.model_cache"),
    },
    "relaxlite/runtime/border.py": {"ml_dtypes"},  # 2 MB, for narrow types only
    "relaxlite/runtime/host_operators.py": {"PIL"},  # optional, for models that decode pictures
    "relaxlite/runtime/jit.py": {"llvmlite.binding"},  # 67 MB, which running a saved model does without
    "relaxlite/runtime/module.py": {"relaxlite.runtime.profile"},  # with decimals and HTML, for profiles only
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import of a file, also inside functions and under TYPE_CHECKING, with the module that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module == "relaxlite":
                yield from ((node, f"relaxlite.{alias.name}") for alias in node.names)
            elif node.module:
                yield node, node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    names = {name for _, name in imported_modules(tree_of(path))}
    assert not names & {"relaxlite", "tests", "examples", "bench"}, "name the part of relaxlite"
    allowed = LAYERS[part] | {part} | INTERFACES.get(path.relative_to(PACKAGE).as_posix(), set())
    above = {name.split(".")[1] for name in names if name.startswith("relaxlite.")} - allowed
    assert not above, f"{path.name} in {part} must not import {sorted(above)}"


def room_of(module: str) -> str:
    """The room of passes/ that a module is in; the last parts of its name where it is in none."""
    inside = module.removeprefix("relaxlite.passes.")
    return max((room for room in ROOMS if f"{inside}.".startswith(f"{room}.")), key=len, default=inside)


@pytest.mark.parametrize("path", sorted((PACKAGE / "passes").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_between_rooms_point_downwards(path: Path) -> None:
    own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tree = tree_of(path)
    hints = {id(n) for node in ast.walk(tree) if is_for_type_checkers(node) for n in ast.walk(node)}
    names = [name for node, name in imported_modules(tree) if id(node) not in hints]
    rooms = {room_of(name) for name in names if name.startswith("relaxlite.passes.")} - {own}
    if own in ROOMS:
        assert rooms <= {*ROOMS[: ROOMS.index(own)], "context", "manager", "cost"}
    elif own != "pipeline":
        assert not rooms & {*ROOMS, "pipeline"}, "only the pipeline names what is in the rooms"


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_only_what_stands_above_the_rooms_lies_beside_them() -> None:
    assert {p.stem for p in (PACKAGE / "passes").glob("*.py")} == {"__init__", *ABOVE_ROOMS}
    assert {p.name for p in (PACKAGE / "passes").iterdir() if p.is_dir() and p.name != "__pycache__"} == {
        room for room in ROOMS if "." not in room
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stand_at_the_top(path: Path) -> None:
    tree = tree_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    late = {name for function in functions for _, name in imported_modules(function)}
    assert late <= LATE_IMPORTS.get(path.relative_to(ROOT).as_posix(), set())


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("tokenizers", ["frontend/llm/gguf_tokenizer.py", "llm/tokenizer.py"]),  # makes tokenizers, runs them
        ("gguf", ["frontend/llm/gguf_grids.py"]),
        ("jinja2", ["llm/templates.py"]),
        (
            "llvmlite",
            ["codegen/llvm/compile.py", "codegen/llvm/machine_code.py", "driver.py", "explain/explanation.py",
             "llvm_names.py", "runtime/jit.py", "target.py"],
        ),
    ],
)  # fmt: skip
def test_packages_are_imported_where_they_are_wrapped(package: str, homes: list[str]) -> None:
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        if package in {name.split(".")[0] for _, name in imported_modules(tree_of(path))}
    ]
    assert users == homes


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_use_what_is_public(path: Path) -> None:
    names = {name for _, name in imported_modules(tree_of(path))}
    own = {name for name in names if name.startswith("relaxlite.")}
    assert not [name for name in own if "._" in name or name.startswith(("relaxlite.cli", "relaxlite.codegen"))]


def test_no_source_file_is_too_long_to_read_in_one_sitting() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := p.read_text("utf-8").count("\n")) > 600}
    assert not long, long


# Importing


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_relaxlite_is_quick_and_light() -> None:
    python(
        "import sys, time; start = time.process_time(); import relaxlite; took = time.process_time() - start;"
        "heavy = [m for m in ('sympy', 'onnx', 'llvmlite', 'numpy') if m in sys.modules]; assert not heavy, heavy;"
        "assert took < 0.3, took"
    )


@pytest.mark.parametrize("name", [*relaxlite.__all__, *relaxlite.__dir__()])
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(relaxlite, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'relaxlite' has no attribute 'compute'"):
        relaxlite.compute  # noqa: B018


BUILD = (
    "import sys, relaxlite as rl; bb = rl.BlockBuilder(); n = bb.symbol('n')\n"
    "with bb.function('main', x=rl.TensorType.of((n, n * 2), 'float32')) as (x,): bb.result(rl.ops.relu(x))\n"
)


def test_compiling_never_imports_sympy() -> None:
    python(BUILD + "rl.compile(bb.module()); assert 'sympy' not in sys.modules and 'onnx' not in sys.modules")


def test_the_runtime_loads_without_the_compiler(tmp_path: Path) -> None:
    file = str(tmp_path / "m.rlx")
    python(BUILD + f"rl.compile(bb.module()).save({file!r})")
    out = python(
        f"import sys, relaxlite as rl; exe = rl.load({file!r}); print(exe([[1.5, -2.0]]).tolist())\n"
        "bad = [m for m in sys.modules if m.startswith(('relaxlite.ir', 'relaxlite.passes', 'relaxlite.codegen',"
        " 'relaxlite.frontend', 'onnx', 'sympy'))]; assert not bad, bad"
    )
    assert out.strip() == "[[1.5, 0.0]]"


# Knobs


def test_only_config_reads_our_environment_variables() -> None:
    """Others may name a variable in a message, and read those of the system."""
    readers = [p for p in SOURCES if re.search(r"(environ|getenv)\W.*RELAXLITE_", p.read_text("utf-8"))]
    assert readers == []
    assert [p.name for p in SOURCES if re.search(r"\benviron\b", p.read_text("utf-8")) and p.name != "models.py"] == [
        "config.py"
    ]


@pytest.mark.parametrize("path", [*SOURCES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda p: p.name)
def test_every_variable_that_is_named_exists(path: Path) -> None:
    known = {knob.variable for knob in config.KNOBS.values()}
    assert set(re.findall(r"RELAXLITE_[A-Z_]*[A-Z]", path.read_text("utf-8"))) <= known


# Examples

FETCHES = re.compile(r'models\.fetch\("([\w-]+)"\)')


def example(path: Path) -> object:
    is_fetching = FETCHES.search(path.read_text("utf-8")) is not None
    return pytest.param(path, id=path.name, marks=[pytest.mark.models] if is_fetching else [])


@pytest.mark.parametrize("path", [example(path) for path in EXAMPLES])
def test_examples_print_what_they_say(path: Path, tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    source = path.read_text("utf-8")
    assert source.count("\n") <= 80
    for name in FETCHES.findall(source):
        model_path(name)  # skips when it cannot be had
    promised = (ast.get_docstring(ast.parse(source), clean=False) or "").partition("\n\n")[2]
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == promised.strip()
