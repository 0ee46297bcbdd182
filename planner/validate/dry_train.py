"""Memory of one training rank, counted: the transformers model under FakeTensorMode with a fake process group.

fsdp2: fully_shard per decoder layer and root, counted by FSDPMemTracker. ddp: the whole model under autocast, counted by
MemTracker, with a bucket per gradient. deepspeed is a stand-in, its engine does not run on fake tensors: stage 3 as fully_shard
of 16-bit weights, stage 2 as a whole 16-bit model whose gradients leave for a shard through two reduce buckets; states as
in its stage_1_and_2.py and stage3.py (fp32 master, two moments, fp32 gradients; stage 3 has these or 16-bit ones, not both).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planner.engines.training import framework
from planner.errors import InvalidValueError
from planner.validate.dry_model import DTYPES, build, build_config, plain_masks, recompute, torch_modules

SHARDED_LINE, WHOLE_LINE = (16, 32), (8, 16)
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "deepspeed": ("master", "exp_avg", "exp_avg_sq", "gradient_copy")}
BUCKETS = 2


@dataclass(frozen=True)
class Rank:
    """What is counted. stage: ZeRO stage; pure: all states in 16 bit; several: more than one micro-batch a step."""

    engine: str
    world: int
    stage: int
    micro_batch: int
    seq_len: int
    checkpointing: bool
    dtype: str
    pure: bool
    several: bool

    @property
    def sharded(self) -> bool:
        """Weights are sharded, so fully_shard is what is counted."""
        return self.engine == "fsdp2" or (self.engine == "deepspeed" and self.stage == 3)


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank. gradients: after backward. rest: peak without weights and optimizer. parts: of the peak."""

    weights: float
    gradients: float
    optimizer: float
    peak: float
    parts: dict[str, float]

    @property
    def rest(self) -> float:
        """Activations, logits, buffers, gathered weights and the gradients alive at the peak."""
        return self.peak - self.weights - self.optimizer


def layers_to_count(layers: int, rank: Rank) -> tuple[int, ...]:
    """Layer counts to run: all of them, or two for a straight line (peak is linear in layers).

    Fewer where the tracker walks over every gradient and state of a whole model at each operation.
    """
    points = SHARDED_LINE if rank.sharded else WHOLE_LINE
    return (layers,) if layers <= points[-1] else points


def line(points: dict[int, Counted], layers: int) -> Counted:
    """The count at `layers`: itself, or the straight line through two counts."""
    if layers in points:
        return points[layers]
    (a, low), (b, high) = sorted(points.items())
    scale = (layers - a) / (b - a)

    def at(x: float, y: float) -> float:
        return x + (y - x) * scale

    names = dict.fromkeys((*low.parts, *high.parts))
    return Counted(
        at(low.weights, high.weights),
        at(low.gradients, high.gradients),
        at(low.optimizer, high.optimizer),
        at(low.peak, high.peak),
        {n: at(low.parts.get(n, 0.0), high.parts.get(n, 0.0)) for n in names},
    )


@contextmanager
def fake_group(world: int) -> Iterator[Any]:
    """A process group of `world` ranks in which this process is rank 0 and nothing is sent; yields its device mesh."""
    torch, _ = torch_modules()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise InvalidValueError(
            "this process already has a process group",
            "the dry run needs a fake one",
            "Run it in a process of its own.",
        )
    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        torch.distributed.destroy_process_group()


