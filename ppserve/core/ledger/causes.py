"""Why a stage waited: the rules that name every nanosecond between two computations of a stage.

A stage waits for its next step b. Where b was at each moment names the wait:

    the stage itself was still sending b-1                                   transfer
    b did not exist: the step whose tokens b carries on was ...
        on its way through the stages                                        as below, for the last stage
        done, its tokens on the way to the head                              token_return
        back, but nothing was ready to follow                                fill_drain
        back, and the head was building or sending b                         host
    b waited for, or was computed by, the stage before                       as below
    b was computed there, not here yet                                       transfer
    b was here, its inputs were being prepared                               host

While the stage before computes b, the wait is `fill_drain` when fewer steps were in flight than there are
stages. In a full pipeline a hole keeps its cause as it moves down with its step: as much of the wait as the
stage before had waited itself bears the same causes, and only what the hole grew by is `imbalance`. So equal
stages show no imbalance, whatever else delays them.

The stages form a ring: the stage before the first is the last, seen through the step whose return let the head
send b. A hole may go round for ever while something keeps it open, and what opened it once is no longer the
reason. So where it re-enters the first stage it is named anew, by what has lately delayed full pipelines at
first hand (`Recent`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BUSY = ("prefill", "decode", "mixed")
FILL_DRAIN = "fill_drain"
IMBALANCE = "imbalance"
TRANSFER = "transfer"
TOKEN_RETURN = "token_return"
HOST = "host"
CAUSES = (FILL_DRAIN, IMBALANCE, TRANSFER, TOKEN_RETURN, HOST)
IDLE = "idle"
KINDS = (*BUSY, *CAUSES, IDLE)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one stage's time, [start, end) in nanoseconds, of one kind (one of KINDS)."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class Passage:
    """A step at a stage: the wait before it, named without gaps, and its computation."""

    wait: tuple[Span, ...]
    begun: int
    ended: int


def cut(start: int, end: int, boundaries: Iterable[tuple[int, str]]) -> Iterator[Span]:
    """[start, end) in pieces: each boundary names the time up to it; those already passed are skipped."""
    for until, kind in boundaries:
        until = min(until, end)
        if until > start:
            yield Span(start, until, kind)
            start = until


@dataclass(frozen=True, slots=True)
class Behind:
    """A wait for the stage before, in order of time.

    shared: both stages waited. inherited: the stage before computes, and this stage meets the hole that the
    other one had. excess: it computes for longer than that explains.
    """

    shared: tuple[Span, ...]
    inherited: tuple[Span, ...]
    excess: tuple[Span, ...]


def behind(start: int, end: int, before: Passage, full: bool) -> Behind:
    """Names [start, end), a wait for a step until the stage before has computed it.

    before: that step at the stage before. full: whether as many steps were in flight as there are stages.
    """
    end = min(end, before.ended)
    grown = IMBALANCE if full else FILL_DRAIN
    shared: list[Span] = []
    if start < before.begun:
        until = min(end, before.begun)
        shared += cut(start, until, [(before.wait[0].start if before.wait else until, grown)])
        shared += clip(before.wait, start, until)
    computing = max(start, before.begun)
    inherited: list[Span] = []
    if full:
        for span in reversed(clip(before.wait, 0, start)):
            inherited += cut(computing, end, [(computing + span.end - span.start, span.kind)])
            computing = inherited[-1].end if inherited else computing
    return Behind(tuple(shared), tuple(inherited), tuple(cut(computing, end, [(end, grown)])))


def clip(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """The parts of `spans` within [start, end)."""
    return [
        Span(max(s.start, start), min(s.end, end), s.kind) for s in spans if s.end > start and s.start < end
    ]


class Recent:
    """What has lately delayed steps at first hand in a full pipeline, fading over `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._ns = {IMBALANCE: 0, TRANSFER: 0, TOKEN_RETURN: 0, HOST: 0}

    def fade(self) -> None:
        for cause, ns in self._ns.items():
            self._ns[cause] = ns - ns // self._num_steps

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.kind in self._ns:
                self._ns[span.kind] += span.end - span.start

    def rename(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The same stretch of time, divided in proportion to the recent causes; as it was if there are none."""
        total = sum(self._ns.values())
        if not (spans and total):
            return spans
        start, end = spans[0].start, spans[-1].end
        seen = 0
        boundaries = []
        for cause, ns in self._ns.items():
            seen += ns
            boundaries.append((start + (end - start) * seen // total, cause))
        return tuple(cut(start, end, boundaries))
