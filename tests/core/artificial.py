"""A pipeline whose times are known exactly, for tests of the ledger: a recurrence without scheduler or clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppserve.core.ledger.account import TimeAccount
from ppserve.core.ledger.steps import Steps
from ppserve.core.plan import Draw, Slice, StepPlan, StepResult, StepStamps
from ppserve.core.request import SamplingParams


def plan(step_id: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch, step_id, 0, (Slice(step_id, 0, (7,), (0,), Draw(SamplingParams())),))


def account_of(num_stages: int, started_ns: int = 0, **observer: Any) -> TimeAccount:
    """A ledger with an empty book of steps."""
    return TimeAccount(Steps(num_stages), started_ns, **observer)


def send(account: TimeAccount, plan: StepPlan, at: int, woken: int) -> None:
    """Do what the replica does when it has sent a plan."""
    account.dispatched(account.steps.sent(plan, woken, at, num_slots=1))


def report(account: TimeAccount, result: StepResult, at: int) -> None:
    """Do what the replica does when a stage reports."""
    step = account.steps.reported(result, at)
    if step is not None:
        account.reported(step, result.stage)


@dataclass
class ArtificialPipeline:
    """`slots` chains of steps, each step dispatched when its predecessor in the slot has returned.

    All durations are in ns. compute_ns: per stage. transfer_ns: from sent to received. sending_ns: how long a
    stage is occupied with sending. prepare_ns: from received to begun. token_return_ns: from the last stage's end
    to the head having the result. schedule_ns: from there to the next dispatch.
    """

    compute_ns: tuple[int, ...]
    slots: int
    transfer_ns: int = 0
    sending_ns: int = 0
    prepare_ns: int = 0
    token_return_ns: int = 0
    schedule_ns: int = 0
    start_ns: int = 0
    stamps: dict[tuple[int, int], StepStamps] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    dispatched: list[int] = field(default_factory=list)

    def run(self, num_steps: int) -> ArtificialPipeline:
        """Computes the times of `num_steps` steps."""
        for k in range(num_steps):
            first = k < self.slots
            at = self.start_ns if first else self.returned[k - self.slots] + self.schedule_ns
            self.dispatched.append(at)
            arrives = at
            for i, compute in enumerate(self.compute_ns):
                before = self.stamps.get((i, k - 1))
                free = before.sent if before else self.start_ns
                awaited = max(at, free)
                received = awaited if i == 0 else max(awaited, arrives)
                begun = received + self.prepare_ns
                ended = begun + compute
                is_last = i == len(self.compute_ns) - 1
                sent = ended if is_last else ended + self.sending_ns
                self.stamps[i, k] = StepStamps(at, awaited, received, begun, ended, sent)
                arrives = sent + self.transfer_ns
            self.returned.append(self.stamps[len(self.compute_ns) - 1, k].ended + self.token_return_ns)
        return self

    def events(self) -> list[tuple[int, int, str, int, int]]:
        """(time, order, what, step, stage), in the order in which they reach the head."""
        seen: list[tuple[int, int, str, int, int]] = []
        last = len(self.compute_ns) - 1
        for k, at in enumerate(self.dispatched):
            seen.append((at, 1, "dispatched", k, 0))
        for (i, k), stamps in self.stamps.items():
            seen.append((self.returned[k] if i == last else stamps.sent, 0, "reported", k, i))
        return sorted(seen, key=lambda event: (*event[:2], event[3], event[4]))

    def feed(self, account: TimeAccount, first_step_id: int = 0) -> int:
        """Plays all events into `account`; returns the time of the last return, when demand ends."""
        account.demand_began(self.start_ns)
        for event in self.events():
            self.play(account, event, first_step_id)
        account.demand_ended(self.returned[-1])
        return self.returned[-1]

    def play(self, account: TimeAccount, event: tuple[int, int, str, int, int], first_step_id: int = 0) -> None:
        at, _, what, k, i = event
        if what == "dispatched":
            send(account, plan(first_step_id + k), at, max(self.start_ns, at - self.schedule_ns))
        else:
            report(account, StepResult(epoch=1, step_id=first_step_id + k, stage=i, stamps=self.stamps[i, k]), at)
