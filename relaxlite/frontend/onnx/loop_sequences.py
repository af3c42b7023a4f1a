"""Sequences that a loop only appends to: the loop stacks the appended tensors along a new first axis."""

from __future__ import annotations

from collections.abc import Collection

from onnx import GraphProto

from relaxlite.frontend.onnx.validation import names_read_by


def is_append_only(body: GraphProto, k: int) -> bool:
    """Whether the only use of value k, a sequence, in a loop body is a SequenceInsert at its end."""
    before, after = body.input[k + 2].name, body.output[k + 1].name
    producers = [node for node in body.node if after in node.output]
    read = names_read_by(node for node in body.node if after not in node.output)
    yielded = [output.name for output in body.output]
    if not producers or {before, after} & read or before in yielded or yielded.count(after) > 1:
        return False
    return (
        producers[0].op_type == "SequenceInsert" and producers[0].input[0] == before and not any(producers[0].input[2:])
    )


def with_appended_outputs(body: GraphProto, lists: Collection[int]) -> GraphProto:
    """Return the body with the appended tensors as outputs in place of these sequences."""
    if not lists:
        return body
    result = GraphProto()
    result.CopyFrom(body)
    for k in lists:
        after = result.output[k + 1].name
        result.output[k + 1].name = next(node.input[1] for node in result.node if after in node.output)
    return result
