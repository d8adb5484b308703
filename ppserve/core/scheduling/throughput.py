"""Measures how fast the pipeline computes tokens, to predict how long a queue takes."""

from __future__ import annotations

HALF_LIFE_S = 10.0
MIN_EVIDENCE_S = 0.05
MEMORY_OF_ENDS = 0.98
# Of the tokens computed until a request ends, the largest share that those admitted after it are taken to have.
# While the load does not change, as many come after it as were there before. More would refuse bursts.
MAX_LATER_SHARE = 0.5


class Throughput:
    """Tokens computed (prompt and decode alike), and requests admitted, per second with steps in flight; idle time
    does not count.

    Requests reserve tokens for their max_tokens and mostly end sooner, so the share that they use is measured too.
    Old measurements lose weight, so that predictions follow the load.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._admitted = 0.0
        self._prompt_tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self._reserved_tokens = 0.0
        self._used_tokens = 0.0

    def started(self, now: float) -> None:
        """A step was scheduled while the pipeline was empty."""
        self._since = now

    def committed(self, num_tokens: int, now: float, *, pipeline_empty: bool) -> None:
        """A step has returned."""
        elapsed = max(0.0, now - self._since) if self._since is not None else 0.0
        fade = 0.5 ** (elapsed / HALF_LIFE_S)
        self._tokens = self._tokens * fade + num_tokens
        self._admitted *= fade
        self._prompt_tokens *= fade
        self._seconds = self._seconds * fade + elapsed
        self._since = None if pipeline_empty else now

    def request_admitted(self, prompt_tokens: int) -> None:
        """prompt_tokens: to be computed before its first new one."""
        self._admitted += 1.0
        self._prompt_tokens += prompt_tokens

    def request_ended(self, reserved_tokens: int, used_tokens: int) -> None:
        """An admitted request ended, not because it was late. used_tokens: of the reserved ones."""
        self._reserved_tokens = self._reserved_tokens * MEMORY_OF_ENDS + reserved_tokens
        self._used_tokens = self._used_tokens * MEMORY_OF_ENDS + used_tokens

    def seconds_for(self, reserved_tokens: int) -> float | None:
        """Predicted time for requests that reserve so many tokens; None while too little has been measured."""
        if self._seconds < MIN_EVIDENCE_S or self._tokens <= 0:
            return None
        return reserved_tokens * self._used_share * self._seconds / self._tokens

    def seconds_to_end(self, reserved_tokens: int, new_tokens: int) -> float | None:
        """Predicted time until a request that is admitted now has computed its `new_tokens`, one in a step.

        reserved_tokens: of it, and of what computes beside it already. Those who are admitted after it compute
        beside it too: their prompts, and new tokens in half of its steps on average.
        """
        seconds = self.seconds_for(reserved_tokens)
        if seconds is None:
            return None
        later = self._prompt_tokens + self._admitted * new_tokens * self._used_share / 2
        return seconds / (1.0 - min(MAX_LATER_SHARE, later / self._tokens))

    @property
    def _used_share(self) -> float:
        return self._used_tokens / self._reserved_tokens if self._reserved_tokens else 1.0
