"""A sequence: the progress of one of a request's answers, and the events it causes.

A sequence knows its tokens (prompt, resumed and drawn), how many positions were put into steps (`scheduled`), and
for how many of these the result has returned (`computed`). It is ready when `known > scheduled`, whether that
means a prompt, a chunk, a decode or a replay.

Draft tokens are in slices alone. Where one rank computes all of the model, a step may be sent ahead: it takes the
next token before that is drawn. Then `scheduled` is one more than the known tokens.

    WAITING ──admit──▶ RUNNING ──end──▶ ENDED
     ▲ └────────end──────┼──▶ ENDED
     └──────give back────┘

0 <= computed <= scheduled <= known + 1, and computed <= known, always.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import StrEnum

from ppserve.core.plan import DRAWN, LATER, Draw, Drawn, Slice, TokenLogprobs, packed_biases, packed_ids
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.token_filter import MaskSource, without
from ppserve.errors import AnswerImpossible, RequestError


def block_digest(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The name of a full block that follows the block named `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class SequenceStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


NEXT: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.ENDED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.ENDED, SequenceStatus.WAITING}),
    SequenceStatus.ENDED: frozenset(),
}


class InvalidTransition(Exception):
    """`NEXT` does not allow the move; nothing was changed."""

    def __init__(self, sequence_id: int, old: SequenceStatus, new: SequenceStatus) -> None:
        super().__init__(f"sequence {sequence_id}: {old} -> {new}")


EndCause = FinishReason | RequestError
"""Why a sequence ends: its answer is complete, or its request has failed."""


TextRule = Callable[[int, int, FinishReason | None], FinishReason | None]
"""Reads the next token of one of a request's answers: (the answer's index, the token, why it ends the answer, its
text aside). Returns why it ends the answer, its text included. It is called once for each token, in order."""


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """A token of a sequence, its end, or both."""

    request_id: str
    index: int  # of the request's answers
    sequence_id: int
    offset: int
    """The token's place in the answer, resumed tokens included; without a token, the answer's length."""
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens after the first; only in the first event that is not an error."""
    finish: FinishReason | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    admitted_s: float | None = None  # on the head's clock; None: it never left the queue
    replica: int | None = None  # the latest to compute it

    @property
    def is_terminal(self) -> bool:
        """Whether it is the sequence's last event."""
        return self.finish is not None or self.error is not None


