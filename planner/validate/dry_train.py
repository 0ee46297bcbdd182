"""Memory and traffic of one training rank, counted: the transformers model under FakeTensorMode with a fake process group.

fsdp2: fully_shard per decoder layer and root, counted by FSDPMemTracker. ddp: the whole model under autocast, counted by
MemTracker, with a bucket per gradient. deepspeed is a stand-in, its engine does not run on fake tensors: the whole 16-bit model
by MemTracker, its states and buffers from dry_states.py. A pipeline stage runs its in-flight micro-batches forward first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from planner.errors import InvalidValueError
from planner.validate.dry_comm import Traffic, cut_by_tensor
from planner.validate.dry_model import (
    DTYPES,
    base_model,
    build,
    build_adapted,
    build_config,
    chunk_loss,
    plain_masks,
    recompute,
    torch_modules,
)
from planner.validate.dry_rank import Rank, launch_facts, stops_early
from planner.validate.dry_states import beside, data_messages_of, held, optimizer_of, release_gradients
from planner.validate.dry_zero3 import TRACED_TOKENS, Gathers, traced

LINE = (8, 16)  # at 4 and 8 what is prefetched is not yet all there: 5% off for 32 layers


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank. gradients: after backward. rest: peak without weights and optimizer.

    moments: bytes by kind at the highest point until backward enters the last layer, in the upper half of the layers, and in
    the lower half. traffic: bytes of a micro-batch by collective, seen. derived_each, derived: of a micro-batch and of a step,
    by the framework's own rules from the tensors counted.
    """

    weights: float
    gradients: float
    optimizer: float
    moments: tuple[dict[str, float], ...]
    traffic: dict[str, float] = field(default_factory=dict)
    derived_each: dict[str, float] = field(default_factory=dict)
    derived: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by kind at the peak."""
        return max(self.moments, key=lambda kinds: sum(kinds.values()))

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def rest(self) -> float:
        """Activations, logits, buffers, gathered weights and the gradients alive at the peak."""
        return self.peak - self.weights - self.optimizer


def layers_to_count(layers: int, rank: Rank) -> tuple[int, ...]:
    """Layer counts to run: all of them, or two for a straight line (each moment of a step is linear in layers).

    With groups of layers under a checkpoint, counts that leave the same remainder as the whole.
    """
    every = max(1, rank.interval)
    if layers <= LINE[1] + every:
        return (layers,)
    return tuple(n + (layers - n) % every for n in LINE)


def line(points: dict[int, Counted], layers: int) -> Counted:
    """The count at `layers`: itself, or the straight line through two counts, each moment on its own."""
    if layers in points:
        return points[layers]
    (a, low), (b, high) = sorted(points.items())
    scale = (layers - a) / (b - a)

    def at(x: float, y: float) -> float:
        return x + (y - x) * scale

    def each(x: dict[str, float], y: dict[str, float]) -> dict[str, float]:
        return {n: at(x.get(n, 0.0), y.get(n, 0.0)) for n in dict.fromkeys((*x, *y))}

    return Counted(
        at(low.weights, high.weights),
        at(low.gradients, high.gradients),
        at(low.optimizer, high.optimizer),
        tuple(each(x, y) for x, y in zip(low.moments, high.moments, strict=True)),
        each(low.traffic, high.traffic),
        each(low.derived_each, high.derived_each),
        each(low.derived, high.derived),
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


@dataclass(frozen=True)
class Live:
    """Bytes of unsharded weights of DeepSpeed ZeRO-3: alive at most in each moment of a step, gathered in a micro-batch."""

    most: tuple[float, ...] = (0.0, 0.0, 0.0)
    gathered: float = 0.0


def live_weights(raw: dict[str, Any], layers: int, rank: Rank) -> Live:
    """Of a model with all its layers: what lives is no straight line in layers. Zero for all but DeepSpeed ZeRO-3."""
    torch, _ = torch_modules()
    from torch._subclasses.fake_tensor import FakeTensorMode

    if rank.engine != "deepspeed" or rank.stage != 3 or rank.world == 1:
        return Live()
    rules, half = launch_facts()["deepspeed_stage3"], getattr(torch, DTYPES[rank.dtype])
    with warnings.catch_warnings(), fake_group(max(rank.world, rank.tensor)):
        warnings.simplefilter("ignore")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = make_model(raw, layers, rank, half)
            calls, starts = traced(model, torch.zeros((1, TRACED_TOKENS), dtype=torch.long))
            found = Gathers(calls, rules, starts).run()
            stay = sum(
                p.numel() for p in model.parameters() if p.numel() <= rules["stage3_param_persistence_threshold"]
            )
    most = (*found.most, found.most[-1])[:3]
    return Live(tuple(half.itemsize * float(n + stay) for n in most), half.itemsize * float(found.elements))


def count(raw: dict[str, Any], layers: int, rank: Rank, live: Live | None = None) -> Counted:
    """Peak bytes of one training step of a model, or stage, with `layers` layers on one rank. live: of the whole model; None: of these
    layers."""
    live = live_weights(raw, layers, rank) if live is None else live
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fake_group(max(rank.world, rank.tensor)) as mesh:
            return _count(raw, layers, rank, mesh, live)


def _count(raw: dict[str, Any], layers: int, rank: Rank, mesh: Any, live: Live) -> Counted:
    torch, _ = torch_modules()
    from torch._subclasses.fake_tensor import FakeTensorMode

    half = getattr(torch, DTYPES[rank.dtype])
    partitions: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model(raw, layers, rank, half)
        derived_each, derived = data_messages_of(model, rank, live.gathered)
        if rank.sharded:
            shard(model, mesh, rank, half)
        else:
            release_gradients(model, rank, partitions)
        optimizer = optimizer_of(model, rank)
        kept = beside(model, rank, half)
        with Traffic(_waves(rank)) as traffic:
            tracker = _run(model, optimizer, rank, half, kept)
        whole = sum(held(p) for p in model.parameters())
        own = [*partitions.values(), *(kept[:1] if rank.stage == 3 else [])]
        gradients = sum(held(p.grad) for p in model.parameters()) + sum(map(held, own))
        states = sum(held(v) for state in optimizer.state.values() for v in state.values())
    found = Counted(whole, gradients, states, tracker.moments(), traffic.each(), derived_each, derived)
    return _kept_elsewhere(found, rank, live)


def _waves(rank: Rank) -> int:
    """Micro-batches that run backward in a count; traffic is their mean."""
    return 2 if rank.several else 1


def _kept_elsewhere(found: Counted, rank: Rank, live: Live) -> Counted:
    """The count with what the stand-in holds whole put right: stage 3 of DeepSpeed keeps a shard and its live parameters,
    offloaded weights none."""
    weights, moments = found.weights, [dict(kinds) for kinds in found.moments]
    if rank.engine == "deepspeed" and rank.stage == 3:
        weights = found.weights / rank.world
        for kinds, alive in zip(moments, live.most, strict=True):
            kinds |= {"param": weights, "live parameters": alive}
    if rank.offload == "optimizer+parameters":
        weights = 0.0
        for kinds in moments:
            for name in ("param", "sharded_param", "sharded_grad"):
                kinds.pop(name, None)
    gradients = 0.0 if rank.offload != "none" and rank.stage >= 2 else found.gradients
    return replace(found, weights=weights, moments=tuple(moments), gradients=gradients)


def make_model(raw: dict[str, Any], layers: int, rank: Rank, half: Any, *, half_only: bool = False) -> Any:
    """The model, or pipeline stage, of a rank as the launch files make it, ready to train. half_only: no fp32 masters."""
    torch, _ = torch_modules()
    tied = bool(raw.get("tie_word_embeddings"))
    stored = half if half_only or rank.pure or rank.engine == "deepspeed" or rank.lora else torch.float32
    config = build_config(raw, layers, rank.tensor, rank.tensor if tied else 1)
    model = build(config, stored) if rank.lora is None else build_adapted(config, stored, rank.lora)
    if rank.tensor > 1:
        cut_by_tensor(model, rank.tensor, tied=tied)
    if not rank.first:
        model.model.embed_tokens = torch.nn.Identity()
    if not rank.last:
        model.model.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    if rank.interval > 1:
        recompute(model, rank.interval)
    if rank.chunk and rank.last:
        chunk_loss(model, rank.chunk)
    model.train()
    if rank.interval == 1:
        recompute(model, 1)
        if rank.lora:
            model.enable_input_require_grads()
    return model


def _run(model: Any, optimizer: Any, rank: Rank, half: Any, kept: list[Any]) -> Any:
    """One step under the tracker, states first; gives the tracker back."""
    torch, _ = torch_modules()
    tracker = _tracker(model, optimizer, rank.sharded)
    if kept:
        tracker.track_external(*kept)
    _mark_moments(model, tracker)
    autocast = torch.autocast("cpu", dtype=half, enabled=rank.engine == "ddp" and not rank.pure)
    with plain_masks(model), tracker:
        optimizer.step()
        with autocast:
            queue = [_next(model, rank, half, tracker) for _ in range(rank.in_flight)]
        for wave in range(_waves(rank)):
            backward(queue.pop(0))
            if wave + 1 < _waves(rank):
                with autocast:
                    queue.append(_next(model, rank, half, tracker))
        queue.clear()
    return tracker


def _next(model: Any, rank: Rank, half: Any, tracker: Any) -> Any:
    tracker.reset_mod_stats()
    tracker.enter(0)
    return forward(model, rank, half)


def forward(model: Any, rank: Rank, half: Any) -> Any:
    """Loss of a micro-batch, or the hidden states that leave the stage; its checkpoints are recomputed as the framework's are."""
    from torch.utils.checkpoint import set_checkpoint_early_stop

    with set_checkpoint_early_stop(stops_early(rank)):
        return _forward(model, rank, half)


