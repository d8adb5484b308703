"""Drawing: transformers' surviving sets, the exact distribution, seeds, ties, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.token_filter import packed_mask
from ppserve.model import sampling
from ppserve.model.cuda.draws import Draws
from ppserve.model.sampling import ReadRow, draw_token, token_logprobs, uniform
from ppserve.model.sampling_kernels import allowed_ids, draw, forbid, is_finite, num_allowed, sort_by_score
from tests.draws import a_draw
from tests.model.pipelines import GREEDY, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture
from tests.reference import Reference

VOCABULARY = 1009


def scores(seed: int, size: int = VOCABULARY) -> np.ndarray:
    """Logits like GPT-2's: far below zero, a few of them well above the rest."""
    return (np.random.default_rng(seed).standard_normal(size) * 3 - 70).astype(np.float32)


def token(logits: np.ndarray, wanted: Draw, position: int = 7) -> int | None:
    return draw_token(0, wanted, position, logits).token_id


def survivors(
    logits: np.ndarray, params: SamplingParams, wanted: Draw | None = None, num_points: int = 1_000
) -> set[int]:
    """Every id that some point of the distribution leads to, of those that are not too rare for so many points."""
    adjusted = sampling.adjusted(logits, wanted or Draw(params), 0)
    limits = (np.float32(params.temperature), params.top_k, params.top_p, params.min_p)
    points = np.concatenate([np.linspace(0, 1, num_points, endpoint=False), [np.nextafter(1, 0)]])
    return {int(draw(adjusted, *limits, point)) for point in points}


def theirs(logits: np.ndarray, params: SamplingParams, history: tuple[int, ...] = ()) -> torch.Tensor:
    """transformers' processors on the same logits: probabilities."""
    processors = transformers.LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    input_ids = torch.tensor([history], dtype=torch.long)
    return processors(input_ids, torch.from_numpy(logits.copy())[None])[0].double().softmax(0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=50, temperature=0.7),
        SamplingParams(top_p=0.1),
        SamplingParams(top_p=0.5, temperature=1.3),
        SamplingParams(top_p=0.9, temperature=0.5),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=0.3, temperature=0.8),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.1, temperature=0.9),
        SamplingParams(repetition_penalty=1.3, top_k=12),
        SamplingParams(repetition_penalty=0.8, top_p=0.6),
    ],
    ids=str,
)
@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_same_ids_survive_as_in_transformers(params: SamplingParams, seed: int) -> None:
    logits = scores(seed, 199)
    history = tuple(np.argsort(-logits)[:20:3].tolist())
    probabilities = theirs(logits, params, history)
    expected = {i for i, p in enumerate(probabilities.tolist()) if p > 0}
    wanted = a_draw(params, prompt_ids=history[:3], output_ids=history[3:])
    found = survivors(logits, params, wanted, 40_000)
    rare = {i for i in expected if probabilities[i] < 1e-4}  # narrower than the distance between two points
    assert expected - rare <= found <= expected


