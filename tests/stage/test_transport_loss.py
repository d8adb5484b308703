"""What the neighbours of a killed stage are told, and that the survivors can meet again."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppserve.errors import TransportError
from tests.pipelines import STAGES, enter_epoch, frame, leave_epoch, relay, step
from tests.worlds import Died, World

pytestmark = pytest.mark.slow


def wait_for_death(rank: int, kind: str, path: str, stage: int) -> str:
    """Stages 0 and 2 of three; the middle one dies. Returns what they were told."""
    transport = enter_epoch(kind, path, stage, STAGES)
    said = ""
    try:
        for i in range(10_000):
            plan = step(i, 8)
            if stage == 0:
                transport.send(plan, frame(i, 8))
            else:
                transport.post_receive(plan)
                transport.receive(plan)
    except TransportError as error:
        said = str(error)
    leave_epoch(transport)
    return said


def forward_then_die(rank: int, kind: str, path: str, num_steps: int) -> None:
    """The middle stage: a few steps, then SIGKILL, while the last stage waits for more."""
    transport = enter_epoch(kind, path, 1, STAGES)
    for i in range(num_steps):
        plan = step(i, 8)
        transport.post_receive(plan)
        transport.send(plan, transport.receive(plan).clone())
    os.kill(os.getpid(), 9)


def serve_again(rank: int, kind: str, path: str, stage: int) -> list[bool]:
    transport = enter_epoch(kind, path, stage, STAGES)
    right = relay(transport, stage, torch.float32, 1)
    leave_epoch(transport)
    return right


def open_memory(rank: int) -> list[str]:
    """What this process still holds of the links' memory, by descriptor and by mapping."""
    gc.collect()
    descriptors = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*descriptors, *mapped) if "memfd:ppserve" in line]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(5) as world:
        yield world


# A killed process stays dead: each case kills another one and has another replacement.
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "victim", "replacement"), [("gloo", 1, 3), ("shm", 3, 4)])
def test_a_killed_neighbour_ends_waits_and_survivors_meet_again(
    world: World, kind: str, victim: int, replacement: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "first")
    world.start(0, wait_for_death, kind, path, 0)
    world.start(2, wait_for_death, kind, path, 2)
    world.start(victim, forward_then_die, kind, path, 5)
    assert world.finish(victim) == Died(-9)
    for survivor in (0, 2):
        assert world.finish(survivor, timeout_s=20).startswith(kind)
    path = str(tmp_path / "second")
    for process, stage in ((0, 0), (replacement, 1), (2, 2)):
        world.start(process, serve_again, kind, path, stage)
    assert all(all(world.finish(process)) for process in (0, replacement, 2))
    for process in (0, replacement, 2):
        world.start(process, open_memory)
        assert world.finish(process) == []
