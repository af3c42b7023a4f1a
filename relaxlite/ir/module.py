"""IRModule: named functions of all three levels, immutable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from relaxlite.ir.expr import NO_ATTRS, Attrs, ExternFunction, Function, make_attrs
from relaxlite.ir.program import TensorProgram

Definition: TypeAlias = "Function | TensorProgram | ExternFunction"


class IRModule(Mapping[str, Definition]):
    """An immutable mapping of names to definitions, in order; the entry function is "main"."""

    __slots__ = ("_definitions", "attrs")

    def __init__(self, definitions: Mapping[str, Definition], attrs: Attrs = NO_ATTRS) -> None:
        self._definitions = MappingProxyType(dict(definitions))
        self.attrs = make_attrs(attrs)

    def __getitem__(self, name: str) -> Definition:
        return self._definitions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._definitions)

    def __len__(self) -> int:
        return len(self._definitions)

    def functions(self) -> dict[str, Function]:
        return {name: d for name, d in self.items() if isinstance(d, Function)}

    def programs(self) -> dict[str, TensorProgram]:
        return {name: d for name, d in self.items() if isinstance(d, TensorProgram)}

    def updated(self, changes: Mapping[str, Definition | None]) -> IRModule:
        """A module with these definitions added, replaced, or (None) removed; itself if nothing changes."""
        if all(self._definitions.get(name) is d for name, d in changes.items()):
            return self
        merged = {**self._definitions, **changes}
        return IRModule({name: d for name, d in merged.items() if d is not None}, self.attrs)

    def __str__(self) -> str:
        from relaxlite.ir.printer import print_module  # the printer knows every node; the module knows none of it

        return print_module(self)
