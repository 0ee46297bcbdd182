"""torchtitan 0.3.0 and Megatron Bridge 0.3.1: settings for the axes only they have. Fields read from their wheels."""

from __future__ import annotations

from typing import Any

from planner.emit.train.layout import TrainLayout, facts
from planner.engines.training import framework
from planner.errors import InvalidValueError


def titan_settings(laid: TrainLayout) -> dict[str, Any]:
    """What titan_config.py reads: model, and the fields of TrainingConfig, ParallelismConfig and LRSchedulersContainer."""
    dep, train = laid.deployment, laid.train
    name = laid.plan.model.hf_id.removesuffix("-Instruct")
    configured = framework("torchtitan").models
    found = configured.get(name)
    if found is None:
        known = ", ".join(configured)
        raise InvalidValueError(
            f"torchtitan has no configuration for {laid.model}", f"it has {known}", "Pin another --framework."
        )
    pipeline = dep.pipeline_parallel > 1
    pure = train.optimizer == "adamw-bf16"
    half = "float32" if dep.precision == "fp32" else "bfloat16"
    sharded = train.zero_stage > 0
    training = {
        "local_batch_size": train.micro_batch_size * (train.gradient_accumulation_steps if pipeline else 1),
        "global_batch_size": train.global_batch_size,
        "seq_len": train.seq_len,
        "steps": train.steps,
        "max_norm": facts()["training"]["gradient_clipping"],
        "enable_cpu_offload": train.offload != "none",
        "disable_cuda_graphs": True,
        "dtype": "bfloat16" if pure else "float32",
        "mixed_precision_param": half,
    }
    parallelism: dict[str, Any] = {
        "data_parallel_shard_degree": dep.data_parallel if sharded else 1,
        "data_parallel_replicate_degree": 1 if sharded else dep.data_parallel,
        "fsdp_reshard_after_forward": "always" if train.zero_stage == 3 else "never",
        "tensor_parallel_degree": dep.tensor_parallel,
        "pipeline_parallel_degree": dep.pipeline_parallel,
        "context_parallel_degree": dep.context_parallel,
        "expert_parallel_degree": dep.expert_parallel,
    }
    if dep.context_parallel > 1:
        parallelism["context_parallel_load_balancer"] = "ptrr"  # the one for flex attention
    if pipeline:
        parallelism["pipeline_parallel_schedule"] = "1F1B"
        parallelism["pipeline_parallel_microbatch_size"] = train.micro_batch_size
        if train.layers_per_stage:
            parallelism["module_fqns_per_model_part"] = _parts(train.layers_per_stage)
    warm = max(1, int(train.steps * facts()["training"]["warmup_share"]))
    scheduler = {"warmup_steps": warm, "decay_type": "cosine", "min_lr_factor": 0.0}
    return {
        "titan_model": found[0],
        "titan_flavor": found[1],
        "titan": {"training": training, "parallelism": parallelism, "lr_scheduler": scheduler},
    }


def _parts(sizes: tuple[int, ...]) -> list[list[str]]:
    """Modules of each pipeline stage, by torchtitan's names."""
    parts, layer = [], 0
    for size in sizes:
        parts.append([f"layers.{i}" for i in range(layer, layer + size)])
        layer += size
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def megatron_settings(laid: TrainLayout) -> dict[str, Any]:
    """What megatron_train.py sets, by part of ConfigContainer."""
    dep, train, numbers = laid.deployment, laid.train, facts()["training"]
    model: dict[str, Any] = {
        "tensor_model_parallel_size": dep.tensor_parallel,
        "pipeline_model_parallel_size": dep.pipeline_parallel,
        "context_parallel_size": dep.context_parallel,
        "expert_model_parallel_size": dep.expert_parallel,
        "sequence_parallel": dep.tensor_parallel > 1,
        "seq_length": train.seq_len,
    }
    if train.checkpoint_interval:
        model |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": train.checkpoint_interval,
        }
    if train.layers_per_stage and len(set(train.layers_per_stage)) > 1:
        layout = [["decoder"] * size for size in train.layers_per_stage]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
        model["pipeline_model_parallel_layout"] = layout
    ddp = {"use_distributed_optimizer": train.zero_stage > 0, "data_parallel_sharding_strategy": "no_shard"}
    if train.zero_stage > 1:
        strategy = "optim_grads_params" if train.zero_stage == 3 else "optim_grads"
        ddp |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    checkpoint: dict[str, Any] = {"save_interval": laid.save_every}
    if train.zero_stage > 1:
        checkpoint["ckpt_format"] = "fsdp_dtensor"  # the only one that Megatron FSDP saves
    precision = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_current_scaling_mixed"}
    return {
        "megatron_precision": precision[dep.precision],
        "megatron": {
            "model": model,
            "ddp": ddp,
            "train": {
                "train_iters": train.steps,
                "global_batch_size": train.global_batch_size,
                "micro_batch_size": train.micro_batch_size,
            },
            "optimizer": {
                "use_distributed_optimizer": train.zero_stage > 0,  # either of the two that is on turns the other on
                "lr": laid.learning_rate,
                "min_lr": 0.0,
                "weight_decay": numbers["weight_decay"],
                "clip_grad": numbers["gradient_clipping"],
            },
            "scheduler": {
                "lr_warmup_iters": max(1, int(train.steps * numbers["warmup_share"])),
                "start_weight_decay": numbers["weight_decay"],
                "end_weight_decay": numbers["weight_decay"],
            },
            "dataset": {"sequence_length": train.seq_len},
            "checkpoint": checkpoint,
        },
    }
