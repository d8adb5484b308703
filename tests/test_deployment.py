"""The Dockerfile, the compose file and the manifests of Kubernetes: what they name is there, as far as it can be
checked without an engine.

`tools/run_dockerfile.py` carries the Dockerfile's steps out; that takes minutes and a network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppserve.cli.serve import serve
from ppserve.config import ServerSettings
from ppserve.head.api.http.server import PATHS
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
    """The constraints allow it, beside the triton that it asks for."""
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


def all_documents() -> list[Any]:
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def test_policies_and_monitor_name_our_pods_and_ports() -> None:
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
        assert leader[probe]["httpGet"]["path"] in {each.path for each in PATHS if each.is_open}
    assert "httpGet" not in leader["livenessProbe"], "a head that replaces a stage must not be killed"
    grace_s = template["leaderTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > leader["lifecycle"]["preStop"]["sleep"]["seconds"] + SETTINGS.shutdown_timeout_s


def test_prometheus_operator_has_the_rules_of_compose() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert documents("rules.yaml")["PrometheusRule"]["spec"] == rules


def test_the_alert_of_a_server_that_is_down_knows_the_jobs_of_compose_and_of_kubernetes() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    (down,) = (rule for group in groups for rule in group["rules"] if rule.get("alert") == "PpserveDown")
    selected = re.fullmatch(r'up\{job=~"(.*)"\} == 0', down["expr"])
    assert selected is not None
    (scraped,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    monitor = documents("monitoring.yaml")["PodMonitor"]
    assert "jobLabel" not in monitor["spec"], "a job is named NAMESPACE/NAME of its monitor"
    for job in (scraped["job_name"], *(f"{space}/{monitor['metadata']['name']}" for space in ("default", "a-b"))):
        assert re.fullmatch(selected[1], job), job
    for job in ("ppserve/other", "notppserve", "default/ppserve-2"):
        assert not re.fullmatch(selected[1], job), job


# What the published schemas say of the fields that our manifests have: LeaderWorkerSet's types (lws, v1),
# monitoring.coreos.com/v1's definitions, and Kubernetes' own. A name with `!` is required, a tuple allows several
# types, a set has all values that a field may have, {...: type} is a map, and a list has elements of one kind.
LABELS = {...: str}
SELECTOR = {"matchLabels": LABELS}
DURATION = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
PROBE = {
    "httpGet": {"path": str, "port!": (int, str)},
    "tcpSocket": {"port!": (int, str)},
    "periodSeconds": int,
    "failureThreshold": int,
}
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "env": [{"name!": str, "value": str}],
    "ports": [{"name": str, "containerPort!": int}],
    **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), PROBE),
    "lifecycle": {"preStop": {"sleep": {"seconds!": int}}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": str,
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "secret": {"secretName": str},
}
POD_TEMPLATE = {
    "metadata": {"labels": LABELS},
    "spec": {"terminationGracePeriodSeconds": int, "containers!": [CONTAINER], "volumes": [VOLUME]},
}
RULE = {"alert": str, "record": str, "expr!": (int, str), "for": DURATION, "labels": LABELS, "annotations": LABELS}
PEERS = [{"podSelector": SELECTOR, "namespaceSelector": SELECTOR}]
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "leaderWorkerTemplate!": {
            "size": int,
            "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
            "leaderTemplate": POD_TEMPLATE,
            "workerTemplate!": POD_TEMPLATE,
        },
    },
    ("v1", "Service"): {
        "selector": LABELS,
        "ports": [{"name": str, "port!": int, "targetPort": (int, str), "appProtocol": str}],
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector!": SELECTOR,
        "policyTypes": [{"Ingress", "Egress"}],
        "ingress": [{"from": PEERS, "ports": [{"protocol": {"TCP", "UDP", "SCTP"}, "port": (int, str)}]}],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "jobLabel": str,
        "selector!": SELECTOR,
        "podMetricsEndpoints!": [{"port": str, "path": str, "interval": DURATION}],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups": [{"name!": str, "rules": [RULE]}]},
}


def problems(found: Any, schema: Any, where: str) -> list[str]:
    """What a manifest has that its schema does not allow, and what it lacks."""
    if isinstance(schema, re.Pattern):
        return [] if isinstance(found, str) and schema.fullmatch(found) else [f"{where}: {found!r}"]
    if isinstance(schema, set):
        return [] if found in schema else [f"{where}: {found!r}"]
    if isinstance(schema, list):
        if not isinstance(found, list):
            return [f"{where}: no list"]
        return [each for at, one in enumerate(found) for each in problems(one, schema[0], f"{where}[{at}]")]
    if isinstance(schema, dict):
        return problems_of_fields(found, schema, where)
    types = schema if isinstance(schema, tuple) else (schema,)
    return [] if type(found) in types else [f"{where}: {found!r}"]


def problems_of_fields(found: Any, schema: dict[Any, Any], where: str) -> list[str]:
    if not isinstance(found, dict):
        return [f"{where}: no object"]
    if ... in schema:
        return [each for name in found for each in problems(found[name], schema[...], f"{where}.{name}")]
    known = {name.removesuffix("!"): of_field for name, of_field in schema.items()}
    wrong = [f"{where}: lacks {name[:-1]}" for name in schema if name[-1] == "!" and name[:-1] not in found]
    for name, value in found.items():
        in_field = f"{where}.{name}"
        wrong += problems(value, known[name], in_field) if name in known else [f"{in_field}: unknown"]
    return wrong


def problems_of(document: Any) -> list[str]:
    named = {"apiVersion!": str, "kind!": str, "metadata!": {"name!": str}}
    return problems(
        document, {**named, "spec!": SPECS[document["apiVersion"], document["kind"]]}, document["kind"]
    )


def test_manifests_have_the_fields_of_the_published_schemas() -> None:
    found = all_documents()
    assert {(each["apiVersion"], each["kind"]) for each in found} == set(SPECS)
    for document in found:
        assert problems_of(document) == []
    (rules,) = (each["spec"]["groups"] for each in found if each["kind"] == "PrometheusRule")
    assert all(("alert" in rule) != ("record" in rule) for group in rules for rule in group["rules"])


@pytest.mark.parametrize(
    ("text", "damaged", "problem"),
    [
        ("size: 4", 'size: "4"', ".leaderWorkerTemplate.size: '4'"),
        ("restartPolicy: None", "restartPolicy: Never", ".leaderWorkerTemplate.restartPolicy: 'Never'"),
        ("workerTemplate:", "workersTemplate:", ".leaderWorkerTemplate: lacks workerTemplate"),
        ("failureThreshold: 6", "failureTreshold: 6", "[0].livenessProbe.failureTreshold: unknown"),
        ("tcpSocket: {port: http}", "tcpSocket: http", "[0].livenessProbe.tcpSocket: no object"),
    ],
)
def test_a_manifest_that_the_schema_refuses_is_found(text: str, damaged: str, problem: str) -> None:
    page = (FOLDER / "pipeline.yaml").read_text()
    assert page.count(text) == 1
    document = next(iter(yaml.safe_load_all(page.replace(text, damaged))))
    assert any(each.endswith(problem) for each in problems_of(document))


INSIDE = """
import subprocess, sys
from pathlib import Path
from tools.run_dockerfile import Build, Stage
build = Build(Path("/nowhere"), Path("/nowhere"), [], {})
subprocess.run(build.inside(Stage(Path("/")), ["sh", "-c", "echo begun; exec sleep 600"]))
"""
UNSHARED = ["unshare", "--mount", "--pid", "--fork", "true"]


def test_what_runs_in_an_image_ends_with_the_tool_that_is_killed() -> None:
    if sys.platform != "linux" or subprocess.run(UNSHARED, capture_output=True, check=False).returncode:
        pytest.skip("needs to be root, with namespaces")
    command = [sys.executable, "-c", INSIDE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == "begun\n"
        tool.kill()
        assert tool.stdout.read() == "", "the pipe ends with the last process that holds it"
