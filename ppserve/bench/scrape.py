"""Fetches and parses the server's /metrics page, and subtracts readings."""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from ppserve.errors import PpserveError

Labels = frozenset[tuple[str, str]]


class ScrapeFailed(PpserveError):
    """The page could not be fetched, or is no metrics page."""


Buckets = Mapping[float, float]
"""A histogram: cumulative counts by upper bound, ascending; the last bound is infinite."""


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

    def buckets(self, name: str) -> Buckets:
        """Of a histogram, over all labels but its own."""
        buckets: dict[float, float] = {}
        for labels, value in self._samples.get(name + "_bucket", {}).items():
            bound = float(dict(labels)["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return dict(sorted(buckets.items()))


def difference(earlier: Buckets, later: Buckets) -> Buckets:
    """The observations made between two readings; all of the later one if the server restarted in between."""
    added = {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}
    return added if min(added.values(), default=0.0) >= 0 else later


def quantile(buckets: Buckets, q: float) -> float | None:
    """As PromQL's histogram_quantile: linear within a bucket. None without observations."""
    rank = q * buckets.get(math.inf, 0.0)
    low_bound = low_count = 0.0
    for bound, count in buckets.items():
        if count >= rank and count > low_count:
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return None


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
