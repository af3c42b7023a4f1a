"""Detection of CPU features by LLVM's names, from CPUID as in LLVM, but without loading LLVM.

/proc/cpuinfo is incomplete: old kernels omit features that they do not know or use ("avx10.1", "shstk"). Sources: Intel
SDM volume 2, CPUID; llvm/lib/TargetParser/Host.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from relaxlite.errors import ArtifactError, RelaxliteError
from relaxlite.features import SYSTEM_FEATURES, TUNING_FLAGS
from relaxlite.runtime import jit, linker
from relaxlite.runtime.code_memory import EXECUTABLE, CodeMemory
from relaxlite.runtime.executable import TargetInfo

Registers: TypeAlias = tuple[int, int, int, int]  # eax, ebx, ecx, edx

_EAX, _EBX, _ECX, _EDX = range(4)
_EXTENDED = 0x80000000
_ZEROS: Registers = (0, 0, 0, 0)

_APX = ("egpr", "push2pop2", "ppx", "ndd", "ccmp", "nf", "cf", "zu")

# (leaf, subleaf, register, bit of each feature). A feature listed twice is present with either bit.
_BITS: tuple[tuple[int, int, int, Mapping[str, int]], ...] = (
    (0x1, 0, _EDX, {"cx8": 8, "cmov": 15, "mmx": 23, "fxsr": 24, "sse": 25, "sse2": 26}),
    (
        0x1, 0, _ECX,
        {"sse3": 0, "pclmul": 1, "ssse3": 9, "fma": 12, "cx16": 13, "sse4.1": 19, "sse4.2": 20, "crc32": 20,
         "movbe": 22, "popcnt": 23, "aes": 25, "xsave": 26, "avx": 28, "f16c": 29, "rdrnd": 30},
    ),
    (
        0x7, 0, _EBX,
        {"fsgsbase": 0, "sgx": 2, "bmi": 3, "avx2": 5, "bmi2": 8, "invpcid": 10, "rtm": 11, "avx512f": 16,
         "avx512dq": 17, "rdseed": 18, "adx": 19, "avx512ifma": 21, "clflushopt": 23, "clwb": 24, "avx512cd": 28,
         "sha": 29, "avx512bw": 30, "avx512vl": 31},
    ),
    (
        0x7, 0, _ECX,
        {"avx512vbmi": 1, "pku": 4, "waitpkg": 5, "avx512vbmi2": 6, "shstk": 7, "gfni": 8, "vaes": 9, "vpclmulqdq": 10,
         "avx512vnni": 11, "avx512bitalg": 12, "avx512vpopcntdq": 14, "rdpid": 22, "kl": 23, "cldemote": 25,
         "movdiri": 27, "movdir64b": 28, "enqcmd": 29},
    ),
    (
        0x7, 0, _EDX,
        {"uintr": 5, "avx512vp2intersect": 8, "serialize": 14, "tsxldtrk": 16, "pconfig": 18, "amx-bf16": 22,
         "avx512fp16": 23, "amx-tile": 24, "amx-int8": 25},
    ),
    (
        0x7, 1, _EAX,
        {"sha512": 0, "sm3": 1, "sm4": 2, "raoint": 3, "avxvnni": 4, "avx512bf16": 5, "cmpccxadd": 7, "amx-fp16": 21,
         "hreset": 22, "avxifma": 23, "movrs": 31},
    ),
    (
        0x7, 1, _EDX,
        {"avxvnniint8": 4, "avxneconvert": 5, "amx-complex": 8, "avxvnniint16": 10, "prefetchi": 14, "usermsr": 15,
         **dict.fromkeys(_APX, 21)},
    ),
    (0xD, 1, _EAX, {"xsaveopt": 0, "xsavec": 1, "xsaves": 3}),
    (0x14, 0, _EBX, {"ptwrite": 4}),
    (0x19, 0, _EBX, {"widekl": 2}),
    (0x1E, 1, _EAX, {"amx-fp8": 4, "amx-tf32": 6, "amx-avx512": 7, "amx-movrs": 8}),
    (
        _EXTENDED + 1, 0, _ECX,
        {"sahf": 0, "lzcnt": 5, "sse4a": 6, "prfchw": 8, "xop": 11, "lwp": 15, "fma4": 16, "tbm": 21, "mwaitx": 29},
    ),
    (_EXTENDED + 1, 0, _EDX, {"64bit": 29}),
    (_EXTENDED + 8, 0, _EBX, {"clzero": 0, "rdpru": 4, "wbnoinvd": 9}),
    (_EXTENDED + 0x21, 0, _EAX, {"prefetchi": 20}),
)  # fmt: skip

# Bits of XCR0 that the system must enable for a feature: register state that it saves at context switches.
_AVX, _AVX512, _AMX, _APX_STATE = 0x6, 0xE6, 0x60000, 0x80000
_REQUIRED_XCR0: Mapping[str, int] = {
    **dict.fromkeys(
        ("avx", "avx2", "fma", "f16c", "xsave", "xsaveopt", "xsavec", "xsaves", "xop", "fma4", "vaes", "vpclmulqdq",
         "avxvnni", "avxifma", "avxvnniint8", "avxvnniint16", "avxneconvert", "sha512", "sm3", "sm4"),
        _AVX,
    ),
    **{name: _AVX512 for *_, bits in _BITS for name in bits if name.startswith("avx512")},
    **{name: _AMX for *_, bits in _BITS for name in bits if name.startswith("amx-")},
    **dict.fromkeys(_APX, _APX_STATE),
}  # fmt: skip
_OSXSAVE_BIT = 27  # of leaf 1, ecx: xgetbv is enabled
_AVX10_BIT = 19  # of leaf 7.1, edx: leaf 0x24 has the AVX10 version

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
# Keys: parts of target triples, and values of sys.platform.
_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "macos": "macOS", "windows": "Windows", "win32": "Windows"}

# void cpuid(uint32_t registers[4]); input: leaf in [0], subleaf in [2]
_CPUID = bytes.fromhex(
    "53"  # push rbx
    "8b07 8b4f08"  # mov eax, [rdi]; mov ecx, [rdi + 8]
    "0fa2"  # cpuid
    "8907 895f04 894f08 89570c"  # mov [rdi], eax; mov [rdi + 4], ebx; mov [rdi + 8], ecx; mov [rdi + 12], edx
    "5b c3"  # pop rbx; ret
)
# uint64_t xgetbv(void), which returns XCR0
_XGETBV = bytes.fromhex(
    "31c9"  # xor ecx, ecx
    "0f01d0"  # xgetbv
    "48c1e220 4809d0"  # shl rdx, 32; or rax, rdx
    "c3"  # ret
)
_XGETBV_OFFSET = 64


def check(target: TargetInfo) -> None:
    """Raise ArtifactError unless object code for a target runs on this machine: architecture, system, CPU features."""
    machine = platform.machine().lower()
    host = _ARCHITECTURES.get(machine, machine)
    architecture = target.triple.partition("-")[0].lower()
    if _ARCHITECTURES.get(architecture, architecture) != host:
        raise ArtifactError(f"it was compiled for {architecture or 'an unknown processor'}, and this machine is {host}")
    system = next((system_name for part, system_name in _SYSTEMS.items() if part in target.triple.lower()), None)
    host_system = _SYSTEMS.get(sys.platform)
    if None not in (system, host_system) and system != host_system:
        raise ArtifactError(f"it was compiled for {system}, and this machine runs {host_system}")
    required = [feature.removeprefix("+") for feature in target.features if not feature.startswith("-")]
    if missing := lacking(required):
        raise ArtifactError(
            f"it was compiled for {target.cpu or 'another CPU'}, and this CPU ({name()}) "
            f"lacks {', '.join(missing)}; compile the model again, as with target 'llvm -mcpu=x86-64-v3'"
        )


def lacking(features: Iterable[str]) -> list[str]:
    """Features, by LLVM's names, that this processor lacks.

    Features that CPUID detection misses are looked up in LLVM where it is installed. ArtifactError where only LLVM can
    tell (processors other than x86) and is not installed.
    """
    detected = _cpuid_features()
    ignored = SYSTEM_FEATURES | TUNING_FLAGS
    undetected = [name for name in features if name not in ignored and not detected.get(name, False)]
    if not undetected:
        return []
    try:
        present = jit.host_features()
    except ArtifactError:
        if not detected:
            raise
        return undetected
    return [name for name in undetected if not present.get(name, False)]


def name() -> str:
    """Name of this processor by LLVM where that is installed, else by the system."""
    try:
        return jit.host_cpu_name()
    except ArtifactError:
        return described().get("model name", "unknown")


@cache
def _cpuid_features() -> Mapping[str, bool]:
    """Features that CPUID reports; empty for other processors than x86."""
    if not linker.is_supported():
        return {}
    try:
        memory = CodeMemory(_XGETBV_OFFSET + len(_XGETBV))
        memory.bytes[: len(_CPUID)] = _CPUID
        memory.bytes[_XGETBV_OFFSET : _XGETBV_OFFSET + len(_XGETBV)] = _XGETBV
        memory.protect(0, len(memory.bytes), EXECUTABLE)
    except RelaxliteError:
        return {}
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(memory.address)
    xgetbv = ctypes.CFUNCTYPE(ctypes.c_uint64)(memory.address + _XGETBV_OFFSET)

    def query(leaf: int, subleaf: int) -> Registers:
        registers = (ctypes.c_uint32 * 4)(leaf, 0, subleaf, 0)
        cpuid(ctypes.addressof(registers))
        eax, ebx, ecx, edx = registers
        return eax, ebx, ecx, edx

    try:
        return features_of(query, xgetbv)
    finally:
        memory.free()


def features_of(query: Callable[[int, int], Registers], xcr0: Callable[[], int]) -> dict[str, bool]:
    """Decode features from CPUID, by `query(leaf, subleaf)`, and from XCR0, which is read only where xgetbv is
    enabled."""
    last_leaf = {start: query(start, 0)[_EAX] for start in (0, _EXTENDED)}
    last_subleaf = query(7, 0)[_EAX] if last_leaf[0] >= 7 else 0

    @cache
    def registers(leaf: int, subleaf: int) -> Registers:
        is_valid = leaf <= last_leaf[leaf & _EXTENDED] and (leaf != 7 or subleaf <= last_subleaf)
        return query(leaf, subleaf) if is_valid else _ZEROS

    enabled_state = xcr0() if registers(1, 0)[_ECX] >> _OSXSAVE_BIT & 1 else 0
    result: dict[str, bool] = {}
    for leaf, subleaf, register, bits in _BITS:
        bits_set = registers(leaf, subleaf)[register]
        for name, bit in bits.items():
            required_state = _REQUIRED_XCR0.get(name, 0)
            result[name] = result.get(name, False) or (
                bool(bits_set >> bit & 1) and enabled_state & required_state == required_state
            )
    result["widekl"] &= result["kl"]
    has_avx10 = registers(7, 1)[_EDX] >> _AVX10_BIT & 1 and enabled_state & _AVX512 == _AVX512
    version = registers(0x24, 0)[_EBX] & 0xFF if has_avx10 else 0
    for number in (1, 2):  # LLVM 20 names widths; 512-bit registers are always present
        result |= dict.fromkeys((f"avx10.{number}", f"avx10.{number}-256", f"avx10.{number}-512"), version >= number)
    return result


@cache
def described() -> Mapping[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty on other systems than Linux."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields
