"""train_settings.json (read by the scripts), ds_config.json and accelerate.yaml."""

from __future__ import annotations

import json
from typing import Any

from planner.emit.text import HEADER, to_yaml
from planner.emit.train.layout import TrainLayout, facts


def to_json(tree: dict[str, Any]) -> str:
    """JSON under our header."""
    return json.dumps({"_note": HEADER, **tree}, indent=2) + "\n"


def _lora(laid: TrainLayout) -> dict[str, Any] | None:
    train, table = laid.train, facts()["lora_targets"]
    if train.method == "full":
        return None
    wanted = train.lora_targets or tuple(table)
    if set(wanted) == set(table):
        targets: str | list[str] = "all-linear"
    else:
        targets = [name for target in wanted for name in table.get(target, [target])]
    rank = train.lora_rank or 16
    return {"rank": rank, "alpha": rank * facts()["training"]["lora_alpha_per_rank"], "targets": targets}


def wrapper(laid: TrainLayout) -> str:
    """Class that must be around the model once it runs."""
    if laid.engine == "deepspeed":
        return "PipelineEngine" if laid.deployment.pipeline_parallel > 1 else "DeepSpeedEngine"
    return "FSDPModule" if laid.train.zero_stage else "DistributedDataParallel"


def dtypes(laid: TrainLayout) -> dict[str, Any]:
    """load_dtype: of the weights in memory. autocast: what the Trainer mixes in (None = pure). adapters_fp32: LoRA masters.

    DeepSpeed keeps fp32 masters itself, so weights load in 16 bit; FSDP2 and DDP hold the masters as the weights.
    """
    precision, train = laid.deployment.precision, laid.train
    pure = train.optimizer == "adamw-bf16"
    half = precision if precision in ("fp16", "fp32") else "bf16"
    masters = "bf16" if pure else "fp32"
    load = half if laid.engine == "deepspeed" or train.method != "full" else masters
    autocast = None if pure or precision == "fp32" else half
    return {"load_dtype": load, "autocast": autocast, "adapters_fp32": laid.engine == "fsdp2" and not pure}


def settings_json(laid: TrainLayout, more: dict[str, Any] | None = None) -> str:
    """Everything the scripts need to know of the plan. more: what one framework adds."""
    dep, train, numbers = laid.deployment, laid.train, facts()["training"]
    tree = {
        "model": laid.model,
        "engine": dep.engine,
        "wrapper": wrapper(laid),
        "world_size": dep.gpus,
        "data_parallel": dep.data_parallel,
        "tensor_parallel": dep.tensor_parallel,
        "pipeline_parallel": dep.pipeline_parallel,
        "context_parallel": dep.context_parallel,
        "layers_per_stage": list(train.layers_per_stage) if train.layers_per_stage else None,
        "precision": dep.precision,
        **dtypes(laid),
        "method": train.method,
        "lora": _lora(laid),
        "shards_frozen": laid.engine == "fsdp2" and train.zero_stage > 0,
        "zero_stage": train.zero_stage,
        "offload": train.offload,
        "optim": laid.optim,
        "seq_len": train.seq_len,
        "packing": train.packing,
        "micro_batch_size": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "global_batch_size": train.global_batch_size,
        "steps": train.steps,
        "save_every": laid.save_every,
        "checkpoint_interval": train.checkpoint_interval,
        "chunked_loss": train.chunked_loss,
        "loss_chunk_tokens": numbers["loss_chunk_tokens"],
        "ram_efficient_loading": train.method != "qlora",
        "learning_rate": laid.learning_rate,
        **{k: numbers[k] for k in ("warmup_share", "weight_decay", "adam_beta2", "gradient_clipping", "seed")},
        "then_try": then_try(laid),
    }
    return to_json(tree | (more or {}))


