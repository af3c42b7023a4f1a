"""Every knob of relaxlite in one table. The environment is read here and nowhere else.

    config.get("num_threads")
    config.set(num_threads=4)                      # for the rest of the process; None goes back to the environment
    with config.override(poison_memory=True): ...  # for a block, in this thread and every other

The value of a knob: what `set` or `override` said, else the environment variable RELAXLITE_<NAME>, else the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relaxlite.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    type: type
    default: Any
    doc: str

    @property
    def variable(self) -> str:
        return f"RELAXLITE_{self.name.upper()}"


_TABLE = (
    Knob("num_threads", int, 0, "Threads that work on one parallel loop; 0 means one per usable core."),
    Knob("cache_dir", str, "", "Folder of fetched models; empty: this platform's cache folder."),
    Knob("verify_passes", bool, False, "Run the IR verifier after every compiler pass."),
    Knob("dump_dir", str, "", "Folder for the IR after every pass and the generated code; empty: no dumps."),
    Knob("poison_memory", bool, False, "Fill fresh arenas and tensors with 0xFF (NaN), to show reads of garbage."),
)
KNOBS: dict[str, Knob] = {knob.name: knob for knob in _TABLE}

_overrides: dict[str, Any] = {}


def get(name: str) -> Any:
    """The present value of a knob. InvalidArgumentError: no such knob, or its environment variable cannot be read."""
    knob = _knob(name)
    if name in _overrides:
        return _overrides[name]
    text = os.environ.get(knob.variable, "").strip()
    if not text:
        return knob.default
    try:
        return _PARSERS[knob.type](text)
    except ValueError as error:
        kind = _KIND_TEXT[knob.type]
        raise InvalidArgumentError(f"environment variable {knob.variable} must be {kind}, got {text!r}") from error


def set(**values: Any) -> None:
    """Set knobs until the process ends; None undoes it."""
    for name, value in values.items():
        knob = _knob(name)
        if value is not None and type(value) is not knob.type:
            raise InvalidArgumentError(f"{name} must be {_KIND_TEXT[knob.type]}, got {value!r}")
    for name, value in values.items():
        if value is None:
            _overrides.pop(name, None)
        else:
            _overrides[name] = value


@contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set knobs for a block."""
    before = {name: _overrides.get(name) for name in values}
    set(**values)
    try:
        yield
    finally:
        set(**before)


def describe() -> str:
    """The table as text: name, present value, environment variable and meaning."""
    width = max(map(len, KNOBS))
    lines = [f"{k.name:<{width}}  {get(k.name)!r:<24}  {k.variable:<24}  {k.doc}" for k in KNOBS.values()]
    return "\n".join(lines) + "\n"


def _knob(name: str) -> Knob:
    if name not in KNOBS:
        raise InvalidArgumentError(f"there is no knob '{name}'; there are {', '.join(KNOBS)}")
    return KNOBS[name]


def _parse_bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


_PARSERS: dict[type, Callable[[str], Any]] = {int: int, str: str, bool: _parse_bool}
_KIND_TEXT = {int: "a whole number", str: "text", bool: "a boolean (1 or 0)"}
