"""The Dockerfile and the compose file, as far as they can be checked without an engine.

`tools/run_dockerfile.py` carries the steps out; that takes minutes and a network, and is done by hand.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from ppserve.cli.serve import serve
from tools.run_dockerfile import is_ignored, steps

ROOT = Path(__file__).resolve().parent.parent
STEPS = steps((ROOT / "Dockerfile").read_text())
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]


def copied() -> list[str]:
    """What the build takes from the repository."""
    lines = [rest.split() for word, rest in STEPS if word == "COPY" and not rest.startswith("--from")]
    return [source for *sources, _ in lines for source in sources]


def test_the_build_finds_what_it_copies() -> None:
    assert {"ppserve", "pyproject.toml", "constraints.txt"} <= set(copied())
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not is_ignored(source, IGNORED), source


def test_files_of_the_package_are_let_in_and_everything_else_stays_out() -> None:
    for path in ("ppserve/assets/tiny/model.safetensors", "ppserve/head/observe/web/index.html"):
        assert (ROOT / path).is_file()
        assert not is_ignored(path, IGNORED), path
    for path in (".git/config", ".venv/bin/pip", "tests/test_image.py", "ppserve/__pycache__/a"):
        assert is_ignored(path, IGNORED), path


def test_the_image_starts_the_server_as_nobody_in_particular() -> None:
    last = dict(STEPS)
    assert last["USER"] not in ("0", "root")
    init, dashes, *command = json.loads(last["ENTRYPOINT"])
    assert (init, dashes, command) == ("tini", "--", ["ppserve", "serve"])
    context = serve.make_context("serve", json.loads(last["CMD"]))
    assert context.params["host"] == "0.0.0.0"
    assert json.loads(last["HEALTHCHECK"].partition("CMD ")[2]) == ["ppserve", "health"]
    assert last["EXPOSE"].split() == [str(serve_default(name)) for name in ("port", "http_port", "metrics_port")]


@pytest.mark.parametrize(("torch", "packages"), [("cpu", ["tini"]), ("cuda", ["tini", "gcc", "libc6-dev"])])
def test_only_the_cuda_image_has_a_compiler(torch: str, packages: list[str], tmp_path: Path) -> None:
    """Triton compiles a C file at its first launch."""
    (tmp_path / "apt-get").write_text('#!/bin/sh\n[ "$1" = update ] || echo "$@"\n')
    (tmp_path / "apt-get").chmod(0o755)
    (installs,) = (rest.partition("&& rm")[0] for word, rest in STEPS if word == "RUN" and "apt-get" in rest)
    last_stage = max(number for number, (word, _) in enumerate(STEPS) if word == "FROM")
    assert ("ARG", "TORCH=cpu") in STEPS[last_stage:], "each stage declares the arguments that it reads"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH": torch}
    done = subprocess.run(["sh", "-c", installs], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["install", "-y", "--no-install-recommends", *packages]


# Of torch's default build on Linux: `pip install --dry-run --no-deps --report - 'torch===2.13.0'`, requires_dist.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_the_cuda_build_of_torch_can_be_installed() -> None:
    """Through the constraints, beside the triton that it asks for."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]


def serve_default(name: str) -> object:
    return next(p for p in serve.params if p.name == name).get_default(click.Context(serve))


def test_the_compose_file_mounts_what_exists() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"ppserve", "prometheus", "grafana"}
    assert (ROOT / "deploy" / services["ppserve"]["build"]["context"]).resolve() == ROOT
    serve.make_context("serve", list(services["ppserve"]["command"]))
    for service in services.values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), "nothing is offered beyond this host"
        for volume in service.get("volumes", []):
            source, _, mode = volume.split(":")
            assert (ROOT / "deploy" / source).exists(), source
            assert mode == "ro"
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["ppserve:9400"]
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
