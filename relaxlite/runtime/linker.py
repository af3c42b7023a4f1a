"""Linker of relocatable x86-64 Linux objects into this process, which makes LLVM unnecessary at run time.

All objects of a library are laid out in one block of memory: code, read-only data, writable data. External symbols may
be outside of the 2 GB range of an instruction, so calls of these go through a stub, a jump to the address in an entry
of the global offset table (GOT). Relocation types: "System V ABI, AMD64 supplement", 4.4.

Unwind tables are not loaded: nothing throws through this code, and kernels have none.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Mapping, Sequence

from relaxlite.errors import ArtifactError
from relaxlite.runtime import elf
from relaxlite.runtime.code_memory import EXECUTABLE, READ_ONLY, CodeMemory
from relaxlite.runtime.elf import ElfObject, Relocation, Section, Symbol

_MAX_BYTES = 1 << 30  # half the range of a 32-bit displacement
_STUB = struct.Struct("<2sixx")  # jmp qword ptr [rip + offset]
_STUB_LENGTH = 6
_WORD = struct.Struct("<Q")
_NONE, _PLT32 = 0, 4
_CODE, _CONSTANTS, _VARIABLES = range(3)  # segments of a library, in this order in memory


def is_supported() -> bool:
    """Whether this process can run linked code: 64-bit x86-64 Linux."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8


