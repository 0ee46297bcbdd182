# Written by `planner emit`; edits are lost when it runs again.
"""What every training script of the plan shares: settings, data, model, metrics, and what to do when memory runs out."""

import argparse
import hashlib
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
OUT_OF_MEMORY = 12  # exit code
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))


def read_json(name):
    """A file beside this one."""
    return {k: v for k, v in json.loads((HERE / name).read_text("utf-8")).items() if k != "_note"}


def arguments():
    """The plan (train_settings.json) and the command line, in one namespace."""
    plan = read_json("train_settings.json")
    parser = argparse.ArgumentParser(description="Trains as planned.")
    parser.add_argument("--model", default=plan["model"], help="hub name or folder")
    parser.add_argument("--dataset", required=True, help=".txt, .jsonl or .parquet file, a folder of them, or a hub name")
    parser.add_argument("--text-field", default="text", help="column with the text; a column 'messages' is a chat")
    parser.add_argument("--output", default="output")
    parser.add_argument("--steps", type=int, default=plan["steps"])
    parser.add_argument("--learning-rate", type=float, default=plan["learning_rate"])
    parser.add_argument("--save-every", type=int, default=plan["save_every"], help="steps between checkpoints")
    parser.add_argument("--stop-at", type=int, help="end after this step, with the schedule of all --steps")
    parser.add_argument("--fresh", action="store_true", help="do not resume from a checkpoint in --output")
    parser.add_argument("--cpu", action="store_true", help="rehearse on CPUs (gloo)")
    for name in ("micro_batch_size", "gradient_accumulation_steps", "checkpoint_interval"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=plan[name])
    args = parser.parse_args()
    args.stop_at = min(args.stop_at or args.steps, args.steps)
    if not args.cpu and not torch.cuda.is_available():
        sys.exit("no GPU is visible; --cpu rehearses the plan on CPUs")
    if not args.cpu:
        torch.cuda.set_device(LOCAL_RANK)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != plan["world_size"]:
        sys.exit(f"the plan is for {plan['world_size']} processes, {world} were started: use launch.sh or plan again")
    return argparse.Namespace(**{**plan, **vars(args)})


def forget_buffers(args):
    """DeepSpeed on CPUs leaves 66 MiB a rank in /dev/shm (csrc/cpu/comm/shm.cpp). Once every rank has mapped them, the names may go."""
    if args.cpu:
        torch.distributed.barrier()
        name = f"{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}_{RANK}"
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{name}").unlink(missing_ok=True)


# ---- data: tokenised once a machine into a memory-mapped file, then cut into rows of seq_len


def texts(args, tokenizer):
    """The samples of the data set as text."""
    path = Path(args.dataset)
    for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
        if file.suffix in (".txt", ".jsonl") and file.exists():
            with file.open(encoding="utf-8") as lines:
                for line in filter(str.strip, lines):
                    yield line if file.suffix == ".txt" else as_text(json.loads(line), args, tokenizer)
        else:
            from datasets import load_dataset

            local = {"path": "parquet", "data_files": str(file)} if file.exists() else {"path": args.dataset}
            for row in load_dataset(**local, split="train", streaming=True):
                yield as_text(row, args, tokenizer)


def as_text(row, args, tokenizer):
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=False)
    if args.text_field not in row:
        sys.exit(f"{args.dataset} has no column {args.text_field!r}, only {', '.join(row)}: name it with --text-field")
    return row[args.text_field]


def write_tokens(args, tokenizer, path):
    """All tokens in one file, and where each sample ends; renamed into place when complete."""
    part = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    ends, total = [], 0
    with part.open("wb") as file:
        for text in texts(args, tokenizer):
            ids = tokenizer(text, verbose=False)["input_ids"]
            if ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            file.write(np.asarray(ids, dtype=np.uint32).tobytes())
            total += len(ids)
            ends.append(total)
    np.save(path.with_suffix(".npy"), np.asarray(ends, dtype=np.int64))
    part.replace(path)


