"""Figures for people: percentiles that occurred, sizes in the right unit, tables whose columns are aligned."""

from __future__ import annotations

import numpy as np

from ppserve.core.figures import percentile, quantile, size_text, table


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = np.random.default_rng(0).lognormal(size=37).tolist()
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == np.percentile(values, percent, method="nearest")
    assert percentile([], 50) == 0
    assert (percentile([3.0, 1.0, 2.0], 50), percentile(range(101), 99)) == (2, 99)


def test_sizes() -> None:
    shown = [size_text(n) for n in (0, 512, 1536, 3 << 30, 5 << 40)]
    assert shown == ["0 B", "512 B", "1.5 KiB", "3 GiB", "5 TiB"]


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert table(("a", "b"), ("10", "word")) == [" a     b", "10  word"]
    assert table(("a", "b"), ("10", "word"), left=1) == ["a      b", "10  word"]


def test_quantiles_are_promql_s() -> None:
    bounds_s = 1.0, 2.0, 4.0
    assert [quantile(bounds_s, (1, 3, 4, 4), q) for q in (0.25, 0.5, 1.0)] == [1.0, 1.5, 4.0]
    assert (quantile(bounds_s, (1, 3, 4, 5), 0.99), quantile(bounds_s, (0, 0, 0, 0), 0.5)) == (4.0, None)
