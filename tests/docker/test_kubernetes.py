"""Kubernetes manifests against the published schemas, strictly: an unknown field is an error."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
VERSION = "1.33"
RAY_CLUSTER_FIELDS = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
RAY_JOB_FIELDS = {
    "submissionMode", "entrypoint", "entrypointNumCpus", "runtimeEnvYAML", "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec", "activeDeadlineSeconds", "suspend",
}  # fmt: skip
"""Of KubeRay's custom resources, which the schemas of Kubernetes do not hold."""


def documents() -> list[dict[str, Any]]:
    return [doc for file in sorted(FOLDER.glob("*.yaml")) for doc in yaml.safe_load_all(file.read_text())]


def clusters(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] == "RayJob":
        assert set(document["spec"]) <= RAY_JOB_FIELDS
        yield document["spec"]["rayClusterSpec"]
    elif document["kind"] == "RayCluster":
        yield document["spec"]


def pod_templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] == "Job":
        yield document["spec"]["template"]
    for cluster in clusters(document):
        yield cluster["headGroupSpec"]["template"]
        yield from (group["template"] for group in cluster["workerGroupSpecs"])


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_what_kubernetes_knows_is_valid() -> None:
    known = [doc for doc in documents() if not doc["apiVersion"].startswith("ray.io/")]
    assert sorted(doc["kind"] for doc in known) == ["Job", "Service"]
    for document in known:
        validate(document)


def test_ray_resources_have_kuberays_fields_and_valid_pods() -> None:
    found = [doc for doc in documents() if doc["apiVersion"] == "ray.io/v1"]
    assert sorted(doc["kind"] for doc in found) == ["RayCluster", "RayJob"]
    for document in found:
        for cluster in clusters(document):
            assert set(cluster) <= RAY_CLUSTER_FIELDS
            assert cluster["rayVersion"] == "2.60.0"
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        for template in pod_templates(document):
            validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template})


def test_pods_have_shared_memory_no_root_and_no_secret_in_clear() -> None:
    templates = [template for document in documents() for template in pod_templates(document)]
    assert len(templates) == 5
    for template in templates:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        memory = {v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"}
        for container in pod["containers"]:
            mounted = {m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"}
            assert mounted <= memory
            assert mounted
            tokens = [item for item in container["env"] if "TOKEN" in item["name"]]
            assert tokens
            assert all("secretKeyRef" in item["valueFrom"] for item in tokens)


@pytest.mark.parametrize("path", [("spec", "completionz"), ("spec", "template", "spec", "shareProcesses")])
def test_a_misspelt_field_is_refused(path: tuple[str, ...]) -> None:
    job = copy.deepcopy(next(doc for doc in documents() if doc["kind"] == "Job"))
    place = job
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)
