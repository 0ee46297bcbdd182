"""kubernetes.yaml: ConfigMap with the scripts, Deployment and Service; a LeaderWorkerSet when a replica spans nodes.

LeaderWorkerSet fields: kubernetes-sigs/lws@024af08 api/leaderworkerset/v1/leaderworkerset_types.go.
"""

from __future__ import annotations

from typing import Any

from planner.emit.layout import Layout
from planner.emit.text import to_yaml

LWS = "leaderworkerset.sigs.k8s.io"


def kubernetes_yaml(layout: Layout, scripts: dict[str, str]) -> str:
    """All objects in one file. One pod is one replica, or one node of a replica."""
    name, several = layout.label, layout.nodes_per_replica > 1
    labels = {"app.kubernetes.io/name": name}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": scripts}
    selector = {f"{LWS}/name": name, f"{LWS}/worker-index": "0"} if several else labels
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    workload = _leader_worker_set(layout, name, labels) if several else _deployment(layout, name, labels)
    image, verified = layout.image
    notes = [
        "kubectl apply -f kubernetes.yaml",
        "Weights are downloaded at each start: mount a volume at HF_HOME to keep them.",
    ]
    if layout.gated or layout.checkpoint:
        notes.append("Token for the hub: kubectl create secret generic hf-token --from-literal=token=...")
    if layout.checkpoint or not layout.plan.model.hf_id:
        kind = layout.checkpoint or "a checkpoint"
        notes.append(f"Add MODEL to the container's env before you apply: the hub id of {kind} of this model.")
    if several:
        notes.append("Needs the LeaderWorkerSet controller (sigs.k8s.io/lws) in the cluster.")
    if not verified:
        notes.append(f"The tag of {image} was not checked: pull it before you rely on it.")
    return to_yaml(config, workload, service, notes=notes)


def _container(layout: Layout, command: list[str], probes: bool) -> dict[str, Any]:
    resource = "amd.com/gpu" if layout.vendor == "amd" else "nvidia.com/gpu"
    secret = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
    env: list[dict[str, Any]] = [{"name": "HF_TOKEN", "valueFrom": secret}, {"name": "REPLICAS", "value": "1"}]
    if layout.deployment.engine in ("deepspeed_inference", "transformers"):
        env.append({"name": "INSTALL", "value": "1"})
    container: dict[str, Any] = {
        "name": "server",
        "image": layout.image[0],
        "command": command,
        "env": env,
        "ports": [{"name": "http", "containerPort": layout.port}],
        "resources": {"limits": {resource: layout.gpus_per_node}},
        "volumeMounts": [{"name": "launch", "mountPath": "/launch"}, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    if probes:
        check = {"httpGet": {"path": layout.facts["health"], "port": "http"}}
        container["startupProbe"] = check | {"periodSeconds": 10, "failureThreshold": 360}
        container["readinessProbe"] = check | {"periodSeconds": 10, "timeoutSeconds": 5}
        container["livenessProbe"] = check | {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 5}
    return container


def _pod(layout: Layout, container: dict[str, Any], name: str) -> dict[str, Any]:
    volumes = [
        {"name": "launch", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
    ]
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 60}


def _deployment(layout: Layout, name: str, labels: dict[str, str]) -> dict[str, Any]:
    pod = _pod(layout, _container(layout, ["bash", "/launch/serve.sh"], True), name)
    spec = {
        "replicas": layout.replicas,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "Recreate"},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _leader_worker_set(layout: Layout, name: str, labels: dict[str, str]) -> dict[str, Any]:
    start = 'NODE_RANK="$LWS_WORKER_INDEX" MASTER_ADDR="$LWS_LEADER_ADDRESS" exec bash /launch/serve.sh'
    command = ["bash", "-c", start]
    leader = {"metadata": {"labels": labels}, "spec": _pod(layout, _container(layout, command, True), name)}
    worker = {"metadata": {"labels": labels}, "spec": _pod(layout, _container(layout, command, False), name)}
    template = {
        "size": layout.nodes_per_replica,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": worker,
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": layout.replicas, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template},
    }
