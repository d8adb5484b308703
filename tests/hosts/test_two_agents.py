"""Ranks of two agents of torchrun, which are killed and started anew while a client streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from ppserve import Pipeline
from ppserve.answers import Token
from ppserve.client import Client, RetryPolicy
from ppserve.model.cpu.kernels.variants import available, features
from tests.hosts.two_agents import TwoAgents, two_agents
from tests.model.cpu.products import arithmetic
from tests.slow import thorough

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TOKENS = 250
PROMPT, OPTIONS = "Once upon a time", {"max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True, "logprobs": 1}


def stream(client: Client, after_thirty: Callable[[], None] | None = None) -> list[Token]:
    """Ask for an answer, which is equal every time. after_thirty: called once, when some of it has arrived."""
    tokens: list[Token] = []
    for chunk in client.stream(PROMPT, **OPTIONS):
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


@pytest.mark.thorough
def test_with_c10d_rendezvous_a_workers_agent_joins_again_and_streams_resume() -> None:
    with two_agents("c10d") as agents, Client(agents.target) as client:
        undisturbed = stream(client)
        assert stream(client, lambda: replace_agent(agents, 1)) == undisturbed
        agents.wait_ready(times=2)  # all ranks were restarted: that is how this rendezvous admits an agent


@pytest.mark.parametrize(
    "numbers", [{"quantization": "int8"}, *thorough({"dtype": "bfloat16"})], ids=["int8", "bfloat16"]
)
def test_hosts_with_unlike_kernels_keep_the_promise_or_say_that_they_do_not(numbers: dict[str, str]) -> None:
    """The second computes with the least kernels, and loses its stage; float32 and int8 have the same bits in all,
    bfloat16 in those that do not sum by AMX."""
    best = available(features())[-1]
    with Pipeline("tiny", threads=1, **{"dtype": "float32"} | numbers) as pipeline:
        alone = pipeline.complete(PROMPT, **OPTIONS).sequences[0].tokens
    flags = [word for name, value in numbers.items() for word in (f"--{name}", value)]
    with two_agents("static", *flags, variants=(best, "portable")) as agents, Client(agents.target) as client:
        tokens = stream(client, lambda: os.kill(agents.stage_pid(1), signal.SIGKILL))
        assert stream(client) == tokens
        logs = agents.everything()
    if "dtype" in numbers and arithmetic("bfloat16", best) != arithmetic("bfloat16", "portable"):
        assert "set PPSERVE_CPU_KERNELS=" in logs
    else:
        # Log-probabilities go over the wire as float32.
        ours = [(token.id, np.float32(token.logprob)) for token in alone]
        assert [(token.id, np.float32(token.logprob)) for token in tokens] == ours
