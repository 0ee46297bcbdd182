"""The engine table: what runs where, with facts looked up."""

from __future__ import annotations

import pytest

from planner.emit import write_files
from planner.engines.records import engine, engines
from planner.errors import InputError, UnknownNameError
from planner.hardware.records import Gpu
from tests.emit.plans import owned, plan

PRECISIONS = {
    "bf16",
    "fp16",
    "fp8",
    "fp8-block",
    "int8-w8a8",
    "int4-awq",
    "int4-gptq",
    "int4-w4a16",
    "bnb-int8",
    "bnb-nf4",
    "mxfp4",
    "nvfp4",
}
KV = {"bf16", "fp16", "fp8", "fp8_e5m2", "int8"}


def gpu(capability: float | None, vendor: str = "nvidia", *dtypes: str) -> Gpu:
    return Gpu("x", vendor, "x", 80, 79, 1, dict.fromkeys(dtypes, 1.0), capability, 4, 1)  # type: ignore[arg-type]


def test_names_sources_and_order() -> None:
    assert set(engines()) == {"vllm", "sglang", "tensorrt_llm", "tgi", "deepspeed_inference", "transformers"}
    for spec in engines().values():
        assert {p.precision for p in spec.precisions} <= PRECISIONS
        assert set(spec.kv_dtypes) <= KV
        assert len(spec.source) > 40
        assert spec.batching in ("continuous", "static")
        assert spec.pipeline_parallel or spec.multi_node == "none"
        for row in spec.precisions:
            assert row.min_compute_capability is None or row.min_compute_capability >= spec.min_compute_capability
            assert not (row.amd and "amd" not in spec.vendors)
            assert row.flag or row.needs_checkpoint, "a method without a flag must come from the checkpoint"
    with pytest.raises(UnknownNameError, match="vllm"):
        engine("vlm")


@pytest.mark.parametrize(
    ("name", "precision", "capability", "runs"),
    [
        ("vllm", "bf16", 7.5, False),
        ("vllm", "fp16", 7.5, True),
        ("vllm", "fp16", 7.0, False),
        ("vllm", "fp8", 8.0, False),
        ("vllm", "fp8", 8.9, True),
        ("vllm", "int8-w8a8", 8.0, True),
        ("vllm", "int8-w8a8", 10.0, False),
        ("vllm", "nvfp4", 9.0, False),
        ("vllm", "nvfp4", 10.0, True),
        ("vllm", "nvfp4", 12.0, True),
        ("vllm", "bnb-nf4", 9.0, False),
        ("sglang", "bf16", 7.5, False),
        ("tensorrt_llm", "fp8-block", 8.9, False),
        ("tensorrt_llm", "fp8-block", 12.0, False),
        ("tensorrt_llm", "int4-awq", 10.0, False),
        ("tensorrt_llm", "fp8-block", 10.3, True),
        ("tgi", "bnb-nf4", 8.6, True),
        ("tgi", "bf16", 10.0, False),
        ("transformers", "bnb-int8", 7.5, True),
        ("deepspeed_inference", "int4-awq", 9.0, False),
    ],
)
def test_nvidia(name: str, precision: str, capability: float, runs: bool) -> None:
    assert (engine(name).support(precision, gpu(capability)) is not None) == runs


def test_amd_needs_the_dtype_and_the_vendor() -> None:
    mi250, mi300 = gpu(None, "amd", "bf16", "fp16"), gpu(None, "amd", "bf16", "fp16", "fp8", "int8")
    assert engine("vllm").support("bf16", mi250)
    assert engine("vllm").support("fp8", mi250) is None
    assert engine("vllm").support("fp8", mi300)
    assert not engine("vllm").supports_kv("fp8", mi250)
    assert engine("vllm").supports_kv("fp8", mi300)
    assert engine("tensorrt_llm").support("bf16", mi300) is None
    assert not any(e.supports_gpu(gpu(None, "google")) for e in engines().values())


def test_quantised_transformers_stay_on_one_gpu() -> None:
    for row in engine("transformers").precisions:
        assert (row.max_tensor_parallel == 1) == (row.precision not in ("bf16", "fp16"))


def test_an_edited_plan_of_experts_that_its_engine_refuses_is_refused(tmp_path):
    made = plan("qwen3-30b-a3b", "tgi", "bnb-int8", seqs=4, offers=(owned("h100-sxm", 1),))
    with pytest.raises(InputError, match="does not run experts in bnb-int8"):
        write_files(made, tmp_path / "out")
