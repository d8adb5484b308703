"""The simulated stage: what tests of the head have in place of a stage that computes.

The rig of the scheduler, the rigs of replicas and engines, and the processes of simulated histories share it. It
has no time, threads or connections: its caller says when it computes, and what it reports to whom. Its law:

1. Plans are computed in the order in which they were sent. A step that was sent ahead takes the tokens that the
   step before has drawn, and the masks that came for it. The result of a step that is skipped has no tokens.
2. The "keys and values" of a position are one number, hashed from the token there and from the numbers of all
   positions before it, *as read through the block table*. A number that was never written cannot be read
   (KeyError), and two slices of one step must not write different numbers to one slot.
3. A token is drawn from the hash of the numbers of all positions before it, the seed, and all that its draw names.
   So one wrong, stale or missing block changes all later tokens, and equality with `expected_answer` proves that
   each slice read the right keys. A test whose subject is not what was read may give another rule.
4. Only a stage that draws reports tokens and scores; the others report that they have computed.
5. When the pipeline is lost, its plans, keys and values are lost too.

One store stands for those of all stages of a pipeline, because every stage applies the same plans in the same
order. In one point it is stricter than a stage: a slice does not see what other slices of its step write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from msgspec.structs import replace

from ppserve.core.plan import (
    Draw,
    Drawn,
    RankResult,
    Scored,
    Slice,
    StepPlan,
    StepResult,
    StepStamps,
    TokenLogprobs,
    packed_biases,
    packed_ids,
)
from ppserve.core.request import FinishReason, Request
from ppserve.core.scheduling.token_filter import is_allowed, packed_mask

VOCAB_SIZE = 41
EOS_ID = 7
CUT_SHORT = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP_STRING)
STAMPS = StepStamps(0, 0, 0, 0, 0, 0)
_MASK = (1 << 61) - 1


def mix(*values: int) -> int:
    """A hash of numbers that is the same in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        state ^= state >> 29
    return state


def draw_token(digest: int, position: int, draw: Draw) -> int:
    """The token at `position`: a pure function of the numbers before it, the seed, the index and the ids that are
    banned or that a mask forbids."""
    history = mix(*draw.prompt_ids, 1, *draw.output_ids) if draw.params.needs_history else 0
    token = mix(digest, draw.params.seed, draw.index, position, history) % VOCAB_SIZE
    banned = draw.banned if position < draw.banned_before else ()
    while token in banned or not is_allowed(draw.mask, token):
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass(frozen=True)
class MadeUpFilter:
    """A `TokenFilter` that looks at the whole answer: about half of the ids may follow, or all of them."""

    salt: int = 0

    def ids(self, output_ids: Seq[int]) -> list[int]:
        state = mix(self.salt, 1, *output_ids)
        return [i for i in range(VOCAB_SIZE) if state % 5 == 0 or mix(state, i) % 2]

    def allowed(self, output_ids: Seq[int]) -> bytes | None:
        ids = self.ids(output_ids)
        return None if len(ids) == VOCAB_SIZE else packed_mask(ids, VOCAB_SIZE)


def logprob_of(digest: int, token_id: int) -> float:
    return -float(mix(digest, token_id) % 1000) / 100


