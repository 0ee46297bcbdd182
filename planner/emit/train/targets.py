"""Which files a training plan gets, by target."""

from __future__ import annotations

from importlib.resources import files as resources

from planner.emit.layout import CPU_TARGETS
from planner.emit.text import HEADER, comment
from planner.emit.train.cluster import kubernetes_yaml, sky_refusal, skypilot_yaml, slurm_sh
from planner.emit.train.large import megatron_settings, titan_settings
from planner.emit.train.launch import MEGATRON_SCRIPT, PYTHON_SCRIPT, TITAN_MODULE, launch_sh
from planner.emit.train.layout import TrainLayout, layout_of
from planner.emit.train.notes import HUGGING_FACE, launch_md
from planner.emit.train.settings import accelerate_yaml, ds_config, settings_json, to_json
from planner.plan import Plan

SETTINGS = "train_settings.json"
SHOWN = ("skypilot",)


def _template(name: str) -> str:
    text = resources("planner.emit.train").joinpath("templates").joinpath(f"{name}.py.txt").read_text("utf-8")
    return text.replace("@@ABOUT@@", comment([HEADER]))


def hugging_face_files(laid: TrainLayout) -> dict[str, str]:
    """launch.sh, train.py with its parts and settings, and the framework's configuration."""
    made = {
        "launch.sh": launch_sh(laid, [*PYTHON_SCRIPT, *(["--cpu"] if laid.vendor == "cpu" else [])]),
        SETTINGS: settings_json(laid),
    }
    made["train_parts.py"] = _template("train_parts")
    if laid.deployment.pipeline_parallel > 1:
        made["train.py"] = _template("pipeline")
    else:
        body = _template("trainer").replace("@@FRAMEWORK@@", laid.title)
        made["train.py"] = body.replace("@@FUNCTIONS@@", _template(laid.engine))
    if laid.engine == "deepspeed":
        made["ds_config.json"] = to_json(ds_config(laid))
        if laid.machines > 1:
            made["hostfile.example"] = hostfile(laid)
    elif laid.vendor != "cpu":  # accelerate's launcher would turn CPU processes into DDP: torchrun starts them
        made["accelerate.yaml"] = accelerate_yaml(laid)
    return made


def large_files(laid: TrainLayout) -> dict[str, str]:
    """launch.sh, settings and the configuration script of torchtitan or Megatron Bridge."""
    if laid.engine == "torchtitan":
        script, name, more = TITAN_MODULE, "titan_config.py", titan_settings(laid)
    else:
        script, name, more = MEGATRON_SCRIPT, "megatron_train.py", megatron_settings(laid)
    texts = {"launch.sh": launch_sh(laid, script), SETTINGS: settings_json(laid, more)}
    return texts | {name: _template({"torchtitan": "torchtitan"}.get(laid.engine, "megatron"))}


def hostfile(laid: TrainLayout) -> str:
    """A DeepSpeed hostfile to fill in."""
    lines = [f"machine-{i + 1} slots={laid.gpus_per_machine}" for i in range(laid.machines)]
    return comment([HEADER, "Copy to `hostfile` and put in the real addresses."]) + "\n" + "\n".join(lines) + "\n"


def files_by_target(plan: Plan) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Texts by target, and the targets left out with the reason. Raises NoPlanError, InputError."""
    laid = layout_of(plan)
    scripts = hugging_face_files(laid) if laid.engine in HUGGING_FACE else large_files(laid)
    texts = {"train": scripts}
    if laid.vendor != "cpu":
        texts["slurm"] = {"train.slurm": slurm_sh(laid)}
        texts["kubernetes"] = {"kubernetes.yaml": kubernetes_yaml(laid, scripts)}
    skipped = {"serve": "this is a training plan", "compose": "a training run is a job, not a service"}
    skipped |= {"balancer": "a training run answers nobody", "monitor": "OUTPUT_DIR/metrics.jsonl has every step"}
    if laid.vendor == "cpu":
        skipped |= CPU_TARGETS
    reason = CPU_TARGETS["skypilot"] if laid.vendor == "cpu" else sky_refusal(laid)
    if reason is None and laid.offer.count < laid.machines:
        reason = "one task rents one kind of machine, and the plan mixes offers"
    if reason is None:
        texts["skypilot"] = {"skypilot.yaml": skypilot_yaml(laid, laid.offer)}
    else:
        skipped["skypilot"] = reason
    names = [name for group in texts.values() for name in group]
    shown = {target: why for target, why in skipped.items() if target in SHOWN}
    texts["notes"] = {"LAUNCH.md": launch_md(laid, names, shown)}
    return texts, skipped
