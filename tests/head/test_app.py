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
