"""Show that ARM64 gives the tokens of x86-64: the built-in model on both, ARM64 computed by qemu-user.

    python benchmarks/arm64.py FOLDER [--types float32,int8] [--mirror URL]

Linux on x86-64, as root, with debootstrap and qemu-user-static. FOLDER gets a root directory with Debian's Python
for ARM64 and the packages that constraints.txt names: 3 GB to fetch, 5 GB on disk, most of it CUDA's libraries,
with which torch comes for ARM64 on Python's package index. What FOLDER has is not made again; remove it later.
Debian's mirror is debootstrap's own unless --mirror names one; pip has the indexes that it has on this machine.

Two stages give an answer of 64 tokens to one prompt, once greedy and once drawn, in each type: on this CPU with
its best kernels and with the portable ones, and on ARM64. Tokens and the bits of their log-probabilities must be
equal. qemu is registered in a namespace that ends with its command, so nothing of this host is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HANDLER = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
PACKAGES = "python3,ca-certificates"
GLIBC_MINORS = range(17, 37)
"""The versions 2.N of glibc for which wheels are taken: Debian 12 has 2.36."""
CORTEX_A57 = 0x411FD070
WITHIN_S = 3600
TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7},
}

Answers = Mapping[str, list[tuple[int, str]]]
"""Token ids with their log-probabilities in hexadecimal, by the answer's name."""


def answer(types: Sequence[str]) -> None:
    """Print the answers of each type as a line of JSON, and how long they took on standard error."""
    from ppserve import Pipeline

    for name in types:
        begun_s = time.monotonic()
        with Pipeline("tiny", stages=2, **TYPES[name]) as pipeline:
            for draw, options in DRAWS.items():
                wanted = {"max_tokens": 64, "ignore_eos": True, "logprobs": 0, "token_ids": True, **options}
                tokens = pipeline.complete("Once upon a time", **wanted).sequences[0].tokens
                bits = [(token.id, float(token.logprob).hex()) for token in tokens]
                print(json.dumps({f"{name}, {draw}": bits}), flush=True)
        took_s = time.monotonic() - begun_s
        print(f"  {platform.machine()}: {name} took {took_s:.0f} s with compiling", file=sys.stderr, flush=True)


def asked(command: Sequence[str], environment: Mapping[str, str]) -> Answers:
    """Return what a process prints that runs `answer`."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=WITHIN_S, check=True
    )
    return {name: found for line in done.stdout.splitlines() for name, found in json.loads(line).items()}


def make_debian(folder: Path, mirror: Sequence[str]) -> None:
    """Unpack Debian's packages without configuring them: Python needs no more."""
    made = folder / "unfinished"
    shutil.rmtree(made, ignore_errors=True)
    command = ["debootstrap", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}", "--download-only"]
    command += ["bookworm", str(made), *mirror]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=WITHIN_S)
    for name in ("bin", "sbin", "lib"):
        (made / "usr" / name).mkdir(parents=True)
        (made / name).symlink_to(f"usr/{name}")
    for package in (made / "var/cache/apt/archives").glob("*.deb"):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as files:
            unpack = ["tar", "-x", "--keep-directory-symlink", "-C", str(made)]
            subprocess.run(unpack, stdin=files.stdout, check=True, timeout=WITHIN_S)
        package.unlink()
    made.rename(folder / "root")


def install(site: Path) -> None:
    """Put what ppserve needs into a folder. This machine's pip does it, in minutes; ARM64's would take an hour."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in GLIBC_MINORS)]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--quiet"]
    command += ["--target", str(site), "--only-binary=:all:", "--python-version", "3.11"]
    command += [word for name in platforms for word in ("--platform", name)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *needs], check=True, timeout=WITHIN_S)


def imitate_sys(root: Path) -> None:
    """Put into a root's /sys what torch's libraries ask there: how many cores an ARM has, and which."""
    cpus = root / "sys/devices/system/cpu"
    cores = os.cpu_count() or 1
    for core in range(cores):
        identification = cpus / f"cpu{core}/regs/identification"
        identification.mkdir(parents=True, exist_ok=True)
        (identification / "midr_el1").write_text(f"{CORTEX_A57:#018x}\n")
    for name in ("possible", "present"):
        (cpus / name).write_text(f"0-{cores - 1}\n")


def inside(root: Path, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command of ARM64 in its root directory."""
    script = f"""
        mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
        cat {HANDLER} > /proc/sys/fs/binfmt_misc/register
        mount -t proc proc {root}/proc
        mount --rbind /dev {root}/dev
        exec chroot {root} "$@"
    """
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
    return [*unshare, "sh", "-e", "-c", script, "sh", *command]


def on_arm64(folder: Path, mirror: Sequence[str], types: Sequence[str]) -> Answers:
    """Make what is missing in the folder, and return the answers there."""
    root, site = folder / "root", folder / "root/site"
    if not root.exists():
        make_debian(folder, mirror)
    if not site.exists():
        unfinished = root / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        install(unfinished)
        unfinished.rename(site)
    imitate_sys(root)
    source = root / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "ppserve", source / "ppserve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(__file__, source)
    environment = {"PATH": "/usr/bin", "HOME": "/root", "PYTHONPATH": "/source:/site"}
    answers = ["/usr/bin/python3", f"/source/{Path(__file__).name}", "--answer", "--types", ",".join(types)]
    return asked(inside(root, answers), {**environment, "PATH": os.environ["PATH"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--mirror", action="append", default=[], help="Debian's, if not the usual one")
    parser.add_argument("--answer", action="store_true", help="print this machine's answers, and nothing else")
    options = parser.parse_args()
    types = options.types.split(",")
    if options.answer:
        answer(types)
        return 0
    if os.geteuid() != 0 or not HANDLER.exists() or not shutil.which("debootstrap") or options.folder is None:
        parser.error("needs a folder, to be root, and Debian's packages debootstrap and qemu-user-static")
    options.folder.mkdir(parents=True, exist_ok=True)
    here = [sys.executable, __file__, "--answer", "--types", options.types]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    best = asked(here, own)
    others = {
        "x86-64's portable kernels": asked(here, {**own, "PPSERVE_CPU_KERNELS": "portable"}),
        "ARM64": on_arm64(options.folder.resolve(), options.mirror, types),
    }
    differs = False
    for who, found in others.items():
        for name, wanted in best.items():
            tokens = sum(a[0] == b[0] for a, b in zip(wanted, found[name], strict=True))
            bits = sum(a == b for a, b in zip(wanted, found[name], strict=True))
            print(f"{name}, {who}: {tokens} of {len(wanted)} tokens equal, {bits} with their log-probability")
            differs |= bits < len(wanted)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
