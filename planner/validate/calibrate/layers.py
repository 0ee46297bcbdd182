"""A real decoder layer of transformers on the device: what the kernels alone do not show (Python, norms, loss, optimizer).

Every constant is what makes the estimator's own formula give the measured time, so no formula is written a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.engines.training import framework
from planner.estimator.memory.train_activations import layer_kept_bytes
from planner.estimator.memory.train_states import train_state_bytes
from planner.estimator.time.kernels import device_constants, devices
from planner.estimator.time.layers import layer_tokenwise_s, mixer_prefill_s
from planner.estimator.time.steps import cut_of
from planner.estimator.time.train_layers import Work, layer_passes
from planner.hardware.records import Gpu
from planner.models.load import spec_from_config
from planner.models.precision import kv_dtype, precision
from planner.models.spec import ModelSpec
from planner.request import TrainJob
from planner.space.shard import Shard
from planner.units import GB
from planner.validate.calibrate.clock import Device, shortest_s

VOCAB = 4096


@dataclass(frozen=True)
class Shape:
    """A layer to time."""

    hidden: int
    tokens: int

    def config(self) -> dict[str, Any]:
        """config.json of a Llama of one layer."""
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 5 // 2, "num_hidden_layers": 1, "num_attention_heads": self.hidden // 64 or 1,
            "num_key_value_heads": max(1, self.hidden // 256), "vocab_size": VOCAB, "max_position_embeddings": 8192,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def spec(self) -> ModelSpec:
        """The same as planner counts it."""
        return spec_from_config(self.config(), name="calibration")


def shapes(device: Device) -> tuple[Shape, Shape]:
    """(so small that only its launch costs, large enough that its work counts)."""
    return Shape(64, 16), Shape(512, 512) if not device.cuda else Shape(4096, 2048)


def _layer(device: Device, shape: Shape, transformers: Any) -> tuple[Any, Callable[[Any], Any]]:
    torch = device.torch
    config = transformers.LlamaConfig(
        **{k: v for k, v in shape.config().items() if k not in ("architectures", "torch_dtype")}
    )
    config._attn_implementation = "sdpa"
    model = transformers.LlamaModel(config).to(torch.bfloat16).to(device.name)
    positions = torch.arange(shape.tokens, device=device.name)[None]
    x = device.random(1, shape.tokens, shape.hidden, dtype=torch.bfloat16)
    turns = model.rotary_emb(x, positions)

    def run(hidden: Any) -> Any:
        out = model.layers[0](hidden, position_embeddings=turns, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    return x, run


def layer_times(device: Device, shape: Shape, transformers: Any, budget_s: float) -> tuple[float, float]:
    """Seconds of one layer: forward alone without gradients, and forward with backward."""
    torch = device.torch
    x, run = _layer(device, shape, transformers)
    with torch.no_grad():
        forward = shortest_s(device, lambda: run(x), budget_s / 2)
    start = x.clone().requires_grad_(True)
    grad = torch.ones_like(x)

    def both() -> None:
        run(start).backward(grad)

    return forward, shortest_s(device, both, budget_s / 2)


def predicted_forward_s(gpu: Gpu, shape: Shape) -> float:
    """The estimator's time of one layer over all tokens of a prompt."""
    spec = shape.spec()
    shard = Shard(gpu, precision("bf16"), kv_dtype("bf16"), 1, 1, None, None)
    cut = cut_of([shard], devices([shard]))
    layer = spec.layers[0]
    time = layer_tokenwise_s(cut, layer, spec.hidden, np.array([float(shape.tokens)]))
    return float(time[0, 0] + sum(mixer_prefill_s(cut, m, float(shape.tokens))[0, 0] for m in layer.mixers))


def predicted_step_s(gpu: Gpu, shape: Shape, **constants: float) -> float:
    """The estimator's time of forward and backward of one layer in training."""
    spec = shape.spec()
    stack = framework("ddp").on(gpu)
    stack = replace(stack, constants={**stack.constants, **constants})
    one = np.ones(1)
    job = TrainJob(seq_len=shape.tokens)
    work = Work(gpu, job, stack, one * shape.tokens, one, one, one, one)
    kept = layer_kept_bytes(spec.layers[0], spec.hidden, job, stack, tokens=work.tokens, tensor=work.tensor)
    passes = layer_passes(work, spec.layers[0], spec.hidden, kept)
    return float(passes.forward[0] + passes.inputs[0])


