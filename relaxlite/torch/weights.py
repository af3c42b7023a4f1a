"""Inputs of a graph that are constants of its code: parameters and buffers of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

MAX_CHANGES = 2  # a tensor that changed so often becomes an argument: no call compiles for it again
_version = attrgetter("_version")


class Weights:
    """The tensors that the code holds, by the numbers of the inputs.

    A tensor counts as changed where another one is passed, where an operator wrote it, or where its memory is another.
    Writes through `tensor.data` are not seen: torch does not count them.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._changes: Counter[int] = Counter()
        self._set(tensors)

    def _set(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self._numbers, self._held = list(tensors), list(tensors.values())
        self._versions, self._addresses = _state(self._held)

    def are_current(self, args: Sequence[Any]) -> bool:
        """Whether the arguments of a call are the tensors that the code holds."""
        values = [args[k] for k in self._numbers]
        return all(map(is_, values, self._held)) and _state(values) == (self._versions, self._addresses)

    def update(self, args: Sequence[Any]) -> None:
        """Hold the arguments of a call instead, but not those that change often."""
        old = zip(self._numbers, self._held, self._versions, self._addresses, strict=True)
        for k, tensor, version, address in old:
            if args[k] is not tensor or _state([tensor]) != ([version], [address]):
                self._changes[k] += 1
        self._set({k: args[k] for k in self._numbers if self._changes[k] < MAX_CHANGES})


def _state(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Versions and addresses of tensors."""
    return list(map(_version, tensors)), list(map(torch.Tensor.data_ptr, tensors))


def can_hold(x: Any) -> bool:
    """Whether an input is a parameter or buffer of a module, whose writes torch counts."""
    is_static = isinstance(x, torch.nn.Parameter) or hasattr(x, "_dynamo_static_input_type")
    return isinstance(x, torch.Tensor) and is_static and not x.is_inference()
