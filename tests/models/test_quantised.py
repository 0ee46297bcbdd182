"""Quantised checkpoints: which method, what stays at 16 bit."""

import pytest

from planner.estimator.memory.weights import weights_bytes
from planner.models.config.ignored import Ignored, exceptions_of
from planner.models.load import spec_from_config
from planner.models.precision import precision
from tests.models.configs import BASE, MLA

INT4 = {"num_bits": 4, "type": "int", "group_size": 128}
METHODS = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4-gptq"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4-awq"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
    ({"quant_method": "fbgemm_fp8"}, "fp8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bnb-nf4"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "hqq-int4"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao-int4"),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao-int8"),
    ({"quant_method": "bitnet"}, "ternary"),
    ({"quant_method": "gguf", "gguf_type": "q4_k_m"}, "gguf-q4_k_m"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4}}}, "int4-w4a16"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}},
        },
        "int8-w8a8",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
        "fp8",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}},
        },
        "fp8-block",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
        "nvfp4",
    ),
]


def read(quantisation=None, extra=None, **fields):
    raw = {"model_type": "llama", **BASE, **fields}
    if quantisation is not None:
        raw["quantization_config"] = quantisation
    return spec_from_config(raw, "test", extra=extra)


@pytest.mark.parametrize(("quantisation", "name"), METHODS)
def test_methods(quantisation, name):
    model = read(quantisation)
    assert model.native_precision == name
    assert precision(name)


def test_an_unknown_method_is_stated():
    model = read({"quant_method": "tomorrow"})
    assert model.native_precision == "bf16"
    assert any("'tomorrow' is not known here" in a for a in model.assumptions)


def test_hf_quant_config():
    model = read(
        extra={"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}}
    )
    assert model.native_precision == "nvfp4"
    assert set(model.unquantised_modules) == {"attention", "lm_head"}


@pytest.mark.parametrize(
    ("dtype", "name"), [("float16", "fp16"), ("float32", "fp32"), ("bfloat16", "bf16"), (None, "bf16")]
)
def test_plain_dtypes(dtype, name):
    assert read(torch_dtype=dtype).native_precision == name


PATTERNS = [
    (["lm_head"], ("lm_head",)),
    (["model.layers.*.self_attn"], ("attention",)),
    (["re:.*self_attn.*"], ("attention",)),
    ([r"re:model\.layers\.\d+\.self_attn\..*"], ("attention",)),
    ([r"re:.*mlp\.(gate|up|down)_proj.*"], ("dense_mlp",)),
    (["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"], ("attention@0-1",)),
    (["language_model.model.layers.2.mlp*", "language_model.lm_head"], ("dense_mlp@2", "lm_head")),
    (["self_attn"], ("attention",)),
    (["gate", "e_score_correction_bias"], ()),
    (["mtp.layers.0*", "visual.blocks.0"], ()),
    ([], ()),
]


@pytest.mark.parametrize(("ignore", "expected"), PATTERNS)
def test_ignore_lists(ignore, expected):
    assert exceptions_of(Ignored(ignore), read().layers) == expected


def test_experts_and_shared_experts_are_told_apart():
    layers = read(model_type="deepseek_v3", **MLA).layers
    assert exceptions_of(Ignored(["re:.*shared_experts.*"]), layers) == ("shared_experts",)
    assert exceptions_of(Ignored(["re:.*mlp.experts.*"]), layers) == ("experts",)


def test_mixed_precision_by_layer():
    listed = {
        f"model.layers.{i}.mlp.{p}_proj": {"quant_algo": "W4A16_NVFP4"}
        for i in range(4)
        for p in ("gate", "up", "down")
    }
    listed |= {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "FP8"} for i in range(4)}
    model = read(extra={"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}})
    assert model.native_precision == "nvfp4"
    assert model.unquantised_modules == ("lm_head", "attention=fp8")


def test_exceptions_cost_their_own_bytes():
    whole = read({"quant_method": "fp8", "modules_to_not_convert": []})
    part = read({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]})
    one = read({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]})
    attention = whole.layers[0].mixers[0].params(64)
    gain = 2 - precision("fp8").bytes_per_weight
    assert weights_bytes(part, "fp8") - weights_bytes(whole, "fp8") == pytest.approx(4 * attention * gain)
    assert weights_bytes(one, "fp8") - weights_bytes(whole, "fp8") == pytest.approx(attention * gain)


def test_a_quantised_checkpoint_served_in_another_precision_loses_its_exceptions():
    part = read({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]})
    assert weights_bytes(part, "bf16") == weights_bytes(read(), "bf16")
