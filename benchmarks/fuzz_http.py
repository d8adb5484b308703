"""Hardship for the HTTP door of a server of its own, with one line of figures for each kind of it.

    python benchmarks/fuzz_http.py
    python benchmarks/fuzz_http.py --count 1000 --only heads --serve "--stages 1"

    bodies      `--count` (10,000) structured bodies, then twice as many damaged and random ones
    heads       half as many requests with strange headers, and bodies that are not as long as they say
    oversize    64 bodies of 16 MiB in chunks, and 64 heads without an end
    dribbling   200 heads and 200 bodies that come byte by byte, until they are given up
    idle        1,000 connections that ask nothing, until they are closed

Only 2xx and 4xx are answered, without the words "internal error". All the while a canary is asked the same
question, whose answer must stay the same; at the end no request and no KV block may be held, and no process may
have died.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from local_server import running
from service_soak import Server, collected

from tests.head.api.http.strange_bodies import bodies, damaged
from tests.head.api.http.strange_heads import heads, statuses_of_head

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
CANARY = json.dumps({"prompt": "Once upon a time", "seed": 1, "max_tokens": 8}).encode()
CALLERS = 16
PATIENCE_S = 0.5
OVERSIZE, BODY_BYTES = 64, 16 << 20
DRIBBLERS, IDLE = 200, 1000


@dataclass
class Trial:
    """One server under hardship. waits_s: how long each canary took."""

    host: str
    port: int
    server: Server
    songs: set[str] = field(default_factory=set)
    waits_s: list[float] = field(default_factory=list)

    def sing(self) -> None:
        """Ask the canary."""
        begun_s = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        connection.request("POST", "/v1/completions", CANARY)
        answer = connection.getresponse()
        said = json.loads(answer.read())
        connection.close()
        assert answer.status == 200, said
        self.waits_s.append(time.monotonic() - begun_s)
        self.songs.add(json.dumps(said["choices"]))
        assert len(self.songs) == 1, "the canary sings differently"

    def ask(self, asked: Sequence[tuple[str, bytes]]) -> list[int]:
        """The statuses of these bodies, over one connection."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        statuses = []
        for number, (path, body) in enumerate(asked):
            connection.request("POST", path, body)
            answer = connection.getresponse()
            content = answer.read()
            assert b"internal error" not in content.lower(), (path, body, content)
            statuses.append(answer.status)
            if number % 50 == 0:
                self.sing()
        connection.close()
        return statuses

    def ask_heads(self, asked: Sequence[bytes]) -> list[int]:
        """The final statuses of these requests, each on a connection of its own; 0 where none came."""
        statuses = []
        for number, request in enumerate(asked):
            statuses += statuses_of_head(self.port, request, PATIENCE_S) or [0]
            if number % 50 == 0:
                self.sing()
        return statuses


def told(statuses: Counter[int]) -> str:
    assert all(status < 300 or 400 <= status < 500 for status in statuses), statuses
    named = {status or "no answer": count for status, count in sorted(statuses.items())}
    return ", ".join(f"{status} {count}" for status, count in named.items())


async def spread(work: Callable[[Sequence[object]], list[int]], asked: Sequence[object]) -> Counter[int]:
    """By several callers at once."""
    with ThreadPoolExecutor(CALLERS) as pool:
        loop = asyncio.get_running_loop()
        parts = [loop.run_in_executor(pool, work, asked[k::CALLERS]) for k in range(CALLERS)]
        return Counter(status for part in await asyncio.gather(*parts) for status in part)


async def show_bodies(trial: Trial, count: int) -> str:
    structured, random = collected(bodies(), count), collected(damaged(), 2 * count)
    seen = [await spread(trial.ask, each) for each in (structured, random)]
    return f"{len(structured)} structured: {told(seen[0])}; {len(random)} damaged or random: {told(seen[1])}"


