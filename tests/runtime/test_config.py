"""Knobs: default, environment, override, and their errors."""

from __future__ import annotations

import pytest

from relaxlite import config
from relaxlite.errors import InvalidArgumentError


def test_override_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAXLITE_POISON_MEMORY", raising=False)
    assert config.get("poison_memory") is False
    monkeypatch.setenv("RELAXLITE_POISON_MEMORY", "yes")
    assert config.get("poison_memory") is True
    with config.override(poison_memory=False):
        assert config.get("poison_memory") is False
        with config.override(poison_memory=True):
            assert config.get("poison_memory") is True
        assert config.get("poison_memory") is False
    assert config.get("poison_memory") is True


def test_set_lasts_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAXLITE_NUM_THREADS", raising=False)
    config.set(num_threads=3)
    assert config.get("num_threads") == 3
    config.set(num_threads=None)
    assert config.get("num_threads") is None


def test_errors_name_the_knob_and_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no knob 'speed'; there are num_threads, "):
        config.get("speed")
    with pytest.raises(InvalidArgumentError, match=r"num_threads must be a whole number from 1 to 1024, got '4'"):
        config.set(num_threads="4")
    with pytest.raises(InvalidArgumentError, match=r"num_threads must be a whole number from 1 to 1024, got 0"):
        config.set(num_threads=0)
    monkeypatch.setenv("RELAXLITE_NUM_THREADS", "many")
    with pytest.raises(InvalidArgumentError, match="NUM_THREADS must be a whole number from 1 to 1024, got 'many'"):
        config.get("num_threads")


def test_a_bad_value_changes_nothing() -> None:
    with pytest.raises(InvalidArgumentError):
        config.set(poison_memory=True, num_threads="x")
    assert config.get("poison_memory") is False


def test_every_knob_is_described() -> None:
    for knob in config.KNOBS.values():
        assert knob.doc and knob.variable in config.describe()
