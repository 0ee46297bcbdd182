"""What the plan means on machines: replicas, nodes, ports, names. Every launch file is written from this."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from planner.engines.formats import load_flag
from planner.engines.records import EngineSpec, PrecisionSupport, engine
from planner.errors import InvalidValueError, NoPlanError, PlanFileError
from planner.models.checkpoints import all_checkpoints
from planner.plan import Deployment, OfferChoice, Plan, ServeSettings
from planner.plan_check import machines_in_use

EXACT = {"bf16": "bfloat16", "fp16": "float16"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@cache
def facts() -> dict[str, Any]:
    """facts.yaml: images, ports, spellings. Read once."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(files("planner.emit").joinpath("facts.yaml").read_text("utf-8"), loader)  # noqa: S506 (safe loader)
    return data


@dataclass(frozen=True)
class Layout:
    """The plan laid out. machines: rented machines in use; replicas_per_machine is 1 when a replica spans machines.

    gpus_per_node: GPUs of one replica on one machine. dtype: what activations are computed in.
    """

    plan: Plan
    deployment: Deployment
    serve: ServeSettings
    spec: EngineSpec
    support: PrecisionSupport
    offer: OfferChoice
    model: str
    vendor: str
    machines: int
    replicas: int
    replicas_per_machine: int
    nodes_per_replica: int
    gpus_per_replica: int
    gpus_per_node: int
    dtype: str

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the engine (facts.yaml)."""
        data: dict[str, Any] = facts()["engines"][self.deployment.engine]
        return data

    @property
    def port(self) -> int:
        """First port; replica i of a machine listens on port + i unless the engine balances itself."""
        return int(self.facts["port"])

    @property
    def owned(self) -> bool:
        """True when the machines are the user's own."""
        return self.offer.tier == "owned" or self.offer.provider == "owned"

    @property
    def label(self) -> str:
        """A name that Kubernetes, Slurm and SkyPilot accept (DNS label)."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.model.rsplit("/", 1)[-1].lower()).strip("-")[:40].strip("-")
        return f"serve-{slug}" if slug else "serve"

    @property
    def image(self) -> tuple[str, bool]:
        """Container image for this engine and vendor, and whether the tag was seen in use."""
        row = self.facts["images"].get(self.vendor)
        if row is None:
            raise InvalidValueError(
                f"{self.facts['title']} has no {self.vendor} image", "", "Plan with another engine: --engine vllm."
            )
        return row["name"].format(version=self.deployment.engine_version), bool(row["verified"])

    @property
    def kv_flag(self) -> str:
        """The engine's own word for the KV-cache dtype."""
        words, dtype = self.facts["kv"], self.deployment.kv_cache_dtype
        if dtype not in words:
            raise InvalidValueError(
                f"{self.facts['title']} has no KV-cache dtype {dtype!r}", "", f"It has {', '.join(words)}."
            )
        if words[dtype] == "auto" and EXACT[dtype] != self.dtype:
            raise InvalidValueError(
                f"a {dtype} KV cache does not go with {self.deployment.precision} weights",
                f"{self.facts['title']} keeps it in the model's dtype, {self.dtype}",
                "Solve again.",
            )
        return str(words[dtype])

    @property
    def checkpoint(self) -> str | None:
        """Which kind of checkpoint MODEL must be when the plan knows none to load; None when it does."""
        known = self.deployment.checkpoint or self.deployment.precision == self.plan.model.native_precision
        return (
            facts()["checkpoints"][self.deployment.precision] if self.support.needs_checkpoint and not known else None
        )

    @property
    def load_flag(self) -> str | None:
        """What the engine is told to get this precision: nothing for weights that are published in it."""
        dep = self.deployment
        if dep.checkpoint is not None:
            known = next((c for c in all_checkpoints() if c.repo == dep.checkpoint), None)
            return load_flag(dep.engine, known) if known else None
        if dep.precision == self.plan.model.native_precision and dep.precision not in EXACT:
            return None
        return self.support.flag

    @property
    def gated(self) -> bool:
        """True when the hub asks for an accepted licence and a token."""
        return self.model.startswith(tuple(facts()["gated"]))

    @property
    def packages(self) -> list[str]:
        """What pip installs for this engine at this version and precision."""
        names = [p.format(version=self.deployment.engine_version) for p in self.facts["pip"]]
        extras = facts()["transformers_extras"] if self.deployment.engine == "transformers" else {}
        return names + list(extras.get(self.deployment.precision, []))


def vendor_of(offer: OfferChoice) -> str:
    """'cpu' for shares of a CPU, 'amd' for MI250, MI300X, ...; 'nvidia' otherwise (the only vendors an engine of the table runs on)."""
    gpu = offer.gpu
    if offer.cpu_threads is not None:
        return "cpu"
    return "amd" if re.match(r"(amd[-_ ])?(instinct[-_ ])?mi\d", gpu.lower()) else "nvidia"


CPU_TARGETS = dict.fromkeys(
    ("compose", "kubernetes", "skypilot", "slurm"),
    "the plan is for CPU processes of this machine: the scripts start them",
)