class Rows(torch.utils.data.Dataset):
    """Rows of seq_len tokens: cut from the stream of all samples (packing), or one sample each, padded."""

    def __init__(self, args, tokenizer):
        self.seq_len, self.packing, self.pad = args.seq_len, args.packing, tokenizer.eos_token_id
        if self.pad is None:
            sys.exit(f"the tokenizer of {args.model} has no end-of-text token; set eos_token in its files")
        key = hashlib.sha256(f"{args.dataset}|{args.text_field}|{args.model}".encode()).hexdigest()[:12]
        path = Path(args.output) / f"tokens-{key}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        if LOCAL_RANK == 0 and not path.exists():
            write_tokens(args, tokenizer, path)
        while not path.exists():  # the launcher ends this process if the writer fails
            time.sleep(0.2)
        self.tokens = np.memmap(path, dtype=np.uint32, mode="r") if path.stat().st_size else np.zeros(0, np.uint32)
        self.ends = np.load(path.with_suffix(".npy"))
        least = args.micro_batch_size * args.data_parallel
        if len(self) < least:
            sys.exit(f"{args.dataset} has {len(self)} rows of {self.seq_len} tokens, one micro-batch takes {least}")

    def __len__(self):
        return len(self.tokens) // self.seq_len if self.packing else len(self.ends)

    def __getitem__(self, index):
        if self.packing:
            ids = self.tokens[index * self.seq_len : (index + 1) * self.seq_len]
            ids = torch.from_numpy(ids.astype(np.int64))
            return {"input_ids": ids, "labels": ids.clone()}
        start = self.ends[index - 1] if index else 0
        ids = torch.from_numpy(self.tokens[start : self.ends[index]][: self.seq_len].astype(np.int64))
        missing = self.seq_len - len(ids)
        pad = torch.nn.functional.pad
        return {
            "input_ids": pad(ids, (0, missing), value=self.pad),
            "attention_mask": pad(torch.ones_like(ids), (0, missing)),
            "labels": pad(ids, (0, missing), value=-100),
        }


# ---- model


def load_model(args, **kwargs):
    """The model in the planned dtype, with chunked loss, LoRA and grouped checkpointing where the plan has them."""
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[args.load_dtype]
    if args.method == "qlora":
        from transformers import BitsAndBytesConfig

        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype if args.shards_frozen else torch.uint8,
        )
        # whole on one GPU only where it stays whole: FSDP2 moves its shards from the host, layer by layer
        kwargs["device_map"] = {"": "cpu" if args.cpu or args.shards_frozen else LOCAL_RANK}
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **kwargs)
    model.config.use_cache = False
    if args.checkpoint_interval > 1 and args.pipeline_parallel == 1:
        checkpoint_groups(model, args.checkpoint_interval)
    if args.chunked_loss:
        chunk_loss(model, args.loss_chunk_tokens)
    if args.method != "full":
        from peft import LoraConfig, get_peft_model

        targets = args.lora["targets"]
        lora = LoraConfig(r=args.lora["rank"], lora_alpha=args.lora["alpha"], target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=args.adapters_fp32)
    return model


class Groups(torch.nn.ModuleList):
    """Decoder layers that run in groups of `every`, each under one checkpoint; names of the weights stay as they are."""

    every = 1

    def __iter__(self):
        layers = list(super().__iter__())
        for first in range(0, len(layers), self.every):
            yield self.group(layers[first : first + self.every])

    def __getitem__(self, index):
        picked = super().__getitem__(index)
        if isinstance(picked, Groups):
            picked.every = self.every
        return picked

    @staticmethod
    def group(layers):
        def run(hidden, **kwargs):
            for layer in layers:
                hidden = layer(hidden, **kwargs)
            return hidden

        def call(hidden, **kwargs):
            if not torch.is_grad_enabled():
                return run(hidden, **kwargs)
            return checkpoint(run, hidden, use_reentrant=False, **kwargs)

        return call


