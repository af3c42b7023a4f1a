"""Routines of libraries in place of generated kernels: the table that compilation dispatches from.

    with_gelu = is_op("gelu")(is_op("add")(is_op("matmul")(wildcard("x"), wildcard("w")), wildcard("b")))
    rl.register_library("fast_mlp", with_gelu, {"x": ("m", "k"), "w": ("k", "n"), "b": ("n",)}, function=fast_mlp)

`register_library` adds rules; `rules_for` gives those that a compilation may use, where OpenBLAS comes last.
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
from relaxlite.passes.fuse.library_rules import Dims, LibraryRule, Range
from relaxlite.runtime import libraries
from relaxlite.runtime.libraries import OPENBLAS, PYTHON
from relaxlite.target import Target

_rules: dict[str, LibraryRule] = {}  # the newest last; it is asked first


class Registration:
    """A rule in the table; as a context manager, for the block only."""

    def __init__(self, rule: LibraryRule) -> None:
        self.rule = rule

    def unregister(self) -> None:
        """Take the rule out of the table. Models that are compiled already keep it."""
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
    operands: Mapping[str, Dims | None],
    *,
    function: Callable[..., None] | None = None,
    library: str = "",
    symbol: str = "",
    arguments: Sequence[str] = (),
    returns: Literal["nothing", "status"] = "nothing",
    loops: Mapping[str, str] | None = None,
    when: Mapping[str, Range] | None = None,
    check: Callable[[Match], str | None] | None = None,
    work: str = "0",
    fallback: bool = True,
) -> Registration:
    """Let models that are compiled from now on call a routine wherever `pattern` (relaxlite.ir.pattern) matches.

    `operands`: the names that the pattern captures, in the routine's order, each with names or sizes of its dimensions
    (None: any shape); a name that occurs twice asks for equal sizes. The results have the type of what is matched:
    "out" names the only one, "out0", "out1", ... several. Arrays are dense, row-major and aligned to their elements.

    The routine is a Python `function` of NumPy arrays (the operands, read-only, then the results, which it fills),
    known by `name` when a saved model is loaded; or a C function, `symbol` of the shared library `library` (a file, or
    "openblas"), with `arguments`:

        "int32 m * 2", "int64 n"         expressions of the dimensions: + - * // % min(...) max(...)
        "float32 1.0", "float64 0.5"     constants
        "float32* a", "float32* out[i, 64 * j, 0]"    the address of an element of an array of this dtype

    `returns="status"`: a C int, and anything but 0 makes the call fail. `loops`: names and extents of loops round the
    call, whose names arguments may use; they must write apart from each other, for the first one runs on all threads,
    as far as `work` (about how many instructions a call takes, an expression) is worth it.

    `when`: expressions and the range in which each must be (None: no limit), as {"m": (64, None)}. What the model's
    bounds do not decide is compared at run time, and a generated kernel does the rest. Sizes may be 0 where `when` does
    not say otherwise. `check`: why a match is refused, or None. `fallback=False`: no generated kernel for where the
    library is missing; loading fails there.

    The rule that was registered last is asked first. PassContext.decisions says which were taken, and why not. Raises
    InvalidArgumentError for a rule that makes no sense or a name that is taken, LibraryError when there is no such
    library or symbol here.
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
    """The names of the rules that have been registered."""
    return tuple(_rules)


def unregister(name: str) -> None:
    """Take a rule out of the table. InvalidArgumentError when there is none of this name."""
    if name not in _rules:
        raise InvalidArgumentError(f"there is no library rule '{name}'; there are {', '.join(_rules) or 'none'}")
    Registration(_rules[name]).unregister()


def rules_for(chosen: Sequence[str] | str | None, target: Target) -> tuple[LibraryRule, ...]:
    """The rules that a compilation for `target` may use.

    `chosen`: names of libraries ("openblas", "python") or rules; "none" for none at all; None for what
    RELAXLITE_LIBRARIES says, else every rule that is registered and, where it is installed, OpenBLAS.
    InvalidArgumentError for a name that nothing has, LibraryError for "openblas" where it is not installed.
    """
    if chosen is None and config.get("libraries"):
        chosen = names_of(config.get("libraries"))
    if chosen == "none":
        return ()
    known = tuple(reversed(_rules.values()))
    if chosen is None:
        return (*known, *(openblas_rules() if _is_usual(target) and libraries.has_openblas() else ()))
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
    """ "a,b" as the names in it; "none" stays."""
    return text if text == "none" else [name.strip() for name in text.split(",")]


def _is_usual(target: Target) -> bool:
    """Whether libraries of this machine are of the target's kind."""
    return target.triple == Target.host().triple


def _library_name(library: str) -> str:
    """ "openblas", or the file's own name: "m" of "/usr/lib/libm.so.6"."""
    return library if library == OPENBLAS else Path(library).name.split(".")[0].removeprefix("lib")


def _check_library(rule: LibraryRule) -> None:
    same = [other for other in _rules.values() if other.library == rule.library and other.file != rule.file]
    if same or (rule.library == PYTHON) or (rule.library == OPENBLAS and rule.file):
        raise InvalidArgumentError(
            f"library rule '{rule.name}': another library is called '{rule.library}' already; rename the file"
        )
    libraries.require_library(rule.library, rule.file, rule.symbol)
