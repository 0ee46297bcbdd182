"""deepspeed.initialize and two steps of rank 0 of a big plan on a fake process group: python -m tests.train_runs.fake_world DIR.

DIR has ds_config.json and train_settings.json. Collectives do nothing, so that losses mean nothing; shapes, batch
arithmetic, wrapper and optimizer are DeepSpeed's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(folder: Path) -> None:
    plan = json.loads((folder / "train_settings.json").read_text())
    config = json.loads((folder / "ds_config.json").read_text())
    world = plan["world_size"]
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": "8",
        "LOCAL_SIZE": "1",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
    }
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", **ranks}
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dtype = torch.bfloat16 if config.get("bf16") else torch.float32
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes)).to(dtype)
    for name in ("reduce_bucket_size", "allgather_bucket_size"):  # of a 70B model: too much for this machine
        if name in config["zero_optimization"]:
            config["zero_optimization"][name] = 100_000
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(0, 256, (config["train_micro_batch_size_per_gpu"], 16))
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    found = {
        "world": world,
        "train_batch": engine.train_batch_size(),
        "stage": int(engine.zero_optimization_stage()),
        "data_parallel": engine.dp_world_size,
        "steps": engine.global_steps,
        "offload": bool(engine.zero_use_cpu_optimizer()),
        "optimizer": type(engine.basic_optimizer).__name__,
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
