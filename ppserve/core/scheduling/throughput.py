"""How fast requests are computed: waiting times are predicted by it."""

from __future__ import annotations

# A measurement counts half after so many seconds with steps in flight.
HALF_LIFE_S = 10.0
# Nothing is predicted until steps were in flight for so long.
MIN_EVIDENCE_S = 0.05
# When a request ends, what is known of earlier ends is multiplied by this.
MEMORY_OF_ENDS = 0.98


class Throughput:
    """Measures two things: how many tokens (those of prompts too) are computed per second with steps in flight,
    and what share of the tokens reserved for them requests use. Old measurements count less."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._reserved_tokens = 0.0
        self._used_tokens = 0.0

    def started(self, now: float) -> None:
        """Note that a step was scheduled while no step was in flight. now: in seconds."""
        self._since = now

    def committed(self, num_tokens: int, now: float, *, pipeline_empty: bool) -> None:
        """Note that a step of `num_tokens` tokens was committed. pipeline_empty: no step is in flight after it."""
        elapsed = max(0.0, now - self._since) if self._since is not None else 0.0
        fade = 0.5 ** (elapsed / HALF_LIFE_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def request_ended(self, reserved_tokens: int, used_tokens: int) -> None:
        """Note that an admitted request ended before its deadline, having used so many of its reserved tokens."""
        self._reserved_tokens = self._reserved_tokens * MEMORY_OF_ENDS + reserved_tokens
        self._used_tokens = self._used_tokens * MEMORY_OF_ENDS + used_tokens

    def seconds_for(self, reserved_tokens: int) -> float | None:
        """Predict the seconds that requests take which reserve so many tokens. None while too little is
        measured."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        used_share = 1.0
        if self._reserved_tokens:
            used_share = self._used_tokens / self._reserved_tokens
        return reserved_tokens * used_share * self._seconds / self._tokens
