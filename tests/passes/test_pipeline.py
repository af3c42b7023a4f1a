"""The order of passes: each says why it stands where it stands, and is refused elsewhere."""

from __future__ import annotations

import pytest

from relaxlite.errors import PassError
from relaxlite.passes.manager import Pass, checked_order
from relaxlite.passes.pipeline import PASSES, default_pipeline


def idle(name: str, after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Pass:
    why = f"{name} has a reason"
    return Pass(name, lambda module, context: module, "graph", why=why, after=after, before=before)


def test_every_pass_of_the_pipeline_says_why_it_stands_there() -> None:
    steps = default_pipeline()
    assert all(step.why and step.doc for step in steps)
    assert {name for step in steps for name in (*step.after, *step.before)} <= PASSES.keys()


def test_passes_that_stand_in_order_are_a_pipeline() -> None:
    steps = idle("fold"), idle("fuse", after=("fold",)), idle("plan", after=("lower",))
    assert checked_order(*steps) == steps  # lower is not in this one


def test_a_pass_out_of_order_is_refused_with_its_reason() -> None:
    with pytest.raises(PassError, match="pass fuse must come after fold: fuse has a reason"):
        checked_order(idle("fuse", after=("fold",)), idle("fold"))
    with pytest.raises(PassError, match="pass pack must come before plan: pack has a reason"):
        checked_order(idle("plan"), idle("pack", before=("plan",)))
    with pytest.raises(PassError, match="two passes of a pipeline are named fold"):
        checked_order(idle("fold"), idle("fold"))


@pytest.mark.parametrize("step", [idle("own", after=("fuze",)), idle("own", before=("fuze",))])
def test_a_name_that_is_no_pass_of_a_complete_pipeline_is_refused(step: Pass) -> None:
    for steps in ((step, idle("fuse")), (step, *default_pipeline())):
        assert checked_order(*steps) == steps
        with pytest.raises(PassError, match="pass own must come after or before fuze, which is no pass"):
            checked_order(*steps, is_complete=True)


@pytest.mark.parametrize("name", [step.name for step in default_pipeline() if step.after or step.before])
def test_no_pass_can_be_moved_past_what_it_names(name: str) -> None:
    """To the other end of the pipeline."""
    step, others = PASSES[name], [s for s in default_pipeline() if s.name != name]
    with pytest.raises(PassError):
        checked_order(*([step, *others] if step.after else [*others, step]))
