"""The engine: messages in, plans and outputs out, and what becomes of calls, replicas and streams at an end.

Time and ranks are scripted. `test_histories` has the answers; the library's tests have the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ppserve import wire
from ppserve.core.grid import RankGrid
from ppserve.core.ledger.steps import Step
from ppserve.core.plan import Drawn, StepResult, StepStamps
from ppserve.core.request import FinishReason, Request, SamplingParams, StopConditions
from ppserve.core.sampling_state import SamplingDecoder
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.errors import Draining, InvalidRequest, Overloaded, RequestError, StagesLost
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica, StepObserver
from ppserve.head.engine.streams import OpenRequest, RequestObserver, TokenOutput
from ppserve.process.environment import EXIT_FAILED
from ppserve.tokenizer import no_tokenizer
from tests.core.scheduling.rig import prompt_of
from tests.head.engine.scripted import ARCH, NUM_BLOCKS, SECOND, ScriptedControl, decision
from tests.hellos import hello as hello_of

LOADED = wire.Loaded("cpu", 1, 1, 10, 10 * NUM_BLOCKS, "")
STAMPS = StepStamps(*[SECOND] * 6)


def a_request(name: str, num_prompt: int = 9, max_tokens: int = 4) -> Request:
    return Request(
        name, prompt_of(num_prompt, len(name)), StopConditions(max_tokens, ignore_eos=True), SamplingParams()
    )


class Reader:
    """A sink that keeps its outputs."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        self.outputs += outputs

    @property
    def finish(self) -> FinishReason | None:
        """None while it has not ended."""
        return self.outputs[-1].finish if self.outputs else None


