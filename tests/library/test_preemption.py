"""A light caller takes a place of a greedy one, whose answer goes on later with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from ppserve import Pipeline
from tests.library.mixed import assert_same, generate_as, intake_of, tiny

GREEDY: list[dict[str, Any]] = [
    {"logprobs": 2, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"logprobs": 1, "prompt_logprobs": 1, "logit_bias": {13: -100.0, 40: 3.0}},
    {"logprobs": 1, "temperature": 0},
    {"logprobs": 1, "n": 2, "top_p": 0.9},
]
NUM_PLACES = 5


def num_preempted(pipeline: Pipeline) -> int:
    """Of the requests that are not over."""
    return sum(group.num_preempted for group in list(intake_of(pipeline).groups.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "speculate"), [(1, 0), (2, 0), (2, 2)])
def test_whoever_is_displaced_gets_the_tokens_that_it_gets_alone(stages: int, speculate: int) -> None:
    """Tokens, text and log-probabilities, bit for bit, of the preempted and of those who preempt."""
    prompts = [f"Once upon a time there were {number} boats" for number in range(len(GREEDY))]
    asked = [{"max_tokens": 150, "ignore_eos": True, "seed": number, **one} for number, one in enumerate(GREEDY)]
    light = {"max_tokens": 3, "ignore_eos": True, "logprobs": 1}
    most = 0
    with tiny(stages, speculate=speculate, max_num_seqs=NUM_PLACES) as pipeline:
        alone = [pipeline.complete(prompt, **options) for prompt, options in zip(prompts, asked, strict=True)]
        alone_light = pipeline.complete("The miller", seed=1, **light)
        streams = [generate_as("greedy", pipeline, *one[:1], **one[1]) for one in zip(prompts, asked, strict=True)]
        begun = [[next(stream)] for stream in streams]
        for number in range(12):
            (told,) = generate_as(f"light {number}", pipeline, "The miller", seed=1, **light).completions()
            assert_same(told, alone_light)
            most = max(most, num_preempted(pipeline))
        for chunks, stream, whole in zip(begun, streams, alone, strict=True):
            chunks += list(stream)
            for answer in whole.sequences:
                own = [chunk for chunk in chunks if chunk.index == answer.index]
                assert "".join(chunk.text for chunk in own) == answer.text
                assert tuple(token for chunk in own for token in chunk.tokens) == answer.tokens
    assert most > 1
