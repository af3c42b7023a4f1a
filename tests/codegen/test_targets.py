"""Code for other machines: objects are emitted, never run; in child processes, because an LLVM error kills."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from relaxlite.errors import InvalidArgumentError
from relaxlite.features import SYSTEM_FEATURES
from relaxlite.target import Target
from tests.support import tiers
from tests.support.paths import ROOT

_TARGETS = (
    "llvm -mcpu=x86-64-v2 -mtriple=x86_64-unknown-linux-gnu",
    "llvm -mcpu=x86-64-v3 -mtriple=x86_64-pc-windows-msvc",
    "llvm -mcpu=generic -mtriple=aarch64-unknown-linux-gnu",
)
_MORE_TARGETS = (
    "llvm -mcpu=x86-64 -mtriple=x86_64-unknown-linux-gnu",
    "llvm -mcpu=x86-64-v4 -mtriple=x86_64-unknown-linux-gnu",
    "llvm -mcpu=sapphirerapids -mtriple=x86_64-unknown-linux-gnu",
    "llvm -mcpu=skylake -mtriple=x86_64-apple-darwin",
    "llvm -mcpu=neoverse-v1 -mtriple=aarch64-unknown-linux-gnu",
    "llvm -mcpu=apple-m1 -mtriple=arm64-apple-darwin",
)

_CHILD = """
import sys
from relaxlite import dtypes
from relaxlite.codegen.llvm import compile_programs
from relaxlite.ir.program import BINARY, UNARY, Binary, Buffer, Cast, For, Store, TensorProgram, Unary
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.target import Target
from tests.codegen.test_codegen import _scratch_program
from tests.codegen.test_scalars import elementwise, has_meaning
from tests.codegen.test_vectorize import over

target = Target.parse(sys.argv[1])
programs = {"scratch": _scratch_program("global", "n")}
for dtype in ("bool", "int8", "int32", "uint64", "float16", "bfloat16", "float32", "float64"):
    for lanes in (0, 16) if dtype in ("bool", "float16", "float32") else (16,):
        for op in UNARY:
            if has_meaning(op, dtype):
                result = "bool" if op in ("not", "isnan", "isinf") else dtype
                programs[f"{op} {dtype} {lanes}"] = elementwise(lambda v: Unary(op, v), (dtype,), result, lanes)
        for op in BINARY:
            if has_meaning(op, dtype):
                make = lambda v, w: Binary(op, v, w)
                programs[f"{op} {dtype} {lanes}"] = elementwise(make, (dtype,) * 2, dtype, lanes)
        for other in dtypes.ALL:
            programs[f"cast {dtype} {other} {lanes}"] = elementwise(lambda v: Cast(v, other), (dtype,), other, lanes)
