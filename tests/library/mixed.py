"""Requests with every option, sent to pipelines of the built-in model, and the comparison of what they answer."""

from __future__ import annotations

import random
from typing import Any

from ppserve import Completion, Pipeline

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
    """Requests with every option that changes what is drawn or told, in all combinations that chance makes."""
    chance = random.Random(7)
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        options: dict[str, Any] = {"seed": number, "max_tokens": chance.randrange(1, 40)}
        choices: tuple[dict[str, Any], ...] = (
            {"temperature": 0},
            {"temperature": 0.7, "top_k": 20},
            {"top_p": 0.9, "min_p": 0.02},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.1},
            {"logit_bias": {number % 500: 5.0, 13: -100.0}},
            {"stop": [".", "the"], "include_stop": bool(number % 2)},
            {"n": 3},
            {"logprobs": 3, "prompt_logprobs": 2},
            {"min_tokens": 5, "ignore_eos": True},
            {"echo": True, "token_ids": True},
        )
        for choice in chance.sample(choices, 3):
            options |= choice
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
        requests.append((chance.choice(PROMPTS) * chance.randrange(1, 4), options))
    return requests


def together(pipeline: Pipeline, requests: list[tuple[str, dict[str, Any]]]) -> list[Completion]:
    """All at once: every request has been submitted before the first is read."""
    streams = [pipeline.generate(prompt, **options) for prompt, options in requests]
    return [stream.completions()[0] for stream in streams]


def assert_same(one: Completion, other: Completion) -> None:
    """Tokens, text and log-probabilities, bit for bit."""
    assert [s.finish for s in one.sequences] == [s.finish for s in other.sequences]
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        assert (ours.text, ours.tokens, ours.prompt_tokens) == (theirs.text, theirs.tokens, theirs.prompt_tokens)
