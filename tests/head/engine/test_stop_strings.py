"""Stop strings of several answers, also where a step brings several tokens: those after the end are no one's.

The oracle cuts the whole text of an answer that was generated without them. The rank draws scripted texts that
repeat themselves, so draft tokens are right often.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ppserve.core.request import FinishReason, Request, SamplingParams, StopConditions
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from tests.core.scheduling.invariants import check_scheduler
from tests.head.engine.replica_rig import EngineRig, Reader

ALPHABET = "abc"


class Letters:
    """A tokenizer with a letter for each token."""

    def text_bytes(self, token_id: int) -> bytes:
        return bytes([token_id + ord("a")])


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) - ord("a") for letter in text)


@dataclass(frozen=True)
class Answer:
    """What the caller gets of one answer."""

    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    matched: str | None = None

    @classmethod
    def expected(cls, whole: str, stop: StopConditions) -> Answer:
        """The first `min_tokens` letters are not searched. The string that is complete first ends the answer, the
        longest of several."""
        whole, least = whole[: stop.max_tokens], stop.min_tokens
        found = [each for each in stop.stop if each in whole[least:]]
        ends = [(whole.find(each, least) + len(each), -len(each), each) for each in found]
        if not ends:
            return cls(ids_of(whole), whole, FinishReason.MAX_TOKENS)
        end, _, matched = min(ends)
        text = whole[: end if stop.include_stop else end - len(matched)]
        return cls(ids_of(whole[:end]), text, FinishReason.STOP_STRING, matched)

    @classmethod
    def heard(cls, outputs: list[TokenOutput]) -> Answer:
        """Its tokens are numbered, and nothing follows its end."""
        token_ids = tuple(output.token_id for output in outputs if output.token_id is not None)
        assert [output.offset for output in outputs] == list(range(len(outputs)))
        assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        finish, matched = outputs[-1].finish, outputs[-1].matched
        assert finish is not None
        assert not isinstance(matched, int)
        return cls(token_ids, "".join(output.text for output in outputs), finish, matched)


class ScriptedRank:
    """One rank that draws, for each answer of a request, the letters of its script."""

    def __init__(self, speculate: int) -> None:
        self.rig = EngineRig("", speculate=speculate, runs_ahead=speculate == 0)

    def answers(self, request: Request, scripts: list[str]) -> list[Answer]:
        """What the caller gets, once every answer has ended."""
        reader = Reader()
        queued = self.rig.engine.submit(OpenRequest(request, reader.push, Letters()))  # type: ignore[arg-type]
        self.rig.engine.turn()
        queued.result(0)
        scheduler, first = self.rig.replica.scheduler, len(request.prompt_ids)
        assert scheduler is not None
        (stage,) = self.rig.stages
        stage.draw_token = lambda _, position, draw: ids_of(scripts[draw.index] + "a")[position - first]
        while self.rig.compute_next():
            check_scheduler(scheduler, self.rig.request_queue)
            ended = {output.index for output in reader.outputs if output.finish is not None}
            assert ended.isdisjoint(s.index for s in scheduler._running.values()), "nobody reads what it computes"
        heard: dict[int, list[TokenOutput]] = {}
        for output in reader.outputs:
            heard.setdefault(output.index, []).append(output)
        return [Answer.heard(heard[index]) for index in range(len(scripts))]

    @property
    def num_accepted(self) -> int:
        scheduler = self.rig.replica.scheduler
        assert scheduler is not None
        return scheduler.num_draft_tokens["accepted"]


def repeating(chance: random.Random) -> str:
    """Two letters or three over and over, with a few others between them."""
    part = "".join(chance.choices(ALPHABET, k=chance.choice((2, 3))))
    letters = list(part * 10)
    for _ in range(chance.randrange(4)):
        letters[chance.randrange(len(letters))] = chance.choice(ALPHABET)
    return "".join(letters[:20])


@pytest.mark.parametrize("speculate", [0, 1, 4])
def test_each_answer_ends_at_its_own_first_stop_string(speculate: int) -> None:
    chance, rank, reasons = random.Random(speculate), ScriptedRank(speculate), set()
    for number in range(60):
        scripts = [repeating(chance) for _ in range(chance.choice((1, 2, 3)))]
        stop = StopConditions(
            max_tokens=20,
            min_tokens=chance.choice((0, 0, 5)),
            stop=tuple("".join(chance.choices(ALPHABET, k=chance.choice((1, 2, 3, 4)))) for _ in range(2)),
            ignore_eos=True,
            include_stop=chance.random() < 0.5,
        )
        prompt = ids_of(scripts[0][:6])
        request = Request(f"r{number}", prompt, stop, SamplingParams(), num_sequences=len(scripts))
        expected = [Answer.expected(script, stop) for script in scripts]
        assert rank.answers(request, scripts) == expected, (scripts, stop)
        reasons.add(frozenset(answer.finish for answer in expected))
    assert len(reasons) == 3, "answers of one request end by strings, by length, and by both"
    assert (rank.num_accepted > 100) == (speculate > 0)


def test_tokens_of_a_step_after_the_stop_string_are_not_told() -> None:
    """All four draft tokens are right; the second completes the string. The other answer goes on."""
    rank, script = ScriptedRank(4), "abcabcabcabcabcabcab"
    stop = StopConditions(20, stop=("cab",), ignore_eos=True)
    request = Request("r", ids_of("abcabcabc"), stop, SamplingParams(), num_sequences=2)
    first, second = rank.answers(request, [script, "b" * 20])
    assert (first.text, first.token_ids, first.matched) == ("ab", ids_of("abcab"), "cab")
    assert second == Answer(ids_of("b" * 20), "b" * 20, FinishReason.MAX_TOKENS)
    assert rank.num_accepted > 4
    assert rank.answers(replace(request, id="again"), [script, script]) == [first, first]
