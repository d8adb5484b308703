"""The engine: messages in, plans and outputs out, and what becomes of calls, replicas and streams at an end.

Time and ranks are scripted. `test_histories` has the answers; the library's tests have the thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
from msgspec import structs

from ppserve import wire
from ppserve.core.architecture import Split
from ppserve.core.request import FinishReason
from ppserve.errors import Draining, InvalidRequest, Overloaded, ReshapeFailed, StagesLost, UsageError
from ppserve.head.engine.streams import OpenRequest
from ppserve.process.lifetime import EXIT_FAILED
from ppserve.tokenizer import no_tokenizer
from tests.core.scheduling.rig import a_request
from tests.head.engine.replica_rig import EngineRig, Reader
from tests.head.engine.scripted import ARCH, SECOND
from tests.hellos import hello, host_of

# ---- requests -----------------------------------------------------------------------------------------


def test_a_token_is_told_while_the_next_step_is_computed() -> None:
    request = a_request("a", max_tokens=4)
    did = "sent sent output sent output sent output output"
    for stop in (), ("x",):
        rig = EngineRig("")
        rig.finish(rig.open(replace(request, stop=structs.replace(request.stop, stop=stop))))
        assert [what for what, *_ in rig.notes.called if what != "reported"] == did.split()


def test_a_refused_request_is_told_why_and_leaves_nothing() -> None:
    rig = EngineRig("", max_queue=1, max_num_seqs=1)
    with pytest.raises(InvalidRequest, match="126 KV blocks"):
        rig.open(a_request("long", num_prompt=500, max_tokens=4))
    first, waiting = rig.open(a_request("a")), rig.open(a_request("b"))
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        rig.open(a_request("c"))
    rig.finish(first, waiting)
    assert first.finish is waiting.finish is FinishReason.MAX_TOKENS


def test_a_cancelled_request_ends_now_although_its_step_is_under_way() -> None:
    rig = EngineRig("")
    reader = rig.open(a_request("a"))
    rig.engine.cancel("a")
    rig.engine.cancel("nobody")
    rig.engine.turn()
    assert [output.finish for output in reader.outputs] == [FinishReason.CANCELLED]
    rig.finish(rig.open(a_request("b")))


def test_a_caller_that_leaves_before_it_is_queued_harms_nobody() -> None:
    rig = EngineRig("")
    leaving = rig.engine.submit(OpenRequest(a_request("a"), Reader().push, no_tokenizer()))
    leaving.cancel()
    rig.engine.cancel("a")
    rig.finish(rig.open(a_request("b")))
    assert not rig.engine.failed.done()


def test_a_request_that_nobody_foresaw_fails_alone() -> None:
    rig = EngineRig("")
    with pytest.raises(TypeError):
        rig.open(replace(a_request("a"), prompt_ids=None))  # type: ignore[arg-type]
    rig.finish(rig.open(a_request("b")))


def test_the_load_is_told_while_the_pipeline_is_lost() -> None:
    rig = EngineRig("")
    rig.open(a_request("a"))
    assert rig.notes.in_flight[-1] == 1
    rig.lose(0)
    assert rig.notes.in_flight[-1] == 0, "what was in flight is lost"


# ---- ends ---------------------------------------------------------------------------------------------


def test_a_pipeline_that_cannot_form_again_ends_every_stream_with_a_status() -> None:
    rig = EngineRig("")
    readers = [rig.open(a_request(name)) for name in "ab"]
    rig.say(0, wire.Failed("out of memory"))
    assert str(rig.engine.failed.result(0)) == "out of memory"
    assert all(isinstance(reader.outputs[-1].error, StagesLost) for reader in readers)
    rig.engine.run()
    assert rig.control.sent[-1] == (0, wire.Shutdown(EXIT_FAILED))
    with pytest.raises(Draining):
        rig.engine.submit(OpenRequest(a_request("late"), Reader().push, no_tokenizer())).result(0)
    with pytest.raises(Draining):
        rig.engine.snapshot()


def test_stopping_shuts_every_stage_down_and_refuses_what_comes_later() -> None:
    rig = EngineRig("", "", num_replicas=2)
    rig.engine.stop()
    rig.engine.run()
    assert rig.control.sent[-2:] == [(0, wire.Shutdown()), (1, wire.Shutdown())]
    with pytest.raises(Draining):
        rig.engine.submit(OpenRequest(a_request("late"), Reader().push, no_tokenizer())).result(0)


# ---- replicas -----------------------------------------------------------------------------------------


def test_nothing_is_served_until_every_replica_has_formed() -> None:
    rig = EngineRig("", num_replicas=2)
    with pytest.raises(Draining):
        rig.open(a_request("a"))
    assert not rig.engine.formed.done()


def test_equal_layers_of_several_replicas_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rig = EngineRig("", "", num_replicas=2)
    assert rig.engine.formed.done()
    assert caplog.messages == ["replica 0: epoch 1 formed", "replica 1: epoch 1 formed", "layers per stage: 4"]


def test_a_stage_that_comes_back_to_a_replica_that_has_ended_is_told_to_exit() -> None:
    rig = EngineRig("", "", num_replicas=2)
    again = hello(1, 2, ARCH, host_of("here", name="host"))
    assert rig.serving == [True, True]
    rig.lose(1)
    rig.say(1, again)
    rig.say(1, wire.Failed("no memory"))
    rig.control.sent.clear()
    rig.lose(1)
    rig.say(1, again)
    assert rig.control.sent == [(1, wire.Shutdown())]
    assert (rig.serving, rig.engine.failed.done()) == ([True, False], False)
    assert rig.request_queue._schedulers == [rig.replicas[0].scheduler], "its blocks are no room for requests"


def test_requests_of_a_replica_that_ends_are_computed_by_another() -> None:
    """The last was admitted by the second replica, which says at once that it will not come back."""
    rig = EngineRig("", "", num_replicas=2)
    readers = [rig.open(a_request(name)) for name in ("a", "bb")]
    (held,) = rig.replicas[1].scheduler._running.values()  # type: ignore[union-attr]
    rig.say(1, wire.Failed("no memory"))
    assert rig.replicas[1].steps.num_in_flight == 0
    rig.engine.turn()
    own = rig.replicas[0].scheduler
    assert own is not None
    assert held.id in own._running
    assert not any(reader.outputs for reader in readers)


def test_draining_and_restarting_reach_every_replica_and_take_effect_when_it_is_there_again() -> None:
    rig = EngineRig("", "", num_replicas=2)
    rig.engine.drain()
    rig.engine.turn()
    assert [replica.members._draining for replica in rig.replicas] == [True, True]
    single = EngineRig("")
    epoch = single.engine.restart(0, pauses=True)
    single.engine.turn()
    assert epoch.result(0) == 1
    serves = single.engine.serves_after(0, 1)
    single.engine.turn()
    assert not serves.result(0), "its stages have not heard of it yet"


def reshaping(rig: EngineRig, replica: int = 0) -> Future[int]:
    """Ask for a shape. Every rank that is told to leave the epoch does, and the next one begins to form."""
    rig.control.sent.clear()
    formed = rig.engine.reshape(replica, Split((8,)))
    rig.engine.turn()
    for rank, message in [*rig.control.sent]:
        if isinstance(message, wire.Abandon):
            rig.say(rank, wire.Broken(message.epoch, "told"))
    return formed


def test_a_stream_goes_on_in_another_shape_whose_epoch_is_the_futures_result() -> None:
    rig = EngineRig("")
    reader = rig.open(a_request("a", max_tokens=4))
    assert rig.compute_next()
    formed = reshaping(rig)
    assert not formed.done()
    rig.say(0, wire.StoreOpened(2, 1), wire.Ready(2))
    assert formed.result(0) == 2
    rig._num_computed = 0  # of the plans that were sent since
    rig.finish(reader)
    assert [output.token_id for output in reader.outputs] == [3, 3, 3, 3]


def test_a_stream_goes_on_where_a_shape_is_taken_back() -> None:
    rig = EngineRig("")
    reader = rig.open(a_request("a", max_tokens=4))
    assert rig.compute_next()
    before = rig.engine.replicas[0].scheduler
    formed = reshaping(rig)
    rig.say(0, wire.StoreOpened(2, 1), wire.Unable("out of memory"))
    with pytest.raises(ReshapeFailed, match="out of memory"):
        formed.result(0)
    rig.now_ns += SECOND
    rig.engine.turn()
    rig.control.sent.clear()
    rig.say(0, wire.StoreOpened(3, 1), wire.Ready(3))
    assert rig.engine.replicas[0].scheduler is before, "it has the blocks and the figures of its shape"
    rig._num_computed = 0
    rig.finish(reader)
    assert [output.token_id for output in reader.outputs] == [3, 3, 3, 3]


def test_whoever_reshapes_hears_that_the_replica_or_the_server_ends() -> None:
    rig = EngineRig("", "", num_replicas=2)
    with pytest.raises(InvalidRequest, match="there is no replica 2"):
        reshaping(rig, 2).result(0)
    formed = reshaping(rig, 1)
    rig.say(1, wire.Failed("no memory"))
    with pytest.raises(ReshapeFailed, match="no memory"):
        formed.result(0)
    assert rig.serving == [True, False]
    formed = reshaping(rig, 0)
    rig.engine.stop()
    late = rig.engine.reshape(0, Split((8,)))
    rig.engine.run()
    for refused in (formed, late, rig.engine.reshape(0, Split((8,)))):
        with pytest.raises(Draining):
            refused.result(0)


def test_whoever_reshapes_hears_whatever_else_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = EngineRig("", "", num_replicas=2)
    formed = reshaping(rig, 1)

    def fail(_now_ns: int) -> None:
        raise UsageError("stage 0 cannot be reached")

    monkeypatch.setattr(rig.replicas[1].members, "tick", fail)
    rig.engine.turn()
    with pytest.raises(UsageError, match="cannot be reached"):
        formed.result(0)
    assert rig.serving == [True, False]


def test_whoever_reshapes_hears_that_another_rank_ended_the_server() -> None:
    rig = EngineRig("")
    formed = reshaping(rig)
    rig.engine.give_up(StagesLost("stage 0 cannot be kept alive"))
    rig.engine.turn()
    rig.engine.run()
    with pytest.raises(StagesLost, match="cannot be kept alive"):
        formed.result(0)


def test_a_replica_that_found_other_weights_does_not_serve_and_is_named() -> None:
    rig = EngineRig("as published", "trained on", num_replicas=2)
    reason = "replica 1 on host has other weights in /m, unlike replica 0"
    assert str(rig.engine.failed.result(0)) == reason
