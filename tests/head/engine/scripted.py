"""The rules of a toy model, a control plane that remembers, and members without connections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.plan import RankResult, StepStamps
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.member import Decision, EpochLost, MemberEvent
from ppserve.head.engine.members import Members
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello
from tests.simulated_stage import EOS_ID, VOCAB_SIZE

ARCH = gpt2_architecture(4, 64, 4, 128, VOCAB_SIZE, VOCAB_SIZE, 256, eos_ids=(EOS_ID,))
BLOCK_SIZE = 4
NUM_BLOCKS = 64
SECOND = 1_000_000_000


def decision(num_stages: int, split: Split | None = None, **config: Any) -> Decision:
    """Layers divided like this, or evenly, and the configuration of the test."""
    split = split or Split((8 // num_stages,) * num_stages)
    settings = {"max_model_len": 128, "block_size": BLOCK_SIZE, "eos_ids": (EOS_ID,), **config}
    layouts = stage_layouts(split)
    return Decision(layouts, "shm", SchedulerConfig(len(layouts), **settings))


@dataclass
class ScriptedControl:
    """A control plane that remembers what was sent and which ranks were dropped. arrived: for the next `poll`."""

    sent: list[tuple[int, wire.FromHead]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    arrived: list[Received | Disconnected] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[Received | Disconnected]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wake(self) -> None:
        """The test makes the turns."""

    def send(self, ranks: Iterable[int], message: wire.FromHead) -> None:
        self.sent += [(rank, message) for rank in ranks]

    def drop(self, rank: int, cause: str) -> None:
        self.dropped.append((rank, cause))

    def close(self, goodbye_s: float) -> None:
        """Nothing is left to read."""


class MembersRig:
    """Members of one pipeline, or of one replica of a grid. The test sets the time."""

    def __init__(
        self, num_stages: int, mistake: ConfigError | None = None, grid: RankGrid | None = None, replica: int = 0
    ) -> None:
        def decide(hellos: object, split: Split | None) -> Decision:
            if self.refuses is not None:
                raise self.refuses
            return decision(num_stages, split, max_model_len=10 * BLOCK_SIZE)

        self.num_stages, self.now_ns = num_stages, SECOND
        self.refuses = mistake
        control = ScriptedControl()
        self.sent, self.dropped = control.sent, control.dropped
        self.members = Members(grid or RankGrid(1, 1, num_stages), "here", decide, control, replica)
        self.members.tick(self.now_ns)
        self.sent.clear()  # pings

    def say(self, stage: int, message: object) -> MemberEvent | None:
        return self.members.handle_message(stage, self.now_ns, message)

    def lose(self, stage: int, cause: str) -> EpochLost | None:
        """Its connection ends."""
        return self.members.handle_disconnect(stage, cause, self.now_ns)

    def hello(self, rank: int, machine: str = "here") -> MemberEvent | None:
        host = wire.StageHost("same name", machine, "10.0.0.1", "10.0.0.1")
        return self.say(rank, hello(rank, self.members.grid.size, ARCH, host))

    def loaded(self, stage: int) -> MemberEvent | None:
        return self.say(stage, wire.Loaded("cpu", 1, 1, 100, 1000 + stage * 100, None))

    def tick(self, seconds: float) -> EpochLost | None:
        self.now_ns += int(seconds * SECOND)
        return self.members.tick(self.now_ns)

    def forms(self) -> dict[int, wire.Form]:
        """The `Form` messages sent since the last call."""
        found = {stage: message for stage, message in self.sent if isinstance(message, wire.Form)}
        self.sent.clear()
        return found

    def join(self) -> int:
        """From the Form of stage 0 to the Ready of all stages. Returns the epoch that has formed."""
        epoch = self.members.epoch
        assert set(self.forms()) == {0}
        self.say(0, wire.StoreOpened(epoch, 4000 + epoch))
        others = self.forms()
        assert set(others) == set(range(1, self.num_stages))
        assert all(form.store_port == 4000 + epoch for form in others.values())
        events = [self.say(stage, wire.Ready(epoch)) for stage in range(self.num_stages)]
        assert events == [None] * (self.num_stages - 1) + [wire.Ready(epoch)], "when all are ready, and not before"
        return epoch

    def leave(self, *stages: int) -> None:
        """Checks that these stages, and no others, were told to abandon the epoch; they answer that they left
        it."""
        epoch = self.members.epoch
        told = {stage for stage, message in self.sent if isinstance(message, wire.Abandon)}
        assert told == set(stages)
        assert all(m == wire.Abandon(epoch) for _, m in self.sent if isinstance(m, wire.Abandon))
        self.sent.clear()
        assert [self.say(stage, wire.Broken(epoch, "told")) for stage in stages] == [None] * len(stages)

    def load(self, *stages: int) -> None:
        """Their processes greet and load their weights; the last one of all begins an epoch."""
        for stage in stages:
            self.hello(stage)
        for stage in stages:
            self.loaded(stage)


def result(epoch: int) -> wire.Result:
    return wire.Result(RankResult(epoch, 1, 0, StepStamps(1, 2, 3, 4, 5, 6)))


def answer(pipeline: MembersRig, *stages: int) -> None:
    for stage in stages:
        pipeline.say(stage, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))


def loaded_pipeline(num_stages: int = 2) -> MembersRig:
    pipeline = MembersRig(num_stages)
    pipeline.load(*range(num_stages))
    return pipeline


def started_pipeline(num_stages: int = 2) -> MembersRig:
    pipeline = loaded_pipeline(num_stages)
    assert pipeline.join() == 1
    return pipeline
