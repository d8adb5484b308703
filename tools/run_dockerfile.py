"""Carry out the Dockerfile without a container engine: its steps, in clean root directories, then what it starts.

    python tools/run_dockerfile.py FOLDER [--base ROOT] [--bind PATH ...] [--build-arg NAME=VALUE ...]

Linux, as root. FOLDER gets one root directory per build stage. The base image is stood in for by ROOT, a Debian
with python3; without --base it is made by debootstrap. Every step runs by chroot in namespaces of its own, so
nothing of this host is seen there but the network, and what --bind names (read-only; such as pip's configuration
where packages come from a mirror). Finally the image's command is started as its user: it must become ready,
its HEALTHCHECK must succeed, it must generate, and it must end when told to.

It is kept because CI's machine has no container engine (a docker client, and no daemon): nothing else there shows
that the Dockerfile makes an image that serves. Where there is an engine, `docker build` shows it better.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = Path(__file__).resolve().parent.parent
SILENT_S = 180.0
END_WITHIN_S = 40.0


@dataclass
class Stage:
    """A build stage under way, or the image that it became."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def substitute(self, text: str) -> str:
        """${NAME} and $NAME, as in COPY and ENV."""
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, rest), lines joined, comments gone."""
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined) if word]


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves a file out: the last pattern that matches it, or a folder above it, decides."""
    ignored = False
    parts = path.split("/")
    prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern in patterns:
        keep, wanted = pattern.startswith("!"), pattern.lstrip("!")
        names = parts if wanted.startswith("**/") else prefixes
        if any(fnmatch.fnmatchcase(name, wanted.removeprefix("**/")) for name in names):
            ignored = not keep
    return ignored


class Build:
    """Executes steps. roots: where stages grow; base: what stands in for every base image."""

    def __init__(self, folder: Path, base: Path, binds: list[Path], given: dict[str, str]) -> None:
        self._folder, self._base, self._binds, self._given = folder, base, binds, given
        self._stages: dict[str, Stage] = {}
        self._globals: dict[str, str] = {}
        ignore = (CONTEXT / ".dockerignore").read_text().splitlines()
        self._ignore = [line for line in ignore if line and not line.startswith("#")]

    def run(self, dockerfile: str) -> Stage:
        """All steps; the image."""
        stage: Stage | None = None
        for word, rest in steps(dockerfile):
            print(f"--> {word} {rest[:100]}", flush=True)
            if word == "FROM":
                stage = self._begin(rest)
            elif word == "ARG" and stage is None:
                name, _, default = rest.partition("=")
                self._globals[name] = self._given.get(name, default)
            else:
                assert stage is not None, f"{word} before FROM"
                self._step(stage, word, rest)
        assert stage is not None
        return stage

    def inside(self, stage: Stage, command: list[str]) -> list[str]:
        """The command line that runs `command` in the stage's root, as its user."""
        mounts = [f"mount -t proc proc {stage.root}/proc", f"mount --rbind /dev {stage.root}/dev"]
        for path in self._binds:
            inner = stage.root / path.relative_to("/")
            inner.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                inner.mkdir(exist_ok=True)
            else:
                inner.touch()
            mounts.append(f"mount --rbind -o ro {path} {inner}")
        environment = [f"{k}={v}" for k, v in {**stage.arguments, **stage.environment}.items()]
        change = ["chroot", f"--userspec={stage.user}:{stage.user}", str(stage.root), "/usr/bin/env", "-i"]
        enter = ["sh", "-c", f"cd {shlex.quote(stage.directory)} && exec " + shlex.join(command)]
        script = " && ".join([*mounts, "exec " + shlex.join([*change, *environment, *enter])])
        # Nothing goes on inside when this program is killed.
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
        return [*dies_with_us, "unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]

    # ---- steps ----------------------------------------------------------------------------------------

    def _begin(self, rest: str) -> Stage:
        name = rest.split(" AS ")[1] if " AS " in rest else f"stage-{len(self._stages)}"
        root = self._folder / name
        if root.exists():
            shutil.rmtree(root)
        subprocess.run(["cp", "-a", "--reflink=auto", str(self._base), str(root)], check=True)
        # As every engine does.
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        stage = self._stages[name] = Stage(root, {"PATH": path})
        return stage

    def _step(self, stage: Stage, word: str, rest: str) -> None:
        if word == "ARG":
            name, _, default = rest.partition("=")
            stage.arguments[name] = self._given.get(name, default or self._globals.get(name, ""))
        elif word == "ENV":
            stage.environment |= {k: stage.substitute(v) for k, v in (x.split("=", 1) for x in shlex.split(rest))}
        elif word == "WORKDIR":
            stage.directory = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "COPY":
            self._copy(stage, rest)
        elif word == "RUN":
            subprocess.run(self.inside(stage, ["sh", "-c", rest]), check=True)
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(stage, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[word], json.loads(rest))
        elif word == "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD ")[2])
        elif word not in ("EXPOSE", "STOPSIGNAL"):
            raise SystemExit(f"{word} is not known here")

    def _copy(self, stage: Stage, rest: str) -> None:
        *sources, target = rest.split()
        into = stage.root / (Path(stage.directory) / target).as_posix().lstrip("/")
        if sources[0].startswith("--from="):
            other = self._stages[sources.pop(0).removeprefix("--from=")]
            subprocess.run(["cp", "-a", str(other.root / sources[0].lstrip("/")), str(into)], check=True)
            return
        for source in sources:
            found = CONTEXT / source
            files = [f for f in found.rglob("*") if f.is_file()] if found.is_dir() else [found]
            for file in files:
                if is_ignored(file.relative_to(CONTEXT).as_posix(), self._ignore):
                    continue
                place = into / (file.relative_to(found) if found.is_dir() else file.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, place)