def then_try(laid: TrainLayout) -> str:
    """The next plan when one row a micro-batch and a checkpoint at every layer are still too much."""
    train, again = laid.train, "planner solve --task train"
    pipeline = laid.deployment.pipeline_parallel > 1
    if train.method == "qlora" and laid.engine == "deepspeed":
        return f"shard the 4-bit weights too: {again} --framework fsdp2 (the rest as before), then emit again"
    if train.zero_stage < (1 if pipeline else 3) and laid.engine in ("deepspeed", "fsdp2"):
        step = train.zero_stage + (2 if laid.engine == "fsdp2" and train.zero_stage == 0 else 1)
        return f"shard more: {again} --zero-stage {step} (the rest as before), then emit again"
    if not pipeline and train.offload == "none" and laid.engine == "deepspeed":
        return f"keep the optimizer in host memory: {again} --offload optimizer (the rest as before), then emit again"
    if not pipeline and train.offload != "optimizer+parameters" and laid.engine in ("deepspeed", "fsdp2"):
        return (
            f"keep weights in host memory: {again} --offload optimizer+parameters (the rest as before), then emit again"
        )
    return f"more GPUs, a shorter --seq-len or --method lora: {again}, then emit again"


def _optimizer(laid: TrainLayout) -> dict[str, Any] | None:
    train, numbers = laid.train, facts()["training"]
    params: dict[str, Any] = {"lr": laid.learning_rate, "weight_decay": numbers["weight_decay"]}
    if train.optimizer == "muon":
        return {"type": "Muon", "params": params}
    if train.optimizer not in ("adamw", "adamw-bf16"):
        return None
    params |= {"betas": [0.9, numbers["adam_beta2"]], "eps": 1e-8}
    if train.offload == "none":
        params["torch_adam"] = True  # torch's own kernel; offload takes DeepSpeedCPUAdam, which compiles at first use
    return {"type": "AdamW", "params": params}


def _zero(laid: TrainLayout) -> dict[str, Any]:
    train = laid.train
    zero: dict[str, Any] = {"stage": train.zero_stage}
    if train.zero_stage == 0:
        return zero
    zero |= {"contiguous_gradients": True, "overlap_comm": train.zero_stage > 1, **facts()["deepspeed_buckets"]}
    if train.zero_stage == 3:
        zero |= {**facts()["deepspeed_stage3"], "stage3_gather_16bit_weights_on_model_save": True}
    if train.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if train.offload == "optimizer+parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def ds_config(laid: TrainLayout) -> dict[str, Any]:
    """DeepSpeed 0.19.8 configuration of the plan (docs/_pages/config-json of DeepSpeed)."""
    dep, train = laid.deployment, laid.train
    config: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "gradient_clipping": facts()["training"]["gradient_clipping"],
        "steps_per_print": 100,
        "zero_optimization": _zero(laid),
    }
    if dep.precision == "bf16":
        config["bf16"] = {"enabled": True}
        if train.optimizer == "adamw-bf16":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif dep.precision == "fp16":
        config["fp16"] = dict(facts()["deepspeed_fp16"])
    if (optimizer := _optimizer(laid)) is not None:
        config["optimizer"] = optimizer
    else:
        config["zero_allow_untested_optimizer"] = True
    if dep.pipeline_parallel > 1:
        config["pipeline"] = {"use_reentrant": False}
    if dep.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": dep.tensor_parallel}
    return config


def accelerate_yaml(laid: TrainLayout) -> str:
    """accelerate 1.15.0 configuration: FSDP2, or DDP when nothing is sharded. Rank and addresses come from launch.sh."""
    train, autocast = laid.train, dtypes(laid)["autocast"]
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if train.zero_stage else "MULTI_GPU",
        "mixed_precision": autocast or "no",
        "num_machines": laid.machines,
        "num_processes": laid.deployment.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if train.zero_stage:
        tree["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": train.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": train.offload != "none",
            "fsdp_cpu_ram_efficient_loading": train.method != "qlora",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": train.checkpoint_interval == 1,
        }
    if laid.deployment.context_parallel > 1:
        tree["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": laid.deployment.data_parallel,
            "parallelism_config_tp_size": 1,
            "parallelism_config_cp_size": laid.deployment.context_parallel,
            "parallelism_config_cp_backend": "torch",
        }
    return to_yaml(tree, notes=[f"accelerate launch --config_file accelerate.yaml ({laid.deployment.gpus} processes)"])
