"""The Helm chart, rendered by Helm itself: every variant is valid Kubernetes, and says what it must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

helm = pytest.importorskip("helm_python.chart")  # a library with Helm in it, for Linux
CHART = Path(__file__).parents[2] / "deploy/helm/foveate"
KUBERNETES = "1.31"
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cuda": {"engine": {"device": "cuda", "dtype": "bfloat16"}},
    "no drafter": {"engine": {"drafter": False}},
    "secure": {
        "tls": {"secret": "certs", "serverName": "foveate"},
        "gateway": {"apiKeysSecret": "keys", "extraArgs": ["--max-running=128"]},
        "telemetry": {"otlpEndpoint": "http://collector:4317"},
        "networkPolicy": {"gatewayFrom": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
    },
    "keda": {"gateway": {"keda": {"enabled": True}}},
    "redis": {"redis": {"url": "redis://redis:6379/0"}},
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    manifests = helm.Chart.load(CHART).render(values, name="demo", namespace="default")
    texts = [text for name, text in manifests.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def one(documents: list[dict[str, Any]], kind: str, part: str) -> dict[str, Any]:
    (found,) = [one for one in documents if one["kind"] == kind and part in one["metadata"]["name"]]
    return found


def containers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in document["spec"]["template"]["spec"]["containers"]}


def test_helm_has_nothing_to_complain_of() -> None:
    report = helm.lint(CHART, strict=True)
    messages = [one for one in report["messages"] if one["error"] != "icon is recommended"]
    assert messages == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_valid_kubernetes(variant: str) -> None:
    documents = rendered(VARIANTS[variant])
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= {
        document["kind"] for document in documents
    }
    for document in documents:
        if document["kind"] != "ScaledObject":  # KEDA's own
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_is_locked_down_and_probed(variant: str) -> None:
    documents = rendered(VARIANTS[variant])
    for kind, part in (("Deployment", "gateway"), ("StatefulSet", "engine")):
        workload = one(documents, kind, part)
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in containers(workload).values():
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
            assert "memory" in container["resources"]["limits"]


def test_verifier_and_drafter_share_memory_in_one_pod() -> None:
    pod = one(rendered({}), "StatefulSet", "engine")
    both = containers(pod)
    assert set(both) == {"verifier", "drafter"}
    assert pod["spec"]["template"]["spec"]["shareProcessNamespace"] is True
    for container in both.values():
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert container["readinessProbe"]["grpc"]["port"] in (50051, 50052)
    (shm,) = [one for one in pod["spec"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"


def test_on_a_gpu_both_are_processes_of_the_container_that_has_it() -> None:
    pod = one(rendered(VARIANTS["cuda"]), "StatefulSet", "engine")
    (container,) = containers(pod).values()
    assert container["args"] == ["both"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_with_tls_every_hop_has_its_files() -> None:
    documents = rendered(VARIANTS["secure"])
    gateway = containers(one(documents, "Deployment", "gateway"))["gateway"]
    assert {"--peer-ca=/tls/ca.crt", "--api-keys=/keys/keys", "--max-running=128"} <= set(gateway["args"])
    verifier = containers(one(documents, "StatefulSet", "engine"))["verifier"]
    assert {"FOVEATE_TLS_CERT", "FOVEATE_TLS_KEY", "FOVEATE_TLS_CLIENT_CA"} <= {one["name"] for one in verifier["env"]}
    assert "exec" in gateway["readinessProbe"]


def test_keda_scales_by_the_queue_and_the_deployment_does_not_fight_it() -> None:
    documents = rendered(VARIANTS["keda"])
    assert "replicas" not in one(documents, "Deployment", "gateway")["spec"]
    (trigger,) = one(documents, "ScaledObject", "gateway")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(foveate_requests_waiting{foveate_reason="place"})'


def test_only_gateways_reach_engines() -> None:
    policy = one(rendered({}), "NetworkPolicy", "engine")
    (first, _) = policy["spec"]["ingress"]
    assert first["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


@pytest.mark.parametrize("variant", ["defaults", "secure", "cuda"])
def test_the_flags_and_variables_exist(variant: str) -> None:
    from gateway.main import parse_config as parse_gateway

    documents = rendered(VARIANTS[variant])
    gateway = containers(one(documents, "Deployment", "gateway"))["gateway"]
    variables = {one["name"]: one["value"] for one in gateway["env"]}
    config = parse_gateway(gateway["args"], variables)
    assert config.verifiers == ("dns:demo-foveate-engine:50051",)
    verifier = containers(one(documents, "StatefulSet", "engine"))["verifier"]
    known = Path("verifier_svc/main.py").read_text() + Path("foveate/rpc/serving.py").read_text()
    for one_ in verifier["env"]:
        if one_["name"].startswith("FOVEATE_"):
            assert f'"{one_["name"].removeprefix("FOVEATE_").lower().replace("_", "-")}"' in known


def test_every_engine_pod_is_a_verifier_and_a_drafter_of_the_gateways() -> None:
    from gateway.main import parse_config as parse_gateway

    documents = rendered({"engine": {"replicas": 3}})
    gateway = containers(one(documents, "Deployment", "gateway"))["gateway"]
    config = parse_gateway(gateway["args"], {})
    assert config.verifiers == ("dns:demo-foveate-engine:50051",)
    assert config.drafters == ("dns:demo-foveate-engine:50052",)
    services = [document for document in documents if document["kind"] == "Service"]
    (headless,) = [document for document in services if document["spec"].get("clusterIP") == "None"]
    stateful = one(documents, "StatefulSet", "engine")
    assert headless["metadata"]["name"] == stateful["spec"]["serviceName"] == stateful["metadata"]["name"]
    assert headless["spec"]["publishNotReadyAddresses"]
