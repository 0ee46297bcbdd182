"""torchtitan's own ConfigManager reads the emitted configuration: python -m tests.train_runs.titan_plans FIRST LAST."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path

from planner.emit import write_files
from tests.train_emit.plans import random_plan


def main(first: int, last: int) -> None:
    from torchtitan.config import ConfigManager

    read, complaints = 0, []
    for seed in range(first, last):
        made = random_plan(random.Random(seed))
        dep = made.deployment
        assert dep is not None
        assert dep.train is not None
        if dep.engine != "torchtitan" or dep.precision == "fp8":  # float8 layers are refused where there is no GPU
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_files(made, Path(folder), targets=("train",))
            os.environ |= {"DATASET": "data.txt", "MODEL": folder, "OUTPUT_DIR": folder}
            sys.modules.pop("titan_config", None)
            sys.path.insert(0, folder)
            try:
                config = ConfigManager().parse_args(["--module", "titan_config", "--config", "planned"])
                assert config.parallelism.tensor_parallel_degree == dep.tensor_parallel
                assert config.parallelism.pipeline_parallel_degree == dep.pipeline_parallel
                assert config.parallelism.context_parallel_degree == dep.context_parallel
                assert config.training.global_batch_size == dep.train.global_batch_size
                assert config.training.seq_len == dep.train.seq_len
                assert (config.activation_checkpoint is not None) == (dep.train.checkpoint_interval == 1)
                read += 1
            except BaseException as error:
                complaints.append(f"plan {seed}: {type(error).__name__}: {error}"[:400])
            finally:
                sys.path.remove(folder)
    print("RESULT " + json.dumps({"read": read, "complaints": complaints}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
