"""Reading a config from the Hugging Face hub. Needs huggingface_hub (extra 'hub') for addresses, tokens and its cache.

Small files are fetched with one short try: the client's own download retries for half a minute without network.
"""

from __future__ import annotations

from dataclasses import replace
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
            "model",
            repo,
            all_names(),
            f"To read it from the hub: {missing.command}. Or: {_LOCAL[0].lower()}{_LOCAL[1:]}",
        ) from None
    from planner.models.load import parse_json, spec_from_config
    from planner.models.weights_files import index_total

    files = _Files(huggingface_hub, repo, revision, token)
    config = files.read("config.json")
    if config is None:
        raise ModelConfigError(f"{repo} has no config.json", "", "Check the id; GGUF-only repositories have none.")
    extra = files.read("hf_quant_config.json")
    source = f"huggingface.co/{repo} config.json" + (f" at {revision}" if revision else "")
    spec = spec_from_config(
        parse_json(config, source),
        repo.rpartition("/")[2],
        hf_id=repo,
        source=source,
        extra=parse_json(extra, "hf_quant_config.json") if extra else None,
    )
    index = files.read("model.safetensors.index.json")
    if index:
        spec = replace(spec, checkpoint_bytes=index_total(index, "model.safetensors.index.json"))
    note = f"{repo} was read from the local cache: the hub could not be reached"
    return replace(spec, assumptions=(*spec.assumptions, note)) if files.from_cache else spec


class _Files:
    """Small files of one repository at one revision."""

    def __init__(self, hub: Any, repo: str, revision: str | None, token: str | None) -> None:
        self.hub, self.repo, self.revision, self.token = hub, repo, revision, token
        self.from_cache = False

    def read(self, name: str) -> bytes | None:
        """Content of a file; None when the repository has none of that name."""
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        from planner.models.load import MAX_CONFIG_BYTES

        if self.from_cache:
            return self._cached(name)
        url = self.hub.hf_hub_url(self.repo, name, revision=self.revision)
        headers = self.hub.utils.build_hf_headers(token=self.token)
        try:
            with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as reply:  # noqa: S310 (address of the client)
                content: bytes = reply.read(MAX_CONFIG_BYTES + 1)
                return content
        except HTTPError as error:
            self._refused(error.code, error.headers.get("X-Error-Code", ""))
            return None
        except OSError as error:
            cached = self._cached(name)
            if cached is not None:
                self.from_cache = True
                return cached
            reason = getattr(error, "reason", error)
            raise UnreachableError(
                f"huggingface.co could not be reached for {self.repo}", str(reason)[:80], _LOCAL
            ) from None

    def _refused(self, code: int, kind: str) -> None:
        """What an HTTP error means; returns for a file that is not there."""
        from planner.models.lookup import all_names

        if kind == "EntryNotFound" or (code == 404 and not kind):
            return
        if kind == "RevisionNotFound":
            raise ModelConfigError(f"{self.repo} has no revision {self.revision!r}", "", "Check --revision.")
        if kind == "GatedRepo" or code == 403:
            reason = "the hub asks for a token that has access"
            raise UnreachableError(f"{self.repo} is gated", reason, f"Set HF_TOKEN. {_LOCAL}")
        if kind == "RepoNotFound" or code in (401, 404):
            hint = "The hub does not know it either (or it is private: set HF_TOKEN)."
            raise UnknownNameError("model", self.repo, all_names(), hint)
        raise UnreachableError(f"huggingface.co refused {self.repo}", f"HTTP {code}", _LOCAL)

    def _cached(self, name: str) -> bytes | None:
        """The copy in the client's cache, when there is one."""
        from pathlib import Path

        found = self.hub.try_to_load_from_cache(self.repo, name, revision=self.revision)
        return Path(found).read_bytes() if isinstance(found, str) else None
