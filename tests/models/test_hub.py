"""Reading from the hub, with stand-ins for huggingface_hub and the transport (no network)."""

import io
import json
import sys
import types
from email.message import Message
from urllib.error import HTTPError, URLError

import pytest

from planner.errors import ModelConfigError, UnknownNameError, UnreachableError
from planner.models import load_model
from tests.models.configs import BASE

CONFIG = json.dumps({"model_type": "llama", **BASE}).encode()


@pytest.fixture
def hub(monkeypatch):
    """A hub that serves `files`, raises `error` or answers `refusal` (code, kind); `asked` holds the requests."""
    state = types.SimpleNamespace(files={"config.json": CONFIG}, error=None, refusal=None, asked=[], cache={})
    module = types.ModuleType("huggingface_hub")
    module.hf_hub_url = lambda repo, name, revision=None: f"https://hub.test/{repo}/{revision or 'main'}/{name}"
    module.utils = types.SimpleNamespace(build_hf_headers=lambda token=None: {"authorization": token or ""})
    module.try_to_load_from_cache = lambda repo, name, revision=None: state.cache.get(name)

    def urlopen(request, timeout):
        state.asked.append((request.full_url, request.get_header("Authorization"), timeout))
        if state.error is not None:
            raise state.error
        name = request.full_url.rpartition("/")[2]
        if state.refusal is None and name in state.files:
            return io.BytesIO(state.files[name])
        code, kind = state.refusal or (404, "EntryNotFound")
        headers = Message()
        headers["X-Error-Code"] = kind
        raise HTTPError(request.full_url, code, "no", headers, io.BytesIO())

    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return state


def test_a_repository_is_read(hub):
    hub.files["model.safetensors.index.json"] = b'{"metadata": {"total_size": 4242}}'
    model = load_model("org/new-model", revision="abc", token="secret")
    assert (model.hf_id, model.name, model.checkpoint_bytes) == ("org/new-model", "new-model", 4242)
    assert model.source == "huggingface.co/org/new-model config.json at abc"
    assert hub.asked[0][:2] == ("https://hub.test/org/new-model/abc/config.json", "secret")
    assert all(timeout <= 10 for *_, timeout in hub.asked)


def test_hf_quant_config_is_read(hub):
    hub.files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "FP8"}}'
    assert load_model("org/new-model").native_precision == "fp8"


def test_the_registry_answers_before_the_hub(hub):
    assert load_model("Qwen/Qwen3-8B").hf_id == "Qwen/Qwen3-8B"
    assert hub.asked == []
    load_model("Qwen/Qwen3-8B", revision="main")
    assert hub.asked


def test_offline_never_asks(hub):
    with pytest.raises(UnknownNameError):
        load_model("org/new-model", offline=True)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("refusal", "raised", "words"),
    [
        ((401, "GatedRepo"), UnreachableError, "gated"),
        ((403, ""), UnreachableError, "gated"),
        ((401, "RepoNotFound"), UnknownNameError, "hub does not know it"),
        ((404, "RevisionNotFound"), ModelConfigError, "has no revision"),
        ((404, "EntryNotFound"), ModelConfigError, r"has no config\.json"),
        ((503, ""), UnreachableError, "HTTP 503"),
    ],
)
def test_errors_say_what_works_instead(hub, refusal, raised, words):
    hub.refusal = refusal
    with pytest.raises(raised, match=words) as caught:
        load_model("org/new-model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [URLError("no route"), TimeoutError("timed out"), ConnectionError("reset")])
def test_a_broken_transport_is_unreachable(hub, error):
    hub.error = error
    with pytest.raises(UnreachableError, match=r"path/to/config\.json"):
        load_model("org/new-model")
    assert len(hub.asked) == 1


def test_without_network_the_cache_answers(hub, tmp_path):
    (tmp_path / "config.json").write_bytes(CONFIG)
    hub.error, hub.cache = URLError("no route"), {"config.json": str(tmp_path / "config.json")}
    model = load_model("org/new-model")
    assert model.hidden == 64
    assert any("local cache" in a for a in model.assumptions)
    assert len(hub.asked) == 1


def test_hostile_content_is_refused(hub):
    hub.files["config.json"] = b"<html>"
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        load_model("org/new-model")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match=r"\.\[hub\]"):
        load_model("org/new-model")