class Sequence:
    """The progress of one answer. Its attributes are set in this module only."""

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        config: SchedulerConfig,
        masks: MaskSource | None = None,
        text_rule: TextRule | None = None,
    ) -> None:
        self.id = sequence_id
        self._text_rule = text_rule
        self.masks = masks
        self._found_masks: dict[tuple[int, ...], bytes | None] = {}  # by draft tokens after the known ones
        self.request = request
        self.index = index  # of the request's answers
        self.status = SequenceStatus.WAITING
        self.token_ids = [*request.prompt_ids, *request.resume_ids]
        self.scheduled = 0  # positions that were put into steps
        self.computed = 0  # positions whose result has returned
        self.loss_mark = 0  # known tokens when a stage was last lost
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was admitted
        self.block_table: tuple[int, ...] = ()
        self.num_published = 0  # leading blocks that others may find
        self.leader: Sequence | None = None  # for n > 1, until the first slice: it fills the first blocks
        self.scores: list[TokenLogprobs] = []  # of the prompt, until they are delivered
        is_first = index == (request.resume_index or 0) and not request.resume_ids
        self.wants_scores = is_first and request.output.prompt_logprobs is not None
        self._block_size = config.block_size
        self._eos_ids = config.eos_ids
        # Why it ends without a draw: it is only scored, or resumed complete.
        self.known_end = self._end_after(self.token_ids[-1]) if request.resume_ids else None
        if request.stop.max_tokens == 0:
            self.known_end = request.length_end
        self.awaits_mask = masks is not None and self.known_end is None  # it is in no step until then
        self._digests: list[bytes] = []
        banned = request.banned(self._eos_ids)
        banned_before = len(request.prompt_ids) + request.stop.min_tokens if banned else 0
        sampling = request.sampling
        self._next_draw = Draw(
            params=replace(sampling, logit_bias=()),
            index=index,
            num_logprobs=request.output.logprobs,
            banned=banned,
            banned_before=banned_before,
            biases=packed_biases(sampling.logit_bias),
            prompt_ids=packed_ids(request.prompt_ids) if sampling.needs_history else b"",
            output_ids=packed_ids(request.resume_ids) if sampling.needs_history else b"",
        )

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Known tokens that are in no step yet."""
        return max(0, len(self.token_ids) - self.scheduled)

    @property
    def is_ready(self) -> bool:
        """Whether it may be scheduled: the tokens before its next one are in earlier steps, and its masks are
        there."""
        follows = self.leader is None or self.leader.scheduled >= self.scheduled
        return follows and not self.awaits_mask

    @property
    def num_likely(self) -> int:
        """The likely tokens that come back with each token that a step scores or draws."""
        output = self.request.output
        of_prompt = (output.prompt_logprobs or 0) if self.wants_scores else 0
        return max(output.logprobs or 0, of_prompt)

    @property
    def num_free_positions(self) -> int:
        """Positions after the known tokens that its blocks have room for."""
        return self.max_positions - len(self.token_ids)

    @property
    def is_live(self) -> bool:
        """Whether it has had no terminal event yet."""
        return self.status is not SequenceStatus.ENDED

    @property
    def max_positions(self) -> int:
        """The most positions that may need keys and values; the last drawn token is never computed."""
        num_prompt = len(self.request.prompt_ids)
        return max(len(self.token_ids), num_prompt + self.request.stop.max_tokens - 1)

    def move_to(self, status: SequenceStatus) -> None:
        """Raises InvalidTransition."""
        if status not in NEXT[self.status]:
            raise InvalidTransition(self.id, self.status, status)
        self.status = status

    def start(self, cached_tokens: int) -> None:
        """cached_tokens: of the prompt, found in the prefix cache."""
        self.move_to(SequenceStatus.RUNNING)
        if not self.loss_mark:
            self.cached_tokens = cached_tokens

    def use_blocks(self, block_table: tuple[int, ...], num_shared: int, leader: Sequence | None = None) -> None:
        """Begin behind the first `num_shared` of them, which others fill."""
        self.block_table = block_table
        self.num_published = num_shared
        self.leader = leader
        self.scheduled = self.computed = num_shared * self._block_size

    def publish(self, num_blocks: int) -> range:
        """Others may find its first blocks from now on. Returns the indices of the new ones."""
        newly_published = range(self.num_published, num_blocks)
        self.num_published = num_blocks
        return newly_published

    def digests(self, num_blocks: int, salt: bytes) -> list[bytes]:
        """The names of its first full blocks. salt: sequences with different ones share no names."""
        while len(self._digests) < num_blocks:
            start = len(self._digests) * self._block_size
            parent = self._digests[-1] if self._digests else salt
            token_ids = self.token_ids[start : start + self._block_size]
            self._digests.append(block_digest(parent, token_ids))
        return self._digests[:num_blocks]

    def schedule(self, num_tokens: int, draft_ids: tuple[int, ...] = ()) -> Slice:
        """Put the next `num_tokens` known tokens into a step, and draft tokens after them."""
        assert 0 < num_tokens <= self.remaining, (self.id, num_tokens)
        start = self.scheduled
        end = start + num_tokens
        token_ids = (*self.token_ids[start:end], *draft_ids)
        draws = end == len(self.token_ids) and self.known_end is None
        draw, draft_masks = self._next_draw if draws else None, tuple[bytes | None, ...]()
        if draw is not None and self.masks is not None:
            draw = replace(draw, mask=self.mask_after(()))
            draft_masks = tuple(self.mask_after(draft_ids[:count]) for count in range(1, len(draft_ids) + 1))
        targets = self.request.prompt_ids[start + 1 : end + 1] if self.wants_scores else ()
        num_scored = self.request.output.prompt_logprobs or 0
        self.scheduled = end
        self.leader = None
        table = self._blocks_until(start + len(token_ids))
        return Slice(self.id, start, token_ids, table, draw, targets, num_scored, len(draft_ids), draft_masks)

    def schedule_ahead(self) -> Slice:
        """Put the token that follows the known ones into a step, before it is drawn."""
        start = self.scheduled
        assert start == len(self.token_ids), (self.id, start)
        self.scheduled += 1
        draw = self._next_draw if self.masks is None else replace(self._next_draw, mask=LATER)
        return Slice(self.id, start, (DRAWN,), self._blocks_until(start + 1), draw)

    def _blocks_until(self, position: int) -> tuple[int, ...]:
        return self.block_table[: -(-position // self._block_size)]

    def finds_mask(self, draft_ids: tuple[int, ...] = ()) -> bool:
        """Whether the mask of what may follow the known tokens and these draft tokens is there, or none is needed.
        Raises the RequestError that ends the request, if nothing may follow."""
        if self.masks is None or draft_ids in self._found_masks:
            return True
        mask = self.masks.find((*self.token_ids[len(self.request.prompt_ids) :], *draft_ids))
        if mask is None:
            return False
        bits = mask.bits
        if bits is not None:
            position = len(self.token_ids) + len(draft_ids)
            banned = self._next_draw.banned if position < self._next_draw.banned_before else ()
            left = without(bits, banned) if banned else bits
            if left.count(0) == len(left):
                raise AnswerImpossible(f"no token may follow the {self.num_generated} tokens of the answer")
        self._found_masks[draft_ids] = bits
        return True

    def mask_after(self, draft_ids: tuple[int, ...]) -> bytes | None:
        """A mask that `finds_mask` has found; None: all ids may follow."""
        return None if self.masks is None else self._found_masks[draft_ids]

    def note_masks(self, are_there: bool) -> None:
        """Whether all masks that its next step needs are there."""
        self.awaits_mask = not are_there

    def cancel_ahead(self) -> None:
        self.scheduled = min(self.scheduled, len(self.token_ids))

    def commit_slice(self, slice_: Slice, scores: Seq[TokenLogprobs]) -> None:
        """A step has computed the known tokens of a slice. scores: of the prompt's tokens in it."""
        self.scores.extend(scores)
        self.computed = slice_.end - slice_.num_draft_tokens

    def accept_draft(self, token_id: int) -> bool:
        """Whether a draft token is the token that was drawn. Then it counts as computed."""
        if self.token_ids[self.computed] != token_id:
            return False
        self.computed += 1
        self.scheduled = max(self.scheduled, self.computed)
        return True

    def commit_token(self, token_id: int) -> FinishReason | None:
        """The next token was drawn. Returns why the answer ends with it; None when it does not."""
        self.token_ids.append(token_id)
        if self.masks is not None:
            found = self._found_masks.items()
            self._found_masks = {ids[1:]: mask for ids, mask in found if ids[:1] == (token_id,)}
            self.awaits_mask = True
        self._next_draw = self._next_draw.after((token_id,))
        finish = self._end_after(token_id)
        return finish if self._text_rule is None else self._text_rule(self.index, token_id, finish)

    def _end_after(self, token_id: int) -> FinishReason | None:
        return self.request.end_after(self.num_generated, token_id, self._eos_ids)

    def give_back(self) -> None:
        """Its replica is lost or drained: it waits, with all tokens known, nothing computed and no block."""
        self.move_to(SequenceStatus.WAITING)
        self.use_blocks((), 0)
        self.scores.clear()
        self.loss_mark = len(self.token_ids)

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's scores, once all are there; nothing after that."""
        if not self.wants_scores or self.computed < len(self.request.prompt_ids):
            return ()
        scores = tuple(self.scores)
        self.scores = []
        self.wants_scores = False
        return scores


