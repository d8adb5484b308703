"""Drawing on the device: the CPU's tokens and log-probabilities for the same logits, whatever shares the step."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ppserve.core.architecture import Cut, Split, stage_layouts
from ppserve.core.plan import Draw, Drawn, Scored, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.token_filter import packed_mask
from ppserve.model import sampling
from ppserve.model.cuda.draws import uniforms
from ppserve.model.inputs import ALONE, build_inputs
from tests.draws import a_draw
from tests.model.cuda.here import CPU, KINDS, backend_of, device_of, operators_of
from tests.model.random_checkpoint import architecture

VOCABULARY = 1009
ARCHITECTURE = architecture(vocab_size=VOCABULARY, max_positions=4096)


def results(plan: StepPlan, logits: torch.Tensor, kind: str, at_once: int = 256) -> tuple:
    """Draw and score them as a last stage would."""
    backend = backend_of(device_of(kind), operators_of(kind))
    (layout,) = stage_layouts(Split.parse("2"))
    inputs = build_inputs(plan, layout, backend.make_cache(ARCHITECTURE, layout, 4, 16))
    parts = iter(logits.to(backend.device).split(at_once))
    return backend.read_logits(inputs, parts, Cut((logits.shape[1],), 0))()


def plan_of(draws: Iterable[Draw], start: int = 0) -> StepPlan:
    """A step of one row for each draw."""
    return StepPlan(0, 0, 0, tuple(Slice(i, start, (1,), (0,), draw) for i, draw in enumerate(draws)))


def scores(count: int, seed: int) -> torch.Tensor:
    numbers = np.random.default_rng(seed).standard_normal((count, VOCABULARY)) * 3 - 70
    return torch.tensor(numbers, dtype=torch.float32)


def any_draw(chance: random.Random) -> Draw:
    """Every option, in combinations that chance makes."""
    params = SamplingParams(seed=chance.getrandbits(64), temperature=chance.choice([0.0, 0.5, 1.0, 1.7]))
    ids = tuple(chance.randrange(VOCABULARY) for _ in range(30))
    options = [
        {"top_k": chance.choice([1, 7, 50, 5000])},
        {"top_p": chance.choice([1e-9, 0.3, 0.9, 0.999])},
        {"min_p": chance.choice([0.01, 0.2, 1.0])},
        {"logit_bias": ((chance.randrange(VOCABULARY), 9.5), (VOCABULARY + 3, 100.0))},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    ]
    for option in chance.sample(options, 2):
        params = replace(params, **option)
    history = {"prompt_ids": ids[:10], "output_ids": (*ids[10:], *ids[12:15])}
    if chance.random() < 0.4:
        bound = chance.choice([VOCABULARY, VOCABULARY - 20])
        history["mask"] = packed_mask(chance.sample(range(bound), bound // 2), bound)
    if chance.random() < 0.4:
        history["banned"] = tuple(chance.sample(range(VOCABULARY), 40))
    return a_draw(params, chance.randrange(4), chance.choice([None, None, 0, 5]), **history)


def draws_alone(plan: StepPlan, logits: torch.Tensor) -> tuple[Drawn, ...]:
    return tuple(
        sampling.draw_token(s.sequence_id, s.draw, s.end, row.numpy())
        for s, row in zip(plan.slices, logits, strict=True)
        if s.draw is not None
    )


def assert_told_alike(ours: object, theirs: object) -> None:
    """Ids are equal; log-probabilities differ in the rounding of a sum."""
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        assert [of for _, of in ours.top] == pytest.approx([of for _, of in theirs.top], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_cpu(kind: str) -> None:
    chance = random.Random(3)
    for round_number in range(4):
        count = 60
        slices = tuple(Slice(i, chance.randrange(40), (1,), (0, 1, 2), any_draw(chance)) for i in range(count))
        plan, logits = StepPlan(0, 0, 0, slices), scores(count, round_number)
        drawn, scored = results(plan, logits, kind, at_once=chance.choice([7, 64]))
        assert scored == ()
        for ours, theirs in zip(drawn, draws_alone(plan, logits), strict=True):
            assert (ours.sequence_id, ours.token_id) == (theirs.sequence_id, theirs.token_id)
            assert_told_alike(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_draws_are_those_of_the_cpu(kind: str) -> None:
    """Many points of flat and of steep distributions, and the control: the point decides."""
    # Triton's interpreter takes 20 ms for a row.
    count = 30 if kind == "triton" and device_of(kind) == CPU else 400
    logits = torch.cat([scores(count, 9), scores(count, 10) * 0.01])
    draws = [Draw(SamplingParams(seed=i, temperature=(0.3, 1.0, 2.5)[i % 3])) for i in range(2 * count)]
    plan = plan_of(draws, 7)
    drawn, _ = results(plan, logits, kind)
    assert [of.token_id for of in drawn] == [of.token_id for of in draws_alone(plan, logits)]
    elsewhere, _ = results(plan_of(draws, 8), logits, kind)
    assert sum(a.token_id != b.token_id for a, b in zip(drawn, elsewhere, strict=True)) > count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_ties_and_numbers_that_are_none(wrong: float, kind: str) -> None:
    logits = torch.full((5, VOCABULARY), -5.0)
    logits[:, [17, 40, 90]] = 3
    logits[1, 700] = wrong
    greedy, steep = SamplingParams(temperature=0), SamplingParams(top_p=0.0005)
    everything = Draw(SamplingParams(), banned=tuple(range(VOCABULARY)))
    draws = [Draw(greedy, num_logprobs=4), Draw(greedy), Draw(steep), everything, Draw(SamplingParams(top_k=1))]
    drawn, _ = results(plan_of(draws), logits, kind)
    assert [of.token_id for of in drawn[:4]] == [17, None, 17, None]
    assert drawn[4].token_id in (17, 40, 90)
    assert drawn[0].logprobs is not None
    assert [i for i, _ in drawn[0].logprobs.top] == [17, 40, 90, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_leaves_huge_scores_finite(kind: str) -> None:
    logits = scores(2, 4)
    logits[:, 5] = 1e38
    params = SamplingParams(repetition_penalty=0.01, top_k=3)
    draws = [a_draw(each, prompt_ids=(5,)) for each in (params, replace(params, temperature=0))]
    drawn, _ = results(plan_of(draws), logits, kind)
    assert [of.token_id for of in drawn] == [5, 5]


def test_prompts_are_scored_in_pieces_and_beside_draws() -> None:
    logits = scores(12, 4)
    slices = (
        Slice(0, 0, (1,) * 5, (0,), None, targets=(3, 4, 5, 6, 7), num_prompt_logprobs=2),
        Slice(1, 3, (1,), (1,), Draw(SamplingParams(seed=1))),
        Slice(2, 0, (1,) * 7, (2,), Draw(SamplingParams(seed=2), num_logprobs=1), targets=(9,) * 5),
    )
    plan = StepPlan(0, 0, 0, slices)
    expected, theirs = sampling.read_logits(plan, iter([logits]), ALONE, Cut((logits.shape[1],), 0))
    for at_once in (1, 3, 5, 256):
        drawn, scored = results(plan, logits, "reference", at_once)
        assert [of.token_id for of in drawn] == [of.token_id for of in expected]
        assert [of.sequence_id for of in scored] == [of.sequence_id for of in theirs]
        for one, other in zip(scored, theirs, strict=True):
            assert isinstance(one, Scored)
            for ours, told in zip(one.logprobs, other.logprobs, strict=True):
                assert_told_alike(ours, told)


def test_points_are_those_of_the_cpu() -> None:
    keys = [(s, i, p) for s in (0, 1, 42, 2**63, 2**64 - 1) for i in (0, 1, 7) for p in (0, 1, 500, 10**6)]
    columns = (np.array(column, np.uint64) for column in zip(*keys, strict=True))
    assert uniforms(*columns).tolist() == [sampling.uniform(*key) for key in keys]
