"""Every operator of PyTorch's own test database, exported with dynamic dimensions, compiled and compared with eager.

    python -m bench.torch_operators [--shard 1/4] [NAME ...]

An entry of torch's `op_db` gives up to eight sample inputs, in float32 where it has that. Each sample is a module whose
tensors are arguments and whose other arguments are constants. Every dimension above 1 is Dim.AUTO, which torch makes
static where it must; where export refuses that, no dimension is dynamic. Left out are samples that torch does not
export, whose exported program differs from eager, or whose results are random or uninitialized. Entries run in
processes of their own, with a time limit. docs/reference/pytorch-operators.md has the results.

Needs torch, expecttest, pytest and hypothesis, which torch's database imports.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
import warnings
import zlib
from typing import Any

import numpy as np
import torch
from torch.export import Dim
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import relaxlite as rl

SAMPLES, LOOKED_AT = 8, 200  # of an entry: how many are taken, of how many
DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool, torch.float64, torch.complex64)
LIMIT = 180  # seconds for an entry


class Sample(torch.nn.Module):
    """One sample input of an entry: `forward` takes the tensors among its arguments, in order."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op, self.finish = op.op, sample.output_process_fn_grad
        leaves, self.spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[k].detach().clone() for k in self.places]
        self.constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def name_of(op: Any) -> str:
    return ".".join(filter(None, (op.name, op.variant_test_name)))


def samples_of(op: Any) -> list[Sample]:
    """Return samples, spread evenly over those that the entry has, with strided tensors alone."""
    torch.manual_seed(zlib.crc32(name_of(op).encode()))
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in DTYPES if d in supported), next(iter(supported), None))
    if dtype is None or op.name.startswith(("empty", "new_empty")):
        return []
    drawn = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), LOOKED_AT))
    if len(drawn) > SAMPLES:
        drawn = [drawn[k * (len(drawn) - 1) // (SAMPLES - 1)] for k in range(SAMPLES)]
    made = [Sample(op, s) for s in drawn]
    return [s for s in made if s.tensors and all(t.layout == torch.strided for t in s.tensors)]


def copies(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), tree)


def eager(sample: Sample) -> Any:
    with torch.no_grad():
        return copies(sample(copies(sample.tensors)))


def export(sample: Sample) -> torch.export.ExportedProgram:
    """Export with dynamic dimensions, or without where that fails."""
    dims = [{d: Dim.AUTO for d, size in enumerate(t.shape) if size > 1} for t in sample.tensors]
    try:
        return torch.export.export(sample, (copies(sample.tensors),), dynamic_shapes=(dims,), strict=False)
    except Exception:
        return torch.export.export(sample, (copies(sample.tensors),), strict=False)


def check_same(sample: Sample, expected: Any, got: Any) -> None:
    """Raise AssertionError unless results agree; the entry says what of them is free, such as signs of vectors."""
    results = []
    for tree in (expected, got):
        with contextlib.suppress(Exception):  # the function is made for gradients and may not fit
            tree = sample.finish(tree)
        leaves = (leaf for leaf in pytree.tree_leaves(tree) if leaf is not None)
        results.append([x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x)) for x in leaves])
    assert len(results[0]) == len(results[1]), f"{len(results[1])} results, torch has {len(results[0])}"
    for wanted, own in zip(*results, strict=True):
        bound = 0.0
        if wanted.is_floating_point() or wanted.is_complex():
            finite = wanted[torch.isfinite(wanted)].abs()
            greatest = max(1e-6, float(finite.max())) if finite.numel() else 1.0
            bound = greatest * (2e-2 if wanted.dtype in (torch.float16, torch.bfloat16) else 1e-4)
        torch.testing.assert_close(own, wanted, rtol=0, atol=bound, equal_nan=True)


def is_random(sample: Sample) -> bool:
    """Whether results depend on the generator, which torch's wrappers of random operators seed themselves."""
    seed, results = torch.manual_seed, []
    for number in range(5):
        seed(number)
        torch.manual_seed = lambda _: None  # type: ignore[assignment]
        try:
            results.append(eager(sample))
        finally:
            torch.manual_seed = seed
    try:
        for again in results[1:]:
            check_same(sample, results[0], again)
    except AssertionError:
        return True
    return False


def check(sample: Sample) -> str | None:
    """Return what is wrong with a sample, "" if nothing, None where it is left out."""
    try:
        expected = eager(sample)
        if is_random(sample):
            return None
        program = export(sample)
        check_same(sample, expected, program.module()(copies(sample.tensors)))
    except Exception:
        return None
    try:
        check_same(sample, expected, rl.compile(rl.from_torch(program))(copies(sample.tensors)))
    except AssertionError as error:
        return f"WRONG: {' '.join(str(error).split())[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def check_entry(index: int, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        samples = samples_of(op_db[index])
    except Exception:  # the entry is not made for CPUs
        samples = []
    for sample in samples:
        sender.send(check(sample))
    sender.close()


def results_of(index: int) -> list[str]:
    """Check the samples of an entry in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=check_entry, args=(index, sender))
    process.start()
    sender.close()
    outcomes: list[str | None] = []
    try:
        while receiver.poll(LIMIT):
            outcomes.append(receiver.recv())
        outcomes.append(f"over {LIMIT} s")
    except EOFError:
        process.join()
        if process.exitcode:
            outcomes.append(f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return [x for x in outcomes if x is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these operators, in all variants")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th entry, from the I-th on")
    options = parser.parse_args()
    number, of = map(int, options.shard.split("/"))
    chosen = [k for k, op in enumerate(op_db) if not options.names or {op.name, name_of(op)} & set(options.names)]
    counted = good = 0
    for index in chosen[number - 1 :: of]:
        outcomes = results_of(index)
        if not outcomes:
            continue
        bad = [x for x in outcomes if x]
        counted, good = counted + 1, good + (not bad)
        state = f"FAIL {len(bad)} of {len(outcomes)} samples: {bad[0]}" if bad else "ok"
        print(f"{name_of(op_db[index]):<45} {state}", flush=True)
    print(f"{good} of {counted} entries pass all their samples")
    sys.exit(good != counted)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
