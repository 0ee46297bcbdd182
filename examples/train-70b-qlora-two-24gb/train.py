#!/usr/bin/env python3
# Written by `planner emit`; edits are lost when it runs again.
"""Training with the Hugging Face Trainer on PyTorch FSDP2."""

import train_parts as parts  # first: it sets the environment

from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def framework(args):
    """TrainingArguments for FSDP2, or for DDP when nothing is sharded (the same as in accelerate.yaml)."""
    found = {"optim": args.optim, "bf16": args.autocast == "bf16", "fp16": args.autocast == "fp16"}
    if args.zero_stage == 0:
        return found | {"activation_checkpointing": args.checkpoint_interval == 1, "ddp_find_unused_parameters": False}
    fsdp = {
        "version": 2,
        "reshard_after_forward": args.zero_stage == 3,
        "cpu_offload": args.offload != "none" and not args.cpu,  # torch pins the memory, which takes a GPU
        "cpu_ram_efficient_loading": args.ram_efficient_loading,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": args.checkpoint_interval == 1,
    }
    if args.context_parallel > 1:
        from accelerate import ParallelismConfig

        sizes = ParallelismConfig(dp_shard_size=args.data_parallel, cp_size=args.context_parallel)
        found["parallelism_config"] = sizes
    # gradients are reduced after every micro-batch: accelerate would otherwise keep them whole on every GPU until the last
    found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return found | {"fsdp": True, "fsdp_config": fsdp}


def load(args):
    if args.cpu and args.zero_stage:
        shard_on_cpu()
    attention = {"attn_implementation": "sdpa"} if args.context_parallel > 1 else {}
    return parts.load_model(args, **attention)


def shard_on_cpu():
    """accelerate turns FSDP into DDP on CPUs without a word; torch shards there as well, so take that road."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def finish(trainer):
    """The final model is written whole, not in shards."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


def training_arguments(args):
    return TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup_share,
        weight_decay=args.weight_decay,
        adam_beta2=args.adam_beta2,
        max_grad_norm=args.gradient_clipping,
        logging_steps=1,
        save_strategy="steps",
        save_steps=args.save_every,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        disable_tqdm=True,
        use_cpu=args.cpu,
        seed=args.seed,
        **framework(args),
    )


class Log(TrainerCallback):
    """Writes metrics.jsonl."""

    def __init__(self, metrics):
        self.metrics = metrics

    def on_train_begin(self, args, state, control, **_):
        found, planned = type(self.trainer.model_wrapped), self.metrics.args.wrapper
        wrapper = planned if planned in [kind.__name__ for kind in found.__mro__] else found.__name__
        rows = self.trainer.get_total_train_batch_size(args)
        ranks = rows // (args.per_device_train_batch_size * args.gradient_accumulation_steps)
        self.metrics.start(wrapper, args.world_size, ranks, state.global_step)

    def on_step_begin(self, *_, **__):
        self.metrics.begin()

    def on_step_end(self, args, state, control, **_):
        self.metrics.end()
        control.should_training_stop |= state.global_step >= self.metrics.args.stop_at

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}):
            more = {key: logs[key] for key in ("grad_norm", "learning_rate") if key in logs}
            self.metrics.step(state.global_step, logs["loss"], **more)


def main(args):
    training = training_arguments(args)  # before the model: it tells transformers how weights are sharded while loading
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args)
    log = Log(parts.Metrics(args))
    log.trainer = Trainer(model=model, args=training, train_dataset=parts.Rows(args, tokenizer), callbacks=[log])
    last = None if args.fresh else get_last_checkpoint(args.output)
    log.trainer.train(resume_from_checkpoint=last)
    finish(log.trainer)
    log.trainer.save_model(f"{args.output}/final")
    tokenizer.save_pretrained(f"{args.output}/final")


if __name__ == "__main__":
    parts.run(main)
