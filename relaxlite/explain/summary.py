"""Summary of an Explanation, or of a compiled file, as plain data and as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relaxlite.explain.decisions import group_decisions
from relaxlite.explain.explanation import Explanation
from relaxlite.explain.kernels import modelled_work
from relaxlite.explain.markup import bytes_text, count_text, words
from relaxlite.explain.symbols import Symbols
from relaxlite.ir.symbolic import SymVar
from relaxlite.runtime.executable import Call, ExecutableData, KernelCost, SymbolBounds, TensorSpec, bound_text

MAX_KERNELS, MAX_REASONS, MAX_GROUPS = 10, 8, 12  # shown in the text
COSTS = ("flops", "bytes_read", "bytes_written")  # fields of Cost and of KernelCost
SMALL, LARGE = 1, 512  # sample sizes, within bounds

Data = dict[str, Any]


def summary(explanation: Explanation, values: Mapping[str, int] | None = None) -> Data:
    """Signature, symbols, passes, kernels, decisions, memory and library calls as plain data.

    Amounts are texts in the symbols, and numbers at the given values of symbols (default: one within the bounds).
    """
    at = explanation.values(values)
    text = explanation.symbols.text
    notes = [
        {
            "step": d.step,
            "subject": d.subject,
            "taken": d.taken,
            "reason": d.reason,
            "figures": {name: text(amount) for name, amount in d.figures.items()},
        }
        for d in explanation.decisions
    ]
    kernels = []
    work_of = {kernel: (flops, nbytes) for kernel, flops, nbytes in explanation.costliest(at)}
    for kernel in [*work_of, *(k for k in explanation.kernels if k not in work_of)]:
        item: Data = {"name": kernel.name, "ops": kernel.ops, "calls": kernel.calls, "schedule": list(kernel.steps)}
        if kernel.cost is not None:
            flops, nbytes = work_of[kernel]
            item |= {key: text(getattr(kernel.cost, key)) for key in COSTS}
            item["at"] = {"flops": flops, "bytes": nbytes, "work": modelled_work(flops, nbytes)}
        kernels.append(item)
    samples = _samples(explanation.symbols)
    memory = [
        {
            "function": plan.function,
            "tensors": len(plan.tensors),
            "arena": text(plan.arena),
            "arena_bytes": plan.arena_bytes(at),
            "lower_bound": plan.lower_bound(at),
            "samples": [
                {"symbols": sizes, "arena_bytes": plan.arena_bytes(sample), "lower_bound": plan.lower_bound(sample)}
                for sizes, sample in samples
            ],
        }
        for plan in explanation.memory_plans.values()
    ]
    signature = explanation.data.signature
    return {
        "name": explanation.name,
        "inputs": [_spec(spec) for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
        "symbols": [
            {
                "name": s.name,
                "lower": s.var.lower,
                "upper": s.var.upper,
                "divisor": s.var.divisor,
                "defined": s.defined,
                "value": at[s.var],
            }
            for s in explanation.symbols
        ],
        "operators": sum(node.kind in ("op", "view", "control") for node in explanation.imported.nodes),
        "passes": [snapshot.summary() for snapshot in explanation.snapshots.taken],
        "timings_ms": {name: round(seconds * 1e3, 3) for name, seconds in explanation.timings},
        "kernels": kernels,
        "decisions": notes,
        "reasons": [
            {"step": g.step, "taken": g.taken, "reason": g.reason, "times": len(g.decisions)}
            for g in group_decisions(explanation.decisions)
        ],
        "memory": memory,
        "library": explanation.library,
        "versions": explanation.versions,
    }


def compiled_summary(name: str, data: ExecutableData) -> Data:
    """Summary of a compiled file: without decisions and plans, and with costs in each kernel's own symbols.

    Programs without a cost compute sizes; as in `summary`, their calls are not counted.
    """
    calls: Counter[str] = Counter()
    for function in data.functions.values():
        calls.update(i.callee for i in function.instructions if isinstance(i, Call))
    info, arena = data.metadata.info, str(data.metadata.memory_plan.get("arena_bytes", "0"))
    kernels = []
    for kernel in data.kernels.values():
        item: Data = {"name": kernel.name, "ops": [], "calls": [], "schedule": []}
        if kernel.cost is not None:
            item["calls"] = [""] * calls[f"kernel:{kernel.name}"]
            item |= {key: _named(getattr(kernel.cost, key), kernel.cost) for key in COSTS}
        kernels.append(item)
    bounds = data.signature.bounds
    return {
        "name": name,
        "inputs": [_spec(spec) for spec in data.signature.inputs],
        "outputs": [_spec(spec) for spec in data.signature.outputs],
        "symbols": [
            {"name": s, "lower": low, "upper": high, "divisor": step, "defined": [], "value": None}
            for s, (low, high, step) in bounds.items()
        ],
        "operators": sum(dict(info.get("ops", {})).values()),
        "passes": [],
        "timings_ms": {step: seconds * 1e3 for step, seconds in dict(info.get("passes_s", {})).items()},
        "kernels": kernels,
        "decisions": [],
        "reasons": [],
        "memory": [{"function": "main", "arena": arena}],
        "library": {c.partition(":")[2]: [""] * n for c, n in calls.items() if c.startswith("extern:")},
        "versions": {"relaxlite": data.metadata.producer, "LLVM": data.metadata.llvm, "target": data.target.cpu},
    }


def _samples(symbols: Symbols) -> list[tuple[dict[str, int], dict[SymVar, int]]]:
    """Values of all symbols: small, default and large, within bounds."""
    result = []
    for sizes in (
        {s.name: s.nearest_legal_value(SMALL) for s in symbols},
        {},
        {s.name: s.nearest_legal_value(LARGE) for s in symbols},
    ):
        values = symbols.values(sizes)
        result.append(({symbols.name(var): value for var, value in values.items()}, values))
    return result if values else []


def _spec(spec: TensorSpec) -> str:
    return str(spec)


def _named(text: str, cost: KernelCost) -> str:
    """An expression of s0, s1, ... with the names of the symbols."""
    return re.sub(r"\bs(\d+)\b", lambda match: cost.symbols[int(match[1])], text)


# As text


def summary_text(data: Data) -> str:
    """The summary as text for a terminal."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Data) -> Iterator[str]:
    yield from _titled("inputs", data["inputs"])
    yield from _titled("outputs", data["outputs"])
    yield from _titled("symbols", [_symbol(item) for item in data["symbols"]])
    versions = data["versions"]
    yield from _titled("made by", [", ".join(f"{what} {version}" for what, version in versions.items())])
    kernels = [k for k in data["kernels"] if k["calls"]]
    num_calls = sum(len(k["calls"]) for k in kernels)
    yield ""
    yield f"{data['operators']} operators became {len(kernels)} kernels, called {num_calls} times in a run"
    for symbol, names in data["library"].items():
        yield f"{len(names)} calls of the library routine {symbol}"
    yield from _passes(data)
    yield from _groups(kernels)
    yield from _reasons(data["reasons"])
    yield from _memory(data)
    yield from _costs(data)


