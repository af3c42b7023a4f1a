"""Parser of relocatable ELF files: sections, symbols and relocations of 64-bit objects (System V ABI, ch. 4 and 5).

All offsets and indices are validated, so that users of an `ElfObject` stay inside its bytes, as artifacts may be
malicious. What the code does when it runs cannot be validated.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from relaxlite.errors import ArtifactError
from relaxlite.records import dataclass

X86_64, AARCH64 = 62, 183  # e_machine

# Section types.
PROGBITS, SYMBOLS, STRINGS, RELA, NOTE, NOBITS, REL, UNWIND = 1, 2, 3, 4, 7, 8, 9, 0x70000001
# Section flags.
WRITE, ALLOC, EXECUTE, THREAD_LOCAL, COMPRESSED = 0x1, 0x2, 0x4, 0x400, 0x800
# Symbol bindings, symbol types, special section indices.
LOCAL, GLOBAL, WEAK = 0, 1, 2
THREAD_LOCAL_SYMBOL, INDIRECT_SYMBOL = 6, 10
UNDEFINED, RESERVED, ABSOLUTE = 0, 0xFF00, 0xFFF1

GOT = "_GLOBAL_OFFSET_TABLE_"  # defined by the linker

MAGIC = b"\x7fELF"
_IDENT = MAGIC + b"\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE = 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")


class Section(NamedTuple):
    """A section header. `start`: file offset of the content; NOBITS has no content."""

    kind: int
    flags: int
    start: int
    size: int
    align: int
    link: int
    info: int


class Symbol(NamedTuple):
    """A symbol at offset `value` of section index `section`, or UNDEFINED or ABSOLUTE. Local symbols have no name."""

    name: str
    binding: int
    kind: int
    section: int
    value: int


class Relocation(NamedTuple):
    """A relocation: where a symbol's address is written in a section; `kind`: the relocation type of the machine."""

    offset: int
    kind: int
    symbol: int
    addend: int


@dataclass(frozen=True, slots=True)
class ElfObject:
    """A parsed object. `relocations`: by the index of the section that they apply to."""

    data: bytes
    machine: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]
    relocations: dict[int, list[Relocation]]

    @property
    def undefined(self) -> tuple[str, ...]:
        """Names of undefined symbols, without the GOT."""
        names = (s.name for s in self.symbols[1:] if s.section == UNDEFINED)
        return tuple(dict.fromkeys(name for name in names if name != GOT))


def read_object(data: bytes) -> ElfObject:
    """Parse and validate an object. ArtifactError for other data, and truncated or corrupted objects."""
    if not data.startswith(MAGIC):
        raise ArtifactError("these bytes are not object code for Linux: they do not begin as an ELF file")
    try:
        return _parse(data)
    except (struct.error, UnicodeDecodeError) as error:
        raise _corrupted(str(error)) from error


def _parse(data: bytes) -> ElfObject:
    ident, kind, machine, _, _, _, table, _, _, _, _, entry_size, count, _ = _HEADER.unpack_from(data)
    if not ident.startswith(_IDENT) or kind != _RELOCATABLE:
        raise ArtifactError(f"the object code is no relocatable 64-bit ELF object (identification {ident.hex()})")
    if entry_size != _SECTION.size:
        raise _corrupted(f"its sections are described in {entry_size} bytes each, not {_SECTION.size}")
    headers = memoryview(data)[table : table + count * entry_size]
    sections = tuple(
        Section(kind, flags, start, size, align, link, info)
        for _, kind, flags, _, start, size, link, info, align, _ in _SECTION.iter_unpack(headers)
    )
    if len(sections) != count:
        raise _corrupted(f"{count} sections, of which the file has room for {len(sections)}")
    for section in sections:
        if section.kind not in (0, NOBITS) and section.start + section.size > len(data):
            raise _corrupted(f"a section ends at byte {section.start + section.size} of {len(data)}")
    tables = [index for index, section in enumerate(sections) if section.kind == SYMBOLS]
    if len(tables) > 1:
        raise _corrupted(f"it has {len(tables)} symbol tables")
    symbols = _parse_symbols(data, sections, sections[tables[0]]) if tables else ()
    relocations: dict[int, list[Relocation]] = {}
    for section in sections:
        if section.kind == RELA:
            if [section.link] != tables:
                raise _corrupted(f"relocations refer to symbol table {section.link}, it has {tables}")
            target = _section(sections, section.info)
            section_relocations = relocations.setdefault(section.info, [])
            section_relocations += _parse_relocations(data, section, target, len(symbols))
    return ElfObject(data, machine, sections, symbols, relocations)


def _parse_symbols(data: bytes, sections: Sequence[Section], table: Section) -> tuple[Symbol, ...]:
    strings = _section(sections, table.link)
    if strings.kind != STRINGS:
        raise _corrupted(f"the names of its symbols are in section {table.link}, which holds no text")
    names = data[strings.start : strings.start + strings.size]
    symbols: list[Symbol] = []
    for name, info, _, section, value, _ in _SYMBOL.iter_unpack(_content(data, table)):
        binding = info >> 4
        text = _string_at(names, name) if binding != LOCAL else ""
        if section == UNDEFINED and symbols and not text:
            raise _corrupted(f"symbol {len(symbols)} is neither defined nor has it a name")
        if UNDEFINED < section < RESERVED and value > _section(sections, section).size:
            raise _corrupted(f"symbol {text or len(symbols)} is at {value} of section {section}, behind its end")
        symbols.append(Symbol(text, binding, info & 15, section, value))
    return tuple(symbols)


def _parse_relocations(data: bytes, section: Section, target: Section, num_symbols: int) -> list[Relocation]:
    relocations = []
    for fields in _RELOCATION.iter_unpack(_content(data, section)):
        relocation = Relocation._make(fields)
        if relocation.symbol >= num_symbols or relocation.offset >= target.size:
            raise _corrupted(f"{relocation}, of {num_symbols} symbols, is in a section of {target.size} bytes")
        relocations.append(relocation)
    return relocations


def _content(data: bytes, section: Section) -> memoryview:
    return memoryview(data)[section.start : section.start + section.size]


def _section(sections: Sequence[Section], index: int) -> Section:
    if index >= len(sections):
        raise _corrupted(f"it refers to section {index} of {len(sections)}")
    return sections[index]


def _string_at(names: bytes, start: int) -> str:
    end = names.find(b"\0", start)
    if end < 0:
        raise _corrupted(f"the name at {start} of {len(names)} bytes of text has no end")
    return names[start:end].decode()


def _corrupted(problem: str) -> ArtifactError:
    return ArtifactError(f"the object code is truncated or corrupted: {problem}")
