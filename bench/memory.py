"""Activation memory of a decoder: the planned arena, a pool that allocates at run time, and the least that is possible.

    python -m bench.memory [--layers 8] [--past 512] [--json FILE]

The decoder is that of bench/decoder.py. Prefill: one sequence of 128, 256, 512 and 1024 tokens, one call after the
other. Decode: one token behind `past` others, for 1, 16, 32 and 64 sequences, one call after the other. Nothing is run
or timed: all figures follow from the compiled graph, so they are the same everywhere. Only intermediates count; what a
call is given and what it returns (logits, keys and values) belongs to the caller in each of the columns.

least    the largest sum of tensors alive at once, in bytes as they are
arena    what the plan needs at these sizes (every tensor aligned to 64 bytes)
pool     what a run-time allocator holds after the call, on the same graph with the same lives: a tensor takes a free
         block of its own size class, which is its size rounded up to whole pages of 4096 bytes; where none is free, a
         new block is made; a block returns to the pool after the last use of its tensor; no block is split, joined with
         another, or given back, neither in a call nor between calls. (The allocator of TVM's virtual machine, which the
         Relax paper, arXiv 2311.02103, compares with.)
held     the memory that the runtime keeps for arenas after the call: one that fits the largest call so far, and up to
         1/32 more, so that sequences can grow

The last line of a table says how much less is held than by the pool once all calls are done.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.decoder import DecoderConfig, build_decoder
from relaxlite.ir.symbolic import SymVar, evaluate
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.memory.plan import MemoryPlan
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime.memory import rounded_size
from relaxlite.target import Target

PREFILL, DECODE = (128, 256, 512, 1024), (1, 16, 32, 64)
PAGE = 4096
GOALS = {"prefill": 0.22, "decode": 0.40}  # less than the pool, as the paper has it
OVER_MIN = 1.05


class Pool:
    """The run-time allocator of the column "pool"; sizes in bytes."""

    def __init__(self) -> None:
        self.total = 0
        self._free: Counter[int] = Counter()  # blocks by size class

    def allocate(self, nbytes: int) -> int:
        """A block's size class."""
        block = -(-nbytes // PAGE) * PAGE
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.total += block
        return block

    def release(self, block: int) -> None:
        self._free[block] += 1


@dataclass(frozen=True, slots=True)
class Row:
    """One call: its sizes, and bytes."""

    name: str
    least: int
    arena: int
    pool: int
    held: int


def plan_of(config: DecoderConfig, target: str = "llvm") -> MemoryPlan:
    """The memory plan of the compiled decoder."""
    context = PassContext(Target.parse(target))
    run_passes(build_decoder(config), default_pipeline(), context)
    return context.memory_plans["main"]


def run_with_pool(plan: MemoryPlan, sizes: Mapping[SymVar, int], pool: Pool) -> None:
    """One call that allocates at run time what the plan has in its arena."""
    starts, ends = defaultdict(list), defaultdict(list)
    for tensor in plan.tensors:
        if tensor.inside is None:
            starts[tensor.first].append(tensor)
            ends[tensor.last].append(tensor)
    blocks: dict[str, int] = {}
    for step in range(len(plan.steps)):
        for tensor in starts[step]:
            blocks[tensor.name] = pool.allocate(evaluate(tensor.nbytes, sizes))
        for tensor in ends[step]:
            pool.release(blocks.pop(tensor.name))


def measure(plan: MemoryPlan, calls: Mapping[str, Mapping[str, int]]) -> list[Row]:
    """The calls, one after the other. A call says the values of symbols by name."""
    symbols = {s.name: s for s in plan.arena.free_vars()}
    pool, held, rows = Pool(), 0, []
    for name, values in calls.items():
        sizes = {symbol: values[n] for n, symbol in symbols.items()}
        run_with_pool(plan, sizes, pool)
        arena = plan.arena_bytes(sizes)
        held = held if held >= arena else rounded_size(arena)
        rows.append(Row(name, plan.lower_bound(sizes), arena, pool.total, held))
    return rows


def phases(past: int) -> dict[str, dict[str, dict[str, int]]]:
    """The calls of each phase."""
    prefill = {f"1 x {n}": {"batch": 1, "seq": n, "past": 0} for n in PREFILL}
    decode = {f"{b} x 1 behind {past}": {"batch": b, "seq": 1, "past": past} for b in DECODE}
    return {"prefill": prefill, "decode": decode}


def saving(rows: list[Row]) -> float:
    """How much less is held in the end than by the pool, as a share of the pool."""
    return 1 - rows[-1].held / rows[-1].pool


def table(phase: str, rows: list[Row]) -> str:
    lines = [f"{phase:<18}{'least':>12}{'arena':>12}{'/ least':>9}{'pool':>12}{'held':>12}   bytes"]
    for row in rows:
        ratio = row.arena / row.least
        lines.append(f"{row.name:<18}{row.least:>12}{row.arena:>12}{ratio:>9.3f}{row.pool:>12}{row.held:>12}")
    worst = max(row.arena / row.least for row in rows)
    goals = f"goals: {GOALS[phase]:.0%}, {OVER_MIN - 1:.0%}"
    lines.append(f"{saving(rows):.1%} less than the pool, at most {worst - 1:.1%} over the least ({goals})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the decoder (default 8)")
    parser.add_argument("--past", type=int, default=512, help="tokens before the one that is decoded (default 512)")
    parser.add_argument("--json", metavar="FILE", help="also write all figures here")
    options = parser.parse_args()
    plan = plan_of(DecoderConfig(layers=options.layers))
    found = {phase: measure(plan, calls) for phase, calls in phases(options.past).items()}
    print("\n\n".join(table(phase, rows) for phase, rows in found.items()))
    if options.json:
        figures = {phase: [asdict(row) for row in rows] for phase, rows in found.items()}
        Path(options.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