n, i = SymVar("n"), SymVar("i")
a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
programs["reduce"] = over(n, 16, lambda i: Store(out, (sym(0),), a[i], "max"), a, out)
programs["gather"] = over(n, 16, lambda i: Store(out, (i,), a[i % 7]), a, out)
programs["scatter"] = over(n, 16, lambda i: Store(out, (i * 3,), a[i]), a, out)
programs["parallel"] = TensorProgram((a, out), (n,), For(i, n, Store(out, (i,), a[i]), "parallel"))
names = list(programs)[int(sys.argv[2]) :: int(sys.argv[3])]
programs = {name: programs[name] for name in names}
code = compile_programs(programs, target)
assert len(code.kernels) == len(programs)
print(len(programs), code.objects[0][:4].hex())
"""


@pytest.mark.parametrize(
    "text", [*_TARGETS, *(pytest.param(text, marks=pytest.mark.exhaustive) for text in _MORE_TARGETS)]
)
def test_object_code_for_other_machines(text: str) -> None:
    """By default each of the programs for one of the first targets, that is."""
    share = ("0", "1") if tiers.is_exhaustive() else (str(_TARGETS.index(text)), str(len(_TARGETS)))
    words = [sys.executable, "-c", _CHILD, text, *share]
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-2000:]
    count, magic = found.stdout.split()
    assert int(count) > 400 // int(share[1])
    expected = "7f454c46" if "linux" in text else "cffaedfe" if "darwin" in text else "6486"
    assert magic.startswith(expected)


# Target


def test_target_round_trips() -> None:
    for text in (
        "llvm",
        *_TARGETS,
        *_MORE_TARGETS,
        "llvm -mcpu=znver4 -mattr=+avx2,-avx512f -l1-bytes=1024 -l2-bytes=4096 -l3-bytes=65536 -cores=8",
    ):
        target = Target.parse(text)
        assert Target.parse(str(target)) == target
    assert Target.parse("llvm") == Target.host()


def test_target_knows_its_vectors() -> None:
    for name, bits, registers in (("x86-64", 128, 16), ("x86-64-v3", 256, 16), ("x86-64-v4", 512, 32)):
        target = Target.parse(f"llvm -mcpu={name} -mtriple=x86_64-unknown-linux-gnu")
        assert (target.vector_bits, target.num_vector_registers) == (bits, registers)
        assert target.vector_lanes(4) == bits // 32
    arm = Target.parse("llvm -mtriple=aarch64-unknown-linux-gnu")
    assert (arm.vector_bits, arm.num_vector_registers) == (128, 32)


def test_features_can_be_switched_off() -> None:
    target = Target.parse("llvm -mcpu=x86-64-v4 -mattr=-avx512f -mtriple=x86_64-unknown-linux-gnu")
    assert target.has("avx2") and not target.has("avx512f") and target.vector_bits == 256


def test_a_feature_goes_with_what_it_needs() -> None:
    """As in LLVM, which ends the process when code uses a feature that it has switched off."""
    target = Target.parse("llvm -mcpu=sapphirerapids -mattr=-avx2 -mtriple=x86_64-unknown-linux-gnu")
    gone = ("avx2", "avx512f", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16")
    assert not any(map(target.has, gone)) and not set(gone) & set(target.required_features)
    assert target.has("avx") and target.has("fma") and target.vector_bits == 256


def target_of(cpu: str, triple: str = "x86_64-unknown-linux-gnu") -> Target:
    return Target.parse(f"llvm -mcpu={cpu} -mtriple={triple}")


@pytest.mark.parametrize(
    ("cpu", "bits", "features"),
    [
        ("cooperlake", 512, "avx512bf16 avx512vnni"),
        ("knl", 512, "avx512f avx512cd"),
        ("cannonlake", 512, "avx512ifma avx512vbmi"),
        ("diamondrapids", 512, "amx-int8 amx-fp8 egpr avx512fp16"),
        ("arrowlake", 256, "avxvnni avxvnniint8"),
        ("core-avx2", 256, "avx2 fma"),
        ("sandybridge", 256, "avx"),
        ("bdver4", 256, "xop fma4 avx2"),
    ],
)
def test_a_name_implies_what_llvm_says_of_it(cpu: str, bits: int, features: str) -> None:
    target = target_of(cpu)
    assert target.vector_bits == bits and all(map(target.has, features.split()))
    assert set(features.split()) <= set(target.required_features)


def test_a_name_implies_nothing_more() -> None:
    assert target_of("x86-64").required_features == ("cx8", "cmov", "mmx", "sse", "sse2")
    assert not set(target_of("sandybridge").required_features) & {"avx2", "fma", "f16c", "bmi"}
    assert not target_of("knl").has("avx512vl") and not target_of("diamondrapids").has("xop")
    assert target_of("neoverse-v2", "aarch64-unknown-linux-gnu").required_features[-2:] == ("sve", "sve2")
    assert target_of("generic", "aarch64-unknown-linux-gnu").required_features == ("fp-armv8", "neon")
    other = Target.parse("llvm -mcpu=generic-rv64 -mattr=+v,-c -mtriple=riscv64-unknown-linux-gnu")
    assert other.required_features == ("v",) and not other.has("c")


def test_llvm_says_of_the_host_what_it_finds_there(capfd: pytest.CaptureFixture[str]) -> None:
    host = Target.host()
    asked = dataclasses.replace(host, features=host.features[::-1])
    assert asked.required_features == host.required_features
    assert capfd.readouterr().err == "", "LLVM does not know a feature"


@pytest.mark.parametrize("cpu", ["host", "sapphirerapids", "arrowlake", "znver5"])
def test_code_uses_nothing_that_is_not_required(cpu: str) -> None:
    """As "uintr", which virtual machines of a Sapphire Rapids hide, or LLVM 20's "evex512"."""
    target = Target.host() if cpu == "host" else target_of(cpu)
    allowed = dataclasses.replace(target, features=tuple(target.feature_string.split(",")))
    assert allowed.required_features == target.required_features
    assert not any(map(allowed.has, SYSTEM_FEATURES)) and "evex512" not in target.required_features


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown kind ''"),
        ("vulkan", "unknown kind 'vulkan'"),
        ("llvm -speed=11", "cannot read option '-speed=11'"),
        ("llvm -mattr=avx2", "feature 'avx2' must be"),
        ("llvm -mtriple=nonsense", "does not know the triple 'nonsense'"),
        ("llvm -mattr=+nonsense,+avx2", "LLVM does not know the feature 'nonsense' for"),
        ("llvm -mtriple=riscv64-unknown-linux-gnu -mattr=+v,-u,+w", "LLVM does not know the features 'u', 'w' for"),
        ("llvm -cores=0", "-cores must be a whole number from 1, got '0'"),
        ("llvm -l1-bytes=0", "-l1-bytes must be a whole number from 1, got '0'"),
        ("llvm -cores=many", "-cores must be a whole number from 1, got 'many'"),
    ],
)
def test_target_text_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Target.parse(text)
