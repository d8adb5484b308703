"""Ranks of two agents of torchrun, which are killed and started anew while a client streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from ppserve.answers import Token
from ppserve.client import Client, RetryPolicy
from tests.hosts.two_agents import TwoAgents, two_agents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS = 250


def stream(client: Client, after_thirty: Callable[[], None] | None = None) -> list[Token]:
    """The same answer every time. after_thirty: called once, when some of it has arrived."""
    tokens: list[Token] = []
    for chunk in client.stream("Once upon a time", max_tokens=NUM_TOKENS, seed=7, ignore_eos=True, logprobs=1):
        tokens += chunk.tokens
        if after_thirty is not None and len(tokens) > 30:
            after_thirty()
            after_thirty = None
    assert after_thirty is None, "the stream ended before anything happened to it"
    return tokens


def kill_rank(agents: TwoAgents, rank: int) -> None:
    os.kill(agents.rank_pid(rank), signal.SIGKILL)


def replace_agent(agents: TwoAgents, node: int) -> None:
    agents.agents[node].end()
    agents.start(node)


def test_with_static_rendezvous_a_worker_joins_again_and_a_restarted_head_is_found_again() -> None:
    with two_agents("static") as agents, Client(agents.target) as client:
        undisturbed = stream(client)
        head = agents.rank_pid(0)
        with Client(agents.target, retry=RetryPolicy(resume=False)) as impatient:
            # Restarted by its own agent, whose count of restarts differs from the other's from now on.
            assert stream(impatient, lambda: kill_rank(agents, 1)) == undisturbed
            # Started afresh, with the command that it was started with.
            assert stream(impatient, lambda: replace_agent(agents, 1)) == undisturbed
        assert agents.rank_pid(0) == head, "the head was restarted for a worker"
        worker = agents.rank_pid(1)
        assert stream(client, lambda: kill_rank(agents, 0)) == undisturbed
        assert agents.rank_pid(1) == worker, "a worker was restarted for the head"


def test_with_c10d_rendezvous_a_workers_agent_joins_again_and_streams_resume() -> None:
    with two_agents("c10d") as agents, Client(agents.target) as client:
        undisturbed = stream(client)
        assert stream(client, lambda: replace_agent(agents, 1)) == undisturbed
        agents.wait_ready(times=2)  # all ranks were restarted: that is how this rendezvous admits an agent