def count(raw: dict[str, Any], layers: int, rank: Rank) -> Counted:
    """Peak bytes of one training step of a model with `layers` layers on one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_group(rank.world) as mesh:
            return _count(raw, layers, rank, mesh)


def _count(raw: dict[str, Any], layers: int, rank: Rank, mesh: Any) -> Counted:
    torch, _ = torch_modules()
    from torch._subclasses.fake_tensor import FakeTensorMode

    half = getattr(torch, DTYPES[rank.dtype])
    stored = half if rank.pure or rank.engine == "deepspeed" else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(build_config(raw, layers), stored)
        model.train()
        if rank.checkpointing:
            recompute(model)
        if rank.sharded:
            shard(model, mesh, rank, half)
        optimizer = _optimizer(model, rank)
        tracker = _tracker(model, optimizer, rank.sharded)
        kept = _beside(model, rank, half)
        if kept:
            tracker.track_external(*kept)
        tokens = torch.zeros((rank.micro_batch, rank.seq_len), dtype=torch.long)
        autocast = torch.autocast("cpu", dtype=half, enabled=rank.engine == "ddp" and not rank.pure)
        with plain_masks(model), tracker:
            optimizer.step()
            for _ in range(2 if rank.several else 1):
                tracker.reset_mod_stats()
                with autocast:
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                del loss
            gradients = sum(_held(p.grad) for p in model.parameters())
            gradients += sum(map(_held, kept[:1])) if rank.engine == "deepspeed" else 0.0
        weights = sum(_held(p) for p in model.parameters())
        states = sum(_held(v) for state in optimizer.state.values() for v in state.values())
    peak = {
        str(k).rpartition(".")[2]: float(v) for d in tracker.get_tracker_snapshot("peak").values() for k, v in d.items()
    }
    return Counted(weights, gradients, states, peak.pop("Total"), {k: v for k, v in peak.items() if v})


def shard(model: Any, mesh: Any, rank: Rank, half: Any) -> None:
    """fully_shard every decoder layer and the root, as accelerate's transformer policy does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": rank.stage == 3}
    if rank.engine == "fsdp2" and not rank.pure:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _tracker(model: Any, optimizer: Any, sharded: bool) -> Any:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    if sharded:
        return FSDPMemTracker(model, optimizer)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    return tracker


def _beside(model: Any, rank: Rank, half: Any) -> list[Any]:
    """What the framework keeps beside the model: DDP's buckets; for ZeRO-2 this rank's 16-bit gradients and two reduce
    buckets, and hooks that drop the whole gradients as backward makes them."""
    torch, _ = torch_modules()
    params = sum(p.numel() for p in model.parameters())
    if rank.engine == "ddp" and rank.world > 1:
        return [torch.zeros(params, dtype=next(model.parameters()).dtype)]
    if rank.engine != "deepspeed" or rank.stage != 2:
        return []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda done: setattr(done, "grad", None))
    bucket = int(min(framework("deepspeed").number("bucket_elements"), params))
    return [torch.zeros(size, dtype=half) for size in (-(-params // rank.world), *[bucket] * BUCKETS)]


def _held(tensor: Any) -> float:
    """Bytes this rank holds of a tensor or shard; 0 for None and scalars on the host."""
    if tensor is None or not hasattr(tensor, "element_size"):
        return 0.0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return float(local.numel() * local.element_size())


def _optimizer(model: Any, rank: Rank) -> Any:
    """An optimizer that makes the states of this rank and nothing else, as a fused step does.

    AdamW itself makes temporaries of the whole shape on fake DTensors, which are then counted.
    """
    torch, _ = torch_modules()
    ways = rank.world if rank.engine == "deepspeed" and rank.stage == 2 else 1
    names = STATES["deepspeed" if rank.engine == "deepspeed" else "adamw"]

    class States(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        """The states of this rank's shard of every parameter."""

        def step(self, closure: Any = None) -> None:
            """Make the states that are missing."""
            for p in self.param_groups[0]["params"]:
                if not self.state[p]:
                    local = p.detach()
                    local = local.to_local() if hasattr(local, "to_local") else local
                    dtype = local.dtype if rank.pure else torch.float32
                    size = -(-local.numel() // ways)
                    self.state[p] = {n: torch.zeros(size, dtype=dtype) for n in names}
                    if rank.engine == "deepspeed" and rank.stage == 3:
                        self.state[p].pop("gradient_copy")
                        self.state[p]["gradient_rest"] = torch.zeros(size, dtype=local.dtype)

    return States(list(model.parameters()), {})
