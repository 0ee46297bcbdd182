"""Launch files from a plan: render (pure text) and write_files (whole files or none)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.emit import sglang, static, tensorrt_llm, tgi, train, vllm
from planner.emit.balancer import CONFIG, balancer_conf, endpoints
from planner.emit.compose import compose_yaml
from planner.emit.kubernetes import kubernetes_yaml
from planner.emit.layout import CPU_TARGETS, Layout, layout_of
from planner.emit.monitor import monitor_sh
from planner.emit.notes import launch_md
from planner.emit.skypilot import refusal, skypilot_yaml
from planner.emit.slurm import slurm_sh
from planner.emit.text import HEADER
from planner.errors import InputError, InvalidValueError, UnknownNameError
from planner.plan import Plan, plan_to_yaml

__all__ = ["HEADER", "TARGETS", "render", "write_files"]

PLAN_FILE = "plan.yaml"
TARGETS = ("serve", "train", "compose", "kubernetes", "skypilot", "slurm", "balancer", "monitor", "notes")
_NEED_SCRIPTS = {"compose", "skypilot", "slurm", "monitor"}
_ENGINES: dict[str, Callable[[Layout], dict[str, str]]] = {
    "vllm": vllm.files,
    "sglang": sglang.files,
    "tensorrt_llm": tensorrt_llm.files,
    "tgi": tgi.files,
    "deepspeed_inference": static.deepspeed_files,
    "transformers": static.transformers_files,
}


def render(plan: Plan) -> dict[str, str]:
    """All launch files of the plan: file name -> text. Pure and deterministic: no date, host or environment enters.

    Raises NoPlanError for an infeasible plan, InputError for one that contradicts itself or has hostile names.
    """
    return {name: text for texts in _by_target(plan)[0].values() for name, text in texts.items()}


def _by_target(plan: Plan) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Texts by target, and the targets left out with the reason."""
    if plan.task == "train":
        return train.files_by_target(plan)
    layout = layout_of(plan)
    scripts = _ENGINES[layout.deployment.engine](layout)
    if layout.vendor == "cpu":
        return _on_cpu(layout, scripts)
    texts: dict[str, dict[str, str]] = {"serve": scripts, "compose": {"docker-compose.yaml": compose_yaml(layout)}}
    skipped: dict[str, str] = {}
    mpi = layout.deployment.engine == "tensorrt_llm" and layout.nodes_per_replica > 1
    if mpi:
        skipped["compose"] = skipped["kubernetes"] = "TensorRT-LLM over several machines is an MPI job: use serve.slurm"
        del texts["compose"]
    else:
        texts["kubernetes"] = {"kubernetes.yaml": kubernetes_yaml(layout, scripts)}
    if (reason := refusal(layout)) is not None:
        skipped["skypilot"] = reason
    else:
        texts["skypilot"] = _skypilot(layout)
    texts["slurm"] = {"serve.slurm": slurm_sh(layout)}
    if len(endpoints(layout)) > 1:
        texts["balancer"] = {CONFIG: balancer_conf(layout)}
    else:
        skipped["balancer"] = "all replicas answer on one port"
    texts["monitor"] = {"monitor.sh": monitor_sh(layout)}
    names = [name for group in texts.values() for name in group]
    texts["notes"] = {"LAUNCH.md": launch_md(layout, names, skipped)}
    return texts, skipped | {"train": "this is a serving plan"}


def _on_cpu(layout: Layout, scripts: dict[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Processes on this machine's CPU: the scripts, and a balancer where they answer on several ports."""
    texts = {"serve": scripts}
    skipped = {**CPU_TARGETS, "monitor": "it watches GPUs"}
    if len(endpoints(layout)) > 1:
        texts["balancer"] = {CONFIG: balancer_conf(layout)}
    else:
        skipped["balancer"] = "all replicas answer on one port"
    names = [name for group in texts.values() for name in group]
    texts["notes"] = {"LAUNCH.md": launch_md(layout, names, skipped)}
    return texts, skipped | {"train": "this is a serving plan"}


def _skypilot(layout: Layout) -> dict[str, str]:
    """One task an offer; the machines are dealt out in the order of the offers."""
    texts, left = {}, layout.machines
    for index, offer in enumerate(layout.deployment.offers):
        take = min(left, offer.count)
        if take:
            texts["skypilot.yaml" if index == 0 else f"skypilot-{index + 1}.yaml"] = skypilot_yaml(layout, offer, take)
        left -= take
    return texts


def write_files(plan: Plan, out_dir: Path, *, targets: Sequence[str] = (), force: bool = False) -> list[Path]:
    """Writes the launch files into out_dir and returns their paths; each file appears whole or not at all.

    targets: a selection of TARGETS (empty = all that make sense, and plan.yaml). A file that is there and was not written by us is
    refused unless force; with no selection, launch files that an earlier plan left there are removed. Raises what render raises, UnknownNameError for a target, InputError when the disk refuses.
    """
    texts = _selected(plan, targets)
    if not targets:
        texts = {PLAN_FILE: f"# {HEADER}\n{plan_to_yaml(plan)}", **texts}
    if not force:
        for name in texts:
            _refuse_foreign(out_dir / name)
    waiting: list[tuple[Path, Path]] = []
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            handle, temporary = tempfile.mkstemp(dir=out_dir, prefix=f".{name}.")
            waiting.append((Path(temporary), out_dir / name))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            Path(temporary).chmod(0o755 if text.startswith("#!") else 0o644)
        for temporary_path, final in waiting:
            temporary_path.replace(final)
        if not targets:
            _remove_stale(out_dir, set(texts))
    except OSError as error:
        raise InputError(
            f"cannot write launch files to {out_dir}", error.strerror or str(error), "Choose another --out."
        ) from error
    finally:
        for temporary_path, _ in waiting:
            with contextlib.suppress(OSError):
                temporary_path.unlink(missing_ok=True)
    return [out_dir / name for name in texts]


def _selected(plan: Plan, targets: Sequence[str]) -> dict[str, str]:
    """Texts of the chosen targets, with the scripts that they call."""
    for target in targets:
        if target not in TARGETS:
            raise UnknownNameError("emit target", target, TARGETS)
    by_target, skipped = _by_target(plan)
    for target in targets:
        if target not in by_target:
            raise InvalidValueError(
                f"there is no {target} file for this plan", skipped[target], "Choose another --target."
            )
    chosen = set(targets or by_target)
    if chosen & _NEED_SCRIPTS:
        chosen.add(plan.task)
    return {name: text for target in TARGETS if target in chosen for name, text in by_target[target].items()}


def _remove_stale(out_dir: Path, written: set[str]) -> None:
    """Deletes what an earlier plan left in the folder and this one does not write: our header in a regular file."""
    for path in sorted(out_dir.iterdir()):
        if path.name in written or path.is_symlink() or not path.is_file():
            continue
        with path.open("r", encoding="utf-8", errors="replace") as file:
            if HEADER in file.read(4000):
                path.unlink()


def _refuse_foreign(path: Path) -> None:
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            known = HEADER in file.read(4000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot replace {path}", error.strerror or str(error), "Choose another --out.") from error
    if not known:
        raise InvalidValueError(
            f"{path} is there and was not written by planner",
            "it would be lost",
            "Choose another --out or give --force.",
        )
