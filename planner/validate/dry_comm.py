"""Bytes that one training rank sends, seen at the collectives it calls, and the collectives of tensor parallelism.

A message counts as the estimator counts it: what every rank ends up with (all-gather), starts with (reduce-scatter), the
tensor itself (all-reduce).
"""

from __future__ import annotations

from typing import Any

from planner.validate.dry_model import torch_modules

KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce",
         "all_reduce": "all-reduce"}  # fmt: skip
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


class Traffic:
    """Collects collectives while inside; each(): bytes by collective, divided by the number of micro-batches."""

    def __init__(self, micro_batches: int) -> None:
        self.bytes: dict[str, float] = {}
        self._over = micro_batches
        self._mode: Any = None

    def __enter__(self) -> Traffic:
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = self._seen

        class Watch(TorchDispatchMode):  # type: ignore[misc]
            """Passes every operator on and looks at collectives."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                space, _, name = str(getattr(func, "_schema", func)).partition("(")[0].partition("::")
                if space in ("c10d", "_c10d_functional"):
                    seen(name, args)
                return func(*args, **(kwargs or {}))

        self._mode = Watch()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def _seen(self, name: str, args: Any) -> None:
        torch, _ = torch_modules()
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if kind is not None:
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            largest = max((x.numel() * x.element_size() for x in tensors), default=0)
            self.bytes[kind] = self.bytes.get(kind, 0.0) + float(largest)

    def each(self) -> dict[str, float]:
        """Bytes of a micro-batch by collective."""
        return {kind: value / self._over for kind, value in self.bytes.items()}


def cut_by_tensor(model: Any, ranks: int, *, tied: bool) -> None:
    """The collectives around a layer that DeepSpeed's AutoTP cut (colwise and rowwise of transformers' own plan).

    An all-reduce of the input's gradient before attention and feed-forward, one of the output after them. A head that is not
    tied makes logits of its own share and gathers the others'.
    """
    torch, _ = torch_modules()
    before, after = _before(), _after()

    def enter(_module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (before.apply(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": before.apply(kwargs["hidden_states"])}

    for layer in model.model.layers:
        for module, out in ((layer.self_attn, layer.self_attn.o_proj), (layer.mlp, layer.mlp.down_proj)):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            out.register_forward_hook(lambda _m, _a, result: after.apply(result))
    if not tied:
        head, gather = model.lm_head, _gather(ranks)
        model.lm_head = torch.nn.Linear(
            head.in_features, head.out_features // ranks, bias=False, dtype=head.weight.dtype
        )
        model.lm_head.register_forward_hook(lambda _m, _a, result: gather.apply(result))


def _before() -> Any:
    """What stands before a cut matrix."""
    torch, _ = torch_modules()

    class Before(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Identity; all-reduce of the gradient."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            torch.distributed.all_reduce(grad)
            return grad

    return Before


def _after() -> Any:
    """What stands after a matrix whose rows are cut."""
    torch, _ = torch_modules()

    class After(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """All-reduce in place; identity for the gradient."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            torch.distributed.all_reduce(x)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    return After


def _gather(ranks: int) -> Any:
    """What stands after a head whose vocabulary is cut."""
    torch, _ = torch_modules()

    class Gather(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """All ranks' shares side by side; this rank's share of the gradient."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            whole = x.new_empty((ranks, *x.shape))
            torch.distributed.all_gather_into_tensor(whole, x)
            return whole.movedim(0, -2).flatten(-2)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad[..., : grad.shape[-1] // ranks].contiguous()

    return Gather
