"""monitor.sh: what to look at while it serves: nvidia-smi, DCGM, nsys (rocm tools on AMD), the engine's own metrics."""

from __future__ import annotations

from planner.emit.layout import Layout, facts
from planner.emit.text import HEADER, comment

_LOAD = "utilization.gpu,utilization.memory,memory.used,memory.total"
_QUERY = f"timestamp,index,name,{_LOAD},power.draw,temperature.gpu,clocks.sm"
_NVIDIA = """    smi) # every 5 s: use, memory, power, clocks
        exec nvidia-smi --query-gpu={query} --format=csv -l 5
        ;;
    dcgm) # every second: {names}
        exec dcgmi dmon -e {fields} -d 1000
        ;;
    nsys) # starts the server under Nsight Systems: kernels of DURATION s after DELAY s; send load meanwhile
        exec nsys profile --trace=cuda,nvtx,osrt --delay "${{DELAY:-300}}" --duration "${{DURATION:-60}}" \\
            --output serve-%p bash "$here/serve.sh"
        ;;
"""
_AMD = """    smi) # use, memory, power, temperature
        exec amd-smi monitor --gfx --mem --vram-usage --power-usage --temperature --watch 5
        ;;
    trace) # starts the server under rocprofv3: kernel trace
        exec rocprofv3 --kernel-trace --output-directory trace -- bash "$here/serve.sh"
        ;;
"""


def monitor_sh(layout: Layout) -> str:
    """The script; its first argument chooses what to watch."""
    fields = facts()["dcgm_fields"]
    amd = layout.vendor == "amd"
    tools = _AMD if amd else _NVIDIA.format(query=_QUERY, names=", ".join(fields.values()), fields=",".join(fields))
    verbs = ["smi", "trace"] if amd else ["smi", "dcgm", "nsys"]
    metrics = ""
    if layout.facts["metrics"]:
        verbs.append("metrics")
        metrics = f"""    metrics) # queue, running requests, cache use, latency histograms (Prometheus text)
        exec curl -fsS "$url{layout.facts["metrics"]}"
        ;;
"""
    about = [HEADER, f"bash monitor.sh {' | '.join([*verbs, 'health'])}; URL of the server in URL."]
    return f"""#!/usr/bin/env bash
{comment(about)}
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
url="${{URL:-http://127.0.0.1:{layout.port}}}"
case "${{1:-smi}}" in
{tools}{metrics}    health)
        exec curl -fsS "$url{layout.facts["health"]}"
        ;;
    *)
        echo "usage: bash monitor.sh {"|".join([*verbs, "health"])} (here: $here)" >&2
        exit 2
        ;;
esac
"""