@dataclass(frozen=True)
class Answer:
    """What a request gets when it runs alone."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    prompt_logprobs: tuple[float, ...] = ()

    def allows(self, token_ids: tuple[int, ...], finish: FinishReason) -> bool:
        """Whether a caller may get these tokens with this end: all of them, or those before it was cut short."""
        if finish in CUT_SHORT:
            return token_ids == self.token_ids[: len(token_ids)]
        return (token_ids, finish) == (self.token_ids, self.finish)


def expected_answer(
    request: Request, index: int = 0, eos_id: int | None = EOS_ID, token_filter: MadeUpFilter | None = None
) -> Answer:
    """A sequential run without blocks, steps or a scheduler; resumed tokens are drawn again."""
    digest, scores = 0, []
    for position, token_id in enumerate(request.prompt_ids):
        digest = mix(digest, mix(digest, token_id))
        if position + 1 < len(request.prompt_ids):
            scores.append(logprob_of(digest, request.prompt_ids[position + 1]))
    stop, output = request.stop, []
    finish = request.length_end
    while len(output) < stop.max_tokens:
        banned: tuple[int, ...] = ()
        if len(output) < stop.min_tokens:
            banned = stop.stop_token_ids
            if eos_id is not None and not stop.ignore_eos:
                banned = (eos_id, *banned)
        prompt_ids, output_ids = (request.prompt_ids, output) if request.sampling.needs_history else ((), ())
        position = len(request.prompt_ids) + len(output)
        draw = Draw(
            params=replace(request.sampling, logit_bias=()),
            index=index,
            banned=banned,
            banned_before=position + 1,
            biases=packed_biases(request.sampling.logit_bias),
            prompt_ids=packed_ids(prompt_ids),
            output_ids=packed_ids(output_ids),
        )
        if token_filter is not None:
            forbidden = {*range(VOCAB_SIZE)}.difference(token_filter.ids(output))
            draw = replace(draw, banned=(*banned, *forbidden))
        token_id = draw_token(digest, position, draw)
        output.append(token_id)
        if token_id == eos_id and not stop.ignore_eos:
            finish = FinishReason.EOS
            break
        if token_id in stop.stop_token_ids:
            finish = FinishReason.STOP_TOKEN
            break
        digest = mix(digest, mix(digest, token_id))
    wanted = request.output.prompt_logprobs is not None
    return Answer(tuple(output), finish, tuple(scores) if wanted else ())


DrawRule = Callable[[int, int, Draw], int]
"""The token of a hash of all numbers before a position, of that position, and of its draw."""


class SimulatedStage:
    """One stage of a pipeline, by the law above.

    place: among the pipeline's ranks. draws: whether its results have tokens. not_finite: ids of sequences whose
    logits are not finite. plans: those computed so far. skipped: ids of steps that are not to be computed. drawn:
    by the step before.
    """

    def __init__(
        self, block_size: int, place: int = 0, draws: bool = True, draw_token: DrawRule = draw_token
    ) -> None:
        self.block_size = block_size
        self.place = place
        self.draws = draws
        self.draw_token = draw_token
        self.plans: list[StepPlan] = []
        self.not_finite: set[int] = set()
        self.skipped: set[int] = set()
        self.drawn: tuple[Drawn, ...] = ()
        self.cancelled: set[int] = set()
        """Ids of steps that await no masks any more."""
        self.masks: dict[int, tuple[bytes | None, ...]] = {}
        """The masks of steps that were sent without them, by the step's id."""
        self._queue: deque[StepPlan] = deque()
        self._numbers: dict[tuple[int, int], int] = {}

    def send(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    @property
    def next_plan(self) -> StepPlan | None:
        """The oldest plan, with its tokens: those that were sent, or that the step before has drawn."""
        return self._completed(self._queue[0]) if self._queue else None

    def _completed(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the tokens and masks that were not known when it was sent."""
        if plan.awaits_masks and plan.step_id in self.cancelled:
            plan = replace(plan, awaits_masks=False)
        if plan.awaits_masks and plan.step_id in self.masks:
            plan = plan.with_masks(self.masks[plan.step_id])
        return plan.with_drawn(self.drawn) if plan.is_ahead else plan

    def lose(self) -> None:
        """The pipeline is lost: keys, values and steps in flight."""
        self._queue.clear()
        self._numbers.clear()
        self.drawn = ()

    def run_one(self) -> StepResult:
        """Compute the oldest plan. Returns what the head makes of the result where each stage has one rank."""
        result = self.compute_next()
        drawn, scored = result.drawn, result.scored
        return StepResult(
            epoch=result.epoch,
            step_id=result.step_id,
            stage=self.place,
            stamps=result.stamps,
            drawn=drawn,
            scored=scored,
        )

    def compute_next(self, stamps: StepStamps = STAMPS) -> RankResult:
        """Compute the oldest plan."""
        plan = self.next_plan
        assert plan is not None, "no plan was sent"
        self._queue.popleft()
        return self._result(plan, stamps)

    def compute(self, plan: StepPlan, stamps: StepStamps = STAMPS) -> RankResult:
        """Compute this plan, whatever was sent."""
        return self._result(self._completed(plan), stamps)

    def _result(self, plan: StepPlan, stamps: StepStamps) -> RankResult:
        result = RankResult(epoch=plan.epoch, step_id=plan.step_id, place=self.place, stamps=stamps)
        if plan.step_id in self.skipped:
            self._leave_unwritten(plan)
            return result
        assert not plan.awaits_masks, "its masks have not come"
        self.plans.append(plan)
        if not self.draws:
            return result
        drawn, scored, writes = [], [], {}
        for slice_ in plan.slices:
            digests, written = self._compute(slice_)
            for slot, number in written.items():
                assert writes.setdefault(slot, number) == number, f"two slices of a step disagree on slot {slot}"
            for position, draw in slice_.draws:
                finite = slice_.sequence_id not in self.not_finite
                token_id = self.draw_token(digests[position - slice_.end - 1], position, draw) if finite else None
                drawn.append(Drawn(slice_.sequence_id, token_id))
            if slice_.targets:
                logprobs = [logprob_of(d, t) for d, t in zip(digests, slice_.targets, strict=False)]
                scored.append(Scored(slice_.sequence_id, tuple(TokenLogprobs(p) for p in logprobs)))
        self._numbers.update(writes)
        self.drawn = tuple(drawn)
        return replace(result, drawn=self.drawn, scored=tuple(scored))

    def _leave_unwritten(self, plan: StepPlan) -> None:
        """What a skipped step would have written is whatever was there: it may be read, but must decide
        nothing."""
        for slice_ in plan.slices:
            for i in range(slice_.start, slice_.end):
                self._numbers.setdefault((slice_.block_table[i // self.block_size], i % self.block_size), -1)

    def _compute(self, slice_: Slice) -> tuple[list[int], dict[tuple[int, int], int]]:
        """Return each row's hash of all numbers up to it, and the numbers that the slice writes."""
        slots = [(slice_.block_table[i // self.block_size], i % self.block_size) for i in range(slice_.end)]
        digest, digests, written = 0, [], {}
        for slot in slots[: slice_.start]:
            digest = mix(digest, self._numbers[slot])  # KeyError: read before written
        for slot, token_id in zip(slots[slice_.start :], slice_.token_ids, strict=True):
            written[slot] = mix(digest, token_id)
            digest = mix(digest, written[slot])
            digests.append(digest)
        return digests, written
