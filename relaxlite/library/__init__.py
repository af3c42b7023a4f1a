"""Registration of library rules: routines that compiled models call in place of generated kernels.

    with_gelu = is_op("gelu")(is_op("add")(is_op("matmul")(wildcard("x"), wildcard("w")), wildcard("b")))
    rl.register_library("fast_mlp", with_gelu, {"x": ("m", "k"), "w": ("k", "n"), "b": ("n",)}, function=fast_mlp)

`register_library` adds rules; `rules_for` selects the rules of a compilation, with OpenBLAS last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from relaxlite import config
from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.pattern import Match, Pattern
from relaxlite.library.openblas import openblas_rules
from relaxlite.passes.fuse.library_rules import LibraryRule, OperandDims, SizeRange
from relaxlite.runtime import libraries
from relaxlite.runtime.libraries import OPENBLAS, PYTHON
from relaxlite.target import Target

_rules: dict[str, LibraryRule] = {}  # the newest last; matched in reverse order


class Registration:
    """Registered rule; as a context manager, registered for the block only."""

    def __init__(self, rule: LibraryRule) -> None:
        self.rule = rule

    def unregister(self) -> None:
        """Remove the rule from the table. Compiled models keep it."""
        if _rules.get(self.rule.name) is self.rule:
            del _rules[self.rule.name]
            if self.rule.library == PYTHON:
                libraries.unregister_function(self.rule.symbol)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.unregister()


def register_library(
    name: str,
    pattern: Pattern,
    operands: Mapping[str, OperandDims | None],
    *,
    function: Callable[..., None] | None = None,
    library: str = "",
    symbol: str = "",
    arguments: Sequence[str] = (),
    returns: Literal["nothing", "status"] = "nothing",
    loops: Mapping[str, str] | None = None,
    when: Mapping[str, SizeRange] | None = None,
    check: Callable[[Match], str | None] | None = None,
    work: str = "0",
    fallback: bool = True,
) -> Registration:
    """Register a routine that models compiled from now on call wherever `pattern` (relaxlite.ir.pattern) matches.

    `operands`: the captured names of the pattern in the order of the routine, each with names or sizes of its
    dimensions (None: any shape); dimensions of one name must be equal. Results have the type of the matched op: "out"
    names a single result, "out0", "out1", ... several. Arrays are dense, row-major and aligned to their elements.

    The routine is either a Python `function` of NumPy arrays (the operands, read-only, then the results, which it
    fills), looked up by `name` when a saved model is loaded; or a C function, `symbol` of the shared library `library`
    (a file, or "openblas"), with `arguments`:

        "int32 m * 2", "int64 n"         expressions of the dimensions: + - * // % min(...) max(...)
        "float32 1.0", "float64 0.5"     constants
        "float32* a", "float32* out[i, 64 * j, 0]"    the address of an element of an array of this dtype

    `returns="status"`: the routine returns a C int, and the call fails unless it is 0. `loops`: names and extents of
    loops around the call, whose variables arguments may use. Iterations must write disjoint memory, as the first loop
    runs in parallel; `work`, an expression of about how many instructions a call takes, limits the number of threads.

    `when`: expressions with their ranges (None: no limit), as {"m": (64, None)}. Conditions that the bounds of the
    model do not decide are evaluated at run time, with a generated kernel as the fallback. Sizes may be 0 unless `when`
    excludes it. `check`: returns a reason against a match, or None. `fallback=False`: no generated kernel for a missing
    library; loading fails instead.

    The rule registered last matches first. PassContext.decisions records which rules apply, and why others do not.
    Raises InvalidArgumentError for an invalid rule or a name that exists, LibraryError for a missing library or symbol.
    """
    if name in _rules:
        raise InvalidArgumentError(f"library rule '{name}' exists; unregister it, or take another name")
    if (function is None) == (not (library and symbol)):
        raise InvalidArgumentError(f"library rule '{name}': give either a Python function, or library and symbol")
    rule = LibraryRule(
        name=name,
        library=PYTHON if function is not None else _library_name(library),
        symbol=name if function is not None else symbol,
        pattern=pattern,
        operands=dict(operands),
        arguments=tuple(arguments),
        convention="arrays" if function is not None else "status" if returns == "status" else "c",
        loops=dict(loops or {}),
        when=dict(when or {}),
        check=check,
        work=work,
        keeps_fallback=fallback,
        file="" if function is not None or library == OPENBLAS else library,
    )
    rule.validate()
    if function is not None:
        libraries.register_function(name, function)
    else:
        _check_library(rule)
    _rules[name] = rule
    return Registration(rule)


def registered() -> tuple[str, ...]:
    """Names of the registered rules."""
    return tuple(_rules)


def unregister(name: str) -> None:
    """Remove a rule from the table. Raises InvalidArgumentError for an unknown name."""
    if name not in _rules:
        raise InvalidArgumentError(f"there is no library rule '{name}'; there are {', '.join(_rules) or 'none'}")
    Registration(_rules[name]).unregister()


def rules_for(chosen: Sequence[str] | str | None, target: Target) -> tuple[LibraryRule, ...]:
    """Select the rules of a compilation for `target`.

    `chosen`: names of libraries ("openblas", "python") or rules; "none" for no rule; None for the knob
    RELAXLITE_LIBRARIES, else every registered rule and, where installed, OpenBLAS. Raises InvalidArgumentError for an
    unknown name, LibraryError for "openblas" where it is not installed.
    """
    if chosen is None and config.get("libraries"):
        chosen = names_of(config.get("libraries"))
    if chosen == "none":
        return ()
    known = tuple(reversed(_rules.values()))
    if chosen is None:
        return (*known, *(openblas_rules() if _matches_host(target) and libraries.has_openblas() else ()))
    wanted = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    if "none" in wanted:
        raise InvalidArgumentError(f"'none' stands alone, for no library at all, got {', '.join(wanted)}")
    if OPENBLAS in wanted:
        libraries.require_library(OPENBLAS)
        known = (*known, *openblas_rules())
    for item in wanted:
        if not any(item in (rule.name, rule.library) for rule in known):
            names = dict.fromkeys((OPENBLAS, *(rule.library for rule in known), *_rules))
            raise InvalidArgumentError(f"there is no library or rule '{item}'; there are {', '.join(names)}, or 'none'")
    return tuple(rule for rule in known if rule.name in wanted or rule.library in wanted)


def names_of(text: str) -> Sequence[str] | str:
    """Split "a,b" into names; "none" stays a string."""
    return text if text == "none" else [name.strip() for name in text.split(",")]


def _matches_host(target: Target) -> bool:
    """Whether libraries of this machine can run on the target."""
    return target.triple == Target.host().triple


def _library_name(library: str) -> str:
    """Name of a library: "openblas", or "m" of "/usr/lib/libm.so.6"."""
    return library if library == OPENBLAS else Path(library).name.split(".")[0].removeprefix("lib")


def _check_library(rule: LibraryRule) -> None:
    """Raise InvalidArgumentError for a library name in use by another file, LibraryError for a missing library."""
    same = [other for other in _rules.values() if other.library == rule.library and other.file != rule.file]
    if same or (rule.library == PYTHON) or (rule.library == OPENBLAS and rule.file):
        raise InvalidArgumentError(
            f"library rule '{rule.name}': another library is called '{rule.library}' already; rename the file"
        )
    libraries.require_library(rule.library, rule.file, rule.symbol)
