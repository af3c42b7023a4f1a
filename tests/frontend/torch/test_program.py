"""Exported programs: sizes, nesting, state, control flow, errors. Each compiles once and runs at many sizes."""

from __future__ import annotations

import dataclasses
import json
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ImportModelError, InputError, InvalidArgumentError, UnsupportedOpsError

torch = pytest.importorskip("torch")
nn, Dim = torch.nn, torch.export.Dim if hasattr(torch, "export") else None
pytree = torch.utils._pytree


class Call(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Any, **buffers: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def compiled(module: Any, args: tuple[Any, ...], dynamic: Any = None, **options: Any) -> Any:
    return rl.compile(rl.from_torch(module, args, dynamic_shapes=dynamic, **options))


def check(module: Any, exe: Any, *args: Any) -> None:
    """Compare a call with eager, leaf by leaf; both may change the module's state."""
    with torch.no_grad():
        expected = module(*pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args))
    got = exe(*args)
    leaves = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
    for own, wanted in leaves:
        torch.testing.assert_close(own, wanted)


# sizes


def test_dims_of_the_user_name_symbols_and_bound_them() -> None:
    module = nn.Linear(4, 3)
    batch = Dim("batch", min=1, max=8)
    exe = compiled(module, (torch.randn(2, 4),), {"input": {0: batch}})
    assert str(exe.inputs) == "input: float32[batch, 4] where 1 <= batch <= 8"
    for n in (1, 5, 8):
        check(module, exe, torch.randn(n, 4))
    with pytest.raises(InputError, match="batch = 9 exceeds its upper bound 8"):
        exe(torch.randn(9, 4))


@pytest.mark.parametrize("n", [0, 1, 7])
def test_sizes_are_numbers_where_the_model_uses_them_so(n: int) -> None:
    def forward(_: Any, x: Any) -> Any:
        size = x.shape[0]
        return x * size**0.5 + x / max(size, 3), size * 2 + 1, torch.full((size // 2 + 1,), size), size / 4

    module = Call(forward)
    exe = compiled(module, (torch.randn(4, 2),), (({0: Dim("n", min=0)},),))
    check(module, exe, torch.randn(n, 2))


def test_a_dimension_without_a_name_may_be_one() -> None:
    module = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3)).eval()
    exe = compiled(module, (torch.randn(3, 2, 5),), ({0: Dim.DYNAMIC, 2: Dim.AUTO},))
    for n, length in ((1, 1), (1, 7), (4, 1)):
        check(module, exe, torch.randn(n, 2, length))


def test_a_derived_dimension_alone_determines_its_symbol() -> None:
    half = Dim("half", min=2, max=50)
    module = Call(lambda _, x: x.view(-1, 2, 3).relu())
    exe = compiled(module, (torch.randn(8, 3),), (({0: 2 * half},),))
    for n in (4, 10, 100):
        check(module, exe, torch.randn(n, 3))
    with pytest.raises(InputError, match="not a multiple of 2"):
        exe(torch.randn(5, 3))


def test_bounds_of_the_user_hold_at_run_time() -> None:
    exe = compiled(nn.ReLU(), (torch.randn(4),), {"input": {0: Dim("n")}}, bounds={"n": "2..6"})
    assert "2 <= n <= 6" in str(exe.inputs)
    with pytest.raises(InputError, match="upper bound 6"):
        exe(torch.randn(7))
    with pytest.raises(InvalidArgumentError, match="has no symbol 'm'; it has 'n'"):
        rl.from_torch(nn.ReLU(), (torch.randn(4),), dynamic_shapes={"input": {0: Dim("n")}}, bounds={"m": "1..2"})


# nesting

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    value: Any
    rest: Any


torch.export.register_dataclass(Record, serialized_type_name="tests.Record")


