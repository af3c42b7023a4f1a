"""What runs by default covers what it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support import tiers

pytest_plugins = ["pytester"]

AXES = (("a", "b", "c", "d"), (0, 1, 2), ("x", "y", "z"), (True, False))
ROWS = list(itertools.product(*AXES))


def test_each_value_is_there_in_as_few_rows_as_the_longest_axis_has() -> None:
    kept = [ROWS[i] for i in tiers.cover(ROWS, 1)]
    assert [set(column) for column in zip(*kept, strict=True)] == [set(axis) for axis in AXES]
    assert len(kept) == 4


def test_each_pair_is_there_in_few_rows() -> None:
    kept = [ROWS[i] for i in tiers.cover(ROWS, 2)]
    for i, j in itertools.combinations(range(len(AXES)), 2):
        assert {(row[i], row[j]) for row in kept} == set(itertools.product(AXES[i], AXES[j]))
    assert len(kept) <= 16 < len(ROWS)


def test_pairs_that_no_row_holds_are_not_asked_for() -> None:
    rows = [("a", 1, "x"), ("a", 2, "y"), ("b", 1, "x")]
    assert tiers.cover(rows, 2) == [0, 1, 2]
    assert tiers.cover([], 2) == []


def test_names_to_keep_must_be_there() -> None:
    with pytest.raises(ValueError, match="kept, but not among the parameters: c"):
        tiers.only(("a", "c"), ["a", "b"])


FILE = """
import pytest

@pytest.mark.each_value
@pytest.mark.parametrize("a", [[1], [2], [3]], ids=str)
@pytest.mark.parametrize(("b", "c"), [(True, 1), (1, 1)])
def test_lists_and_rows(a, b, c): ...

@pytest.mark.each_value("c")
@pytest.mark.parametrize(("b", "c"), [(1, 1), (2, 1), (3, 2)])
def test_one_parameter(b, c): ...

@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_seeds(seed): ...
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(tiers, "_everything", False)
    pytester.makeconftest(
        "from tests.support import tiers\n"
        "def pytest_addoption(parser): parser.addoption(tiers.OPTION, action='store_true')\n"
        "def pytest_configure(config): tiers.use(config)\n"
        "def pytest_collection_modifyitems(config, items): tiers.choose(config, items)\n"
    )
    pytester.makepyfile(FILE)
    return pytester


def outcome(project: pytest.Pytester, *options: str) -> dict[str, int]:
    found = project.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *options).parseoutcomes()
    return {kind: count for kind, count in found.items() if kind != "warnings"}


def test_what_is_left_out_is_deselected_and_the_option_runs_it(project: pytest.Pytester) -> None:
    assert outcome(project) == {"passed": 3 + 2 + 1, "deselected": 3 + 1 + 1}
    assert outcome(project, tiers.OPTION) == {"passed": 11}


def test_what_is_named_runs(project: pytest.Pytester) -> None:
    (path,) = Path(project.path).glob("test_*.py")
    assert outcome(project, f"{path.name}::test_seeds[1]") == {"passed": 1}
