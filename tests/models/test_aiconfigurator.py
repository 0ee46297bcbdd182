"""About 100 real config.json files, read from the installed package aiconfigurator-core (never copied)."""

import json
from importlib import resources

import pytest

from planner.models.load import spec_from_config

pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core is not installed")

# billions of parameters as the model's name or card says
STATED = {
    "Qwen--Qwen3-235B-A22B-FP8": 235,
    "Qwen--Qwen3.5-397B-A17B": 397,
    "XiaomiMiMo--MiMo-V2-Flash": 309,
    "deepseek-ai--DeepSeek-V3": 671,
    "deepseek-ai--DeepSeek-V4-Flash": 284,
    "moonshotai--Kimi-K2-Instruct": 1026,
    "nvidia--Nemotron-H-56B-Base-8K": 56,
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 49.9,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120.6,
    "openai--gpt-oss-20b": 20.9,
    "nvidia--Gemma-4-31B-IT-NVFP4": 31.3,
    "MiniMaxAI--MiniMax-M2.5": 228.7,
    "zai-org--GLM-5": 744,
}


def folder():
    return resources.files("aiconfigurator_core").joinpath("model_configs")


def names():
    try:
        found = [e.name.removesuffix("_config.json") for e in folder().iterdir() if e.name.endswith("_config.json")]
    except (ModuleNotFoundError, OSError):
        return []
    return sorted(n for n in found if not n.endswith("_hf_quant"))


def read(name):
    raw = json.loads(folder().joinpath(f"{name}_config.json").read_text("utf-8"))
    quant = folder().joinpath(f"{name}_hf_quant_config.json")
    return spec_from_config(raw, name, extra=json.loads(quant.read_text("utf-8")) if quant.is_file() else None)


def test_there_are_many():
    assert len(names()) > 60


@pytest.mark.parametrize("name", names())
def test_real_configs_are_read(name):
    model = read(name)
    assert model.params_total > 1e8
    assert model.params_active <= model.params_total
    if name in STATED:
        assert model.params_total / 1e9 == pytest.approx(STATED[name], rel=0.01)
    if "NVFP4" in name:
        assert model.native_precision == "nvfp4"
    if "-FP8" in name:
        assert model.native_precision in ("fp8", "fp8-block")