def try_out(build: Build, image: Stage) -> None:
    """Starts what the image starts, on free ports, and asks it."""
    command = [*image.entrypoint, *image.command, "--port", "0", "--http-port", "0", "--metrics-port", "0"]
    command = ["127.0.0.1" if word == "0.0.0.0" else word for word in command]
    print(f"--> starting {shlex.join(command)} as user {image.user}", flush=True)
    log = image.root.parent / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(build.inside(image, command), stdout=out, stderr=out)
    try:
        ready = wait_for_ready(server, log)
        target = ["--target", ready]
        health = subprocess.run(build.inside(image, [*image.health, *target]), check=True, capture_output=True)
        print(f"health: exit {health.returncode} {health.stdout.decode().strip()}")
        prompt = ["ppserve", "generate", *target, "--max-tokens", "16", "Once upon a time"]
        said = subprocess.run(build.inside(image, prompt), check=True, capture_output=True, text=True)
        print(f"generate: {said.stdout.strip()!r}")
        # unshare itself hands no signals on: the image's first process is told, as an engine would.
        (first,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        code = server.wait(END_WITHIN_S)
        print(f"SIGTERM: exit {code}")
        if code:
            raise SystemExit(f"it did not end well:\n{log.read_text()[-2000:]}")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def wait_for_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The gRPC address of the ready line."""
    until_s, said = time.monotonic() + SILENT_S, ""
    while time.monotonic() < until_s and server.poll() is None:
        if (text := log.read_text(errors="replace")) != said:
            until_s, said = time.monotonic() + SILENT_S, text
        if found := re.search(r"^ppserve ready grpc=(\S+)", text, re.MULTILINE):
            print(found[0], flush=True)
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"not ready:\n{log.read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="a root directory with python3 and its venv")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="shown inside, read-only")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        raise SystemExit("needs Linux, and to be root")
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = options.base or folder / "base"
    if not base.exists():
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", str(base)], check=True)
    given = dict(argument.split("=", 1) for argument in options.build_arg)
    build = Build(folder, base.resolve(), options.bind, given)
    image = build.run((CONTEXT / "Dockerfile").read_text())
    try_out(build, image)


if __name__ == "__main__":
    main()
