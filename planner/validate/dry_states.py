"""What a framework keeps beside the model, stood in for: optimizer states, gradient partitions, buckets, live parameters.

DeepSpeed 0.19.8, from its source: stage_1_and_2.py and stage3.py (fp32 master, two moments, fp32 gradients of the partition;
stage 3 has these or 16-bit ones, not both; reduce buckets of reduce_bucket_size allocated whole, two with overlap_comm, which the
launch files set from stage 2 on); partitioned_param_coordinator.py (which gathered parameters live).
"""

from __future__ import annotations

from typing import Any

from planner.engines.training import framework
from planner.validate.dry_model import base_model, torch_modules
from planner.validate.dry_rank import Rank, launch_facts

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "deepspeed": ("master", "exp_avg", "exp_avg_sq", "gradient_copy")}
HALF_BYTES = 2.0


def held(tensor: Any) -> float:
    """Bytes this rank holds of a tensor or shard; 0 for None and scalars on the host."""
    if tensor is None or not hasattr(tensor, "element_size"):
        return 0.0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return float(local.numel() * local.element_size())


def release_gradients(model: Any, rank: Rank) -> None:
    """Whole gradients go as backward makes them: from ZeRO stage 2 on they leave through the reduce bucket."""
    if rank.engine != "deepspeed" or rank.stage < 2:
        return
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda done: setattr(done, "grad", None))


def beside(model: Any, rank: Rank, half: Any) -> list[Any]:
    """What the framework keeps beside the model: DDP's buckets; for ZeRO this rank's 16-bit gradients, then reduce buckets."""
    torch, _ = torch_modules()
    trained = [p for p in model.parameters() if p.requires_grad]
    params = sum(p.numel() for p in trained)
    if rank.engine == "ddp" and rank.world > 1:
        return [torch.zeros(params, dtype=trained[0].dtype)]
    if rank.engine != "deepspeed" or rank.stage == 0:
        return []
    size = int(framework("deepspeed").number("bucket_elements"))
    bucket = min(size, params) if rank.resident else size
    buckets = [torch.zeros(bucket, dtype=half) for _ in range(2 if rank.stage == 2 else 1)]
    if rank.stage == 1:
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


def data_messages_of(model: Any, rank: Rank, fetched: float) -> tuple[dict[str, float], dict[str, float]]:
    """(of a micro-batch, of a step) bytes of data-parallel messages that DeepSpeed and DDP send, by collective.

    From the sizes of this model's parameters and the rules of each stage; fetched: bytes that ZeRO-3 gathers. fully_shard runs
    its own collectives, which are seen instead.
    """
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if rank.world == 1 or rank.engine == "fsdp2":
        return {}, {}
    if rank.stage == 0:
        return {}, {"all-reduce": float(trained)}
    if rank.stage == 1:
        return {}, {"reduce-scatter": float(trained), "all-gather": float(trained)}
    if rank.stage == 2:
        return {"reduce-scatter": float(trained)}, {"all-gather": float(trained)}
    return {"reduce-scatter": float(trained), "all-gather": fetched}, {}


def live_parameters(model: Any, rank: Rank) -> tuple[float, float]:
    """Bytes of gathered parameters (alive when memory peaks, fetched in a step) in DeepSpeed ZeRO-3: its own rules over this
    model's modules.

    That is between the head's forward and the end of the last layer's backward.

    A module's parameters are fetched when it runs, with up to stage3_prefetch_bucket_size elements of those that come next while
    fewer than stage3_max_live_parameters are alive, and released after it unless used again within stage3_max_reuse_distance.
    """
    if rank.engine != "deepspeed" or rank.stage != 3:
        return 0.0, 0.0
    rules = launch_facts()["deepspeed_stage3"]
    order, (begin, end) = _order(model, rank.interval)
    ahead = [0.0]
    for _, size in order:
        ahead.append(ahead[-1] + size)
    again: list[bool] = [False] * len(order)
    upcoming: dict[int, int] = {}
    for i in range(len(order) - 1, -1, -1):
        name = order[i][0]
        if name in upcoming:
            again[i] = ahead[upcoming[name]] - ahead[i + 1] < rules["stage3_max_reuse_distance"]
        upcoming[name] = i
    alive: dict[int, float] = {}
    total = most = fetched = 0.0
    for i, (name, size) in enumerate(order):
        fetch, ahead_elements = [(name, size)], 0.0
        for other, elements in order[i + 1 :]:
            room = min(rules["stage3_max_live_parameters"] - total, rules["stage3_prefetch_bucket_size"])
            if ahead_elements >= room:
                break
            if other not in alive and (other, elements) not in fetch:
                fetch.append((other, elements))
                ahead_elements += elements
        for other, elements in fetch:
            if other not in alive:
                alive[other] = elements
                total += elements
                fetched += elements
        most = max(most, total) if begin <= i < end else most
        if not again[i]:
            total -= alive.pop(name)
    stay = sum(p.numel() for p in model.parameters() if p.numel() <= rules["stage3_param_persistence_threshold"])
    return HALF_BYTES * (most + stay), HALF_BYTES * fetched


def _order(model: Any, interval: int) -> tuple[list[tuple[int, float]], tuple[int, int]]:
    """(identity, elements) of the modules with parameters in the order of a step: forward, then backward with recomputation.

    With it the range of positions from the head's forward to the end of the last group's backward.
    """
    inner = base_model(model)
    layers = [_leaves(layer) for layer in inner.model.layers._modules.values()]
    head, first, last = _leaves(inner.lm_head), _leaves(inner.model.embed_tokens), _leaves(inner.model.norm)
    order = [*first, *(x for layer in layers for x in layer), *last, *head, *head, *last]
    begin = len(order) - len(last) - 2 * len(head)
    end = 0
    every = interval or 1
    starts = range((len(layers) - 1) // every * every, -1, -every)
    for start in starts:
        group = layers[start : start + every]
        if interval:
            order += [x for layer in group for x in layer]
        order += [x for layer in reversed(group) for x in reversed(layer)]
        end = end or len(order)
    return [*order, *first], (begin, end)


def _leaves(module: Any) -> list[tuple[int, float]]:
    """The module's own matrices in order; vectors stay alive (stage3_param_persistence_threshold)."""
    least = launch_facts()["deepspeed_stage3"]["stage3_param_persistence_threshold"]
    return [(id(p), float(p.numel())) for p in module.parameters() if p.numel() > least]
