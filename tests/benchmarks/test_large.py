"""The memory limit of `benchmarks/large.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import large


@pytest.mark.parametrize("files", [(".", "memory.max", "anon"), ("memory", "memory.limit_in_bytes", "total_rss")])
def test_a_host_has_a_cgroup(files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / ("tasks" if files[0] == "memory" else "cgroup.controllers")).touch()
    monkeypatch.setattr(large, "CGROUPS", tmp_path)
    host = large.MemoryLimit(0)
    (group,) = (tmp_path / files[0]).glob("ppserve-*")
    assert (group / files[1]).read_text() == str(4 << 30)
    (group / "memory.stat").write_text(f"file 7\n{files[2]} {5 << 20}\n")
    assert (host.own_mb(), host.most_mb) == (5, 5)
