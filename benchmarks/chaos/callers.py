"""Callers in a process of their own: so many at a time, or so many a second. Prints what they saw as JSON.

    PYTHONPATH=. python -m benchmarks.chaos.callers --target HOST:PORT --closed 12 --seconds 30
    PYTHONPATH=. python -m benchmarks.chaos.callers --target HOST:PORT --rate 70 --seconds 30

They share the machine with the server that is measured, so they must cost little. With the library of gRPC they
cost as much as the server that refused them. Here calls are frames of HTTP/2 written by hand, on one connection
for each key, and no more is read of what comes back than needs to be. How busy the process was, and how much later
than meant it sent, tell whether the times are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppserve.v1 import generation_pb2 as pb

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
MOST = 2**31 - 1
STATUS_NAMES = {"0": "OK", "4": "DEADLINE_EXCEEDED", "8": "RESOURCE_EXHAUSTED", "14": "UNAVAILABLE"}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """Literal, and not remembered."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@dataclass
class Call:
    """begun_s: when it was sent. first_s: when its first message came. message: the latest whole one."""

    begun_s: float
    done: Callable[[Call, str], None]
    first_s: float | None = None
    rest: bytes = b""
    message: bytes = b""

    def take(self, data: bytes) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic()
        self.rest += data
        while len(self.rest) >= 5 and len(self.rest) >= (end := 5 + int.from_bytes(self.rest[1:5], "big")):
            self.message, self.rest = self.rest[5:end], self.rest[end:]

    @property
    def is_whole(self) -> bool:
        """Whether the last message tells of an answer that ended by itself."""
        ends = (pb.Finish.MAX_TOKENS, pb.Finish.EOS)
        return bool(self.message) and pb.GenerateResponse.FromString(self.message).finish.reason in ends


class Connection(asyncio.Protocol):
    """As much of HTTP/2 and gRPC as a caller of `Generate` needs."""

    def __init__(self, target: str, key: str) -> None:
        fixed = [b"\x83\x86", header(":path", "/ppserve.v1.GenerationService/Generate")]  # POST, http
        fixed += [header(":authority", target), header("te", "trailers")]
        fixed += [header("content-type", "application/grpc")]
        fixed += [header("authorization", f"Bearer {key}")] if key else []
        self._headers = b"".join(fixed)
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # No table of headers: then a status is told in full each time.
        wanted = struct.pack(">HIHI", HEADER_TABLE_SIZE, 0, INITIAL_WINDOW_SIZE, MOST)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, wanted)
        transport.write(preface + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST - 65535)))

    def connection_lost(self, exc: Exception | None) -> None:
        for call in self._calls.values():
            call.done(call, "UNAVAILABLE")
        self._calls.clear()

    def call(self, request: pb.GenerateRequest, limit_s: float, done: Callable[[Call, str], None]) -> None:
        stream, self._next = self._next, self._next + 2
        self._calls[stream] = Call(time.monotonic(), done)
        body = request.SerializeToString()
        headers = self._headers
        if limit_s < math.inf:
            headers += header("grpc-timeout", f"{round(1e3 * limit_s)}m")
        message = b"\0" + struct.pack(">I", len(body)) + body
        assert self._transport is not None
        both = frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, message)
        self._transport.write(both)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 9:
            size = 9 + int.from_bytes(received[at : at + 3], "big")
            if len(received) - at < size:
                break
            kind, flags = received[at + 3], received[at + 4]
            stream = int.from_bytes(received[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, bytes(received[at + 9 : at + size]))
            at += size
        del received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._transport.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        call = self._calls.get(stream)
        if call is None:
            return
        if kind == DATA:
            call.take(payload)
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            del self._calls[stream]
            call.done(call, status_in(payload) if kind == HEADERS else "CANCELLED")


def status_in(headers: bytes) -> str:
    """The status in a block of headers that is in plain text."""
    place = headers.find(b"grpc-status")
    assert place >= 0, headers
    place += len(b"grpc-status")
    code = headers[place + 1 : place + 1 + headers[place]].decode()
    return STATUS_NAMES.get(code, code)


@dataclass
class Seen:
    """good: answers in time. late: answers after their limit. first_s: from the call to the first message of
    these. refused_s: from the call to the refusal. behind_s: how much later than meant each call was made."""

    sent: int = 0
    good: int = 0
    late: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)

    def take(self, call: Call, status: str, limit_s: float) -> None:
        took_s = time.monotonic() - call.begun_s
        if status == "OK" and call.is_whole:
            assert call.first_s is not None
            self.first_s.append(call.first_s - call.begun_s)
            self.good += took_s <= limit_s
            self.late += took_s > limit_s
            return
        self.failures["DEADLINE_EXCEEDED" if status == "OK" else status] += 1
        if status == "RESOURCE_EXHAUSTED":
            self.refused_s.append(took_s)


class Callers:
    """Make calls, on each connection in turn, as the flags say."""

    def __init__(self, flags: argparse.Namespace, connections: list[Connection]) -> None:
        self.seen = Seen()
        self._flags = flags
        self._connections = connections
        self._open = 0
        self._all_done = asyncio.Event()

    def ask(self, place: int, then: Callable[[], None] = lambda: None) -> None:
        request = pb.GenerateRequest(text="Once upon")
        request.sampling.seed = self.seen.sent
        request.stop.max_tokens, request.stop.ignore_eos = self._flags.tokens, True
        self.seen.sent += 1
        self._open += 1

        def done(call: Call, status: str) -> None:
            self.seen.take(call, status, self._flags.limit)
            self._open -= 1
            then()
            if not self._open:
                self._all_done.set()

        self._connections[place % len(self._connections)].call(request, self._flags.limit, done)

    async def closed(self, until_s: float) -> None:
        """Each has one call at a time."""

        def ask(place: int) -> None:
            if time.monotonic() < until_s:
                self.ask(place, lambda: ask(place))

        for place in range(self._flags.closed):
            ask(place)
        await self._all_done.wait()

    async def open_loop(self, until_s: float) -> None:
        """So many a second, whatever becomes of them."""
        dice, due_s = random.Random(0), time.monotonic()
        while (due_s := due_s + dice.expovariate(self._flags.rate)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.seen.behind_s.append(time.monotonic() - due_s)
            self.ask(self.seen.sent)
        self._all_done.clear()
        if self._open:
            await self._all_done.wait()


async def run(flags: argparse.Namespace) -> dict[str, Any]:
    host, _, port = flags.target.rpartition(":")
    loop = asyncio.get_running_loop()
    connections = []
    for key in flags.keys.read_text().split() if flags.keys else [""]:

        def connection(key: str = key) -> Connection:
            return Connection(flags.target, key)

        connections.append((await loop.create_connection(connection, host, int(port)))[1])
    callers = Callers(flags, connections)
    begun_s, cpu_s = time.monotonic(), time.process_time()
    await (callers.closed if flags.closed else callers.open_loop)(begun_s + flags.seconds)
    took_s = time.monotonic() - begun_s
    busy = (time.process_time() - cpu_s) / took_s
    return {**vars(callers.seen), "seconds": took_s, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--closed", type=int, default=0, help="callers, each with one request at a time")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, answered or not")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=float, default=8.0, help="seconds that a caller waits; inf")
    parser.add_argument("--keys", type=Path, help="a file of API keys, one of each caller")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
