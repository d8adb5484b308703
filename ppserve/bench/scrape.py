"""Fetches and parses the server's /metrics page, and subtracts readings."""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ppserve.errors import PpserveError

Labels = frozenset[tuple[str, str]]


class ScrapeFailed(PpserveError):
    """The page could not be fetched, or is no metrics page."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound; the last bound is infinite."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def num(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: Histogram) -> Histogram:
        """The observations made between two readings."""
        if earlier.bounds != self.bounds or earlier.num > self.num:
            return self
        counts = tuple(after - before for before, after in zip(earlier.counts, self.counts, strict=True))
        return Histogram(self.bounds, counts)

    def quantile(self, q: float) -> float | None:
        """As PromQL's histogram_quantile: linear within a bucket. None without observations."""
        if not self.num:
            return None
        rank = q * self.num
        low_bound, low_count = 0.0, 0.0
        for bound, so_far in zip(self.bounds, self.counts, strict=True):
            if so_far >= rank and so_far > low_count:
                if math.isinf(bound):
                    return low_bound
                return low_bound + (bound - low_bound) * (rank - low_count) / (so_far - low_count)
            low_bound, low_count = (bound, so_far) if not math.isinf(bound) else (low_bound, so_far)
        return low_bound


class MetricsReading:
    """All samples of a page at one moment."""

    def __init__(self, samples: Mapping[str, Mapping[Labels, float]]) -> None:
        self._samples = samples

    def value(self, name: str) -> float:
        """The sum of a metric's samples; 0 without any."""
        return sum(self._samples.get(name, {}).values())

    def num(self, name: str) -> int:
        """How many samples a metric has."""
        return len(self._samples.get(name, {}))

    def histogram(self, name: str) -> Histogram:
        """Over all labels but its own."""
        buckets: dict[float, float] = {}
        for labels, value in self._samples.get(name + "_bucket", {}).items():
            bound = float(dict(labels)["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        bounds = tuple(sorted(buckets))
        return Histogram(bounds, tuple(buckets[bound] for bound in bounds))


def parse_metrics(text: str) -> MetricsReading:
    """Raises ScrapeFailed with the first line that cannot be parsed."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        try:
            for sample in (sample for family in text_string_to_metric_families(line) for sample in family.samples):
                samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        except ValueError:
            raise ScrapeFailed(f"not a line of metrics: {line[:80]!r}") from None
    return MetricsReading(samples)


def fetch_metrics(address: str, timeout_s: float = 5.0) -> MetricsReading:
    """The page at HOST:PORT. Blocks. Raises ScrapeFailed."""
    url = f"http://{address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return parse_metrics(response.read().decode())
    except urllib.error.URLError as error:
        raise ScrapeFailed(f"{url}: {error.reason}") from None
    except http.client.HTTPException as error:
        raise ScrapeFailed(f"{url}: no HTTP answer ({type(error).__name__})") from None
    except (OSError, ValueError) as error:
        raise ScrapeFailed(f"{url}: {error}") from None
