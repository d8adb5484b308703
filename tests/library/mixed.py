"""Requests with every option, sent to pipelines of the built-in model, and the comparison of what they answer."""

from __future__ import annotations

from typing import Any

from ppserve import Completion, Pipeline
from tests.e2e.asking import options_of, requests_with_everything

PROMPTS = (
    "Once upon a time",
    "The miller",
    "One cold morning",
    "I like trains",
    "Every Sunday Ben went to the market",
)


def tiny(stages: int = 1, **settings: Any) -> Pipeline:
    return Pipeline("tiny", stages, **{"dtype": "float32", "threads": 1, "max_model_len": 256, **settings})


def mixed_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    return [(request.text, options_of(request)) for request in requests_with_everything(count, seed=7)]


def together(pipeline: Pipeline, requests: list[tuple[str, dict[str, Any]]]) -> list[Completion]:
    """All at once: every request has been submitted before the first is read."""
    streams = [pipeline.stream(prompt, **options) for prompt, options in requests]
    return [stream.completions()[0] for stream in streams]


def assert_same(one: Completion, other: Completion) -> None:
    """Tokens, text and log-probabilities, bit for bit."""
    assert [s.finish for s in one.sequences] == [s.finish for s in other.sequences]
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        assert (ours.text, ours.tokens, ours.prompt_tokens) == (theirs.text, theirs.tokens, theirs.prompt_tokens)
