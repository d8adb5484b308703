"""The manifests in deploy/kubernetes name flags, ports, paths and gauges that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from ppserve.cli.serve import serve
from ppserve.config import ServerSettings
from ppserve.head.api.http.server import OPEN_PATHS
from ppserve.head.observe.metrics import Metrics

FOLDER = Path(__file__).resolve().parent.parent / "deploy/kubernetes"
SETTINGS = ServerSettings()
PORTS = {"grpc": SETTINGS.port, "http": SETTINGS.http_port, "metrics": SETTINGS.metrics_port}


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
