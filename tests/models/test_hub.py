"""Reading from the hub, with a stand-in for huggingface_hub (no network)."""

import json
import sys
import types

import pytest

from planner.errors import ModelConfigError, UnknownNameError, UnreachableError
from planner.models import load_model
from tests.models.configs import BASE

CONFIG = json.dumps({"model_type": "llama", **BASE}).encode()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A huggingface_hub that serves `files` or raises `error`; what was asked stands in `asked`."""
    module = types.ModuleType("huggingface_hub")
    errors = types.ModuleType("huggingface_hub.errors")
    for name, base in [
        ("EntryNotFoundError", "Exception"),
        ("LocalEntryNotFoundError", "EntryNotFoundError"),
        ("RepositoryNotFoundError", "Exception"),
        ("GatedRepoError", "RepositoryNotFoundError"),
    ]:
        setattr(errors, name, type(name, (getattr(errors, base, Exception),), {}))
    module.errors, module.files, module.error, module.asked = errors, {"config.json": CONFIG}, None, []

    def download(repo, name, revision=None, token=None, etag_timeout=10):
        module.asked.append((repo, name, revision, token, etag_timeout))
        if module.error is not None:
            raise module.error
        if name not in module.files:
            raise errors.EntryNotFoundError(name)
        path = tmp_path / name
        path.write_bytes(module.files[name])
        return str(path)

    module.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_repository_is_read(hub):
    hub.files["model.safetensors.index.json"] = b'{"metadata": {"total_size": 4242}}'
    model = load_model("org/new-model", revision="abc", token="secret")
    assert (model.hf_id, model.name, model.checkpoint_bytes) == ("org/new-model", "new-model", 4242)
    assert model.source == "huggingface.co/org/new-model config.json at abc"
    assert hub.asked[0][:4] == ("org/new-model", "config.json", "abc", "secret")
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
    ("name", "raised", "words"),
    [
        ("LocalEntryNotFoundError", UnreachableError, "could not be reached"),
        ("GatedRepoError", UnreachableError, "gated"),
        ("RepositoryNotFoundError", UnknownNameError, "hub does not know it"),
        ("EntryNotFoundError", ModelConfigError, "has no config.json"),
    ],
)
def test_errors_say_what_works_instead(hub, name, raised, words):
    hub.error = getattr(hub.errors, name)("boom")
    with pytest.raises(raised, match=words) as caught:
        load_model("org/new-model")
    assert "\n" not in str(caught.value)


def test_a_broken_transport_is_unreachable(hub):
    hub.error = ConnectionError("no route")
    with pytest.raises(UnreachableError, match=r"path/to/config\.json"):
        load_model("org/new-model")


def test_hostile_content_is_refused(hub):
    hub.files["config.json"] = b"<html>"
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        load_model("org/new-model")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnknownNameError, match=r"llm-hardware-planner\[hub\]"):
        load_model("org/new-model")
