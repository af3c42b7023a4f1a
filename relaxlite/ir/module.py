"""IRModule: immutable collection of named definitions of all three levels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from relaxlite.ir.expr import NO_ATTRS, Attrs, ExternFunction, Function, make_attrs
from relaxlite.ir.program import TensorProgram

Definition: TypeAlias = "Function | TensorProgram | ExternFunction"


class IRModule(Mapping[str, Definition]):
    """Immutable, ordered mapping of names to definitions. The entry function is "main"."""

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
        """Graph-level functions by name."""
        return {name: d for name, d in self.items() if isinstance(d, Function)}

    def programs(self) -> dict[str, TensorProgram]:
        """Tensor programs by name."""
        return {name: d for name, d in self.items() if isinstance(d, TensorProgram)}

    def updated(self, changes: Mapping[str, Definition | None]) -> IRModule:
        """Module with definitions added, replaced, or removed (None); the same object if nothing changes."""
        if all(self._definitions.get(name) is d for name, d in changes.items()):
            return self
        merged = {**self._definitions, **changes}
        return IRModule({name: d for name, d in merged.items() if d is not None}, self.attrs)

    def __str__(self) -> str:
        from relaxlite.ir.printer import print_module  # a cycle: the printer imports modules

        return print_module(self)
