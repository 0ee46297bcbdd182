"""skypilot.yaml: a SkyPilot task for each offer of the plan that its clouds cover. Fields of SkyPilot 0.14.1."""

from __future__ import annotations

from typing import Any

from planner.emit.layout import Layout, facts
from planner.emit.text import to_yaml, word
from planner.plan import OfferChoice


def refusal(layout: Layout) -> str | None:
    """Why there is no SkyPilot task for this plan; None when there is one."""
    if layout.deployment.engine == "tensorrt_llm" and layout.nodes_per_replica > 1 and not layout.owned:
        return "TensorRT-LLM over several machines is an MPI job: use serve.slurm"
    if needs_container(layout) and layout.offer.provider in facts()["skypilot"]["no_containers"]:
        return (
            f"SkyPilot runs no containers on {layout.offer.provider}, and this engine is not installed with pip there"
        )
    return cloud_refusal(layout.offer, layout.machines)


def cloud_refusal(offer: OfferChoice, machines: int) -> str | None:
    """Why SkyPilot cannot rent that many machines of this offer; None when it can."""
    table = facts()["skypilot"]
    if offer.tier == "owned" or offer.provider == "owned":
        return "the machines are your own"
    if offer.provider not in table["clouds"]:
        return f"SkyPilot 0.14.1 has no cloud {offer.provider!r}"
    if machines > 1 and offer.provider in table["one_node"]:
        return f"SkyPilot starts single machines only on {offer.provider}"
    if offer.tier == "spot" and offer.provider in table["no_spot"]:
        return f"SkyPilot offers no spot machines on {offer.provider}"
    return None


def needs_container(layout: Layout) -> bool:
    """True where pip does not bring the engine: TGI, TensorRT-LLM with its MPI, and ROCm builds."""
    return layout.deployment.engine in ("tgi", "tensorrt_llm") or layout.vendor == "amd"


def machine(offer: OfferChoice) -> dict[str, Any]:
    """Cloud and region, accelerators in SkyPilot's spelling, the instance type where the names agree."""
    table = facts()["skypilot"]
    region = "" if offer.region in ("", "global", "any") else f"/{offer.region}"
    block: dict[str, Any] = {"infra": f"{table['clouds'][offer.provider]}{region}"}
    if offer.provider in table["same_instance_names"]:
        block["instance_type"] = offer.instance_type
    names = table["accelerators"].get(offer.gpu, {})
    spelling = names.get(offer.provider, names.get("any"))
    if spelling:
        block["accelerators"] = {spelling: offer.gpus_per_instance}
    block["use_spot"] = offer.tier == "spot"
    return block


def resources(layout: Layout, offer: OfferChoice) -> dict[str, Any]:
    """The machine, with disk and ports."""
    return machine(offer) | {"disk_size": disk_gb(layout), "ports": [layout.port]}


def disk_gb(layout: Layout) -> int:
    """Disk for the 16-bit weights twice (download and cache) and the software, in steps of 64 GB, at least 256."""
    weights_gb = layout.plan.model.params_total * 2 / 1e9
    return max(256, -(-int(2 * weights_gb + 128) // 64) * 64)


def skypilot_yaml(layout: Layout, offer: OfferChoice, machines: int) -> str:
    """One task: `sky launch skypilot.yaml --env HF_TOKEN`."""
    task: dict[str, Any] = {
        "name": layout.label,
        "resources": resources(layout, offer),
        "num_nodes": machines,
        "workdir": ".",
        "envs": {"HF_TOKEN": "", "MODEL": "", "EXTRA_ARGS": ""},
    }
    if layout.machines > 1 and layout.offer.provider in facts()["skypilot"]["one_node"]:
        return f"SkyPilot starts single machines only on {layout.offer.provider}"
    if needs_container(layout):
        task["resources"]["image_id"] = f"docker:{layout.image[0]}"
    else:
        task["setup"] = "python3 -m pip install --quiet " + " ".join(word(p) for p in layout.packages) + "\n"
    task["run"] = 'MACHINE_INDEX="$SKYPILOT_NODE_RANK" HOSTS="$SKYPILOT_NODE_IPS" bash serve.sh\n'
    notes = [f"sky launch -c {layout.label} skypilot.yaml --env HF_TOKEN"]
    if "accelerators" not in task["resources"] and "instance_type" not in task["resources"]:
        notes.append(f"SkyPilot's name for {offer.gpu} is not known here: set accelerators.")
    return to_yaml(task, notes=notes)
