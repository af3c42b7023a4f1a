"""Classification of LLVM's CPU features: which ones compiled code may use, so that processors must have them.

LLVM's features also include tuning flags ("evex512", "prefer-256-bit"), which processors do not report.
"""

from __future__ import annotations

from collections.abc import Mapping

_X86 = (
    "cx8", "cmov", "mmx", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "crc32", "popcnt", "sse4a", "aes",
    "pclmul", "sha", "sha512", "sm3", "sm4", "gfni", "movbe", "lzcnt", "bmi", "bmi2", "adx", "tbm", "prfchw", "movrs",
    "raoint", "cmpccxadd", "avx", "f16c", "fma", "fma4", "xop", "avx2", "vaes", "vpclmulqdq", "avxvnni", "avxifma",
    "avxvnniint8", "avxvnniint16", "avxneconvert", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl",
    "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512bitalg", "avx512vpopcntdq", "avx512vp2intersect",
    "avx512bf16", "avx512fp16", "avx10.1", "avx10.2", "avx10.1-512", "avx10.2-512", "amx-tile", "amx-int8",
    "amx-bf16", "amx-fp16", "amx-complex", "amx-fp8", "amx-tf32", "amx-avx512", "amx-movrs", "egpr", "push2pop2",
    "ppx", "ndd", "ccmp", "nf", "cf", "zu",
)  # fmt: skip
# Features that every version of LLVM detects on such machines.
_AARCH64 = ("fp-armv8", "neon", "crc", "lse", "sve", "sve2")

# Features that compiled code may use, by architecture, the first part of the triple.
CODEGEN_FEATURES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("x86_64", "amd64", "i386", "i686"), _X86),
    **dict.fromkeys(("aarch64", "arm64"), _AARCH64),
}
# Features without instructions: LLVM 20 reports "evex512" for 512-bit registers, later versions do not know it.
TUNING_FLAGS = frozenset(("evex512",))
# Features for operating systems and the like, which compiled code never uses. Virtual machines hide many of them.
SYSTEM_FEATURES = frozenset(
    (
        "cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "fsgsbase", "fxsr", "hreset", "invpcid", "kl", "lwp",
        "movdir64b", "movdiri", "mwaitx", "pconfig", "pku", "prefetchi", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed",
        "rtm", "serialize", "sgx", "shstk", "tsxldtrk", "uintr", "usermsr", "waitpkg", "wbnoinvd", "widekl", "xsave",
        "xsavec", "xsaveopt", "xsaves",
    )
)  # fmt: skip
