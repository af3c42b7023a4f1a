"""Table of all knobs (settings) of relaxlite. No other module reads the environment.

    config.get("num_threads")
    config.set(num_threads=4)                      # for the rest of the process; None goes back to the environment
    with config.override(poison_memory=True): ...  # for a block, in this thread and every other

The value of a knob: from `set` or `override`, else from the environment variable RELAXLITE_<NAME>, else the default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relaxlite.errors import InvalidArgumentError, NoFolderError
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting: its name, type, default, documentation and the limits of its value."""

    name: str
    type: type
    default: Any
    doc: str
    limits: tuple[int, int] | None = None  # inclusive, of whole numbers

    @property
    def kind(self) -> str:
        """The permitted values in words, for error messages."""
        limits = f" from {self.limits[0]} to {self.limits[1]}" if self.limits else ""
        return {int: "a whole number", str: "text", bool: "a boolean (1 or 0)"}[self.type] + limits

    def accepts(self, value: object) -> bool:
        """Whether a value has the knob's type and is within its limits."""
        if type(value) is not self.type:
            return False
        return not self.limits or self.limits[0] <= value <= self.limits[1]  # type: ignore[operator]

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return f"RELAXLITE_{self.name.upper()}"


MAX_THREADS = 1024

_TABLE = (
    Knob("num_threads", int, None, "Threads that work on one loop; None: one per usable core.", (1, MAX_THREADS)),
    Knob("cache", str, "", "Folder of fetched and of compiled models; empty: this platform's cache folder."),
    Knob(
        "model_cache_mb", int, 10_000, "Megabytes of compiled models to keep; 0: none, and none are used.", (0, 10**6)
    ),
    Knob("kernel_cache", str, "", "Folder of compiled kernels; empty: this platform's cache folder."),
    Knob(
        "kernel_cache_mb", int, 1000, "Megabytes of compiled kernels to keep; 0: none, and none are used.", (0, 10**6)
    ),
    Knob("compile_threads", int, None, "Threads that make machine code; None: one per usable core.", (1, MAX_THREADS)),
    Knob("isolate_codegen", bool, False, "Run LLVM in child processes: where it aborts, the kernel is named."),
    Knob("verify_passes", bool, False, "Run the IR verifier after every compiler pass."),
    Knob("dump_dir", str, "", "Folder for the IR after every pass, as text; empty: no dumps."),
    Knob("huge_pages", bool, True, "Weights lie in huge pages: the file's, or copied to such; off: the file as it is."),
    Knob("interpret", bool, False, "Run bytecode in the interpreter, also where a model has a native host function."),
    Knob("tuning", str, "", "File of schedules that `relaxlite tune` has chosen; empty: as the rules say."),
    Knob("check_memory", bool, False, "Interpret, poison memory that is dead, and name what reads overwritten memory."),
    Knob("libraries", str, "", "Libraries that compiled models may call, with commas; none; empty: those that pay."),
    Knob("library_path", str, "", "Folders, separated as in PATH, in which libraries that models call are looked for."),
    Knob("poison_memory", bool, False, "Fill fresh arenas and tensors with 0xFF (NaN), to show reads of garbage."),
)
KNOBS: dict[str, Knob] = {knob.name: knob for knob in _TABLE}

_overrides: dict[str, Any] = {}


def get(name: str) -> Any:
    """Return the value of a knob. InvalidArgumentError for an unknown knob or an invalid environment variable."""
    knob = _knob(name)
    if name in _overrides:
        return _overrides[name]
    text = os.environ.get(knob.variable, "").strip()
    if not text:
        return knob.default
    value = _parse(knob.type, text)
    if not knob.accepts(value):
        raise InvalidArgumentError(f"environment variable {knob.variable} must be {knob.kind}, got {text!r}")
    return value


def set(**values: Any) -> None:
    """Set knobs for the rest of the process; None resets one. InvalidArgumentError for wrong names or values."""
    for name, value in values.items():
        knob = _knob(name)
        if value is not None and not knob.accepts(value):
            raise InvalidArgumentError(f"{name} must be {knob.kind}, got {value!r}")
    for name, value in values.items():
        if value is None:
            _overrides.pop(name, None)
        else:
            _overrides[name] = value


@contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set knobs for the duration of a `with` block, in all threads."""
    before = {name: _overrides.get(name) for name in values}
    set(**values)
    try:
        yield
    finally:
        set(**before)


@contextmanager
def system_variables(**values: str) -> Iterator[None]:
    """Set environment variables for the duration of a `with` block, for libraries loaded or processes started in it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def user_cache_folder() -> Path:
    """Return relaxlite's folder in the platform's per-user cache. RuntimeError if the user has no home folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "relaxlite"


def cache_folder(knob: str, part: str) -> Path:
    """Return the folder that a knob names, by default `part` of `user_cache_folder`. NoFolderError if unknown."""
    path = get(knob)
    try:
        return Path(path).expanduser() if path else user_cache_folder() / part
    except RuntimeError as error:  # as in a container whose user is a number without a name
        problem = f"no home folder for {path!r}" if path else "no home folder"
        raise NoFolderError(f"there is {problem}; set {KNOBS[knob].variable} to a folder") from error


def model_folder() -> Path:
    """Return the folder of fetched and compiled models: RELAXLITE_CACHE, or in the platform's cache folder.

    Raises NoFolderError if neither is known.
    """
    return cache_folder("cache", "models")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_threads() -> int:
    """Return the number of compiler threads: RELAXLITE_COMPILE_THREADS, or one per usable core."""
    return int(get("compile_threads") or usable_cores())


def describe() -> str:
    """Return the table of knobs as text: name, value, environment variable and documentation."""
    width = max(map(len, KNOBS))
    lines = [f"{k.name:<{width}}  {get(k.name)!r:<24}  {k.variable:<24}  {k.doc}" for k in KNOBS.values()]
    return "\n".join(lines) + "\n"


def _knob(name: str) -> Knob:
    if name not in KNOBS:
        raise InvalidArgumentError(f"there is no knob '{name}'; there are {', '.join(KNOBS)}")
    return KNOBS[name]


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse(kind: type, text: str) -> object:
    """Parse the text of an environment variable; None if it is invalid."""
    if kind is bool:
        return _BOOLEANS.get(text.lower())
    try:
        return kind(text)
    except ValueError:
        return None
