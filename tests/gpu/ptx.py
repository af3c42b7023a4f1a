"""Parse PTX, as far as LLVM's NVPTX writes it, for the simulator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

KINDS: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
        "s16": np.int16, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "b32": np.uint32, "u32": np.uint32,
        "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    }.items()
}  # fmt: skip
BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+")


@dataclass(frozen=True)
class Instruction:
    """An instruction: its parts between dots, operands (a tuple for those in braces), and the predicate, if any."""

    op: tuple[str, ...]
    operands: tuple[Any, ...]
    predicate: str | None
    is_negated: bool


@dataclass(frozen=True)
class Kernel:
    """A function of a module."""

    name: str
    params: tuple[tuple[str, str], ...]  # (kind, name)
    symbols: dict[str, int]  # offsets of shared arrays, and addresses of tables once a module is loaded
    shared_bytes: int
    local_bytes: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    threads: tuple[int, ...]


def parse(text: str) -> tuple[dict[str, Kernel], dict[str, np.ndarray[Any, Any]]]:
    """The functions of a module, and its constant tables."""
    text = re.sub(r"//[^\n]*", "", text)
    kernels = {}
    for match in re.finditer(r"\.visible \.entry ([\w$]+)\((.*?)\)([^{]*)\{(.*?)\n\}", text, re.S):
        kernels[match[1]] = _kernel(text, *match.groups())
    return kernels, dict(_tables(text))


def _tables(text: str) -> Any:
    for kind, name, items in re.findall(r"\.global \.align \d+ \.(\w+) ([\w$]+)\[\d+\] = \{([^}]*)\}", text):
        bits = 8 * KINDS[kind].itemsize
        values = [int(item, 0) & (1 << bits) - 1 for item in items.split(",")]
        yield name, np.array(values, BITS[KINDS[kind].itemsize])


def _kernel(text: str, name: str, params: str, directives: str, body: str) -> Kernel:
    kinds = re.findall(r"\.param\s+\.(\w+)(?:[^,]*?)\s([\w$]+)(?=,|\s*$)", params.strip() + "\n")
    shared, size = {}, 0
    for align, var, count in re.findall(r"\.shared \.align (\d+) \.b8 ([\w$]+)\[(\d+)\];", text):
        if var in body:
            size = -(-size // int(align)) * int(align)
            shared[var], size = size, size + int(count)
    local = sum(map(int, re.findall(r"\.local\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\];", body)))
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.replace(";", "\n").splitlines():
        line = " ".join(line.split())
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line and line[0] != ".":
            code.append(_instruction(line))
    threads = re.search(r"\.reqntid (\d+), (\d+), (\d+)", directives)
    assert threads is not None, f"{name} does not say how many threads its blocks have"
    return Kernel(name, tuple(kinds), shared, size, local, tuple(code), labels, tuple(map(int, threads.groups())))


def _instruction(line: str) -> Instruction:
    guard = re.match(r"@(!?)(%\w+) (.*)", line)
    is_negated, predicate, line = (guard[1] == "!", guard[2], guard[3]) if guard else (False, None, line)
    op, _, rest = line.partition(" ")
    operands = tuple(
        tuple(part.strip() for part in item[1:-1].split(",")) if item[0] == "{" else item
        for item in _OPERAND.findall(rest)
    )
    return Instruction(tuple(op.split(".")), operands, predicate, is_negated)
