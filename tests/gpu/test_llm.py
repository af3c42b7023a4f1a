"""A tiny language model on the simulated device generates the tokens that it generates on a CPU."""

from __future__ import annotations

import pytest

from relaxlite.llm.compiling import build_checkpoint
from relaxlite.llm.model import LanguageModel
from relaxlite.runtime.gpu.driver import use_driver
from tests.gpu.simulator import SimulatedDriver
from tests.support.tiny_llm import checkpoint


@pytest.mark.exhaustive
def test_the_same_tokens_as_on_a_cpu() -> None:
    want = LanguageModel.of(build_checkpoint(checkpoint())).generate("abc", max_new_tokens=4)
    data = build_checkpoint(checkpoint(), "cuda -arch=sm_80")
    with use_driver(SimulatedDriver(1 << 27, checks_races=False, counts_traffic=False)):
        llm = LanguageModel.of(data)
    assert llm.generate("abc", max_new_tokens=4).tokens == want.tokens
