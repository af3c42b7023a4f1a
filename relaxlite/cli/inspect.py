"""relaxlite inspect: show the signature, kernels, weights and memory plan of a model."""

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

_NO_BREAK = "\x00"
_MAX_FORMULA = 500  # characters of a formula that is shown
_COMPILER_VIEWS = {"ir": "--ir", "after": "--after", "notes": "--notes", "schedules": "--schedules"}
_ONNX_ONLY = {**_COMPILER_VIEWS, "embed": "--embed"}


def execute(args: argparse.Namespace) -> None:
    if args.embed and not (args.ir or args.after):
        raise InvalidArgumentError("--embed goes with --ir or --after")
    if is_compiled(args.model):
        check_not_compiled(args, **_ONNX_ONLY)
    elif args.verify:
        raise InvalidArgumentError(f"--verify needs a file made by `relaxlite compile`, and {args.model!r} is none")
    if any(getattr(args, view) for view in _COMPILER_VIEWS):
        from relaxlite.cli.inspect_ir import show_ir_view

        return show_ir_view(args)
    data = open_data(args, to_run=False)
    if args.bytecode:
        print(disassemble(data), end="")
    elif args.json:
        print(json.dumps(summary(data), indent=2))
    else:
        _show(data)
    return None


def _target(data: ExecutableData) -> dict[str, str]:
    device = {"device": data.target.device} if data.target.device else {}
    return {"triple": data.target.triple, "cpu": data.target.cpu, "llvm": data.metadata.llvm, **device}


def summary(data: ExecutableData) -> dict[str, Any]:
    """Return a summary of a compiled model for JSON."""
    plan = data.metadata.memory_plan
    arena = str(plan.get("arena_bytes", "0"))
    provenance = {k: v for k, v in data.metadata.provenance.items() if k in ("producer", "opset", "assumptions") and v}
    return {
        "inputs": [_spec(spec) for spec in data.signature.inputs],
        "outputs": [_spec(spec) for spec in data.signature.outputs],
        "source": provenance,
        "target": _target(data),
        "weights": {"tensors": len(data.constants), "bytes": sum(c.nbytes for c in data.constants)},
        "object_code_bytes": sum(map(len, data.objects)),
        "host_function": _host(data.host),
        "other_functions": {name: _host(entry.host) for name, entry in data.extra_entries.items()},
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
    """Return the description of a language model, or None if the file has none."""
    if DESCRIPTION not in data.attachments:
        return None
    version = data.metadata.provenance.get("step_version")
    return {**asdict(Description.from_json(data.attachments[DESCRIPTION])), "step_version": version}


def _spec(spec: TensorSpec) -> dict[str, Any]:
    bounds = {s: dict(zip(("lower", "upper", "divisor"), bound, strict=True)) for s, bound in spec.bounds.items()}
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "symbols": bounds}


def _calls_of_kernels(data: ExecutableData) -> dict[str, int]:
    """Return the number of calls of each kernel in the bytecode, in descending order."""
    calls = Counter(
        instruction.callee.partition(":")[2]
        for function in data.functions.values()
        for instruction in function.instructions
        if isinstance(instruction, Call) and instruction.callee.startswith("kernel:")
    )
    return dict(calls.most_common())


def _host_text(host: dict[str, Any]) -> str:
    return f"native, {bytes_text(host['bytes'])}" if host["bytes"] else f"interpreted: {host['reason']}"


def _show(data: ExecutableData) -> None:
    content = summary(data)
    for title, specs in (("inputs", data.signature.inputs), ("outputs", data.signature.outputs)):
        _show_lines(title, [str(spec) for spec in specs])
    source = content["source"]
    parts = [str(source.get("producer", "")), f"opset {source['opset']}" if source.get("opset") else ""]
    _show_lines("source", [", ".join(filter(None, parts))] if any(parts) else [])
    if (language := content["language_model"]) is not None:
        facts = ("architecture", "vocab", "context", "stop", *(["chat_template"] if language["chat_template"] else []))
        texts = [f"{name} {'yes' if name == 'chat_template' else language[name]}" for name in facts]
        origin = [f"{name}: {value}" for name, value in language["provenance"].items()]
        _show_lines("language", [", ".join(texts), *origin])
    target, weights = content["target"], content["weights"]
    device = f"{target['device']}, the host's part for " if "device" in target else ""
    _show_lines("target", [f"{device}{target['cpu']}, {target['triple']}, LLVM {target['llvm']}"])
    _show_lines("weights", [f"{weights['tensors']} tensors, {bytes_text(weights['bytes'])}"])
    _show_lines("code", [f"{len(content['kernels'])} kernels, {bytes_text(content['object_code_bytes'])}"])
    others = [f"{name}: {_host_text(host)}" for name, host in content["other_functions"].items()]
    _show_lines("calls", [_host_text(content["host_function"]), *others])
    _show_lines("memory", _memory_lines(content["arena_bytes"], content["memory"]))
    _show_lines("libraries", [str(library) for library in data.libraries])
    _show_counts("ops", "in all", content["ops"])
    _show_counts("kernels", "calls", content["kernels"])


def _memory_lines(arena: int | str, memory: Mapping[str, Any]) -> list[str]:
    what, upper_bound = "for all intermediates of a run", memory["at_most"]
    if isinstance(arena, int):
        lines = [f"{bytes_text(arena)} {what}"]
    elif upper_bound is not None:
        lines = [f"at most {bytes_text(upper_bound)} {what}, whatever the sizes"]
    else:
        lines = [f"{what}, in bytes:", *_wrapped(arena)] if len(arena) <= _MAX_FORMULA else [f"{what}:"]
    if not isinstance(arena, int):
        for example in memory["at"]:
            sizes = ", ".join(f"{name}={size}" for name, size in example["sizes"].items())
            lines.append(f"{bytes_text(example['bytes'])} where {sizes}")
    if memory["outside"]:
        lines.append(f"and {memory['outside']} more whose size or life only a run tells")
    return lines


def _wrapped(arena: str) -> list[str]:
    lines = textwrap.wrap(_mark_unbreakable_spaces(arena), 100, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _mark_unbreakable_spaces(text: str) -> str:
    """Mark the spaces at which no line may break: all but those before a "+" outside parentheses and after commas."""
    depth = 0
    signs: list[str] = []
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        signs.append(_NO_BREAK if sign == " " and depth and signs[-1] != "," else sign)
    return "".join(signs).replace(" + ", f" +{_NO_BREAK}")


def _show_lines(title: str, lines: list[str]) -> None:
    for k, line in enumerate(lines):
        print(f"{title if k == 0 else '':<10}{line}")


def _show_counts(title: str, unit: str, counts: Mapping[str, int]) -> None:
    print(f"\n{title}: {len(counts)} kinds, {sum(counts.values())} {unit}")
    for name, count in counts.items():
        print(f"{count:>8}  {name}")
