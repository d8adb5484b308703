"""A server whose stages compute as GPUs do, on the CPU: a stage that is killed changes no token."""

from __future__ import annotations

import os
import signal
import threading

import grpc
import pytest

from ppserve.stage.device import REFERENCE
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import await_tokens
from tests.e2e.serving import Forked, serving
from tests.e2e.test_losing_stages import ask, long_requests

NUM_TOKENS = 50
"""Enough to kill a stage in their middle; the operators that stand for a GPU's are slow."""


@pytest.mark.timeout(240)
def test_replay_is_exact_with_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--batch-invariant`: tokens and log-probabilities of an undisturbed run, alone and all at once."""
    monkeypatch.setenv(REFERENCE, "1")
    with serving(2, "--batch-invariant", "--max-num-seqs", "4", "--layers", "4.5,3.5", by=Forked) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            model = GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert model.deterministic
        assert "recording steps of 1 rows (3 of 3)" in server.log
        requests = long_requests(3, NUM_TOKENS)
        alone = [ask(server.grpc, [request], at_once=1)[0] for request in requests]
        answers = []
        asking = threading.Thread(target=lambda: answers.extend(ask(server.grpc, requests, at_once=3)))
        asking.start()
        with grpc.insecure_channel(server.grpc) as channel:
            witness = GenerationServiceStub(channel).Generate(requests[0])
            await_tokens(witness)
            os.kill(server.stage_pid(1), signal.SIGKILL)
            for _ in witness:
                pass
        asking.join()
        assert "stage 1 died" in server.log
        assert answers == alone
