"""Mutilated config.json files end in one clear line or a stated assumption, never in a traceback."""

import copy
import json
import random

import pytest

from planner.errors import ModelConfigError, PlannerError
from planner.models import load_model
from planner.models.load import spec_from_config
from planner.models.lookup import records

BAD = [
    None,
    -1,
    0,
    1,
    1.5,
    1e18,
    10**18,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "abc",
    "128",
    [],
    {},
    [1],
    [None],
    [[[]]],
    {"a": 1},
    True,
    False,
    "x" * 1000,
    [1e18] * 5,
    ["sliding_attention"],
    ["full_attention"] * 20000,
    -(10**30),
    {"0": {"head_dim": -1}},
]


def places(tree, path=()):
    """Every path into a nested config."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree[:3]):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutilated(config, rng):
    """A copy with one to four fields dropped, replaced, doubled or nested."""
    made = copy.deepcopy(config)
    for _ in range(rng.randint(1, 4)):
        path = rng.choice(list(places(made)) or [("model_type",)])
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        kind = rng.random()
        if kind < 0.2 and isinstance(inner, dict):
            inner.pop(path[-1], None)
        elif kind < 0.9:
            inner[path[-1]] = copy.deepcopy(rng.choice(BAD))
        else:
            inner[path[-1]] = {"nested": inner[path[-1]]}
    return made


def check(raw):
    """The outcome of reading: a sane model or one line."""
    try:
        model = spec_from_config(raw, "hostile")
    except ModelConfigError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 600
        return "refused"
    assert model.params_active > 0
    assert model.params_total < 1e22
    assert len(model.layers) <= 10_000
    return "read"


def test_a_thousand_mutilated_configs():
    rng = random.Random(20261129)
    configs = [r["config"] for r in records()]
    outcomes = [check(mutilated(rng.choice(configs), rng)) for _ in range(1500)]
    assert outcomes.count("refused") > 300
    assert outcomes.count("read") > 60


@pytest.mark.parametrize(
    "raw",
    [None, [], "text", 7, {}, {"model_type": None}, {"model_type": "llama"}, {"model_type": 5}, {"text_config": []}],
)
def test_what_is_no_config(raw):
    assert check(raw) == "refused"


@pytest.mark.parametrize("layers", [0, -1, 1e18, 10**18, "32", float("nan"), True, [3], 10_001])
def test_layer_counts_that_make_no_sense(layers):
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 320,
    }
    assert check({**raw, "num_hidden_layers": layers}) == "refused"
    assert check({**raw, "num_hidden_layers": 2}) == "read"


FILES = {
    "empty": b"",
    "blank": b"  \n ",
    "truncated": b'{"model_type": "llama", "hidden_size": 40',
    "binary": bytes(range(256)) * 20,
    "list": b"[1, 2]",
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "number": b"1e999",
    "utf16": '{"model_type": "llama"}'.encode("utf-16"),
    "nan": b'{"model_type": "llama", "hidden_size": NaN}',
    "digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_config(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_bytes(FILES[name])
    with pytest.raises(ModelConfigError) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_huge_files_are_not_read(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(40 * 2**20)
    with pytest.raises(ModelConfigError, match="are not read"):
        load_model(str(path))


@pytest.mark.parametrize("name", ["missing.json", "folder"])
def test_paths_without_a_config(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlannerError, match="cannot be read"):
        load_model(str(tmp_path / name))


def test_a_pattern_cannot_hang_the_reader():
    ignore = ["re:(a+)+$", "re:" + "(.*)" * 40, "*" * 200, "a" * 5000, "re:model\\.layers\\.\\d+\\.self_attn.*"]
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 64,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "ignore": ignore,
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
        },
    }
    model = spec_from_config(raw, "x")
    assert model.unquantised_modules == ("attention",)
    assert any("not understood" in a for a in model.assumptions)


def test_safetensors_headers_that_are_none(tmp_path):
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 320,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for content in (b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"[1,2]", b"\x02" + b"\0" * 7):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelConfigError):
            load_model(str(tmp_path))
