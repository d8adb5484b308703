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
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from ppserve.core.plan import Draw, Drawn, Slice, TokenLogprobs, packed_biases, packed_ids
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.core.scheduling.token_filter import AskedMask, MaskSource
from ppserve.errors import RequestError


def block_digest(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Return the name of a full block of these tokens that follows the block named `parent`."""
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
"""Decides whether the text of an answer ends it. It is called once for each token, in order, with the answer's
index, the token, and the reason for which this token ends the answer without regard to text (None: it does not).
It returns the reason for which the token ends the answer, text included."""


class SequenceEvent(Struct, frozen=True):
    """A token of a sequence, its end, or both."""

    request_id: str
    index: int  # of the request's answers
    sequence_id: int
    offset: int
    """The token's place in the answer, resumed tokens included. Without a token, it is the answer's length."""
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens after the first, in the first event that is not an error."""
    finish: FinishReason | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    admitted_s: float | None = None  # on the head's clock; None: the request never left the queue
    replica: int | None = None  # the latest one to which the request was admitted

    @property
    def is_terminal(self) -> bool:
        """Whether this is the sequence's last event."""
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
        self._masks: dict[tuple[int, ...], AskedMask] = {}  # after the known tokens and these draft tokens
        self.request = request
        self.index = index  # of the request's answers
        self.status = SequenceStatus.WAITING
        self.token_ids = [*request.prompt_ids, *request.resume_ids]
        self.scheduled = 0  # positions that were put into steps
        self.computed = 0  # positions whose result has returned
        self.loss_mark = 0  # known tokens when a stage was last lost
        self.cached_tokens = 0  # tokens of the prompt that were in the prefix cache at the first admission
        self.block_table: tuple[int, ...] = ()
        self.num_published = 0  # leading blocks that other sequences may share
        self.leader: Sequence | None = None  # fills the prompt's blocks if n > 1; unset from the first slice on
        self.scores: list[TokenLogprobs] = []  # of the prompt, until they are delivered
        is_first = index == (request.resume_index or 0) and not request.resume_ids
        self.wants_scores = is_first and request.output.prompt_logprobs is not None
        self._block_size = config.block_size
        self._eos_ids = config.eos_ids
        # Why it ends without a draw: its prompt is only scored, or it is resumed when it was already complete.
        self.known_end = self._end_after(self.token_ids[-1]) if request.resume_ids else None
        if request.stop.max_tokens == 0:
            self.known_end = request.length_end
        self.awaits_mask = masks is not None and self.known_end is None  # while it does, it is put into no step
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
        """The number of the answer's tokens so far, resumed ones included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """The number of known tokens that are in no step yet."""
        return max(0, len(self.token_ids) - self.scheduled)

    @property
    def is_ready(self) -> bool:
        """Whether its pending tokens may be scheduled: the blocks before them are filled by earlier steps, and its
        masks are there."""
        is_prefix_scheduled = self.leader is None or self.leader.scheduled >= self.scheduled
        return is_prefix_scheduled and not self.awaits_mask

    @property
    def num_top_logprobs(self) -> int:
        """How many of the most likely tokens are returned with each token that a step scores or draws."""
        output = self.request.output
        of_prompt = (output.prompt_logprobs or 0) if self.wants_scores else 0
        return max(output.logprobs or 0, of_prompt)

    @property
    def num_free_positions(self) -> int:
        """The number of positions after the known tokens for which its blocks have room."""
        return self.max_positions - len(self.token_ids)

    @property
    def is_live(self) -> bool:
        """Whether the sequence has had no terminal event yet."""
        return self.status is not SequenceStatus.ENDED

    @property
    def max_positions(self) -> int:
        """The most positions that may need keys and values: the last drawn token is never computed."""
        num_prompt = len(self.request.prompt_ids)
        return max(len(self.token_ids), num_prompt + self.request.stop.max_tokens - 1)

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status. Raises InvalidTransition where `NEXT` does not have the change."""
        if status not in NEXT[self.status]:
            raise InvalidTransition(self.id, self.status, status)
        self.status = status

    def start(self, cached_tokens: int) -> None:
        """Begin to run. cached_tokens: how many tokens of the prompt were found in the prefix cache."""
        self.move_to(SequenceStatus.RUNNING)
        if not self.loss_mark:
            self.cached_tokens = cached_tokens

    def use_blocks(self, block_table: tuple[int, ...], num_shared: int, leader: Sequence | None = None) -> None:
        """Begin to compute after the first `num_shared` blocks of a table: other sequences fill these. leader:
        fills the blocks of the prompt, where it is another sequence of the request."""
        self.block_table = block_table
        self.num_published = num_shared
        self.leader = leader
        self.scheduled = self.computed = num_shared * self._block_size

    def publish(self, num_blocks: int) -> range:
        """Note that the first `num_blocks` blocks may be shared from now on. Return the indices of those that
        might not be shared before."""
        newly_published = range(self.num_published, num_blocks)
        self.num_published = num_blocks
        return newly_published

    def digests(self, num_blocks: int, salt: bytes) -> list[bytes]:
        """Return the names of the first `num_blocks` blocks, which are full. salt: sequences with different salts
        have no name in common."""
        while len(self._digests) < num_blocks:
            start = len(self._digests) * self._block_size
            parent = self._digests[-1] if self._digests else salt
            token_ids = self.token_ids[start : start + self._block_size]
            self._digests.append(block_digest(parent, token_ids))
        return self._digests[:num_blocks]

    def schedule(self, num_tokens: int, draft_ids: tuple[int, ...] = ()) -> Slice:
        """Put the next `num_tokens` pending tokens into a step, and draft tokens after them. Return the slice."""
        assert 0 < num_tokens <= self.num_pending, (self.id, num_tokens)
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
        """Put the token that follows the known ones into a step before it is drawn. Return the slice."""
        start = self.scheduled
        assert start == len(self.token_ids), (self.id, start)
        self.scheduled += 1
        return Slice(self.id, start, (), self._blocks_until(start + 1), self._next_draw)

    def _blocks_until(self, position: int) -> tuple[int, ...]:
        return self.block_table[: -(-position // self._block_size)]

    def find_mask(self, draft_ids: tuple[int, ...] = ()) -> bool:
        """Look up the mask for the token that follows the known tokens and these draft tokens. Return whether it
        is there, or none is needed. Raises the RequestError that ends the request if no token may follow."""
        if self.masks is None:
            return True
        asked = self._masks.get(draft_ids)
        if asked is None:
            output_ids = tuple(self.token_ids[len(self.request.prompt_ids) :]) + draft_ids
            asked = self._masks[draft_ids] = self.masks.ask(output_ids)
        if asked.is_there:
            return True
        position = len(self.token_ids) + len(draft_ids)
        return asked.look(self._next_draw.banned if position < self._next_draw.banned_before else ())

    def mask_after(self, draft_ids: tuple[int, ...]) -> bytes | None:
        """Return a mask that `find_mask` has found; None: all ids may follow."""
        return None if self.masks is None else self._masks[draft_ids].bits

    def note_masks(self, are_there: bool) -> None:
        """Note whether all masks that its next step needs are there."""
        self.awaits_mask = not are_there

    def cancel_ahead(self) -> None:
        """Take back what `schedule_ahead` did, if the token is still not drawn."""
        self.scheduled = min(self.scheduled, len(self.token_ids))

    def commit_slice(self, slice_: Slice, scores: Seq[TokenLogprobs]) -> None:
        """Note that a step has computed the known tokens of a slice. scores: those of its prompt tokens."""
        self.scores.extend(scores)
        self.computed = slice_.end - slice_.num_draft_tokens

    def accept_draft(self, token_id: int) -> bool:
        """Return whether a draft token equals the token that was drawn. If so, it counts as computed."""
        if self.token_ids[self.computed] != token_id:
            return False
        self.computed += 1
        self.scheduled = max(self.scheduled, self.computed)
        return True

    def commit_token(self, token_id: int) -> FinishReason | None:
        """Append the token that was drawn. Return the reason if the answer ends with it, else None."""
        self.token_ids.append(token_id)
        if self.masks is not None:
            self._masks = {ids[1:]: mask for ids, mask in self._masks.items() if ids and ids[0] == token_id}
            self.awaits_mask = True
        self._next_draw = self._next_draw.after((token_id,))
        finish = self._end_after(token_id)
        return finish if self._text_rule is None else self._text_rule(self.index, token_id, finish)

    def _end_after(self, token_id: int) -> FinishReason | None:
        return self.request.end_after(self.num_generated, token_id, self._eos_ids)

    def give_back(self) -> None:
        """Wait again, because the replica is lost or drained: all tokens stay known, none is computed, and no
        block is held."""
        self.move_to(SequenceStatus.WAITING)
        self.use_blocks((), 0)
        self.scores.clear()
        self.loss_mark = len(self.token_ids)

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's scores, once, when all are there. Before and after that return nothing."""
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
        """Make all sequences of a request, or the one that it resumes, with ids from `first_id` on."""
        self.request = request
        self.sequences = [
            Sequence(first_id + i, request, index, config, masks, text_rule)
            for i, index in enumerate(request.indices)
        ]
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None  # for the first time
        self.replica: int | None = None  # the latest one to which it was admitted
        most_tokens = len(request.prompt_ids) + request.stop.max_tokens
        self.num_tokens = len(self.sequences) * most_tokens  # the most that its sequences can have

    def place(self, replica: int, now: float) -> None:
        """Note that a replica admits the request. now: on the head's clock, in seconds."""
        self.replica = replica
        if self.admitted_s is None:
            self.admitted_s = now

    def token_event(self, sequence: Sequence, drawn: Drawn) -> SequenceEvent:
        """Return the event of a drawn token after which the sequence goes on."""
        return self._event(sequence, drawn, None)

    def end(self, sequence: Sequence, cause: EndCause, drawn: Drawn | None = None) -> SequenceEvent:
        """End a sequence, and return its terminal event. Nothing else makes terminal events, so each sequence has
        exactly one: a second end raises InvalidTransition. For a running sequence, only its scheduler may call
        this. drawn: the sequence's last token, if that ends it."""
        sequence.move_to(SequenceStatus.ENDED)
        return self._event(sequence, drawn, cause)

    def _event(self, sequence: Sequence, drawn: Drawn | None, cause: EndCause | None) -> SequenceEvent:
        """Make the event. drawn: the last of the sequence's `token_ids`, if the event has a token."""
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
        """The number of known tokens of all its sequences. The common prompt counts once for each."""
        return sum(len(s.token_ids) for s in self.sequences)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that have had no terminal event yet."""
        return [s for s in self.sequences if s.is_live]