def test_arguments_and_results_are_nested_as_the_module_has_them() -> None:
    class Nested(nn.Module):
        def forward(self, x: Any, pair: Any, *, scale: Any, options: Any = None) -> Any:
            a, b = pair
            return {"sum": [a + b, (x * scale,)], "pair": Pair(x, a), "record": Record(b * 2, None), "same": x}

    module, args = Nested(), (torch.randn(3), Pair(torch.randn(3), torch.randn(3)))
    exe = rl.compile(rl.from_torch(module, args, {"scale": torch.tensor(2.0)}))
    x, pair = torch.randn(3), Pair(torch.randn(3), torch.randn(3))
    got = exe(pair=pair, x=x, scale=torch.tensor(3.0))
    assert isinstance(got["pair"], Pair) and isinstance(got["record"], Record) and isinstance(got["sum"][1], tuple)
    torch.testing.assert_close(got["sum"][1][0], x * 3)
    arrays = exe(x.numpy(), tuple(t.numpy() for t in pair), scale=np.float32(3))
    assert isinstance(arrays["same"], np.ndarray)
    np.testing.assert_array_equal(arrays["record"].value, got["record"].value.numpy())
    for arguments, keywords, message in (
        ((x,), {"scale": x}, "missing argument 'pair'"),
        ((x, pair), {}, "missing argument 'scale'"),
        ((x, x), {"scale": x}, "argument pair: expects a named of 2"),
        ((x, pair), {"scale": x, "options": 1}, "there is no argument 'options'"),
        ((x, pair), {"scale": x, "x": x}, "'x' is given both by position and by name"),
        ((x, pair, x), {"scale": x}, "got 3 arguments by position"),
    ):
        with pytest.raises(InputError, match=message):
            exe(*arguments, **keywords)


def test_a_saved_model_nests_without_the_classes(tmp_path: Path) -> None:
    exe = compiled(Call(lambda _, x: Record(x + 1, x)), (torch.randn(2),))
    exe.save(tmp_path / "m.rlx")
    loaded = rl.load(tmp_path / "m.rlx")
    got = loaded(np.float32([1, 2]))
    np.testing.assert_array_equal(got.value if isinstance(got, Record) else got["value"], [2, 3])


# state


def test_state_is_kept_read_set_and_reset(tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        self.total.mul_(2).add_(x)
        return self.total, self.total.view(2, 2) + self.count

    module = Call(forward, count=torch.zeros((), dtype=torch.int64), total=torch.ones(4))
    exe = compiled(module, (torch.randn(4),))
    first = exe(torch.ones(4))[0]
    exe(torch.ones(4))
    np.testing.assert_array_equal(first, [3, 3, 3, 3])  # later calls leave results alone
    assert exe.state["count"] == 2 and list(exe.state) == ["count", "total"]
    other = exe.fresh()
    assert other.state["count"] == 0 and exe.state["count"] == 2
    exe.state["total"] = torch.zeros(4)
    np.testing.assert_array_equal(exe(np.zeros(4, np.float32))[0], np.zeros(4))
    exe.state.reset()
    for _ in range(3):
        check(module, exe, torch.randn(4))
    exe.save(tmp_path / "m.rlx")
    assert rl.load(tmp_path / "m.rlx").state["count"] == 0
    with pytest.raises(InputError, match=r"state 'total': expects float32\[4\], got float32\[3\]"):
        exe.state["total"] = np.zeros(3, np.float32)
    with pytest.raises(KeyError, match="there is no state 'c'; there is count, total"):
        exe.state["c"]
    with pytest.raises(InvalidArgumentError, match="the model has no state"):
        _ = compiled(nn.ReLU(), (torch.ones(1),)).state


def test_an_argument_that_the_model_writes_is_written() -> None:
    module = Call(lambda _, cache, x: cache.mul_(2).add_(x).sum())
    exe = compiled(module, (torch.zeros(3, 2), torch.ones(3, 2)))
    for cache in (torch.arange(6.0).view(3, 2), torch.arange(6.0).view(2, 3).T):
        wanted = cache * 2 + 1
        exe(cache, torch.ones(3, 2))
        torch.testing.assert_close(cache, wanted)


def test_tied_weights_are_one_constant() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.head.weight[ids])

    text = str(rl.from_torch(Tied(), (torch.tensor([1, 2]),)))
    assert text.count("constant((50, 8)") == 1


# other weights


