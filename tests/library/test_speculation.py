"""Draft tokens over real stages: whatever is drafted, every answer stays as it is without draft tokens, bit for
bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from ppserve import Completion, Pipeline
from ppserve.core.request import Request
from ppserve.core.scheduling.drafter import Drafter, DraftToken
from ppserve.errors import ConfigError
from tests.library.mixed import (
    PROMPTS,
    assert_same,
    generate_as,
    guesses_of,
    intake_of,
    mixed_requests,
    tiny,
    together,
)
from tools.make_random_gpt2 import Shape, write_checkpoint

pytestmark = pytest.mark.slow

COUNT = 12
VOCABULARY = 1280


class Fixed:
    """Draft tokens a token that a function of the place in the answer names."""

    def __init__(self, token_at: Callable[[int], int | None], first: int) -> None:
        self._token_at, self._first = token_at, first

    def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> DraftToken | None:
        token_id = self._token_at(len(token_ids) + len(draft_tokens) - self._first)
        return None if token_id is None else DraftToken(token_id, 0.9)


@pytest.fixture(scope="module")
def plain() -> Iterator[Pipeline]:
    with tiny(speculate=0) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def alone(plain: Pipeline) -> list[Completion]:
    return [plain.complete(prompt, **options) for prompt, options in requests()]


def requests() -> list[tuple[str, dict]]:
    """The mixed ones, which tell the ids of their tokens, so that a drafter can know them."""
    return [(prompt, options | {"token_ids": True}) for prompt, options in mixed_requests(COUNT)]


def answers(alone: list[Completion]) -> dict[tuple[int, int], list[int]]:
    """The tokens of each answer, by the request's seed and the sequence's index."""
    return {
        (number, s.index): [token.id for token in s.tokens]
        for number, completion in enumerate(alone)
        for s in completion.sequences
    }


@pytest.mark.parametrize("drafter", ["wrong", "random", "mixed", "own"])
@pytest.mark.parametrize(("stages", "draft_tokens"), [(1, 3), (2, 1), (4, 5)])
def test_no_guess_changes_an_answer(drafter: str, stages: int, draft_tokens: int, alone: list[Completion]) -> None:
    known, chance = answers(alone), random.Random(stages)

    def new_drafter(request: Request, index: int) -> Drafter:
        answer = known[request.sampling.seed, index]

        def token_at(place: int) -> int | None:
            right = answer[place] if place < len(answer) else 0
            if drafter == "random":
                return chance.choice((None, chance.randrange(VOCABULARY)))
            is_right = drafter == "mixed" and chance.random() < 0.8
            return right if is_right else (right + 1) % VOCABULARY

        return Fixed(token_at, len(request.prompt_ids))

    own = {} if drafter == "own" else {"new_drafter": new_drafter}
    with tiny(stages, speculate=draft_tokens, **own) as pipeline:
        for drafted, plain in zip(together(pipeline, requests()), alone, strict=True):
            assert_same(drafted, plain)
        # A lone caller leaves gaps, but for its only stage. On a busy machine not each draft token meets one, and
        # prompt lookup has few for these texts.
        for number, (prompt, options) in enumerate(4 * requests()):
            assert_same(pipeline.complete(prompt, **options), alone[number % len(alone)])
            filled = [stage.times.busy_ns["speculative"] > 0 for stage in pipeline.ledger().stages]
            if number >= 2 and (drafter == "own" or all(filled) == (stages > 1)):
                break
        assert drafter == "own" or all(filled) == (stages > 1)


def test_a_draft_model_changes_no_answer(alone: list[Completion]) -> None:
    """With the model itself as draft model, every draft token that it makes is right: the draws are the same."""
    with tiny(2, speculate=3, draft_model="builtin") as pipeline:
        for drafted, plain in zip(together(pipeline, requests()), alone, strict=True):
            assert_same(drafted, plain)
        assert guesses_of(pipeline)["accepted"] > 0


def test_a_first_token_does_not_wait_for_a_guess() -> None:
    read, was_read = threading.Event(), []

    class Late:
        def draft_token(self, token_ids: Seq[int], draft_tokens: Seq[int]) -> None:
            was_read.append(read.wait(20))

    with tiny(1, speculate=3, new_drafter=lambda *_: Late()) as pipeline:
        for _ in pipeline.generate("Once upon a time", max_tokens=4, ignore_eos=True):
            read.set()
    assert was_read
    assert all(was_read)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Shape(num_layers=1, width=16, num_heads=1, max_positions=32, vocab_size=300))
    with pytest.raises(ConfigError, match=r"--draft-model: knows 300 tokens, and the model 1280"):
        tiny(2, speculate=3, draft_model=str(tmp_path))


def test_a_draft_model_without_guesses_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model: needs speculate"):
        tiny(2, draft_model="builtin")


def test_what_lies_behind_a_stop_string_is_charged_to_nobody(plain: Pipeline) -> None:
    """All tokens but the first come in one step, whose last one ends the answer too."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "token_ids": True}
    (whole,) = plain.complete(PROMPTS[0], **options).sequences
    answer, stop = [token.id for token in whole.tokens], whole.text.split()[2]

    def right(request: Request, _index: int) -> Drafter:
        return Fixed(lambda place: answer[place] if place < len(answer) else None, len(request.prompt_ids))

    with tiny(1, speculate=7, new_drafter=right) as pipeline:
        stream = generate_as("c", pipeline, PROMPTS[0], stop=[stop], **options)
        (stopped,) = stream.completions()[0].sequences
        assert guesses_of(pipeline)["accepted"] == 8 - 2, "of the second to the eighth token, all but the first"
        assert 1 < len(stopped.tokens) < 8
        assert pipeline._tokenizer is not None
        prompt_ids = pipeline._tokenizer.encode(PROMPTS[0])
        assert intake_of(pipeline).queue.served("c") == len(prompt_ids) + len(stopped.tokens)


def test_tensor_ranks_guess_as_well(alone: list[Completion]) -> None:
    with tiny(2, speculate=4, tensor_parallel=2) as pipeline:
        for number, (prompt, options) in enumerate(requests()[:4]):
            assert_same(pipeline.complete(prompt, **options), alone[number])
        assert sum(guesses_of(pipeline).values()) > 0


def test_a_drafter_that_declines_costs_no_step(alone: list[Completion]) -> None:
    declines = Fixed(lambda _place: None, 0)
    with tiny(2, speculate=4, new_drafter=lambda _request, _index: declines) as pipeline:
        prompt, options = requests()[0]
        assert pipeline.complete(prompt, **options).sequences == alone[0].sequences
        assert all(stage.times.busy_ns["speculative"] == 0 for stage in pipeline.ledger().stages)
        assert all(stage.wasted_s == 0 for stage in pipeline.ledger().stages)
