"""Figures as people read them: percentiles, sizes, tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value at the nearest rank of the sorted values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)] if ordered else 0.0


def quantile(bounds_s: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Estimate a quantile as PromQL's histogram_quantile does, linearly in a bucket; None without observations.
    counts: the number of values up to each bound, and last the number of all values."""
    rank = q * counts[-1]
    low_bound = low_count = 0.0
    for bound, count in zip(bounds_s, counts, strict=False):
        if count >= rank and count > low_count:
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return low_bound if counts[-1] > low_count else None


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with its unit: `1.5 KiB` for 1536."""
    unit = min(int(max(1.0, num_bytes)).bit_length() - 1, 40) // 10
    return f"{num_bytes / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def counted(number: int, what: str, plural: str = "s") -> str:
    """Return a number with its noun: `1 stage`, `2 stages`. plural: the ending that the noun has unless the number
    is 1."""
    return f"{number} {what if number == 1 else what + plural}"


def precisions_in_words(dtype: str, quantization: str, kv_dtype: str) -> str:
    """Return a model's precisions in words: `float32, int8 weights`."""
    words = [dtype]
    if quantization != "none":
        words.append(f"{quantization} weights")
    if kv_dtype != dtype:
        words.append(f"{kv_dtype} keys and values")
    return ", ".join(words)


def table(*rows: Sequence[str], left: int = 0) -> list[str]:
    """Return one line per row, with columns as wide as their widest cell. The first `left` columns are aligned
    left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [cell.rjust(width) if place >= left else cell.ljust(width) for place, (cell, width) in enumerate(cells)]
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    return ["  ".join(cells) for cells in aligned]
