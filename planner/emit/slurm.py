"""serve.slurm: one task a node runs serve.sh; TensorRT-LLM over several nodes gets one MPI rank a GPU."""

from __future__ import annotations

from planner.emit.layout import Layout
from planner.emit.text import HEADER, comment


def slurm_sh(layout: Layout) -> str:
    """Batch script: `sbatch serve.slurm`. Partition, account and time are the site's own and can be given to sbatch."""
    mpi = layout.deployment.engine == "tensorrt_llm" and layout.nodes_per_replica > 1
    nodes = layout.nodes_per_replica if mpi else layout.machines
    gpus = (
        layout.gpus_per_node if layout.nodes_per_replica > 1 else layout.gpus_per_replica * layout.replicas_per_machine
    )
    directives = [
        f"--job-name={layout.label}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={gpus if mpi else 1}",
        f"--gpus-per-node={gpus}",
        "--exclusive",
        "--output=%x-%j.log",
    ]
    if mpi and layout.replicas > 1:
        directives.append(f"--array=0-{layout.replicas - 1}")
    about = [
        HEADER,
        f"sbatch serve.slurm ({nodes} node(s) with {gpus} GPUs each; add --partition, --account, --time)",
    ]
    start = "srun --kill-on-bad-exit=1 --export=ALL"
    if mpi:
        body = f'export MASTER_ADDR="${{hosts[0]}}" NODE_RANK=0\nexec {start} --mpi=pmix bash serve.sh'
    else:
        body = f"exec {start} bash serve.sh"
    return f"""#!/usr/bin/env bash
{comment(directives, "#SBATCH")}
{comment(about)}
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:-.}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export HOSTS="${{hosts[*]}}"
echo "serving on: $HOSTS" >&2
{body}
"""
