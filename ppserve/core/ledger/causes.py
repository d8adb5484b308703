"""The rules by which every nanosecond between two computations of a stage gets its cause.

A stage waits for its next step b. The cause depends on where b was at each moment:

    the stage was still sending the step before b                            transfer
    b did not exist yet; the step whose return triggered it was ...
        being computed by the stages                                         as below, with the last stage
        computed, and its tokens were on the way to the head                 token_return
        back at the head, but no sequence was ready                          fill_drain
        back at the head, which was building or sending b                    host
    b had not been computed by the stage before                              as below
    b was computed there, and this stage waited for its hidden states        transfer
    this stage was preparing the inputs of b                                 host

"As below" means: while the stage before has not computed b, the wait is `fill_drain` if fewer steps were in flight
than there are stages when b was sent. In a full pipeline a delay keeps its cause from stage to stage: if the stage
before had waited for w ns, then w ns of this stage's wait have the same causes. Only the rest is `imbalance`. So
stages of equal speed show none.

The stages form a ring through the head: the stage before the first is the last, with the step that triggered b. A
delay can circulate in this ring after its cause is gone. When it re-enters stage 0, it is attributed again, in
proportion to recently measured delays (`RecentDelays`).

Within a step, the tensor ranks of a stage wait for each other: `gather` (see `tensor_ranks`). A wait within a step
for masks that follow their plan (`StepMasks`) is counted as `gather` too, also where a stage has one rank.
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
GATHER = "gather"
CAUSES = (FILL_DRAIN, IMBALANCE, TRANSFER, TOKEN_RETURN, HOST, GATHER)
IDLE = "idle"
KINDS = (*BUSY, *CAUSES, IDLE)


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a kind of time means, in words for people."""

    what: str  # what happens in it
    helps: str = ""  # what would reduce it; empty for time that is not lost


MEANINGS = {
    "prefill": Meaning("stages compute prompts"),
    "decode": Meaning("stages compute the tokens of answers"),
    "mixed": Meaning("stages compute prompts and answers in one step"),
    FILL_DRAIN: Meaning(
        "fewer sequences are ready than there are stages", "more concurrent requests would fill them"
    ),
    IMBALANCE: Meaning("one stage takes longer than the others", "another split (--layers) may help"),
    TRANSFER: Meaning(
        "stages wait for hidden states to arrive",
        "stages on one host (--transport shm) or fewer of them would help",
    ),
    TOKEN_RETURN: Meaning(
        "stages wait for tokens on their way back", "larger steps (more concurrent requests) would help"
    ),
    HOST: Meaning(
        "stages wait for the head or for their inputs",
        "a free core for the head, or fewer and larger steps (more concurrent requests) would help",
    ),
    GATHER: Meaning(
        "tensor ranks wait for each other",
        "a core of its own for each, or stages in place of tensor ranks, would help",
    ),
    IDLE: Meaning("the server has no work"),
}
"""The meaning of each kind of time."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval [start, end) of one stage's time, in nanoseconds. kind: one of KINDS."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A step at a stage: the wait before it, without gaps, and the computation. Times are in nanoseconds."""

    wait: tuple[Span, ...]
    begun: int
    ended: int


def cut(start: int, end: int, boundaries: Iterable[tuple[int, str]]) -> Iterator[Span]:
    """Cut [start, end) into spans. boundaries: pairs (until, kind of the time up to there); those before `start`
    are skipped."""
    for until, kind in boundaries:
        until = min(until, end)
        if until > start:
            yield Span(start, until, kind)
            start = until


@dataclass(frozen=True, slots=True)
class UpstreamWait:
    """A wait for a step until the previous stage has computed it. Its three parts follow each other in time."""

    shared: tuple[Span, ...]
    """The part in which the previous stage waited too."""
    inherited: tuple[Span, ...]
    """The part in which the previous stage computed, but at most as long as it had itself waited before. It has
    the causes of that wait."""
    excess: tuple[Span, ...]
    """The rest, in which the previous stage computed for longer than it had waited."""


def upstream_wait(start: int, end: int, before: StageVisit, full: bool) -> UpstreamWait:
    """Attribute [start, end), a wait for a step until the previous stage has computed it.

    before: the step at the previous stage. full: whether as many steps were in flight as there are stages.
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
    return UpstreamWait(tuple(shared), tuple(inherited), tuple(cut(computing, end, [(end, grown)])))


def clip(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Return the parts of `spans` within [start, end)."""
    inside = [s for s in spans if s.end > start and s.start < end]
    return [Span(max(s.start, start), min(s.end, end), s.kind) for s in inside]


class RecentDelays:
    """The delays that stages of a full pipeline did not inherit, by cause: moving sums over about `num_steps`
    steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._ns = {IMBALANCE: 0, TRANSFER: 0, TOKEN_RETURN: 0, HOST: 0}

    def fade(self) -> None:
        """Let the delays so far count a little less. It is called once for each step."""
        for cause, ns in self._ns.items():
            self._ns[cause] = ns - ns // self._num_steps

    def add(self, spans: Iterable[Span]) -> None:
        """Add delays that arose at a stage itself."""
        for span in spans:
            if span.kind in self._ns:
                self._ns[span.kind] += span.end - span.start

    def attribute(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Divide the interval of `spans` in proportion to the causes of recent delays. Return `spans` if there
        were no delays."""
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
