"""Logs of engines: what fitted (weights, KV cache, graphs) and, when one died, why. Wording is in engine_logs.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from planner.errors import EngineFailedError

LAST_LINES = 8
LINE_WIDTH = 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PROFILE_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft")  # extra `profile` in pyproject.toml
EXTRA_STEP = "Install it where the engine runs: pip install '.[profile]'."
FRAMEWORKS = {"deepspeed_inference": "deepspeed"}


@cache
def _data() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: dict[str, Any] = yaml.load(files("planner.validate").joinpath("engine_logs.yaml").read_text("utf-8"), loader)  # noqa: S506 (safe loader)
    return data


def read_start(engine: str, text: str) -> dict[str, float]:
    """Figures of the start-up log of an engine, by key of validation.measured. Engines that write none give {}."""
    plain = _COLOURS.sub("", text)
    found: dict[str, float] = {}
    for key, row in _data()["reads"].get(FRAMEWORKS.get(engine, engine), {}).items():
        values = [float(v.replace(",", "")) for v in re.findall(row["pattern"], plain)]
        if values:
            found[key] = max(values) if row["keep"] == "max" else min(values)
    if "key_cache_gib" in found:
        found["kv_cache_gib"] = found.pop("key_cache_gib") + found.pop("value_cache_gib", 0.0)
    return found


def rehearsal_environment(task: str) -> dict[str, str]:
    """Variables that make the engines of a task (serve, train) run on CPUs."""
    return {name: str(value) for name, value in _data()["rehearsal"][task].items()}


def titan_steps(text: str) -> list[tuple[int, float]]:
    """(step, tokens per second of one device) of torchtitan's log."""
    plain = _COLOURS.sub("", text)
    found = re.findall(r"step: +(\d+) .*?tps: ([\d,]+)", plain)
    return [(int(step), float(tps.replace(",", ""))) for step, tps in found]


@dataclass(frozen=True)
class Death:
    """Why it died, the next step, whether memory was the reason, and the last lines of its log."""

    meaning: str
    next_step: str
    memory: bool
    last_lines: tuple[str, ...]


def death_of(text: str) -> Death:
    """The cause that a log names, from a table of known ones; '' as meaning when none is known."""
    plain = _COLOURS.sub("", text)
    lines = tuple(line.rstrip()[:LINE_WIDTH] for line in plain.splitlines() if line.strip())[-LAST_LINES:]
    for row in _data()["deaths"]:
        match = re.search(row["pattern"], plain)
        if match:
            name = next((g for g in match.groups() if g), "")
            step = EXTRA_STEP if name.split(".")[0] in PROFILE_PACKAGES else row["next_step"]
            return Death(row["meaning"].replace("{0}", name), step, bool(row.get("memory")), lines)
    return Death("", "", False, lines)


def failure(what: str, engine: str, text: str, advice: str = "", install: str = "") -> EngineFailedError:
    """The error for an engine that did not do its job: what it means, what had fitted, what to try, its last lines."""
    death, fitted = death_of(text), read_start(engine, text)
    why = death.meaning or "its log names no cause that is known here"
    if death.memory:
        parts = [
            f"{key.removesuffix('_gib').replace('_', ' ')} {value:,.2f} GiB"
            for key, value in fitted.items()
            if key.endswith("_gib")
        ]
        parts += [f"{fitted['kv_cache_tokens']:,.0f} tokens of KV cache"] if "kv_cache_tokens" in fitted else []
        why += f"; fitted before that: {', '.join(parts) if parts else 'nothing that its log names'}"
    tries = re.search(r"NEXT: (.+)", text)
    step = f"It says itself: {tries[1].strip()}." if tries else death.next_step
    if install and "is not installed" in death.meaning and "llm-hardware-planner" not in step:
        step = f"Install the engine with: {install}; or give its folder: --env PATH=/opt/venv/bin:$PATH."
    error = EngineFailedError(what, why, " ".join(p for p in (step, advice) if p))
    error.last_lines = death.last_lines
    return error
