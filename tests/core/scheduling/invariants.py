"""What must hold between any two calls of the scheduler and of what it owns. All raise AssertionError."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from ppserve.core.plan import Slice
from ppserve.core.request import Request
from ppserve.core.scheduling.block_manager import BlockManager
from ppserve.core.scheduling.request_queue import RequestQueue
from ppserve.core.scheduling.scheduler import Scheduler
from ppserve.core.scheduling.sequence import Sequence, SequenceEvent
from ppserve.core.scheduling.slots import MicrobatchSlots


def check_blocks(blocks: BlockManager) -> None:
    """Every block is in one state, and references agree with tables."""
    counted = [0] * blocks.num_blocks
    for table in blocks._tables.values():
        assert len(set(table)) == len(table), table
        for block in table:
            counted[block] += 1
    assert counted == blocks._references
    held = [block for block, count in enumerate(counted) if count]
    assert sorted([*blocks._free, *blocks._cached, *held]) == [*range(blocks.num_blocks)]
    assert blocks._cached.keys() <= blocks._digest_of.keys()
    assert {digest: block for block, digest in blocks._digest_of.items()} == blocks._block_of


def check_scheduler(scheduler: Scheduler, request_queue: RequestQueue) -> None:
    """Blocks, running set and slots agree with the sequences; nothing is held without work. For the only scheduler
    of a request queue."""
    check_one_of_several(scheduler)
    check_request_queue(request_queue, [scheduler])


def check_ends(
    request_queue: RequestQueue,
    requests: Iterable[Request],
    events: Mapping[tuple[str, int], Seq[SequenceEvent]],
) -> None:
    """Every sequence that ended has had one terminal event, its last; every other one has had none. requests: all
    that were accepted. events: all so far, by request and index."""
    for request in requests:
        group = request_queue.groups.get(request.id)
        live = {sequence.index for sequence in group.live} if group is not None else set()
        for index in request.indices:
            told = events.get((request.id, index), ())
            is_terminal = [event.is_terminal for event in told]
            assert is_terminal.count(True) == (0 if index in live else 1), (request.id, index, told)
            assert index in live or is_terminal[-1], (request.id, index, told)


def check_one_of_several(scheduler: Scheduler) -> None:
    check_blocks(scheduler._blocks)
    config, admitted = scheduler.config, list(scheduler._running.values())
    assert len(scheduler.slots) <= max(config.num_stages + 1, config.microbatches or 1) + config.runs_ahead
    assert set(scheduler._ready) <= set(scheduler._running)
    check_slots(scheduler.slots, admitted)
    for sequence in admitted:
        assert sequence.is_live
        assert sequence.block_table == scheduler._blocks._tables[sequence.id]
        assert sequence in scheduler._groups[sequence.request.id].live
        assert (sequence.id in scheduler._ready) == (sequence.num_pending > 0), (sequence.id, sequence.num_pending)
    assert scheduler._groups.keys() == {sequence.request.id for sequence in admitted}
    assert len(scheduler._speculation._drafters) <= config.max_num_seqs, "drafters of sequences that have ended"
    if not scheduler.num_running and not scheduler.is_busy:
        assert scheduler._blocks.num_held == 0, "idle, yet blocks are held"


def check_request_queue(request_queue: RequestQueue, schedulers: list[Scheduler]) -> None:
    """Every live sequence waits, or is in the running set of its home."""
    check_accounts(request_queue)
    live = {key: [s.id for s in group.live] for key, group in request_queue.groups.items()}
    waiting = [group for group in request_queue.groups.values() if group in request_queue.queue]
    assert len(waiting) == request_queue.num_waiting
    assert not {group.key for group in waiting} & set(request_queue._homes)
    queued = [i for group in waiting for i in live[group.key]]
    running = [s.id for scheduler in schedulers for s in scheduler._running.values()]
    assert sorted(i for ids in live.values() for i in ids) == sorted([*queued, *running])
    for scheduler in schedulers:
        assert all(request_queue._homes[s.request.id] is scheduler for s in scheduler._running.values())
    assert all(home in request_queue._schedulers for home in request_queue._homes.values())


def check_accounts(request_queue: RequestQueue) -> None:
    """What is kept by request or by caller is of open requests."""
    groups = request_queue.groups
    kept = {caller: account.num_live for caller, account in request_queue.queue._accounts.items()}
    counted = dict.fromkeys(kept, 0)
    for group in groups.values():
        counted[group.request.caller] = counted.get(group.request.caller, 0) + 1
    assert kept == counted, "requests of callers"
    isolation = request_queue.poison_isolation
    assert {*isolation._losses, *isolation.suspects} <= groups.keys()
    assert isolation.suspects or not isolation._failures
    deadlines = [group.request.deadline_s for group in groups.values() if group.request.deadline_s is not None]
    assert request_queue._next_deadline_s <= min(deadlines, default=math.inf)


def check_slots(slots: MicrobatchSlots, sequences: list[Sequence]) -> None:
    """A sequence is in one step, or in several with consecutive slices."""
    used = [plan.slot for plan, _ in slots._steps.values()]
    assert len(set(used)) == len(used), "two steps in one slot"
    in_flight: dict[int, list[Slice]] = {}
    for _, owned in slots._steps.values():
        assert len({s.id for s, _ in owned}) == len(owned), "a sequence twice in one step"
        for sequence, slice_ in owned:
            in_flight.setdefault(sequence.id, []).append(slice_)  # of some that have ended, too
    for sequence in sequences:
        slices = in_flight.pop(sequence.id, [])
        known = len(sequence.token_ids)
        assert 0 <= sequence.computed <= min(sequence.scheduled, known)
        assert sequence.scheduled <= known + 1
        position = sequence.computed
        for slice_ in slices:
            assert slice_.start == position, "slices in flight must follow one another"
            if position < known:
                assert slice_.token_ids[:1] in ((sequence.token_ids[position],), ())
            position = slice_.end - slice_.num_draft_tokens
        assert position == sequence.scheduled
