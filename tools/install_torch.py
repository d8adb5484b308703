"""Install the torch that constraints.txt pins, and say before it is fetched which build that is and what it costs.

    python tools/install_torch.py [cpu|cuda] [--index URL]

It installs into the environment of the python that runs it, and needs nothing but pip. `cpu`, the default, takes
torch's CPU build from pip's own indexes where one of them has it, else from torch's index for it, and where that
cannot be reached the build that is on Python's package index: that one runs on CPUs as well, but comes with CUDA's
libraries. `cuda` takes the latter at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# What 2.13.0 took for Python 3.11 on x86-64, with all that it depends on. Nobody has measured it elsewhere.
CPU_COSTS = "0.2 GB to fetch, 0.9 GB on disk"
CUDA_COSTS = "2.7 GB to fetch, 4.7 GB on disk"
if platform.machine() != "x86_64":
    CPU_COSTS, CUDA_COSTS = (f"on x86-64 {costs}" for costs in (CPU_COSTS, CUDA_COSTS))

# An index that does not answer must not hold up an installation for pip's usual minutes.
_ASK_BRIEFLY = ("--timeout", "10", "--retries", "1")


def pinned() -> str:
    """Return torch's version in constraints.txt, without a build."""
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found is not None, f"{CONSTRAINTS} pins no torch"
    return found[1]


def installed() -> str | None:
    """Return the version of the torch that is there, with its build."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*words: str, is_quiet: bool = False) -> str | None:
    """Return what a pip command printed, or None if it failed; nothing of it is shown then."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE if is_quiet else None,
        text=True,
        check=False,
        stderr=subprocess.DEVNULL if is_quiet else None,
    )
    return (done.stdout or "") if done.returncode == 0 else None


def is_offered(version: str, *index: str) -> bool:
    """Return whether pip's indexes offer this version of torch. index: pip's options that name other ones."""
    listed = pip("index", "versions", "torch", *_ASK_BRIEFLY, *index, is_quiet=True) or ""
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    return found is not None and version in found[1].split(", ")


def choose(build: str, index: str) -> tuple[str, tuple[str, ...], str]:
    """Return the requirement, pip's options for it, and what it is and costs in words."""
    version = pinned()
    # `===` compares the text: with `==` a CPU build of that version would do as well.
    plain = f"torch==={version}"
    if build == "cuda":
        return plain, (), f"torch {version} with CUDA's libraries: {CUDA_COSTS}"
    cpu = f"{version}+cpu"
    if is_offered(cpu):
        return f"torch=={cpu}", (), f"torch {version}, the CPU build: {CPU_COSTS}"
    if is_offered(cpu, "--index-url", index):
        return (
            f"torch=={cpu}",
            ("--extra-index-url", index),
            f"torch {version}, the CPU build, of {index}: {CPU_COSTS}",
        )
    nowhere = f"torch's CPU build ({CPU_COSTS}) is neither on pip's indexes nor to be had from {index}"
    return plain, (), f"{nowhere}; so torch {version} with CUDA's libraries, which runs on CPUs too: {CUDA_COSTS}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", choices=("cpu", "cuda"), nargs="?", default="cpu")
    parser.add_argument("--index", default=CPU_INDEX, metavar="URL", help="The index of CPU builds.")
    options = parser.parse_args()
    if (found := installed()) is not None and found.partition("+")[0] == pinned():
        print(f"torch {found} is installed", flush=True)
        return 0
    requirement, indexes, words = choose(options.build, options.index)
    print(words, flush=True)
    return pip("install", *indexes, "-c", str(CONSTRAINTS), requirement) is None


if __name__ == "__main__":
    sys.exit(main())
