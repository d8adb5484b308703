"""How often a keeper replaces its stage before it gives up. Policy only: exit codes and the time are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.process.environment import EXIT_HEAD_GONE

# Deaths in a row without a computed step, however slowly they follow each other. Two requests that kill their
# stage (`core.scheduling` isolates such requests) together with cut links and a killed head stay below it.
MAX_DEATHS = 10
# A stage that ends because there is no head is not to blame. But no head for so long is the end.
HEADLESS_FOR_S = 900.0
# After a stage that died before it found the head, one more pause for each death in a row but the first: the cause
# may pass (no process or memory left, a device that is still held), and the next is forked within milliseconds.
_LONGER_S = 1.0


@dataclass
class Life:
    """What a stage process reported about itself."""

    is_connected: bool = False
    """It has found the head."""
    is_ready: bool = False
    """It has entered an epoch."""
    served: bool = False
    """It has computed a step."""


class Patience:
    """The deaths of one rank's stages. name: of the rank, for people. now_s: monotonic."""

    def __init__(self, name: str, now_s: float) -> None:
        self._name = name
        self._deaths, self._had_head_s = 0, now_s

    def ended(self, life: Life, code: int, now_s: float) -> str | None:
        """A stage process ended with this code. Returns why no other is started; None if one is."""
        if life.is_connected or code != EXIT_HEAD_GONE:
            # A stage that was ready and lost the head counts as one that served: it may only have had no work.
            would_serve = life.served or (life.is_ready and code == EXIT_HEAD_GONE)
            self._deaths = 1 if would_serve else self._deaths + 1
        if life.is_connected:
            self._had_head_s = now_s
        if self._deaths == MAX_DEATHS:
            return f"{self._name} died {MAX_DEATHS} times in a row (last code {code})"
        if now_s - self._had_head_s > HEADLESS_FOR_S:
            return f"{self._name} found no head for {HEADLESS_FOR_S:.0f} s"
        return None

    def pause_s(self, life: Life) -> float:
        """How long to wait after this life before another is started."""
        return 0.0 if life.is_connected else _LONGER_S * max(0, self._deaths - 1)
