"""A control plane that remembers, and ranks without processes that say to the head what a test has them say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.grid import RankGrid
from ppserve.core.plan import RankResult, StepStamps
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.control import Disconnected, Received
from ppserve.head.engine.member import Decision, EpochLost, MemberEvent, StageState
from ppserve.head.engine.members import Members
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello, host_of
from tests.simulated_stage import EOS_ID, VOCAB_SIZE

ARCH = gpt2_architecture(4, 64, 4, 128, VOCAB_SIZE, VOCAB_SIZE, 256, eos_ids=(EOS_ID,))
BLOCK_SIZE = 4
NUM_BLOCKS = 64
SECOND = 1_000_000_000

Heard = TypeVar("Heard")


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


class RanksRig(ABC, Generic[Heard]):
    """Ranks of one replica, which say to the head what the test has them say. The test sets the time.

    A subclass is what hears them; `say` returns what it makes of a message.
    """

    def __init__(self, control: ScriptedControl, members: Members) -> None:
        self.now_ns = SECOND
        self.control, self.members = control, members
        self.ranks = members.ranks

    @abstractmethod
    def say(self, rank: int, message: wire.FromStage) -> Heard:
        """A message of this rank arrives now."""

    def hello(self, rank: int, machine: str = "here", weights: str = "") -> Heard:
        host = host_of(machine, "10.0.0.1", "10.0.0.1", name="host")
        return self.say(rank, hello(rank, self.members.grid.size, ARCH, host, weights=weights))

    def loaded(self, rank: int, reason: str | None = None, num_blocks: int | None = None) -> Heard:
        """reason: what its self-test found. Unless the test says how many blocks it has room for, a later rank has
        room for more."""
        num_blocks = NUM_BLOCKS + rank if num_blocks is None else num_blocks
        return self.say(rank, wire.Loaded("cpu", 1, 1, 10, 10 * num_blocks, reason))

    def load(self, *ranks: int, reason: str | None = None) -> None:
        """Their processes greet and load their weights; the last one of all begins an epoch."""
        for rank in ranks:
            self.hello(rank)
        for rank in ranks:
            self.loaded(rank, reason)

    def forms(self) -> dict[int, wire.Form]:
        """The `Form` messages sent since the last call."""
        found = {rank: message for rank, message in self.control.sent if isinstance(message, wire.Form)}
        self.control.sent.clear()
        return found

    def join(self) -> list[Heard]:
        """Form the epoch, from the Form of the first rank to the Ready of all in use. Returns what is made of each
        Ready."""
        epoch, (first, *others) = self.members.epoch, self.members.ranks_in_use
        assert set(self.forms()) == {first}
        self.say(first, wire.StoreOpened(epoch, 4000 + epoch))
        forms = self.forms()
        assert set(forms) == set(others)
        assert all(form.store_port == 4000 + epoch for form in forms.values())
        heard = []
        for rank in (first, *others):
            assert not self.members.formed, "when all are ready, and not before"
            heard.append(self.say(rank, wire.Ready(epoch)))
        assert self.members.formed
        return heard

    def answer(self, *ranks: int) -> None:
        """They answer a ping."""
        for rank in ranks:
            self.say(rank, wire.Heartbeat(self.now_ns, self.now_ns))


class MembersRig(RanksRig[MemberEvent | None]):
    """Members alone, of one pipeline or of the last of several replicas."""

    def __init__(
        self, num_stages: int, num_tensor: int = 1, num_replicas: int = 1, mistake: ConfigError | None = None
    ) -> None:
        def decide(hellos: object, split: Split | None) -> Decision:
            if self.refuses is not None:
                raise self.refuses
            return decision(num_stages, split)

        self.refuses = mistake
        grid, control = RankGrid(num_tensor, num_replicas, num_stages), ScriptedControl()
        super().__init__(control, Members(grid, "here", decide, control, num_replicas - 1))
        self.sent, self.dropped = control.sent, control.dropped
        self.members.tick(self.now_ns)
        self.sent.clear()  # pings

    def say(self, rank: int, message: object) -> MemberEvent | None:
        return self.members.handle_message(rank, self.now_ns, message)

    def lose(self, rank: int, cause: str) -> EpochLost | None:
        """Its connection ends."""
        return self.members.handle_disconnect(rank, cause, self.now_ns)

    def tick(self, seconds: float) -> EpochLost | None:
        self.now_ns += int(seconds * SECOND)
        return self.members.tick(self.now_ns)

    def leave(self, *ranks: int) -> None:
        """Check that these ranks, and no others, were told to abandon the epoch. They answer that they left it."""
        epoch = self.members.epoch
        told = [(rank, message) for rank, message in self.sent if isinstance(message, wire.Abandon)]
        assert told == [(rank, wire.Abandon(epoch)) for rank in ranks]
        self.sent.clear()
        assert [self.say(rank, wire.Broken(epoch, "told")) for rank in ranks] == [None] * len(ranks)

    def wait(self, seconds: int, *answering: int) -> None:
        """The time passes, and these ranks answer pings."""
        for _ in range(2 * seconds):
            self.answer(*answering)
            self.tick(0.5)

    def assigned(self) -> dict[int, int]:
        """How many halves of layers each rank was told to load, since the last call."""
        found = {rank: m.layout.num_sublayers for rank, m in self.sent if isinstance(m, wire.Assign)}
        self.sent.clear()
        return found

    def divide(self, *sublayers: int) -> Future[int]:
        """Divide the layers anew; all ranks that are there leave the epoch."""
        formed: Future[int] = Future()
        epoch = self.members.epoch
        self.members.reshape(Split(sublayers), formed, self.now_ns)
        for member in self.members.all:
            if member.state is StageState.LEAVING:
                self.say(member.rank, wire.Broken(epoch, "told"))
        return formed

    def form(self) -> None:
        """All ranks in use load what they were told to, and join the epoch."""
        self.sent.clear()
        while loading := [m for m in self.members.in_use if m.state is StageState.LOADING]:
            for member in loading:
                self.loaded(member.rank)
        for _ in range(100):
            if self.members.first.state is StageState.FORMING:
                break
            self.sent.clear()
            self.answer(*self.ranks)
            self.tick(0.5)
        self.join()


def result(epoch: int, place: int = 0) -> wire.Result:
    return wire.Result(RankResult(epoch=epoch, step_id=1, place=place, stamps=StepStamps(1, 2, 3, 4, 5, 6)))


def loaded_pipeline(num_stages: int = 2) -> MembersRig:
    pipeline = MembersRig(num_stages)
    pipeline.load(*pipeline.ranks)
    return pipeline


def started_pipeline(num_stages: int = 2) -> MembersRig:
    pipeline = loaded_pipeline(num_stages)
    assert pipeline.join() == [None] * (num_stages - 1) + [wire.Ready(1)]
    return pipeline
