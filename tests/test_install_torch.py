"""Which build of torch `make setup` and the image install, from indexes of files that stand for the real ones."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pip
import pytest

from tools import install_torch
from tools.install_torch import CUDA_COSTS, pinned

ROOT = Path(__file__).resolve().parent.parent
PLAIN, CPU = pinned(), f"{pinned()}+cpu"
UNREACHABLE = "http://127.0.0.1:9/simple"


def write_index(folder: Path, versions: Sequence[str]) -> str:
    """Make a package index that has these versions of an empty torch, and return its address."""
    page = folder / "torch"
    page.mkdir(parents=True)
    links = []
    for version in versions:
        name = f"torch-{version}-py3-none-any.whl"
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(page / name, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        links.append(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    (page / "index.html").write_text("\n".join(links))
    return folder.as_uri()


class Environment:
    """A virtual environment that has pip, and one package index."""

    def __init__(self, folder: Path, index: str) -> None:
        venv.create(folder / "venv", with_pip=False)
        self._python = folder / "venv/bin/python"
        # Making a pip for each would take longer than all that is tested.
        (folder / "path").mkdir()
        (folder / "path/pip").symlink_to(Path(pip.__file__).parent)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        settings = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(folder / "path")}
        self._environment = {**own, **settings}

    def install(self, *words: str) -> str:
        """Run the script, and return what it said first."""
        command = [str(self._python), "tools/install_torch.py", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[0]

    def installed(self) -> str:
        code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
        command = [str(self._python), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offered", "of_torch", "build", "wanted"),
    [
        pytest.param([PLAIN, CPU, "99.0"], None, "cpu", CPU, id="pip's index has both builds, and newer ones"),
        pytest.param([PLAIN], [CPU, "99.0+cpu"], "cpu", CPU, id="torch's index has the CPU build"),
        pytest.param([PLAIN], ["99.0+cpu"], "cpu", PLAIN, id="torch's index lacks this version"),
        pytest.param([PLAIN], None, "cpu", PLAIN, id="torch's index cannot be reached"),
        pytest.param([PLAIN, CPU], [CPU], "cuda", PLAIN, id="CUDA's libraries are asked for"),
    ],
)
def test_the_cpu_build_is_taken_where_there_is_one(
    offered: list[str], of_torch: list[str] | None, build: str, wanted: str, tmp_path: Path
) -> None:
    index = UNREACHABLE if of_torch is None else write_index(tmp_path / "of_torch", of_torch)
    environment = Environment(tmp_path, write_index(tmp_path / "main", offered))
    said = environment.install(build, "--index", index)
    assert environment.installed() == wanted
    # What it costs, before anything is fetched.
    assert ("CPU build" in said and "0.2 GB to fetch" in said) if wanted == CPU else CUDA_COSTS in said
    assert environment.install(build, "--index", index) == f"torch {wanted} is installed"


def test_sizes_that_were_measured_on_another_machine_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, says in (("aarch64", "on x86-64 0.2 GB to fetch"), ("x86_64", "0.2 GB to fetch")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert importlib.reload(install_torch).CPU_COSTS.startswith(says)
