"""Types of flags that click lacks: sizes, layer splits, `auto` or a number, text, numbers of some bits."""

from __future__ import annotations

import re
from typing import Any

import click

from ppserve.core.architecture import Split

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class ByteSize(click.ParamType[Any]):
    """Bytes as a number or with a unit: 1073741824, 1G, 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size such as 512M or 2GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class Text(click.ParamType[Any]):
    """Text. Bytes that are not UTF-8 reach Python as lone surrogates, which no message can hold."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail("not UTF-8 text", param, ctx)
        return str(value)


class Whole(click.ParamType[Any]):
    """A whole number of at most `bits` bits."""

    name = "integer"

    def __init__(self, bits: int, signed: bool = False) -> None:
        self._low = -(1 << (bits - 1)) if signed else 0
        self._high = self._low + (1 << bits) - 1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if not self._low <= number <= self._high:
            self.fail(f"{number} is outside {self._low} to {self._high}", param, ctx)
        return number


class AutoOr(click.ParamType[Any]):
    """`auto` (None), or a value of another type."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = f"auto|{inner.name}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value is None or value == "auto" else self.inner.convert(value, param, ctx)


class Counts(click.ParamType[Any]):
    """Several numbers from 1, such as 1,2,4."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", str(value)):
            self.fail(f"{value!r} is not a list such as 1,2,4,8", param, ctx)
        return tuple(map(int, str(value).split(",")))


class LayerSplit(click.ParamType[Any]):
    """Layers per stage, such as 9,3 or 7.5,4.5."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Split:
        try:
            return value if isinstance(value, Split) else Split.parse(value)
        except ValueError:
            self.fail(f"{value!r} is not a list of layers per stage such as 9,3 or 7.5,4.5", param, ctx)
