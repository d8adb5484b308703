"""What a rank asks of the system for itself."""

from __future__ import annotations

import resource

import pytest

from ppserve.errors import LauncherError
from ppserve.process.environment import RankEnvironment
from ppserve.process.limits import open_many_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised_to"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (1 << 16, 1 << 30)),
        ((1024, NO_LIMIT), (1 << 16, NO_LIMIT)),
        ((1 << 20, 1 << 20), None),
        ((NO_LIMIT, NO_LIMIT), None),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised_to: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _what, given: asked.append(given))
    open_many_files()
    assert asked == ([] if raised_to is None else [raised_to])


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return monkeypatch


def test_a_rank_is_told_who_it_is_by_its_launcher(launcher: pytest.MonkeyPatch) -> None:
    assert RankEnvironment.from_environ() is None
    for told, known in (
        ({"RANK": "2", "WORLD_SIZE": "4"}, RankEnvironment(2, 4, 2, 4)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, RankEnvironment(2, 4, 0, 2)),
    ):
        for name, value in told.items():
            launcher.setenv(name, value)
        assert RankEnvironment.from_environ() == known


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: 'x' is not a whole number from 0 on"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: '-1' is not"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a whole number from 1 on"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: 2 is not one of 2, from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK: '' is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE: '1.5' is not"),
    ],
)
def test_a_launchers_mistake_names_the_variable(
    launcher: pytest.MonkeyPatch, told: dict[str, str], says: str
) -> None:
    for name, value in told.items():
        launcher.setenv(name, value)
    with pytest.raises(LauncherError, match=says):
        RankEnvironment.from_environ()
