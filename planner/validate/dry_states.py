"""What a framework keeps beside the model, stood in for: optimizer states, gradient partitions, buckets, live parameters.

DeepSpeed 0.19.8, from its source: stage_1_and_2.py and stage3.py (fp32 master, two moments, fp32 gradients of the partition;
stage 3 has these or 16-bit ones, not both; reduce buckets of reduce_bucket_size allocated whole, two with overlap_comm, which the
launch files set from stage 2 on; stage 2 drops its 16-bit partition after each step). Which gathered parameters live: dry_zero3.py.
"""

from __future__ import annotations

from typing import Any

from planner.engines.training import framework
from planner.validate.dry_model import torch_modules
from planner.validate.dry_rank import Rank, launch_facts

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "deepspeed": ("master", "exp_avg", "exp_avg_sq", "gradient_copy")}


def held(tensor: Any) -> float:
    """Bytes this rank holds of a tensor or shard; 0 for None and scalars on the host."""
    if tensor is None or not hasattr(tensor, "element_size"):
        return 0.0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return float(local.numel() * local.element_size())


def release_gradients(model: Any, rank: Rank, partitions: dict[int, Any]) -> None:
    """Whole gradients go as backward makes them: from ZeRO stage 2 on they leave through the reduce bucket.

    partitions: this rank's part of each, which stage 2 makes then and keeps until the step.
    """
    if rank.engine != "deepspeed" or rank.stage < 2:
        return

    def leave(done: Any) -> None:
        grad, done.grad = done.grad, None
        if rank.stage == 2 and rank.offload == "none" and id(done) not in partitions:
            partitions[id(done)] = grad.new_zeros(-(-grad.numel() // rank.world))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(leave)


def beside(model: Any, rank: Rank, half: Any) -> list[Any]:
    """What the framework keeps beside the model: DDP's buckets; for ZeRO-3 this rank's 16-bit gradients, for ZeRO reduce buckets."""
    torch, _ = torch_modules()
    trained = [p for p in model.parameters() if p.requires_grad]
    params = sum(p.numel() for p in trained)
    if rank.engine == "ddp" and rank.world > 1:
        return [torch.zeros(params, dtype=trained[0].dtype)]
    if rank.engine != "deepspeed" or rank.stage == 0:
        return []
    size = int(framework("deepspeed").number("bucket_elements"))
    wanted = [size] * (2 if rank.stage == 2 else 1)
    if rank.resident:  # the second is written when the first is full; stage 1 moves its gradients into the bucket
        wanted = [] if rank.stage == 1 else [min(size, max(0, params - i * size)) for i in range(len(wanted))]
    buckets = [torch.zeros(elements, dtype=half) for elements in wanted]
    if rank.stage < 3:
        return buckets
    mine = 0 if rank.offload != "none" else -(-params // rank.world)
    return [torch.zeros(mine, dtype=half), *buckets]


def optimizer_of(model: Any, rank: Rank) -> Any:
    """An optimizer that makes the states of this rank and nothing else, as a fused step does.

    AdamW itself makes temporaries of the whole shape on fake DTensors, which are then counted. Offloaded: none.
    """
    torch, _ = torch_modules()
    zero = rank.engine == "deepspeed"
    ways = rank.world if zero and rank.stage >= 1 else 1
    names = STATES["deepspeed" if zero else "adamw"]

    class States(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        """The states of this rank's shard of every trained parameter."""

        def step(self, closure: Any = None) -> None:
            """Make the states that are missing."""
            if rank.offload != "none":
                return
            for p in self.param_groups[0]["params"]:
                if not self.state[p]:
                    local = p.detach()
                    local = local.to_local() if hasattr(local, "to_local") else local
                    dtype = local.dtype if rank.pure else torch.float32
                    size = -(-local.numel() // ways)
                    self.state[p] = {n: torch.zeros(size, dtype=dtype) for n in names}
                    if zero and rank.stage == 3:
                        copy = self.state[p].pop("gradient_copy")
                        if copy.dtype != local.dtype:
                            self.state[p]["gradient_rest"] = torch.zeros(size, dtype=local.dtype)

    return States([p for p in model.parameters() if p.requires_grad], {})


def data_messages_of(model: Any, rank: Rank, gathered: float) -> tuple[dict[str, float], dict[str, float]]:
    """(of a micro-batch, of a step) bytes of data-parallel messages that DeepSpeed and DDP send, by collective.

    From the sizes of this model's parameters and the rules of each stage; gathered: bytes that ZeRO-3 gathers. ZeRO-1 and 2 all-reduce
    gradients, a bucket at a time (stage_1_and_2.py average_tensor, use_multi_rank_bucket_allreduce is on by default); ZeRO-3 gathers its
    small vectors once a step. fully_shard runs its own collectives, which are seen instead.
    """
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    trained = float(sum(sizes))
    if rank.world == 1 or rank.engine == "fsdp2":
        return {}, {}
    if rank.stage == 0:
        return {}, {"all-reduce": trained}
    if rank.stage == 1:
        return {}, {"all-reduce": trained, "all-gather": trained}
    if rank.stage == 2:
        return {"all-reduce": trained}, {"all-gather": trained}
    least = launch_facts()["deepspeed_stage3"]["stage3_param_persistence_threshold"]
    stay = float(sum(p.numel() * p.element_size() for p in model.parameters() if p.numel() <= least))
    return {"reduce-scatter": trained, "all-gather": gathered}, {"all-gather": stay}
