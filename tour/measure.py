"""What the tour measures on a bare pipeline: microbatches, decoding in slots, and single hops.

T tokens, D width, B sequences, m microbatches, p stages. Times are nanoseconds of this host's clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppserve.library import Frames, Slice, StepPlan, Transport, connect
from tour.line import TourStage, microbatches, slice_of
from tour.ranks import Tour
from tour.rounds import ROUNDS
from tour.schedule import Schedule

_HOPS = 60


def practice_prompts(num_sequences: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, equal on every rank."""
    source = random.Random(1)
    return [[source.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_sequences)]


def run_microbatches(
    tour: Tour, line: TourStage, prompts: list[list[int]], m: int
) -> tuple[Schedule, torch.Tensor | None]:
    """Compute prompts in m microbatches. Return the schedule and, on the last stage, the hidden states of all
    tokens, (T, D)."""
    plans = microbatches(prompts, m)
    tour.exchange("ready")
    passes = line.run(plans)
    hidden_TD = torch.cat([done.hidden_TD for done in passes]) if tour.is_last else None
    spans = [(at.begun, at.ended) for at in (done.result.stamps for done in passes)]
    stages: list[list[tuple[int, int]]] = tour.exchange(spans)
    start = min(begun for stage in stages for begun, _ in stage)
    schedule = Schedule(m, [[(begun - start, ended - start) for begun, ended in stage] for stage in stages])
    return schedule, hidden_TD


@dataclass(frozen=True, slots=True)
class Decoding:
    """The speed of decoding with this number of microbatches in flight."""

    in_flight: int
    tokens_per_s: float
    step_ms: list[float]
    """The mean time of a step on each stage."""
    busy: list[float]
    """The share of the time in which each stage computed."""


def decode_in_rounds(tour: Tour, line: TourStage, num_sequences: int, in_flight: int) -> Decoding:
    """Measure decoding several times after a warm-up, and return the median run."""
    decode(tour, line, num_sequences, in_flight, rounds=2)
    runs = [decode(tour, line, num_sequences, in_flight, rounds=16) for _ in range(ROUNDS)]
    return tour.median(runs, lambda run: run.tokens_per_s)


def decode(tour: Tour, line: TourStage, num_sequences: int, in_flight: int, rounds: int) -> Decoding:
    """Decode B sequences greedily, in `in_flight` slots: a slot's next step begins when its tokens have come back.

    Tokens are sent from the last rank to the first by torch.distributed, not by the stages' transport.
    """
    slots = [range(slot, num_sequences, in_flight) for slot in range(in_flight)]
    returning: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
    busy_ns = 0
    tour.exchange("ready")
    start = time.monotonic_ns()
    for k in range(rounds * in_flight):
        position, slot = divmod(k, in_flight)
        tokens = torch.zeros(len(slots[slot]), dtype=torch.int64)
        if tour.rank == 0 and position > 0:
            dist.recv(tokens, tour.size - 1)
        plan = _decode_plan(k, position, slots[slot], tokens.tolist())
        [done] = line.run([plan])
        busy_ns += done.result.stamps.ended - done.result.stamps.begun
        if tour.is_last and position < rounds - 1:
            drawn = torch.tensor([drawn.token_id or 0 for drawn in done.result.drawn])
            returning.append((dist.isend(drawn, 0), drawn))
    for handle, _ in returning:
        assert handle is not None
        handle.wait()
    wall_ns = max(tour.exchange(time.monotonic_ns() - start))
    busy: list[int] = tour.exchange(busy_ns)
    return Decoding(
        in_flight,
        num_sequences * rounds / (wall_ns / 1e9),
        [ns / (rounds * in_flight) / 1e6 for ns in busy],
        [ns / wall_ns for ns in busy],
    )


def _decode_plan(step_id: int, position: int, sequences: range, tokens: list[int]) -> StepPlan:
    """Return a step with one token of each sequence. Only the first stage reads the token ids; the others need the
    shape alone."""
    slices: tuple[Slice, ...] = tuple(
        slice_of(s, position, (token,), draws=True) for s, token in zip(sequences, tokens, strict=True)
    )
    return StepPlan(1, step_id, step_id % 2, slices)


