"""The manifests in deploy/kubernetes have fields that there are, and flags, ports, paths and gauges of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ppserve.cli.serve import serve
from ppserve.config import ServerSettings
from ppserve.head.api.http.server import OPEN_PATHS
from ppserve.head.observe.metrics import Metrics

FOLDER = Path(__file__).resolve().parent.parent / "deploy/kubernetes"
SETTINGS = ServerSettings()
PORTS = {"grpc": SETTINGS.port, "http": SETTINGS.http_port, "metrics": SETTINGS.metrics_port}


# The fields that our manifests may have, and what is in them: of the API types as published in autumn 2026, as far
# as we use or might mistake. ANY: a value that is not looked into. [..]: a list of them. !: required.
ANY = None
HPA_TOLERANCE = 1.1
"""Pods are added only where a metric is so many times its threshold."""
LABELS = {"matchLabels": ANY, "matchExpressions": ANY}
META = {"name!": ANY, "namespace": ANY, "labels": ANY, "annotations": ANY}
PROBE = {
    "httpGet": {"path": ANY, "port!": ANY, "host": ANY, "scheme": ANY, "httpHeaders": ANY},
    "tcpSocket": {"port!": ANY, "host": ANY},
    "grpc": {"port!": ANY, "service": ANY},
    "exec": {"command": ANY},
    **dict.fromkeys(("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold"), ANY),
    **dict.fromkeys(("failureThreshold", "terminationGracePeriodSeconds"), ANY),
}
CONTAINER = {
    "name!": ANY, "image": ANY, "command": ANY, "args": ANY, "resources": ANY, "securityContext": ANY,
    "env": [{"name!": ANY, "value": ANY, "valueFrom": ANY}],
    "ports": [{"name": ANY, "containerPort!": ANY, "protocol": ANY, "hostPort": ANY, "hostIP": ANY}],
    "startupProbe": PROBE, "readinessProbe": PROBE, "livenessProbe": PROBE,
    "lifecycle": {"preStop": {"sleep": {"seconds!": ANY}, "exec": ANY, "httpGet": ANY}, "postStart": ANY},
    "volumeMounts": [{"name!": ANY, "mountPath!": ANY, "readOnly": ANY, "subPath": ANY}],
}  # fmt: skip
VOLUME = {
    "name!": ANY,
    "persistentVolumeClaim": {"claimName!": ANY, "readOnly": ANY},
    "secret": {"secretName": ANY, "items": ANY, "defaultMode": ANY, "optional": ANY},
    "emptyDir": {"medium": ANY, "sizeLimit": ANY},
}
POD_SPEC = {
    "containers!": [CONTAINER], "volumes": [VOLUME], "terminationGracePeriodSeconds": ANY, "securityContext": ANY,
    "nodeSelector": ANY, "tolerations": ANY, "serviceAccountName": ANY,
}  # fmt: skip
POD = {"metadata": {"labels": ANY, "annotations": ANY}, "spec": POD_SPEC}
PEER = {"podSelector": LABELS, "namespaceSelector": LABELS, "ipBlock": {"cidr!": ANY, "except": ANY}}
POLICY_PORT = {"protocol": ANY, "port": ANY, "endPort": ANY}
# autoscaling/v2, HorizontalPodAutoscalerBehavior
SCALING_RULES = {
    "stabilizationWindowSeconds": ANY, "selectPolicy": ANY, "tolerance": ANY,
    "policies": [{"type!": ANY, "value!": ANY, "periodSeconds!": ANY}],
}  # fmt: skip
SCHEMAS = {
    # kubernetes-sigs/lws, api/leaderworkerset/v1
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {"spec!": {
        "replicas": ANY, "rolloutStrategy": ANY, "startupPolicy": ANY, "networkConfig": ANY,
        "leaderWorkerTemplate!": {
            "leaderTemplate": POD, "workerTemplate!": POD, "size": ANY, "restartPolicy": ANY,
            "subGroupPolicy": ANY, "volumeClaimTemplates": ANY, "persistentVolumeClaimRetentionPolicy": ANY,
        },
    }},
    ("v1", "Service"): {"spec!": {"selector": ANY, "type": ANY, "clusterIP": ANY, "ports": [
        {"name": ANY, "port!": ANY, "targetPort": ANY, "protocol": ANY, "appProtocol": ANY, "nodePort": ANY}
    ]}},
    ("v1", "ConfigMap"): {"data": ANY, "binaryData": ANY, "immutable": ANY},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"spec!": {
        "podSelector!": LABELS, "policyTypes": ANY,
        "ingress": [{"from": [PEER], "ports": [POLICY_PORT]}], "egress": [{"to": [PEER], "ports": [POLICY_PORT]}],
    }},
    # prometheus-operator/prometheus-operator, pkg/apis/monitoring/v1
    ("monitoring.coreos.com/v1", "PodMonitor"): {"spec!": {
        "selector!": LABELS, "namespaceSelector": ANY, "jobLabel": ANY, "podTargetLabels": ANY,
        "podMetricsEndpoints": [{
            "port": ANY, "path": ANY, "scheme": ANY, "interval": ANY, "scrapeTimeout": ANY, "params": ANY,
            "honorLabels": ANY, "relabelings": ANY, "metricRelabelings": ANY,
        }],
    }},
    # kedacore/keda, apis/keda/v1alpha1; metadata of the scaler `prometheus`
    ("keda.sh/v1alpha1", "ScaledObject"): {"spec!": {
        "scaleTargetRef!": {"name!": ANY, "apiVersion": ANY, "kind": ANY, "envSourceContainerName": ANY},
        **dict.fromkeys(("pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount"), ANY),
        "minReplicaCount": ANY, "maxReplicaCount": ANY, "fallback": ANY,
        "advanced": {
            "restoreToOriginalReplicaCount": ANY, "scalingModifiers": ANY,
            "horizontalPodAutoscalerConfig": {
                "name": ANY, "behavior": {"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES},
            },
        },
        "triggers!": [{
            "type!": ANY, "name": ANY, "useCachedMetrics": ANY, "authenticationRef": ANY, "metricType": ANY,
            "metadata!": {
                "serverAddress!": ANY, "query!": ANY, "threshold!": ANY, "activationThreshold": ANY,
                "namespace": ANY, "ignoreNullValues": ANY, "unsafeSsl": ANY,
            },
        }],
    }},
    # kubernetes-sigs/gateway-api-inference-extension, api/v1
    ("inference.networking.k8s.io/v1", "InferencePool"): {"spec!": {
        "selector!": {"matchLabels!": ANY}, "targetPorts!": [{"number!": ANY}], "appProtocol": ANY,
        "endpointPickerRef!": {
            "name!": ANY, "group": ANY, "kind": ANY, "port": {"number!": ANY}, "failureMode": ANY,
        },
    }},
}  # fmt: skip


def check_fields(found: Any, schema: Any, where: str) -> None:
    """Fails for a field that the type does not have, and for one that it needs and that is not there."""
    if schema is ANY:
        return
    if isinstance(schema, list):
        assert isinstance(found, list), where
        for number, each in enumerate(found):
            check_fields(each, schema[0], f"{where}[{number}]")
        return
    assert isinstance(found, dict), where
    fields = {name.rstrip("!"): (inside, name.endswith("!")) for name, inside in schema.items()}
    assert set(found) <= set(fields), f"{where} has no {set(found) - set(fields)}"
    missing = {name for name, (_, is_required) in fields.items() if is_required} - set(found)
    assert not missing, f"{where} needs {missing}"
    for name, inside in found.items():
        check_fields(inside, fields[name][0], f"{where}.{name}")


def all_documents() -> list[Any]:
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("document", all_documents(), ids=lambda each: each["kind"])
def test_every_field_is_one_of_the_published_type(document: dict[str, Any]) -> None:
    schema = SCHEMAS[document["apiVersion"], document["kind"]]
    check_fields(document, {"apiVersion!": ANY, "kind!": ANY, "metadata!": META, **schema}, document["kind"])


@pytest.mark.parametrize("wrong", [{"spec": {"selector": {}}}, {"spec": {}}, {"spec": {"podSelector": {"a": 1}}}])
def test_the_control_a_misspelt_or_missing_field_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"has no|needs"):
        check_fields(wrong, SCHEMAS["networking.k8s.io/v1", "NetworkPolicy"], "NetworkPolicy")


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
