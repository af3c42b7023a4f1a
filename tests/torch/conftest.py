"""Random numbers of torch are the same in every run of a test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch's generator, where torch is installed."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
