"""Small worlds of real processes for tests: bounded in time, and ended by their process ids.

A world's ranks are started once and then run functions of the test module.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from tests.forking import fork
from tests.slow import require_slow_test


@dataclass(frozen=True, slots=True)
class Died:
    """What `run` reports for a rank that did not live to answer."""

    exit_code: int | None


class World:
    """`size` processes that run what they are told, all at the same time."""

    def __init__(self, size: int) -> None:
        require_slow_test("a world of processes")
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(fork(_serve, rank, theirs))
            theirs.close()
            self._links.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """What `function(rank, *args)` returned in each rank (or the first `size`), or `Died`.

        An exception in a rank fails the test, after all have answered: the next test finds them waiting.
        """
        ranks = range(len(self._links) if size is None else size)
        for rank in ranks:
            self.start(rank, function, *args)
        answers, failures = [], []
        for rank in ranks:
            try:
                answers.append(self.finish(rank))
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)
        return answers

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        """Begin `function(rank, *args)` in one rank; `finish` waits for it."""
        self._links[rank].send((function, args))

    def finish(self, rank: int, timeout_s: float = 100) -> Any:
        if not wait([self._links[rank]], timeout_s):
            raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
        try:
            kind, value = self._links[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(10)
            return Died(self._processes[rank].exitcode)
        if kind == "error":
            raise AssertionError(f"rank {rank} raised\n{value}")
        return value

    def close(self) -> None:
        for process, link in zip(self._processes, self._links, strict=True):
            process.kill()
            process.join(10)
            link.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def _serve(rank: int, link: Connection) -> None:
    """The life of one rank: run, answer, repeat; ends with the test's process."""
    while True:
        try:
            function, args = link.recv()
        except EOFError:
            return
        try:
            answer = ("value", function(rank, *args))
        except Exception:
            answer = ("error", traceback.format_exc())
        link.send(answer)