class Notes(RequestObserver, StepObserver):
    """What the engine told its observers. did: plans and tokens, in order. in_flight: with each load."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.did: list[str] = []
        self.in_flight: list[int] = []

    def on_refused(self, error: RequestError) -> None:
        self.refused.append(error.reason)

    def on_step_sent(self, replica: int, step: Step) -> None:
        self.did.append("plan")

    def on_output(self, opened: OpenRequest, output: TokenOutput, now_s: float) -> None:
        self.did.append("token")

    def on_load(self, replica: int, scheduler: Scheduler, in_flight: int) -> None:
        self.in_flight.append(in_flight)


class Rig:
    """An engine of replicas of one rank each, which compute when the test says so."""

    def __init__(self, num_replicas: int = 1, **config: object) -> None:
        self.control, self.notes, queue = ScriptedControl(), Notes(), RequestQueue()
        self._grid, self._draws, self._num_computed = RankGrid(1, num_replicas, 1), SamplingDecoder(), 0
        decided = decision(1, **config)
        about = self._grid, "here", lambda hellos: decided, self.control
        members = [Members(*about, number) for number in range(num_replicas)]
        replicas = [Replica(each, self.control, [self.notes], lambda: SECOND, queue) for each in members]
        self.engine = Engine(replicas, self.control, self.notes, lambda call: call(), lambda: SECOND)

    def say(self, rank: int, *messages: wire.FromStage) -> None:
        self.control.arrived += [Received(rank, SECOND, message) for message in messages]
        self.engine.turn()

    def hello(self, rank: int, weights: str = "") -> wire.Hello:
        return hello_of(rank, self._grid.size, ARCH, wire.StageHost("host", "here"), weights=weights)

    def form(self, *weights: str) -> None:
        for rank, which in enumerate(weights):
            self.say(rank, self.hello(rank, which), LOADED, wire.StoreOpened(1, 1), wire.Ready(1))

    def lose(self, rank: int) -> None:
        self.control.arrived.append(Disconnected(rank, "exit"))
        self.engine.turn()

    def submit(self, request: Request) -> Reader:
        """Raises the error of a request that is refused."""
        reader = Reader()
        queued = self.engine.submit(OpenRequest(request, reader, no_tokenizer()))
        self.engine.turn()
        queued.result(0)
        return reader

    def compute(self, *readers: Reader) -> None:
        """The only rank computes steps until these have ended: it draws token 3."""
        while not all(reader.finish for reader in readers):
            plans = [message for _, message in self.control.sent if isinstance(message, wire.Plan)]
            message = plans[self._num_computed]
            self._num_computed += 1
            plan = self._draws.decode(message.plan, message.sampling)
            drawn = tuple(Drawn(piece.sequence_id, 3) for piece in plan.slices if piece.draw)
            self.say(0, wire.Result(StepResult(plan.epoch, plan.step_id, 0, STAMPS, 0, drawn)))

    @property
    def serving(self) -> list[bool]:
        return [replica.serves for replica in self.engine.replicas]


def formed(**config: object) -> Rig:
    rig = Rig(**config)
    rig.form("")
    return rig


# ---- requests -----------------------------------------------------------------------------------------


def test_a_token_becomes_text_while_the_next_step_is_computed_unless_its_text_may_end_the_answer() -> None:
    request = a_request("a")
    for stop, did in ((), "plan plan token plan token plan token token"), (("x",), "plan token " * 4):
        rig = formed()
        rig.compute(rig.submit(replace(request, stop=replace(request.stop, stop=stop))))
        assert rig.notes.did == did.split()


def test_a_refused_request_is_told_why_and_leaves_nothing() -> None:
    rig = formed(max_queue=1, max_num_seqs=1)
    with pytest.raises(InvalidRequest, match="500 tokens"):
        rig.submit(a_request("long", num_prompt=500))
    first, waiting = rig.submit(a_request("a")), rig.submit(a_request("b"))
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        rig.submit(a_request("c"))
    with pytest.raises(InvalidRequest, match="in use"):
        rig.submit(a_request("a"))
    rig.compute(first, waiting)
    assert first.finish is waiting.finish is FinishReason.MAX_TOKENS
    assert rig.notes.refused == ["INVALID_REQUEST", "QUEUE_FULL", "INVALID_REQUEST"]


def test_a_cancelled_request_ends_now_although_its_step_is_under_way() -> None:
    rig = formed()
    reader = rig.submit(a_request("a"))
    rig.engine.cancel("a", FinishReason.CANCELLED)
    rig.engine.cancel("nobody", FinishReason.CANCELLED)
    rig.engine.turn()
    assert [output.finish for output in reader.outputs] == [FinishReason.CANCELLED]
    rig.compute(rig.submit(a_request("b")))


def test_a_caller_that_leaves_before_it_is_queued_harms_nobody() -> None:
    rig = formed()
    leaving = rig.engine.submit(OpenRequest(a_request("a"), Reader(), no_tokenizer()))
    leaving.cancel()
    rig.engine.cancel("a", FinishReason.CANCELLED)
    rig.compute(rig.submit(a_request("b")))
    assert not rig.engine.failed.done()


def test_a_request_that_nobody_foresaw_fails_alone() -> None:
    rig = formed()
    with pytest.raises(TypeError):
        rig.submit(replace(a_request("a"), prompt_ids=None))  # type: ignore[arg-type]
    rig.compute(rig.submit(a_request("b")))


def test_the_load_is_told_while_the_pipeline_is_lost() -> None:
    rig = formed()
    rig.submit(a_request("a"))
    assert rig.notes.in_flight[-1] == 1
    rig.lose(0)
    assert rig.notes.in_flight[-1] == 0, "what was in flight is lost"


# ---- ends ---------------------------------------------------------------------------------------------


def test_a_pipeline_that_cannot_form_again_ends_every_stream_with_a_status() -> None:
    rig = formed()
    readers = [rig.submit(a_request(name)) for name in "ab"]
    rig.say(0, wire.Failed("out of memory"))
    assert str(rig.engine.failed.result(0)) == "out of memory"
    assert all(isinstance(reader.outputs[-1].error, StagesLost) for reader in readers)
    rig.engine.run()
    assert rig.control.sent[-1] == (0, wire.Shutdown(EXIT_FAILED))
    with pytest.raises(Draining):
        rig.engine.submit(OpenRequest(a_request("late"), Reader(), no_tokenizer())).result(0)
    with pytest.raises(Draining):
        rig.engine.snapshot()


def test_stopping_shuts_every_stage_down_and_refuses_what_comes_later() -> None:
    rig = Rig(2)
    rig.form("", "")
    rig.engine.stop()
    rig.engine.run()
    assert rig.control.sent[-2:] == [(0, wire.Shutdown()), (1, wire.Shutdown())]
    with pytest.raises(Draining):
        rig.engine.submit(OpenRequest(a_request("late"), Reader(), no_tokenizer())).result(0)


# ---- replicas -----------------------------------------------------------------------------------------


def test_nothing_is_served_until_every_replica_has_formed() -> None:
    rig = Rig(2)
    rig.form("")
    with pytest.raises(Draining):
        rig.submit(a_request("a"))
    assert not rig.engine.formed.done()


def test_a_stage_that_comes_back_to_a_replica_that_has_ended_is_told_to_exit() -> None:
    rig = Rig(2)
    rig.form("", "")
    assert rig.serving == [True, True]
    rig.lose(1)
    rig.say(1, rig.hello(1))
    rig.say(1, wire.Failed("no memory"))
    rig.control.sent.clear()
    rig.lose(1)
    rig.say(1, rig.hello(1))
    assert rig.control.sent == [(1, wire.Shutdown())]
    assert (rig.serving, rig.engine.failed.done()) == ([True, False], False)


def test_a_replica_that_found_other_weights_does_not_serve_and_is_named() -> None:
    rig = Rig(2)
    rig.form("as published", "trained on")
    reason = "replica 1 on host has other weights in /m, unlike replica 0"
    assert str(rig.engine.failed.result(0)) == reason