@dataclass(frozen=True, slots=True)
class Hop:
    """The speed of a transport from one stage to the next, for frames of one size."""

    latency_us: float
    """The median time from sending a frame until a receiver that waits for it has it."""
    bytes_per_s: float
    """The throughput when frames follow each other without pauses."""


def measure_hop(tour: Tour, kind: str, rows: int, width: int) -> Hop | None:
    """Measure a transport from stage 0 to stage 1. All ranks must call this; rank 0 gets the result, the others
    None."""
    if kind == "local":
        return _hop_in_one_process(tour, rows, width) if tour.rank == 0 else None
    transport = tour.connect(width, kind)
    word = torch.zeros(1)
    stamps: list[int] = []
    if tour.rank == 0:
        stamps = _send_hops(transport, _frame(tour.device, rows, width), lambda: dist.recv(word, 1))
    elif tour.rank == 1:
        stamps = _receive_hops(transport, rows, lambda: dist.send(word, 0))
    sent, received, *_ = tour.exchange(stamps)
    transport.close()
    return _hop(sent, received, rows * width * 4) if tour.rank == 0 else None


def _hop_in_one_process(tour: Tour, rows: int, width: int) -> Hop:
    """Measure the transport `local` between two threads. With one device, they hand over the tensor itself."""
    second = torch.device("cuda", 1) if tour.device.type == "cuda" else tour.device
    sender, receiver = connect(
        tuple(Frames(width, torch.float32, 1024, 4, device) for device in (tour.device, second))
    )
    word = threading.Semaphore(0)
    received: list[int] = []
    thread = threading.Thread(target=lambda: received.extend(_receive_hops(receiver, rows, word.release)))
    thread.start()
    sent = _send_hops(sender, _frame(tour.device, rows, width), word.acquire)
    thread.join()
    return _hop(sent, received, rows * width * 4)


def _send_hops(transport: Transport, frame_TD: torch.Tensor, wait_for_word: Callable[[], object]) -> list[int]:
    """Send _HOPS frames one by one to a receiver that waits for each, then as many without pauses. Return when
    each was sent."""
    stamps = []
    for i in range(_HOPS):
        wait_for_word()
        time.sleep(0.0005)  # the receiver goes to sleep meanwhile, as a stage would
        stamps.append(time.monotonic_ns())
        transport.send(_hop_plan(i, len(frame_TD)), frame_TD)
    wait_for_word()
    for i in range(_HOPS, 2 * _HOPS):
        stamps.append(time.monotonic_ns())
        transport.send(_hop_plan(i, len(frame_TD)), frame_TD)
    wait_for_word()
    return stamps


def _receive_hops(transport: Transport, rows: int, give_word: Callable[[], object]) -> list[int]:
    """Receive the frames of `_send_hops`. Return when each was there."""
    stamps = []
    for i in range(2 * _HOPS):
        plan = _hop_plan(i, rows)
        transport.post_receive(plan)
        if i <= _HOPS:
            give_word()
        _wait_for_device(transport.receive(plan))
        stamps.append(time.monotonic_ns())
    give_word()
    return stamps


def _wait_for_device(frame_TD: torch.Tensor) -> None:
    if frame_TD.device.type == "cuda":
        torch.cuda.synchronize(frame_TD.device)


def _hop(sent: list[int], received: list[int], num_bytes: int) -> Hop:
    latencies = [there - here for here, there in zip(sent[:_HOPS], received[:_HOPS], strict=True)]
    stream_s = (received[-1] - sent[_HOPS]) / 1e9
    return Hop(statistics.median(latencies) / 1e3, _HOPS * num_bytes / stream_s)


def _hop_plan(step_id: int, rows: int) -> StepPlan:
    return StepPlan(1, step_id, 0, (Slice(0, 0, (0,) * rows, ()),))


def _frame(device: torch.device, rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device=device)


def resident_bytes() -> int:
    """Return the resident memory of this process, after free memory was given back to the system. Where the system
    does not tell it, return its peak."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc would keep it for the next allocation, and hide its size
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
