"""Graphs of `torch.compile(backend="relaxlite")`: what is constant, what is compiled again, failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import relaxlite.torch as rlt  # noqa: E402  (torch may be missing)
from relaxlite import driver  # noqa: E402
from relaxlite.runtime.module import Executable  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    rlt.reset_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def num_inputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of each module that is compiled: constants are none."""
    counts: list[int] = []
    build = driver.build

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(module["main"].params))
        return build(module, *args, **kwargs)

    monkeypatch.setattr(driver, "build", counting)
    return counts


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend="relaxlite", dynamic=True, **kwargs)


def check(fast: Any, model: Any, *args: Any) -> None:
    torch.testing.assert_close(fast(*args), model(*args))


# options


def test_modes_and_unknown_options_are_refused() -> None:
    for kwargs, message in (
        ({"mode": "max-autotune"}, "has no modes, got mode='max-autotune'; options of relaxlite.compile are passed"),
        ({"options": {"fast": True}}, "has no option 'fast'; it has target, precision"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(lambda x: x + 1, **kwargs)(torch.randn(3))
    for kwargs in ({"mode": "default"}, {"options": {"precision": "float32", "threads": 1}}):
        check(compiled(lambda x: x + 1, **kwargs), lambda x: x + 1, torch.randn(3))


# constants


class WithEagerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.first(x)).relu()
        x = x + torch.rand_like(x).clamp(1, 1)
        return self.last(x).tanh()


def test_parameters_and_buffers_are_constants_in_all_parts(num_inputs: list[int]) -> None:
    """Parts took all parameters as inputs, and every graph its buffers."""
    model = WithEagerPart().eval()
    fast = compiled(model)
    for n in (3, 2, 7):
        check(fast, model, torch.randn(n, 4))
    assert num_inputs == [1, 2] and len(rlt.report().graphs[0].eager) == 1
    model.norm.running_mean.add_(1)
    model.last.load_state_dict({k: v * 2 for k, v in model.last.state_dict().items()})
    check(fast, model, torch.randn(3, 4))
    assert len(num_inputs) == 4


def test_a_buffer_that_the_graph_writes_is_an_input(num_inputs: list[int]) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            self.total.add_(x.sum(0))
            return x + self.total

    model, other = Counter(), Counter()
    fast = compiled(model)
    for n in (2, 3, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(fast(x), other(x))
    assert num_inputs == [2]


def test_weights_that_change_often_become_inputs(num_inputs: list[int]) -> None:
    layers = [nn.Linear(3, 3) for _ in range(6)]
    fast = compiled(lambda layer, x: layer(x).relu())
    for layer in layers * 2:
        torch.testing.assert_close(fast(layer, torch.ones(2, 3)), layer(torch.ones(2, 3)).relu())
    assert num_inputs == [1, 1, 3]


# code of earlier graphs


def test_a_batch_of_one_runs_the_code_of_the_others() -> None:
    """Dynamo traces the sizes 0 and 1 again; the graphs used to be compiled again, too."""
    layer = nn.Linear(8, 8)

    def model(x: Any) -> Any:
        grid = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
        heads = layer(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.transpose(1, 2).reshape(x.shape) + grid[..., None]

    fast = compiled(model)
    for size in ((3, 5), (2, 7), (1, 5), (1, 4)):
        check(fast, model, torch.randn(*size, 8))
    report = rlt.report()
    assert report.compilations == 1 and [graph.reused for graph in report.graphs] == [0, 1]
    assert "compiled 0 times in 0.00 s; its 1 part runs code of an earlier graph" in str(report)
    for size in ((4, 1), (1, 1), (0, 3)):
        check(fast, model, torch.randn(*size, 8))


def test_graphs_that_differ_in_more_than_sizes_are_compiled_again() -> None:
    def branches(x: Any) -> Any:
        return (x * 2).relu() if x.shape[0] == 1 else (x * 3).relu()

    def numbers(x: Any) -> Any:
        return (x * x.shape[0] + (5 if x.shape[0] > 4 else 7)).relu()

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    for model, count in ((branches, 2), (numbers, 2), (lambda x: (first if x.shape[0] > 4 else second)(x).relu(), 2)):
        torch._dynamo.reset()
        rlt.reset_report()
        fast = compiled(model)
        for n in (4, 5, 1, 6, 2):
            check(fast, model, torch.randn(n, 3))
        assert rlt.report().compilations == count


# failures


def test_one_call_that_is_refused_leaves_the_rest_compiled(num_inputs: list[int]) -> None:
    def model(x: Any) -> Any:
        return ((x @ x.T).relu() @ x).tanh() + torch.rand(()).clamp(1, 1)

    fast = compiled(model)
    for n in (2, 5):
        check(fast, model, torch.randn(n, 3))
    eager = rlt.report().graphs[0].eager
    assert (
        len(num_inputs) == 1 and len(eager) == 1 and "(aten.rand.default): random operators are supported" in eager[0]
    )


def test_a_failure_of_the_compiler_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("no such luck")

    monkeypatch.setattr(driver, "build", fail)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.warns(RuntimeWarning, match="runs in eager: internal error, please report it: TypeError: no such luck"):
        check(compiled(model), model, torch.randn(2, 3))
    assert "no such luck (test_graphs.py:" in str(rlt.report()) and rlt.report().compilations == 0


def test_a_failure_to_compile_for_other_weights_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fast = compiled(model)
    check(fast, model, torch.randn(2, 3))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("no such luck")

    monkeypatch.setattr(driver, "build", fail)
    model[0].weight.mul_(2)
    with pytest.warns(RuntimeWarning, match="no such luck"):
        check(fast, model, torch.randn(2, 3))
    check(fast, model, torch.randn(3, 3))
    assert "no such luck" in str(rlt.report())


def test_errors_of_a_call_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = compiled(lambda x: (x + 1).relu())
    fast(torch.randn(3))

    def fail(*args: Any) -> Any:
        raise MemoryError("the call failed")

    monkeypatch.setattr(Executable, "_call", fail)
    with pytest.raises(MemoryError, match="the call failed"):
        fast(torch.randn(3))
