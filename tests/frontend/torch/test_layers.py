"""Layers of PyTorch: a few programs of pools, resizes, norms, recurrences and quantizers, at several sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import relaxlite as rl

torch = pytest.importorskip("torch")
F = torch.nn.functional
DYNAMIC = torch.export.Dim.DYNAMIC


class Call(torch.nn.Module):
    def __init__(self, function: Any, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, torch.nn.ModuleList(layers)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.layers, *args)


def check(model: torch.nn.Module, dims: tuple[Any, ...], *calls: tuple[Any, ...]) -> None:
    """Compile for the first call's arguments, and compare all calls with eager."""
    exe = rl.compile(rl.from_torch(copy.deepcopy(model), calls[0], dynamic_shapes={"args": dims}))
    with torch.no_grad():
        for args in calls:
            got, expected = (torch.utils._pytree.tree_leaves(f(*args)) for f in (exe, model))
            for own, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(own, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_pools_whose_windows_are_uneven_or_reach_beyond_the_padding() -> None:
    def function(x: Any) -> Any:
        return (
            F.adaptive_avg_pool2d(x, (3, 2)),
            F.adaptive_max_pool2d(x, (2, 5), return_indices=True),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=2),
            F.max_pool2d(x, 2, 2, ceil_mode=True, return_indices=True),
            F.max_unpool2d(*F.max_pool2d(x[:, :, :4, :6], 2, return_indices=True), 2),
        )

    inputs = [torch.randn(n, 2, h, w) for n, h, w in ((2, 7, 9), (4, 5, 6), (3, 4, 13))]
    inputs[1][0, 0, 1, 1], inputs[1][0, 1, 2, 2] = float("inf"), float("nan")
    check(Call(function), ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},), *((x,) for x in inputs))


def test_resizes_by_scales_that_sizes_round() -> None:
    def function(x: Any) -> Any:
        kinds = (("nearest", 1.05), ("nearest", 0.7), ("nearest-exact", 2.6), ("bilinear", 1.3), ("bicubic", 0.6))
        resized = [F.interpolate(x, scale_factor=factor, mode=mode) for mode, factor in kinds]
        return *resized, F.interpolate(x, size=(5, 9)), F.interpolate(x, size=(4, 7), mode="bilinear", antialias=True)

    inputs = [(torch.randn(1, 2, h, w),) for h, w in ((6, 10), (4, 4), (33, 17))]
    check(Call(function), ({2: DYNAMIC, 3: DYNAMIC},), *inputs)


def test_operators_that_torch_does_not_decompose() -> None:
    aten = torch.ops.aten

    def function(x: Any) -> Any:
        n, c, h, w = x.shape
        maxima, places = F.max_pool2d(x, 2, return_indices=True)
        return (
            *aten.native_group_norm(x, None, x.mean((0, 2, 3)), n, c, h * w, 2, 1e-5),
            aten.max_pool2d_with_indices_backward(maxima, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
            F.interpolate(x, size=(3, 5), mode="bilinear", antialias=True, align_corners=True),
            F.pdist(x.flatten(1)),
        )

    inputs = [(torch.randn(n, 4, h, w),) for n, h, w in ((3, 8, 5), (2, 12, 4), (5, 5, 16))]
    check(Call(function), ({0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},), *inputs)


def test_norms_in_training_update_their_statistics() -> None:
    layers = torch.nn.BatchNorm1d(3), torch.nn.InstanceNorm1d(3, track_running_stats=True)
    model = torch.nn.Sequential(*layers).train()
    reference, dims = copy.deepcopy(model), {"input": {0: DYNAMIC}}
    exe = rl.compile(rl.from_torch(model, (torch.randn(4, 3, 5),), dynamic_shapes=dims))
    for n in (4, 7, 2):
        x = torch.randn(n, 3, 5)
        torch.testing.assert_close(exe(x), reference(x).detach())
    for name, wanted in reference.named_buffers():
        if name in exe.state:
            torch.testing.assert_close(torch.as_tensor(exe.state[name]), wanted)


@pytest.mark.parametrize("layer", ["projected", "plain"])
def test_recurrent_layers_with_dynamic_time(layer: str) -> None:
    if layer == "projected":
        model: torch.nn.Module = torch.nn.LSTM(3, 4, proj_size=2, bidirectional=True)
    else:
        model = torch.nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, bias=False)
    inputs = [(torch.randn(t, b, 3),) for t, b in ((5, 2), (2, 3), (9, 4))]
    check(Call(lambda rnn, x: rnn(x), model), ({0: DYNAMIC, 1: DYNAMIC},), *inputs)


def test_packed_sequences_are_refused_at_export() -> None:
    packed = torch.nn.utils.rnn.pack_padded_sequence

    def function(rnn: Any, x: Any, lengths: Any) -> Any:
        return rnn(packed(x, lengths, enforce_sorted=False))[1]

    arguments = torch.randn(5, 2, 3), torch.tensor([5, 3])
    with pytest.raises(rl.RelaxliteError, match=r"torch\.export cannot export Call"):
        rl.from_torch(Call(function, torch.nn.GRU(3, 4)), arguments)


def test_codes_round_as_those_of_torch() -> None:
    decomposed = pytest.importorskip("torch.ao.quantization.fx._decomposed")
    assert decomposed is not None
    ops = torch.ops.quantized_decomposed

    def function(x: Any, scales: Any, zeros: Any) -> Any:
        codes = ops.quantize_per_tensor(x, 0.037, 3, -128, 127, torch.int8)
        per_channel = ops.quantize_per_channel(x, scales, zeros, 1, -127, 127, torch.int8)
        scale, zero = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        per_row = ops.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
        return (
            codes,
            ops.dequantize_per_tensor(codes, 0.037, 3, -128, 127, torch.int8),
            ops.dequantize_per_channel(per_channel, scales, zeros, 1, -127, 127, torch.int8),
            ops.dequantize_per_token(per_row, scale, zero, -128, 127, torch.int8, torch.float32),
            ops.fake_quant_per_channel(x, scales, zeros, 1, -8, 7),
        )

    scales, zeros = torch.rand(8) * 0.1 + 0.01, torch.randint(-3, 4, (8,))
    check(Call(function), ({0: DYNAMIC}, {}, {}), *((torch.randn(n, 8) * 3, scales, zeros) for n in (5, 2, 17)))


def test_dropout_of_other_kinds_in_training_is_refused() -> None:
    with pytest.raises(rl.RelaxliteError, match="export the model in eval mode"):
        rl.from_torch(torch.nn.AlphaDropout().train(), (torch.randn(3),))