def test_points_of_the_distribution_are_in_id_order() -> None:
    logits = scores(0)
    limits = (np.float32(1), 0, 1.0, 0.0)
    cumulative = np.cumsum(theirs(logits, SamplingParams()).numpy())
    for where in np.linspace(0.001, 0.999, 101):
        assert draw(logits, *limits, where) == np.searchsorted(cumulative, where, side="right")


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.7, top_k=20), SamplingParams(top_p=0.9, min_p=0.02)],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws at the 0.1% level; the seed is fixed, so it either holds or not."""
    draws = 20_000
    logits = scores(5, 61)
    exact = theirs(logits, params).numpy()
    wanted = Draw(replace(params, seed=11))
    counts = np.bincount([token(logits, wanted, position) for position in range(draws)], minlength=61)
    assert counts[exact == 0].sum() == 0
    often = exact * draws >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(exact[often], exact[~often].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert statistic < limit
    skewed = np.append(counts[often][::-1], counts[~often].sum())[: len(expected)]
    assert ((skewed - expected) ** 2 / expected).sum() > limit, "the check itself cannot fail"


def test_a_draw_depends_on_seed_index_and_position_alone() -> None:
    points = {(s, i, p): uniform(s, i, p) for s in (0, 1, 2**64 - 1) for i in range(8) for p in range(200)}
    assert len(set(points.values())) == len(points)
    assert all(0 <= point < 1 for point in points.values())
    assert uniform(1, 2, 3) != uniform(3, 2, 1)
    assert uniform(7, 0, 5) == 0.0 + uniform(7, 0, 5)
    values = np.array(list(points.values()))
    assert abs(values.mean() - 0.5) < 0.02


def test_the_point_for_a_key_is_written_in_stone() -> None:
    """A resumed stream must draw what an older server would have drawn."""
    wanted = Draw(SamplingParams(seed=42, top_p=0.95))
    assert [token(scores(0), wanted, position) for position in range(5)] == [247, 603, 779, 219, 247]


def test_ties_go_to_the_lower_id() -> None:
    logits = np.full(100, -5, np.float32)
    logits[[17, 40, 90]] = 3
    assert token(logits, Draw(GREEDY)) == 17
    assert survivors(logits, SamplingParams(top_k=1)) == {17, 40, 90}
    assert survivors(logits, SamplingParams(top_p=0.3)) == {17}
    assert survivors(logits, SamplingParams(top_p=0.5)) == {17, 40}
    assert [i for i, _ in token_logprobs(logits, 17, 4).top] == [17, 40, 90, 0]


@pytest.mark.parametrize("held", [0, 1, 2, 3, 7, 64, 200])
def test_ids_are_ranked_as_by_a_stable_sort(held: int) -> None:
    scores_V = np.random.default_rng(held).integers(-3, 3, 300).astype(np.float32)  # most have equals
    ids = np.sort(np.random.default_rng(held).choice(300, held, replace=False))
    ranked = sort_by_score.py_func(scores_V, ids.copy(), held)[:held]
    assert ranked.tolist() == ids[np.argsort(-scores_V[ids], kind="stable")].tolist()


def test_top_p_looks_only_at_what_top_k_leaves() -> None:
    """It does so even if others have nearly the score of the k-th."""
    logits = np.full(400, -10, np.float32)
    logits[1:300] = 5 - np.arange(299, dtype=np.float32)[::-1] * 1e-5
    logits[0] = 5.2
    assert survivors(logits, SamplingParams(top_k=3)) == {0, 298, 299}
    assert survivors(logits, SamplingParams(top_k=3, top_p=0.9999)) == {0, 298, 299}
    assert survivors(logits, SamplingParams(top_k=3, top_p=0.5)) == {0, 299}


def test_bias_penalties_and_bans() -> None:
    logits = scores(3)
    first, second, third = np.argsort(-logits)[:3].tolist()
    gap = float(logits[first] - logits[second])
    assert token(logits, Draw(GREEDY)) == first
    assert token(logits, Draw(GREEDY, banned=(first,))) == second
    assert token(logits, Draw(GREEDY, banned=(first, second))) == third
    assert token(logits, a_draw(replace(GREEDY, logit_bias=((second, gap + 0.01),)))) == second
    assert token(logits, a_draw(replace(GREEDY, logit_bias=((second, gap - 0.01),)))) == first
    presence = replace(GREEDY, presence_penalty=gap + 0.01)
    assert token(logits, a_draw(presence, output_ids=(first,))) == second
    assert token(logits, a_draw(presence, prompt_ids=(first,))) == first, "the prompt is not penalised"
    frequency = replace(GREEDY, frequency_penalty=gap / 2 + 0.01)
    assert token(logits, a_draw(frequency, output_ids=(first,))) == first
    assert token(logits, a_draw(frequency, output_ids=(first, 5, first))) == second
    repetition = replace(GREEDY, repetition_penalty=1.5)
    assert token(logits, a_draw(repetition, prompt_ids=(first,))) == second
    assert (logits == scores(3)).all(), "the logits are not ours to change"


def test_banned_ids_are_banned_at_every_position_before_the_bound_and_at_no_other() -> None:
    """What the CPU draws, and what a GPU is told."""
    logits = scores(3)
    first, second = np.argsort(-logits)[:2].tolist()
    wanted = Draw(GREEDY, banned=(first,), banned_before=7)
    assert [token(logits, wanted, position) for position in range(5, 9)] == [second, second, first, first]
    rows = [ReadRow(0, wanted, position) for position in range(5, 9)]
    assert Draws.from_rows(rows, VOCABULARY).adjustments["adjusted_rows"].tolist() == [0, 1]


@pytest.mark.parametrize("num_allowed", [1, 5, VOCABULARY // 9, VOCABULARY // 3, VOCABULARY - 2, VOCABULARY])
def test_a_mask_leaves_what_transformers_leaves_without_the_other_ids(num_allowed: int) -> None:
    """Equal to a ban of all other ids, with and without options, and where the mask ends early."""
    logits, chance = scores(5), np.random.default_rng(num_allowed)
    every = [
        GREEDY,
        SamplingParams(seed=3, temperature=1.5, top_k=20, top_p=0.9),
        SamplingParams(seed=4, top_p=0.5, min_p=0.01),
        SamplingParams(seed=5, top_k=VOCABULARY - 1),
        SamplingParams(seed=6),
    ]
    for number, params in enumerate(every * 8):
        bound = max(num_allowed, 8) if number % 3 == 0 else VOCABULARY
        allowed = chance.choice(bound, num_allowed, replace=False).tolist()
        banned = tuple(set(range(VOCABULARY)).difference(allowed))
        found = token(logits, Draw(params, mask=packed_mask(allowed, bound)), number)
        assert found == token(logits, Draw(params, banned=banned), number)
        assert found in allowed
    assert token(logits, Draw(GREEDY, mask=b"")) is None
    assert token(logits, Draw(SamplingParams(), mask=bytes(200))) is None


@pytest.mark.parametrize("first", [0, 3, 8, 500])
def test_masks_are_read_from_any_id_on(first: int) -> None:
    """A tensor rank has the scores of its own ids."""
    chance = np.random.default_rng(first)
    for size in (1, 7, 8, 9, 300, 509):
        allowed = np.flatnonzero(chance.random(VOCABULARY) < 0.5)
        mask_B = np.frombuffer(packed_mask(allowed.tolist(), VOCABULARY), np.uint8)
        here = allowed[(allowed >= first) & (allowed < first + size)]
        assert allowed_ids(mask_B, first, first + size).tolist() == here.tolist()
        masked = np.zeros(size, np.float32)
        forbid(masked, mask_B, first)
        assert np.flatnonzero(masked == 0).tolist() == (here - first).tolist()
        assert num_allowed(mask_B) == len(allowed)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 1000, 1008])
def test_logits_that_are_not_finite_draw_nothing(wrong: float, at: int) -> None:
    logits = scores(0)
    assert is_finite(logits)
    logits[at] = wrong
    assert not is_finite(logits)
    assert token(logits, Draw(GREEDY)) is None
    assert token(logits, Draw(SamplingParams())) is None


def test_extremes_draw_something() -> None:
    logits = scores(0)
    best = int(logits.argmax())
    for params in (
        SamplingParams(temperature=1e-30),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1, top_p=0.001, min_p=0.999),
        SamplingParams(logit_bias=((best, 1e30),)),
    ):
        assert token(logits, a_draw(params)) == best
    assert token(logits, Draw(SamplingParams(temperature=1e30))) is not None
    assert token(logits, Draw(SamplingParams(top_k=10**9))) is not None
    assert token(np.zeros(1, np.float32), Draw(SamplingParams(top_p=0.5, top_k=3))) == 0
    assert token(logits, Draw(SamplingParams(), banned=tuple(range(VOCABULARY)))) is None


def test_a_penalty_leaves_huge_scores_finite() -> None:
    logits = scores(0)
    logits[[5, 9]] = 1e38, -1e38
    for penalty in (0.01, 10):
        for params in (GREEDY, SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)):
            wanted = a_draw(replace(params, repetition_penalty=penalty), prompt_ids=(5, 9))
            assert token(logits, wanted) == 5
            assert is_finite(sampling.adjusted(logits, wanted, 0))


def test_logprobs_are_those_of_the_model() -> None:
    logits = scores(1)
    exact = torch.from_numpy(logits).double().log_softmax(0)
    found = draw_token(0, a_draw(replace(GREEDY, logit_bias=((9, 100.0),)), num_logprobs=5), 3, logits)
    assert found.token_id == 9
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(exact[9]), abs=1e-5)
    ids, values = zip(*found.logprobs.top, strict=True)
    assert list(ids) == torch.topk(exact, 5).indices.tolist()
    assert values == pytest.approx(torch.topk(exact, 5).values.tolist(), abs=1e-5)
    assert draw_token(0, Draw(GREEDY), 3, logits).logprobs is None
    only = draw_token(0, Draw(GREEDY, num_logprobs=0), 3, logits).logprobs
    assert only is not None
    assert only.top == ()
    assert len(token_logprobs(logits, 0, 5000).top) == VOCABULARY


def test_scored_prompts_are_the_references() -> None:
    checkpoint = RandomCheckpoint(architecture())
    ids = prompt(90)
    exact = Reference(checkpoint).logits(ids).double().log_softmax(-1)
    pipeline = Pipeline(checkpoint, "1,1")
    whole = pipeline.slice(0, ids, 0, Draw(GREEDY), targets=ids[1:], num_prompt_logprobs=2)
    _, drawn, scored = pipeline.step([whole])
    assert drawn[0].token_id == int(exact[-1].argmax())
    assert [s.logprob for s in scored[0].logprobs] == pytest.approx(
        [float(exact[i, target]) for i, target in enumerate(ids[1:])], abs=1e-4
    )
    for row, one in zip(exact, scored[0].logprobs, strict=False):
        assert [i for i, _ in one.top] == row.topk(2).indices.tolist()
    wanted = [Draw(SamplingParams(seed=s), num_logprobs=1) for s in range(4)]
    others = [pipeline.slice(s, prompt(3 + s, s), 0, wanted[s]) for s in (1, 2, 3)]
    first = pipeline.slice(4, ids[:50], 0, targets=ids[1:51], num_prompt_logprobs=2)
    _, drawn, head = pipeline.step([others[0], first, *others[1:]])
    assert [d.sequence_id for d in drawn] == [1, 2, 3]
    _, _, tail = pipeline.step([pipeline.slice(4, ids[50:], 50, targets=ids[51:], num_prompt_logprobs=2)])
    assert head[0].logprobs + tail[0].logprobs == scored[0].logprobs, "bit for bit, chunked and among others"
