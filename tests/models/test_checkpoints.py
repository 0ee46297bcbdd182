"""Published checkpoints: the table is sound, and the choice for an engine is the right one every time."""

import re

import pytest

from planner.engines.formats import checkpoint_for, load_flag, loaders
from planner.engines.records import engines, read_yaml
from planner.errors import UnknownNameError
from planner.models.checkpoints import FORMATS, _raw, all_checkpoints, published
from planner.models.lookup import records
from planner.models.precision import precision, precisions

TABLE = all_checkpoints()
REGISTRY = {repo for r in records() for repo in (r["id"], *r.get("also", ()))}
OF_FORMAT = {
    "compressed-tensors": {"fp8", "fp8-block", "int8-w8a8", "int4-w4a16", "nvfp4"},
    "modelopt": {"fp8", "nvfp4", "int4-awq"},
    "awq": {"int4-awq"},
    "gptq": {"int4-gptq"},
    "fp8": {"fp8", "fp8-block"},
    "bnb": {"bnb-nf4"},
}


def test_the_table_is_large_and_mostly_verified():
    assert len(TABLE) >= 200
    assert sum(c.verified for c in TABLE) > 0.8 * len(TABLE)


@pytest.mark.parametrize("c", TABLE, ids=lambda c: f"{c.base}->{c.repo}")
def test_every_row_is_sound(c):
    assert c.base in REGISTRY
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9][A-Za-z0-9._-]{1,95}", c.repo)
    assert c.repo.lower() != c.base.lower()
    assert precision(c.precision).servable
    assert c.precision in OF_FORMAT[c.format]
    assert c.source
    assert c in published(c.base, c.precision)


def test_no_row_twice():
    assert len({c.repo.lower() for c in TABLE}) == len(TABLE)
    assert set(OF_FORMAT) == set(FORMATS)


def test_verified_rows_have_two_sources():
    single = {"files", "card"}
    for base, rows in _raw()["checkpoints"].items():
        for row in rows:
            *_, verified, keys = row.split()
            if verified == "yes":
                assert len(keys.split(",")) >= 2 or keys in single, f"{base}: {row}"


def test_the_name_says_the_same_as_the_row():
    """A repository whose name carries a method is listed under that method."""
    says = {
        r"-awq\b": {"int4-awq"},
        r"gptq": {"int4-gptq"},
        r"w8a8$": {"int8-w8a8"},
        r"w4a16$": {"int4-w4a16"},
        r"nvfp4": {"nvfp4"},
        r"fp8-block$": {"fp8-block"},
        r"-fp8(-dynamic)?$": {"fp8", "fp8-block"},
        r"bnb-4bit$": {"bnb-nf4"},
    }
    for c in TABLE:
        said = [names for pattern, names in says.items() if re.search(pattern, c.repo.lower())]
        assert said, c.repo
        assert all(c.precision in names for names in said), c.repo


def test_the_name_carries_the_size_of_the_base():
    size = re.compile(r"(\d+(?:\.\d+)?)b\b", re.IGNORECASE)
    for c in TABLE:
        want, have = (sorted(size.findall(n.replace("_", "-"))) for n in (c.base, c.repo))
        assert want == have, (c.base, c.repo)


@pytest.mark.parametrize("hf_id", ["nobody/nothing", "", "meta-llama", "meta-llama/Llama-3.3-70B", "x" * 5000])
def test_unknown_models_have_none(hf_id):
    assert all(published(hf_id, p.name) == () for p in precisions())
    assert checkpoint_for("vllm", hf_id, "fp8") is None


def test_weights_of_the_same_shape_are_not_mixed_up():
    base = {c.base for c in published("Qwen/Qwen3-30B-A3B", "fp8-block")}
    assert base == {"Qwen/Qwen3-30B-A3B"}
    assert published("meta-llama/Llama-3.1-8B", "fp8") == ()


def test_the_older_name_of_llama_3_1_and_case_do_not_count():
    want = published("meta-llama/Llama-3.1-8B-Instruct", "int4-awq")
    assert want
    assert published("meta-llama/Meta-Llama-3.1-8B-Instruct", "int4-awq") == want
    assert published("META-llama/llama-3.1-8b-instruct", "int4-awq") == want


@pytest.mark.parametrize(
    ("engine", "precision_name", "repo", "flag"),
    [
        ("vllm", "fp8", "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", None),
        ("sglang", "int8-w8a8", "RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", None),
        ("tensorrt_llm", "fp8", "nvidia/Llama-3.3-70B-Instruct-FP8", None),
        ("tensorrt_llm", "nvfp4", "nvidia/Llama-3.3-70B-Instruct-NVFP4", None),
        ("tgi", "int4-awq", "casperhansen/llama-3.3-70b-instruct-awq", "--quantize awq"),
        ("transformers", "bnb-nf4", "unsloth/Llama-3.3-70B-Instruct-bnb-4bit", None),
        ("tensorrt_llm", "int4-awq", None, None),
        ("tensorrt_llm", "int4-gptq", None, None),
        ("transformers", "nvfp4", None, None),
        ("vllm", "bnb-nf4", None, None),
        ("deepspeed_inference", "fp8", None, None),
    ],
)
def test_what_llama_3_3_70b_starts_with(engine, precision_name, repo, flag):
    chosen = checkpoint_for(engine, "meta-llama/Llama-3.3-70B-Instruct", precision_name)
    assert (chosen and chosen.repo) == repo
    if chosen:
        assert load_flag(engine, chosen) == flag


def test_the_choice_is_loadable_verified_first_and_the_same_every_time():
    for engine in engines():
        formats = loaders(engine)
        for base, name in {(c.base, c.precision) for c in TABLE}:
            fitting = [c for c in published(base, name) if c.format in formats and name in formats[c.format].precisions]
            chosen = checkpoint_for(engine, base, name)
            assert chosen == checkpoint_for(engine, base, name)
            assert (chosen is None) == (not fitting)
            if chosen:
                assert chosen in fitting
                assert chosen.verified or not any(c.verified for c in fitting)


def test_every_engine_has_a_row_and_knows_the_formats():
    assert set(read_yaml("formats.yaml")) == set(engines())
    for engine in engines():
        for form, loader in loaders(engine).items():
            assert set(loader.precisions) <= OF_FORMAT[form]
    with pytest.raises(UnknownNameError):
        checkpoint_for("vlm", "meta-llama/Llama-3.3-70B-Instruct", "fp8")
