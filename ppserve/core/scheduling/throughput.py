"""How fast requests are computed, as predictions of waiting times need it."""

from __future__ import annotations

# Seconds with steps in flight after which a measurement counts half.
HALF_LIFE_S = 10.0
# With less time measured nothing is predicted.
MIN_EVIDENCE_S = 0.05
# What is known of ended requests counts so much less with each further one.
MEMORY_OF_ENDS = 0.98


class Throughput:
    """Tokens, of prompts too, computed per second with steps in flight, and the share of reserved tokens that
    requests use. Old measurements fade."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._reserved_tokens = 0.0
        self._used_tokens = 0.0

    def started(self, now: float) -> None:
        """A step was scheduled while the pipeline was empty."""
        self._since = now

    def committed(self, num_tokens: int, now: float, *, pipeline_empty: bool) -> None:
        elapsed = max(0.0, now - self._since) if self._since is not None else 0.0
        fade = 0.5 ** (elapsed / HALF_LIFE_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def request_ended(self, reserved_tokens: int, used_tokens: int) -> None:
        """An admitted request ended in time. used_tokens: of the reserved ones."""
        self._reserved_tokens = self._reserved_tokens * MEMORY_OF_ENDS + reserved_tokens
        self._used_tokens = self._used_tokens * MEMORY_OF_ENDS + used_tokens

    def seconds_for(self, reserved_tokens: int) -> float | None:
        """Predicted time for requests that reserve so many tokens; None while too little is measured."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        used_share = 1.0
        if self._reserved_tokens:
            used_share = self._used_tokens / self._reserved_tokens
        return reserved_tokens * used_share * self._seconds / self._tokens
