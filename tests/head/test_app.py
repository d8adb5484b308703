"""The head's process: what it leaves behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ppserve.config import ServeConfig
from ppserve.head.app import HeadProcess
from ppserve.process.environment import RankEnvironment
from ppserve.process.meeting import find_meeting


class Faulty(HeadProcess):
    """No stage is started, and the engine cannot be made."""

    def __init__(self, environment: RankEnvironment) -> None:
        nobody: Any = None
        super().__init__(ServeConfig(), environment, nobody)
        self._keeper_thread = threading.Thread(target=str)

    def _make_engine(self) -> None:
        self._control.close(0.0)
        raise RuntimeError("unforeseen")


def test_nothing_stays_on_disk_when_the_engine_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of this test only")
    environment = RankEnvironment(0, 1, 0, 1)
    place = find_meeting(ServeConfig(), environment).secret_file.parent

    async def run() -> None:
        head = Faulty(environment)
        assert place.exists()
        await head.run()

    with pytest.raises(RuntimeError, match="unforeseen"):
        asyncio.run(run())
    assert not place.exists()


def test_a_keeper_that_fails_ends_the_server_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the head would go on without stage 0: it ends with the thread that started it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of this test only")

    async def run() -> int:
        nobody: Any = None
        head = HeadProcess(ServeConfig(), RankEnvironment(0, 1, 0, 1), nobody)
        monkeypatch.setattr(head._keeper, "run", fail)
        return await head.run()

    def fail() -> int:
        raise OSError(24, "Too many open files")

    assert asyncio.run(run()) == 1
    assert "error: stage 0 cannot be kept alive: [Errno 24] Too many open files" in capfd.readouterr().err
