"""A history: the real engine, replica, members, scheduler and ledger in a simulated world where much goes wrong.

After every turn of the engine all invariants are checked. When the faults are over, everything must be served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Set
from dataclasses import replace
from functools import partial

from ppserve.core.architecture import Split
from ppserve.core.grid import RankGrid
from ppserve.core.request import Request, SamplingParams, StopConditions
from ppserve.core.scheduling.poison_isolation import PoisonIsolation
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.errors import Draining, Overloaded, ReshapeFailed
from ppserve.head.engine.loop import Engine
from ppserve.head.engine.member import Decision, StageState
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import Replica
from ppserve.head.engine.streams import OpenRequest
from ppserve.process.keeper import MAX_DEATHS
from ppserve.tokenizer import no_tokenizer
from tests.core.scheduling.invariants import check_one_of_several, check_request_queue
from tests.core.scheduling.rig import prompt_of
from tests.head.engine.history_callers import Asked, Caller
from tests.head.engine.history_faults import Faults
from tests.head.engine.scripted import SECOND, decision
from tests.head.engine.simulated_processes import MOST_SUBLAYERS, POISON_SEED, Host, StageProcess
from tests.head.engine.simulated_world import Network, SimulatedControl, World
from tests.simulated_stage import CUT_SHORT, EOS_ID

# The head looks at least every 0.1 s; that one which is busy looks less often is part of the simulation.
_TICK_S = 0.4
# When the faults are over, everything is served within this time.
_SERVED_WITHIN_S = 150.0
# And where they never are, the server ends within this time: ten epochs, each of up to 60 s.
_ENDS_WITHIN_S = 600.0
_EPOCHS_PER_LOSS = 3
_MAX_QUEUE = 8


class History:
    """One seed, one history. num_replicas: None = by the seed. replica, ...: subclasses, to plant a defect.

    never_heals: in one of 32, links between stages never come back, or the stages of one rank always die.
    """

    def __init__(
        self,
        seed: int,
        replica: type[Replica] = Replica,
        num_replicas: int | None = None,
        poison_isolation: type[PoisonIsolation] = PoisonIsolation,
    ) -> None:
        self.seed = seed
        self.world = world = World(seed)
        self.random = world.random
        self.network = Network()
        self.never_heals = seed % 32 == 10
        self.num_stages = self.random.choice((1, 2, 2, 3))
        # Not by chance, so that histories of one replica, of one tensor rank a stage, are what they were.
        self.num_replicas = num_replicas or (2 if seed % 4 == 3 else 1)
        self.grid = RankGrid(2 if seed % 8 in (5, 7) else 1, self.num_replicas, self.num_stages)
        speculate = self.random.choice((0, 0, None, 1, 4))
        places = self.random.choice((3, 16))
        self._settings = {"max_num_seqs": places, "max_queue": _MAX_QUEUE, "speculate": speculate}
        self._settings["runs_ahead"] = self.grid.tensor == self.num_stages == 1
        self._kinds = replica, poison_isolation
        self._turn_is_due = self._has_failed = False
        self.head_sleeps_until_ns = 0
        self.losses: Counter[str] = Counter()
        """How many losses a request was in flight at, since its latest token."""
        self._start_head()
        numbers = range(self.num_replicas)
        self.hosts = [Host(world, self.network, self.control, self.grid, number) for number in numbers]
        self.callers: list[Caller] = []
        self._num_killers = 0
        self.faults = Faults(self)

    def _start_head(self) -> None:
        """The head's process begins: it knows of nothing."""
        world, (replica, poison_isolation) = self.world, self._kinds
        self.reshapes: list[Asked] = []
        self._blameless: set[int] = set()
        """Replicas of which a reshape or a restart has ended the epoch, until they form again."""
        self._head_began_ns = world.now_ns
        self.control = SimulatedControl(world, self.network)
        self.control.on_news = self._wake

        def decide(hellos: object, split: Split | None) -> Decision:
            return decision(self.num_stages, split, **self._settings)

        numbers = range(self.num_replicas)
        self.members = [Members(self.grid, "here", decide, self.control, number) for number in numbers]
        self.request_queue = RequestQueue()
        self.request_queue.poison_isolation = isolation = poison_isolation()
        vars(isolation)["record_loss"] = partial(self._count_loss, isolation.record_loss)
        self.replicas = [
            replica(each, self.control, (), lambda: world.now_ns, self.request_queue) for each in self.members
        ]
        for each in self.replicas:
            vars(each)["reshape"] = partial(self._count_reshape, each, each.reshape)
        hand_over, clock = lambda call: call(), lambda: world.now_ns
        self.engine = Engine(self.replicas, self.control, lambda *_: None, hand_over, clock)

    def run(self) -> list[str]:
        """Live it to its end. Return what happened; raise AssertionError with it if an invariant does not hold."""
        try:
            self._live()
        except Exception as error:
            raise AssertionError(f"{error!r}\n" + "\n".join(self.world.trace[-60:])) from error
        return self.world.trace

    def _live(self) -> None:
        self._tick()
        while not self.engine.formed.done():
            self._step(60.0)
        until_s = self._plan_what_happens()
        over_ns = self.world.now_ns + int(until_s * SECOND)
        while self.world.now_ns < over_ns and not self._has_failed:
            self.world.step()
        self.faults.heal()
        if self.never_heals:
            self._await_the_end()
            return
        while not (self._is_over() and self._is_quiet()):
            self._step((over_ns - SECOND) / SECOND + _SERVED_WITHIN_S)
        self._check_the_end()

    def _await_the_end(self) -> None:
        """What never heals is not tried for ever: the server ends, and says why to those that wait."""
        until_s = self.world.now_ns / SECOND + _ENDS_WITHIN_S
        while not self._has_failed:
            self._step(until_s)
        reason = str(self.engine.failed.result())
        in_a_row = "in 10 attempts", f"died {MAX_DEATHS} times in a row", "between 64 losses in a row"
        assert any(words in reason for words in in_a_row), reason
        left = [caller.request.id for caller in self.callers if not caller.is_over and not caller.waits_for_server]
        assert not left, f"not told of the end: {left}"

    def _step(self, within_s: float) -> None:
        waited_s = (self.world.now_ns - SECOND) / SECOND
        assert waited_s < within_s, f"not served after {waited_s:.0f} s: {self._states()}"
        self.world.step()

    def _states(self) -> list[str]:
        return [member.state.name for members in self.members for member in members.all]

    def _is_over(self) -> bool:
        is_answered = all(caller.is_over for caller in self.callers)
        return is_answered and all(asked.formed.done() for asked in self.reshapes)

    def _is_quiet(self) -> bool:
        return all(members.formed for members in self.members) and not any(len(r.steps) > 0 for r in self.replicas)

    # ---- the engine -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.world.after(self.world.between(0.0001, 0.001), self._turn)

    def _tick(self) -> None:
        self._wake()
        self.world.after(_TICK_S, self._tick)

    def _turn(self) -> None:
        if not self.control.is_up:
            self._turn_is_due = False
            return
        if self.world.now_ns < self.head_sleeps_until_ns:
            self.world.after((self.head_sleeps_until_ns - self.world.now_ns) / SECOND, self._turn)
            return
        self._turn_is_due = False
        self.engine.turn()
        self._has_failed = self.engine.failed.done()
        self._blameless -= {number for number, members in enumerate(self.members) if members.formed}
        if self._has_failed and self.never_heals:
            self.engine.run()  # what is left of it
            return
        if not self.network.stages_are_cut or self.callers:
            self._check()

    # ---- what happens ---------------------------------------------------------------------------------

    def _plan_what_happens(self) -> float:
        """Requests, cancellations and faults. Returns when the last fault is over."""
        random = self.random
        # Beside it, others that must not suffer; of many at once none.
        poison = random.choice(((1,), (1,), (1, 2, 4), range(8))) if random.random() < 0.15 else ()
        for number in range(max(random.randint(3, 7), *poison, 0) + 1):
            request = self._some_request(number, is_poison=number in poison)
            at_s = random.uniform(0.0, 0.5)
            self.world.after(at_s, partial(self._submit, request))
            if random.random() < 0.1:
                self.world.after(at_s + random.uniform(0.0, 0.3), partial(self._cancel, request.id))
        if random.random() < 0.08:  # more than places and queue hold
            at_s = random.uniform(0.0, 3.0)
            for number in range(100, 100 + random.randint(10, 30)):
                self.world.after(at_s, partial(self._submit, self._some_request(number, is_poison=False)))
        return self.faults.plan()

    def _some_request(self, number: int, is_poison: bool) -> Request:
        random = self.random
        stop = StopConditions(random.randint(1, 14), ignore_eos=random.random() < 0.7)
        deadline_s = self.world.now_ns / SECOND + random.uniform(0.05, 20.0) if random.random() < 0.15 else None
        return Request(
            id=f"r{number}",
            prompt_ids=prompt_of(random.choice((1, 3, 9, 30)), random.randint(0, 2)),
            stop=stop,
            sampling=SamplingParams(seed=POISON_SEED if is_poison else number),
            num_sequences=random.choice((1, 1, 1, 2)),
            deadline_s=deadline_s,
            caller="greedy" if number % 2 else f"light {number}",
        )

    def ask_on(self, number: int) -> None:
        """A request every second, until there is no server."""
        if self.control.is_up and not self.engine.failed.done():
            self._submit(self._some_request(number, is_poison=False))
            self.world.after(1.0, lambda: self.ask_on(number + 1))

    def _submit(self, request: Request) -> None:
        caller = Caller(request, self)
        self.callers.append(caller)
        self._num_killers += request.sampling.seed == POISON_SEED
        self._ask(caller, request)

    def _ask(self, caller: Caller, request: Request) -> None:
        """Ask as clients do: again where no server serves, but not where the queue is full."""

        def again() -> None:
            caller.waits_for_server = True
            self.world.after(0.5, lambda: self._ask(caller, request))

        caller.waits_for_server = False
        if not self.control.is_up:
            again()
            return
        accepted = self.engine.submit(OpenRequest(request, caller.push, no_tokenizer(), (EOS_ID,)))

        def answered(_future: object) -> None:
            problem = accepted.exception()
            if isinstance(problem, Draining):
                again()
                return
            caller.is_refused |= problem is not None
            assert problem is None or isinstance(problem, Overloaded), problem

        accepted.add_done_callback(answered)

    def _resume(self, caller: Caller, index: int) -> None:
        """Ask anew with the tokens that it holds, under a name of its own."""
        request, held = caller.request, tuple(caller.tokens[index])
        name = f"{request.id}/{index} after {len(self.world.trace)}"
        self._ask(caller, replace(request, id=name, resume_index=index, resume_ids=held))

    def process(self, rank: int) -> StageProcess:
        """The process that lives now of a rank."""
        return self.hosts[self.grid.place(rank).replica].processes[rank]

    def _count_loss(
        self, record: Callable[..., str | None], in_flight: Set[str], failed: Set[Hashable]
    ) -> str | None:
        assert self.num_replicas > 1 or not self._blameless, "blamed for what a reshape brought with it"
        if failed:
            self.losses.update(name.partition("/")[0] for name in in_flight)
        return record(in_flight, failed)

    def reshape(self, replica: int, split: Split) -> None:
        if self.control.is_up:
            self.world.note(f"reshape replica {replica}: {split}")
            asked = Asked(replica, split, self.engine.reshape(replica, split))
            self.reshapes.append(asked)
            asked.formed.add_done_callback(lambda of: self.world.note(f"{split}: {of.exception() or of.result()}"))

    def _count_reshape(self, replica: Replica, begin: Callable[..., None], *of: object) -> None:
        begin(*of)
        self._blameless.add(replica.number)

    def _cancel(self, key: str) -> None:
        self.world.note(f"cancel {key}")
        self.engine.cancel(key)

    def next_head(self) -> None:
        self._start_head()
        for host in self.hosts:
            host.has_new_head(self.control)
        self._wake()
        for caller in self.callers:
            if not caller.is_over and not caller.waits_for_server:
                for index in range(caller.request.num_sequences):
                    if index not in caller.ends:
                        self._resume(caller, index)

    # ---- what must hold -------------------------------------------------------------------------------

    def _check(self) -> None:
        """Check the invariants, after every turn."""
        assert not self._has_failed, f"the server ends: {self.engine.failed.result()}"
        num_new = sum(group.admitted_s is None for group in self.request_queue.groups.values())
        assert num_new <= _MAX_QUEUE
        for replica in self.replicas:
            self._check_replica(replica)
        schedulers = [replica.scheduler for replica in self.replicas if replica.scheduler is not None]
        check_request_queue(self.request_queue, schedulers)
        living = {id(replica.scheduler) for replica in self.engine._living if replica.scheduler is not None}
        assert {id(scheduler) for scheduler in self.request_queue._schedulers} == living

    def _check_replica(self, replica: Replica) -> None:
        members, steps = replica.members, replica.steps
        assert members.formed == all(member.state is StageState.READY for member in members.in_use)
        if not members.formed:
            assert len(steps) == 0, "a step is awaited of an epoch that is lost"
        if replica.scheduler is not None:
            check_one_of_several(replica.scheduler)
        losses = self.faults.number + self.hosts[replica.number].num_deaths + self._num_killers
        assert members.epoch <= 1 + _EPOCHS_PER_LOSS * losses + 10, "epochs without end"

    def _check_the_end(self) -> None:
        for replica in self.replicas:
            scheduler = replica.scheduler
            assert scheduler is None or scheduler.is_busy or scheduler.kv_usage == 0, "blocks are held"
        readings = [replica.read() for replica in self.replicas]
        for times in [times for reading in readings for times in reading.times]:
            accounted = sum(times.busy_ns.values()) + sum(times.bubble_ns.values()) + times.idle_ns
            assert accounted == self.world.now_ns - self._head_began_ns, "the ledger's times are not the wall's"
        for replica in self.replicas:
            self._check_shape(replica)
        for caller in self.callers:
            if caller.request.sampling.seed == POISON_SEED and not caller.is_refused:
                ends = set(caller.ends.values())
                assert ends & {"RequestFailed", *(finish.name for finish in CUT_SHORT)}, f"the culprit got {ends}"
        for member in [member for members in self.members for member in members.all]:
            assert not member.round_trips, "one machine has one clock"

    def _check_shape(self, replica: Replica) -> None:
        """Each replica has the shape of the last reshape that formed, and those formed that fit."""
        host, sublayers = self.hosts[replica.number], sublayers_of(decision(self.num_stages))
        asked = [each for each in self.reshapes if each.replica == replica.number]
        for number, each in enumerate(asked):
            fits = host.lack is None or max(each.split.sublayers) <= MOST_SUBLAYERS
            if (error := each.formed.exception()) is None:
                assert fits, f"{each.split} has no room, and formed"
                sublayers = each.split.sublayers
                continue
            assert isinstance(error, ReshapeFailed | Draining), error
            is_hindered = self.faults.number > self.faults.num_reshapes or number < len(asked) - 1
            assert is_hindered or not fits, f"{each.split} fits, and did not form: {error}"
        shape = replica.members.decision
        assert shape is not None
        assert shape is replica.read().decision
        assert sublayers_of(shape) == sublayers, (
            f"{sublayers_of(shape)} are not those of the last reshape, {sublayers}"
        )
        for member in replica.members.in_use:
            loaded = self.process(member.rank).layout
            assert loaded in (None, member.layout), "a process that has just died has loaded none"


def sublayers_of(shape: Decision) -> tuple[int, ...]:
    return tuple(layout.num_sublayers for layout in shape.layouts)
