"""Parameter counts equal those of transformers' own modules, built on the meta device, family by family."""

import json
import warnings

import pytest

from planner.models.load import spec_from_config
from tests.models.configs import FAMILIES, SEQ2SEQ

pytest.importorskip("torch", reason="torch is not installed (extra 'profile')")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'profile')")


def built(kind: str, fields: dict, loader: str):
    """(parameters of the real modules, config.json content)."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind not in CONFIG_MAPPING:
            pytest.skip(f"this transformers does not know {kind}")
        config = CONFIG_MAPPING[kind](**fields)
        with torch.device("meta"):
            model = getattr(transformers, loader).from_config(config)
    return sum(p.numel() for p in model.parameters()), json.loads(json.dumps(config.to_dict(), default=str))


def test_forty_families_are_compared():
    assert len({name.partition("+")[0] for name in FAMILIES}) >= 40


@pytest.mark.parametrize("name", FAMILIES)
def test_decoders(name):
    kind = name.partition("+")[0]
    count, raw = built(kind, FAMILIES[name], "AutoModelForCausalLM")
    assert spec_from_config({**raw, "model_type": kind}, name).params_total == count


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders(name):
    kind = name.partition("+")[0]
    loader = "AutoModelForSpeechSeq2Seq" if kind == "whisper" else "AutoModelForSeq2SeqLM"
    count, raw = built(kind, SEQ2SEQ[name], loader)
    assert spec_from_config({**raw, "model_type": kind}, name).params_total == count


VISION = (
    "gemma3", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "paligemma",
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
)  # fmt: skip


@pytest.mark.parametrize("kind", VISION)
def test_vision_language_models_with_their_towers(kind):
    count, raw = built(kind, {}, "AutoModelForImageTextToText")
    assert spec_from_config({**raw, "model_type": kind}, kind).params_total == count


@pytest.mark.parametrize("kind", ["helium", "nanochat", "doge"])
def test_unknown_families_are_counted_by_transformers(kind):
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 320,
    }
    count, raw = built(kind, fields, "AutoModelForCausalLM")
    model = spec_from_config({**raw, "model_type": kind}, kind)
    assert model.params_total == count
    assert any("counted from transformers" in a for a in model.assumptions)
