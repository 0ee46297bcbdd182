"""Jobs on the tools that a user has: Slurm, SkyPilot, Kubernetes, DeepSpeed over ssh. One class a tool, no measuring here."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from planner.errors import EngineFailedError, InputError
from planner.plan import Plan
from planner.validate.engine_http import Server, server_of
from planner.validate.engine_process import Group, free_port, read_log
from planner.validate.engine_run import Launch, Options
from planner.validate.engine_training import METRICS

FILES = {("slurm", "serve"): "serve.slurm", ("slurm", "train"): "train.slurm", ("hostfile", "train"): "launch.sh"}
CALL_LIMIT_S = 120.0
OUTPUT = "validate-output"


class Job:
    """A submitted job. Subclasses know one tool; `cancel` must be safe to call at any moment."""

    name = ""

    def __init__(self, plan: Plan, launch: Launch, options: Options, work: Path, env: Mapping[str, str]) -> None:
        self.plan, self.launch, self.options, self.work, self.env = plan, launch, options, work, dict(env)

    def call(self, *words: str, limit_s: float = CALL_LIMIT_S, check: bool = True) -> str:
        """Output of a tool; EngineFailedError with what it said when it fails."""
        try:
            done = subprocess.run(
                list(words), capture_output=True, text=True, timeout=limit_s, check=False, env=self.env, cwd=self.launch.folder
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            if not check:
                return ""
            raise EngineFailedError(f"{words[0]} did not answer", type(error).__name__, "Try it by hand.") from error
        if done.returncode and check:
            said = " ".join((done.stderr or done.stdout).split())[-200:]
            raise EngineFailedError(
                f"{' '.join(words[:2])} failed with exit code {done.returncode}", said, "Try it by hand."
            )
        return done.stdout

    def submit(self) -> None:
        """Hand the emitted file over."""

    def gone(self) -> str | None:
        """The job's log once it has ended, None while it waits or runs."""

    def servers(self) -> list[Server]:
        """Where it answers; [] while that is not known."""
        return []

    def metrics(self) -> str:
        """metrics.jsonl so far."""
        return ""

    def log(self) -> str:
        """What the job wrote so far."""
        return ""

    def cancel(self) -> None:
        """End it and remove what it left."""


class Slurm(Job):
    """sbatch --parsable, squeue, scontrol show hostnames, scancel."""

    job = ""

    def submit(self) -> None:
        """Submit, with the log and the output in places of our own."""
        name = FILES["slurm", self.plan.task]
        self.output = self.launch.folder / OUTPUT
        path = self.launch.folder / f"{OUTPUT}.log"
        said = self.call("sbatch", "--parsable", f"--output={path}", "--export=ALL", name)
        self.job = said.strip().splitlines()[-1].split(";")[0] if said.strip() else ""
        if not self.job.isdigit():
            raise EngineFailedError("sbatch gave no job number", said[:100], "Try it by hand.")

    def gone(self) -> str | None:
        """squeue lists only jobs that wait or run."""
        return None if self.call("squeue", "-h", "-j", self.job, "-o", "%T", check=False).strip() else self.log()

    def servers(self) -> list[Server]:
        """The nodes of the running job: each machine's replicas, or the first machine of each replica."""
        state, _, nodes = self.call("squeue", "-h", "-j", self.job, "-o", "%T %N", check=False).strip().partition(" ")
        if state != "RUNNING" or not nodes:
            return []
        hosts = self.call("scontrol", "show", "hostnames", nodes).split()
        dep = self.plan.deployment
        step = dep.nodes_per_replica if dep else 1
        return [Server(host, self.launch.port + offset) for host in hosts[::step] for offset in self.launch.ports]

    def metrics(self) -> str:
        """From the file system that all machines share."""
        return read_log(self.output / METRICS)

    def log(self) -> str:
        """Slurm writes it where --output says."""
        return read_log(self.launch.folder / f"{OUTPUT}.log")

    def cancel(self) -> None:
        """scancel, then wait until it is out of the queue."""
        if self.job:
            self.call("scancel", self.job, check=False)
            until = time.monotonic() + CALL_LIMIT_S
            while time.monotonic() < until and self.gone() is None:
                time.sleep(1)
        shutil.rmtree(self.launch.folder / OUTPUT, ignore_errors=True)
        (self.launch.folder / f"{OUTPUT}.log").unlink(missing_ok=True)


