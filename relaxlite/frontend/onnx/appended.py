"""Lists that a loop appends to. The loop stacks what is appended, and the list is the slices of the stack."""

from __future__ import annotations

from collections.abc import Collection

from onnx import GraphProto

from relaxlite.frontend.onnx.validation import names_read_by
from relaxlite.ir.expr import Tuple
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Stacked(Tuple):
    """A sequence: the slices of its one field along the first axis. Their number shows at run time only."""


def only_appends(body: GraphProto, k: int) -> bool:
    """Whether the body of a loop does nothing with value k, a sequence, but to insert a tensor at its end."""
    before, after = body.input[k + 2].name, body.output[k + 1].name
    nodes = [node for node in body.node if after in node.output]
    read = names_read_by(node for node in body.node if after not in node.output)
    yielded = [output.name for output in body.output]
    if not nodes or {before, after} & read or before in yielded or yielded.count(after) > 1:
        return False
    return nodes[0].op_type == "SequenceInsert" and nodes[0].input[0] == before and not any(nodes[0].input[2:])


def yielding_elements(body: GraphProto, lists: Collection[int]) -> GraphProto:
    """The body with what it appends to these values in place of the lists."""
    if not lists:
        return body
    graph_proto = GraphProto()
    graph_proto.CopyFrom(body)
    for k in lists:
        after = graph_proto.output[k + 1].name
        graph_proto.output[k + 1].name = next(node.input[1] for node in graph_proto.node if after in node.output)
    return graph_proto
