"""The step of an expected load: tokens of prompts and answers in their ratio."""

from __future__ import annotations

import pytest

from ppserve.core.partition import ExpectedWorkload


@pytest.mark.parametrize(
    ("workload", "decodes", "prompts"),
    [
        (ExpectedWorkload(128, 128), 16, [(56, 16)]),
        (ExpectedWorkload(128, 64), 16, [(48, 32)]),
        (ExpectedWorkload(8, 128), 16, [(3, 1)]),
        (ExpectedWorkload(1, 256), 16, []),
        (ExpectedWorkload(32, 4), 16, [(0, 32)] * 4),
        (ExpectedWorkload(512, 16), 4, [(192, 128)]),
        (ExpectedWorkload(4000, 1), 1, [(447, 128)]),
    ],
)
def test_a_step_has_tokens_of_prompts_and_answers_in_their_ratio(
    workload: ExpectedWorkload, decodes: int, prompts: list[tuple[int, int]]
) -> None:
    """Requests come as fast as they end. A step has a limit."""
    step = workload.step(1024)
    found = [(s.start, len(s.token_ids)) for s in step.plan.slices]
    context = min(workload.prompt + workload.new // 2, 1023)
    assert found == [(context, 1)] * decodes + prompts
    # Of a prompt of 1023 and one token, 128 prompt tokens come with an eighth of a decode.
    assert step.new_tokens == pytest.approx(0.125 if workload.new == 1 else decodes, rel=0.01)
    draws = decodes + sum(num_tokens == 1 for _, num_tokens in prompts)
    assert step.drawn_share == pytest.approx(step.new_tokens / draws)
    assert all(s.start + len(s.token_ids) <= 16 * len(s.block_table) for s in step.plan.slices)
    least = workload.step(1)  # of a model of one position
    assert {(s.start, len(s.token_ids)) for s in least.plan.slices} == {(0, 1)}


@pytest.mark.parametrize(
    ("world", "tensor", "callers", "decodes"), [(4, 1, 16, 4), (4, 2, 16, 8), (4, 4, 16, 16), (4, 1, 1, 1)]
)
def test_callers_are_divided_among_replicas_and_microbatches(
    world: int, tensor: int, callers: int, decodes: int
) -> None:
    assert ExpectedWorkload(8, 8, callers).decodes(world, tensor) == decodes
