"""Names of loops and buffers after a schedule has copied some."""

from __future__ import annotations

from relaxlite.ir.program import Buffer, For, Load, Seq, Store
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.passes.schedule.primitives.tree import with_unique_names


def test_a_copied_loop_reads_by_its_own_variable() -> None:
    """Where an index of both copies is more than the variable: of the second, it stayed the first one's."""
    x, y = (Buffer.of(name, (sym(8),), "float32") for name in "xy")
    i = SymVar("i", lower=0)
    loop = For(i, sym(7), Store(y, (i + 1,), Load(x, (i * 2,))))
    made, _ = with_unique_names(loop, Seq((loop, loop)), [x, y])
    assert isinstance(made, Seq)
    first, second = made.stmts
    assert isinstance(first, For) and isinstance(second, For)
    assert (first.var, second.var.name) == (i, "i_1")
    for copy in (first, second):
        body = copy.body
        assert isinstance(body, Store) and isinstance(body.value, Load)
        assert (body.indices, body.value.indices) == ((copy.var + 1,), (copy.var * 2,))
