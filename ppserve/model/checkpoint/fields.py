"""Typed, bounded reading of a model's settings, wherever they come from: JSON, a pickle or a binary header.

The bounds leave room above every GPT-2 in existence and keep sizes computed from them far below anything
that could exhaust the memory before the tensors themselves have been compared with the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppserve.core.architecture import MAX_LAYERS, Architecture
from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.files import shown

LIMITS = {
    "layers": MAX_LAYERS,
    "width": 1 << 17,
    "positions": 1 << 20,
    "vocabulary": 1 << 23,
    "inner width": 1 << 20,
}

ABSENT: Any = object()


class Fields:
    """The settings of one file. A value of None counts as absent, as it does for the code that wrote it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def given(self, *names: str) -> tuple[str, Any] | None:
        """The first of `names` that is set, with its value. Two that disagree are refused."""
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1] or type(value) is not type(found[0][1]):
                raise self.error(name, f"is {shown(value)}, but {found[0][0]} is {shown(found[0][1])}")
        return found[0] if found else None

    def integer(self, *names: str, limit: int, default: int = ABSENT, least: int = 1) -> int:
        """An integer in least..limit under any of `names`. Without a default it must be there."""
        name, value = self._value(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {shown(value)}, not an integer")
        if not least <= value <= limit:
            raise self.error(name, f"is {shown(value)}, outside {least}..{limit}")
        return value

    def boolean(self, name: str, default: bool = ABSENT) -> bool:
        name, value = self._value((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {shown(value)}, neither true nor false")
        return value

    def positive(self, name: str, default: float) -> float:
        """A finite number above zero, at most one."""
        name, value = self._value((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {shown(value)}, not a number")
        if not (0 < value <= 1 and math.isfinite(value)):
            raise self.error(name, f"is {shown(value)}, not a number above 0 and up to 1")
        return float(value)

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(self.path, problem, field=shown(name))

    def _value(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        given = self.given(*names)
        if given is not None:
            return given
        if default is ABSENT:
            raise self.error(names[0], "is missing")
        return names[0], default


def check_heads(arch: Architecture, fields: Fields, name: str) -> None:
    """The heads must divide the width. `name`: what the file calls the number of heads."""
    if arch.width % arch.num_heads:
        raise fields.error(name, f"{arch.num_heads} heads do not divide the width {arch.width}")


def ending_id(value: int, vocab_size: int) -> int | None:
    """A special token's id, or None where the vocabulary is too small to contain it."""
    return value if 0 <= value < vocab_size else None
