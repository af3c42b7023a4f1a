"""The table of processors: which row a target has, its facts, and that no other file of the package names one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from relaxlite.cpus import MICROARCHITECTURES, Microarchitecture, PrefetchPlan
from relaxlite.target import Target
from tests.support.paths import ROOT

PACKAGE = ROOT / "relaxlite"
HOWTO = (ROOT / "docs" / "howto-add" / "processor.md").read_text("utf-8")
LOG = (ROOT / "docs" / "measurements" / "cpus.md").read_text("utf-8")
SECTIONS = re.findall(r"^## (\w+)$", LOG, re.MULTILINE)
WHO = ("name", "llvm_names", "vector_bits", "is_x86")
FACTS = [field.name for field in fields(Microarchitecture) if field.name not in WHO]


def target_of(cpu: str, features: str = "", triple: str = "x86_64-unknown-linux-gnu") -> Target:
    return Target.parse(f"llvm -mcpu={cpu} -mtriple={triple}" + (f" -mattr={features}" if features else ""))


# Rows

ROWS = {
    "Zen 3": ("znver3", ""),
    "Zen 3, other vectors": ("znver3", "-avx"),
    "Zen 4": ("znver4", ""),
    "Zen 4, 256 bits": ("znver4", "-avx512f"),
    "Zen 4, 128 bits": ("znver4", "-avx"),
    "Zen 5": ("znver5", ""),
    "Zen 5, 128 bits": ("znver5", "-avx"),
    "AMD of 256 bits": ("znver5", "-avx512f"),
    "AMD": ("btver1", ""),
    "Ice Lake-SP": ("icelake-server", ""),
    "Sapphire Rapids": ("sapphirerapids", ""),
    "Granite Rapids": ("graniterapids", ""),
    "Intel of 512 bits": ("x86-64-v4", ""),
    "x86-64 of 256 bits": ("x86-64-v3", ""),
    "x86-64 of 128 bits": ("x86-64", ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_target_has_the_row_of_its_name_and_vectors(name: str) -> None:
    assert target_of(*ROWS[name]).cpu_facts.name == name


def test_every_row_can_be_reached() -> None:
    others = "other architectures"
    assert target_of("generic", triple="aarch64-unknown-linux-gnu").cpu_facts.name == others
    assert [row.name for row in MICROARCHITECTURES] == [*ROWS, others]


@pytest.mark.parametrize("cpu", ["znver1", "znver2", "bdver1", "bdver4", "btver2"])
def test_older_processors_have_the_row_of_a_relative(cpu: str) -> None:
    bits = target_of(cpu).vector_bits
    assert target_of(cpu).cpu_facts is MICROARCHITECTURES[0 if bits == 256 else 1]


@pytest.mark.parametrize("cpu", ["skylake-avx512", "cooperlake", "rocketlake", "haswell", "core2", "graniterapids-d"])
def test_narrower_vectors_are_of_the_row_of_that_width(cpu: str) -> None:
    assert target_of(cpu, "-avx512f,-avx").cpu_facts.name == "x86-64 of 128 bits"
    if target_of(cpu).vector_bits >= 256:
        assert target_of(cpu, "-avx512f").cpu_facts.name == "x86-64 of 256 bits"


# Facts

WIDE_INTEL = {
    "weight_prefetch_bytes": 16384,
    "elementwise_prefetch_bytes": 0,
    "block_prefetch_plan": (4, 768, 4096, 64, 2),
    "panel_prefetch_steps": 8,
    "page_prefetch_bytes": 4096,
    "prefetches_next_row": True,
    "hides_conversions": False,
    "adds_beside_fmas": False,
    "loads_per_fma": 1,
    "has_fast_bf16_dots": False,
    "interleaves_rows": True,
}
GOLDEN: dict[str, dict[str, Any]] = {
    "icelake-server": WIDE_INTEL,
    "sapphirerapids": WIDE_INTEL,
    "znver3": {
        "weight_prefetch_bytes": 0,
        "elementwise_prefetch_bytes": 1024,
        "block_prefetch_plan": (4, 1024, 1024, 64, 2),
        "panel_prefetch_steps": 0,
        "page_prefetch_bytes": 8192,
        "prefetches_next_row": False,
        "hides_conversions": True,
        "adds_beside_fmas": False,
        "loads_per_fma": 1,
        "has_fast_bf16_dots": False,
        "interleaves_rows": False,
    },
    "znver4": {
        "weight_prefetch_bytes": 0,
        "elementwise_prefetch_bytes": 1024,
        "block_prefetch_plan": (2, 0, 4096, 6, 1),
        "panel_prefetch_steps": 0,
        "page_prefetch_bytes": 8192,
        "prefetches_next_row": False,
        "hides_conversions": True,
        "adds_beside_fmas": True,
        "loads_per_fma": 2,
        "has_fast_bf16_dots": True,
        "interleaves_rows": False,
    },
    "znver5": {
        "weight_prefetch_bytes": 4096,
        "elementwise_prefetch_bytes": 1024,
        "block_prefetch_plan": (1, 4096, 4096, 64, 2),
        "panel_prefetch_steps": 0,
        "page_prefetch_bytes": 4096,
        "prefetches_next_row": False,
        "hides_conversions": True,
        "adds_beside_fmas": True,
        "loads_per_fma": 1,
        "has_fast_bf16_dots": True,
        "interleaves_rows": False,
    },
    "x86-64": {
        "weight_prefetch_bytes": 16384,
        "elementwise_prefetch_bytes": 0,
        "block_prefetch_plan": (1, 16384, 16384, 64, 2),
        "panel_prefetch_steps": 0,
        "page_prefetch_bytes": 0,
        "prefetches_next_row": False,
        "hides_conversions": False,
        "adds_beside_fmas": False,
        "loads_per_fma": 1,
        "has_fast_bf16_dots": False,
        "interleaves_rows": False,
    },
}


@pytest.mark.parametrize("cpu", GOLDEN)
def test_facts_are_those_that_code_was_measured_with(cpu: str) -> None:
    """A changed fact changes generated code: measure it (docs/measurements/cpus.md) before it changes here."""
    target, row = target_of(cpu), target_of(cpu).cpu_facts
    facts = {name: getattr(row, name) for name in FACTS}
    # What schedules ask of instructions that not every processor of a row has, the target answers.
    facts |= {"has_fast_bf16_dots": target.has_fast_bf16_dots, "interleaves_rows": target.interleaves_rows}
    assert facts == {**GOLDEN[cpu], "block_prefetch_plan": PrefetchPlan(*GOLDEN[cpu]["block_prefetch_plan"])}


def test_only_what_a_target_has_is_interleaved_or_fast() -> None:
    assert not target_of("icelake-server", "-avx512vnni").interleaves_rows
    assert not target_of("znver4", "-avx512bf16").has_fast_bf16_dots


# Documents, and other files


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_has_a_section_in_the_log(fact: str) -> None:
    assert fact in SECTIONS


def test_code_refers_to_sections_of_the_log_that_exist() -> None:
    texts = [path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    named = [name for text in texts for name in re.findall(r"docs/measurements/cpus\.md,\s+(\w+)", text)]
    assert len(named) > 15 and set(named) <= set(SECTIONS)


PROCESSOR = re.compile(
    r"znver|bdver|btver|\bzen ?\d|ice ?lake|rocket ?lake|sky ?lake|cascade ?lake|cooper ?lake|alder ?lake|rapids"
    r"|haswell|broadwell|epyc|xeon|neoverse|apple-m\d|cortex",
    re.IGNORECASE,
)


def test_only_the_table_names_processors() -> None:
    """Put what is known about one into the table, and its figures into the log."""
    named = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "cpus.py" and (found := PROCESSOR.findall(path.read_text("utf-8")))
    }
    assert named == {}


def test_cached_code_is_made_again_where_a_row_changes() -> None:
    for path in ("driver.py", "codegen/llvm/compile.py"):
        source = (PACKAGE / path).read_text("utf-8")
        assert source.count('"target.py"') == source.count('"cpus.py"') == source.count('"llvm_names.py"') == 1


def test_the_howto_runs_and_is_short(tmp_path: Path) -> None:
    assert HOWTO.count("\n") <= 40
    (block,) = re.findall(r"```python\n(.*?)```", HOWTO, re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
