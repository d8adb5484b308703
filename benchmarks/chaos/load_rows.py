"""Rows 9, 10 and 11: more load than can be served, readers that stall, callers that are greedy, and strangers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from grpc import aio

from benchmarks.chaos.record import ONE_CONNECTION, Crowd, Record, check
from ppserve.client import AsyncClient, CallFailed
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.serving import Server, serving

KEYS = {name: f"the-key-of-{name}-in-chaos" for name in ("light", "greedy")}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


# ---- 9 --------------------------------------------------------------------------------------------------

# Each in a process of its own, so that what is measured is the server and not its callers.
PROCESSES = 2
# So many at a time, each without a limit, are served at the highest rate: further ones only wait.
CLOSED = 96


def overload(record: Record, short: bool) -> dict[str, Any]:
    """9: ten times the requests that can be served, each with a time limit."""
    record.close()
    seconds = 24.0 if short else 60.0
    closed = ("--closed", str(CLOSED // PROCESSES), "--limit", "60")
    with serving(2) as server:
        ask(server, seconds / 3, *closed)  # the server learns its own speed
        calm = ask(server, seconds / 2, *closed)
        peak = total(calm, "good") / max(one["seconds"] for one in calm)
        crowd = ask(server, seconds, "--rate", str(10 * peak / PROCESSES))
    goodput = total(crowd, "good") / max(one["seconds"] for one in crowd)
    failures = sum((Counter(one["failures"]) for one in crowd), Counter[str]())
    refused_s, behind_s = ([s for one in crowd for s in one[what]] for what in ("refused_s", "behind_s"))
    late = failures["DEADLINE_EXCEEDED"] + total(crowd, "late")
    p99_s = percentile(refused_s, 0.99)
    return {
        "peak_requests_per_s": round(peak, 1),
        "offered_per_s": round(total(crowd, "sent") / seconds, 1),
        "goodput_share": round(goodput / peak, 2),
        "good": total(crowd, "good"),
        "refusal_p50_p99_ms": [round(1e3 * percentile(refused_s, share)) for share in (0.5, 0.99)],
        "callers_sent_late_p99_ms": round(1e3 * percentile(behind_s, 0.99)),
        "callers_busy": [round(one["busy"], 2) for one in crowd],
        "failures": dict(failures),
        "admitted_but_late": late,
        "met": goodput >= 0.9 * peak and p99_s <= 0.05 and not late,
    }


def ask(server: Server, seconds: float, *flags: str) -> list[dict[str, Any]]:
    """What each of the processes of callers saw."""
    words = [sys.executable, "-m", "benchmarks.chaos.callers", "--target", server.grpc, "--seconds", str(seconds)]
    asking = [subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    seen = []
    try:
        for one in asking:
            seen.append(json.loads(one.communicate(timeout=seconds + 60.0)[0]))
    finally:
        for one in asking:
            one.kill()
            one.wait()
    return seen


def total(seen: list[dict[str, Any]], what: str) -> int:
    return sum(one[what] for one in seen)


# ---- 10 -------------------------------------------------------------------------------------------------


def unfair(record: Record, short: bool) -> dict[str, Any]:
    """10: readers who stall beside others, and greedy callers beside a light one."""
    record.close()
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text("\n".join(KEYS.values()) + "\n")
        with serving(2, "--api-key-file", str(keys), "--max-num-seqs", "64") as server:
            greed = asyncio.run(_greedy(server, 20 if short else 100))
        with serving(2) as server:
            stall = asyncio.run(_stalled(server, 60 if short else 200, 16 if short else 32))
    return {**greed, **stall, "met": greed["light_ttft_ratio"] <= 2.0 and stall["live_itl_ratio"] <= 1.2}


async def _first_s(client: AsyncClient) -> float:
    begun_s = time.monotonic()
    async for _chunk in client.stream("Once", max_tokens=4, seed=1, ignore_eos=True):
        return time.monotonic() - begun_s
    raise AssertionError("no token")


async def _greedy(server: Server, callers: int) -> dict[str, Any]:
    async with (
        AsyncClient(server.grpc, api_key=KEYS["light"], retry=ONE_CONNECTION) as light,
        AsyncClient(server.grpc, api_key=KEYS["greedy"], retry=ONE_CONNECTION) as greedy,
    ):
        idle_s = [await _first_s(light) for _ in range(30)]

        async def grab(seed: int) -> None:
            while True:
                with suppress(CallFailed):
                    await greedy.generate("Once upon a time", seed=seed, max_tokens=200, ignore_eos=True)

        tasks = [asyncio.create_task(grab(seed)) for seed in range(callers)]
        await asyncio.sleep(4.0)
        beside_s = [await _first_s(light) for _ in range(30)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    idle, beside = percentile(idle_s, 0.99), percentile(beside_s, 0.99)
    return {
        "greedy": callers,
        "light_ttft_p99_ms": [round(1e3 * idle), round(1e3 * beside)],
        "light_ttft_ratio": round(beside / idle, 2),
    }


async def _stalled(server: Server, stalled: int, live: int) -> dict[str, Any]:
    async with aio.insecure_channel(server.grpc, [("grpc.http2.lookahead_bytes", 1024)]) as channel:
        stub = GenerationServiceStub(channel)
        gaps = [await _gaps(server, live)]
        request = pb.GenerateRequest(text="Once")
        request.stop.max_tokens, request.stop.ignore_eos = 150, True
        request.output.logprobs = 20
        calls, begun_s = [stub.Generate(request) for _ in range(stalled)], time.monotonic()
        for call in calls:
            await call.read()
        # Until all is computed: what not reading costs others is measured. Who has not read for 30 s is ended; the
        # time since they began is told, so that a measurement after that is not taken for one beside them.
        while await asyncio.to_thread(num_running, server):
            await asyncio.sleep(0.2)
        gaps.append(await _gaps(server, live))
        stalled_for_s = time.monotonic() - begun_s
        for call in calls:
            call.cancel()
        await asyncio.sleep(1.0)
        gaps.append(await _gaps(server, live))
    # Without stalled readers twice: how much these two differ is what the machine does by itself.
    before, beside, after = (percentile(of, 0.99) for of in gaps)
    return {
        "stalled": stalled,
        "stalled_for_s": round(stalled_for_s, 1),
        "live": live,
        "live_itl_p99_ms": [round(1e3 * p99_s) for p99_s in (before, beside, after)],
        "live_itl_ratio": round(beside / max(before, after), 2),
    }


def num_running(server: Server) -> int:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        found = re.findall(r"^ppserve_requests_running\S* (\S+)$", page.read().decode(), re.MULTILINE)
    assert found
    return int(sum(map(float, found)))


async def _gaps(server: Server, live: int) -> list[float]:
    """Between tokens of live readers, each of one answer."""
    found: list[float] = []

    async def read(seed: int) -> None:
        async with AsyncClient(server.grpc, retry=ONE_CONNECTION) as client:
            times = []
            async for _chunk in client.stream("Once", seed=seed, max_tokens=150, ignore_eos=True):
                times.append(time.monotonic())
            found.extend(b - a for a, b in pairwise(times))

    await asyncio.gather(*(read(seed) for seed in range(live)))
    return found


# ---- 11 -------------------------------------------------------------------------------------------------


def strangers(record: Record, short: bool) -> dict[str, Any]:
    """11: connections opened and reset, floods of headers, half-open sockets, on every port."""
    number = 300 if short else 1000
    with serving(2) as server:
        canaries = Crowd(server.grpc, record, 2)
        canaries.ask_undisturbed()
        head = psutil.Process(server.head_pid())
        before, files = head.memory_info().rss, head.num_fds()
        ports = ports_of(server)
        with canaries.asking():
            record.note("fault")
            held = [open_one(port, kind) for port in ports for kind in range(3) for _ in range(number // 3)]
            during = head.memory_info().rss
            time.sleep(2.0)
        for connection in held:
            with suppress(OSError):
                connection.close()
        time.sleep(2.0)
        after_files = head.num_fds()
    record.close()
    verdict = check(record.path)
    grown_mb = (during - before) / 1e6
    return {
        "connections": len(held),
        "head_grew_mb": round(grown_mb),
        "descriptors": [files, after_files],
        **verdict.figures(),
        "met": verdict.is_clean and grown_mb < 200 and after_files <= files + 20,
    }


def ports_of(server: Server) -> list[int | str]:
    """Those of clients, and the socket of the control plane."""
    clients = (server.grpc, server.http, server.metrics)
    found: list[int | str] = [int(where.rpartition(":")[2]) for where in clients]
    sockets = psutil.Process(server.head_pid()).net_connections("unix")
    return found + sorted({one.laddr for one in sockets if str(one.laddr).endswith("/head")})


def open_one(place: int | str, kind: int) -> socket.socket:
    """0: reset at once. 1: a flood of headers. 2: says half a word and waits."""
    connection = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
    connection.settimeout(2.0)
    with suppress(OSError):
        connection.connect(place if isinstance(place, str) else ("127.0.0.1", place))
        if kind == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        elif kind == 1:
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"x-flood: 0123456789\r\n" * 4000)
        else:
            connection.sendall(b"GE")
    return connection


ROWS = {9: overload, 10: unfair, 11: strangers}
