"""What a rank asks of the system for itself."""

from __future__ import annotations

import resource

import pytest

from ppserve.process.environment import open_many_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised_to"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (1 << 16, 1 << 30)),
        ((1024, NO_LIMIT), (1 << 16, NO_LIMIT)),
        ((1024, 1024), None),
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
