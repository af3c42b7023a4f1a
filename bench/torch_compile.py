"""Speed of `torch.compile(backend="relaxlite")` beside Inductor's and eager, with dynamic shapes.

    python -m bench.torch_compile [--threads 2] [--rounds 5] [MODEL ...]

For each model: medians of a call in milliseconds over several shapes, taken in turn in one process, the largest
difference from eager, the number of compilations; last, the geometric mean of Inductor's time over relaxlite's, and
the time of a call of a model of one small kernel.
Needs torch, torchvision, transformers; Inductor needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import relaxlite.torch

if not hasattr(torch.ops.torchvision, "nms"):  # a torchvision that was built for CUDA beside a torch for CPUs
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def minilm() -> tuple[Any, Callable[[int, int], tuple[Any, ...]], list[tuple[int, int]]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config, add_pooling_layer=False)
    return model, lambda b, n: (torch.randint(0, 30000, (b, n)),), [(1, 16), (1, 128), (8, 32)]


def resnet50() -> tuple[Any, Callable[[int, int], tuple[Any, ...]], list[tuple[int, int]]]:
    from torchvision.models import resnet50 as make

    return make(), lambda b, n: (torch.randn(b, 3, n, n),), [(1, 224), (2, 192)]


def llama() -> tuple[Any, Callable[[int, int], tuple[Any, ...]], list[tuple[int, int]]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408,
        vocab_size=8000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda b, n: (torch.randint(0, 8000, (b, n)),), [(1, 32), (2, 100)]


def whisper() -> tuple[Any, Callable[[int, int], tuple[Any, ...]], list[tuple[int, int]]]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return WhisperEncoder(config), lambda b, n: (torch.randn(b, 80, n),), [(1, 3000), (2, 3000)]


MODELS = {"minilm": minilm, "resnet50": resnet50, "llama": llama, "whisper": whisper}


def first(result: Any) -> torch.Tensor:
    """The first tensor of a result."""
    return result if isinstance(result, torch.Tensor) else result[0]


def measure(name: str, rounds: int) -> list[float]:
    """Print a row for each shape; return Inductor's time over relaxlite's."""
    torch._dynamo.reset()
    relaxlite.torch.reset_report()
    model, inputs, shapes = MODELS[name]()
    model = model.eval()
    ways = {
        "relaxlite": torch.compile(model, backend="relaxlite", dynamic=True),
        "inductor": torch.compile(model, dynamic=True),
        "eager": model,
    }
    ratios = []
    for shape in shapes:
        args, times, results = inputs(*shape), {way: [] for way in ways}, {}
        for way, run in ways.items():
            results[way] = first(run(*args))
        for _ in range(rounds):
            for way, run in ways.items():
                start = time.perf_counter()
                run(*args)
                times[way].append((time.perf_counter() - start) * 1e3)
        medians = {way: statistics.median(values) for way, values in times.items()}
        worst = float((results["relaxlite"] - results["eager"]).abs().max() / results["eager"].abs().max())
        row = "  ".join(f"{way} {ms:9.3f} ms" for way, ms in medians.items())
        ratios.append(medians["inductor"] / medians["relaxlite"])
        print(f"{name:10} {shape!s:12} {row}  {ratios[-1]:5.2f}x  difference {worst:.1e}", flush=True)
    for _ in range(20):
        n = shapes[0][1]
        size = (
            1 + torch.randint(0, 4, ()).item(),
            n if name in ("whisper", "resnet50") else n + torch.randint(1, 99, ()).item(),
        )
        ways["relaxlite"](*inputs(*size))
    print(f"{name:10} {relaxlite.torch.report().compilations} compilations")
    return ratios


def measure_overhead(calls: int = 2000) -> None:
    """Print the median time of a call of one small kernel, where the call is nearly all of the time."""
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()).eval(), torch.randn(4, 8)
    for way, options in {"relaxlite": {"backend": "relaxlite"}, "inductor": {}}.items():
        run, times = torch.compile(model, dynamic=True, **options), []
        for _ in range(calls):
            start = time.perf_counter()
            run(x)
            times.append((time.perf_counter() - start) * 1e6)
        print(f"one kernel {way:10} {statistics.median(times):6.1f} us a call")


def main() -> None:
    """Measure the models that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ratios = []
    with torch.no_grad():
        for name in options.models or MODELS:
            ratios += measure(name, options.rounds)
        measure_overhead()
    print(f"geometric mean of inductor / relaxlite: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")


if __name__ == "__main__":
    main()