def solved(measured_s: float, time_of: Callable[[float], float]) -> float:
    """x >= 0 with time_of(x) = measured, for a time that is linear in x; 0 where even x = 0 takes longer."""
    base, slope = time_of(0.0), time_of(1.0) - time_of(0.0)
    return max(0.0, (measured_s - base) / slope) if slope > 0 else 0.0


def serving_constants(device: Device, gpu: Gpu, times: dict[Shape, tuple[float, float]]) -> dict[str, float]:
    """Floors and streaming rate of a CPU, where every operation runs when Python calls it.

    streaming_floor_us: what is left of the small layer over the kernels the model counts; streaming_efficiency: of the large one.
    An accelerator keeps the constants of its class: engines launch graphs there.
    """
    if device.cuda:
        return {}
    small, large = shapes(device)
    none = {**gpu.measured, "streaming_floor_us": 0.0, "streaming_efficiency": 1e6}

    def at(**more: float) -> Gpu:
        return replace(gpu, measured={**none, **more})

    floor = solved(times[small][0], lambda us: predicted_forward_s(at(streaming_floor_us=us), small))
    slow = solved(
        times[large][0],
        lambda x: predicted_forward_s(at(streaming_floor_us=floor, streaming_efficiency=1.0 / max(x, 1e-6)), large),
    )
    return {"streaming_floor_us": floor, "streaming_efficiency": min(1.0, 1.0 / max(slow, 1e-3))}


def training_constants(device: Device, gpu: Gpu, times: dict[Shape, tuple[float, float]]) -> dict[str, float]:
    """launch_us of the small layer, elementwise_factor of the large one, with what was measured so far in `gpu`."""
    small, large = shapes(device)
    launch = solved(times[small][1] * 1e6, lambda us: 3.0 * us)
    factor = solved(times[large][1], lambda x: predicted_step_s(gpu, large, elementwise_factor=x, launch_us=0.0))
    return {"launch_us": launch, "elementwise_factor": factor}


def attention_backward(device: Device, budget_s: float) -> dict[str, float]:
    """Backward of attention in times of forward."""
    torch = device.torch
    tokens = 512 if not device.cuda else 4096
    q = device.random(1, 8, tokens, 64, dtype=torch.bfloat16).requires_grad_(True)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        forward = shortest_s(device, lambda: attend(q, q, q, is_causal=True), budget_s / 2)
    grad = torch.ones_like(q)
    both = shortest_s(device, lambda: attend(q, q, q, is_causal=True).backward(grad), budget_s / 2)
    return {"attention_backward": max(1.0, both / forward - 1), "attention_backward_efficiency": 1.0}


def loss_passes(device: Device, gpu: Gpu, budget_s: float) -> dict[str, float]:
    """head_passes: loss and its gradient over logits, in times of 4 bytes a logit at the streaming rate."""
    torch = device.torch
    tokens = 512
    logits = device.random(tokens, VOCAB, dtype=torch.bfloat16).requires_grad_(True)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device.name)
    taken = shortest_s(device, lambda: torch.nn.functional.cross_entropy(logits.float(), labels).backward(), budget_s)
    rate = gpu.bandwidth_gb_per_s * GB * device_constants(gpu)["streaming_efficiency"]
    return {"head_passes": taken * rate / (4.0 * VOCAB * tokens)}


def optimizer_rate(device: Device, gpu: Gpu, budget_s: float) -> dict[str, float]:
    """optimizer_efficiency: bytes/s of a fused AdamW step in shares of the memory bandwidth."""
    torch = device.torch
    count = 8 * 2**20 if not device.cuda else 256 * 2**20
    weight = torch.nn.Parameter(torch.ones(count, device=device.name))
    weight.grad = torch.ones_like(weight)
    step = torch.optim.AdamW([weight], fused=True).step
    taken = shortest_s(device, step, budget_s)
    per = train_state_bytes(TrainJob(), framework("ddp"))
    moved = (2 * per.optimizer + per.gradients + per.weights) * count
    return {"optimizer_efficiency": moved / taken / (gpu.bandwidth_gb_per_s * GB)}
