"""balancer.conf: nginx in front of replicas that have their own ports or machines."""

from __future__ import annotations

from planner.emit.layout import Layout
from planner.emit.text import HEADER, comment

CONFIG = "balancer.conf"
LISTEN = 8080


def endpoints(layout: Layout) -> list[str]:
    """Where the replicas answer: ports of this machine, or of machine-0, machine-1, ... (names to be replaced)."""
    native = layout.deployment.engine == "sglang" or (layout.deployment.engine == "vllm" and not layout.plan.model.moe)
    native = native and layout.serve.attention_data_parallel == 1
    found = []
    for index in range(layout.replicas):
        if layout.nodes_per_replica > 1:
            machine, port = index * layout.nodes_per_replica, layout.port
        else:
            machine, slot = divmod(index, layout.replicas_per_machine)
            if native and slot:
                continue
            port = layout.port + slot
        found.append(f"{'127.0.0.1' if layout.machines == 1 else f'machine-{machine}'}:{port}")
    return found


def balancer_conf(layout: Layout) -> str:
    """nginx configuration: fewest connections first, long answers and streaming allowed."""
    about = [HEADER, f"Listens on {LISTEN}. nginx -c \"$PWD/{CONFIG}\" -g 'daemon off;'"]
    if layout.machines > 1:
        about.append("Replace machine-0, machine-1, ... by the addresses of the machines.")
    servers = "\n".join(f"        server {e};" for e in endpoints(layout))
    return f"""{comment(about)}
events {{}}
http {{
    upstream replicas {{
        least_conn;
{servers}
    }}
    server {{
        listen {LISTEN};
        client_max_body_size 64m;
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 3600s;
        }}
    }}
}}
"""
