"""Clients that people already have, unmodified, against servers of this checkout.

    python -m benchmarks.clients.run                        # all but vLLM's, whose package takes gigabytes
    python -m benchmarks.clients.run --only harness --only vllm

Each client is installed, at the version that was tried, in a virtual environment outside the tree
(--environments); the first time takes minutes and needs a package index. A line says what each one showed; the
first that shows something wrong ends the run with a trace.

    harness    lm-evaluation-harness: transformers' log-likelihoods and greedy flags, bit for bit in every setting
    langchain  LangChain's class for completions: whole, streamed, several prompts, asynchronous
    smg        an OpenAI client in front of smg in front of vllm.grpc.engine: the texts that HTTP gives
    guidellm   GuideLLM at 8 streams: every request complete
    vllm       `vllm bench serve` at 8 requests: every request complete
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.clients import gateway, harness, load

HERE = Path(__file__).parent
PLAIN, VLLM = "requirements.txt", "requirements-vllm.txt"
# Name -> what it needs, and what it shows: given the environment's folder of programs.
CLIENTS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "harness": (PLAIN, harness.show),
    "langchain": (PLAIN, load.show_langchain),
    "smg": (PLAIN, gateway.show),
    "guidellm": (PLAIN, load.show_guidellm),
    "vllm": (VLLM, load.show_vllm),
}
# Builds for another torch than the one beside them, which end every program that imports transformers.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
EVERYDAY = tuple(name for name, (needs, _) in CLIENTS.items() if needs == PLAIN)


def programs(environments: Path, requirements: str) -> Path:
    """The `bin` folder of an environment with these packages, which is made if it is not there."""
    folder = environments / Path(requirements).stem
    installed = folder / "installed.txt"
    wanted = (HERE / requirements).read_text()
    if not installed.exists() or installed.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(HERE / requirements)], check=True)
        if requirements == VLLM:
            subprocess.run([*pip[:1], "uninstall", "--quiet", "--yes", *UNWANTED], check=True)
        installed.write_text(wanted)
    return folder / "bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CLIENTS, help="these; may be given several times")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "ppserve-clients")
    arguments = parser.parse_args()
    for name in arguments.only or EVERYDAY:
        requirements, show = CLIENTS[name]
        print(f"{name}: {show(programs(arguments.environments, requirements))}", flush=True)


if __name__ == "__main__":
    main()
