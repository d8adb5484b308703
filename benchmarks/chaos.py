"""Row 1 of the table of faults: `kill -9` of any stage, again and again, under streams (`make chaos`).

    PYTHONPATH=. python benchmarks/chaos.py --kills 200 --streams 16 --json FILE

A recorder for each stream writes down when which token came. When all is over, every answer is compared with the
one that the same request got before the first kill, and the longest gap of each stream after each kill is a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ppserve.answers import Options, Token
from ppserve.client import CallFailed, Client, RetryPolicy
from tests.e2e.serving import Server, serving

PROMPT = "Once upon a time, {} small boats"


@dataclass
class Recorder:
    """One stream after the other, each of the same request. came: when tokens came, and how many."""

    number: int
    target: str
    max_tokens: int
    came: list[float] = field(default_factory=list)
    answers: list[list[Token]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def ask(self) -> list[Token]:
        tokens: list[Token] = []
        # Never resumed: a stream must go on upon its own connection.
        with Client(self.target, retry=RetryPolicy(max_attempts=1, resume=False)) as client:
            asked: Options = {"max_tokens": self.max_tokens, "ignore_eos": True, "logprobs": 2}
            asked["seed"] = self.number
            for chunk in client.stream(PROMPT.format(self.number), **asked):
                tokens += chunk.tokens
                self.came.append(time.monotonic())
        return tokens

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            try:
                self.answers.append(self.ask())
            except CallFailed as failure:
                self.failures.append(str(failure))

    def pause(self, from_s: float, until_s: float) -> float:
        """The longest gap between tokens that began within this time, or spans it."""
        inside = [t for t in self.came if from_s - 1.0 <= t <= until_s]
        return max((b - a for a, b in pairwise(inside) if b > from_s), default=until_s - from_s)


def kill_again_and_again(server: Server, num_kills: int, stages: int, every_s: float) -> list[float]:
    """When each kill was."""
    chance, killed = random.Random(0), list[float]()
    for _ in range(num_kills):
        so_far = server.log.count(" formed")
        killed.append(time.monotonic())
        os.kill(server.stage_pid(chance.randrange(stages)), signal.SIGKILL)
        until_s = time.monotonic() + 60
        while server.log.count(" formed") == so_far:
            assert time.monotonic() < until_s, f"no epoch formed again\n{server.log[-3000:]}"
            time.sleep(0.01)
        time.sleep(chance.uniform(0.5, 1.5) * every_s)
    return killed


def measure(
    num_kills: int, streams: int, stages: int = 2, max_tokens: int = 600, every_s: float = 6.0
) -> dict[str, object]:
    """Figures for the table. Raises AssertionError where an answer differs or a stream failed."""
    with serving(stages) as server:
        recorders = [Recorder(number, server.grpc, max_tokens) for number in range(streams)]
        undisturbed = [recorder.ask() for recorder in recorders]
        over = threading.Event()
        threads = [threading.Thread(target=recorder.run, args=(over,)) for recorder in recorders]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        killed = kill_again_and_again(server, num_kills, stages, every_s)
        over.set()
        for thread in threads:
            thread.join()
    assert not any(recorder.failures for recorder in recorders), [r.failures for r in recorders if r.failures]
    for recorder, expected in zip(recorders, undisturbed, strict=True):
        for answer in recorder.answers:
            assert answer == expected, f"stream {recorder.number}: another answer than undisturbed"
    ends = [*killed[1:], killed[-1] + 10]
    pauses = sorted(r.pause(a, b) for r in recorders for a, b in zip(killed, ends, strict=True))
    p95 = pauses[int(0.95 * (len(pauses) - 1))]
    return {
        "kills": num_kills,
        "streams": streams,
        "stages": stages,
        "answers": sum(len(recorder.answers) for recorder in recorders),
        "pause_s": {"p50": statistics.median(pauses), "p95": p95, "max": pauses[-1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--every", type=float, default=6.0, help="Seconds from a new epoch to the next kill.")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    figures = measure(flags.kills, flags.streams, flags.stages, every_s=flags.every)
    print(json.dumps(figures, indent=2))
    if flags.json:
        flags.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
