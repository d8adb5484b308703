"""Where ppserve cannot run, each of its entries says so in one line before it imports anything else."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from ppserve import supported
from tests.e2e.serving import Server

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = "{}; from {} import {}; {}()".format("{}", *PROJECT["scripts"]["ppserve"].split(":"), "main")
MODULE = "{}; import runpy; runpy.run_module('ppserve', run_name='__main__')"
DEMO = "{}; import runpy; runpy.run_path('demo.py', run_name='__main__')"
LIBRARY = "{}; from ppserve import Pipeline; Pipeline('tiny')"
CLIENT = "{}; from ppserve import Client; print(Client(sys.argv[1]).complete('Once', max_tokens=3, seed=1).text)"

MAC = "import sys; sys.platform = 'darwin'"
WINDOWS = "import sys; sys.platform = 'win32'"
OLD = "import sys; sys.version_info = (3, 10, 13, 'final', 0)"
NEW = "import sys; sys.version_info = (3, 14, 0, 'final', 0)"
BITS_32 = "import sys; sys.maxsize = 2**31 - 1"
BIG_ENDIAN = "import sys; sys.byteorder = 'big'"
LINUX = "ppserve runs on Linux (x86-64 or ARM64)"
PYTHONS = "ppserve needs Python 3.11 to 3.13"
REASONS = {
    MAC: f"macOS is not supported: {LINUX}",
    WINDOWS: f"Windows is not supported: {LINUX}",
    OLD: f"Python 3.10 is not supported: {PYTHONS}",
    NEW: f"Python 3.14 is not supported: {PYTHONS}",
    BITS_32: "a 32-bit or big-endian Python is not supported: ppserve runs on x86-64 or ARM64",
    BIG_ENDIAN: "a 32-bit or big-endian Python is not supported: ppserve runs on x86-64 or ARM64",
}
COMMANDS = ["serve", "chat", "generate", "fetch", "health", "restart", "bench", "plan", "top", "--help"]


def child(entry: str, machine: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", entry.format(machine), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("entry", "machine", "arguments"),
    [
        *((MODULE, machine, ["serve"]) for machine in REASONS),
        *((MODULE, MAC, [command]) for command in COMMANDS),
        (MODULE, WINDOWS, []),
        *((entry, machine, []) for entry in (SCRIPT, DEMO) for machine in (WINDOWS, OLD)),
    ],
)
def test_a_command_says_it_in_one_line(entry: str, machine: str, arguments: list[str]) -> None:
    done = child(entry, machine, *arguments)
    said = (done.returncode, done.stdout, done.stderr)
    assert said == (2, "", f"ppserve: error: {REASONS[machine]}\n")


@pytest.mark.parametrize("machine", REASONS)
def test_the_library_raises_it(machine: str) -> None:
    done = child(LIBRARY, machine)
    assert done.returncode == 1
    assert done.stderr.endswith(f"\nImportError: {REASONS[machine]}\n"), done.stderr


def test_other_ranks_are_silent() -> None:
    entry = "import os; os.environ['RANK'] = '1'; " + MODULE
    done = child(entry, MAC)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_client_asks_from_anywhere(shared_server: Server) -> None:
    done = child(CLIENT, MAC, shared_server.grpc)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_here_it_runs() -> None:
    """The control: the same children, unless something is refused."""
    assert supported.refusal() is None
    done = child(MODULE, "import sys", "--version")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", ["ppserve/__init__.py", "ppserve/__main__.py", "ppserve/supported.py", "demo.py"])
def test_an_old_python_can_read_what_asks(path: str) -> None:
    ast.parse((ROOT / path).read_text(), feature_version=(3, 8))


def test_the_versions_are_those_of_the_package() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    minors = [minor for minor in range(40) if f"3.{minor}" in allowed]
    assert (minors[0], minors[-1]) == (supported.FIRST[1], supported.LAST[1])


def test_make_asks_before_it_makes_an_environment() -> None:
    rule = (ROOT / "Makefile").read_text().partition("$(VENV)/.ready: ")[2].splitlines()
    assert rule[1] == "\t$(PYTHON) -m ppserve.supported"