def cpu_exports(threads: int) -> str:
    """Shell lines that keep every process on its share of the CPU. OMP_NUM_THREADS can be set from outside."""
    return (
        "# CPU devices: no GPU is touched, and each process has its share of the cores\n"
        f'export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"\n'
    )


def checked_text(value: str, what: str) -> str:
    """value, refused when it could be read as an option or break a line: nothing emitted depends on guessing."""
    if not value.strip():
        raise InvalidValueError(f"{what} is empty", "the launch files need it", "Plan again with --model.")
    if _CONTROL.search(value):
        raise InvalidValueError(
            f"{what} {value[:60]!r} has control characters", "they do not belong in a command", "Rename it."
        )
    if value.startswith("-"):
        raise InvalidValueError(
            f"{what} {value[:60]!r} begins with a dash", "engines read that as an option", "Write a path as ./NAME."
        )
    return value


def layout_of(plan: Plan) -> Layout:
    """The plan over its machines. NoPlanError: nothing to launch; InputError: the plan contradicts itself."""
    dep = plan.deployment
    if plan.status == "infeasible" or dep is None:
        raise NoPlanError(
            "this plan has no deployment to launch", "it is infeasible", "Relax a limit it names and solve again."
        )
    if plan.task != "serve" or dep.serve is None:
        raise PlanFileError(
            "this plan is not a serving plan", f"its task is {plan.task!r}", "Emit knows serving plans."
        )
    if not dep.offers or min(dep.data_parallel, dep.gpus_per_replica, *(o.gpus_per_instance for o in dep.offers)) < 1:
        raise PlanFileError("the plan's deployment has no machines, GPUs or replicas", "", "Solve again.")
    spec = engine(dep.engine)
    support = next((p for p in spec.precisions if p.precision == dep.precision), None)
    if support is None:
        raise InvalidValueError(f"{dep.engine} does not run {dep.precision!r}", "", "Solve again.")
    for offer in dep.offers:
        for text in (offer.provider, offer.instance_type, offer.region, offer.gpu):
            checked_text(text, "a name in the plan's offers")
    checked_text(dep.engine_version, "the plan's engine version")
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}", dep.engine_version):
        raise PlanFileError(f"{dep.engine_version!r} is not a version of {dep.engine}", "", "Solve again.")
    _check_serve(dep.serve)
    return _lay_out(plan, dep, dep.serve, spec, support)


def _check_serve(serve: ServeSettings) -> None:
    """Settings that no engine starts with."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "attention_data_parallel"):
        value = getattr(serve, name)
        if value is None or value < 1:
            raise PlanFileError(f"{name} of the plan is {value}", "it must be 1 or more", "Solve again.")
    share = serve.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise PlanFileError(
            f"gpu_memory_utilization of the plan is {share}",
            "it must be above 0 and at most 1",
            "Solve again.",
        )


def _lay_out(plan: Plan, dep: Deployment, serve: ServeSettings, spec: EngineSpec, support: PrecisionSupport) -> Layout:
    offer = dep.offers[0]
    per_machine, per_replica = min(o.gpus_per_instance for o in dep.offers), dep.gpus_per_replica
    nodes = -(-per_replica // per_machine)
    if per_replica % nodes or dep.tensor_parallel % serve.attention_data_parallel:
        raise PlanFileError(
            f"{per_replica} GPUs of a replica do not divide over {nodes} machines of {per_machine}",
            "engines want the same number on each",
            "Pin --tp or --pp.",
        )
    if dep.tensor_parallel > (support.max_tensor_parallel or dep.tensor_parallel):
        raise InvalidValueError(
            f"{dep.engine} does not shard {dep.precision} weights", "", "Pin --tp 1 or another precision."
        )
    if plan.model.moe and not support.experts:
        raise InvalidValueError(f"{dep.engine} does not run experts in {dep.precision}", "", "Pin another precision.")
    if nodes > 1 and spec.multi_node == "none":
        raise InvalidValueError(
            f"{dep.engine} does not span machines", f"a replica needs {nodes}", "Plan with --engine vllm."
        )
    share = max(1, min(per_machine // per_replica, dep.data_parallel)) if nodes == 1 else 1
    machines = machines_in_use(per_machine, per_replica, dep.data_parallel)
    if machines > sum(o.count for o in dep.offers):
        raise PlanFileError(
            f"the replicas need {machines} machines", f"the plan has {sum(o.count for o in dep.offers)}", "Solve again."
        )
    return Layout(
        plan=plan,
        deployment=dep,
        serve=serve,
        spec=spec,
        support=support,
        offer=offer,
        model=checked_text(dep.checkpoint or plan.model.hf_id or plan.model.name, "the model"),
        vendor=vendor_of(offer),
        machines=machines,
        replicas=dep.data_parallel,
        replicas_per_machine=share,
        nodes_per_replica=nodes,
        gpus_per_replica=per_replica,
        gpus_per_node=per_replica // nodes,
        dtype=EXACT.get(dep.precision, "float16" if dep.kv_cache_dtype == "fp16" else "bfloat16"),
    )
