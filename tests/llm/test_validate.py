"""compile(validate=True) of language models: on steps that a cache describes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from relaxlite.driver import build
from relaxlite.errors import ValidationError
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.step import CACHE_DTYPES
from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.llm.compiling import build_checkpoint, build_step_module
from relaxlite.llm.step_samples import step_samples
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import Pass
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.revalidate import rerun
from relaxlite.target import Target
from tests.support.llm_models import small_checkpoint


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_samples_are_steps_of_a_cache(cache_dtype: str) -> None:
    module = build_step_module(small_checkpoint("llama"), cache_dtype=cache_dtype, has_fill=True)
    found, fills = step_samples(module).values()
    assert [len(tokens) for tokens, *_ in found] == [1, 10, 25]
    for tokens, positions, slots, table, blocks, wanted, *pools in found:
        assert len(tokens) == len(positions) == len(np.unique(slots)) and wanted.max() == len(tokens) - 1
        assert blocks[:, 2].sum() == len(tokens) and table.max() < pools[0].shape[1]
        assert all(np.any(pool) for pool in pools)
    for with_wanted, without in zip(found, fills, strict=True):
        assert all(a is b for a, b in zip((*with_wanted[:5], *with_wanted[6:]), without, strict=True))


def test_samples_fit_into_the_context() -> None:
    def most(context: int) -> list[int]:
        samples = step_samples(build_step_module(small_checkpoint("llama"), max_context=context))
        return [int(positions.max()) for _, positions, *_ in samples["main"]]

    assert most(96) == [0, 6, 70]
    assert most(64) == [0, 6]
    assert most(1) == [0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "cache_dtype"),
    [(None, "float32"), ("q4_0", "float32"), ("q8_0", "int8"), ("q5_1", "float16")],
)
def test_steps_are_validated(kind: str | None, cache_dtype: str) -> None:
    checkpoint = small_checkpoint("qwen3")
    if kind is not None:
        checkpoint = quantize_checkpoint(checkpoint, kind)
    module = build_step_module(checkpoint, cache_dtype=cache_dtype)
    assert build(module, validate=step_samples(module)).kernels


@pytest.mark.exhaustive
def test_steps_with_states_are_validated() -> None:
    module = build_step_module(small_checkpoint("qwen3_5"), has_fill=True)
    samples = step_samples(module)
    assert all(np.any(pool) for call in samples["main"] for pool in call[7:])
    assert build(module, validate=samples).kernels


class _LargerNorms(Rewriter):
    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "rms_norm":
            return ops.multiply(self.bb.emit(value), Constant.of(np.float32(1.01)))
        return None


def test_a_pass_that_changes_a_step_is_found() -> None:
    def broken(module: IRModule, _: object) -> IRModule:
        return map_functions(module, lambda f: _LargerNorms().function(f))

    steps = list(default_pipeline())
    at = next(k for k, step in enumerate(steps) if step.name == "decompose")
    steps.insert(at, Pass("broken", broken, "graph"))
    module = build_step_module(small_checkpoint("llama"))
    with pytest.raises(ValidationError, match=r"^pass broken changes what the module computes, at n=1, "):
        build(module, passes=steps, validate=step_samples(module))


def test_the_compiler_of_checkpoints_validates_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(module: IRModule) -> dict[str, list[tuple[np.ndarray, ...]]]:
        asked.append(1)
        return {name: samples[:1] for name, samples in step_samples(module).items()}

    monkeypatch.setattr("relaxlite.llm.compiling.step_samples", noted)
    monkeypatch.setattr("relaxlite.llm.compiling.make_attachments", lambda *_: {})
    assert build_checkpoint(small_checkpoint("llama"), validate=True).kernels and asked == [1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["q4_0", "q5_1"])
def test_steps_that_only_fill_the_cache_are_validated(kind: str) -> None:
    module = build_step_module(quantize_checkpoint(small_checkpoint("llama"), kind), has_fill=True)
    samples = step_samples(module)
    assert set(samples) == {"main", "fill"}
    assert build(module, validate=samples).kernels


@pytest.mark.exhaustive
def test_a_pass_that_changes_what_fills_the_cache_is_found(tmp_path: Path) -> None:
    """And in no other function. What is kept of it runs again."""

    def broken(module: IRModule, _: object) -> IRModule:
        return module.updated({"fill": _LargerNorms().function(module["fill"])})

    steps = list(default_pipeline())
    at = next(k for k, step in enumerate(steps) if step.name == "decompose")
    steps.insert(at, Pass("broken", broken, "graph"))
    module = build_step_module(quantize_checkpoint(small_checkpoint("llama"), "q4_0"), has_fill=True)
    context = PassContext(Target.host(), dump_dir=tmp_path)
    with pytest.raises(ValidationError, match=r"^pass broken in fill changes what the module computes, at n=1, ") as e:
        build(module, passes=steps, context=context, validate=step_samples(module))
    (path,) = re.findall(r"revalidate (\S+)`", str(e.value))
    assert "pass broken in fill changes" in (rerun(path) or "")
