"""Which files a training plan gets, by target."""

from __future__ import annotations


from importlib.resources import files as resources

from planner.emit.text import HEADER, comment
from planner.emit.train.launch import PYTHON_SCRIPT, launch_sh
from planner.emit.train.layout import TrainLayout, layout_of
from planner.emit.train.settings import accelerate_yaml, ds_config, settings_json, to_json
from planner.plan import Plan


def _template(name: str) -> str:
    text = resources("planner.emit.train").joinpath("templates").joinpath(f"{name}.py.txt").read_text("utf-8")
    return text.replace("@@ABOUT@@", comment([HEADER]))


def hugging_face_files(laid: TrainLayout) -> dict[str, str]:
    """train.py with its parts and settings, the framework's configuration, and launch.sh."""
    made = {"launch.sh": launch_sh(laid, PYTHON_SCRIPT), "train_settings.json": settings_json(laid)}
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
    else:
        made["accelerate.yaml"] = accelerate_yaml(laid)
    return made


def hostfile(laid: TrainLayout) -> str:
    """A DeepSpeed hostfile to fill in."""
    lines = [f"machine-{i + 1} slots={laid.gpus_per_machine}" for i in range(laid.machines)]
    return comment([HEADER, "Copy to `hostfile` and put in the real addresses."]) + "\n" + "\n".join(lines) + "\n"


def files_by_target(plan: Plan) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Texts by target, and the targets left out with the reason. Raises NoPlanError, InputError."""
    laid = layout_of(plan)
    texts = {"train": hugging_face_files(laid)}
    skipped: dict[str, str] = {}
    return texts, skipped
