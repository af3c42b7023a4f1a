"""Greedy text of a transformers model through `rl.from_torch`: the same tokens as eager, from one compilation.

    python -m bench.torch_generation [--cache buffers|arguments] [--tokens 64]

The model is SmolLM2-135M, from its GGUF file, in float32. Its cache is a static one in buffers, which the executable
keeps, or goes in and out as arguments and results of any length. One compilation serves the prompt and all steps.
Printed: seconds of export, import and compilation, and tokens/s beside eager's in the same process.
Needs torch, transformers, gguf.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

import bench.torch_compile  # noqa: F401  (defines what torchvision lacks beside a torch for CPUs)
import relaxlite as rl
from relaxlite import models

PROMPT = "The capital of France is"
LENGTH = 256  # positions of a static cache
Step = Callable[[torch.Tensor, int], torch.Tensor]  # tokens (1, s) and their first position -> logits (1, vocabulary)


class InBuffers(torch.nn.Module):
    """A model with a static cache in buffers."""

    def __init__(self, model: Any) -> None:
        from transformers import StaticCache

        super().__init__()
        config = model.config
        self.model, self.cache = model, StaticCache(config=config, max_cache_len=LENGTH)
        self.cache.early_initialization(1, config.num_key_value_heads, config.head_dim, torch.float32, "cpu")
        for k, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                if isinstance(getattr(layer, name, None), torch.Tensor):
                    self.register_buffer(f"{name}_{k}", getattr(layer, name), persistent=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        result = self.model(input_ids=ids, position_ids=positions[None], past_key_values=self.cache, use_cache=True)
        return result.logits[:, -1]


class InArguments(torch.nn.Module):
    """A model whose cache is an argument and a result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, past: Any) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(past, config=self.model.config)
        result = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return result.logits[:, -1], [(layer.keys, layer.values) for layer in result.past_key_values.layers]


def past_of(config: Any, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_hidden_layers)]


def exported(model: Any, cache: str) -> torch.export.ExportedProgram:
    ids, s = torch.zeros((1, 5), dtype=torch.int64), Dim("s", min=1, max=LENGTH - 1)
    if cache == "buffers":
        shapes: Any = {"ids": {1: s}, "positions": {0: s}}
        return torch.export.export(InBuffers(model), (ids, torch.arange(5)), dynamic_shapes=shapes)
    p = Dim("p", min=0, max=LENGTH)
    shapes = {"ids": {1: s}, "past": [({2: p}, {2: p})] * model.config.num_hidden_layers}
    return torch.export.export(InArguments(model), (ids, past_of(model.config, 7)), dynamic_shapes=shapes)


def step_of(run: Callable[..., Any], config: Any, cache: str) -> Step:
    """A step of generation by an executable, or by a module in eager."""
    if cache == "buffers":
        return lambda ids, first: run(ids, torch.arange(first, first + ids.shape[1]))
    past = [past_of(config, 0)]

    def step(ids: torch.Tensor, _: int) -> torch.Tensor:
        logits, past[0] = run(ids, past[0])
        return logits

    return step


def generate(step: Step, ids: torch.Tensor, count: int) -> tuple[list[int], float]:
    """Return `count` greedy tokens and the tokens per second after the first."""
    tokens, length = [int(step(ids, 0).argmax())], ids.shape[1]
    start = time.perf_counter()
    for k in range(count - 1):
        tokens.append(int(step(torch.tensor([[tokens[-1]]]), length + k).argmax()))
    return tokens, (count - 1) / (time.perf_counter() - start)


def timed(label: str, function: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = function()
    print(f"{label} {time.perf_counter() - start:.1f} s", flush=True)
    return result


def main() -> None:
    """Generate text both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", choices=("buffers", "arguments"), default="buffers")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = models.fetch("smollm2-135m-instruct")
    file = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = AutoTokenizer.from_pretrained(**file)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        program = timed("export", lambda: exported(model, options.cache))
        exe = rl.compile(timed("import", lambda: rl.from_torch(program)))
        own, rate = generate(step_of(exe, model.config, options.cache), ids, options.tokens)
        eager, eager_rate = generate(step_of(InArguments(model), model.config, "arguments"), ids, options.tokens)
    print(f"tokens equal: {own == eager}; {rate:.1f} tokens/s, eager {eager_rate:.1f}")
    sys.exit(own != eager)


if __name__ == "__main__":
    main()
