"""Rows 5, 6 and 8: the head is killed, the launcher is killed, the server is told to end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from benchmarks.chaos.record import Crowd, Record
from benchmarks.chaos.stage_rows import judged, kill, wait_for
from ppserve.client import Client, RetryPolicy
from tests.e2e.serving import READY, Server, serving, torchrun
from tests.ports import port_to_come_back_to

_LONG = 900


def head_killed(record: Record, short: bool) -> dict[str, Any]:
    """5: the head is killed; its ranks are started again, and the client library resumes by itself."""
    number, back_s = 1 if short else 10, list[float]()
    with serving(2, "--port", str(port_to_come_back_to()), by=lambda n: torchrun_again(n, number)) as server:
        people = Crowd(server.grpc, record, 8, policy=RetryPolicy())
        people.ask_undisturbed()
        with people.asking():
            for _ in range(number):
                time.sleep(2.0)
                record.note("fault")
                heads = len(READY.findall(server.log))
                kill([server.head_pid()])
                back_s.append(wait_for(lambda heads=heads: len(READY.findall(server.log)) > heads, "a new head"))
    verdict = judged(record)
    told = {"restarts": number, "back_after_s": round(max(back_s), 1), **verdict.figures()}
    return {**told, "met": verdict.is_clean}


def torchrun_again(stages: int, times: int) -> list[str]:
    command = torchrun(stages)
    place = command.index("-m", command.index("torch.distributed.run"))
    return [*command[:place], f"--max-restarts={times}", "--monitor-interval=0.2", *command[place:]]


def launcher_killed(record: Record, short: bool) -> dict[str, Any]:
    """6: torchrun is killed under streams: nothing of it is left."""
    number, gone_s, taken, left = 1 if short else 10, list[float](), 0, 0
    for _ in range(number):
        shared = set(os.listdir("/dev/shm"))
        with serving(2) as server:
            people = Crowd(server.grpc, record, 4)
            with people.asking():
                time.sleep(1.0)
                server.processes()
                ports = [int(where.rpartition(":")[2]) for where in (server.grpc, server.http, server.metrics)]
                server.process.kill()
                server.process.wait()
                gone_s.append(wait_for(lambda server=server: not server.left_over(), "the end of all processes"))
            taken += sum(not is_free(port) for port in ports)
        left += len(set(os.listdir("/dev/shm")) - shared)
    record.close()
    told = {"times": number, "all_gone_after_s": round(max(gone_s), 2), "ports_taken": taken, "shared_left": left}
    return {**told, "met": max(gone_s) <= 3.0 and not taken and not left}


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def told_to_end(record: Record, short: bool) -> dict[str, Any]:
    """8: SIGTERM under load, again and again; then twice in a row."""
    number, said_s, out_s = 2 if short else 30, list[float](), list[float]()
    truncated = 0
    for done in range(number):
        with serving(2, "--shutdown-timeout", "60") as server:
            open_then, ended = under_sigterm(server, said_s, out_s)
            truncated += open_then - ended
        print(f"8: {done + 1} of {number}, {truncated} truncated", flush=True)
    with serving(2, "--shutdown-timeout", "600") as server:
        people = Crowd(server.grpc, record, 8, _LONG)
        with people.asking():
            time.sleep(2.0)
            head = server.head_pid()
            kill([head], signal.SIGTERM)
            time.sleep(0.5)
            kill([head], signal.SIGTERM)
            begun_s = time.monotonic()
            server.wait_exit(60)
            at_once_s = time.monotonic() - begun_s
    record.close()
    return {
        "times": number,
        "truncated": truncated,
        "not_serving_after_s": round(max(said_s), 3),
        "out_after_s": round(max(out_s), 1),
        "twice_out_after_s": round(at_once_s, 1),
        "met": not truncated and max(said_s) <= 0.1 and max(out_s) <= 65.0,
    }


def under_sigterm(server: Server, said_s: list[float], out_s: list[float]) -> tuple[int, int]:
    """How many streams were open at the signal, and how many of these came to their whole end."""
    begun, ended = threading.Semaphore(0), list[int]()

    def ask(seed: int) -> None:
        with Client(server.grpc, retry=RetryPolicy(max_attempts=1, resume=False)) as client:
            count = 0
            for chunk in client.stream("Once", seed=seed, max_tokens=_LONG, ignore_eos=True):
                if not count:
                    begun.release()
                count += chunk.num_tokens
            ended.append(count)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(16)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60.0), "a stream did not begin"
    with Client(server.grpc) as client:
        # A watcher of its own: every call costs it as long as the server takes to answer.
        server.processes()
        at_s = time.monotonic()
        os.kill(server.head_pid(), signal.SIGTERM)
        while client.is_serving():
            pass
        said_s.append(time.monotonic() - at_s)
    for thread in threads:
        thread.join(120)
    server.process.send_signal(signal.SIGTERM)
    server.wait_exit(90)
    out_s.append(time.monotonic() - at_s)
    return len(threads), sum(count == _LONG for count in ended)


ROWS = {5: head_killed, 6: launcher_killed, 8: told_to_end}
