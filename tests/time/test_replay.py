"""The replay on single facts, each with its source; the files of measured rows are not part of the project."""

import pytest

from planner.errors import UnknownNameError
from planner.estimator.time.engine_time import EXPERTS_OF, timing_row
from planner.estimator.uncertainty import ranges
from planner.hardware.catalog import load_catalog
from planner.validate.accuracy_serving import COLUMNS, replay
from planner.validate.serving_rows import read_case, run_facts

BASE = {
    "model": "Llama-3.1-70B", "gpu": "H100-SXM-80GB", "n_gpus": "2", "tp": "2", "pp": "1", "precision_w": "fp8", "kv_dtype": "fp8",
    "engine": "TensorRT-LLM", "engine_version": "0.17", "batch_or_concurrency": "max", "isl": "1000", "osl": "1000",
    "metric": "output_tok_s_total", "value": "1", "load_kind": "offline_saturated", "note": "", "source": "",
}  # fmt: skip


def predict(**changes):
    return replay([{**BASE, **changes}])[0]


TRT_017 = "NVIDIA/TensorRT-LLM@258c7540 docs/source/performance/perf-overview.md (v0.17)"
SPLITWISE = "Mutinifni/splitwise-sim@8f99e7dc data/perf_model.csv"
LMDEPLOY = "InternLM/lmdeploy@3e391df4 docs/en/benchmark/a100_fp16.md"
LLAMA_CPP = "XiongjieDai/GPU-Benchmarks-on-LLM-Inference@aa72e0ec README.md"


# Llama-2-70B fp16 on 4x A100-SXM-80 with LMDeploy 0.1.0a1, batch 1: 31 ms a token; 74 ms to the first of 128; others as in the sources
@pytest.mark.parametrize(
    ("changes", "measured", "within"),
    [
        ({"model": "Llama-2-70B", "gpu": "A100-SXM-80GB", "n_gpus": "4", "tp": "4", "precision_w": "fp16", "kv_dtype": "fp16", "engine": "LMDeploy-TurboMind", "engine_version": "0.1.0a1", "load_kind": "static_concurrency", "batch_or_concurrency": "1", "isl": "128", "osl": "2048", "metric": "tpot_p50_ms", "source": LMDEPLOY}, 31.0, 0.15),
        ({"model": "Llama-2-70B", "gpu": "A100-SXM-80GB", "n_gpus": "4", "tp": "4", "precision_w": "fp16", "kv_dtype": "fp16", "engine": "LMDeploy-TurboMind", "engine_version": "0.1.0a1", "load_kind": "static_concurrency", "batch_or_concurrency": "1", "isl": "128", "osl": "128", "metric": "ttft_ms", "source": LMDEPLOY}, 74.0, 0.25),
        ({"gpu": "A100-SXM-80GB", "n_gpus": "8", "tp": "8", "precision_w": "fp16", "kv_dtype": "fp16", "isl": "128", "osl": "128", "source": TRT_017}, 4717.62, 0.25),
        ({"model": "Llama-2-70B", "gpu": "H100-SXM-80GB(power-capped)", "n_gpus": "8", "tp": "8", "precision_w": "fp16", "kv_dtype": "fp16", "engine": "vLLM (Splitwise fork)", "engine_version": "2023", "batch_or_concurrency": "1", "isl": "512", "osl": "2048", "load_kind": "static_batch", "metric": "tpot_ms", "source": SPLITWISE}, 30.764, 0.3),
        ({"model": "Llama-3-8B", "gpu": "RTX 4090 24GB", "n_gpus": "1", "tp": "1", "precision_w": "Q4_K_M", "kv_dtype": "fp16", "engine": "llama.cpp", "engine_version": "2024-05", "batch_or_concurrency": "1", "isl": "0", "osl": "4096", "load_kind": "llama-bench", "source": LLAMA_CPP}, 119.44, 0.05),
    ],
)  # fmt: skip
def test_a_fact_is_met(changes, measured, within):
    found = predict(**changes)
    assert found.skipped == ""
    assert found.predicted == pytest.approx(measured, rel=within)
    assert found.low <= found.predicted <= found.high


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "M3 Max 40-Core GPU 64GB"}, "Apple silicon"),
        ({"gpu": "Quantum QPU"}, "in no table"),
        ({"engine": "my-engine"}, "in no table"),
        ({"model": "no-such-model-7b"}, "unknown model"),
        ({"metric": "mem_weights_gib"}, "not a time or a rate"),
        ({"note": "SUSPECT: reads like a typo"}, "SUSPECT"),
        ({"gpu": "A100-SXM-80GB"}, "no fp8 tensor hardware"),
        ({"isl": "n/a", "osl": ""}, ""),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(changes, reason):
    found = predict(**changes)
    if reason:
        assert found.predicted is None
        assert reason in found.skipped
    else:
        assert found.predicted is not None


