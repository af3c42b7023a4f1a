"""Dataclasses with lazily compiled methods, which reduce the import time of the compiler.

The standard decorator compiles up to six methods of each class from text (docs/measurements/frontend.md). Here
`__init__` is compiled for the first instance, and other methods are closures. Fields, slots and `__match_args__` are
the standard library's, so that `replace`, `fields` and `asdict` work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, slots=False):
        """Decorate a class as `dataclasses.dataclass` does, with these options; frozen classes must have slots."""

        def decorate(cls):
            return _with_methods(cls, frozen=frozen, eq=eq, slots=slots)

        return decorate if cls is None else decorate(cls)


def _with_methods(cls: type, *, frozen: bool, eq: bool, slots: bool) -> type:
    if frozen and not slots:
        raise TypeError(f"{cls.__name__} is frozen, so it needs slots=True")
    own = {name for name, value in vars(cls).items() if value is not None}  # __hash__ is None in a class with __eq__
    cls.__doc__ = cls.__doc__ or cls.__name__  # avoids the decorator's signature text
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {"__init__": _lazy_init(cls, frozen), "__repr__": _repr(fields)}
    if eq:
        values = _values(tuple(f for f in fields if f.compare))
        hashed = _values(tuple(f for f in fields if (f.compare if f.hash is None else f.hash)))
        methods["__eq__"] = _eq(values)
        methods["__hash__"] = (lambda self: hash(hashed(self))) if frozen else None
    if frozen:
        names = {f.name for f in fields}
        methods |= {"__setattr__": _setattr(cls, names), "__delattr__": _delattr(cls, names)}
        methods |= {"__getstate__": _values(fields), "__setstate__": _setstate(fields)}
    for name, method in methods.items():
        if name not in own:
            if method is not None:
                method.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, method)
    return cls


def _values(fields: tuple[Field[Any], ...]) -> Callable[[Any], tuple[Any, ...]]:
    names = [f.name for f in fields]
    if len(names) > 1:
        get_all = attrgetter(*names)
        return lambda self: get_all(self)
    return lambda self: tuple(getattr(self, name) for name in names)


def _repr(fields: tuple[Field[Any], ...]) -> Callable[[Any], str]:
    shown = [f.name for f in fields if f.repr]

    @recursive_repr()
    def method(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    return method


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, Any], Any]:
    return lambda self, other: values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented


def _setattr(cls: Any, names: set[str]) -> Callable[[Any, str, Any], None]:
    def method(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    return method


def _delattr(cls: Any, names: set[str]) -> Callable[[Any, str], None]:
    def method(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return method


def _setstate(fields: tuple[Field[Any], ...]) -> Callable[[Any, tuple[Any, ...]], None]:
    """Return `__setstate__` for pickle and copy, which would otherwise assign to frozen fields."""

    def method(self: Any, state: tuple[Any, ...]) -> None:
        for f, value in zip(fields, state, strict=True):
            object.__setattr__(self, f.name, value)

    return method


def _lazy_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """Return an `__init__` that replaces itself by the compiled one on the first call."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = _init(cls, frozen)
        cls.__init__(self, *args, **kwargs)

    return method


def _init(cls: type, frozen: bool) -> Callable[..., None]:
    """Compile the class's `__init__`."""
    scope: dict[str, Any] = {"_missing": MISSING}
    parameters, keywords, lines = ["self"], ["*"], []
    for f in dataclasses.fields(cls):
        name, value, default = f.name, f.name, ""
        if f.default is not MISSING:
            scope[f"_default_{name}"], default = f.default, f"=_default_{name}"
        elif f.default_factory is not MISSING:
            scope[f"_make_{name}"], default = f.default_factory, "=_missing"
            value = f"_make_{name}() if {name} is _missing else {name}"
        if f.init:
            (keywords if f.kw_only else parameters).append(name + default)
        elif default:
            value = f"_make_{name}()" if default == "=_missing" else f"_default_{name}"
        else:
            continue  # set by __post_init__ or by the caller
        if frozen:
            scope[f"_set_{name}"] = getattr(cls, name).__set__  # of its slot
            lines.append(f"_set_{name}(self, {value})")
        else:
            lines.append(f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    head = ", ".join(parameters + (keywords if len(keywords) > 1 else []))
    exec(f"def __init__({head}):\n " + "\n ".join(lines or ["pass"]), scope)
    method: Callable[..., None] = scope["__init__"]
    method.__qualname__ = f"{cls.__qualname__}.__init__"
    return method