def same_layers(model):
    """Groups of layers share one mask, so the layers must be of one kind."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full"])
    if len(kinds) > 1:
        sys.exit(f"layers of this model differ ({', '.join(sorted(kinds))}): run with CHECKPOINT_INTERVAL=1")


def checkpoint_groups(model, every):
    """transformers checkpoints single layers; the plan keeps one activation every `every` layers."""
    same_layers(model)
    grouped = Groups(model.model.layers)
    grouped.every = every
    model.model.layers = grouped


def chunk_loss(model, chunk):
    """Cross entropy over `chunk` tokens at a time: the logits of a whole row never exist."""
    from transformers.modeling_outputs import CausalLMOutput

    def part(hidden, labels):
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), labels, ignore_index=-100, reduction="sum")

    def forward(input_ids, labels=None, num_items_in_batch=None, **kwargs):
        hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
        if labels is None:
            return CausalLMOutput(logits=model.lm_head(hidden))
        hidden, labels = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(hidden.device)
        pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        total = sum(checkpoint(part, h, t, use_reentrant=False) for h, t in pairs)
        return CausalLMOutput(loss=total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch))

    model.forward = forward


# ---- metrics and the end of memory


class Metrics:
    """One JSON line a step in OUTPUT/metrics.jsonl, written by rank 0."""

    def __init__(self, args):
        self.args, self.path = args, Path(args.output) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row):
        if RANK == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def start(self, wrapper, world_size, data_parallel, resumed_from, **more):
        """What really runs; refuses to go on when it is not what was planned."""
        args = self.args
        rows = args.micro_batch_size * args.gradient_accumulation_steps * data_parallel
        seen = {"wrapper": wrapper, "world_size": world_size, "data_parallel": data_parallel, "global_batch_size": rows}
        planned = {key: getattr(args, key) for key in seen}
        if seen != planned:
            sys.exit(f"this is not the plan: planned {planned}, found {seen}")
        self.write({"event": "start", "step": resumed_from, **seen, **more})

    def begin(self):
        self.synchronize()
        self.began = time.perf_counter()

    def end(self):
        self.synchronize()
        self.step_time = time.perf_counter() - self.began

    def synchronize(self):
        if not self.args.cpu:
            torch.cuda.synchronize()

    def step(self, step, loss, **more):
        args = self.args
        speed = args.global_batch_size * args.seq_len / self.step_time
        row = {"event": "step", "step": step, "loss": loss, "step_time_s": self.step_time, "tokens_per_s": speed}
        row |= {"tokens_per_s_per_gpu": speed / args.world_size, **self.memory(), **more}
        self.write(row)

    def memory(self):
        """Peak of the fullest rank: what torch allocated and reserved on the GPU, or the resident set on a CPU."""
        if self.args.cpu:
            names, values = ["peak_host_gib"], [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]
        else:
            names = ["peak_allocated_gib", "peak_reserved_gib"]
            values = [torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30]
        peaks = torch.tensor(values, device="cpu" if self.args.cpu else "cuda")
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        return dict(zip(names, (round(v, 4) for v in peaks.tolist()), strict=True))


def next_plan(args):
    """What to try when the planned micro-batch does not fit."""
    if args.micro_batch_size > 1 and args.micro_batch_size % 2 == 0:
        half, twice = args.micro_batch_size // 2, args.gradient_accumulation_steps * 2
        return f"half the micro-batch: MICRO_BATCH_SIZE={half} GRADIENT_ACCUMULATION_STEPS={twice} bash launch.sh"
    if args.micro_batch_size > 1:
        rows = args.micro_batch_size * args.gradient_accumulation_steps
        return f"one row at a time: MICRO_BATCH_SIZE=1 GRADIENT_ACCUMULATION_STEPS={rows} bash launch.sh"
    if args.checkpoint_interval != 1:
        return "checkpoint every layer: CHECKPOINT_INTERVAL=1 bash launch.sh"
    return args.then_try


def run(main):
    """main(args), with a clear end when memory runs out."""
    args = arguments()
    try:
        main(args)
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "memory" not in text.lower():
            raise
        print(f"\nOUT OF MEMORY on rank {RANK}: {text.splitlines()[0] if text else 'no memory'}", file=sys.stderr)
        print(
            f"The plan (micro-batch {args.micro_batch_size}, accumulation {args.gradient_accumulation_steps}, checkpoint "
            f"interval {args.checkpoint_interval}) does not fit here.\nNEXT: {next_plan(args)}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(OUT_OF_MEMORY)  # the other ranks wait inside a collective: do not wait for them