def test_more_gpus_and_fewer_tokens_are_faster():
    assert predict(tp="4", n_gpus="4").predicted > predict().predicted
    assert predict(isl="128").predicted > predict(isl="4000").predicted


def test_2023_engines_are_slower():
    old = {
        "engine": "vLLM (Splitwise fork)",
        "engine_version": "2023",
        "load_kind": "static_batch",
        "batch_or_concurrency": "8",
        "metric": "tpot_ms",
    }
    assert predict(**old).predicted > 1.5 * predict(**{**old, "engine": "vllm", "engine_version": "0.18.0"}).predicted


def test_rows_keep_their_order():
    rows = [{**BASE, "isl": str(isl)} for isl in (4000, 128, 1000)] + [{**BASE, "gpu": "nothing"}]
    found = replay(rows)
    assert [f.predicted for f in found] == [predict(isl=r["isl"], gpu=r["gpu"]).predicted for r in rows]


def test_ranges_hold_the_value_and_widen_for_borrowed_gpus():
    for metric in ("ttft", "ttft_p95", "tpot", "e2e", "throughput", "unheard-of"):
        for klass in ("measured", "borrowed"):
            low, high = ranges(metric, klass, "vllm")
            assert 0 < low <= 1 <= high
    measured, borrowed = (ranges("tpot", k, "vllm") for k in ("measured", "borrowed"))
    assert borrowed[1] / borrowed[0] > measured[1] / measured[0]


@pytest.mark.parametrize("metric", ["tpot", "e2e", "ttft", "ttft_p95"])
def test_a_rate_that_may_be_half_makes_a_time_that_may_be_twice(metric):
    (slow, _), (_, long) = ranges("throughput", "borrowed", "vllm"), ranges(metric, "borrowed", "vllm")
    assert long >= 1 / slow > 2


def test_a_generation_is_picked_by_its_name():
    assert timing_row("vllm", "2023")["step_overhead_us"] > timing_row("vllm", "0.22.0")["step_overhead_us"]
    assert timing_row("vllm", "0.22.0") == timing_row("vllm", "today")
    with pytest.raises(UnknownNameError, match="vllm"):
        timing_row("vlm", "today")


INFERENCEX = "aiconfigurator-core 0.12.0 systems/silicon_sample.csv id=2026_03_25_gpt_oss_120b_{gpu}_{engine}_fp4_agg_1024x1024_c16_{cut}_7"
GPT_OSS = {
    "model": "openai/gpt-oss-120b", "gpu": "h200_sxm", "n_gpus": "16", "tp": "16", "precision_w": "fp4", "kv_dtype": "", "engine": "trtllm",
    "engine_version": "gpt-oss-dev", "batch_or_concurrency": "16", "isl": "1024", "osl": "1024", "metric": "tpot_ms", "load_kind": "closed_loop",
    "note": "attn_dp=1 moe_tp=4 moe_ep=4 conc=16",
}  # fmt: skip


def test_a_run_named_tp4_ep4_is_four_gpus():
    named = predict(**GPT_OSS, source=INFERENCEX.format(gpu="h200_sxm", engine="trtllm", cut="tp4_ep4"))
    plain = predict(
        **{**GPT_OSS, "n_gpus": "4", "tp": "4", "note": "attn_dp=1 moe_tp=1 moe_ep=4"}, source="elsewhere id=x"
    )
    assert named.predicted == pytest.approx(7.22, rel=0.15)  # measured on 4 GPUs
    assert named.predicted == pytest.approx(plain.predicted, rel=0.15)  # lengths of the other source are not drawn


LLAMA_70B_RUN = {
    "model": "meta-llama/Llama-3.1-70B", "gpu": "h200_sxm", "n_gpus": "4", "tp": "4", "precision_w": "fp8", "kv_dtype": "", "engine": "trtllm",
    "engine_version": "", "batch_or_concurrency": "16", "isl": "1024", "osl": "1024", "metric": "ttft_ms", "load_kind": "closed_loop", "note": "",
    "source": "aiconfigurator-core 0.12.0 systems/silicon_sample.csv id=2026_04_06_llama_3_1_70b_h200_sxm_trtllm_fp8_agg_1024x1024_c16_tp4_1",
}  # fmt: skip


def test_prompts_wait_for_others_where_the_script_says_so():
    held, long = predict(**LLAMA_70B_RUN), predict(**{**LLAMA_70B_RUN, "osl": "8192"})
    tpot = predict(**{**LLAMA_70B_RUN, "metric": "tpot_ms"})
    assert (
        10 < (held.predicted - long.predicted) / tpot.predicted < 20
    )  # up to 20 decode steps (batch_wait_timeout_iters)