def _titled(title: str, lines: Sequence[str]) -> Iterator[str]:
    for k, line in enumerate(lines):
        yield f"{title if k == 0 else '':<10}{line}"


def _symbol(item: Data) -> str:
    bound: SymbolBounds = (item["lower"], item["upper"], item["divisor"])
    where = f": {words(item['defined'], 1)}" if item["defined"] else ""
    return f"{bound_text(item['name'], bound) or item['name'] + ' of any size'}{where}"


def _passes(data: Data) -> Iterator[str]:
    passes = data["passes"]
    if not passes and not data["timings_ms"]:
        return
    yield ""
    yield f"{'pass':<26}{'ms':>9}{'bindings':>16}{'kernels':>14}"
    known = {item["name"]: item for item in passes}
    for name, ms in data["timings_ms"].items():
        step = known.get(name)
        bindings, programs = (_change(step["bindings"]), _change(step["programs"])) if step else ("", "")
        yield f"{name:<26}{ms:>9.1f}{bindings:>16}{programs:>14}"
    yield f"{'in all':<26}{sum(data['timings_ms'].values()):>9.1f}"


def _change(pair: Sequence[int]) -> str:
    before, after = pair
    return f"{before} -> {after}" if before != after else str(after)


def _groups(kernels: Sequence[Data]) -> Iterator[str]:
    fused = [k for k in kernels if len(k["ops"]) > 1]
    if not fused:
        return
    yield ""
    yield f"fused groups: {len(fused)} kinds, {sum(len(k['calls']) for k in fused)} calls"
    for kernel in fused[:MAX_GROUPS]:
        yield from _item(f"{len(kernel['calls']):>5} x {kernel['name']}: {words(kernel['ops'], 10)}")
    if len(fused) > MAX_GROUPS:
        yield f"        and {len(fused) - MAX_GROUPS} more kinds"


