"""docker-compose.yaml: the engine's container runs serve.sh on one machine; nginx where replicas have ports."""

from __future__ import annotations

from typing import Any

from planner.emit.balancer import CONFIG, endpoints
from planner.emit.layout import Layout
from planner.emit.text import to_yaml


def environment(layout: Layout) -> dict[str, str]:
    """Variables passed through to serve.sh; Compose fills them from the shell or a .env file."""
    names = ["HF_TOKEN", "MODEL", "SERVED_NAME", "REPLICAS", "EXTRA_ARGS"]
    if layout.machines > 1:
        names.append("MACHINE_INDEX")
    if layout.nodes_per_replica > 1:
        names += ["HOSTS", "NODE_RANK", "MASTER_ADDR"]
    values = {name: f"${{{name}:-}}" for name in names}
    if layout.deployment.engine in ("deepspeed_inference", "transformers"):
        values["INSTALL"] = "1"
    return values | {"HF_HOME": "/root/.cache/huggingface"}


def compose_yaml(layout: Layout) -> str:
    """Compose file (no version key). Host networking, so that all ports and nodes reach each other."""
    image, verified = layout.image
    gpus = (
        layout.gpus_per_replica * layout.replicas_per_machine if layout.nodes_per_replica == 1 else layout.gpus_per_node
    )
    server: dict[str, Any] = {
        "image": image,
        "entrypoint": ["bash", "/launch/serve.sh"],
        "network_mode": "host",
        "ipc": "host",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "volumes": ["./:/launch:ro", "${HF_CACHE:-~/.cache/huggingface}:/root/.cache/huggingface"],
        "environment": environment(layout),
        "restart": "unless-stopped",
    }
    if layout.vendor == "amd":
        server |= {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"], "security_opt": ["seccomp=unconfined"]}
    else:
        device = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
        server["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if layout.nodes_per_replica > 1 and layout.vendor != "amd":
        server["cap_add"] = ["IPC_LOCK"]
    services: dict[str, Any] = {"server": server}
    if len(endpoints(layout)) > 1:
        services["balancer"] = {
            "image": "nginx:stable",
            "network_mode": "host",
            "volumes": [f"./{CONFIG}:/etc/nginx/nginx.conf:ro"],
            "depends_on": ["server"],
            "restart": "unless-stopped",
        }
    notes = ["docker compose up -d" + (", on every machine with its own MACHINE_INDEX" if layout.machines > 1 else "")]
    if not verified:
        notes.append(f"The tag of {image} was not checked: docker pull it before you rely on it.")
    return to_yaml({"name": layout.label, "services": services}, notes=notes)
