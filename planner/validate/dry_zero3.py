"""Which weights DeepSpeed ZeRO-3 gathers and keeps: its fetch, prefetch and release rules over the module calls of a real step.

deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module, __params_to_release), held
against DeepSpeed itself on two CPU ranks (tests/train_runs/test_zero3_gathers.py). The calls come from the transformers model, run
on fake tensors with hooks where DeepSpeed has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from planner.validate.dry_model import base_model, plain_masks, torch_modules

TRACED_TOKENS = 8


@dataclass(frozen=True)
class Call:
    """A module's hook: fetch before it runs (forward or backward), else release after it. params: (identity, elements)."""

    module: int
    fetch: bool
    back: bool
    params: tuple[tuple[int, int], ...]


@dataclass
class Gathers:
    """Replays the calls of one micro-batch. elements: gathered in all; most: alive at once from each of `starts` to the next."""

    calls: Sequence[Call]
    rules: dict[str, Any]
    starts: Sequence[int] = (0,)
    elements: int = 0
    most: list[int] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fetches = [c.params for c in self.calls if c.fetch]
        self._keeps = self.rules["stage3_param_persistence_threshold"]
        self._before = [0, *accumulate(sum(n for _, n in params) for params in fetches)]
        self._uses: dict[int, list[int]] = defaultdict(list)
        self._queue = deque((p, n, step) for step, params in enumerate(fetches) for p, n in params)
        for p, _, step in self._queue:
            self._uses[p].append(step)
        self._scanned: dict[int, int] = defaultdict(lambda: -1)
        self._active: dict[int, set[int]] = defaultdict(set)
        self._step = 0

    def run(self) -> Gathers:
        """After the last call."""
        for position, call in enumerate(self.calls):
            self.most += [0] * self.starts.count(position)
            (self._fetch if call.fetch else self._release)(call)
        return self

    def _gather(self, param: int, size: int) -> None:
        """Small vectors are always there."""
        if size > self._keeps and param not in self.alive:
            self.alive[param] = size
            self.elements += size

    def _fetch(self, call: Call) -> None:
        for p, n in call.params:
            self._gather(p, n)
            self._active[p].add(call.module)
        for _ in [p for p, _ in call.params if self._scanned[p] < self._step]:
            p, _, last = self._queue.popleft()
            self._scanned[p] = last
        room = min(
            self.rules["stage3_max_live_parameters"] - sum(self.alive.values()),
            self.rules["stage3_prefetch_bucket_size"],
        )
        ahead: dict[int, int] = {}
        while self._queue and sum(ahead.values()) < room:
            p, n, last = self._queue.popleft()
            self._scanned[p] = max(self._scanned[p], last)
            if n > self._keeps and p not in self.alive:
                ahead[p] = n
        for p, n in ahead.items():
            self._gather(p, n)
        if self.most:
            self.most[-1] = max(self.most[-1], sum(self.alive.values()))
        self._step += 1

    def _release(self, call: Call) -> None:
        for p, _ in call.params:
            self._active[p].discard(call.module)
            if not self._active[p] and self._scanned[p] <= self._step and not self._reused(p):
                self.alive.pop(p, None)

    def _reused(self, param: int) -> bool:
        """Its next use begins within stage3_max_reuse_distance elements of module calls."""
        uses = self._uses[param]
        at = bisect_left(uses, self._step)
        distance = self.rules["stage3_max_reuse_distance"]
        return at < len(uses) and self._before[uses[at]] - self._before[self._step] < distance


def traced(model: Any, tokens: Any) -> tuple[list[Call], tuple[int, ...]]:
    """The calls of a forward and a backward of this model, in order; run it under FakeTensorMode.

    With it where the moments begin that memory is counted at: the head's forward, backward of the last layer, of the lower half.
    """
    calls: list[Call] = []
    watched = [_watch(module, calls) for module in model.modules()]
    try:
        with plain_masks(model):
            model(input_ids=tokens, labels=tokens).loss.backward()
    finally:
        for hook in (hook for hooks in watched for hook in hooks):
            hook.remove()
    model.zero_grad(set_to_none=True)
    inner = base_model(model)
    layers = list(inner.model.layers._modules.values())
    wanted = ((inner.lm_head, False), (layers[-1], True), (layers[len(layers) // 2 - 1], True))
    starts = [
        next(i for i, c in enumerate(calls) if c.fetch and (c.module, c.back) == (id(module), back))
        for module, back in wanted
    ]
    return calls, tuple(starts[: 3 if len(layers) > 1 else 2])


def _watch(module: Any, calls: list[Call]) -> list[Any]:
    """Hooks where DeepSpeed has them (parameter_offload.py): around forward, and at the gradients of outputs and of inputs."""
    torch, _ = torch_modules()
    own = tuple((id(p), p.numel()) for p in module._parameters.values() if p is not None)

    def note(fetch: bool, back: bool = False) -> None:
        calls.append(Call(id(module), fetch, back, own))

    class Mark(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Identity; notes when its gradient passes."""

        @staticmethod
        def forward(ctx: Any, x: Any, fetch: bool) -> Any:
            ctx.fetch = fetch
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            note(ctx.fetch, True)
            return grad, None

    def marked(x: Any, fetch: bool) -> Any:
        return Mark.apply(x, fetch) if isinstance(x, torch.Tensor) and x.requires_grad else x

    def before(_module: Any, args: Any) -> Any:
        note(True)
        return tuple(marked(x, False) for x in args)

    def after(_module: Any, _args: Any, out: Any) -> Any:
        note(False)
        if isinstance(out, torch.Tensor):
            return marked(out, True)
        if isinstance(out, tuple):
            return tuple(marked(x, True) for x in out)
        return out

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
