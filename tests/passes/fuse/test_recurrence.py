"""How the schedule treats a loop over time: the product of each step is tiled, and shared out when it is large."""

from __future__ import annotations

import pytest

import relaxlite as rl
from relaxlite.ir import ops
from relaxlite.ir.program import For, TensorProgram
from relaxlite.ir.program_visitor import loads, walk_stmts
from relaxlite.ir.symbolic import sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.access import stride
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import PASSES
from relaxlite.target import Target


def scheduled_rnn(hidden: int, steps: int | None = None, batch: int | None = None) -> TensorProgram:
    """An RNN's loop over time as the host runs it; None: a symbol."""
    bb = rl.BlockBuilder()
    t, b = (bb.symbol(name) if size is None else sym(size) for name, size in (("t", steps), ("b", batch)))
    shapes = {"gates": (t, b, hidden), "r": (hidden, hidden), "h": (b, hidden)}
    with bb.function("main", **{name: rl.TensorType.of(shape, "float32") for name, shape in shapes.items()}) as xs:
        bb.result(ops.rnn_scan(*xs, activations="tanh", alphas=(0.0,), betas=(0.0,)))
    module = run_passes(bb.module(), [PASSES["legalize"], PASSES["schedule"]], PassContext(Target.host()))
    (program,) = module.programs().values()
    return program


@pytest.mark.parametrize(("hidden", "threads"), [(96, False), (512, True)])
def test_the_product_of_a_step_is_tiled_and_a_large_one_is_shared_out(hidden: int, threads: bool) -> None:
    program = scheduled_rnn(hidden)
    t = program.inputs[0].shape[0]
    (step,) = (s for s in walk_stmts(program.body) if isinstance(s, For) and s.extent is t)
    assert step.kind == "serial"
    kinds = {s.kind for s in walk_stmts(step.body) if isinstance(s, For)}
    assert {"vectorized", "unrolled"} <= kinds
    assert ("parallel" in kinds) == threads


@pytest.mark.parametrize("batch", [1, 3, None])
def test_a_single_step_reads_its_weights_along_their_rows(batch: int | None) -> None:
    """It read them down their columns, and streaming LSTMs took ten times as long."""
    program = scheduled_rnn(96, steps=1, batch=batch)
    weights = program.inputs[1]
    vectors = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.kind == "vectorized"]
    moved = [(load, loop.var) for loop in vectors for load in loads(loop.body) if load.buffer is weights]
    assert moved and all(stride(load, var) == 1 for load, var in moved)


@pytest.mark.parametrize(("batch", "shared"), [(3, False), (None, True)])
def test_a_product_beside_other_statements_is_shared_out_unless_it_is_small(batch: int | None, shared: bool) -> None:
    program = scheduled_rnn(96, steps=1, batch=batch)
    weights = program.inputs[1]
    parallel = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.kind == "parallel"]
    assert any(load.buffer is weights for loop in parallel for load in loads(loop)) == shared
