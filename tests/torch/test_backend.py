"""`torch.compile(backend="relaxlite")`: one compilation for all sizes, weights that change, what runs in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import relaxlite.torch as rlt  # noqa: E402  (torch may be missing)

nn = torch.nn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    rlt.reset_report()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="relaxlite", dynamic=True)


def test_one_compilation_serves_all_sizes_and_weights_may_change() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    fast = compiled(model)
    with torch.no_grad():
        for n in (3, 5, 9, 2, 17):
            x = torch.randn(n, 16)
            torch.testing.assert_close(fast(x), model(x))
        assert rlt.report().compilations == 1 and not rlt.report().graphs[0].eager
        model[0].weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x))
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        torch.testing.assert_close(fast(x), model(x))


def test_sizes_aliases_and_written_inputs() -> None:
    def function(x: Any, cache: Any) -> Any:
        cache.add_(x.sum(0))
        return x * x.shape[0], x.view(-1), cache, x.shape[0] * 2

    fast = compiled(function)
    for n in (2, 5, 7):
        x, cache, own = torch.randn(n, 3), torch.ones(3), torch.ones(3)
        got, wanted = fast(x, own), function(x, cache)
        assert got[3] == wanted[3]
        for a, b in zip((*got[:3], own), (*wanted[:3], cache), strict=True):
            torch.testing.assert_close(a, b)


def test_results_that_are_views_of_an_input_keep_their_place_in_it() -> None:
    """A view at an offset used to be taken from the beginning of its input."""
    for function in (
        lambda x: x[x.shape[0] - 1 :],
        lambda x: (x[1:].T, x * 2, x.view(-1)[3:]),
        lambda x: (x.unsqueeze(0), x[:, 1]),
    ):
        torch._dynamo.reset()
        fast = compiled(function)
        for n in (2, 5):
            x = torch.randn(n, 3)
            torch.testing.assert_close(fast(x), function(x))


def test_complex_inputs_are_compiled() -> None:
    """Graphs with complex inputs used to run in eager."""
    fast = compiled(lambda x, y: (x * y.conj()).abs())
    for n in (2, 5):
        x, y = torch.randn(n, 3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)
        for a, b in ((x, y), (x.conj(), y.conj()), (x.T.contiguous().T, y)):
            torch.testing.assert_close(fast(a, b), (a * b.conj()).abs())
    assert not any(graph.eager for graph in rlt.report().graphs)


def test_numbers_of_a_module_are_compiled() -> None:
    """Dynamo makes them inputs, and converts them by an operator that used to run in eager."""

    class Norm(nn.Module):
        eps, scale = 1e-6, 3

        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale

    model = Norm()
    fast = compiled(model)
    for n, eps in ((2, 1e-6), (3, 1e-6), (3, 0.5)):
        model.eps = eps
        x = torch.randn(n, 4)
        torch.testing.assert_close(fast(x), model(x))
    assert not rlt.report().graphs[0].eager


@torch.library.custom_op("relaxlite_tests::eager_only", mutates_args=())
def eager_only(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@eager_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_is_not_supported_runs_in_eager_with_a_reason() -> None:
    def function(x: Any) -> Any:
        return eager_only((x * 2).relu() + 1).tanh() * 3

    fast = compiled(function)
    for n in (2, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(fast(x), function(x))
    report = str(rlt.report())
    assert "relaxlite_tests.eager_only.default: 1 call, as at test_backend.py:" in report
    assert "return eager_only((x * 2).relu() + 1).tanh() * 3" in report


def test_gradients_are_refused() -> None:
    fast = compiled(nn.Linear(2, 2))
    with pytest.raises(Exception, match="computes no gradients, and a result requires one; call the model under"):
        fast(torch.randn(1, 2))
