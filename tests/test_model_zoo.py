"""Small models of the usual kinds: each compiled once, run at several shapes, and compared with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import relaxlite as rl
from tests.support import model_zoo, ort_reference, tiers
from tests.support.both_ways import assert_same_both_ways, interpreted

TOLERANCE = 1e-4
Inputs = dict[str, np.ndarray]
rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pictures(*sizes: tuple[int, int, int], channels: int = 3, name: str = "image") -> list[Inputs]:
    return [{name: floats(n, channels, h, w)} for n, h, w in sizes]


def sentences(*sizes: tuple[int, int]) -> list[Inputs]:
    masks = [(rng.random(size) < 0.8).astype(np.int64) for size in sizes]
    return [{"input_ids": rng.integers(0, 1000, size), "mask": mask} for size, mask in zip(sizes, masks, strict=True)]


def steps(*sizes: tuple[int, int, int]) -> list[Inputs]:
    return [
        {"ids": rng.integers(0, 300, (b, s)), "past_k": floats(b, 2, past, 16), "past_v": floats(b, 2, past, 16)}
        for b, s, past in sizes
    ]


def edges(*sizes: tuple[int, int]) -> list[Inputs]:
    return [{"x": floats(nodes, 6), "edges": rng.integers(0, nodes, (2, count))} for nodes, count in sizes]


def corners(count: int, height: int, width: int) -> np.ndarray:
    """Boxes (x1, y1, x2, y2) inside a picture."""
    ends = rng.random((count, 2, 2)) * (width, height)
    return np.concatenate([ends.min(axis=1), ends.max(axis=1)], axis=1).astype(np.float32)


def cached_steps(*sizes: tuple[int, int, int]) -> list[Inputs]:
    return [
        {
            "x": floats(b, s, 32),
            "positions": np.tile(np.arange(past, past + s), (b, 1)),
            "past_k": floats(b, 4, past, 8),
            "past_v": floats(b, 4, past, 8),
        }
        for b, s, past in sizes
    ]


ODD_SIZES = [(1, 32, 32), (2, 33, 47), (3, 17, 65), (0, 32, 32), (1, 7, 9)]

ZOO: dict[str, tuple[Callable[[], onnx.ModelProto], list[Inputs]]] = {
    "bert": (model_zoo.bert, sentences((1, 8), (3, 21), (2, 1), (5, 64), (0, 4))),
    "vit": (model_zoo.vit, pictures((1, 40, 40), (2, 24, 56), (3, 8, 8), (1, 43, 70))),
    "gpt": (model_zoo.gpt, steps((1, 7, 0), (1, 1, 7), (2, 5, 11), (3, 1, 1), (1, 33, 0))),
    "swin": (model_zoo.swin, [{"x": floats(*s, 32)} for s in [(1, 8, 8), (2, 4, 12), (3, 16, 20)]]),
    "mixture_of_experts": (
        model_zoo.mixture_of_experts,
        [{"x": floats(*s, 24)} for s in [(1, 1), (2, 7), (5, 33)]],
    ),
    "mobilenet": (model_zoo.mobilenet, pictures(*ODD_SIZES)),
    "resnet": (model_zoo.resnet, pictures(*ODD_SIZES)),
    "unet_transposed": (
        lambda: model_zoo.unet("transposed"),
        pictures((1, 32, 32), (2, 36, 48), (3, 4, 64), (0, 8, 8)),
    ),
    "unet_scales": (lambda: model_zoo.unet("scales"), pictures((1, 32, 32), (2, 36, 48), (3, 4, 64))),
    "unet_sizes": (lambda: model_zoo.unet("sizes"), pictures((1, 32, 32), (2, 37, 50), (3, 5, 63))),
    "crnn": (
        model_zoo.crnn,
        pictures((1, 16, 40), (1, 16, 7), (3, 16, 33), (1, 16, 2), (1, 16, 1), channels=1, name="x"),
    ),
    "super_resolution": (model_zoo.super_resolution, pictures((1, 8, 8), (2, 7, 19), (3, 1, 33), name="x")),
    "diffusion_block": (
        model_zoo.diffusion_block,
        [{"x": floats(b, 16, h, w), "t": rng.integers(0, 9, b)} for b, h, w in [(1, 8, 8), (2, 5, 11), (3, 1, 1)]],
    ),
    "conformer": (model_zoo.conformer, [{"x": floats(b, 10, t)} for b, t in [(1, 50), (2, 31), (4, 4), (1, 257)]]),
    "quantized_convolution": (model_zoo.quantized_convolution, pictures((1, 8, 8), (2, 15, 9), (3, 1, 1), name="x")),
    "quantized_recurrence": (  # with more than one sequence, onnxruntime's result depends on its number of threads
        model_zoo.quantized_recurrence,
        [{"x": floats(t, 1, 12)} for t in (1, 2, 7, 40)],
    ),
    "all_unnamed": (
        model_zoo.all_unnamed,
        [
            {"a": floats(b, k, m), "b": floats(b, m, k), "c": floats(k)}
            for b, k, m in [(1, 3, 4), (2, 17, 5), (3, 1, 1)]
        ],
    ),
    "all_fixed": (model_zoo.all_fixed, [{"x": floats(2, 3, 6, 5)}, {"x": floats(2, 3, 6, 5)}]),
    "sizes_from_shapes": (
        model_zoo.sizes_from_shapes,
        [{"x": floats(*s)} for s in [(1, 1), (4, 6), (7, 3), (16, 33)]],
    ),
    "sizes_from_data": (
        model_zoo.sizes_from_data,
        [{"x": floats(*s)} for s in [(1, 1), (4, 6), (7, 2), (16, 33)]] + [{"x": -np.ones((3, 4), np.float32)}],
    ),
    "detection": (
        model_zoo.detection,
        [{"boxes": floats(n, k, 4), "scores": floats(n, k, 3)} for n, k in [(1, 1), (1, 40), (2, 17)]],
    ),
    "graph_network": (model_zoo.graph_network, edges((1, 1), (5, 12), (30, 200), (4, 0))),
    "branches": (
        model_zoo.branches,
        [{"x": floats(*s) + shift} for s, shift in [((1, 4), 1), ((5, 4), 1), ((6, 4), -1), ((3, 4), -1)]],
    ),
    "counted_loop": (
        model_zoo.counted_loop,
        [{"x": floats(rows, 5), "trips": np.array(trips)} for rows, trips in [(1, 1), (3, 7), (8, 2), (2, 0)]],
    ),
    "greedy_decoder": (
        model_zoo.greedy_decoder,
        [{"x": floats(b, f, 7)} for b, f in [(1, 1), (1, 9), (3, 4), (2, 50)]],
    ),
    "recommender": (
        model_zoo.recommender,
        [
            {"items": rng.integers(0, 50, (n, k)), "features": floats(n, 5)}
            for n, k in [(1, 1), (7, 3), (0, 2), (64, 9)]
        ],
    ),
    "contributed_ops": (
        model_zoo.contributed_ops,
        [{"x": floats(b, s, 32), "skip": floats(b, s, 32)} for b, s in [(1, 1), (2, 7), (3, 40)]],
    ),
    "relative_positions": (
        model_zoo.relative_positions,
        [{"x": floats(b, s, 32), "memory": floats(b, t, 32)} for b, s, t in [(1, 1, 1), (2, 9, 4), (3, 40, 17)]],
    ),
    "text_tower": (
        model_zoo.text_tower,
        [{"ids": rng.integers(0, 100, size)} for size in [(1, 1), (3, 7), (2, 77)]],
    ),
    "yolo_head": (model_zoo.yolo_head, pictures((1, 32, 32), (2, 40, 64), (3, 9, 17))),
    "two_stage_detector": (
        model_zoo.two_stage_detector,
        [
            {"image": floats(1, 3, h, w), "boxes": corners(k, h, w), "scores": floats(k)}
            for h, w, k in [(16, 16, 1), (33, 20, 12), (24, 48, 40), (16, 16, 0)]
        ],
    ),
    "tagger": (
        model_zoo.tagger,
        [
            {"ids": rng.integers(0, 60, (n, t)), "lengths": rng.integers(1, t + 1, n).astype(np.int32)}
            for n, t in [(1, 1), (3, 7), (5, 20)]
        ],
    ),
    "vocoder": (model_zoo.vocoder, [{"mel": floats(n, 20, t)} for n, t in [(1, 1), (2, 13), (1, 100)]]),
    "video_network": (
        model_zoo.video_network,
        [{"video": floats(n, 3, t, h, w)} for n, t, h, w in [(1, 4, 16, 16), (2, 3, 9, 21), (1, 1, 3, 2)]],
    ),
    "warped_features": (model_zoo.warped_features, pictures((1, 8, 8), (2, 5, 13), (3, 1, 1), channels=4, name="x")),
    "folding_pool": (model_zoo.folding_pool, pictures((1, 9, 20), (2, 2, 7), (3, 1, 1), (1, 4, 5), name="x")),
    "latest_opset": (model_zoo.latest_opset, cached_steps((1, 1, 0), (2, 7, 0), (3, 1, 9), (1, 5, 11))),
    "old_opset": (model_zoo.old_opset, pictures((1, 4, 4), (2, 7, 5), (3, 16, 9))),
    "spectrogram": (model_zoo.spectrogram, [{"audio": floats(b, s)} for b, s in [(1, 640), (2, 100), (3, 64)]]),
}


LARGE = (
    "all_unnamed",
    "gpt",
    "mobilenet",
    "vit",
    "unet_transposed",
    "conformer",
    "resnet",
    "relative_positions",
    "crnn",
    "swin",
    "diffusion_block",
)


@pytest.mark.parametrize("name", tiers.only(set(ZOO) - {*LARGE}, ZOO))
def test_one_compilation_matches_onnxruntime_at_every_shape(name: str) -> None:
    build, cases = ZOO[name]
    proto = build()
    exe, reference = rl.compile(rl.from_onnx(proto)), ort_reference.session(proto, optimize=False)
    slow = interpreted(exe)
    for inputs in cases:
        assert_same_both_ways(exe, inputs, slow)
        found = ort_reference.errors(exe, reference, inputs)
        shapes = {name: value.shape for name, value in inputs.items()}
        assert max(found.values()) <= TOLERANCE, (shapes, found)
