"""Plans, which the head sends to every stage, and results, which every stage sends back. All are frozen.

They are msgspec's structs, as are requests, events and outputs: some of each are made for every token, and frozen
dataclasses take ten times as long to make and four times to send (docs/performance.md).

A step is one pass of one microbatch through all stages. A slice is one sequence's consecutive tokens in a step. A
plan has everything that a stage must know, because a stage keeps nothing about sequences but their keys and
values. So each draw is complete. Its long parts (biases, the tokens before it) are packed as bytes: reading 64
tuples of 1,000 tokens would take a stage 1.7 ms a step (docs/performance.md).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from msgspec import Struct
from msgspec.structs import replace

from ppserve.core.request import SamplingParams


def packed_ids(token_ids: Seq[int]) -> bytes:
    """Pack token ids as little-endian int32. Two packed lists, joined, are the packed joined list."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def packed_biases(biases: Iterable[tuple[int, float]]) -> bytes:
    """Pack (token id, bias) pairs as little-endian int32 and float32, in order."""
    return b"".join(struct.pack("<if", token_id, bias) for token_id, bias in biases)


class Draw(Struct, frozen=True, omit_defaults=True):
    """How to draw the token that follows a row of a slice."""

    params: SamplingParams
    """The request's parameters without their logit_bias, which is in `biases`."""
    index: int = 0
    """The number of the sequence among those of its request. It is a part of the random key."""
    num_logprobs: int | None = None
    """None = no log-probabilities, 0 = the drawn token's, k = also those of the k most likely tokens."""
    banned: tuple[int, ...] = ()
    """Ids that may not be drawn for positions below `banned_before`."""
    banned_before: int = 1 << 31
    """The default is greater than all positions."""
    biases: bytes = b""
    """The biases that are added to logits, packed by `packed_biases`."""
    prompt_ids: bytes = b""
    """The prompt, packed by `packed_ids`; empty unless `params.needs_history`."""
    output_ids: bytes = b""
    """The tokens between the prompt and the draw, packed in the same way, and empty in the same case."""
    mask: bytes | None = None
    """The ids that may be drawn, one bit for each (see `scheduling.token_filter`); None: all may."""

    def __post_init__(self) -> None:
        assert not self.params.logit_bias, "biases travel packed"

    def after(self, token_ids: Seq[int]) -> Draw:
        """Return the draw for a later row, before which these tokens stand too."""
        if not self.params.needs_history or not token_ids:
            return self
        return replace(self, output_ids=self.output_ids + packed_ids(token_ids))


