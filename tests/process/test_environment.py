"""What a rank asks of the system for itself, and its log."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ppserve.errors import LauncherError
from ppserve.process.environment import RankEnvironment, open_many_files

NO_LIMIT = resource.RLIM_INFINITY
SURVIVES = "from ppserve.process.environment import survive_full_disks; survive_full_disks()"
SPEAKS = "print('said', file=sys.stderr, flush=True); print('said', flush=True); logging.warning('said')"


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


# ---- the log ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("survives", "code"), [(True, 3), (False, 1)])
def test_a_full_disk_ends_nothing(survives: bool, code: int) -> None:
    """The same without it fails, as a control."""
    program = f"import logging, sys\n{SURVIVES if survives else 'pass'}\n{SPEAKS}\nsys.exit(3)"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, timeout=60)
    assert ended.returncode == code


def test_what_can_be_written_is_and_debug_is_ours_and_not_the_compilers() -> None:
    program = f"""if True:
        import logging, sys
        {SURVIVES}
        {SPEAKS}
        from ppserve.config import ServerSettings
        from ppserve.process.environment import set_up_logging
        set_up_logging(ServerSettings(log_level="debug"), "stage 0")
        logging.getLogger("numba.core").debug("an instruction")
        logging.getLogger("ppserve.stage").debug("a step")
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr[:23]) == ("said\n", "said\nWARNING:root:said\n")
    assert "a step" in ended.stderr
    assert "an instruction" not in ended.stderr
