"""Writes of exported graphs into tensors that share memory: results equal eager, and few graphs need a retrace."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

import relaxlite as rl
from tests.frontend.torch.test_program import Call, check, compiled

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


def flatten_of_contiguous(_: Any, x: Any) -> Any:
    y = x + 1
    y.flatten().add_(x.flatten())
    return y


def reshape_of_transposed(_: Any, x: Any) -> Any:
    y = x + 1
    copy = y.transpose(0, 1).reshape(-1)  # eager copies: the write does not reach y
    copy.mul_(2)
    return y, copy


def reshape_of_a_slice(_: Any, x: Any) -> Any:
    y = x + 1
    view = y[:, :2].reshape(-1, 2, 1)  # not contiguous, and yet a view
    view.mul_(2)
    return y, view


def view_as(_: Any, x: Any) -> Any:
    y = x + 1
    y.view_as(x).view(-1)[1:].neg_()
    return y


def conversions(_: Any, x: Any) -> Any:
    same, other, copied = x + 1, x + 2, x + 3
    same.to(torch.float32).add_(1)
    same.type_as(x).mul_(2)
    other.to(torch.float64).add_(1)
    copied.to(torch.float32, copy=True).add_(1)
    return same, other, copied


def contiguous(_: Any, x: Any) -> Any:
    y, z = x + 1, x + 2
    y.contiguous().add_(1)
    z.t().contiguous().add_(1)
    return y, z


def dropout_in_inference(_: Any, x: Any) -> Any:
    y = x + 1
    F.dropout(y, 0.5, False).mul_(2)  # dropout returns its operand
    return y


CASES = [
    flatten_of_contiguous,
    reshape_of_transposed,
    reshape_of_a_slice,
    view_as,
    conversions,
    contiguous,
    dropout_in_inference,
]


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_a_write_reaches_what_shares_the_memory(function: Any) -> None:
    module = Call(function)
    exe = compiled(module, (torch.randn(5, 4),), (({0: torch.export.Dim.DYNAMIC},),))
    for n in (2, 3, 8):
        check(module, exe, torch.randn(n, 4))


def test_a_convolutional_network_in_inference_is_not_retraced() -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Hardsigmoid(inplace=True))
    program = torch.export.export(nn.Sequential(*layers).eval(), (torch.randn(1, 3, 8, 8),))
    with patch.object(torch.export.ExportedProgram, "run_decompositions", side_effect=AssertionError("retraced")):
        rl.from_torch(program)
