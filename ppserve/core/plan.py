"""Plans, which the head sends to every stage, and results, which every stage sends back. All are frozen.

step: one pass of one microbatch through all stages. slice: one sequence's consecutive tokens in a step. A plan
holds everything that a stage must know: a stage has no state about sequences except their keys and values. So each
draw is complete. What may be long in it (biases, the tokens before it) is packed: as bytes it costs a stage hardly
anything to read, where 64 tuples of 1,000 tokens would cost it 1.7 ms a step (docs/performance.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ppserve.core.request import SamplingParams

DRAWN = -1
"""Stands in a plan that is sent ahead for each token that the step before draws for the sequence."""


LATER = b""
"""Stands in a plan that is sent ahead for a mask that depends on such a token: it comes in `StepMasks`."""


def packed_ids(token_ids: Seq[int]) -> bytes:
    """Pack token ids as little-endian int32. Two packed lists, joined, are the packed joined list."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def packed_biases(biases: Iterable[tuple[int, float]]) -> bytes:
    """Pack (token id, bias) pairs as little-endian int32 and float32, in order."""
    return b"".join(struct.pack("<if", token_id, bias) for token_id, bias in biases)


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token that follows a row of a slice."""

    params: SamplingParams
    """The request's parameters without their logit_bias, which is in `biases`."""
    index: int = 0
    """Which of the request's sequences; part of the random key."""
    num_logprobs: int | None = None
    """None = no log-probabilities, 0 = the drawn token's, k = also those of the k most likely tokens."""
    banned: tuple[int, ...] = ()
    """Ids that may not be drawn for positions below `banned_before`."""
    banned_before: int = 1 << 31
    """The default is beyond all positions."""
    biases: bytes = b""
    """What is added to logits, as `packed_biases`."""
    prompt_ids: bytes = b""
    """`prompt_ids + output_ids` are the tokens before the draw as `packed_ids`; empty unless
    `params.needs_history`."""
    output_ids: bytes = b""
    mask: bytes | None = None
    """The ids that may be drawn, a bit each, as `scheduling.token_filter` packs them; None = all."""

    def __post_init__(self) -> None:
        assert not self.params.logit_bias, "biases travel packed"

    def after(self, token_ids: Seq[int]) -> Draw:
        """Return this draw for a later row, with these tokens before it too."""
        if not self.params.needs_history or not token_ids:
            return self
        return replace(self, output_ids=self.output_ids + packed_ids(token_ids))


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's consecutive tokens in a step."""

    sequence_id: int
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    """The KV blocks of positions 0 to end - 1, in order; entry i holds the positions from i * block_size on."""
    draw: Draw | None = None
    """How the next token is drawn; None in a chunk that is not the prompt's last."""
    targets: tuple[int, ...] = ()
    """When the prompt is scored: the token after each position (at the prompt's end one fewer than token_ids)."""
    num_prompt_logprobs: int = 0
    """How many others are scored per target."""
    num_draft_tokens: int = 0
    """How many of the last token_ids are draft tokens, which follow a known one; then there is a draw."""
    draft_masks: tuple[bytes | None, ...] = ()
    """The draw's masks after each draft token in place of its own; empty where nothing is filtered."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_draws(self) -> int:
        """How many of the last rows are drawn from: those of the draft tokens, and the last before them."""
        return 0 if self.draw is None else self.num_draft_tokens + 1

    @property
    def draws(self) -> Iterator[tuple[int, Draw]]:
        """Each draw with the position of its token, as if the draft tokens before that had been drawn."""
        if self.draw is None:
            return
        first = len(self.token_ids) - self.num_draws
        for row in range(first, len(self.token_ids)):
            draw = self.draw.after(self.token_ids[first + 1 : row + 1])
            if row > first and self.draft_masks:
                draw = replace(draw, mask=self.draft_masks[row - first - 1])
            yield self.start + row + 1, draw


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, as every stage is to compute it."""

    epoch: int
    step_id: int
    slot: int
    slices: tuple[Slice, ...]
    is_ahead: bool = False
    """Whether it was sent before the step before it had drawn its tokens: each slice has one token, DRAWN."""

    @property
    def awaits_masks(self) -> bool:
        """Whether masks of its draws come later."""
        return self.is_ahead and any(s.draw is not None and s.draw.mask == LATER for s in self.slices)

    @property
    def num_tokens(self) -> int:
        """Rows of hidden states that each stage sends to the next in this step."""
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`. For metrics and the ledger; all three are computed alike."""
        decodes = sum(s.num_draws == len(s.token_ids) for s in self.slices)
        return "decode" if decodes == len(self.slices) else "mixed" if decodes else "prefill"

    def with_drawn(self, drawn: Iterable[Drawn]) -> StepPlan:
        """Complete a plan that was sent ahead by the tokens that the step before drew, which its draws follow.
        Where that drew none, the result is not used."""
        tokens = {one.sequence_id: one.token_id or 0 for one in drawn}
        slices = []
        for s in self.slices:
            assert s.draw is not None, "what is sent ahead draws"
            token_ids = (tokens.get(s.sequence_id, 0),)
            slices.append(replace(s, token_ids=token_ids, draw=s.draw.after(token_ids)))
        return replace(self, slices=tuple(slices))

    def with_masks(self, masks: Iterable[bytes | None]) -> StepPlan:
        """The plan with `StepMasks.masks`."""
        later, slices = iter(masks), []
        for s in self.slices:
            if s.draw is not None and s.draw.mask == LATER:
                s = replace(s, draw=replace(s.draw, mask=next(later)))
            slices.append(s)
        return replace(self, slices=tuple(slices))


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks that a plan was sent without."""

    epoch: int
    step_id: int
    masks: tuple[bytes | None, ...]
    """One for each slice with LATER, in their order. None: any id may be drawn; of an answer that has ended, too,
    whose draw is not used."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position."""

    logprob: float
    """Log-probability of the token that is there."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn for a sequence; those of one slice in order."""

    sequence_id: int
    token_id: int | None
    """None: the logits were not finite."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a slice's `targets`, in order."""

    sequence_id: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepStamps:
    """The times of a step on one stage: nanoseconds on the stage's monotonic clock."""

    planned: int
    """The plan was read."""
    awaited: int
    """The stage began to wait for hidden states."""
    received: int
    """The hidden states were there; on stage 0 at once."""
    begun: int
    """The computation began."""
    ended: int
    """The computation ended."""
    sent: int
    """The transport has taken the hidden states; the last stage has none to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepOutcome:
    """What a result of one step holds, a rank's or a stage's."""

    epoch: int
    step_id: int
    stamps: StepStamps
    bytes_sent: int = 0
    drawn: tuple[Drawn, ...] = ()
    scored: tuple[Scored, ...] = ()
    gathered_ns: int = 0
    """How long of the time from begun to ended the rank waited for the other tensor ranks of its stage; a stage
    has the average of its ranks."""

    @property
    def computed_ns(self) -> int:
        return self.stamps.ended - self.stamps.begun - self.gathered_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult(_StepOutcome):
    """One rank's result of one step. Every rank sends one for every step; only the last stage draws and scores."""

    place: int
    """The rank's place in its replica, stage * T + tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(_StepOutcome):
    """One stage's result of one step, which `TensorRanks` makes of those of the stage's ranks."""

    stage: int
