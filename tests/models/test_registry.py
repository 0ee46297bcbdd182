"""The offline registry: names, counts against what was published, speed-relevant facts."""

import re

import pytest

from planner.errors import ModelConfigError, UnknownNameError
from planner.models import load_model
from planner.models.lookup import all_names, key_of, records

RECORDS = {r["id"]: r for r in records()}


def test_registry_is_large():
    assert len(RECORDS) >= 80
    assert len(RECORDS) == len(records())


@pytest.mark.parametrize("name", RECORDS)
def test_parameters_equal_the_published_count(name):
    record, model = RECORDS[name], load_model(name)
    if record["params"] is not None:
        assert model.params_total == record["params"]
        return
    figure = re.match(r"([\d.]+)([BT])", record["published"])
    published = float(figure[1]) * (1e9 if figure[2] == "B" else 1e12)
    assert model.params_total == pytest.approx(published, rel=record.get("tolerance", 0.005))
    assert record.get("tolerance", 0) <= 0.05


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_whole(name):
    record, model = RECORDS[name], load_model(name)
    assert set(record) <= {
        "id",
        "aliases",
        "also",
        "params",
        "published",
        "tolerance",
        "source",
        "gated",
        "license",
        "config",
    }
    assert record["params"] or record["published"]
    assert record["source"]
    assert model.hf_id == name
    assert model.source == record["source"]
    assert model.params_active <= model.params_total
    assert model.layers
    assert not [a for a in model.assumptions if "not known here" in a]


def test_no_two_models_share_a_name():
    owner = {}
    for record in records():
        for name in (*record["aliases"], record["id"], *record.get("also", ())):
            assert owner.setdefault(key_of(name), record["id"]) == record["id"], name


def test_most_counts_are_exact():
    assert sum(r["params"] is not None for r in records()) >= 100


@pytest.mark.parametrize(
    ("text", "hf_id"),
    [
        ("70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("32b", "Qwen/Qwen3-32B"),
        ("405B", "meta-llama/Llama-3.1-405B-Instruct"),
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("LLAMA 3.1 70B", "meta-llama/Llama-3.1-70B-Instruct"),
        ("llama3.1_70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("gpt-oss-120b", "openai/gpt-oss-120b"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    ],
)
def test_names(text, hf_id):
    assert load_model(text).hf_id == hf_id


def test_a_bare_size_says_what_it_was_read_as():
    assert "'70b' is read as meta-llama/Llama-3.3-70B-Instruct" in load_model("70b").assumptions
    assert load_model("meta-llama/Llama-3.3-70B-Instruct").assumptions == ()


def test_unknown_names_get_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        load_model("lama-3.1-70b", offline=True)
    assert "llama-3.1-70b" in caught.value.suggestions
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "   ", "a\x00b", "x" * 5000])
def test_names_that_are_none(text):
    with pytest.raises(ModelConfigError):
        load_model(text)


@pytest.mark.parametrize(
    ("text", "precision", "base"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8", "meta-llama/Llama-3.3-70B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4-gptq", "meta-llama/Llama-3.1-8B-Instruct"),
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", "int8-w8a8", "Qwen/Qwen2.5-7B-Instruct"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", "int4-awq", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4", "deepseek-ai/DeepSeek-R1"),
    ],
)
def test_repackaged_models_are_known_by_their_suffix(text, precision, base):
    model = load_model(text, offline=True)
    assert model.native_precision == precision
    assert model.layers == load_model(base).layers
    assert any("config not read" in a for a in model.assumptions)


def test_every_name_resolves():
    for name in all_names():
        assert load_model(name, offline=True).params_total > 1e8
