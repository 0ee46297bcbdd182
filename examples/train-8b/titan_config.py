# Written by `planner emit`; edits are lost when it runs again.
"""The plan as a torchtitan configuration: torchtitan.train --module titan_config --config planned."""

import importlib
import json
import os
from pathlib import Path

from datasets import load_dataset
from huggingface_hub import snapshot_download
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

PLAN = json.loads((Path(__file__).resolve().parent / "train_settings.json").read_text("utf-8"))
KINDS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}


def open_dataset(path):
    """A .txt, .jsonl or .parquet file, or a hub name."""
    local = {"path": KINDS[Path(path).suffix], "data_files": path} if Path(path).is_file() else {"path": path}
    return load_dataset(**local, split="train", streaming=True)


def planned() -> Trainer.Config:
    DATASETS["planned"] = DatasetConfig(os.environ["DATASET"], open_dataset, lambda row: row["text"])
    model = os.environ.get("MODEL") or PLAN["model"]
    folder = model if Path(model).is_dir() else snapshot_download(model)
    registry = importlib.import_module(f"torchtitan.models.{PLAN['titan_model']}").model_registry
    fp8 = PLAN["precision"] == "fp8"
    kwargs = {}
    if fp8:
        kwargs["converters"] = [Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)]
    spec = registry(PLAN["titan_flavor"], **kwargs)
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=folder,
        dump_folder=os.environ.get("OUTPUT_DIR", "output"),
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if PLAN["chunked_loss"] else loss,
        optimizer=default_adamw(lr=PLAN["learning_rate"], weight_decay=PLAN["weight_decay"]),
        lr_scheduler=LRSchedulersContainer.Config(**PLAN["titan"]["lr_scheduler"]),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="planned"),
        training=TrainingConfig(**PLAN["titan"]["training"]),
        parallelism=ParallelismConfig(**PLAN["titan"]["parallelism"]),
        activation_checkpoint=FullAC.Config() if PLAN["checkpoint_interval"] else None,
        compile=CompileConfig(enable=fp8),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True),
        debug=DebugConfig(seed=PLAN["seed"]),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=PLAN["save_every"],
            keep_latest_k=2,
            initial_load_in_hf=True,
            initial_load_path=folder,
            last_save_in_hf=True,
        ),
    )