class SkyPilot(Job):
    """sky launch -d on a cluster of our own name; ssh reads files; sky down."""

    @property
    def cluster(self) -> str:
        """A name that no other run has."""
        return f"planner-{self.work.name.removeprefix('planner-').lower().replace('_', 'x')}"

    def submit(self) -> None:
        """Rent and start, detached."""
        pairs = {k: v for k, v in self.env.items() if k in ("DATASET", "MODEL", "EXTRA_ARGS", "HF_TOKEN") and v}
        words = [w for k, v in pairs.items() for w in ("--env", f"{k}={v}" if k != "HF_TOKEN" else k)]
        self.call(
            "sky", "launch", "-y", "-d", "-c", self.cluster, *words, "skypilot.yaml", limit_s=self.options.timeout_s
        )

    def gone(self) -> str | None:
        """The job queue says whether it failed."""
        queue = self.call("sky", "queue", self.cluster, check=False)
        return self.log() if any(word in queue for word in ("FAILED", "CANCELLED", "SUCCEEDED")) else None

    def servers(self) -> list[Server]:
        """sky status --endpoint."""
        said = self.call("sky", "status", "--endpoint", str(self.launch.port), self.cluster, check=False).split()
        return [server_of(said[-1])] if said and ":" in said[-1] else []

    def metrics(self) -> str:
        """Over ssh: SkyPilot puts the cluster's name into the ssh configuration."""
        return self.call("ssh", self.cluster, f"cat sky_workdir/output/{METRICS}", check=False)

    def log(self) -> str:
        """sky logs without following."""
        return self.call("sky", "logs", "--no-follow", self.cluster, check=False)

    def cancel(self) -> None:
        """Give the machines back."""
        self.call("sky", "down", "-y", self.cluster, limit_s=600, check=False)


class Kubernetes(Job):
    """kubectl apply, a forwarded port, exec to read metrics, delete."""

    forward: Group | None = None
    applied = False

    @property
    def kind_name(self) -> tuple[str, str]:
        """(kind, name) of the workload in kubernetes.yaml."""
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for tree in yaml.load_all((self.launch.folder / "kubernetes.yaml").read_text("utf-8"), loader):
            if tree and tree["kind"] not in ("ConfigMap", "Service"):
                return str(tree["kind"]).lower(), str(tree["metadata"]["name"])
        raise InputError("kubernetes.yaml has no workload", "", "Emit it again.")

    def submit(self) -> None:
        """kubectl apply."""
        self.applied = True
        self.call("kubectl", "apply", "-f", "kubernetes.yaml")

    def pods(self) -> list[str]:
        """Running pods of the workload, first rank first."""
        label = f"app.kubernetes.io/name={self.kind_name[1]}"
        said = self.call(
            "kubectl", "get", "pods", "-l", label, "--field-selector=status.phase=Running", "-o", "jsonpath={.items[*].metadata.name}",
            check=False,
        )  # fmt: skip
        return sorted(said.split())

    def gone(self) -> str | None:
        """A workload that has a failed pod and no running one has ended."""
        label = f"app.kubernetes.io/name={self.kind_name[1]}"
        phases = self.call(
            "kubectl", "get", "pods", "-l", label, "-o", "jsonpath={.items[*].status.phase}", check=False
        ).split()
        return self.log() if phases and all(p in ("Failed", "Succeeded") for p in phases) else None

    def servers(self) -> list[Server]:
        """The service, through a forwarded port, once a pod runs."""
        if self.forward is None or self.forward.exit_code is not None:
            if not self.pods():
                return []
            self.port = free_port()
            words = ["kubectl", "port-forward", f"service/{self.kind_name[1]}", f"{self.port}:80"]
            self.forward = Group(words, self.env, self.launch.folder, self.work / "forward.log")
        return [Server("127.0.0.1", self.port)]

    def metrics(self) -> str:
        """From the first pod's volume."""
        pods = self.pods()
        return (
            self.call("kubectl", "exec", pods[0], "--", "cat", f"/data/output/{METRICS}", check=False) if pods else ""
        )

    def log(self) -> str:
        """Of all pods."""
        label = f"app.kubernetes.io/name={self.kind_name[1]}"
        return self.call("kubectl", "logs", "-l", label, "--tail=2000", check=False)

    def cancel(self) -> None:
        """Take everything of the file away again."""
        if self.forward is not None:
            self.forward.stop()
        if self.applied:
            self.call(
                "kubectl",
                "delete",
                "-f",
                "kubernetes.yaml",
                "--wait=true",
                "--ignore-not-found",
                check=False,
                limit_s=600,
            )


class Hostfile(Job):
    """launch.sh on the first machine; DeepSpeed reaches the others over ssh. Its launcher ends the remote ranks."""

    group: Group | None = None

    def submit(self) -> None:
        """Start it here; `hostfile` must lie beside it."""
        if not (self.launch.folder / "hostfile").is_file():
            raise InputError(
                "there is no hostfile beside launch.sh", "", "Fill in hostfile.example, name it hostfile and give its folder as --files."
            )  # fmt: skip
        self.output = self.launch.folder / OUTPUT
        self.group = Group(["bash", "launch.sh"], self.env, self.launch.folder, self.work / "log")

    def gone(self) -> str | None:
        """When the launcher has ended."""
        return self.log() if self.group is not None and self.group.exit_code is not None else None

    def metrics(self) -> str:
        """Rank 0 runs here or writes to a shared file system."""
        return read_log(self.output / METRICS)

    def log(self) -> str:
        """What the launcher wrote."""
        return read_log(self.work / "log")

    def cancel(self) -> None:
        """The launcher's own way to end the other machines is SIGINT."""
        if self.group is not None:
            self.group.stop(first_interrupt=True)
        shutil.rmtree(self.launch.folder / OUTPUT, ignore_errors=True)


JOBS: dict[str, type[Job]] = {"slurm": Slurm, "skypilot": SkyPilot, "kubernetes": Kubernetes, "hostfile": Hostfile}
