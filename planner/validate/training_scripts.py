"""What a row's public training script states beyond the row: lengths of its samples, its tuner, its techniques.

Data: training_scripts.yaml. A micro-batch without packing is padded to its longest sample, so the peak of a run is that of
micro_batch x longest tokens: longest = the longest sample of the script's dataset, within the script's limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from planner.estimator.time.surfaces import read_data

Row = dict[str, str]
_NOT_STATED = ("repo", "path", "task", "model", "source")


@dataclass(frozen=True)
class Script:
    """What a script states: its dataset's name, a reason to skip its rows, and what differs from the row or the tool's defaults.

    tokens: of a sample, where the row's number is an assumption. trained_layers: all that are trained (0 = every one), with
    trained_ends embedding and head too; added_layers: of the model, copies of its own. constants: of the framework (engines/training.yaml).
    """

    dataset: str = ""
    skip: str = ""
    recompute: str = ""
    offload: str = ""
    precision: str = ""
    stack: str = ""
    shows: str = ""
    micro_batch: int = 0
    tokens: int = 0
    trained_layers: int = 0
    trained_ends: int = 0
    added_layers: int = 0
    chunked_loss: bool | None = None
    constants: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Samples:
    """Tokens of the longest sample of a run, and the words that say where the length is from (empty: stated in the row)."""

    longest: int
    assumed: str = ""


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = read_data("planner.validate", "training_scripts.yaml")
    return found


def script_of(row: Row) -> Script:
    """The script that the row's source names; an empty Script for one that is not listed."""
    repo, _, rest = row["source"].partition("@")
    path = rest.partition(" ")[2]
    for entry in _data()["scripts"]:
        named = all(entry.get(c, row[c]) == row[c] for c in ("task", "model"))
        if entry["repo"] == repo and path.startswith(entry["path"]) and named:
            return Script(**{k: v for k, v in entry.items() if k not in _NOT_STATED})
    return Script()


def samples_of(row: Row, limit: int | None) -> Samples | str:
    """The longest sample of a run that does not pack, or why it is not known. limit: of the script; None = the model's."""
    data, script = _data(), script_of(row)
    if any(word in row["notes"] for word in data["unpadded"]):
        return "samples are concatenated without padding: what they sum up to is not stated"
    found = data["datasets"].get(script.dataset)
    if found is None:
        return "samples are not packed and their lengths are not stated"
    if found["longest"] is None:
        if limit is None:
            return "samples are as long as the limit, which is not stated"
        return Samples(limit, f"longest sample of {script.dataset} answers = the limit of {limit} tokens")
    longest = min(int(found["longest"]), limit or int(found["longest"]))
    return Samples(longest, f"longest sample of {script.dataset}: {longest} tokens")


def assumed_micro_batch(row: Row) -> int | None:
    """Micro-batch of the source's own scripts, where the row states none."""
    found = _data()["assumptions"]["micro_batch"].get(row["source"].partition("@")[0])
    return None if found is None else int(found["value"])


def adapter_rank(task: str) -> int | None:
    """Rank of LoRA on all matrices with as many parameters as the task's adapters have; None for other tasks."""
    found = _data()["adapters"].get(task)
    return None if found is None else int(found["rank"])


def extra_constants(row: Row, technique: str) -> dict[str, float]:
    """Constants of the framework that the row's tuner, offload column and cumulative techniques change."""
    data, found = _data(), dict(script_of(row).constants)
    for tuner in data["tuners"]:
        if tuner["match"] in row["source"]:
            found.update(tuner["constants"])
    group = re.search(r"\(group (\d+)\)", row["zero_or_fsdp_stage"])
    found.update({"zero_group": float(group[1])} if group else {})
    words = [technique] if technique else []
    words += ["activation_offload"] if "activations" in row["offload"].lower() else []
    words += ["optimizer_in_backward"] if "optimizer_in_bwd" in row["optimizer"] else []
    for word in words:
        found.update(data["techniques"].get(word, {}).get("constants", {}))
    return {name: float(value) for name, value in found.items()}


def kernel_constants(kernels: str, gpus: int) -> dict[str, float]:
    """Constants that the named kernels of a fms-acceleration row change."""
    found: dict[str, float] = {}
    for entry in _data()["kernels"]:
        if kernels.startswith(entry["match"]) and gpus <= entry["gpus"]:
            found.update({name: float(value) for name, value in entry["constants"].items()})
    return found