def _reasons(reasons: Sequence[Data]) -> Iterator[str]:
    for taken, title in ((False, "reasons against"), (True, "reasons for")):
        chosen = sorted((r for r in reasons if r["taken"] is taken), key=lambda r: -r["times"])
        if not chosen:
            continue
        yield ""
        yield f"{title}: {sum(r['times'] for r in chosen)} decisions, {len(chosen)} kinds"
        for item in chosen[:MAX_REASONS]:
            yield from _item(f"{item['times']:>5} x {item['step']}: {item['reason']}")
        if len(chosen) > MAX_REASONS:
            yield f"        and {len(chosen) - MAX_REASONS} more kinds (--json and -o FILE.html have all)"


def _item(line: str) -> list[str]:
    return textwrap.wrap(line, 110, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


def _memory(data: Data) -> Iterator[str]:
    if not data["memory"]:
        return
    yield ""
    yield f"memory for intermediates{_at(data)}"
    for plan in data["memory"]:
        if "arena_bytes" not in plan:
            yield f"  {plan['function']}: {plan['arena']} bytes"
            continue
        share = plan["arena_bytes"] / max(plan["lower_bound"], 1)
        yield (
            f"  {plan['function']}: {bytes_text(plan['arena_bytes'])} for {plan['tensors']} tensors; "
            f"any plan needs {bytes_text(plan['lower_bound'])} ({share:.2f} times that)"
        )
        lines = textwrap.wrap(f"{plan['arena']} bytes", 108, break_long_words=False, break_on_hyphens=False)
        yield from (f"    {line}" for line in lines)
        for sample in plan["samples"]:
            sizes = ", ".join(f"{name} = {value}" for name, value in sample["symbols"].items())
            arena, bound = sample["arena_bytes"], sample["lower_bound"]
            yield f"    at {sizes}: {bytes_text(arena)} of {bytes_text(bound)} ({arena / max(bound, 1):.2f})"


def _at(data: Data) -> str:
    known = [f"{s['name']} = {s['value']}" for s in data["symbols"] if s["value"] is not None]
    return f" at {', '.join(known)}" if known else ""


def _costs(data: Data) -> Iterator[str]:
    ranked = [k for k in data["kernels"] if "at" in k]
    if not ranked:
        return
    total = sum(k["at"]["work"] for k in ranked) or 1
    yield ""
    yield f"the costliest kernels by the model, all calls of a run together{_at(data)}"
    yield f"{'cost':>6}{'calls':>7}{'FLOPs':>10}{'bytes':>10}{'FLOP/byte':>11}  kernel"
    for kernel in ranked[:MAX_KERNELS]:
        flops, nbytes, work = (kernel["at"][key] for key in ("flops", "bytes", "work"))
        ratio = f"{flops / nbytes:.2f}" if nbytes else "-"
        yield (
            f"{work / total:>6.1%}{len(kernel['calls']):>7}{count_text(flops):>10}{bytes_text(nbytes):>10}"
            f"{ratio:>11}  {kernel['name']}"
        )
    if len(ranked) > MAX_KERNELS:
        rest = sum(k["at"]["work"] for k in ranked[MAX_KERNELS:])
        yield f"{rest / total:>6.1%}{'':>38}  the other {len(ranked) - MAX_KERNELS}"
