"""Where compiled code is to run: a processor, what it can do, and how to write that down as one line of text.

>>> target = Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
>>> target.has("avx2"), target.vector_bits
(True, 256)
>>> Target.parse(str(target)) == target
True
>>> gpu = Target.parse("cuda -arch=sm_90")
>>> gpu.kind, gpu.cpu, gpu.gpu.multiprocessors, gpu.host_part.kind
('cuda', 'sm_90', 132, 'llvm')
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import llvmlite.binding as llvm

from relaxlite.cpus import Microarchitecture, find
from relaxlite.errors import InvalidArgumentError
from relaxlite.features import CODEGEN_FEATURES, SYSTEM_FEATURES
from relaxlite.gpus import GPUS, Gpu, installed
from relaxlite.gpus import find as find_gpu
from relaxlite.llvm_names import enabled_features, host_features, is_known_cpu, known_features, unknown_features
from relaxlite.records import dataclass

Kind = Literal["llvm", "cuda"]

_DEFAULT_L1_BYTES = 32 * 1024
_DEFAULT_L2_BYTES = 512 * 1024
_DEFAULT_L3_BYTES = 32 * 1024 * 1024
_SYNTAX = "llvm [-mcpu=NAME] [-mattr=+x,-y,...] [-mtriple=TRIPLE] [-l1-bytes=N] [-l2-bytes=N] [-l3-bytes=N] [-cores=N]"
_CUDA_SYNTAX = "cuda [-arch=sm_NN] [-sms=N]"
_NVPTX = "nvptx64-nvidia-cuda"

# x86 processors that every LLVM knows.
_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")


@dataclass(frozen=True, slots=True)
class Target:
    """A processor to compile for. `features` are LLVM's, each with its sign: ("+avx2", "-avx512f").

    The caches are those of one core; the last level, l3_bytes, may be shared.
    `cores` is a hint for schedules; 0: not known.
    `gpu`: facts of the GPU of a target of kind "cuda", whose triple, cpu and features are those of LLVM's NVPTX.
    """

    triple: str
    cpu: str
    features: tuple[str, ...] = ()
    l1_bytes: int = _DEFAULT_L1_BYTES
    l2_bytes: int = _DEFAULT_L2_BYTES
    l3_bytes: int = _DEFAULT_L3_BYTES
    cores: int = 0
    kind: Kind = "llvm"
    gpu: Gpu | None = None

    @staticmethod
    @cache
    def host() -> Target:
        """The machine that this process runs on."""
        return Target(
            triple=llvm.get_process_triple(),
            cpu=llvm.get_host_cpu_name(),
            features=host_features(),
            l1_bytes=host_cache_bytes(1) or _DEFAULT_L1_BYTES,
            l2_bytes=host_cache_bytes(2) or _DEFAULT_L2_BYTES,
            l3_bytes=host_cache_bytes(3) or _DEFAULT_L3_BYTES,
            cores=os.cpu_count() or 0,
        )

    @staticmethod
    def parse(text: str) -> Target:
        """A target from its text; "llvm" alone is the host, "cuda" alone its GPU.

        InvalidArgumentError says what is wrong with the text.
        """
        kind, *options = shlex.split(text) or [""]
        if kind == "cuda":
            return _cuda(text, options)
        if kind != "llvm":
            raise InvalidArgumentError(f"target {text!r}: unknown kind {kind!r}; write {_SYNTAX} or {_CUDA_SYNTAX}")
        if not options:
            return Target.host()
        return _from_options(text, dict(_parse_option(text, option) for option in options))

    def has(self, feature: str) -> bool:
        """Whether code for this target may use an LLVM feature, as "avx512f", by name or implied by the CPU."""
        return feature in enabled_features(self.triple, self.cpu, self.features)

    @property
    def required_features(self) -> tuple[str, ...]:
        """The features, by name, that a processor must have to run code for this target."""
        named = tuple(f[1:] for f in self.features if f[0] == "+")
        return tuple(filter(self.has, CODEGEN_FEATURES.get(self.architecture, named)))

    @property
    def host_part(self) -> Target:
        """The processor that runs the host's part of code for this target: for a GPU this machine's, else itself."""
        return self if self.kind == "llvm" else Target.host()

    @property
    def runs_here(self) -> bool:
        """Whether this processor can run code that is made for the target; for a GPU its host part does not suffice."""
        host = Target.host()
        is_alike = self.architecture == host.architecture and self._system == host._system
        return is_alike and all(map(host.has, self.required_features))

    @property
    def _system(self) -> str:
        return next((name for name in ("linux", "darwin", "windows") if name in self.triple), "")

    @property
    def architecture(self) -> str:
        """The first part of the triple: "x86_64", "aarch64"."""
        return self.triple.split("-")[0]

    @property
    def is_x86(self) -> bool:
        return self.architecture in ("x86_64", "amd64", "i386", "i686")

    @property
    def vector_bits(self) -> int:
        """The width of the widest vector register that code should use."""
        if self.is_x86:
            return 512 if self.has("avx512f") else 256 if self.has("avx") else 128
        return 128

    @property
    def num_vector_registers(self) -> int:
        return 16 if self.is_x86 and not self.has("avx512f") else 32

    @property
    def has_dp4a(self) -> bool:
        """Whether one instruction sums the products of four bytes in each lane."""
        return self.is_x86 and (self.has("avx512vnni") or self.has("avxvnni"))

    @property
    def has_maddubs(self) -> bool:
        """Whether one instruction sums the products of two bytes in each 16 bits."""
        return self.is_x86 and self.has("ssse3")

    @property
    def has_fp16_conversion(self) -> bool:
        """Whether one instruction makes float32 of float16."""
        return not self.is_x86 or self.has("f16c") or self.has("avx512f")

    @property
    def cpu_facts(self) -> Microarchitecture:
        """What schedules ask about the processor (cpus.py)."""
        return find(self.cpu, self.vector_bits, is_x86=self.is_x86)

    @property
    def interleaves_rows(self) -> bool:
        """Whether it has dp4a groups, and those of several rows are issued in turn."""
        return self.has_dp4a and self.cpu_facts.interleaves_rows

    @property
    def has_fast_bf16_dots(self) -> bool:
        """Whether it has bfloat16 dot products, and at twice the rate of float32 FMAs."""
        return self.has("avx512bf16") and self.cpu_facts.has_fast_bf16_dots

    def vector_lanes(self, itemsize: int) -> int:
        """How many elements of `itemsize` bytes fill one vector register."""
        return max(1, self.vector_bits // (8 * itemsize))

    @property
    def feature_string(self) -> str:
        """As LLVM takes it: without what code must not use since it is not required."""
        unused = sorted(known_features(SYSTEM_FEATURES)) if self.is_x86 else ()
        return ",".join([*self.features, *(f"-{name}" for name in unused)])

    def __str__(self) -> str:
        if self.gpu is not None:
            usual = find_gpu(self.gpu.arch)
            return f"cuda -arch={self.gpu.arch}" + ("" if self.gpu == usual else f" -sms={self.gpu.multiprocessors}")
        parts = [self.kind, f"-mcpu={self.cpu}", f"-mtriple={self.triple}"]
        if self.features:
            parts.append(f"-mattr={','.join(self.features)}")
        if self.l1_bytes != _DEFAULT_L1_BYTES:
            parts.append(f"-l1-bytes={self.l1_bytes}")
        if self.l2_bytes != _DEFAULT_L2_BYTES:
            parts.append(f"-l2-bytes={self.l2_bytes}")
        if self.l3_bytes != _DEFAULT_L3_BYTES:
            parts.append(f"-l3-bytes={self.l3_bytes}")
        if self.cores:
            parts.append(f"-cores={self.cores}")
        return " ".join(parts)


def _parse_option(text: str, option: str) -> tuple[str, str]:
    match = re.fullmatch(r"-(mcpu|mattr|mtriple|l1-bytes|l2-bytes|l3-bytes|cores)=(.+)", option)
    if match is None:
        raise InvalidArgumentError(f"target {text!r}: cannot read option {option!r}; write {_SYNTAX}")
    return match[1], match[2]


def _from_options(text: str, options: Mapping[str, str]) -> Target:
    triple = options.get("mtriple") or llvm.get_process_triple()
    _check_triple(text, triple)
    is_host = triple.split("-")[0] == llvm.get_process_triple().split("-")[0]
    cpu = options.get("mcpu") or (llvm.get_host_cpu_name() if is_host else _generic_cpu(triple))
    _check_cpu(text, triple, cpu)
    if "mattr" in options:
        features = _parse_features(text, options["mattr"])
        _check_features(text, triple, features)
    else:
        features = Target.host().features if is_host and cpu == llvm.get_host_cpu_name() else ()
    return Target(
        triple=triple,
        cpu=cpu,
        features=features,
        l1_bytes=_parse_count(text, options, "l1-bytes", _DEFAULT_L1_BYTES),
        l2_bytes=_parse_count(text, options, "l2-bytes", _DEFAULT_L2_BYTES),
        l3_bytes=_parse_count(text, options, "l3-bytes", _DEFAULT_L3_BYTES),
        cores=_parse_count(text, options, "cores", 0),
    )


def _cuda(text: str, options: Sequence[str]) -> Target:
    """A GPU as a target."""
    values: dict[str, str] = {}
    for option in options:
        match = re.fullmatch(r"-(arch|sms)=(.+)", option)
        if match is None:
            raise InvalidArgumentError(f"target {text!r}: cannot read option {option!r}; write {_CUDA_SYNTAX}")
        values[match[1]] = match[2]
    gpu = find_gpu(values["arch"]) if "arch" in values else installed()
    if gpu is None and "arch" not in values:
        raise InvalidArgumentError(f"target {text!r}: no GPU with a driver is here; name one, as in 'cuda -arch=sm_80'")
    if gpu is None:
        known = ", ".join(known.arch for known in GPUS)
        raise InvalidArgumentError(f"target {text!r}: unknown architecture {values['arch']!r}; there are {known}")
    gpu = replace(gpu, multiprocessors=_parse_count(text, values, "sms", gpu.multiprocessors))
    return Target(_NVPTX, gpu.arch, (f"+{gpu.ptx}",), l2_bytes=gpu.l2_bytes, kind="cuda", gpu=gpu)


def _generic_cpu(triple: str) -> str:
    return "x86-64" if triple.startswith(("x86_64", "amd64")) else "generic"


def _check_triple(text: str, triple: str) -> None:
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(triple)
    except RuntimeError as error:
        raise InvalidArgumentError(f"target {text!r}: LLVM does not know the triple {triple!r} ({error})") from error


def _check_cpu(text: str, triple: str, cpu: str) -> None:
    """LLVM ends the process when it generates code for a processor that it does not know, so a child process tries."""
    is_x86 = triple.startswith(("x86_64", "amd64"))
    if cpu in ("generic", llvm.get_host_cpu_name(), *(_LEVELS if is_x86 else ())):
        return
    if not is_known_cpu(triple, cpu):
        raise InvalidArgumentError(f"target {text!r}: LLVM does not know the processor {cpu!r} for {triple}")


def _check_features(text: str, triple: str, features: tuple[str, ...]) -> None:
    """LLVM passes over features that it does not know, with a line for each time that it meets them."""
    names = {f[1:] for f in features}
    if triple.split("-")[0] == llvm.get_process_triple().split("-")[0]:
        names -= set(llvm.get_host_cpu_features())
    unknown = unknown_features(triple, tuple(sorted(names))) if names else ()
    if unknown:
        raise InvalidArgumentError(
            f"target {text!r}: LLVM does not know the feature{'s' * (len(unknown) > 1)} "
            f"{', '.join(map(repr, unknown))} for {triple}"
        )


def _parse_features(text: str, value: str) -> tuple[str, ...]:
    features = tuple(part.strip() for part in value.split(","))
    for feature in features:
        if not re.fullmatch(r"[+-][\w.\-]+", feature):
            raise InvalidArgumentError(
                f"target {text!r}: feature {feature!r} must be '+' or '-' and a name, as in -mattr=+avx2,-avx512f"
            )
    return features


def _parse_count(text: str, options: Mapping[str, str], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise InvalidArgumentError(f"target {text!r}: -{name} must be a whole number from 1, got {value!r}")
    return int(value)


def host_cache_bytes(level: int) -> int | None:
    """The size of one core's data cache as Linux tells it; None elsewhere."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((index / "level").read_text()) != level or (index / "type").read_text().strip() == "Instruction":
                continue
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if match := re.fullmatch(r"(\d+)([KM]?)", size):
            return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return None
