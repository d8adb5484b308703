"""The Dockerfile, the compose file and the manifests of Kubernetes: what they name is there, as far as it can be
checked without an engine.

`tools/run_dockerfile.py` carries the Dockerfile's steps out; that takes minutes and a network.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ppserve.cli.serve import serve
from ppserve.config import ServerSettings
from ppserve.head.api.http.server import OPEN_PATHS
from ppserve.head.observe.metrics import Metrics
from tools.run_dockerfile import is_ignored, steps

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ServerSettings()
PORTS = {"grpc": SETTINGS.port, "http": SETTINGS.http_port, "metrics": SETTINGS.metrics_port}
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
    for path in (".git/config", ".venv/bin/pip", "tests/test_deployment.py", "ppserve/__pycache__/a"):
        assert is_ignored(path, IGNORED), path


def test_the_image_starts_the_server_as_nobody_in_particular() -> None:
    last = dict(STEPS)
    assert last["USER"] not in ("0", "root")
    init, dashes, *command = json.loads(last["ENTRYPOINT"])
    assert (init, dashes, command) == ("tini", "--", ["ppserve", "serve"])
    context = serve.make_context("serve", json.loads(last["CMD"]))
    assert context.params["host"] == "0.0.0.0"
    assert json.loads(last["HEALTHCHECK"].partition("CMD ")[2]) == ["ppserve", "health"]
    assert last["EXPOSE"].split() == [str(port) for port in PORTS.values()]


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


# ---- Kubernetes --------------------------------------------------------------------------------------------

FOLDER = ROOT / "deploy/kubernetes"
HPA_TOLERANCE = 1.1
"""Pods are added only where a metric is so many times its threshold."""


def all_documents() -> list[Any]:
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def test_policies_monitor_and_scaling_name_our_pods_ports_and_gauges() -> None:
    template = documents("pipeline.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "None", "a worker that starts again joins"
    labels = {"leaderworkerset.sigs.k8s.io/name": "ppserve", **template["leaderTemplate"]["metadata"]["labels"]}
    found = {each["metadata"]["name"]: each["spec"] for each in all_documents() if each["kind"] == "NetworkPolicy"}
    stages, servers = found["ppserve-stages"], found["ppserve-doors"]
    monitor = documents("monitoring.yaml")["PodMonitor"]["spec"]
    for spec in (stages["podSelector"], servers["podSelector"], monitor["selector"]):
        assert spec["matchLabels"].items() <= labels.items()
    assert "role" not in stages["podSelector"]["matchLabels"], "workers are stages too"
    assert stages["ingress"] == [{"from": [{"podSelector": stages["podSelector"]}]}]
    assert [port["port"] for rule in servers["ingress"] for port in rule["ports"]] == list(PORTS.values())
    assert [endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]] == ["metrics"]
    scaled = documents("scaling.yaml")["ScaledObject"]["spec"]
    pipeline = documents("pipeline.yaml")["LeaderWorkerSet"]
    target = {"apiVersion": pipeline["apiVersion"], "kind": pipeline["kind"], "name": pipeline["metadata"]["name"]}
    assert scaled["scaleTargetRef"] == target
    gauges = {re.sub(r"\w+\((\w+)\)", r"\1", trigger["metadata"]["query"]) for trigger in scaled["triggers"]}
    assert gauges <= our_gauges()
    assert len(gauges) == 2
    shares = [t["metadata"] for t in scaled["triggers"] if "ratio" in t["metadata"]["query"]]
    assert all(float(share["threshold"]) * HPA_TOLERANCE < 0.9 for share in shares), "1 must be well above"
    assert scaled["minReplicaCount"] > 0
    assert "cooldownPeriod" not in scaled, "is for scaling to 0"


def our_gauges() -> set[str]:
    families = text_string_to_metric_families(Metrics(1).page().body.decode())
    return {family.name for family in families if family.type == "gauge"}


def documents(name: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


def test_the_pipeline_s_command_ports_and_probes(tmp_path: Path) -> None:
    found = documents("pipeline.yaml")
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    assert leader["command"] == worker["command"]
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    flags = leader["command"][-1].partition("-m ppserve ")[2].replace("/run/secrets/ppserve/secret", str(secret))
    serve.make_context("serve", flags.split())
    assert {port["name"]: port["containerPort"] for port in leader["ports"]} == PORTS
    assert {port["name"]: port["port"] for port in found["Service"]["spec"]["ports"]} == PORTS
    for probe in ("startupProbe", "readinessProbe"):
        assert leader[probe]["httpGet"]["port"] in PORTS
        assert leader[probe]["httpGet"]["path"] in OPEN_PATHS
    assert "httpGet" not in leader["livenessProbe"], "a head that replaces a stage must not be killed"
    grace_s = template["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > leader["lifecycle"]["preStop"]["sleep"]["seconds"] + SETTINGS.shutdown_timeout_s


def test_the_endpoint_picker_reads_gauges_that_there_are() -> None:
    found = documents("endpoint-picker.yaml")
    assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": PORTS["http"]}]
    (page,) = found["ConfigMap"]["data"].values()
    picker = yaml.safe_load(page)
    # What the router's schema calls for (apix/config/v1alpha1 in llm-d/llm-d-router, August 2026).
    assert (picker["apiVersion"], picker["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    specs = re.findall(r"(?:Spec|metricSpec): (\w+)", page)
    assert len(specs) == 4
    assert set(specs) <= our_gauges()
    label = documents("pipeline.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    plugins = {plugin.get("name", plugin["type"]): plugin.get("parameters", {}) for plugin in picker["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine["name"] == label["metadata"]["labels"]["llm-d.ai/engine-type"]
    assert plugins["metrics-data-source"]["port"] == PORTS["metrics"]
    (source,) = picker["dataLayer"]["sources"]
    (profile,) = picker["schedulingProfiles"]
    used = [source["pluginRef"], *(each["pluginRef"] for each in (*source["extractors"], *profile["plugins"]))]
    assert sorted(used) == sorted(plugins), "a plugin that is not there, or that nobody uses"
