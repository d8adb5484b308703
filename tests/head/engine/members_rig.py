"""Members without connections, for tests of epochs, of ranks' moves and of who is cut off when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ppserve import wire
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.plan import StepResult, StepStamps
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.member import Decision, MemberEvent
from ppserve.head.engine.members import Members
from tests.hellos import hello

ARCH = Architecture(4, 64, 4, 128, 300, 300, 256)
SECOND = 1_000_000_000


@dataclass
class MembersRig:
    """Members without connections: records what they send and which ranks they drop. The test sets the time."""

    num_stages: int
    split: Split | None = None
    mistake: ConfigError | None = None
    sent: list[tuple[int, object]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    now_ns: int = SECOND

    def __post_init__(self) -> None:
        self.members = Members(RankGrid(1, 1, self.num_stages), "here", self, self)
        self.members.start(self.now_ns)

    def decide(self, hellos: tuple[wire.Hello, ...]) -> Decision:
        if self.mistake is not None:
            raise self.mistake
        layouts = stage_layouts(self.split or Split((2,) * self.num_stages))
        return Decision(ARCH, layouts, "float32", "gloo", SchedulerConfig(self.num_stages))

    def num_blocks(self, decision: Decision, loaded: tuple[wire.Loaded, ...]) -> int:
        return min(x.kv_bytes // x.block_bytes for x in loaded)

    def send(self, rank: int, message: object) -> None:
        self.sent.append((rank, message))

    def broadcast(self, ranks: Iterable[int], message: object) -> None:
        self.sent += [(rank, message) for rank in ranks]

    def drop(self, rank: int, cause: str) -> None:
        self.dropped.append((rank, cause))

    def say(self, stage: int, message: object) -> list[MemberEvent]:
        return self.members.handle_message(stage, self.now_ns, message)

    def lose(self, stage: int, cause: str) -> list[MemberEvent]:
        """Its connection ends."""
        return self.members.handle_disconnect(stage, cause, self.now_ns)

    def hello(self, stage: int, machine: str = "here", arch: Architecture = ARCH) -> list[MemberEvent]:
        host = wire.StageHost("same name", machine, "10.0.0.1", "10.0.0.1")
        return self.say(stage, hello(stage, self.num_stages, arch, host))

    def loaded(self, stage: int) -> list[MemberEvent]:
        return self.say(stage, wire.Loaded("cpu", 1, 1, 100, 1000 + stage * 100, ""))

    def load(self, stage: int) -> None:
        """Its process greets and loads its weights; the last one begins an epoch."""
        self.hello(stage)
        self.loaded(stage)

    def tick(self, seconds: float) -> list[MemberEvent]:
        self.now_ns += int(seconds * SECOND)
        return self.members.tick(self.now_ns)

    def forms(self) -> dict[int, wire.Form]:
        """The `Form` messages sent since the last call."""
        found = {stage: message for stage, message in self.sent if isinstance(message, wire.Form)}
        self.sent.clear()
        return found

    def join(self) -> list[MemberEvent]:
        """From the Form of stage 0 to the Ready of all stages."""
        epoch = self.members.epoch
        assert set(self.forms()) == {0}
        self.say(0, wire.StoreOpened(epoch, 4000 + epoch))
        others = self.forms()
        assert set(others) == set(range(1, self.num_stages))
        assert all(form.store_port == 4000 + epoch for form in others.values())
        events: list[MemberEvent] = []
        for stage in range(self.num_stages):
            assert not events, "formed before everybody was ready"
            events = self.say(stage, wire.Ready(epoch))
        return events

    def leave(self, *stages: int) -> list[MemberEvent]:
        """Checks that these stages, and no others, were told to abandon the epoch; they answer that they left
        it."""
        epoch = self.members.epoch
        told = {stage for stage, message in self.sent if isinstance(message, wire.Abandon)}
        assert told == set(stages)
        assert all(m == wire.Abandon(epoch) for _, m in self.sent if isinstance(m, wire.Abandon))
        self.sent.clear()
        return [event for stage in stages for event in self.say(stage, wire.Broken(epoch, "told"))]

    def start(self) -> list[MemberEvent]:
        self.load_all()
        return self.join()

    def load_all(self) -> None:
        for stage in range(self.num_stages):
            self.hello(stage)
        for stage in range(self.num_stages):
            self.loaded(stage)


def result(epoch: int) -> wire.Result:
    return wire.Result(StepResult(epoch, 1, 0, StepStamps(1, 2, 3, 4, 5, 6)))


def answer(pipeline: MembersRig, *stages: int) -> None:
    for stage in stages:
        pipeline.say(stage, wire.Heartbeat(pipeline.now_ns, pipeline.now_ns))


def loaded_pipeline(num_stages: int = 2) -> MembersRig:
    pipeline = MembersRig(num_stages)
    pipeline.load_all()
    return pipeline
