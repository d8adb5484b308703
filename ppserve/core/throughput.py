"""How fast the pipeline works through tokens, measured where it costs nothing: at commits."""

from __future__ import annotations

HALF_LIFE_S = 10.0
MIN_EVIDENCE_S = 0.05


class Throughput:
    """Tokens computed (prompt and decode alike) per second of having work; idle time does not count."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def started(self, now: float) -> None:
        """A step left while the pipeline was empty."""
        self._since = now

    def committed(self, num_tokens: int, now: float, *, pipeline_empty: bool) -> None:
        """A step came back."""
        elapsed = max(0.0, now - self._since) if self._since is not None else 0.0
        fade = 0.5 ** (elapsed / HALF_LIFE_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def seconds_for(self, num_tokens: int) -> float | None:
        """Predicted time for `num_tokens`; None while too little was seen to say."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        return num_tokens * self._seconds / self._tokens
