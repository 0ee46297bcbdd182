"""Reading a config from the Hugging Face hub. Needs huggingface_hub (extra 'hub'); short timeouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.errors import MissingExtraError, ModelConfigError, UnknownNameError, UnreachableError
from planner.models.spec import ModelSpec

TIMEOUT_S = 5.0
_LOCAL = "Download its config.json and give the path: --model path/to/config.json"


def from_hub(repo: str, revision: str | None, token: str | None) -> ModelSpec:
    """ModelSpec of a repository at a revision; errors say what could not be reached and what works instead."""
    try:
        import huggingface_hub
    except ImportError:
        from planner.models.lookup import all_names

        missing = MissingExtraError("huggingface_hub", "hub", f"reading {repo} from the hub")
        raise UnknownNameError(
            "model", repo, all_names(), f"To read it from the hub: {missing.next_step}. {_LOCAL}"
        ) from None
    from planner.models.load import parse_json, spec_from_config

    config = _download(huggingface_hub, repo, "config.json", revision, token)
    if config is None:
        raise ModelConfigError(f"{repo} has no config.json", "", _LOCAL)
    extra = _download(huggingface_hub, repo, "hf_quant_config.json", revision, token, optional=True)
    source = f"huggingface.co/{repo} config.json" + (f" at {revision}" if revision else "")
    spec = spec_from_config(
        parse_json(config.read_bytes(), source),
        repo.rpartition("/")[2],
        hf_id=repo,
        source=source,
        extra=parse_json(extra.read_bytes(), "hf_quant_config.json") if extra else None,
    )
    index = _download(huggingface_hub, repo, "model.safetensors.index.json", revision, token, optional=True)
    if index:
        from planner.models.weights_files import index_bytes

        spec = replace(spec, checkpoint_bytes=index_bytes(index))
    return spec


def _download(  # noqa: PLR0917 (what the client takes)
    hub: Any, repo: str, name: str, revision: str | None, token: str | None, optional: bool = False
) -> Path | None:
    errors = hub.errors
    try:
        return Path(hub.hf_hub_download(repo, name, revision=revision, token=token, etag_timeout=TIMEOUT_S))
    except (errors.EntryNotFoundError, errors.LocalEntryNotFoundError) as error:
        if optional:
            return None
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise UnreachableError(f"huggingface.co could not be reached for {repo}", "", _LOCAL) from None
        raise ModelConfigError(f"{repo} has no {name}", "", "Check the id; GGUF-only repositories have none.") from None
    except errors.GatedRepoError:
        raise UnreachableError(
            f"{repo} is gated", "the hub asks for a token that has access", f"Set HF_TOKEN. {_LOCAL}"
        ) from None
    except errors.RepositoryNotFoundError:
        from planner.models.lookup import all_names

        raise UnknownNameError(
            "model", repo, all_names(), "The hub does not know it either (or it is private: set HF_TOKEN)."
        ) from None
    except Exception as error:  # any transport failure of the client library
        if optional:
            return None
        raise UnreachableError(
            f"huggingface.co could not be reached for {repo}", type(error).__name__, _LOCAL
        ) from None
