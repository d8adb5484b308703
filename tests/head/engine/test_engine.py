"""The engine with toy ranks in one process: messages in, plans and outputs out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppserve import wire
from ppserve.core.ledger.steps import Step
from ppserve.core.request import FinishReason, Request, SamplingParams, StopConditions
from ppserve.errors import Draining, InvalidRequest, Overloaded, RequestError, StagesLost
from ppserve.head.engine.observer import Observer
from ppserve.head.engine.streams import OpenRequest, TokenOutput
from ppserve.process.environment import EXIT_FAILED
from tests.core.scheduling.rig import prompt_of
from tests.core.toy_pipeline import expected_answer
from tests.head.engine.toy_ranks import WITHIN_S, Reader, Running, running


def a_request(name: str, num_prompt: int = 9, max_tokens: int = 12, seed: int = 0) -> Request:
    stop = StopConditions(max_tokens, ignore_eos=True)
    return Request(name, prompt_of(num_prompt, len(name) + seed), stop, SamplingParams(seed=seed))


def tokens(outputs: list[TokenOutput]) -> tuple[int, ...]:
    return tuple(output.token_id for output in outputs if output.token_id is not None)


class Notes(Observer):
    """What the engine told its observers. did: plans and tokens, in order. in_flight: with each load."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.did: list[str] = []
        self.in_flight: list[int] = []

    def on_stage_died(self, replica: int, stage: int, cause: str) -> None:
        self.said.append(f"{stage} {cause}")

    def on_refused(self, error: RequestError) -> None:
        self.said.append(error.reason)

    def on_step_sent(self, replica: int, step: Step) -> None:
        self.did.append("plan")

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self.did.append("token")

    def on_load(self, replica: int, running: int, waiting: int, in_flight: int, kv_usage: float) -> None:
        self.in_flight.append(in_flight)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_streams_hear_their_own_answers_and_one_end_each(num_stages: int) -> None:
    with running(num_stages) as run:
        requests = [a_request(f"r{i}", 5 + i, 10, seed=i) for i in range(12)]
        readers = [run.submit(request) for request in requests]
        for request, reader in zip(requests, readers, strict=True):
            outputs = reader.rest()
            assert tokens(outputs) == expected_answer(request).token_ids
            assert [o.finish for o in outputs if o.finish] == [FinishReason.MAX_TOKENS]
            assert outputs[-1].timings is not None
        assert max(plan.slot for plan in run.stages.plans) == num_stages - 1, "as many slots as stages were used"


def test_a_token_becomes_text_while_the_next_step_is_computed_unless_its_text_may_end_the_answer() -> None:
    request = a_request("a", max_tokens=4)
    for stop, did in ((), "plan plan token plan token plan token token"), (("x",), "plan token " * 4):
        notes = Notes()
        with running(1, notes) as run:
            run.submit(replace(request, stop=replace(request.stop, stop=stop))).rest()
        assert notes.did == did.split()


def test_a_refused_request_is_told_why_and_leaves_nothing() -> None:
    notes = Notes()
    with running(2, notes, max_queue=1, max_num_seqs=1) as run:
        with pytest.raises(InvalidRequest, match="500 tokens"):
            run.submit(a_request("long", num_prompt=500))
        run.stages.hold.clear()
        first, waiting = run.submit(a_request("a")), run.submit(a_request("b"))
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            run.submit(a_request("c"))
        with pytest.raises(InvalidRequest, match="in use"):
            run.submit(a_request("a"))
        run.stages.hold.set()
        assert first.rest()[-1].finish is waiting.rest()[-1].finish is FinishReason.MAX_TOKENS
        run.engine.snapshot()
        assert notes.said == ["INVALID_REQUEST", "QUEUE_FULL", "INVALID_REQUEST"]


def test_a_cancelled_request_ends_now_although_its_step_is_under_way() -> None:
    with running() as run:
        run.stages.hold.clear()
        reader = run.submit(a_request("a"))
        run.engine.cancel("a", FinishReason.CANCELLED)
        run.engine.cancel("nobody", FinishReason.CANCELLED)
        assert [output.finish for output in reader.rest()] == [FinishReason.CANCELLED]
        run.stages.hold.set()
        assert tokens(run.submit(a_request("b")).rest()) == expected_answer(a_request("b")).token_ids


