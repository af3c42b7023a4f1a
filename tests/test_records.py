"""Dataclasses whose methods are made late: what the standard library's do, they do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)
    hidden: int = field(default=7, repr=False, compare=False)
    marked: int = field(default=0, hash=False)
    dimensions: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)
    hidden: int = field(default=7, repr=False, compare=False)
    marked: int = field(default=0, hash=False)
    dimensions: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Named(Point):
    """With what it inherits, and a field by keyword alone."""

    name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        assert self.name, "a name"


@dataclass(slots=True)
class Counter:
    count: int = 0
    log: list[int] = field(default_factory=list, init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.count


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    value: int
    below: Node | None = None


@dataclass
class Loose:
    x: int = 1


@dataclass(frozen=True, slots=True)
class Nothing: ...


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or the kind of its error."""
    try:
        return function()
    except Exception as error:
        return type(error)


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}), ((1, 2, ["a"]), {}), ((1,), {"y": 5}), ((), {"x": 1, "names": ["b"], "hidden": 3}),
    ((), {}), ((1, 2, [], 4, 5, 6), {}), ((1,), {"x": 2}), ((1,), {"z": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_instances_are_made_and_refused_as_the_standard_ones(args: Any, kwargs: Any) -> None:
    found, wanted = (outcome(lambda kind=kind: dataclasses.asdict(kind(*args, **kwargs))) for kind in (Point, Standard))  # type: ignore[misc]
    assert found == wanted


def test_fields_slots_and_texts_are_the_standard_ones() -> None:
    for of in (
        lambda kind: [(f.name, f.default, f.repr) for f in dataclasses.fields(kind)],
        lambda kind: kind.__slots__,
        lambda kind: kind.__match_args__,
        lambda kind: repr(kind(1)).replace(kind.__name__, "T"),
        lambda kind: outcome(lambda: hash(kind(1))),  # a list has no hash
        lambda kind: hash(kind(1, 2, ())),
        lambda kind: kind(1) == kind(1, 2) != kind(2),
        lambda kind: kind(1, 2, (), hidden=3) == kind(1, 2, (), hidden=4) != kind(1, 2, (), marked=4),
        lambda kind: hash(kind(1, 2, (), marked=3, hidden=4)) == hash(kind(1, 2, ())),
        lambda kind: outcome(lambda: setattr(kind(1), "x", 3)),
        lambda kind: outcome(lambda: delattr(kind(1), "x")),
        lambda kind: dataclasses.asdict(dataclasses.replace(kind(1), y=9)),
        lambda kind: outcome(lambda: dataclasses.replace(kind(1), z=9)),
        lambda kind: kind.dimensions,
    ):
        assert of(Point) == of(Standard)
    assert Point(1) != Standard(1) and Point.__init__.__qualname__ == "Point.__init__"


def test_a_class_inherits_fields_and_may_check_them() -> None:
    made = Named(1, name="n")
    assert (made.x, made.y, made.name) == (1, 2, "n") and made != Point(1) and made == Named(1, name="n")
    assert repr(made) == "Named(x=1, y=2, names=[], marked=0, name='n')"
    with pytest.raises(AssertionError, match="a name"):
        Named(1, name="")
    with pytest.raises(TypeError):
        Named(1, 2, [], 7, 0, "n")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'name'"):
        made.name = "m"  # type: ignore[misc]


def test_fields_that_are_no_parameters() -> None:
    first, second = Counter(3), Counter(3)
    first.log.append(1)
    assert (first.start, second.log, first == second) == (3, [], False)
    with pytest.raises(TypeError):
        Counter(1, [])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)


def test_identity_where_equality_is_not_asked_for() -> None:
    node = Node(1)
    assert (
        node != Node(1)
        and len({node, Node(1), node}) == 2
        and repr(Node(2, node)).endswith("Node(value=1, below=None))")
    )


def test_recursion_in_a_text_ends() -> None:
    loop = Counter()
    loop.log.append(loop)  # type: ignore[arg-type]
    assert repr(loop) == "Counter(count=0, log=[...], start=0)"


@pytest.mark.parametrize("made", [Point(1, names=["a"]), Named(1, name="n"), Counter(2), Loose(3), Nothing()])
def test_copies_and_pickles_are_equal(made: Any) -> None:
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made and type(other) is type(made) and repr(other) == repr(made)


def test_what_is_frozen_has_slots() -> None:
    with pytest.raises(TypeError, match="Open is frozen, so it needs slots=True"):

        @dataclass(frozen=True)
        class Open: ...


def test_own_methods_stay() -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

        def __repr__(self) -> str:
            return "own"

    @dataclass(slots=True)
    class Made:
        x: int

        def __init__(self) -> None:
            self.x = 4

    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1)), Made().x) == (True, 5, "own", 4)
