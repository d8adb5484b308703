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
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from grpc import aio

from benchmarks.chaos.record import ONE_CONNECTION, Crowd, Record, check
from ppserve.client import AsyncClient
from ppserve.v1 import generation_pb2 as pb
from ppserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.e2e.serving import Server, serving

GREEDY, PLACES = 100, 64


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


# ---- 9 --------------------------------------------------------------------------------------------------

# So many at a time, each without a limit, are served at the highest rate: further ones only wait.
CLOSED = 96


def overload(record: Record, short: bool) -> dict[str, Any]:
    """9: ten times the requests that can be served, each with a time limit."""
    record.close()
    seconds = 24.0 if short else 60.0
    closed = ("--closed", str(CLOSED), "--limit", "inf")
    with serving(2) as server:
        seen_by(calling(server, seconds / 3, *closed))  # the server learns its own speed
        calm = seen_by(calling(server, seconds / 2, *closed))
        peak = calm["good"] / calm["seconds"]
        used = cpu_s(server)
        crowd = seen_by(calling(server, seconds, "--rate", str(10 * peak)))
        used = {name: s - used[name] for name, s in cpu_s(server).items()}
    goodput = crowd["good"] / crowd["seconds"]
    late = crowd["failures"].get("DEADLINE_EXCEEDED", 0) + crowd["late"]
    p99_s = percentile(crowd["refused_s"], 0.99)
    return {
        "peak_requests_per_s": round(peak, 1),
        "offered_per_s": round(crowd["sent"] / seconds, 1),
        "goodput_share": round(goodput / peak, 2),
        "good": crowd["good"],
        "refusal_p50_p99_ms": [round(1e3 * percentile(crowd["refused_s"], share), 1) for share in (0.5, 0.99)],
        "first_token_p50_p99_ms": [round(1e3 * percentile(crowd["first_s"], share)) for share in (0.5, 0.99)],
        "callers_sent_late_p99_ms": round(1e3 * percentile(crowd["behind_s"], 0.99), 1),
        "callers_busy": [round(of["busy"], 2) for of in (calm, crowd)],
        "server_busy": {name: round(s / crowd["seconds"], 2) for name, s in used.items()},
        "failures": crowd["failures"],
        "admitted_but_late": late,
        "met": goodput >= 0.9 * peak and p99_s <= 0.05 and not late,
    }


def calling(server: Server, seconds: float, *flags: str) -> subprocess.Popen[str]:
    """Callers in a process of their own, so that what is measured is the server."""
    words = [sys.executable, "-m", "benchmarks.chaos.callers", "--target", server.grpc, "--seconds", str(seconds)]
    return subprocess.Popen([*words, *flags], stdout=subprocess.PIPE, text=True)


def seen_by(callers: subprocess.Popen[str]) -> dict[str, Any]:
    """What they saw, once they are through."""
    try:
        seen: dict[str, Any] = json.loads(callers.communicate(timeout=180.0)[0])
    finally:
        callers.kill()
        callers.wait()
    return seen


def cpu_s(server: Server) -> dict[str, float]:
    """Seconds that the head and each stage have computed since they began."""
    pids = {"head": server.head_pid(), "stage 0": server.stage_pid(0), "stage 1": server.stage_pid(1)}
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


# ---- 10 -------------------------------------------------------------------------------------------------


def unfair(record: Record, short: bool) -> dict[str, Any]:
    """10: readers who stall beside others, and greedy callers beside a light one."""
    record.close()
    with tempfile.TemporaryDirectory() as directory:
        light, *greedy = (f"the-key-of-caller-{number}-in-chaos" for number in range(1 + GREEDY))
        files = {name: Path(directory) / name for name in ("all", "one", "each")}
        for name, keys in (("all", [light, *greedy]), ("one", greedy[:1]), ("each", greedy)):
            files[name].write_text("\n".join(keys) + "\n")
        with serving(2, "--api-key-file", str(files["all"]), "--max-num-seqs", str(PLACES)) as server:
            greed = asyncio.run(_greedy(server, light, files, 30 if short else 60))
        with serving(2) as server:
            stall = asyncio.run(_stalled(server, 60 if short else 200, 16 if short else 32))
    is_fair = all(ratio <= 2.0 for ratio in greed["light_ttft_ratio"].values())
    return {**greed, **stall, "met": is_fair and stall["live_itl_ratio"] <= 1.2}


async def _first_s(client: AsyncClient) -> float:
    """To the first token of a light caller, who then thinks for a while: who asks all the time is not light."""
    begun_s = time.monotonic()
    first_s = None
    async for _chunk in client.stream("Once", max_tokens=4, seed=1, ignore_eos=True):
        first_s = first_s or time.monotonic() - begun_s
    assert first_s is not None
    await asyncio.sleep(0.25)
    return first_s


async def _greedy(server: Server, light_key: str, keys: dict[str, Path], samples: int) -> dict[str, Any]:
    """100 greedy callers who are one to the server, because they have one key; and 100 with a key each. What the
    light one costs them is told by how much less they get beside it."""
    ttft_s: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    seconds = 0.35 * samples
    async with AsyncClient(server.grpc, api_key=light_key, retry=ONE_CONNECTION) as light:
        await _first_s(light)
        ttft_s["idle"] = [await _first_s(light) for _ in range(samples)]
        for whose in ("one", "each"):
            flags = ("--closed", str(GREEDY), "--tokens", "200", "--limit", "inf", "--keys", str(keys[whose]))
            rates[whose] = []
            for beside in (False, True):
                before = generated(server)
                callers = calling(server, 4.0 + seconds, *flags)
                try:
                    await asyncio.sleep(4.0)
                    if beside:
                        ttft_s[whose] = [await _first_s(light) for _ in range(samples)]
                finally:
                    seen = await asyncio.to_thread(seen_by, callers)
                assert not seen["failures"], seen["failures"]
                rates[whose].append((generated(server) - before) / seen["seconds"])
    p99 = {name: percentile(found, 0.99) for name, found in ttft_s.items()}
    return {
        "greedy": GREEDY,
        "places": PLACES,
        "light_ttft_p99_ms": {name: round(1e3 * s) for name, s in p99.items()},
        "light_ttft_p50_ms": {name: round(1e3 * percentile(found, 0.5)) for name, found in ttft_s.items()},
        "light_ttft_ratio": {name: round(p99[name] / p99["idle"], 2) for name in rates},
        "tokens_per_s_without_and_with": {name: [round(rate) for rate in of] for name, of in rates.items()},
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
    return metric(server, "ppserve_requests_running")


def generated(server: Server) -> int:
    return metric(server, "ppserve_generated_tokens_total")


def metric(server: Server, name: str) -> int:
    """Of all replicas."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        found = re.findall(rf"^{name}\S* (\S+)$", page.read().decode(), re.MULTILINE)
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
