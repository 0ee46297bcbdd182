"""What a framework's files cannot do here: (is it asked for, why not, the way out). Data of the emitters, not of the solver."""

from __future__ import annotations

from planner.plan import Deployment, TrainSettings

Refusal = tuple[bool, str, str]
BIGGER, OTHER = "Pin --framework torchtitan.", "Choose another --optimizer."


def refusals(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    """All reasons of the plan's framework; the first that holds is the one to show."""
    by_engine = {
        "deepspeed": [*_pipeline_module(dep, train), *_deepspeed(dep, train)],
        "fsdp2": _fsdp2(dep, train),
        "torchtitan": [*_all_weights(train), *_torchtitan(dep, train)],
        "megatron_bridge": [*_all_weights(train), *_megatron(dep, train)],
    }
    return by_engine[dep.engine]


def _pipeline_module(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    if dep.pipeline_parallel == 1:
        return []
    return [
        (dep.tensor_parallel > 1, "PipelineModule and AutoTP do not combine", BIGGER),
        (train.zero_stage > 1, "PipelineModule refuses ZeRO 2 and 3", "Pin --zero-stage 1."),
        (train.offload != "none", "PipelineModule keeps its states on the GPU", "Pin --offload none."),
        (train.method != "full", "the pipeline script trains all weights", "Pin --pp 1."),
        (train.optimizer not in ("adamw", "adamw-bf16"), "the pipeline script runs AdamW", OTHER),
        (train.layers_per_stage is None, "the plan does not say which layers a stage holds", "Solve again."),
        (not train.packing, "the pipeline script has no padding mask", "Plan with packing."),
    ]


def _deepspeed(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    tp, stage, offload, optimizer = dep.tensor_parallel, train.zero_stage, train.offload, train.optimizer
    more = dep.context_parallel > 1 or dep.expert_parallel > 1
    whole = train.method == "qlora" and stage == 3
    halves = optimizer == "adamw-bf16" and (stage < 1 or dep.precision != "bf16")
    on_host = offload != "none" and optimizer not in ("adamw", "adamw-bf16")
    flat = optimizer == "adafactor" and stage > 0
    return [
        (more, "its Trainer has no context or expert parallelism here", BIGGER),
        (tp > 1 and stage == 0, "AutoTP was only seen with ZeRO 1 to 3", "Pin --zero-stage 1."),
        (tp > 1 and train.method != "full", "AutoTP does not split adapters", "Pin --tp 1."),
        (dep.precision == "fp8", "it computes in bf16, fp16 or fp32", BIGGER),
        (whole, "ZeRO 3 does not shard 4-bit weights", "Pin --framework fsdp2 or --zero-stage 2."),
        (
            offload == "optimizer+parameters" and stage < 3,
            "parameters leave the GPU only with ZeRO 3",
            "Pin --zero-stage 3.",
        ),
        (offload == "optimizer" and stage < 1, "offload needs ZeRO", "Pin --zero-stage 1."),
        (halves, "bf16 states need ZeRO 1 to 3 and bf16", OTHER),
        (on_host, "its CPU optimizer is AdamW", OTHER),
        (flat, "ZeRO flattens the weights, and then it saves nothing", OTHER),
        (optimizer == "muon" and train.method != "full", "Muon was only seen on whole weights", OTHER),
    ]


def _fsdp2(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    cp, stage, optimizer = dep.context_parallel, train.zero_stage, train.optimizer
    more = dep.pipeline_parallel > 1 or dep.expert_parallel > 1
    unseen = optimizer == "adafactor" and stage > 0
    return [
        (more, "accelerate has no pipeline or expert parallelism for training", BIGGER),
        (dep.tensor_parallel > 1, "the Trainer cannot resume a model that transformers split by tensor", BIGGER),
        (cp > 1 and stage == 0, "context parallelism needs FSDP2", "Pin --zero-stage 3."),
        (cp > 1 and train.chunked_loss, "context parallelism splits the rows that chunked loss cuts", BIGGER),
        (cp > 1 and not train.packing, "context parallelism takes no padding", "Plan with packing."),
        (cp > 1 and train.seq_len % (2 * cp) > 0, f"{2 * cp} parts must divide the sequence", "Change --seq-len."),
        (dep.precision == "fp8", "the Trainer computes in bf16, fp16 or fp32", BIGGER),
        (optimizer == "adamw-bf16" and dep.precision != "bf16", "bf16 states need bf16", OTHER),
        (stage == 1, "FSDP2 shards gradients too", "Pin --zero-stage 2 or 3."),
        (
            train.offload == "optimizer",
            "FSDP2 moves states and parameters together",
            "Pin --offload optimizer+parameters.",
        ),
        (train.offload != "none" and stage == 0, "DDP keeps everything on the GPU", "Pin --zero-stage 3."),
        (
            optimizer == "paged-adamw-8bit" and stage > 0,
            "paged states cannot be sharded",
            "Choose --optimizer adamw-8bit.",
        ),
        (unseen, "Adafactor on sharded weights was never run", OTHER),
        (optimizer == "muon", "the Trainer has no Muon", OTHER),
    ]


def _all_weights(train: TrainSettings) -> list[Refusal]:
    return [
        (train.method != "full", "the script trains all weights", "Pin --framework fsdp2 or deepspeed."),
        (not train.packing, "it packs its samples", "Plan with packing."),
        (train.offload == "optimizer", "it does not offload states alone", "Pin --offload none."),
    ]


def _torchtitan(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    return [
        (dep.precision == "fp16", "it has no loss scaling", "Use bf16."),
        (train.optimizer not in ("adamw", "adamw-bf16"), "its script here runs AdamW", OTHER),
        (train.optimizer == "adamw-bf16" and dep.precision != "bf16", "bf16 states need bf16", OTHER),
        (train.checkpoint_interval > 1, "it checkpoints every layer or none", "Pin --checkpoint-interval 1."),
        (train.zero_stage == 1, "FSDP2 shards gradients too", "Pin --zero-stage 2 or 3."),
        (train.offload != "none" and train.zero_stage == 0, "only FSDP offloads", "Pin --zero-stage 3."),
    ]


def _megatron(dep: Deployment, train: TrainSettings) -> list[Refusal]:
    both = dep.pipeline_parallel > 1 and train.zero_stage > 1
    past = train.checkpoint_interval > 1 and any(n % train.checkpoint_interval for n in train.layers_per_stage or ())
    return [
        (dep.precision == "fp32", "its recipes mix 16 or 8 bit", "Use bf16."),
        (train.offload != "none", "its states stay on the GPU", "Pin --offload none."),
        (train.optimizer != "adamw", "its script here runs AdamW with fp32 states", OTHER),
        (past, "its checkpoints must divide the layers of every stage", "Pin --checkpoint-interval 1."),
        (both, "Megatron FSDP and pipeline stages were never combined here", "Pin --zero-stage 1."),
    ]
