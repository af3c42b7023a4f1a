"""What processors may have, by LLVM's names: which of it compiled code may use, so that it must be there at run time.

LLVM calls other things features too ("evex512", "prefer-256-bit"), which no processor says of itself.
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
# Those that every LLVM finds on a machine of that kind.
_AARCH64 = ("fp-armv8", "neon", "crc", "lse", "sve", "sve2")

# What code may use, by the first part of the triple.
USED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("x86_64", "amd64", "i386", "i686"), _X86),
    **dict.fromkeys(("aarch64", "arm64"), _AARCH64),
}
# LLVM 20 says "evex512" of a processor with registers of 512 bits, later ones do not know it.
NO_INSTRUCTIONS = frozenset(("evex512",))
# Instructions of x86 that only systems and the like ask for: compiled code never has them. Virtual machines hide many.
NEVER_USED = frozenset(
    (
        "cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "fsgsbase", "fxsr", "hreset", "invpcid", "kl", "lwp",
        "movdir64b", "movdiri", "mwaitx", "pconfig", "pku", "prefetchi", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed",
        "rtm", "serialize", "sgx", "shstk", "tsxldtrk", "uintr", "usermsr", "waitpkg", "wbnoinvd", "widekl", "xsave",
        "xsavec", "xsaveopt", "xsaves",
    )
)  # fmt: skip