def _forward(model: Any, rank: Rank, half: Any) -> Any:
    torch, _ = torch_modules()
    tokens = torch.zeros((rank.micro_batch, rank.seq_len), dtype=torch.long)
    if rank.first and rank.last:
        return model(input_ids=tokens, labels=tokens).loss
    inside = base_model(model)
    given: dict[str, Any] = {"input_ids": tokens}
    if not rank.first:
        shape = (rank.micro_batch, rank.seq_len, inside.config.hidden_size)
        given = {"inputs_embeds": torch.zeros(shape, dtype=half, requires_grad=True)}
    if rank.last:
        return inside(**given, labels=tokens).loss
    return inside.model(**given).last_hidden_state


def backward(out: Any) -> None:
    """Backward of a loss, or of what left the stage with a gradient of zeros."""
    torch, _ = torch_modules()
    out.backward(None if out.dim() == 0 else torch.zeros_like(out))


def shard(model: Any, mesh: Any, rank: Rank, half: Any) -> None:
    """fully_shard every decoder layer and the root, as accelerate's transformer policy does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": rank.stage == 3}
    if not rank.pure:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
    modules = list(base_model(model).model.layers._modules.values())
    for layer in modules:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _mark_moments(model: Any, tracker: Any) -> None:
    """Backward tells the tracker when it enters the last layer and the lower half of the layers."""
    layers = list(base_model(model).model.layers._modules.values())

    def mark(moment: int) -> Any:
        def forward_hook(_module: Any, _args: Any, out: Any) -> None:
            if out.requires_grad:
                out.register_hook(lambda _grad: tracker.enter(moment))

        return forward_hook

    layers[-1].register_forward_hook(mark(1))
    if len(layers) > 1:
        layers[len(layers) // 2 - 1].register_forward_hook(mark(2))


class Peak:
    """Mixed into torch's tracker: the highest point of each moment, without the tracker's table by module, over which it
    walks at every operation."""

    moment = 0
    highest: tuple[dict[Any, float], ...] = ({}, {}, {})

    def enter(self, moment: int) -> None:
        """From here on it is this moment."""
        self.moment = moment

    def _update_peak_stats(self, _state: Any) -> None:
        here: Any = self
        for now in here._curr_mem_snap.values():
            if here.highest[self.moment].get("Total", 0) < now["Total"]:
                here.highest = (*here.highest[: self.moment], dict(now), *here.highest[self.moment + 1 :])

    def moments(self) -> tuple[dict[str, float], ...]:
        """Bytes by kind at the highest point of each moment."""
        return tuple(
            {str(k).rpartition(".")[2].lower(): float(v) for k, v in kinds.items() if v and k != "Total"}
            for kinds in self.highest
        )


class _Nothing:
    """In the place of hooks on the gradients of frozen parameters, which have none."""

    def remove(self) -> None:
        """Nothing to remove."""


def _tracker(model: Any, optimizer: Any, sharded: bool) -> Any:
    """torch's tracker of every tensor alive."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    made = type("Tracker", (Peak, FSDPMemTracker if sharded else MemTracker), {})
    if sharded:
        return made(model, optimizer)
    tracker = made()
    for p in model.parameters():
        if not p.requires_grad:
            tracker._param_to_grad_hook_handles[p] = (_Nothing(), _Nothing())
    tracker.track_external(model, optimizer)
    return tracker
