"""Types of flags that click lacks: sizes, layer splits, `auto` or a number, text."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ppserve.core.architecture import Split
from ppserve.core.scheduling.speculation import MAX_DRAFT_TOKENS

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_BYTES = 1 << 60  # more than any machine has


class Parsed(click.ParamType[Any]):
    """A value that `parse` makes from the flag's text. A ValueError that it raises is the user's mistake."""

    envvar_list_splitter = ","

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str | int):  # it was parsed before, or is the default
            return value
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class HelpfulCommand(click.Command):
    """A command that says what to do about words which it does not take."""

    def __init__(self, *args: Any, too_many: Callable[[list[str]], str], **kwargs: Any) -> None:
        """too_many: says what was probably meant, of the words that are too many."""
        super().__init__(*args, **kwargs)
        self.allow_extra_args = True
        self._too_many = too_many

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            ctx.fail(f"unexpected: {' '.join(ctx.args)}; {self._too_many(ctx.args)}")
        return rest


def _bounds(of: click.IntRange | click.FloatRange) -> str:
    """Return the bounds of a range in words."""
    least = "above" if of.min_open else "from"
    most = f" to {_figure(of.max)}" if of.max is not None else ""
    return f"{least} {_figure(of.min or 0)}{most}"


def _figure(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


class Whole(click.IntRange):
    """A whole number in a range, which is named where it is left."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)!r} is not a whole number {_bounds(self)}", param, ctx)


class Number(click.FloatRange):
    """A number in a range, which is named where it is left. click's own type accepts `nan`, which is within all
    bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if number != number:
            self.fail(f"{str(value)!r} is not a number {_bounds(self)}", param, ctx)
        return number


def auto_or(inner: click.ParamType[Any]) -> Parsed:
    """Return a type for `auto`, which becomes None, or a value of the `inner` type."""
    return Parsed(f"auto|{inner.name}", lambda text: None if text == "auto" else inner(text))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1 <= size <= _MOST_BYTES:
        raise ValueError(f"{text!r} is not a size such as 512M or 2GiB")
    return int(size)


def address(text: str) -> str:
    """Return the text. Raises ValueError if it is not HOST:PORT."""
    port = re.fullmatch(r"[^/]+:(\d{1,5})", _text(text))
    if port is None or not 0 < int(port[1]) < 1 << 16:  # gRPC would use the lowest 16 bits
        raise ValueError(f"{text!r} is not HOST:PORT, such as localhost:50051")
    return text


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the value is not UTF-8 text") from None
    return text


def _name(text: str) -> str:
    if not text.strip() or not _text(text).isprintable():
        raise ValueError(f"{text!r} is not a name")
    return text.strip()


def _origin(text: str) -> str:
    if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+", origin := text.strip().lower()):
        # Browsers send an origin in exactly this form, and it is compared letter by letter.
        only = "scheme, host and port of a page, with no slash or path behind them"
        raise ValueError(f"{text!r} is neither an origin ({only}: https://example.com:8443) nor *")
    return origin


def _count(text: str) -> int:
    if not re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*", text):
        raise ValueError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def _draft_tokens(text: str) -> int:
    if text != "off" and not (re.fullmatch(r"\d{1,3}", text) and int(text) <= MAX_DRAFT_TOKENS):
        raise ValueError(f"{text!r} is neither auto nor off nor a number of draft tokens up to {MAX_DRAFT_TOKENS}")
    return 0 if text == "off" else int(text)


def _switch(text: str) -> bool:
    if not text.strip():
        raise ValueError(f"{text!r} is neither on nor off")
    return bool(click.BOOL(text))


def _ports(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
    ports = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ValueError(f"{text!r} is not a range of ports such as 29600-29699")
    return ports


IP = Parsed("address", lambda text: text if text == "localhost" else str(ipaddress.ip_address(text)))
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
POSITIVE = Number(min=0, min_open=True)
SIZE = Parsed("size", _size)
"""A number of bytes, with or without a unit: 1073741824, 1G, 512MiB."""
TEXT = Parsed("text", _text)
"""UTF-8 text. In Python other bytes of an argument are lone surrogates, which no message can hold."""
NAMES = Parsed("name,...", lambda text: tuple(map(_name, text.split(","))))
ORIGINS = Parsed("origin,...", lambda text: tuple(map(_origin, text.split(","))))
COUNT = Parsed("n", _count)
SWITCH = Parsed("on|off", _switch)
DRAFT_TOKENS = Parsed("off|n", _draft_tokens)
PORTS = Parsed("A-B", _ports)
LAYERS = Parsed("n,n,...", Split.parse)
