"""Figures as people read them: percentiles, sizes, tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], percent: float) -> float:
    """The value whose rank is nearest; 0 without values."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)] if ordered else 0.0


def size(num_bytes: float) -> str:
    """1536 bytes are `1.5 KiB`."""
    unit = min(int(max(1.0, num_bytes)).bit_length() - 1, 40) // 10
    return f"{num_bytes / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def counted(number: int, what: str, plural: str = "s") -> str:
    """`1 stage`, `2 stages`. plural: what is added to `what`."""
    return f"{number} {what}{plural * (number != 1)}"


def numbers(dtype: str, quantization: str, kv_dtype: str) -> str:
    """How a model's numbers are kept: `float32, int8 weights`."""
    words = [dtype]
    words += [f"{quantization} weights"] * (quantization != "none")
    words += [f"{kv_dtype} keys and values"] * (kv_dtype != dtype)
    return ", ".join(words)


def table(*rows: Sequence[str], left: int = 0) -> list[str]:
    """One line per row, in columns as wide as their widest cell; the first `left` begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [cell.rjust(width) if place >= left else cell.ljust(width) for place, (cell, width) in enumerate(cells)]
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(cells) for cells in aligned]
