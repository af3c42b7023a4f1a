"""Where compiled code is to run: a processor, what it can do, and how to write that down as one line of text.

>>> target = Target.parse("llvm -mcpu=x86-64-v3 -mtriple=x86_64-unknown-linux-gnu")
>>> target.has("avx2"), target.vector_bits
(True, 256)
>>> Target.parse(str(target)) == target
True
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import llvmlite.binding as llvm

from relaxlite.errors import InvalidArgumentError
from relaxlite.features import NEVER_USED, USED
from relaxlite.records import dataclass

Kind = Literal["llvm"]

_STREAM_AHEAD = 16 << 10
_NEXT_PAGE = 4 << 10
_STREAMS_BY_ITSELF = ("znver1", "znver2", "znver3", "znver4", "btver2", "bdver1", "bdver2", "bdver3", "bdver4")
_DEFAULT_L1_BYTES = 32 * 1024
_DEFAULT_L2_BYTES = 512 * 1024
_DEFAULT_L3_BYTES = 32 * 1024 * 1024
_SYNTAX = "llvm [-mcpu=NAME] [-mattr=+x,-y,...] [-mtriple=TRIPLE] [-l1-bytes=N] [-l2-bytes=N] [-l3-bytes=N] [-cores=N]"

# x86 processors that every LLVM knows.
_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")


@dataclass(frozen=True, slots=True)
class Streams:
    """How many panels of weights one row of activations reads side by side, and how many bytes ahead of its loads their
    lines are asked for, by one row and by more; 0: not at all. Panels are of codes, scales and others, each a stream of
    its own; of `most` streams or fewer. Tiles of more rows are up to `vectors` vectors wide."""

    panels: int
    alone: int
    many: int
    most: int = 64
    vectors: int = 2

    def side_by_side(self, arrays: int) -> int:
        """How many panels, of so many arrays each."""
        return max(1, min(self.panels, self.most // max(arrays, 1)))


@dataclass(frozen=True, slots=True)
class Target:
    """A processor to compile for. `features` are LLVM's, each with its sign: ("+avx2", "-avx512f").

    The caches are those of one core; the last level, l3_bytes, may be shared.
    `cores` is a hint for schedules; 0: not known.
    """

    triple: str
    cpu: str
    features: tuple[str, ...] = ()
    l1_bytes: int = _DEFAULT_L1_BYTES
    l2_bytes: int = _DEFAULT_L2_BYTES
    l3_bytes: int = _DEFAULT_L3_BYTES
    cores: int = 0
    kind: Kind = "llvm"

    @staticmethod
    @cache
    def host() -> Target:
        """The machine that this process runs on."""
        found = llvm.get_host_cpu_features()
        features = tuple(f"{'+' if on else '-'}{name}" for name, on in sorted(found.items()))
        return Target(
            triple=llvm.get_process_triple(),
            cpu=llvm.get_host_cpu_name(),
            features=features,
            l1_bytes=host_cache_bytes(1) or _DEFAULT_L1_BYTES,
            l2_bytes=host_cache_bytes(2) or _DEFAULT_L2_BYTES,
            l3_bytes=host_cache_bytes(3) or _DEFAULT_L3_BYTES,
            cores=os.cpu_count() or 0,
        )

    @staticmethod
    def parse(text: str) -> Target:
        """A target from its text; "llvm" alone is the host. InvalidArgumentError says what is wrong with the text."""
        kind, *options = shlex.split(text) or [""]
        if kind != "llvm":
            raise InvalidArgumentError(f"target {text!r}: unknown kind {kind!r}; write {_SYNTAX}")
        if not options:
            return Target.host()
        return _from_options(text, dict(_parse_option(text, option) for option in options))

    def has(self, feature: str) -> bool:
        """Whether code for this target may use an LLVM feature, as "avx512f", by name or implied by the CPU."""
        return feature in _enabled(self.triple, self.cpu, self.features)

    @property
    def required_features(self) -> tuple[str, ...]:
        """The features, by name, that a processor must have to run code for this target."""
        named = tuple(f[1:] for f in self.features if f[0] == "+")
        return tuple(filter(self.has, USED.get(self.architecture, named)))

    @property
    def runs_here(self) -> bool:
        """Whether this processor can run code that is made for the target."""
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
    def has_byte_products(self) -> bool:
        """Whether one instruction sums the products of four bytes in each lane."""
        return self.is_x86 and (self.has("avx512vnni") or self.has("avxvnni"))

    @property
    def has_products_in_step(self) -> bool:
        """Whether rows of such products go in step (schedule_in_step.py); other processors have not been measured."""
        return self.has_byte_products and self._is_wide_intel

    @property
    def has_byte_pairs(self) -> bool:
        """Whether one instruction sums the products of two bytes in each 16 bits."""
        return self.is_x86 and self.has("ssse3")

    @property
    def stream_ahead(self) -> int:
        """How many bytes ahead of a long stream of weights its lines should be asked for; 0: not at all.

        Code that does much with each line leaves few loads in flight. Measured on 4-bit weights: 8 to 64 KB ahead, into
        the second cache, take a Granite Rapids from 55 to 95 % of the bandwidth of plain reads. A Zen 5 is best off
        with the next page of 4 KB, where its own prefetching ends: 1.05 to 1.2 times as fast for one row of
        activations, 1.5 to 1.8 times for 4 and 8. A Zen 4 gets slower.
        """
        if not self.is_x86 or self.cpu in _STREAMS_BY_ITSELF:
            return 0
        return _NEXT_PAGE if self._is_amd else _STREAM_AHEAD

    @property
    def streams_ahead(self) -> int:
        """How many bytes ahead of its loads an elementwise loop asks for two or more arrays from memory, which it reads
        in turn; 0: not at all.

        Measured on one thread of a Zen 4: the sum of two arrays of 128 MB from 82 to 89 % of the speed of copying, a
        chain with scale and bias from 73 to 78 %; 512 to 2048 bytes are alike, more is worse, and so is the first
        cache; one array gains nothing.
        """
        return 1024 if self._is_amd else 0

    @property
    def streams_of_blocks(self) -> Streams:
        """How weights in blocks are read from memory.

        Prefetching by the processor ends where a page does; with the pages of several panels in turn something is
        always on its way. Measured on 4-bit weights, two threads of a Granite Rapids, where plain reads give 31 GB/s:
        one row reads 29 GB/s of one panel 16 KB ahead, and 33 of four panels 640 to 1024 bytes ahead (31 of three or of
        six; 32, 30 of four 2.5, 8 KB ahead). More rows, which take two panels, are best off with 2.5 KB or more.

        Of a Zen 3, whose vectors are narrow, one row reads 22 to 25 GB/s of one panel, 31 of three or four panels 1 to
        2 KB ahead, where plain reads give 33. Two panels, four without requests, 4 KB ahead and six panels are worse.
        All vectors of 256 bits read so; Intel's have not been measured.

        A Zen 4 follows some six streams by itself. Where plain reads give two threads 60 GB/s, one row reads 4 bits and
        scales at 48 GB/s of one panel, 52 of two, bytes at 51, 58, 6 bits, whose scales have factors, at 47, 57; but 5
        bits whose scales and offsets have some, five arrays, at 47, 38. Where they give 35 all reach that. More rows
        are best off one vector wide, a page or more ahead: 3, 4, 8, 16 rows of 4 bits take 0.9, 0.83, 0.9, 0.92 of the
        time of two vectors, of 6 bits 0.94, 0.83, 0.81, 0.95, of bytes 1.05, 1.0, 0.79, 0.83; without asking as long.
        """
        if self.vector_bits == 512 and self.cpu == "znver4":
            return Streams(2, 0, _NEXT_PAGE, most=6, vectors=1)
        if self._is_wide_intel:
            return Streams(4, 768, 4096)
        if self.is_x86 and self.vector_bits == 256:
            return Streams(4, 1024, 1024)
        return Streams(1, self.stream_ahead, self.stream_ahead)

    @property
    def panel_steps_ahead(self) -> int:
        """How many steps of a sum ahead a register tile asks for its panel of float weights, beside an even share of
        the next one; 0: it asks for the next one alone, and otherwise (passes/products/panel_prefetch.py).

        Measured in turn on one thread of a Granite Rapids, with six pairs (k, n) from 384 x 384 to 2048 x 5632 whose
        weights come from the last cache: 16, 24, 64, 128, 512 rows are 1.27-1.40, 1.28-1.45, 1.26-1.37, 1.23-1.29,
        1.06-1.12 times as fast as by the other way; 4 rows, which ask for their own panel only, 1.14-1.39 times.
        4 to 48 steps are alike. Requests into the second cache instead of the first are worse than none.
        """
        return 8 if self._is_wide_intel else 0

    @property
    def page_bytes_ahead(self) -> int:
        """How many bytes ahead attention over pages asks for keys and values, in whole rows; 0: not at all.

        A page of 4 KB is where prefetching by the processor ends. Measured on two threads of a Granite Rapids, one row,
        3 heads of keys of 64 floats for 9 of queries, 4 for 32, and one of 256 for 4, from memory: after 512 tokens 28,
        61, 52 us instead of 43, 75, 67, after 2,000 tokens 113, 220, 200 instead of 160, 266, 248; from the last cache
        21, 39, 28 instead of 22, 40, 30. 2 to 8 KB are alike; into the first cache less good. Blocks of many rows take
        as long as before. A Zen 3 makes 1.04 and 1.08 times as many tokens of SmolLM2-135M after 512 and 1,500 tokens
        with 8 KB (1.04, 1.07 with 4; 0.99, 1.03 with 2), a Zen 5 1.02 after 1,500 and 1.03 after 4,000 (4 and 8 KB are
        alike). On a Zen 4 heads of 64, 128 and 256 halves take 0.86, 0.82, 0.85 of the time after 512 tokens, 0.79,
        0.68, 0.88 after 1,500 with 8 KB (0.85, 0.85, 0.91 and 0.84, 0.74, 0.90 with 4; no less with 2), of 64 floats
        0.87 and 0.93; 128 rows and 8 bits as long as before.
        """
        if (self.is_x86 and self.vector_bits == 256) or self.cpu == "znver4":
            return 2 * _NEXT_PAGE
        return _NEXT_PAGE if self._is_wide_intel or self.cpu == "znver5" else 0

    @property
    def asks_for_next_row(self) -> bool:
        """Whether softmax, norms and the like ask for the next row, and for the result's, while they compute one.

        Measured on a Granite Rapids, 1024 rows of 1024: softmax 0.35 -> 0.30 ms, where copying takes 0.28; 512 rows of
        384: layer norm 0.046 -> 0.041 ms; 32768 rows of 1024: layer norm 25 -> 19 ms, copying 18.
        """
        return self._is_wide_intel

    @property
    def converts_halves(self) -> bool:
        """Whether one instruction makes float32 of float16."""
        return not self.is_x86 or self.has("f16c") or self.has("avx512f")

    @property
    def hides_conversions(self) -> bool:
        """Whether vectors are widened beside multiply-adds at no cost, so that each tile may do it again.

        Measured: a Zen 4 does so. A Granite Rapids has no port to spare: 128 rows of half-precision weights take 1.25
        times as long as where each vector is widened once and kept in the first cache.
        """
        return self._is_amd or not self.is_x86

    @property
    def adds_beside_products(self) -> bool:
        """Whether additions of vectors take no time beside as many multiply-adds.

        Measured on vectors of 512 bits, on a Zen 4: 3.68 multiply-adds and 3.68 additions per ns, either alone 3.68; on
        a Zen 5: 7.9 and 7.9, multiply-adds alone 8.2. Dot products of words with additions of int32 alike.
        """
        return self.cpu in ("znver4", "znver5") and self.vector_bits == 512

    @property
    def loads_per_product(self) -> int:
        """How many vectors, or elements for all lanes of one, are loaded from the first cache in the time of a
        multiply-add, on processors that add beside these: two in a cycle, in which a Zen 4 has one multiply-add of 512
        bits, a Zen 5 two. Requests to a cache count as loads."""
        return 2 if self.cpu == "znver4" else 1

    @property
    def has_fast_pairs(self) -> bool:
        """Whether sums of products of bfloat16 in pairs take half the time of float32. On a Granite Rapids they take
        as long."""
        return self._is_amd and self.has("avx512bf16")

    @property
    def _is_wide_intel(self) -> bool:
        """An x86 processor with vectors of 512 bits that is not AMD's."""
        return self.is_x86 and not self._is_amd and self.vector_bits >= 512

    @property
    def _is_amd(self) -> bool:
        return self.cpu.startswith(("znver", "bdver", "btver"))

    def vector_lanes(self, itemsize: int) -> int:
        """How many elements of `itemsize` bytes fill one vector register."""
        return max(1, self.vector_bits // (8 * itemsize))

    @property
    def feature_string(self) -> str:
        """As LLVM takes it: without what code must not use since it is not required."""
        unused = sorted(_known(NEVER_USED)) if self.is_x86 else ()
        return ",".join([*self.features, *(f"-{name}" for name in unused)])

    def __str__(self) -> str:
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
    if not _is_known_cpu(triple, cpu):
        raise InvalidArgumentError(f"target {text!r}: LLVM does not know the processor {cpu!r} for {triple}")


@cache
def _is_known_cpu(triple: str, cpu: str) -> bool:
    code = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
        "machine = llvm.Target.from_triple(sys.argv[1]).create_target_machine(cpu=sys.argv[2])\n"
        "machine.emit_object(llvm.parse_assembly('define void @f() { ret void }'))"
    )
    done = subprocess.run([sys.executable, "-c", code, triple, cpu], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "not a recognized processor" not in done.stderr


def _check_features(text: str, triple: str, features: tuple[str, ...]) -> None:
    """LLVM passes over features that it does not know, with a line for each time that it meets them."""
    names = {f[1:] for f in features}
    if triple.split("-")[0] == llvm.get_process_triple().split("-")[0]:
        names -= set(llvm.get_host_cpu_features())
    unknown = _unknown_features(triple, tuple(sorted(names))) if names else ()
    if unknown:
        raise InvalidArgumentError(
            f"target {text!r}: LLVM does not know the feature{'s' * (len(unknown) > 1)} "
            f"{', '.join(map(repr, unknown))} for {triple}"
        )


@cache
def _unknown_features(triple: str, names: tuple[str, ...]) -> tuple[str, ...]:
    code = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
        "llvm.Target.from_triple(sys.argv[1]).create_target_machine(features=sys.argv[2])"
    )
    features = ",".join(f"+{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code, triple, features], capture_output=True, text=True, check=False)
    found = re.findall(r"'[+-](\S+)' is not a recognized feature", done.stderr)
    return tuple(dict.fromkeys(found))


def _known(names: Iterable[str]) -> list[str]:
    """Of these features of x86 those that LLVM knows, as far as can be told here: it prints warnings about others."""
    found = llvm.get_host_cpu_features()
    return [name for name in names if name in found] if "sse2" in found else list(names)


@cache
def _enabled(triple: str, cpu: str, features: tuple[str, ...]) -> frozenset[str]:
    """The features that LLVM has for a CPU by its name, with others switched on and off.

    LLVM inlines a function into another only where that one's features contain its own, so it inlines one that is
    compiled for the target into one for the target without a feature just where the target does not have that.
    """
    named = {f[1:] for f in features if f[0] == "+"} - {f[1:] for f in features if f[0] == "-"}
    host = Target.host()
    if (cpu, features) == (host.cpu, host.features):
        return frozenset(named)  # all features of the host are named
    names = list(USED.get(triple.split("-")[0], ()))
    names = _known(names) if "avx" in names else names
    without = {name: f"without.{number}" for number, name in enumerate(names)}
    lines = [f'target triple = "{triple}"', *_probe("with", cpu, features, "store i32 0, ptr %to")]
    for name, function in without.items():
        lines += _probe(function, cpu, (*features, f"-{name}"), "call void @with(ptr %to)")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly("\n".join(lines))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    builder.getModulePassManager().run(module, builder)
    found = {name for name, function in without.items() if "@with(" in str(module.get_function(function))}
    return frozenset(found | (named - set(names)))


def _probe(name: str, cpu: str, features: Iterable[str], statement: str) -> list[str]:
    attributes = f'"target-cpu"="{cpu}" "target-features"="{",".join(features)}"'
    return [f"define void @{name}(ptr %to) {attributes} {{", statement, "ret void", "}"]


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
