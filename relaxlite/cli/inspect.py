"""relaxlite inspect: what a model or a compiled file consists of."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from relaxlite.cli.opening import check_not_compiled, is_compiled, open_data
from relaxlite.cli.sizes import bytes_text
from relaxlite.errors import InvalidArgumentError
from relaxlite.llm.description import DESCRIPTION, Description
from relaxlite.runtime.executable import Call, ExecutableData, HostCode, TensorSpec, disassemble

_FIXED = "\x00"
_LONG = 500  # characters of a formula that are too many to read
_INSIDE = {"ir": "--ir", "after": "--after", "notes": "--notes", "schedules": "--schedules"}
_ONNX_ONLY = {**_INSIDE, "embed": "--embed"}


def execute(args: argparse.Namespace) -> None:
    if args.embed and not (args.ir or args.after):
        raise InvalidArgumentError("--embed goes with --ir or --after")
    if is_compiled(args.model):
        check_not_compiled(args, **_ONNX_ONLY)
    elif args.verify:
        raise InvalidArgumentError(f"--verify needs a file made by `relaxlite compile`, and {args.model!r} is none")
    if any(getattr(args, view) for view in _INSIDE):
        from relaxlite.cli.inspecting import show_inside

        return show_inside(args)
    data = open_data(args, to_run=False)
    if args.bytecode:
        print(disassemble(data), end="")
    elif args.json:
        print(json.dumps(summary(data), indent=2))
    else:
        _show(data)
    return None


def summary(data: ExecutableData) -> dict[str, Any]:
    """What the file consists of, as JSON has it."""
    plan = data.metadata.memory_plan
    arena = str(plan.get("arena_bytes", "0"))
    provenance = {k: v for k, v in data.metadata.provenance.items() if k in ("producer", "opset", "assumptions") and v}
    return {
        "inputs": [_spec(spec) for spec in data.signature.inputs],
        "outputs": [_spec(spec) for spec in data.signature.outputs],
        "source": provenance,
        "target": {"triple": data.target.triple, "cpu": data.target.cpu, "llvm": data.metadata.llvm},
        "weights": {"tensors": len(data.constants), "bytes": sum(c.nbytes for c in data.constants)},
        "object_code_bytes": sum(map(len, data.objects)),
        "host_function": _host(data.host),
        "other_functions": {name: _host(entry.host) for name, entry in data.others.items()},
        "arena_bytes": int(arena) if arena.isdecimal() else arena,
        "memory": {"at_most": plan.get("at_most"), "outside": plan.get("outside", 0), "at": plan.get("examples", [])},
        "libraries": [asdict(library) for library in data.libraries],
        "language_model": _language_model(data),
        "ops": dict(data.metadata.info.get("ops", {})),
        "kernels": _calls_of_kernels(data),
    }


def _host(code: HostCode) -> dict[str, Any]:
    return {"bytes": len(code.object_code), "reason": code.reason}


def _language_model(data: ExecutableData) -> dict[str, Any] | None:
    """What the file says of a language model; None where it is none."""
    if DESCRIPTION not in data.attachments:
        return None
    version = data.metadata.provenance.get("step_version")
    return {**asdict(Description.from_json(data.attachments[DESCRIPTION])), "step_version": version}


def _spec(spec: TensorSpec) -> dict[str, Any]:
    bounds = {s: dict(zip(("lower", "upper", "divisor"), bound, strict=True)) for s, bound in spec.bounds.items()}
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "symbols": bounds}


def _calls_of_kernels(data: ExecutableData) -> dict[str, int]:
    """How often each kernel stands in the bytecode, most often first."""
    calls = Counter(
        instruction.callee.partition(":")[2]
        for function in data.functions.values()
        for instruction in function.instructions
        if isinstance(instruction, Call) and instruction.callee.startswith("kernel:")
    )
    return dict(calls.most_common())


def _calls_text(host: dict[str, Any]) -> str:
    return f"native, {bytes_text(host['bytes'])}" if host["bytes"] else f"interpreted: {host['reason']}"


def _show(data: ExecutableData) -> None:
    result = summary(data)
    for title, specs in (("inputs", data.signature.inputs), ("outputs", data.signature.outputs)):
        _show_lines(title, [str(spec) for spec in specs])
    source = result["source"]
    parts = [str(source.get("producer", "")), f"opset {source['opset']}" if source.get("opset") else ""]
    _show_lines("source", [", ".join(filter(None, parts))] if any(parts) else [])
    if (language := result["language_model"]) is not None:
        facts = ("architecture", "vocab", "context", "stop", *(["chat_template"] if language["chat_template"] else []))
        texts = [f"{name} {'yes' if name == 'chat_template' else language[name]}" for name in facts]
        origin = [f"{name}: {value}" for name, value in language["provenance"].items()]
        _show_lines("language", [", ".join(texts), *origin])
    target, weights = result["target"], result["weights"]
    _show_lines("target", [f"{target['cpu']}, {target['triple']}, LLVM {target['llvm']}"])
    _show_lines("weights", [f"{weights['tensors']} tensors, {bytes_text(weights['bytes'])}"])
    _show_lines("code", [f"{len(result['kernels'])} kernels, {bytes_text(result['object_code_bytes'])}"])
    others = [f"{name}: {_calls_text(host)}" for name, host in result["other_functions"].items()]
    _show_lines("calls", [_calls_text(result["host_function"]), *others])
    _show_lines("memory", _memory_lines(result["arena_bytes"], result["memory"]))
    _show_lines("libraries", [str(library) for library in data.libraries])
    _show_counts("ops", "in all", result["ops"])
    _show_counts("kernels", "calls", result["kernels"])


def _memory_lines(arena: int | str, memory: Mapping[str, Any]) -> list[str]:
    what, most = "for all intermediates of a run", memory["at_most"]
    if isinstance(arena, int):
        lines = [f"{bytes_text(arena)} {what}"]
    elif most is not None:
        lines = [f"at most {bytes_text(most)} {what}, whatever the sizes"]
    else:
        lines = [f"{what}, in bytes:", *_wrapped(arena)] if len(arena) <= _LONG else [f"{what}:"]
    if not isinstance(arena, int):
        for example in memory["at"]:
            sizes = ", ".join(f"{name}={size}" for name, size in example["sizes"].items())
            lines.append(f"{bytes_text(example['bytes'])} where {sizes}")
    if memory["outside"]:
        lines.append(f"and {memory['outside']} more whose size or life only a run tells")
    return lines


def _wrapped(arena: str) -> list[str]:
    lines = textwrap.wrap(_with_fixed_groups(arena), 100, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_FIXED, " ") for line in lines]


def _with_fixed_groups(text: str) -> str:
    """Spaces at which a line may not break are marked: it may before a "+" outside parentheses, and behind a comma."""
    depth = 0
    signs: list[str] = []
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        signs.append(_FIXED if sign == " " and depth and signs[-1] != "," else sign)
    return "".join(signs).replace(" + ", f" +{_FIXED}")


def _show_lines(title: str, lines: list[str]) -> None:
    for k, line in enumerate(lines):
        print(f"{title if k == 0 else '':<10}{line}")


def _show_counts(title: str, unit: str, counts: Mapping[str, int]) -> None:
    print(f"\n{title}: {len(counts)} kinds, {sum(counts.values())} {unit}")
    for name, count in counts.items():
        print(f"{count:>8}  {name}")