def test_facts_of_a_run_come_from_all_entries_that_fit():
    row = {**BASE, **LLAMA_70B_RUN, "gpu": "b200_sxm", "source": LLAMA_70B_RUN["source"].replace("h200", "b200")}
    assert run_facts(row) == {"wait_steps": 20, "wait_share": 0.9, "max_num_batched_tokens": 16384}
    assert run_facts({**row, "source": "elsewhere"}) == {}


SGLANG = {
    "model": "Qwen/Qwen3-32B", "gpu": "h100_sxm", "n_gpus": "2", "tp": "2", "precision_w": "", "kv_dtype": "", "engine": "sglang",
    "engine_version": "0.5.1.post1", "isl": "1024", "osl": "512", "load_kind": "closed_loop", "note": "",
    "source": "aiconfigurator-core 0.12.0 systems/silicon_sample.csv id=qwen_qwen3_32b_h100_sxm_sglang_agg_1024x512_c64_tp2_epnone_1",
}  # fmt: skip


def test_users_of_an_engine_that_prefills_first_go_in_rounds():
    def at(users, **more):
        row = {**SGLANG, **more, "batch_or_concurrency": str(users)}
        return [predict(**row, metric=m).predicted for m in ("ttft_ms", "tpot_ms")]

    few, many = at(16), at(128)
    assert many[0] > 6 * few[0]  # all prompts of a round are prefilled first
    assert many[1] < 4 * few[1]
    assert at(128, osl="1024")[0] == pytest.approx(many[0])


def test_a_run_with_kernels_of_another_family_is_timed_with_those():
    row = {
        **GPT_OSS,
        "gpu": "b200_sxm",
        "n_gpus": "1",
        "tp": "1",
        "note": "attn_dp=1 moe_tp=1 moe_ep=1",
        "engine": "vllm",
        "engine_version": "0.15.1",
    }
    theirs = predict(**row, source=INFERENCEX.format(gpu="b200_sxm", engine="vllm", cut="tp1_ep1"))
    assert theirs.predicted == pytest.approx(
        5.84, rel=0.25
    )  # measured, with FlashInfer's TensorRT-LLM kernels and mxfp8 activations
    own = timing_row("vllm", "today")
    assert timing_row("vllm", f"today{EXPERTS_OF}trtllm") == {**own, "expert_kernels": "trtllm"}


QWEN_235B = {
    "model": "Qwen/Qwen3-235B-A22B-FP8", "gpu": "h200_sxm", "n_gpus": "2", "tp": "2", "precision_w": "fp8", "kv_dtype": "", "engine": "vllm",
    "isl": "1000", "osl": "1000", "load_kind": "closed_loop", "note": "attn_dp=1 moe_tp=2 moe_ep=1", "metric": "tpot_ms",
    "source": "aiconfigurator-core 0.12.0 systems/silicon_sample.csv id=qwen_h200_sxm_vllm_agg_1000x1000_c4_tp2_epnone_1",
}  # fmt: skip


def test_a_grouped_product_that_loads_every_expert_costs_few_users_as_much_as_many():
    def more_users_cost(version):
        few, many = (
            predict(**QWEN_235B, engine_version=version, batch_or_concurrency=n).predicted for n in ("2", "16")
        )
        return many / few

    assert more_users_cost("0.12.0") < 1.3
    assert more_users_cost("0.18.0") > 1.7


def test_a_cache_that_is_not_stated_is_what_the_engine_takes_unasked():
    catalog = load_catalog()

    def cache(**row):
        return read_case(0, {**dict.fromkeys(COLUMNS, ""), **row}, catalog).shard.kv_dtype.name

    asked = {**QWEN_235B, "batch_or_concurrency": "4"}
    assert cache(**asked, engine_version="0.18.0") == "bf16"
    assert cache(**{**asked, "engine": "sglang"}, engine_version="0.5.6") == "bf16"
    assert cache(**{**asked, "engine": "trtllm"}, engine_version="1.0.0") == "fp8"
    assert cache(**{**asked, "kv_dtype": "fp8"}, engine_version="0.18.0") == "fp8"
    inferencex = {
        **asked,
        "model": "meta-llama/Llama-3.1-70B",
        "source": INFERENCEX.format(gpu="h200_sxm", engine="vllm", cut="tp2_ep1"),
    }
    assert cache(**inferencex) == "fp8"  # stated by the script of the run
    full = {**asked, "precision_w": "fp16", "model": "meta-llama/Llama-3.1-70B", "engine": "trtllm"}
    assert cache(**full, engine_version="1.0.0") == "bf16"