class LinkedCode:
    """Linked code. Addresses are valid until `close`, or until the object is garbage-collected."""

    def __init__(self, memory: CodeMemory, functions: dict[str, int]) -> None:
        self._memory: CodeMemory | None = memory
        self._functions = functions

    def address(self, symbol: str) -> int:
        """Address of a function. ArtifactError where it is not defined, or the library is closed."""
        if self._memory is None:
            raise ArtifactError(f"symbol {symbol!r} asked of a library that is closed")
        if symbol not in self._functions:
            raise ArtifactError(f"no function {symbol!r} can be had from the object code: it does not define one")
        return self._functions[symbol]

    def keep(self) -> None:
        """Keep the code in memory until the process exits."""
        if self._memory is not None:
            self._memory.keep()

    def close(self) -> None:
        """Unload the code, which must not be running."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None


def link(objects: Sequence[ElfObject], symbols: Mapping[str, int]) -> LinkedCode:
    """Link objects as one library. `symbols`: addresses of external symbols by name.

    ArtifactError for damaged objects, undefined symbols and unsupported features. There is no fallback to LLVM for the
    last, as LLVM aborts the process on an unknown relocation type.
    """
    return _Linker(objects, symbols).link()


class _Linker:
    """State of one link: symbol table, layout, GOT and stubs."""

    def __init__(self, objects: Sequence[ElfObject], symbols: Mapping[str, int]) -> None:
        self._objects = objects
        self._external = symbols
        self._globals: dict[str, tuple[int, Symbol]] = {}  # name -> (number of the defining object, symbol)
        self._offsets: list[dict[int, int]] = []  # of each object: section index -> offset in memory
        self._ends = [0, 0, 0]  # end offset of each segment
        self._entries: dict[int, int] = {}  # target address -> offset of its GOT entry
        self._stubs: dict[int, int] = {}

    def link(self) -> LinkedCode:
        for number, item in enumerate(self._objects):
            _check(item)
            for symbol in item.symbols:
                self._define(number, symbol)
        self._lay_out()
        memory = self._memory = CodeMemory(self._ends[_VARIABLES])
        for number, item in enumerate(self._objects):
            for index, offset in self._offsets[number].items():
                section = item.sections[index]
                if section.kind != elf.NOBITS:
                    content = item.data[section.start : section.start + section.size]
                    memory.bytes[offset : offset + section.size] = content
        for number, item in enumerate(self._objects):
            addresses = [self._address(number, symbol) for symbol in item.symbols]
            for index, relocations in item.relocations.items():
                if index in self._offsets[number]:
                    self._relocate(self._offsets[number][index], item.sections[index], relocations, addresses)
        code_end, constants_end, _ = self._ends
        memory.protect(0, code_end, EXECUTABLE)
        memory.protect(code_end, constants_end - code_end, READ_ONLY)
        return LinkedCode(memory, self._functions())

    def _define(self, number: int, symbol: Symbol) -> None:
        if symbol.binding == elf.LOCAL or symbol.section == elf.UNDEFINED:
            return
        earlier = self._globals.get(symbol.name)
        if earlier is None or earlier[1].binding == elf.WEAK != symbol.binding:
            self._globals[symbol.name] = number, symbol
        elif symbol.binding != elf.WEAK:
            raise ArtifactError(f"the object code defines {symbol.name!r} twice")

    def _lay_out(self) -> None:
        """Assign offsets in memory to all sections, the stubs and the GOT."""
        kinds = [
            r.kind
            for item in self._objects
            for section_relocations in item.relocations.values()
            for r in section_relocations
        ]
        num_stubs = kinds.count(_PLT32)
        num_entries = num_stubs + sum(kind in _USES_GOT for kind in kinds)
        self._offsets = [{} for _ in self._objects]
        end = 0
        for segment in (_CODE, _CONSTANTS, _VARIABLES):
            for number, item in enumerate(self._objects):
                for index, section in enumerate(item.sections):
                    if _is_loaded(section) and _segment(section) == segment:
                        offset = _align(end, section.align)
                        self._offsets[number][index] = offset
                        end = offset + section.size
            if segment == _CODE:
                self._stubs_start = _align(end, _STUB.size)
                end = self._stubs_start + _STUB.size * num_stubs
            elif segment == _CONSTANTS:
                self._got_start = _align(end, _WORD.size)
                end = self._got_start + _WORD.size * num_entries
            self._ends[segment] = end = _align(end, mmap.PAGESIZE)
        if end > _MAX_BYTES:
            raise ArtifactError(f"the object code needs {end} bytes of memory, more than the {_MAX_BYTES} that it may")

    def _address(self, number: int, symbol: Symbol) -> int | None:
        """Address of a symbol; None where it is undefined or in a section that is not loaded."""
        if symbol.section == elf.ABSOLUTE:
            return symbol.value
        if symbol.section == elf.UNDEFINED:
            if symbol.name in self._globals:
                return self._address(*self._globals[symbol.name])
            return self._memory.address + self._got_start if symbol.name == elf.GOT else self._external.get(symbol.name)
        if symbol.binding == elf.WEAK:
            number, symbol = self._globals[symbol.name]
        offset = self._offsets[number].get(symbol.section)
        return None if offset is None else self._memory.address + offset + symbol.value

    def _relocate(
        self, start: int, section: Section, relocations: Sequence[Relocation], addresses: Sequence[int | None]
    ) -> None:
        """Apply the relocations of a section at offset `start`. ArtifactError for one out of range."""
        memory = self._memory
        for relocation in relocations:
            if relocation.kind == _NONE:
                continue
            target, (field, value_of) = addresses[relocation.symbol], _RELOCATIONS[relocation.kind]
            if target is None or section.kind == elf.NOBITS or relocation.offset + field.size > section.size:
                raise _relocation_error(
                    relocation, "it changes nothing that is in memory, or refers to what is not there"
                )
            offset = start + relocation.offset
            value = value_of(self, target, relocation.addend, memory.address + offset)
            try:
                field.pack_into(memory.bytes, offset, value)
            except struct.error as error:
                raise _relocation_error(relocation, f"{value:#x} does not fit its {field.size} bytes") from error

    def reachable(self, target: int, addend: int, place: int) -> int:
        """PC-relative displacement to a function, or to a stub that jumps there where it is out of range."""
        distance = target + addend - place
        if -(1 << 31) <= distance < 1 << 31:
            return distance
        stub = self._stubs.get(target)
        if stub is None:
            stub = self._stubs[target] = self._stubs_start + _STUB.size * len(self._stubs)
            to_entry = self.got_entry(target) - (self._memory.address + stub + _STUB_LENGTH)
            _STUB.pack_into(self._memory.bytes, stub, b"\xff\x25", to_entry)
        return self._memory.address + stub + addend - place

    def got_entry(self, target: int) -> int:
        """Address of the GOT entry that holds `target`."""
        entry = self._entries.get(target)
        if entry is None:
            entry = self._entries[target] = self._got_start + _WORD.size * len(self._entries)
            _WORD.pack_into(self._memory.bytes, entry, target)
        return self._memory.address + entry

    def got(self) -> int:
        """Address of the GOT."""
        return self._memory.address + self._got_start

    def _functions(self) -> dict[str, int]:
        """Addresses of global symbols in code sections."""
        functions = {}
        for name, (number, symbol) in self._globals.items():
            address = self._address(number, symbol)
            sections = self._objects[number].sections
            if symbol.section != elf.ABSOLUTE and address is not None and sections[symbol.section].flags & elf.EXECUTE:
                functions[name] = address
        return functions


# Values of relocations: symbol address `s`, addend `a`, place `p`, as the specification names them.
_Value = Callable[[_Linker, int, int, int], int]
_SIGNED_8, _SIGNED_4, _UNSIGNED_4 = struct.Struct("<q"), struct.Struct("<i"), struct.Struct("<I")
_RELOCATIONS: dict[int, tuple[struct.Struct, _Value]] = {
    1: (_SIGNED_8, lambda _, s, a, p: s + a),  # 64
    2: (_SIGNED_4, lambda _, s, a, p: s + a - p),  # PC32
    _PLT32: (_SIGNED_4, _Linker.reachable),
    10: (_UNSIGNED_4, lambda _, s, a, p: s + a),  # 32
    11: (_SIGNED_4, lambda _, s, a, p: s + a),  # 32S
    24: (_SIGNED_8, lambda _, s, a, p: s + a - p),  # PC64
    25: (_SIGNED_8, lambda linker, s, a, p: s + a - linker.got()),  # GOTOFF64
    26: (_SIGNED_4, lambda _, s, a, p: s + a - p),  # GOTPC32, whose symbol is the GOT
    **dict.fromkeys((9, 41, 42), (_SIGNED_4, lambda linker, s, a, p: linker.got_entry(s) + a - p)),  # GOTPCREL(X)
}
_USES_GOT = (9, 41, 42)


def _check(item: ElfObject) -> None:
    """Raise ArtifactError for an object of another machine, or with features that the linker does not support."""
    if item.machine != elf.X86_64:
        raise ArtifactError(f"the object code is for another architecture (ELF machine {item.machine}), this is x86_64")
    for section in filter(_is_loaded, item.sections):
        is_supported_type = section.kind in (elf.PROGBITS, elf.NOBITS, elf.NOTE)
        if (
            not is_supported_type
            or section.flags & (elf.THREAD_LOCAL | elf.COMPRESSED)
            or section.align > mmap.PAGESIZE
        ):
            raise ArtifactError(
                f"the object code has a section of an unknown kind {section.kind:#x}, flags {section.flags:#x} or "
                f"alignment {section.align}"
            )
        if section.flags & elf.WRITE and section.flags & elf.EXECUTE:
            raise ArtifactError("the object code has a section that is to be both written and executed")
        if section.align & (section.align - 1):
            raise ArtifactError(f"the object code has a section with an alignment of {section.align} bytes")
    for symbol in item.symbols:
        is_unsupported = elf.RESERVED <= symbol.section != elf.ABSOLUTE or symbol.binding > elf.WEAK
        if is_unsupported or symbol.kind in (elf.THREAD_LOCAL_SYMBOL, elf.INDIRECT_SYMBOL):
            raise ArtifactError(f"the object code has a symbol of an unknown kind: {symbol}")
    if any(section.kind == elf.REL for section in item.sections):
        raise ArtifactError("the object code has relocations without addends")
    for relocations in item.relocations.values():
        for relocation in relocations:
            if relocation.kind != _NONE and (relocation.kind not in _RELOCATIONS or not relocation.symbol):
                raise ArtifactError(f"the object code has a relocation of an unknown kind: {relocation}")


def _is_loaded(section: Section) -> bool:
    return bool(section.flags & elf.ALLOC) and section.kind not in (0, elf.UNWIND)


def _segment(section: Section) -> int:
    return _CODE if section.flags & elf.EXECUTE else _VARIABLES if section.flags & elf.WRITE else _CONSTANTS


def _align(offset: int, alignment: int) -> int:
    return -(-offset // max(alignment, 1)) * max(alignment, 1)


def _relocation_error(relocation: Relocation, problem: str) -> ArtifactError:
    return ArtifactError(f"the object code is truncated or corrupted: {relocation}: {problem}")
