"""A real Prometheus answers every query of the dashboard, of the rules, of README and of docs.

    python benchmarks/prometheus_queries.py [--seconds 90]

Starts a server, load from `ppserve bench`, and Prometheus (Debian's package `prometheus`, which has promtool),
all on free ports of this host; asks after the given time and ends what it started. A query passes when
Prometheus takes it, and says something, or may rightly say nothing: those that look for trouble.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.serving import serving  # noqa: E402  the checkout's root is no package path

# Grafana fills these in before it asks.
VARIABLES = {"$instance": ".+", "$stage": "0", "$__rate_interval": "30s"}
# Empty when all is well, or when such requests were not sent.
MAY_BE_EMPTY = re.compile(r"== 0|> 0\.|> \d|restarts_total|> 0\)* > ")


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, expression)."""
    board = json.loads((ROOT / "deploy/grafana/ppserve.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield f"dashboard: {panel['title']}", target["expr"]
    for name in ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))):
        for block in re.findall(r"```promql\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
            # Each query begins with its comment.
            for part in re.split(r"^#.*\n", block, flags=re.MULTILINE):
                if part.strip():
                    yield name, " ".join(part.split())


def rules(base: str) -> Iterator[tuple[str, str, str]]:
    """(name, expression, health) of every rule as Prometheus sees it."""
    for group in ask(base, "/api/v1/rules")["groups"]:
        for rule in group["rules"]:
            yield rule["name"], rule["query"], f"{rule['health']} {rule.get('lastError', '')}".strip()


def ask(base: str, path: str, **params: str) -> Any:
    """The answer's `data`; raises RuntimeError with what Prometheus found wrong."""
    url = f"{base}{path}?{urllib.parse.urlencode(params)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["error"]) from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_prometheus(metrics: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The shipped configuration with this server as its target; the process and its address."""
    configuration = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(configuration.replace("ppserve:9400", metrics).replace(": 5s", ": 2s"))
    shutil.copy(ROOT / "deploy/prometheus/rules.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    return process, f"http://{address}"


def check(base: str) -> int:
    """Asks everything, prints what was said, and returns how many queries failed."""
    failures = 0

    def report(where: str, expression: str) -> None:
        nonlocal failures
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        try:
            found = ask(base, "/api/v1/query", query=expression)["result"]
        except RuntimeError as error:
            found, said = None, f"REFUSED {error}"
        else:
            values = [sample["value"][1] for sample in found]
            said = f"{len(values)} series, {', '.join(v[:8] for v in values[:6])}" if values else "nothing"
            if "NaN" in values:
                said += " (NaN: nothing to divide)"
        bad = found is None or (not found and not MAY_BE_EMPTY.search(expression))
        failures += bad
        print(f"{'FAIL' if bad else 'ok  '} {where}\n       {expression}\n       -> {said}")

    for where, expression in queries():
        report(where, expression)
    for name, expression, health in rules(base):
        report(f"rule {name} ({health})", expression)
        failures += not health.startswith("ok")
    return failures


def run_tool(*arguments: str, stdin: bytes | None = None) -> int:
    """promtool, its words printed; its exit code."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True)
    print(f"promtool {' '.join(arguments)}: exit {done.returncode} {(done.stdout + done.stderr).decode().strip()}")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="of load before the questions")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("needs prometheus and promtool: Debian's package prometheus")
    with serving(2) as server, tempfile.TemporaryDirectory(prefix="ppserve-prometheus-") as folder:
        prometheus, base = start_prometheus(server.metrics, Path(folder))
        bench = [sys.executable, "-m", "ppserve", "bench", "--target", server.grpc, "--concurrency", "16"]
        load = subprocess.Popen([*bench, "--duration", str(options.seconds + 60)], stdout=subprocess.DEVNULL)
        try:
            time.sleep(options.seconds)
            failures = check(base)
            (target,) = ask(base, "/api/v1/targets")["activeTargets"]
            print(f"scrapes: {target['health']}, the last took {1e3 * target['lastScrapeDuration']:.0f} ms")
            failures += target["health"] != "up"
            with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
                failures += run_tool("check", "metrics", stdin=answer.read()) != 0
            failures += run_tool("check", "rules", str(ROOT / "deploy/prometheus/rules.yml")) != 0
            failures += run_tool("test", "rules", str(ROOT / "deploy/prometheus/rules_test.yml")) != 0
        finally:
            for process in (load, prometheus):
                process.terminate()
                process.wait(30)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
