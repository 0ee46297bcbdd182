"""Run by torchrun on two ranks: a step of DeepSpeed on a small Llama, bytes of its collectives as JSON. Arguments: the model's config, what
zero_optimization holds, layers per checkpoint, micro-batches a step."""

import json
import os
import sys

import torch
import torch.distributed as dist

seen: dict[str, int] = {}
KINDS = {
    "all_reduce": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
}
MORE = {"all_gather": ("all-gather", 0), "reduce_scatter": ("reduce-scatter", 1), "reduce": ("reduce", 0)}

NAMES = (("tensor", "output_tensor", "tensor_list", "output"), ("input", "input_tensor", "input_list"))


def watch(name, kind, at):
    """Count the larger tensor of a collective before DeepSpeed takes hold of it."""
    inner = getattr(dist, name)

    def call(*args, **kwargs):
        whole = args[at] if len(args) > at else next(v for k, v in kwargs.items() if k in NAMES[at])
        tensors = [whole] if isinstance(whole, torch.Tensor) else whole
        seen[kind] = seen.get(kind, 0) + sum(t.numel() * t.element_size() for t in tensors)
        return inner(*args, **kwargs)

    setattr(dist, name, call)


for name, (kind, at) in {**KINDS, **MORE}.items():
    watch(name, kind, at)

import deepspeed  # noqa: E402

from planner.validate.dry_model import build, build_config, recompute  # noqa: E402

raw, zero, interval, micro_batches = (json.loads(text) for text in sys.argv[1:5])
deepspeed.init_distributed("gloo")
model = build(build_config(raw, raw["num_hidden_layers"]), torch.bfloat16)
model.train()
if interval:
    recompute(model, interval)
engine, *_ = deepspeed.initialize(
    model=model,
    config={
        "train_batch_size": 2 * micro_batches,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    },
)
tokens = torch.zeros((1, 64), dtype=torch.long)
for step in range(4):  # ZeRO-3 records the order of modules in the second step and prefetches from the third on
    if step == 3:
        seen.clear()
    for _ in range(micro_batches):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
if dist.get_rank() == 0:
    print("COUNTED " + json.dumps(seen))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # threads of gloo at shutdown abort now and then