def test_streams_go_on_with_the_same_tokens_after_a_stage_was_lost() -> None:
    notes = Notes()
    with running(3, notes) as run:
        readers = {f"r{i}": run.submit(a_request(f"r{i}", seed=i, max_tokens=30)) for i in range(6)}
        heard = {name: [reader.next()] for name, reader in readers.items()}
        lose(run, 1)
        for i, (name, reader) in enumerate(readers.items()):
            outputs = heard[name] + reader.rest()
            assert tokens(outputs) == expected_answer(a_request(name, seed=i, max_tokens=30)).token_ids
            assert [output.offset for output in outputs if output.token_id is not None] == list(range(30))
        assert notes.said == ["1 exit"]
        assert run.engine.snapshot()[0].epoch == 2
        assert [stage.ranks[0].restarts for stage in run.engine.snapshot()[0].stages] == [0, 1, 0]


def lose(run: Running, rank: int) -> None:
    """The rank's process dies, and another takes its place."""
    run.stages.die(rank)
    run.stages.greet(rank)


def test_a_pipeline_that_is_hopeless_ends_every_stream_with_a_status() -> None:
    with running() as run:
        run.stages.hold.clear()
        readers = [run.submit(a_request(name)) for name in "ab"]
        run.stages.links[1].send(wire.Failed("out of memory"))
        assert run.engine.failed.result(WITHIN_S).reason == "out of memory"
        run.stages.hold.set()
        for reader in readers:
            assert isinstance(reader.rest()[-1].error, StagesLost)
        run.engine.join(WITHIN_S)
        run.stages.join()
        assert set(run.stages.shutdown_codes.values()) == {EXIT_FAILED}
        with pytest.raises(Draining):
            run.submit(a_request("late"))
        with pytest.raises(Draining):
            run.engine.snapshot()


def test_stopping_shuts_every_stage_down_and_refuses_what_comes_later() -> None:
    with running(2) as run:
        run.engine.stop()
        run.engine.join(WITHIN_S)
        run.stages.join()
        assert run.stages.shutdown_codes == {0: 0, 1: 0}
        with pytest.raises(Draining):
            run.submit(a_request("late"))


def test_a_reading_is_of_one_moment_and_its_times_sum_to_the_wall() -> None:
    with running(2) as run:
        (before,) = run.engine.snapshot()
        run.submit(a_request("a")).rest()
        (after,) = run.engine.snapshot()
        for early, late in zip(before.stages, after.stages, strict=True):
            assert late.times.wall_ns - early.times.wall_ns == after.now_ns - before.now_ns
            assert sum(late.times.busy_ns.values()) > sum(early.times.busy_ns.values()) == 0
            assert late.steps == len(run.stages.plans)
        assert (after.num_blocks, after.microbatches, after.epoch) == (64, 2, 1)


def test_a_plan_of_a_lost_epoch_never_reaches_the_next_one() -> None:
    with running(2) as run:
        run.stages.hold.clear()
        reader = run.submit(a_request("a", max_tokens=20))
        lose(run, 0)
        run.stages.hold.set()
        assert tokens(reader.rest()) == expected_answer(a_request("a", max_tokens=20)).token_ids
        assert {epoch for epoch, _ in run.stages.arrived} == {1, 2}
        assert all(epoch == newest for epoch, newest in run.stages.arrived)


def test_a_caller_that_leaves_before_it_is_queued_harms_nobody() -> None:
    with running(2) as run:
        leaving = run.engine.submit(OpenRequest(a_request("a"), Reader()))
        leaving.cancel()
        run.engine.cancel("a", FinishReason.CANCELLED)
        assert tokens(run.submit(a_request("b")).rest()) == expected_answer(a_request("b")).token_ids
        assert not run.engine.failed.done()


def test_a_request_that_nobody_foresaw_fails_alone() -> None:
    strange = replace(a_request("a"), stop=None)  # type: ignore[arg-type]
    with running(2) as run:
        with pytest.raises(AttributeError):
            run.submit(strange)
        assert tokens(run.submit(a_request("b")).rest()) == expected_answer(a_request("b")).token_ids


def test_the_load_is_told_while_the_pipeline_is_lost() -> None:
    notes = Notes()
    with running(2, notes) as run:
        run.stages.hold.clear()
        reader = run.submit(a_request("a"))
        run.stages.links[1].hang_up("exit")
        run.engine.snapshot()
        seen = len(notes.in_flight)
        run.engine.snapshot()
        run.engine.snapshot()
        assert notes.in_flight[seen:], "nothing was told during the loss"
        assert notes.in_flight[-1] == 0, "what was in flight is lost"
        run.stages.hold.set()
        run.stages.greet(1)
        assert tokens(reader.rest()) == expected_answer(a_request("a")).token_ids
