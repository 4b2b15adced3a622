"""Kubernetes manifests against the published schemas, strictly: an unknown field is an error."""

import copy
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
VERSION = "1.33"
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object", "required": ["spec"]}  # held against Kubernetes' own schema


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


GROUP = {"template": POD, "rayStartParams": TEXTS, "resources": TEXTS, "labels": TEXTS}
RAY_CLUSTER = fields(
    ["headGroupSpec"],
    rayVersion=TEXT,
    authOptions=fields([], mode={"enum": ["token", "disabled"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
    suspend=FLAG,
    managedBy={"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
    enableInTreeAutoscaling=FLAG,
    headServiceAnnotations=TEXTS,
    headGroupSpec=fields(
        ["template"], **GROUP, enableIngress=FLAG, serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}
    ),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ["groupName", "minReplicas", "maxReplicas", "template"],
            **GROUP,
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            idleTimeoutSeconds=COUNT,
            suspend=FLAG,
        ),
    },
)
RAY_JOB = fields(
    [],
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    rayClusterSpec=RAY_CLUSTER,
    submitterPodTemplate=POD,
    submitterConfig=fields([], backoffLimit=COUNT),
    metadata=TEXTS,
    clusterSelector=TEXTS,
    entrypoint=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    entrypointResources=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    activeDeadlineSeconds=COUNT,
    preRunningDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    suspend=FLAG,
)
"""Fields of KubeRay's custom resources (ray.io/v1 of KubeRay 1.6) that a manifest of ours may use, with types, from
its API reference. Its own definitions are a megabyte of Kubernetes' pod templates."""


def documents() -> list[dict[str, Any]]:
    return [doc for file in sorted(FOLDER.glob("*.yaml")) for doc in yaml.safe_load_all(file.read_text())]


def clusters(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] == "RayJob":
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


def ray_documents() -> list[dict[str, Any]]:
    found = [doc for doc in documents() if doc["apiVersion"] == "ray.io/v1"]
    assert sorted(doc["kind"] for doc in found) == ["RayCluster", "RayJob"]
    return found


def validate_ray(document: dict[str, Any]) -> None:
    jsonschema.validate(document["spec"], {"RayCluster": RAY_CLUSTER, "RayJob": RAY_JOB}[document["kind"]])


def test_ray_resources_have_kuberays_fields_and_valid_pods() -> None:
    for document in ray_documents():
        validate_ray(document)
        for template in pod_templates(document):
            validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template})


def test_what_kuberays_operator_refuses_beyond_its_schema() -> None:
    for document in ray_documents():
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= 47
        for cluster in clusters(document):
            assert cluster["authOptions"]["mode"] == "token"  # without it the submitter and the probes send none
            assert cluster["rayVersion"] == metadata.version("ray")  # 2.52 or newer, with a token
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                assert group["template"]["spec"]["containers"]
                assert not (group["rayStartParams"] and group.get("resources"))
                assert "labels" not in group["rayStartParams"]
                names = [item["name"] for item in group["template"]["spec"]["containers"][0].get("env", [])]
                assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_REDIS_ADDRESS"} & set(
                    names
                )  # the operator sets them
        if document["kind"] == "RayJob":
            assert isinstance(yaml.safe_load(document["spec"]["runtimeEnvYAML"])["env_vars"], dict)
            assert document["spec"]["shutdownAfterJobFinishes"]  # ttlSecondsAfterFinished needs it
            assert document["spec"]["backoffLimit"] > 0


@pytest.mark.parametrize("path", ["authOption", "authOptions.modes", "headGroupSpec.rayStartParam", "workerGroupSpecs"])
def test_a_misspelt_field_of_kuberays_is_refused(path: str) -> None:
    cluster = copy.deepcopy(next(doc for doc in ray_documents() if doc["kind"] == "RayCluster"))
    place = cluster["spec"]
    *parents, last = path.split(".")
    for key in parents:
        place = place[key]
    place[last] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate_ray(cluster)


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
            tokens = [item for item in container.get("env", []) if "TOKEN" in item["name"]]
            assert all("secretKeyRef" in item["valueFrom"] for item in tokens)
            assert "IPC_LOCK" not in str(container.get("securityContext"))  # does nothing for a user that is not root


def test_what_is_to_be_made_beforehand_is_named_at_the_top() -> None:
    text = (FOLDER / "job.yaml").read_text()
    top = text[: text.index("\napiVersion")]
    needed = re.findall(r"(?:claimName: |secretRef: \{name: |secretKeyRef: \{name: |configMap: \{name: )([-\w]+)", text)
    assert len(needed) == 5
    assert [name for name in needed if name not in top] == []


def test_rays_object_store_fits_its_shared_memory() -> None:
    """30 % of the memory and at least 10 GB, else Ray puts it on the container's disk."""
    for document in ray_documents():
        for template in pod_templates(document):
            (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "shared-memory"]
            (container,) = template["spec"]["containers"]
            gib = [int(size.removesuffix("Gi")) for size in
                   (volume["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"])]  # fmt: skip
            assert min(200e9, max(10e9, 0.95 * gib[0] * 2**30), 0.3 * gib[1] * 2**30) <= gib[0] * 2**30


@pytest.mark.parametrize("path", [("spec", "completionz"), ("spec", "template", "spec", "shareProcesses")])
def test_a_misspelt_field_is_refused(path: tuple[str, ...]) -> None:
    job = copy.deepcopy(next(doc for doc in documents() if doc["kind"] == "Job"))
    place = job
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)
