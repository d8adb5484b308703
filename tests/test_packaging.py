"""The sdist is the repository. The wheel that is built of it is the package with the protos, and nothing else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import parallel_state as face
from ppserve import __version__
from ppserve.stage import parallel_state

ROOT = Path(__file__).resolve().parent.parent
NOT_KEPT = {".git", ".venv", "__pycache__", "build", "dist", "out", "ppserve.egg-info"}


def repository() -> set[str]:
    """Return the paths of all files that git keeps or, in an unpacked sdist, of all that are no by-products."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        return {path for path in listed if (ROOT / path).is_file()}
    made = {"PKG-INFO", "setup.cfg"}
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {str(path) for path in paths if not (NOT_KEPT | made) & set(path.parts) and "_cache" not in str(path)}


def build(source: Path, kind: str, into: Path) -> Path:
    """Build an `sdist` or a `wheel` of a folder with the installed setuptools, and return its path."""
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(into)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = into.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return found


@dataclass(frozen=True)
class Built:
    """The files of an sdist and of the wheel that was built of it, and where they lie."""

    sdist: set[str]
    wheel: set[str]
    unpacked: Path
    installed: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    for path in repository():
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / "source" / path)
    with tarfile.open(build(folder / "source", "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / f"ppserve-{__version__}"
    sdist = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    with zipfile.ZipFile(build(unpacked, "wheel", folder)) as wheel:
        wheel.extractall(folder / "installed")
        return Built(sdist, set(wheel.namelist()), unpacked, folder / "installed")


@pytest.mark.slow
def test_the_sdist_is_the_repository(built: Built) -> None:
    """So the tests run from it: what one of them reads is there."""
    made = {
        path for path in built.sdist if path.startswith("ppserve.egg-info/") or path in ("PKG-INFO", "setup.cfg")
    }
    assert built.sdist - made == repository()
    assert {"tests/conftest.py", "demo.py", "protos/ppserve/v1/generation.proto"} <= built.sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_protos_and_nothing_beside_them(built: Built) -> None:
    wanted = {path for path in repository() if path.startswith("ppserve/")}
    wanted |= {f"ppserve/{path}" for path in repository() if path.startswith("protos/")}
    own = {path for path in built.wheel if not path.startswith(f"ppserve-{__version__}.dist-info/")}
    assert own == wanted
    assert {"ppserve/protos/ppserve/v1/generation.proto", "ppserve/assets/tiny/model.safetensors"} <= wanted


@pytest.mark.slow
def test_the_metadata_are_complete(built: Built) -> None:
    found: Message = email.message_from_bytes(
        (built.installed / f"ppserve-{__version__}.dist-info/METADATA").read_bytes()
    )
    assert (found["Name"], found["Version"], found["License-Expression"]) == ("ppserve", __version__, "Apache-2.0")
    assert found["Summary"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).startswith("# ppserve\n")
    pythons = [str(each).rpartition(" :: ")[2] for each in found.get_all("Classifier", []) if ":: 3." in each]
    allowed = SpecifierSet(found["Requires-Python"])
    assert pythons == [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.0")] != []
    extras = {Requirement(each).name for each in found.get_all("Requires-Dist", []) if 'extra == "hub"' in each}
    assert extras == {"huggingface-hub"}
    licences = {path.rpartition("/")[2] for path in built.wheel if "/licenses/" in path}
    assert licences == {"LICENSE"}


@pytest.mark.slow
def test_the_wheel_needs_nothing_else_of_the_repository(built: Built, tmp_path: Path) -> None:
    """All of it is imported, and the built-in model is found, where no other file of ours is in the path."""
    code = """
import pkgutil, sys
sys.path[1:] = [path for path in sys.path[1:] if path != sys.argv[1]]
import ppserve
from ppserve.model.checkpoint.opening import open_checkpoint
for module in pkgutil.walk_packages(ppserve.__path__, "ppserve."):
    if not module.name.endswith(("__main__", "triton_operators")):
        __import__(module.name)
assert open_checkpoint("tiny").architecture.vocab_size
print(ppserve.__file__)
"""
    environment = {**os.environ, "PYTHONPATH": str(built.installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{built.installed}/ppserve/__init__.py\n", done.stderr


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_tests_run_from_the_sdist(built: Built) -> None:
    """All are collected, and those of one room and of deployment pass, which read files beside the code."""
    environment = {**os.environ, "PYTHONPATH": str(built.unpacked)}
    some = ["-m", "not slow", "tests/core/test_partition.py", "tests/test_deployment.py"]
    for words in (["--collect-only", "tests"], some):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        done = subprocess.run(
            command, cwd=built.unpacked, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_what_builds_the_package_is_installed_with_the_tests() -> None:
    """The tests above build without a network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    required = set(project["build-system"]["requires"])
    assert required <= set(project["project"]["optional-dependencies"]["dev"])
    assert {Requirement(each).name for each in required} <= pinned


def test_the_module_at_the_top_is_a_face_without_state_of_its_own() -> None:
    public = {name for name in vars(parallel_state) if not name.startswith("_")} - {"annotations"}
    assert {"initialize_model_parallel", "get_pp_group"} <= public
    for name in public:
        assert getattr(face, name) is getattr(parallel_state, name), name
    assert "_state" not in vars(face)
