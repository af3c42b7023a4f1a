"""Targets of GPUs: their text, their facts, and the pipeline that belongs to them."""

from __future__ import annotations

import pytest

from relaxlite.errors import InvalidArgumentError
from relaxlite.gpus import GPUS
from relaxlite.passes.pipeline import all_passes, default_pipeline, pipeline_of
from relaxlite.target import Target


@pytest.mark.parametrize("arch", [gpu.arch for gpu in GPUS])
def test_a_target_is_one_line_of_text(arch: str) -> None:
    target = Target.parse(f"cuda -arch={arch}")
    assert (target.kind, target.cpu, target.triple) == ("cuda", arch, "nvptx64-nvidia-cuda")
    assert target.gpu is not None and target.gpu.max_shared_bytes >= 99 << 10
    assert Target.parse(str(target)) == target
    smaller = Target.parse(f"cuda -arch={arch} -sms=20")
    assert smaller != target and Target.parse(str(smaller)) == smaller


def test_the_host_part_is_for_this_machine() -> None:
    assert Target.parse("cuda -arch=sm_80").host_part == Target.host()
    assert Target.host().host_part == Target.host()
    assert not Target.parse("cuda -arch=sm_80").runs_here


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda -arch=sm_61", "unknown architecture 'sm_61'; there are sm_80, sm_86"),
        ("cuda -mcpu=sm_80", r"cannot read option '-mcpu=sm_80'; write cuda \[-arch=sm_NN\]"),
        ("cuda -arch=sm_80 -sms=none", "-sms must be a whole number from 1, got 'none'"),
        ("vulkan", "unknown kind 'vulkan'; write llvm .* or cuda"),
    ],
)
def test_a_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Target.parse(text)


def test_each_kind_of_target_has_its_own_pipeline() -> None:
    cpu, gpu = ([step.name for step in pipeline_of(kind)] for kind in ("llvm", "cuda"))
    assert [step.name for step in default_pipeline()] == cpu
    assert [name for name in cpu if name in gpu] == [name for name in gpu if name in cpu], "the same order"
    assert set(gpu) - set(cpu) == {"schedule_gpu"}
    only_cpu = {"integer_products", "byte_products", "channels_last", "winograd", "schedule", "pack_constants"}
    assert only_cpu <= set(cpu) - set(gpu)
    assert {*cpu, *gpu} == {step.name for step in all_passes()}
