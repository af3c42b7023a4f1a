"""How the schedule treats a loop over time: the product of each step is tiled, and shared out when it is large."""

from __future__ import annotations

import pytest

import relaxlite as rl
from relaxlite.ir import ops
from relaxlite.ir.program import For
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.passes.manager import PassContext, run_passes
from relaxlite.passes.pipeline import PASSES
from relaxlite.target import Target


def loop_kinds(hidden: int) -> set[str]:
    """The kinds of the loops inside the loop over time of a scheduled RNN."""
    bb = rl.BlockBuilder()
    t, b = bb.symbol("t"), bb.symbol("b")
    shapes = {"gates": (t, b, hidden), "r": (hidden, hidden), "h": (b, hidden)}
    with bb.function("main", **{name: rl.TensorType.of(shape, "float32") for name, shape in shapes.items()}) as xs:
        bb.result(ops.rnn_scan(*xs, activations="tanh", alphas=(0.0,), betas=(0.0,)))
    module = run_passes(bb.module(), [PASSES["legalize"], PASSES["schedule"]], PassContext(Target.host()))
    (program,) = module.programs().values()
    (step,) = (s for s in walk_stmts(program.body) if isinstance(s, For) and s.extent is t)
    assert step.kind == "serial"
    return {s.kind for s in walk_stmts(step.body) if isinstance(s, For)}


@pytest.mark.parametrize(("hidden", "threads"), [(96, False), (512, True)])
def test_the_product_of_a_step_is_tiled_and_a_large_one_is_shared_out(hidden: int, threads: bool) -> None:
    kinds = loop_kinds(hidden)
    assert {"vectorized", "unrolled"} <= kinds
    assert ("parallel" in kinds) == threads