class SequenceGroup:
    """The sequences of one request, and where it is computed."""

    def __init__(
        self,
        request: Request,
        first_id: int,
        config: SchedulerConfig,
        submitted_s: float,
        masks: MaskSource | None = None,
        text_rule: TextRule | None = None,
    ) -> None:
        """All sequences of a request, or the one that it resumes, with ids from `first_id` on."""
        self.request = request
        self.sequences = [
            Sequence(first_id + i, request, index, config, masks, text_rule)
            for i, index in enumerate(request.indices)
        ]
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None  # for the first time
        self.replica: int | None = None  # the latest to compute it
        most_tokens = len(request.prompt_ids) + request.stop.max_tokens
        self.num_tokens = len(self.sequences) * most_tokens

    def place(self, replica: int, now: float) -> None:
        self.replica = replica
        if self.admitted_s is None:
            self.admitted_s = now

    def token_event(self, sequence: Sequence, drawn: Drawn) -> SequenceEvent:
        """A sequence has a further token, and goes on."""
        return self._event(sequence, drawn, None)

    def end(self, sequence: Sequence, cause: EndCause, drawn: Drawn | None = None) -> SequenceEvent:
        """End a sequence, with its last token if `drawn`. Nothing else makes a terminal event, so each sequence
        has one: a second end is an InvalidTransition. Of a running sequence only its scheduler may call this."""
        sequence.move_to(SequenceStatus.ENDED)
        return self._event(sequence, drawn, cause)

    def _event(self, sequence: Sequence, drawn: Drawn | None, cause: EndCause | None) -> SequenceEvent:
        """drawn: the last of the sequence's `token_ids`."""
        error = cause if isinstance(cause, RequestError) else None
        return SequenceEvent(
            request_id=self.key,
            index=sequence.index,
            sequence_id=sequence.id,
            offset=sequence.num_generated if drawn is None else sequence.num_generated - 1,
            token_id=None if drawn is None else drawn.token_id,
            logprobs=None if drawn is None else drawn.logprobs,
            prompt_logprobs=sequence.take_scores() if error is None else (),
            finish=cause if isinstance(cause, FinishReason) else None,
            error=error,
            cached_tokens=sequence.cached_tokens,
            admitted_s=self.admitted_s,
            replica=self.replica,
        )

    @property
    def key(self) -> str:
        return self.request.id

    @property
    def num_known_tokens(self) -> int:
        """Tokens of all its sequences, each with the common prompt."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.is_live]
