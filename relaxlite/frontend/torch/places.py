"""Places of nodes: the user's source line and the path of the module, as torch recorded them."""

from __future__ import annotations

import os
import re

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_MARKS = re.compile(r"[\s^~]*")  # a line that underlines a part of the line above


def place_of(node: torch.fx.Node) -> str:
    """Return "model.py:14 in layers.0.attention (aten.linear.default)", as far as it is known."""
    frame, path = source_line(node), module_path(node)
    parts = [frame] if frame else []
    parts += [f"in {path}"] if path else []
    return " ".join([*parts, f"({node.target})" if parts else f"{node.target}"])


def source_line(node: torch.fx.Node) -> str:
    """Return "file.py:14", the last line outside of torch that led to a node; "" if torch recorded none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if f"torch{os.sep}" not in frame[0]] or frames
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def source_code(node: torch.fx.Node) -> str:
    """Return the text of the source line of a node; "" if torch recorded none."""
    lines = [x for x in (node.meta.get("stack_trace") or "").splitlines() if not _MARKS.fullmatch(x)]
    return lines[-1].strip() if lines and not _FRAME.search(lines[-1]) else ""


def module_path(node: torch.fx.Node) -> str:
    """Return the path of the module that called an operator, as "layers.0.attention"; "" for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path if isinstance(path, str) and not path.startswith("_empty") else ""
