"""Run an emitted serve.sh with stand-ins for the engines, to see the very words an engine would get."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = (
    "vllm",
    "python3",
    "trtllm-serve",
    "trtllm-llmapi-launch",
    "text-generation-launcher",
    "torchrun",
    "transformers",
)
STAND_IN = """#!/bin/bash
{ printf '%s\\0' "$(basename "$0")" "${CUDA_VISIBLE_DEVICES:-}${HIP_VISIBLE_DEVICES:-}" "$@"; } > "$STAND_IN_OUT/$$"
if [[ -n "${CUDA_VISIBLE_DEVICES:-}${HIP_VISIBLE_DEVICES:-}" ]]; then sleep 0.5; fi # one of several: let the others write
"""


def unpack(files: Mapping[str, str], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    return folder


def started(files: Mapping[str, str], tmp_path: Path, **env: str) -> list[tuple[str, str, list[str]]]:
    """(program, visible GPUs, words) of every process that serve.sh starts."""
    folder, bin_dir, out = unpack(files, tmp_path / "launch"), tmp_path / "bin", tmp_path / "out"
    for made in (bin_dir, out):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    for name in PROGRAMS:
        (bin_dir / name).write_text(STAND_IN)
        (bin_dir / name).chmod(0o755)
    clean = {"PATH": f"{bin_dir}:{os.defpath}", "STAND_IN_OUT": str(out)} | env
    if "MODEL:?" in files["serve.sh"]:  # the plan knows no checkpoint in its format
        clean.setdefault("MODEL", "someone/quantised")
    done = subprocess.run(
        ["bash", str(folder / "serve.sh")], env=clean, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode in (0, 143), done.stderr
    calls = []
    for path in sorted(out.iterdir()):
        program, visible, *words = path.read_text().split("\0")[:-1]
        calls.append((program, visible, words))
    return sorted(calls)


def value_of(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]