def test_other_weights_go_into_a_compiled_model_without_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 4)).eval()

    module, other = make(), make()
    program = rl.from_torch(module, (torch.randn(2, 36),), dynamic_shapes=({0: Dim("n")},))
    rl.compile(program, updatable=True).save(tmp_path / "m.rlx")
    exe = rl.load(tmp_path / "m.rlx")
    emitted: list[Any] = []
    monkeypatch.setattr("llvmlite.binding.TargetMachine.emit_object", lambda *args: emitted.append(args))
    exe.load_weights(other.state_dict())
    for n in (1, 3):
        check(other, exe, torch.randn(n, 36))
    write_safetensors(tmp_path / "w.safetensors", {k: v.numpy() for k, v in module.state_dict().items()})
    exe.load_weights(tmp_path / "w.safetensors")
    check(module, exe, torch.randn(2, 36))
    assert not emitted
    bad = {**module.state_dict(), "2.bias": torch.zeros(3), "more": torch.zeros(1)}
    del bad["0.weight"]
    message = r"'0.weight' is missing; 'more' is unknown; '2.bias' is float32\[3\], the model has float32\[4\]"
    with pytest.raises(InvalidArgumentError, match=message):
        exe.load_weights(bad)
    with pytest.raises(InvalidArgumentError, match="compile it with updatable=True"):
        rl.compile(program).load_weights(bad)


def test_other_weights_keep_the_tuning_of_the_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuning was not stored, so that other kernels were compiled."""
    from relaxlite import driver
    from relaxlite.passes.products.choice import ScheduleChoice
    from relaxlite.passes.schedule.tuning import TunedProgram, Tuning
    from relaxlite.target import Target

    entry = TunedProgram("m", ScheduleChoice(), ((1,),), (1.0,), (1.0,), 1)
    tuning = Tuning({str(Target.parse("llvm")): {"of another model": entry}})
    tuning.save(tmp_path / "t.json")
    used: list[Any] = []
    build = driver.build

    def recording(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["tuning"])
        return build(*args, **kwargs)

    monkeypatch.setattr(driver, "build", recording)
    module = nn.Linear(3, 2)
    program = rl.from_torch(module, (torch.randn(2, 3),))
    for given in (tmp_path / "t.json", None):
        exe = rl.compile(program, updatable=True, tuning=given)
        monkeypatch.setenv("RELAXLITE_TUNING", str(tmp_path / "missing.json"))  # of the second compilation only
        exe.load_weights(module.state_dict())
        monkeypatch.delenv("RELAXLITE_TUNING")
    assert used == [tuning, tuning, Tuning(), Tuning()]
    exe.save(tmp_path / "m.rlx")
    with pytest.raises(InvalidArgumentError, match=r"open the model by relaxlite\.load"):
        rl.runtime.module.load(tmp_path / "m.rlx").load_weights(module.state_dict())


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


# control flow


def test_conditions_and_loops() -> None:
    def forward(_: Any, x: Any) -> Any:
        y = torch.cond(x.shape[0] > 3, lambda t: t * 2, lambda t: t + 1, (x,))
        return torch.cond(
            y.sum() > 0, lambda t: t.relu(), lambda t: torch.cond(t[0, 0] > -1, torch.neg, torch.abs, (t,)), (y,)
        )

    module = Call(forward)
    exe = compiled(module, (torch.randn(4, 2),), (({0: Dim("n", min=1)},),))
    for n in (2, 3, 4, 9):
        for offset in (-3.0, 0.0, 3.0):
            check(module, exe, torch.randn(n, 2) + offset)


# errors


@torch.library.custom_op("relaxlite_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_without_converter_is_named_with_its_line_and_may_be_supplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from relaxlite.frontend.torch import registry

    class Twice(nn.Module):
        def forward(self, x: Any) -> Any:
            return twice(twice(x))

    module = Twice()
    with pytest.raises(
        UnsupportedOpsError, match=r"relaxlite_tests.twice.default: 2 calls, as at test_program.py:\d+ .*twice"
    ):
        rl.from_torch(module, (torch.ones(2),))
    monkeypatch.setattr(registry, "_converters", dict(registry._converters))

    @rl.torch_op("relaxlite_tests::twice")
    def convert(n: Any, x: Any) -> Any:
        return n.emit(rl.ops.add(x, x))

    np.testing.assert_array_equal(compiled(module, (torch.ones(2),))(torch.ones(2)), [4, 4])
    with pytest.raises(InvalidArgumentError, match=r"the operator relaxlite_tests.twice has a converter"):
        rl.torch_op("relaxlite_tests::twice")(convert)


def test_replaced_and_complex_converters_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of converters did not tell, so that the model cache gave models of the converters before."""
    from relaxlite.frontend.torch import registry

    assert not registry.has_user_converters()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_converters", dict(registry._converters))
        rl.torch_op("aten.relu", replace=True)(lambda n, x: x)
        assert registry.has_user_converters()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_complex_converters", dict(registry._complex_converters))
        registry.complex_op("aten.relu")(lambda n, x: x)
        assert registry.has_user_converters()
    assert not registry.has_user_converters()