async def show_heads(trial: Trial, count: int) -> str:
    asked = collected(heads(), count // 2)
    return f"{len(asked)} heads: {told(await spread(trial.ask_heads, asked))}"


async def show_oversize(trial: Trial, _count: int) -> str:
    peak = [trial.server.rss_bytes()]
    before = peak[0]

    async def send(head: bytes, piece: bytes, times: int) -> int:
        reader, writer = await asyncio.open_connection(trial.host, trial.port)
        answer = b""
        with suppress(ConnectionError):
            writer.write(head)
            for _ in range(times):
                writer.write(piece)
                await writer.drain()
                peak.append(trial.server.rss_bytes())
            writer.write_eof()
        with suppress(ConnectionError):
            answer = await reader.read(1 << 16)
        writer.close()
        return int(answer.split(b" ")[1]) if answer else 0

    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    of_bodies = [send(chunked, chunk, BODY_BYTES >> 16) for _ in range(OVERSIZE)]
    of_heads = [send(b"GET /health HTTP/1.1\r\n", b"x: " + b"y" * 4096 + b"\r\n", 64) for _ in range(OVERSIZE)]
    statuses = Counter(await asyncio.gather(*of_bodies, *of_heads))
    await asyncio.to_thread(trial.sing)
    what = f"{OVERSIZE} bodies of {BODY_BYTES >> 20} MiB, {OVERSIZE} endless heads"
    return f"{what}: {told(statuses)}; +{(max(peak) - before) >> 20} MiB at most"


async def show_dribbling(trial: Trial, _count: int) -> str:
    begun_s = time.monotonic()

    async def dribble(head: bytes) -> int:
        reader, writer = await asyncio.open_connection(trial.host, trial.port)
        writer.write(head)
        answer = asyncio.create_task(reader.read(1 << 16))
        with suppress(ConnectionError):
            while not answer.done():
                writer.write(b"x")
                await writer.drain()
                await asyncio.wait([answer], timeout=0.5)
        writer.close()
        with suppress(ConnectionError):
            said = await answer
            return int(said.split(b" ")[1]) if said else 0
        return 0

    body = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n"
    asked = [dribble(head) for head in (b"GET / HTTP/1.1\r\nx: ", body) for _ in range(DRIBBLERS)]
    under_way = asyncio.gather(*asked)
    while not under_way.done():
        await asyncio.to_thread(trial.sing)
        await asyncio.sleep(0.5)
    what = f"{DRIBBLERS} heads, {DRIBBLERS} bodies: {told(Counter(await under_way))}"
    return f"{what}; all given up after {time.monotonic() - begun_s:.1f} s"


async def show_idle(trial: Trial, _count: int) -> str:
    before = trial.server.rss_bytes()
    begun_s = time.monotonic()
    connections = [await asyncio.open_connection(trial.host, trial.port) for _ in range(IDLE)]
    await asyncio.to_thread(trial.sing)
    grown = (trial.server.rss_bytes() - before) / IDLE
    for reader, writer in connections:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
    took_s = time.monotonic() - begun_s
    return f"{IDLE} connections: {grown:.0f} B each, others served, all closed after {took_s:.1f} s"


KINDS: dict[str, Callable[[Trial, int], Awaitable[str]]] = {
    "bodies": show_bodies, "heads": show_heads, "oversize": show_oversize, "dribbling": show_dribbling,
    "idle": show_idle,
}  # fmt: skip


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", default="--stages 2 --dtype float32", help="flags of the server")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--only", action="append", choices=KINDS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        with running([*shlex.split(asked.serve), "--chat-template", str(template)]) as address:
            host, _, port = address.http.rpartition(":")
            trial = Trial(host, int(port), Server(address.metrics))
            processes = trial.server.processes()
            for name in asked.only or KINDS:
                trial.waits_s.clear()
                begun_s = time.monotonic()
                line = await KINDS[name](trial, asked.count)
                empty_s = await trial.server.until_empty()
                assert processes <= trial.server.processes(), "processes died"
                waits = f"{len(trial.waits_s)} canaries, the slowest {max(trial.waits_s):.2f} s"
                size = f"head {trial.server.rss_bytes() >> 20} MiB"
                took_s = time.monotonic() - begun_s
                print(f"{name}: {line}; {waits}; empty after {empty_s:.2f} s; {size}; {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
