"""Slurm, SkyPilot and Kubernetes: each starts launch.sh once on every machine.

JobSet fields: kubernetes-sigs/jobset@0336a8f api/jobset/v1alpha2/jobset_types.go; its pods get JOB_COMPLETION_INDEX, and with
enableDNSHostnames the first one answers at NAME-workers-0-0.NAME.
"""

from __future__ import annotations

from typing import Any

from planner.emit.skypilot import cloud_refusal, machine
from planner.emit.text import HEADER, comment, to_yaml, word
from planner.emit.train.layout import TrainLayout, facts
from planner.plan import OfferChoice

SHARED = "OUTPUT_DIR and DATASET must be paths that every machine sees."


def slurm_sh(laid: TrainLayout) -> str:
    """train.slurm: `sbatch train.slurm`. Partition, account and time are the site's own and can be given to sbatch."""
    directives = [
        f"--job-name={laid.label}",
        f"--nodes={laid.machines}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={laid.gpus_per_machine}",
        "--exclusive",
        "--requeue",
        "--output=%x-%j.log",
    ]
    about = [HEADER, "DATASET=... sbatch train.slurm (add --partition, --account, --time).", SHARED]
    return f"""#!/usr/bin/env bash
{comment(directives, "#SBATCH")}
{comment(about)}
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HOSTS="${{hosts[*]}}"
echo "training on: $HOSTS" >&2
exec srun --kill-on-bad-exit=1 --export=ALL bash launch.sh
"""


def sky_refusal(laid: TrainLayout) -> str | None:
    """Why there is no SkyPilot task for this plan; None when there is one."""
    return cloud_refusal(laid.offer, laid.machines)


def skypilot_yaml(laid: TrainLayout, offer: OfferChoice) -> str:
    """skypilot.yaml: one task over all machines of the plan."""
    states_gb = laid.plan.model.params_total * 18 / 1e9  # one checkpoint: weights, masters and two moments
    block = machine(offer) | {"disk_size": max(256, -(-int(3 * states_gb + 128) // 64) * 64)}
    task: dict[str, Any] = {
        "name": laid.label,
        "resources": block,
        "num_nodes": laid.machines,
        "workdir": ".",
        "envs": {"HF_TOKEN": "", "DATASET": "", "MODEL": "", "EXTRA_ARGS": ""},
        "setup": "python3 -m pip install --quiet " + " ".join(word(p) for p in laid.packages) + "\n",
        "run": 'MACHINE_INDEX="$SKYPILOT_NODE_RANK" HOSTS="$SKYPILOT_NODE_IPS" bash launch.sh\n',
    }
    notes = [f"sky launch -c {laid.label} skypilot.yaml --env HF_TOKEN --env DATASET=..."]
    if laid.machines > 1:
        notes.append("Mount a bucket (file_mounts) for OUTPUT_DIR: every machine writes its part of a checkpoint.")
    if "accelerators" not in block and "instance_type" not in block:
        notes.append(f"SkyPilot's name for {offer.gpu} is not known here: set accelerators.")
    return to_yaml(task, notes=notes)


def kubernetes_yaml(laid: TrainLayout, scripts: dict[str, str]) -> str:
    """ConfigMap with the scripts and a Job; over several machines a JobSet, whose pods find the first by name."""
    name = laid.label
    labels = {"app.kubernetes.io/name": name}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": scripts}
    several = laid.machines > 1
    job: dict[str, Any] = {
        "backoffLimit": 0 if several else 3,
        "template": {"metadata": {"labels": labels}, "spec": _pod(laid, name)},
    }
    if several:
        job |= {"parallelism": laid.machines, "completions": laid.machines, "completionMode": "Indexed"}
        workload: dict[str, Any] = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "failurePolicy": {"maxRestarts": 3},
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
            },
        }
    else:
        workload = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": job}
    row = facts()["images"][laid.vendor]
    notes = [
        "kubectl apply -f kubernetes.yaml",
        "Needs a PersistentVolumeClaim `training-data` that all pods can write: data set, checkpoints and model cache.",
        "Set DATASET below. Token for the hub: kubectl create secret generic hf-token --from-literal=token=...",
    ]
    if several:
        notes.append("Needs the JobSet controller (jobset.sigs.k8s.io) in the cluster.")
    if not row["verified"]:
        notes.append(f"The tag of {row['name']} was not checked: pull it before you rely on it.")
    return to_yaml(config, workload, notes=notes)


def _pod(laid: TrainLayout, name: str) -> dict[str, Any]:
    secret = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
    env: list[dict[str, Any]] = [
        {"name": "HF_TOKEN", "valueFrom": secret},
        {"name": "HF_HOME", "value": "/data/hf"},
        {"name": "INSTALL", "value": "1"},
        {"name": "DATASET", "value": "/data/dataset.jsonl"},
        {"name": "OUTPUT_DIR", "value": "/data/output"},
    ]
    if laid.machines > 1:
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        env += [{"name": "MACHINE_INDEX", "valueFrom": index}]
        env += [{"name": "MASTER_ADDR", "value": f"{name}-workers-0-0.{name}"}]
    resource = "amd.com/gpu" if laid.vendor == "amd" else "nvidia.com/gpu"
    container = {
        "name": "trainer",
        "image": facts()["images"][laid.vendor]["name"],
        "command": ["bash", "/launch/launch.sh"],
        "env": env,
        "resources": {"limits": {resource: laid.gpus_per_machine}},
        "volumeMounts": [
            {"name": "launch", "mountPath": "/launch"},
            {"name": "data", "mountPath": "/data"},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    volumes = [
        {"name": "launch", "configMap": {"name": name}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}},
    ]
    return {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