class Slice(Struct, frozen=True, omit_defaults=True):
    """One sequence's consecutive tokens in a step."""

    sequence_id: int | None
    """None: the slice belongs to a probe, a step without a request."""
    start: int
    """The position of the first token."""
    token_ids: tuple[int, ...]
    """Empty in a plan that is sent ahead, for the one token that the step before draws for the sequence."""
    block_table: tuple[int, ...]
    """The KV blocks of positions 0 to end - 1, in order; entry i holds the positions from i * block_size on."""
    draw: Draw | None = None
    """How the next token is drawn; None in a chunk that is not the prompt's last one."""
    targets: tuple[int, ...] = ()
    """If the prompt is scored: the token after each of the slice's positions. At the prompt's end there is
    none."""
    num_prompt_logprobs: int = 0
    """How many of the most likely tokens are scored with each target."""
    num_draft_tokens: int = 0
    """How many of the last token_ids are draft tokens. They follow a known token, and the slice draws."""
    draft_masks: tuple[bytes | None, ...] = ()
    """The masks of the draws after each draft token; empty if no token filter decides about the sequence."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or 1

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_draws(self) -> int:
        """How many of the last rows tokens are drawn from: the rows of draft tokens, and the one before them."""
        return 0 if self.draw is None else self.num_draft_tokens + 1

    @property
    def draws(self) -> Iterator[tuple[int, Draw]]:
        """The draws, each with the position of its token, as if the draft tokens before it had been drawn."""
        if self.draw is None:
            return
        first = self.num_tokens - self.num_draws
        for row in range(first, self.num_tokens):
            draw = self.draw.after(self.token_ids[first + 1 : row + 1])
            if row > first and self.draft_masks:
                draw = replace(draw, mask=self.draft_masks[row - first - 1])
            yield self.start + row + 1, draw


class StepPlan(Struct, frozen=True, omit_defaults=True):
    """A step that every stage is to compute."""

    epoch: int
    step_id: int
    slot: int
    slices: tuple[Slice, ...]
    is_ahead: bool = False
    """Whether it was sent before the previous step had drawn its tokens. `with_drawn` completes it."""
    awaits_masks: bool = False
    """Whether the masks of its draws, which depend on those tokens, follow in `StepMasks`. `with_masks` completes
    it."""

    @property
    def num_tokens(self) -> int:
        """The number of rows of hidden states that each stage sends to the next in this step."""
        return sum(s.num_tokens for s in self.slices)

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`, for metrics and the ledger. All three are computed in the same way."""
        decodes = sum(s.num_draws == s.num_tokens for s in self.slices)
        return "decode" if decodes == len(self.slices) else "mixed" if decodes else "prefill"

    def with_drawn(self, drawn: Iterable[Drawn]) -> StepPlan:
        """Return a plan that was sent ahead, completed by the tokens that the previous step drew. Where none was
        drawn, the result is not used."""
        tokens = {one.sequence_id: one.token_id or 0 for one in drawn}
        slices = []
        for s in self.slices:
            assert s.draw is not None, "a slice that is sent ahead draws"
            token_ids = (tokens.get(s.sequence_id, 0),)
            slices.append(replace(s, token_ids=token_ids, draw=s.draw.after(token_ids)))
        return replace(self, slices=tuple(slices))

    def with_masks(self, masks: Iterable[bytes | None]) -> StepPlan:
        """Complete a plan that awaits masks by `StepMasks.masks`."""
        slices = []
        for s, mask in zip(self.slices, masks, strict=True):
            assert s.draw is not None, "what is sent ahead draws"
            slices.append(s if mask is None else replace(s, draw=replace(s.draw, mask=mask)))
        return replace(self, slices=tuple(slices), awaits_masks=False)


class StepMasks(Struct, frozen=True, omit_defaults=True):
    """The masks of a plan that was sent without them."""

    epoch: int
    step_id: int
    masks: tuple[bytes | None, ...]
    """One for each slice. None: any id may be drawn, or the answer has ended and its draw is not used."""


class TokenLogprobs(Struct, frozen=True, omit_defaults=True):
    """Natural log-probabilities at one position."""

    logprob: float
    """The log-probability of the token at this position."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as pairs (id, log-probability), the most likely first."""


class Drawn(Struct, frozen=True, omit_defaults=True):
    """A token that was drawn for a sequence. Those of one slice are in order."""

    sequence_id: int | None
    token_id: int | None
    """None: the logits were not finite."""
    logprobs: TokenLogprobs | None = None


class Scored(Struct, frozen=True, omit_defaults=True):
    """The log-probabilities of a slice's `targets`, in order."""

    sequence_id: int | None
    logprobs: tuple[TokenLogprobs, ...]


class StepStamps(Struct, frozen=True, omit_defaults=True):
    """The times of a step on one stage: nanoseconds on the stage's monotonic clock."""

    planned: int
    """The plan was read."""
    awaited: int
    """The stage began to wait for hidden states."""
    received: int
    """The hidden states were there; on stage 0 they are there at once."""
    begun: int
    """The computation began."""
    ended: int
    """The computation ended."""
    sent: int
    """The transport has taken the hidden states; the last stage has none to send."""


class _StepOutcome(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the results of a rank and of a stage have in common."""

    epoch: int
    step_id: int
    stamps: StepStamps
    bytes_sent: int = 0
    drawn: tuple[Drawn, ...] = ()
    scored: tuple[Scored, ...] = ()
    gathered_ns: int = 0
    """How long, between begun and ended, the rank waited for the other tensor ranks of its stage, and for the
    masks of a plan that was sent without them. In a stage's result it is the average over its ranks."""

    @property
    def computed_ns(self) -> int:
        return self.stamps.ended - self.stamps.begun - self.gathered_ns


class RankResult(_StepOutcome, frozen=True, omit_defaults=True, kw_only=True):
    """A rank's result of one step. Every rank sends one for every step. Only the last stage draws and scores."""

    place: int
    """The rank's place in its replica: stage * T + tensor, where T is the number of tensor ranks."""


class StepResult(_StepOutcome, frozen=True, kw_only=True):
    """A stage's result of one step. `TensorRanks` makes it from the results of the stage's ranks."""

    stage: int
