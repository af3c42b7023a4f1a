"""Tuning database: schedule choices found by measurement, per target and program, stored as JSON.

    tuning = Tuning.load("model.tuning.json")
    rl.compile(module, tuning=tuning)          # or tuning="model.tuning.json", or the knob `tuning`

The key of a program is its structural hash before scheduling, independent of names, so equal programs of different
models share an entry. Programs without an entry are scheduled by the rules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from relaxlite import config
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
    """The tuning result of one program.

    `sizes`: sampled values of the program's symbols. `seconds`, `default_seconds`: time of one call at each size with
    `choice` and with the schedule of the rules.
    """

    program: str  # name in the model it was tuned in, for display
    choice: ScheduleChoice
    sizes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    default_seconds: tuple[float, ...]
    threads: int

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speedup over the schedule of the rules at each size."""
        return tuple(before / after for before, after in zip(self.default_seconds, self.seconds, strict=True))


@dataclass(slots=True)
class Tuning:
    """Tuning results by target and program key."""

    targets: dict[str, dict[str, TunedProgram]] = field(default_factory=dict)

    def choice(self, program: TensorProgram, target: Target) -> ScheduleChoice:
        """The choice for an unscheduled program; `DEFAULT` if the database has none."""
        programs = self.targets.get(str(target))
        entry = programs.get(program_key(program)) if programs else None
        return DEFAULT if entry is None else entry.choice

    def add(self, program: TensorProgram, target: Target, entry: TunedProgram) -> None:
        """Add the result of an unscheduled program, replacing a previous one."""
        self.targets.setdefault(str(target), {})[program_key(program)] = entry

    def remove(self, program: TensorProgram, target: Target) -> None:
        """Remove the result of an unscheduled program, if any."""
        self.targets.get(str(target), {}).pop(program_key(program), None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the database to a file atomically. Raises OSError."""
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            scratch.write_text(self.to_json(), "utf-8")
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)

    def to_json(self) -> str:
        """The database as JSON text."""
        targets = {
            target: {key: {**asdict(entry), "choice": entry.choice.as_dict()} for key, entry in sorted(entries.items())}
            for target, entries in sorted(self.targets.items())
        }
        return json.dumps({"relaxlite_tuning": FORMAT, "targets": targets}, indent=1) + "\n"

    @staticmethod
    def of(tuning: str | os.PathLike[str] | Tuning | None) -> Tuning | None:
        """Return a database as `compile` takes it; None: that of the knob `tuning`. Raises as `load`."""
        if tuning is None or isinstance(tuning, Tuning):
            return Tuning.of_knob() if tuning is None else tuning
        return Tuning.load(tuning)

    @staticmethod
    def of_json(text: str) -> Tuning:
        """Return the database of JSON text. Raises ValueError, KeyError or TypeError for other text."""
        return _from_json(json.loads(text))

    @staticmethod
    def of_knob() -> Tuning | None:
        """Load the file that the knob `tuning` names; None: it names none. Raises as `load`."""
        file = config.get("tuning")
        return Tuning.load(str(file)) if file else None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tuning:
        """Read a database from a file. Raises InvalidArgumentError for an unreadable file or another format version."""
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
    """The key of an unscheduled program: its structural hash, equal for programs that differ only in names."""
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
