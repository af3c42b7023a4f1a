"""Schedules that measurements have chosen: a small database from programs to choices, kept as JSON.

    tuning = Tuning.load("model.tuning.json")
    rl.compile(module, tuning=tuning)          # or tuning="model.tuning.json", or the knob `tuning`

A program is known by the hash of its structure before scheduling, without names, and by the target: the same matmul of
another model finds its choice too. What is not in the database is scheduled as the rules say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.program import TensorProgram
from relaxlite.passes.products.choice import DEFAULT, ScheduleChoice
from relaxlite.passes.products.strategy_table import BY_NAME
from relaxlite.records import dataclass
from relaxlite.target import Target

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TunedProgram:
    """`sizes`: the sampled values of the program's symbols. Seconds are those of one call at each size, with the choice
    and with what the rules say."""

    program: str  # its name in the model, for people
    choice: ScheduleChoice
    sizes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    default_seconds: tuple[float, ...]
    threads: int

    @property
    def speeds(self) -> tuple[float, ...]:
        """How many times as fast as the rules' schedule, at each size."""
        return tuple(before / after for before, after in zip(self.default_seconds, self.seconds, strict=True))


@dataclass(slots=True)
class Tuning:
    """Choices by target and program key."""

    targets: dict[str, dict[str, TunedProgram]] = field(default_factory=dict)

    def choice(self, program: TensorProgram, target: Target) -> ScheduleChoice:
        """What is known about a program that is not scheduled yet."""
        known = self.targets.get(str(target))
        entry = known.get(program_key(program)) if known else None
        return DEFAULT if entry is None else entry.choice

    def add(self, program: TensorProgram, target: Target, entry: TunedProgram) -> None:
        """In place of what was known before."""
        self.targets.setdefault(str(target), {})[program_key(program)] = entry

    def remove(self, program: TensorProgram, target: Target) -> None:
        self.targets.get(str(target), {}).pop(program_key(program), None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all. Raises OSError."""
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(self.to_json(), "utf-8")
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)

    def to_json(self) -> str:
        targets = {
            target: {key: {**asdict(entry), "choice": entry.choice.as_dict()} for key, entry in sorted(entries.items())}
            for target, entries in sorted(self.targets.items())
        }
        return json.dumps({"relaxlite_tuning": FORMAT, "targets": targets}, indent=1) + "\n"

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tuning:
        """Raises InvalidArgumentError when the file cannot be read or is no database of this version."""
        try:
            data = json.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise InvalidArgumentError(f"cannot read the tuning file {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise InvalidArgumentError(f"the tuning file {str(path)!r} is no JSON: {error}") from error
        try:
            return _from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            hint = "make a new one with `relaxlite tune`"
            raise InvalidArgumentError(f"the tuning file {str(path)!r} cannot be used ({error}); {hint}") from error


def program_key(program: TensorProgram) -> str:
    """The same for programs that differ in names only."""
    return structural_hash(program)


def _from_json(data: Mapping[str, Any]) -> Tuning:
    if not isinstance(data, dict) or data.get("relaxlite_tuning") != FORMAT:
        raise ValueError(f"it does not begin with relaxlite_tuning {FORMAT}")
    return Tuning({t: {k: _entry(e) for k, e in entries.items()} for t, entries in data["targets"].items()})


def _entry(data: Mapping[str, Any]) -> TunedProgram:
    sizes = tuple(tuple(int(s) for s in size) for size in data["sizes"])
    choice = ScheduleChoice.from_dict(data["choice"])
    if choice.strategy is not None and choice.strategy not in BY_NAME:
        raise ValueError(f"there is no strategy {choice.strategy!r}; there are {', '.join(BY_NAME)}")
    return TunedProgram(
        program=str(data["program"]),
        choice=choice,
        sizes=sizes,
        seconds=tuple(float(s) for s in data["seconds"]),
        default_seconds=tuple(float(s) for s in data["default_seconds"]),
        threads=int(data["threads"]),
    )
