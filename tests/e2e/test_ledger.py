"""The ledger of a real server: every second of every stage, through load, cancelled calls and a killed stage."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

import grpc
import pytest

from ppserve.core.ledger.causes import KINDS
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.asking import ask, requests_with_everything
from tests.e2e.serving import Forked, Server, serving

Ledger = dict[str, dict[str, float]]
"""Seconds by stage and kind."""


@dataclass(frozen=True)
class Reading:
    """One scrape, and the time around it."""

    before_s: float
    after_s: float
    ledger: Ledger


def read(server: Server) -> Reading:
    before_s = time.monotonic()
    samples = server.samples()
    after_s = time.monotonic()
    ledger: Ledger = {}
    for sample in samples:
        if re.fullmatch(r"ppserve_stage_(busy|bubble|idle)_seconds_total", sample.name):
            kind = sample.labels.get("phase") or sample.labels.get("cause") or "idle"
            ledger.setdefault(sample.labels["stage"], {})[kind] = sample.value
    assert all(set(kinds) == set(KINDS) for kinds in ledger.values())
    return Reading(before_s, after_s, ledger)


def check(earlier: Reading, later: Reading) -> None:
    """Nothing decreased, and the sum of every stage grew by the time between the scrapes."""
    shortest_s, longest_s = later.before_s - earlier.after_s, later.after_s - earlier.before_s
    for stage, kinds in later.ledger.items():
        grown = {kind: value - earlier.ledger[stage][kind] for kind, value in kinds.items()}
        assert min(grown.values()) >= 0, grown
        assert 0.99 * shortest_s <= sum(grown.values()) <= 1.01 * longest_s, grown


def cancel_some(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = GenerationServiceStub(channel)
        for request in requests_with_everything(6, seed=5):
            request.stop.max_tokens, request.stop.ignore_eos = 400, True
            call = stub.Generate(request)
            next(call)
            call.cancel()


@pytest.mark.timeout(200)
def test_every_second_is_accounted_for() -> None:
    with serving(2, "--layers", "4,4", by=Forked) as server:
        readings = [read(server)]
        assert ask(server.grpc, requests_with_everything(12, seed=1), at_once=6)
        readings.append(read(server))
        with ThreadPoolExecutor(2) as pool:
            loads = [
                pool.submit(ask, server.grpc, requests_with_everything(24, seed=2), 12),
                pool.submit(cancel_some, server),
            ]
            readings.append(read(server))
            os.kill(server.stage_pid(1), signal.SIGKILL)
            while wait(loads, timeout=0.5).not_done:
                readings.append(read(server))
        assert [load.exception() for load in loads] == [None, None]
        readings.append(read(server))
        for earlier, later in pairwise(readings):
            check(earlier, later)
        busy = {stage: kinds["decode"] for stage, kinds in readings[-1].ledger.items()}
        assert min(busy.values()) > 0
