"""Single traits that naive readers get wrong."""

import json
import struct

import pytest

from planner.errors import ModelConfigError
from planner.models import load_model
from planner.models.load import spec_from_config
from planner.models.spec import Attention, LatentAttention, MoeMlp, StateMixer
from tests.models.configs import BASE, LINEAR, MAMBA2, MLA


def read(**fields):
    return spec_from_config({"model_type": "llama", **BASE, **fields}, "test")


def kinds(model):
    return [
        layer.mixers[0].kind if isinstance(layer.mixers[0], Attention | StateMixer) else "latent"
        for layer in model.layers
    ]


def test_head_width_is_read_not_divided():
    assert read(head_dim=32).layers[0].mixers[0].head_dim == 32
    assert read().layers[0].mixers[0].head_dim == 16


def test_null_fields_count_as_absent():
    assert read(head_dim=None, num_key_value_heads=None).layers[0].mixers[0].kv_heads == 4


def test_tied_embeddings():
    assert read().params_total - read(tie_word_embeddings=True).params_total == 320 * 64


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "gemma2", "sliding_window": 8}, ["sliding", "full", "sliding", "full"]),
        (
            {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 2},
            ["sliding", "full", "sliding", "full"],
        ),
        ({"model_type": "gemma3_text", "sliding_window": 8}, ["sliding"] * 4),
        ({"model_type": "mistral", "sliding_window": 8}, ["sliding"] * 4),
        ({"model_type": "mistral", "sliding_window": None}, ["full"] * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, ["full"] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            ["full"] * 3 + ["sliding"],
        ),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}, ["full", "sliding"] * 2),
        ({"model_type": "llama4_text", "attention_chunk_size": 16, "num_local_experts": 4}, ["chunked"] * 3 + ["full"]),
        (
            {"model_type": "mimo_v2_flash", "sliding_window": 8, "hybrid_layer_pattern": [0, 1, 1, 0]},
            ["full", "sliding", "sliding", "full"],
        ),
        ({"model_type": "qwen3_next", "full_attention_interval": 4, **LINEAR}, ["gated_delta"] * 3 + ["full"]),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2}, ["mamba", "mamba", "full", "mamba"]),
        ({"model_type": "bamba", "attn_layer_indices": [1], **MAMBA2}, ["mamba2", "full", "mamba2", "mamba2"]),
    ],
)
def test_layer_patterns(fields, expected):
    assert kinds(read(**fields)) == expected


def test_window_and_chunk_sizes():
    assert read(model_type="mistral", sliding_window=8).layers[0].mixers[0].window == 8
    chunked = read(model_type="llama4_text", attention_chunk_size=16, num_local_experts=4)
    assert [layer.mixers[0].window for layer in chunked.layers] == [16, 16, 16, None]


def test_parallel_hybrids_hold_both_mixers():
    model = read(model_type="falcon_h1", mamba_d_ssm=128, **MAMBA2)
    assert [type(m) for m in model.layers[0].mixers] == [Attention, StateMixer]


def test_latent_attention_and_dense_first_layers():
    model = read(model_type="deepseek_v3", **MLA)
    assert all(isinstance(layer.mixers[0], LatentAttention) for layer in model.layers)
    assert [isinstance(layer.mlp, MoeMlp) for layer in model.layers] == [False, True, True, True]
    assert model.params_active < model.params_total


def test_the_indexer_is_counted():
    plain = read(model_type="deepseek_v3", **MLA)
    sparse = read(model_type="deepseek_v32", **MLA, index_n_heads=4, index_head_dim=8, index_topk=16)
    assert sparse.params_total > plain.params_total
    assert sparse.layers[0].mixers[0].cache_dim == 16 + 4 + 8


def test_text_models_inside_multimodal_ones():
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
    }
    raw = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **BASE, "head_dim": 16},
        "vision_config": vision,
    }
    model = spec_from_config(raw, "test")
    patches, block = 16, 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    tower = 2 * block + 3 * 16 * 32 + 32 + patches * 32 + 64
    assert model.towers[0].params == tower + 32 * 64 + 32
    assert model.hidden == 64


def test_prediction_heads_are_not_loaded():
    model = read(model_type="deepseek_v3", **MLA, num_nextn_predict_layers=1)
    assert [(t.name, t.loaded) for t in model.towers] == [("mtp", False)]
    assert model.params_total == read(model_type="deepseek_v3", **MLA).params_total


def test_encoder_decoders_have_cross_attention():
    raw = {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 320,
    }
    model = spec_from_config(raw, "test")
    assert [m.cross for m in model.layers[0].mixers] == [False, True]
    assert any("fill the encoder" in a for a in model.assumptions)


def test_an_unknown_family_is_an_assumption_not_silence():
    model = read(model_type="nobody_knows_it")
    assert any("not known here" in a for a in model.assumptions)


def test_models_that_do_not_generate_are_refused():
    with pytest.raises(ModelConfigError, match="does not generate text"):
        read(architectures=["BertForMaskedLM"])


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_missing_fields_are_named(field):
    raw = {k: v for k, v in BASE.items() if k != field}
    with pytest.raises(ModelConfigError, match=field):
        spec_from_config({"model_type": "llama", **raw}, "test")


def test_key_value_heads_must_divide_heads():
    with pytest.raises(ModelConfigError, match="multiple of key/value heads"):
        read(num_key_value_heads=3)


def test_a_folder_with_weights_gives_exact_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}))
    header = json.dumps({"a": {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 20)
    assert load_model(str(tmp_path)).checkpoint_bytes == 20


def test_a_folder_with_an_index_gives_exact_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BASE}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    model = load_model(str(tmp_path / "config.json"))
    assert model.checkpoint_bytes == 12345
    assert model.source == str(tmp_path / "config.json")


def test_rotary_tables_follow_the_scaling_rule():
    def elements(**fields):
        return int(read(**fields).attributes["rope_elements"])

    assert elements() == 128 * 16
    assert elements(rope_scaling={"rope_type": "linear", "factor": 4.0}) == 4 * 128 * 16
    assert elements(rope_scaling={"rope_type": "llama3", "factor": 8.0}) == 128 * 16
    assert (
        elements(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}) == 256 * 16
    )
    assert elements(partial_rotary_factor=0.5) == 128 * 8
    assert elements(model_type="mpt") == 0
