"""What the processor can do, read without LLVM: as LLVM says, also where a system does not save all registers."""

from __future__ import annotations

import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from relaxlite.errors import ArtifactError
from relaxlite.features import CODEGEN_FEATURES, SYSTEM_FEATURES, TUNING_FLAGS
from relaxlite.runtime import cpu, elf, jit, linker
from relaxlite.runtime.cpu import Registers, features_of

needs_x86 = pytest.mark.skipif(not linker.is_supported(), reason="CPUID is read on x86-64 Linux")

OSXSAVE = 1 << 27
ALL = 0xFFFFFFFF


@needs_x86
def test_llvm_says_the_same_of_this_processor() -> None:
    ours, llvms = cpu._cpuid_features(), jit.host_features()
    assert len(ours.keys() & llvms.keys()) > 90
    present = {name for name, is_there in ours.items() if is_there and name in llvms}
    expected = {name for name, is_there in llvms.items() if is_there and name in ours}
    assert present >= expected and present - expected <= {"prefetchi", "avx10.2"}, "some LLVMs do not find these two"
    found = {name for name, is_there in llvms.items() if is_there}
    assert found - TUNING_FLAGS <= ours.keys(), "LLVM would be loaded to ask about it"


@needs_x86
def test_llvm_is_asked_only_about_what_seems_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(jit, "host_features", lambda: asked.append(1) or {"quantum": True})
    present = [name for name, is_there in cpu._cpuid_features().items() if is_there]
    assert cpu.lacking(present) == [] and not asked
    assert cpu.lacking([*present, "quantum", "avx1024"]) == ["avx1024"] and asked


def test_elsewhere_llvm_answers_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "is_supported", lambda: False)
    cpu._cpuid_features.cache_clear()
    try:
        known = jit.host_features()
        missing = [name for name, is_there in known.items() if not is_there and name not in SYSTEM_FEATURES]
        assert cpu.lacking(["avx1024", *known]) == ["avx1024", *missing]
    finally:
        cpu._cpuid_features.cache_clear()


def no_llvm() -> dict[str, bool]:
    raise ArtifactError("this needs LLVM here")


@needs_x86
def test_what_llvm_20_calls_a_feature_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not what only systems use, which virtual machines hide: artifacts of older versions require both."""
    monkeypatch.setattr(jit, "host_features", no_llvm)
    assert cpu.lacking(["evex512", "uintr", "shstk", "sse2"]) == []


@needs_x86
def test_what_is_missing_is_said_without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "host_features", no_llvm)
    monkeypatch.setattr(jit, "host_cpu_name", no_llvm)
    assert cpu.lacking(["sse2", "avx1024"]) == ["avx1024"]
    assert cpu.name() == cpu.described()["model name"]


def test_elsewhere_llvm_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker, "is_supported", lambda: False)
    monkeypatch.setattr(jit, "host_features", no_llvm)
    cpu._cpuid_features.cache_clear()
    try:
        with pytest.raises(ArtifactError, match="needs LLVM"):
            cpu.lacking(["neon"])
    finally:
        cpu._cpuid_features.cache_clear()


def test_a_missing_llvm_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    jit._llvm.cache_clear()
    with pytest.raises(ArtifactError, match=r"needs LLVM here .*`pip install llvmlite` adds it"):
        jit.host_features()


def test_cpuid_tells_of_all_that_code_may_use() -> None:
    told = set(features_of(everything, lambda: 0))
    assert set(CODEGEN_FEATURES["x86_64"]) <= told
    without_names = {"64bit", "cx16", "sahf"}  # LLVM does not say which processors have them
    assert {
        name for name in told - set(CODEGEN_FEATURES["x86_64"]) - SYSTEM_FEATURES if "-256" not in name
    } == without_names


def everything(leaf: int, subleaf: int) -> Registers:
    """A processor that says yes to all, with AVX10.2."""
    if leaf & 0x7FFFFFFF == 0 or (leaf, subleaf) == (7, 0):
        return (leaf | 0xFF, ALL, ALL, ALL)
    return (ALL, 2, ALL, ALL) if leaf == 0x24 else (ALL, ALL, ALL, ALL)


def without(saved: int) -> set[str]:
    return {name for name, is_there in features_of(everything, lambda: saved).items() if not is_there}


def test_registers_that_the_system_does_not_save_are_of_no_use() -> None:
    assert without(0xE00E7) == set()
    more_registers = without(0x600E7)
    assert "egpr" in more_registers and all(name in cpu._APX for name in more_registers)
    tiles = without(0x800E7)
    assert tiles and all(name.startswith("amx-") for name in tiles)
    masks = without(0xE0007)
    assert {"avx512f", "avx512vnni", "avx512fp16", "avx10.1", "avx10.2"} <= masks
    assert all(name.startswith(("avx512", "avx10")) for name in masks)
    wide = without(0xE0003)
    assert {"avx", "avx2", "fma", "f16c", "xsave", "avxvnni", "vaes"} | masks <= wide
    assert not wide & {"sse4.2", "bmi2", "movbe", "aes", "sha"}


def test_xcr0_is_not_read_where_the_system_has_not_switched_it_on() -> None:
    def no_xsave(leaf: int, subleaf: int) -> Registers:
        eax, ebx, ecx, edx = everything(leaf, subleaf)
        return (eax, ebx, ecx & ~OSXSAVE, edx) if leaf == 1 else (eax, ebx, ecx, edx)

    def fault() -> int:
        raise AssertionError("an illegal instruction")

    found = features_of(no_xsave, fault)
    assert found["sse4.2"] and not found["avx"]


def test_leaves_that_a_processor_does_not_have_are_not_read() -> None:
    def old(leaf: int, subleaf: int) -> Registers:
        if leaf == 0:
            return (1, ALL, ALL, ALL)
        assert leaf in (1, 0x80000000), "an Intel processor answers with its last leaf"
        return (0, ALL, ALL, ALL)

    found = features_of(old, lambda: ALL)
    assert found["avx"] and not any(found[name] for name in ("avx2", "bmi", "lzcnt", "64bit", "amx-tile", "avx10.1"))

    def no_subleaf(leaf: int, subleaf: int) -> Registers:
        assert (leaf, subleaf) != (7, 1)
        return (0x20 if leaf == 0 else 0, ALL, ALL, ALL)

    found = features_of(no_subleaf, lambda: ALL)
    assert found["avx2"] and not found["avxvnni"]


@needs_x86
@pytest.mark.parametrize(("name", "code"), [("_CPUID", cpu._CPUID), ("_XGETBV", cpu._XGETBV)])
def test_the_machine_code_is_what_its_comments_say(name: str, code: bytes) -> None:
    source = Path(cpu.__file__).read_text("utf-8")
    block = source.partition(f"\n{name} = bytes.fromhex(")[2].partition("\n)")[0]
    said = [part.strip() for line in block.splitlines() for part in line.partition("# ")[2].split(";") if part.strip()]
    assert len(said) >= 5
    llvm.initialize_native_target()
    llvm.initialize_native_asmparser()
    ir = "".join(f'module asm "{line}"\n' for line in (".intel_syntax noprefix", *said))
    item = elf.read_object(jit.compile_text(ir, "x86_64-unknown-linux-gnu", "x86-64"))
    (text,) = (section for section in item.sections if section.flags & elf.EXECUTE)
    assert item.data[text.start : text.start + text.size] == code