def test_arguments_that_no_converter_takes_are_refused_where_they_change_values() -> None:
    """A generator, a sparse layout and the device "meta" used to be ignored."""
    from relaxlite.frontend.torch.binding import bind_arguments
    from relaxlite.frontend.torch.registry import find_converter

    aten, graph = torch.ops.aten, torch.fx.Graph()
    for op, args, refused, taken in (
        (aten.rand.generator, ([2],), {"generator": torch.Generator()}, {"generator": None, "pin_memory": False}),
        (aten.zeros.default, ([2],), {"layout": torch.sparse_coo}, {"layout": torch.strided, "device": "cpu"}),
        (aten.zeros.default, ([2],), {"device": torch.device("meta")}, {"device": torch.device("cuda")}),
    ):
        converter = find_converter(str(op))
        assert converter is not None
        bind_arguments(graph.call_function(op, args, taken), converter, lambda x: x)
        with pytest.raises(ImportModelError, match=rf"argument {next(iter(refused))}=.* of {op} is not supported"):
            bind_arguments(graph.call_function(op, args, refused), converter, lambda x: x)


class DataDependent(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x


BAD: Sequence[tuple[Any, type[Exception], str]] = (
    (lambda _: rl.from_torch(DataDependent(), (torch.ones(2),)), ImportModelError, "cannot export DataDependent"),
    (lambda _: rl.from_torch(nn.ReLU()), InvalidArgumentError, "give example arguments"),
    (lambda p: rl.from_torch(p / "none.pt2"), ImportModelError, "there is no such file"),
    (
        lambda p: rl.from_torch(written(p / "m.pt2", b"PK\x03\x04 cut")),
        ImportModelError,
        "cannot be read as an exported",
    ),
    (lambda _: rl.from_torch(3), InvalidArgumentError, "expected a module, an ExportedProgram or the path"),
    (
        lambda _: rl.from_torch(torch.export.export(nn.ReLU(), (torch.ones(2),)), (torch.ones(2),)),
        InvalidArgumentError,
        "of a module to export",
    ),
    (
        lambda _: rl.from_torch(nn.ReLU(), (torch.ones(4).to(torch.float8_e4m3fn),)),
        ImportModelError,
        "float8_e4m3fn",
    ),
)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_what_cannot_be_imported(make: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        make(tmp_path)


def test_a_missing_weight_is_named() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    del program.state_dict["weight"]
    with pytest.raises(ImportModelError, match="the weight 'weight' is missing"):
        rl.from_torch(program)


def test_a_saved_program_goes_through_the_command_line_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAXLITE_CACHE", str(tmp_path / "cache"))
    path, module = tmp_path / "model.pt2", nn.Linear(3, 2)
    program = torch.export.export(module, (torch.ones(2, 3),), dynamic_shapes=({0: Dim("n")},))
    torch.export.save(program, path)
    exe = rl.load(path)
    check(module, exe, torch.randn(5, 3))
    assert rl.cli.main(["inspect", str(path)]) == 0 if hasattr(rl, "cli") else True
    with pytest.raises(InvalidArgumentError, match=r"those of its torch.export.export"):
        rl.load(path, dynamic_shapes={"input": {0: 3}})
