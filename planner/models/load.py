"""load_model: an alias, a repository id, a config.json or a model folder becomes a ModelSpec."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.errors import ModelConfigError, UnknownNameError
from planner.models.config.read import read_config
from planner.models.lookup import all_names, find, find_repackaged
from planner.models.spec import LatentAttention, ModelSpec

MAX_CONFIG_BYTES = 32 * 2**20
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,94}[A-Za-z0-9_]")
_LOCAL = "A local config.json or model folder works too: --model path/to/config.json"


def load_model(ref: str, *, revision: str | None = None, token: str | None = None, offline: bool = False) -> ModelSpec:
    """The model that `ref` names: alias ('70b'), repository id, path of a config.json or of a model folder.

    The registry answers first (offline, pinned); revision or an unknown id goes to the hub when huggingface_hub is
    installed. Raises UnknownNameError, ModelConfigError, UnreachableError, each with the next step.
    """
    text = ref.strip()
    if not text or "\x00" in text or len(text) > 4096:
        raise ModelConfigError(
            "no usable model name was given", "", "Write for example --model 70b, a hub id, or a path to config.json."
        )
    if _looks_like_path(text):
        return _from_path(Path(text).expanduser())
    if revision == "":
        raise ModelConfigError("--revision is empty", "", "Write for example --revision main, or drop it.")
    known = find(text)
    if revision is not None and known is not None and not _HUB_ID.fullmatch(text):
        raise ModelConfigError(
            f"--revision needs the hub, which knows {text!r} as {known[1]}",
            "",
            f"Write {known[1]}, or drop --revision.",
        )
    if revision is None:
        found = _from_registry(text)
        if found is not None:
            return found
    if _HUB_ID.fullmatch(text) and not offline:
        from planner.models.hub import from_hub

        return from_hub(text, revision, token)
    raise UnknownNameError(
        "model",
        text,
        all_names(),
        "A hub id (org/name) or a path to a config.json works as well." if not offline else _LOCAL,
    )


def _looks_like_path(text: str) -> bool:
    if text.endswith(".json") or text.startswith(("./", "../", "/", "~")) or text in (".", ".."):
        return True
    try:
        return find(text) is None and os.path.exists(text)
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=64)
def _from_registry(text: str) -> ModelSpec | None:
    found = find(text)
    precision, note = None, ""
    if found is None:
        repackaged = find_repackaged(text)
        if repackaged is None:
            return None
        record, repo, precision = repackaged
        note = f"{text}: taken by its name as {repo} in {precision} in that method's usual layout; config not read"
    else:
        record, repo = found
    spec = read_config(record["config"], repo.rpartition("/")[2], hf_id=repo, source=record["source"])
    if precision is not None:
        spec = replace(
            spec,
            name=text.rpartition("/")[2],
            hf_id=text,
            native_precision=precision,
            unquantised_modules=_usual_exceptions(precision, spec),
            assumptions=(*spec.assumptions, note),
        )
    elif "/" not in text and text.lower() != repo.rpartition("/")[2].lower():
        spec = replace(spec, assumptions=(*spec.assumptions, f"{text!r} is read as {repo}"))
    return replace(spec, gated_repo=bool(record.get("gated")), license_note=record.get("license", ""))


def _usual_exceptions(precision: str, spec: ModelSpec) -> tuple[str, ...]:
    """What a repackaging leaves at 16 bit beyond the method's rule: NVFP4 of latent-attention models keeps attention
    (exclude_modules of nvidia/DeepSeek-V3.1-NVFP4 and nvidia/Kimi-K2.5-NVFP4)."""
    latent = any(isinstance(m, LatentAttention) for layer in spec.layers[:1] for m in layer.mixers)
    return ("attention", "lm_head") if precision == "nvfp4" and latent else ()


def parse_json(data: bytes, name: str) -> Any:
    """JSON of a file that may be hostile: bounded in size and depth, ModelConfigError otherwise."""
    if len(data) > MAX_CONFIG_BYTES:
        raise ModelConfigError(
            f"{name} has {len(data)} bytes",
            f"more than {MAX_CONFIG_BYTES} are not read",
            "Point to the model's config.json.",
        )
    if not data.strip():
        raise ModelConfigError(f"{name} is empty", "", "Download it again.")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ModelConfigError(
            f"{name} is not text", "", "Point to the model's config.json, not to its weights."
        ) from None
    except RecursionError:
        raise ModelConfigError(f"{name} is nested too deeply", "", "Point to the model's config.json.") from None
    except ValueError as error:
        raise ModelConfigError(f"{name} is not valid JSON", str(error)[:120], "Download it again.") from None


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ModelConfigError(f"{path} is not a regular file", "", "Point to a config.json or its folder.")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelConfigError(
                f"{path} has {path.stat().st_size} bytes",
                f"more than {MAX_CONFIG_BYTES} are not read",
                "Point to the model's config.json.",
            )
        return path.read_bytes()
    except OSError as error:
        raise ModelConfigError(
            f"{path} cannot be read",
            error.strerror or type(error).__name__,
            "Check the path; a config.json or a folder that holds one is expected.",
        ) from None


def _from_path(path: Path) -> ModelSpec:
    folder = path if path.is_dir() else path.parent
    config = path / "config.json" if path.is_dir() else path
    raw = parse_json(_read(config), str(config))
    extra_file = folder / "hf_quant_config.json"
    extra = parse_json(_read(extra_file), str(extra_file)) if extra_file.is_file() else None
    name = folder.resolve().name if config.name == "config.json" else config.stem
    spec = spec_from_config(raw, name, source=str(config), extra=extra)
    from planner.models.weights_files import checkpoint_bytes

    stored = checkpoint_bytes(folder)
    return replace(spec, checkpoint_bytes=stored) if stored else spec


def spec_from_config(
    raw: Any, name: str, *, hf_id: str = "", source: str = "", extra: Mapping[str, Any] | None = None
) -> ModelSpec:
    """read_config for content of unknown origin: whatever goes wrong inside is a ModelConfigError."""
    if not isinstance(raw, Mapping):
        raise ModelConfigError(f"{source or name} must hold a JSON object", "", "Point to the model's config.json.")
    try:
        return read_config(raw, name, hf_id=hf_id, source=source, quant_config=extra)
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        IndexError,
        OverflowError,
        ZeroDivisionError,
        RecursionError,
    ) as error:
        raise ModelConfigError(
            f"{source or name} cannot be read as a model",
            f"{type(error).__name__}: {str(error)[:100]}",
            "Check the file.",
        ) from None
