"""Sample arguments for the validation of a step (frontend/llm/step.py): random ones would be no valid pages."""

from __future__ import annotations

import numpy as np

from relaxlite.ir.expr import Function
from relaxlite.ir.module import IRModule
from relaxlite.llm.compiled_engine import cache_layout
from relaxlite.llm.engine import Array
from relaxlite.passes.graph.reachable import entry_points
from relaxlite.records import dataclass
from relaxlite.runtime.kv_cache import KVCache
from relaxlite.runtime.state_slots import STATES_PER_SEQUENCE
from relaxlite.signature import signature_of

# Lengths of sequences, and numbers of new tokens: a first token; prompts; a reply, draft tokens and a prompt, with many
# rows in total and a context of several pages
_STEPS = (((0,), (1,)), ((0, 0), (7, 3)), ((70, 9, 20), (1, 4, 20)))


def step_samples(module: IRModule, seed: int = 0) -> dict[str, list[tuple[Array, ...]]]:
    """Make calls of each function, with random tokens, keys and values, as a cache describes them."""
    calls = _calls(module, seed)
    result = {"main": [call.arguments(True) for call in calls]}
    return result | {name: [call.arguments(False) for call in calls] for name in entry_points(module)[1:]}


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a step."""

    inputs: tuple[Array, ...]  # tokens, and their description by the cache
    wanted: Array  # tokens whose logits "main" gives
    pools: tuple[Array, ...]

    def arguments(self, has_wanted: bool) -> tuple[Array, ...]:
        return (*self.inputs, *((self.wanted,) if has_wanted else ()), *self.pools)


def _calls(module: IRModule, seed: int) -> list[_Call]:
    rng = np.random.default_rng(seed)
    main = module["main"]
    assert isinstance(main, Function)
    signature = signature_of(main)
    vocab = int(signature.outputs[0].shape[-1])
    context, max_tokens = _fact(module, "context"), _fact(module, "step_tokens")
    layout, result = cache_layout(signature.inputs, _fact(module, "attention_block")), []
    for lengths, counts in _STEPS:
        if sum(counts) > max_tokens or max(map(sum, zip(lengths, counts, strict=True))) > context:
            continue
        pages = sum(-(-(length + count) // layout.page) for length, count in zip(lengths, counts, strict=True))
        states = STATES_PER_SEQUENCE * len(lengths) * layout.state_bytes
        cache = KVCache(layout, max_bytes=pages * layout.page_bytes + states)
        sequences = [cache.new() for _ in lengths]
        past, new = (list(zip(sequences, counts_of, strict=True)) for counts_of in (lengths, counts))
        cache.reserve(past)
        cache.commit(past)
        cache.reserve(new)
        inputs = cache.describe([(sequence, 0, count) for sequence, count in new])
        ends = np.cumsum(counts)
        wanted = np.unique([0, *(ends - 1)])
        pools = tuple(_random(rng, pool) for pool in cache.pools)
        result.append(_Call((rng.integers(0, vocab, ends[-1]), *inputs), wanted, pools))
    return result


def _random(rng: np.random.Generator, pool: Array) -> Array:
    """Return random contents of a pool."""
    if pool.dtype == np.int8:
        return np.asarray(rng.integers(-127, 128, pool.shape), np.int8)
    result = rng.standard_normal(pool.shape)
    is_scale = pool.shape[-1] == 1  # of int8 codes
    return np.asarray(np.abs(result) / 100 if is_scale else result).astype(pool.dtype)


def _fact(module: IRModule, name: str) -> int:
    value = module.attrs[name]
    assert isinstance(value, int)
    return value
