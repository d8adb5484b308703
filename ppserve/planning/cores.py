"""Cores are shared: ranks, the head and callers on one host take them from each other.

A simulation gives every rank a core of its own. Two things are missing. The cores of a host cannot compute more
tokens than all their work for one token allows; it includes the spinning of tensor ranks, since those that share
cores do not come to a gather at the same time. And what the head and callers take from the ranks' cores comes in
the middle of steps: a rank that is interrupted keeps all ranks of its replica waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppserve.core.grid import RankGrid
from ppserve.planning.simulator import Outcome, Wires


@dataclass(frozen=True, slots=True)
class SharedCores:
    """A host's. cores: that its processes may use. ranks: those on it; with rank 0 comes the head. threads: of
    each rank. caller_s: what callers on it compute for each token that they get."""

    cores: int
    ranks: tuple[int, ...]
    threads: int = 1
    caller_s: float = 0.0


def slowdown(
    outcomes: Sequence[Outcome],
    grid: RankGrid,
    wires: Wires,
    hosts: Sequence[SharedCores],
    gathers: Sequence[int],
) -> float:
    """How many times as long everything takes as in simulations of replicas by themselves, at least 1. outcomes:
    of each replica that has work. wires: head_s is what the head computes for a step. hosts: of all ranks; none:
    cores are not scarce. gathers: of each stage in a step."""
    return max((_of_host(outcomes, grid, wires, host, gathers) for host in hosts), default=1.0)


def _of_host(
    outcomes: Sequence[Outcome], grid: RankGrid, wires: Wires, host: SharedCores, gathers: Sequence[int]
) -> float:
    """Times are seconds of cores per second that all replicas serve."""
    places = [place for rank in host.ranks for place in (grid.place(rank),) if place.replica < len(outcomes)]
    computing = around = beside = 0.0
    for place in places:
        outcome = outcomes[place.replica]
        computing += outcome.stages[place.stage].computed_ns / 1e9 * host.threads / outcome.wall_s
        sending_s = wires.sending_s * (place.stage < grid.pipeline - 1)
        # All but the last that comes.
        spinning_s = gathers[place.stage] * wires.spin_s * (1 - 1 / grid.tensor)
        around += outcome.num_steps * (wires.prepare_s + sending_s + spinning_s) / outcome.wall_s
    for outcome in outcomes:
        seconds = host.caller_s * outcome.new_tokens
        if 0 in host.ranks:
            seconds += wires.head_s * outcome.num_steps + wires.token_s * outcome.new_tokens
        beside += seconds / outcome.wall_s
    # What finds no idle core, and of that what meets one of a replica's ranks that computes.
    taken = max(0.0, beside - max(0, host.cores - len(places) * host.threads))
    met = computing / len(outcomes) / host.cores
    return max(1.0, (computing + around + beside) / host.cores, 1.0 + taken * min(1.0, met))
