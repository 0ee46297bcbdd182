"""Start-up logs and deaths, on lines made from the format strings of the engines' source."""

import pytest

from planner.validate.engine_logs import death_of, failure, read_start, titan_steps

# vllm 0.32.0: gpu_model_runner.py, gpu_worker.py, kv_cache_utils.py; two ranks of one replica, one of another
VLLM = """
(Worker_TP0 pid=1) INFO 11-29 10:00:00 [gpu_model_runner.py:5150] Model loading took 7.51 GiB memory and 12.345678 seconds
(Worker_TP1 pid=2) INFO 11-29 10:00:00 [gpu_model_runner.py:5150] Model loading took 7.6 GiB memory and 12.345678 seconds
(Worker_TP0 pid=1) INFO 11-29 10:00:05 [gpu_worker.py:760] Available KV cache memory: 60.25 GiB
(EngineCore pid=3) INFO 11-29 10:00:06 [kv_cache_utils.py:2328] GPU KV cache size: 1,234,567 tokens, Maximum concurrency for 4,096 tokens per request: 301.41x
(EngineCore pid=4) INFO 11-29 10:00:06 [kv_cache_utils.py:2328] GPU KV cache size: 1,234,000 tokens, Maximum concurrency for 4,096 tokens per request: 301.27x
(Worker_TP0 pid=1) INFO 11-29 10:00:20 [gpu_model_runner.py:6582] Graph capturing finished in 14 secs, took 0.62 GiB
"""
# sglang 0.5.23: model_runner.py, memory_pool.py, scheduler.py, cuda_graph_setup.py
SGLANG = """
[2026-11-29 10:00:00 TP0] Load weight begin. avail mem=78.60 GB
[2026-11-29 10:00:09 TP0] Load weight end. elapsed=9.10 s, type=LlamaForCausalLM, avail mem=63.50 GB, mem usage=15.10 GB.
[2026-11-29 10:00:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 443128, K size: 27.05 GB, V size: 27.06 GB
[2026-11-29 10:00:10 TP0] Capture target decode CUDA graph begin. backend=x, num_tokens=8, avail mem=8.32 GB
[2026-11-29 10:00:19 TP0] Capture target decode CUDA graph end. bs=[1, 2], elapsed=9.02 s, mem usage=1.10 GB, avail mem=7.20 GB.
[2026-11-29 10:00:19] max_total_num_tokens=443128, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=4096, available_gpu_mem=7.20 GB
"""
# deepspeed 0.19.8: runtime/utils.py see_memory_usage
DEEPSPEED = "Engine after step\nMA 12.5 GB         Max_MA 18.25 GB         CA 20.0 GB         Max_CA 21 GB \n"
# torchtitan 0.3.0: components/metrics.py, with its colours
TITAN = "[titan] \x1b[31mstep:  3  \x1b[32mloss:  7.12345  \x1b[33mgrad_norm:  1.2345  \x1b[36mmemory: 40.51GiB(51.20%)  \x1b[34mtps: 7,012  \x1b[36mtflops: 350.1  \x1b[35mmfu: 35.1%\x1b[39m\n"


def test_vllm_takes_the_fullest_rank_and_the_smallest_cache():
    assert read_start("vllm", VLLM) == {
        "weights_gib": 7.6, "kv_cache_gib": 60.25, "kv_cache_tokens": 1234000.0, "graphs_gib": 0.62,
    }  # fmt: skip


def test_sglang():
    found = read_start("sglang", SGLANG)
    assert found["kv_cache_gib"] == pytest.approx(54.11)
    assert (found["weights_gib"], found["kv_cache_tokens"], found["graphs_gib"]) == (15.1, 443128.0, 1.1)
    assert "key_cache_gib" not in found
    one = "MLA KV Cache is allocated. dtype: torch.bfloat16, #tokens: 100, KV size: 3.50 GB"
    assert read_start("sglang", one) == {"kv_cache_gib": 3.5}


def test_deepspeed_and_torchtitan():
    assert (
        read_start("deepspeed", DEEPSPEED) == read_start("deepspeed_inference", DEEPSPEED) == {"peak_memory_gib": 18.25}
    )
    assert read_start("torchtitan", TITAN) == {"peak_memory_gib": 40.51}
    assert titan_steps(TITAN * 2) == [(3, 7012.0), (3, 7012.0)]
    assert read_start("transformers", VLLM) == {}


DEATHS = [
    ("ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (5.2 GiB).", "does not hold one request"),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "nothing is left for the KV cache"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.8", "nothing is left for the KV cache"),
    ("ValueError: Free memory on device cuda:0 (10.0/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).", "another process holds memory"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "the GPU ran out of memory"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernels for this GPU"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver is older"),
    ("RuntimeError: Found no NVIDIA driver on your system.", "sees no GPU"),
    ("RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`", "sees no GPU"),
    ("OSError: [Errno 98] Address already in use", "a port that it needs is taken"),
    ("[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use", "a port that it needs is taken"),
    ("OSError: You are trying to access a gated repo.\nMake sure to have access to it", "accepted licence"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "accepted licence"),
    ("ImportError\nModuleNotFoundError: No module named 'vllm._C'", "the package vllm._C is not installed"),
    ("serve.sh: line 40: exec: vllm: not found", "the program vllm is not installed"),
    ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ("vllm: error: unrecognized arguments: --prefill-context-parallel-size 2", "its version differs"),
    ("'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/x/y/resolve/main/config.json", "the hub cannot be reached"),
    ("'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/x\ntorch.OutOfMemoryError: CUDA out of memory.", "the GPU ran out of memory"),
    ("httpx.ConnectError: [Errno -2] Name or service not known", "the hub cannot be reached"),
    ("socket.gaierror: [Errno -2] Name or service not known", "a host name that it needs"),
    ("The IPv4 network addresses of (gpu-7, 29500) cannot be retrieved (gai error: -2 - Name or service not known).", "a host name that it needs"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, unhandled system error\nncclSystemError", "through NCCL"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "meaning"), DEATHS)
def test_deaths_are_understood(line, meaning):
    death = death_of(f"INFO starting\n{line}\nTraceback follows\n")
    assert meaning in death.meaning
    assert death.next_step
    assert death.last_lines[-1] == "Traceback follows"


def test_an_unknown_death_shows_its_last_lines():
    death = death_of("\n".join(f"line {i}" for i in range(50)))
    assert (death.meaning, death.last_lines[0], death.last_lines[-1]) == ("", "line 42", "line 49")


def test_out_of_memory_says_what_fitted():
    error = failure("the engine ended with exit code 1", "vllm", VLLM + "torch.OutOfMemoryError: CUDA out of memory.")
    assert (
        "fitted before that: weights 7.60 GiB, kv cache 60.25 GiB, graphs 0.62 GiB, 1,234,000 tokens of KV cache"
        in str(error)
    )
    trained = failure(
        "it ended", "deepspeed", "OUT OF MEMORY on rank 0: x\nNEXT: half the micro-batch: MICRO_BATCH_SIZE=1"
    )
    assert "It says itself: half the micro-batch: MICRO_BATCH_SIZE=1." in str(trained)


def test_a_missing_package_of_ours_names_the_extra():
    assert ".[profile]" in death_of("ModuleNotFoundError: No module named 'transformers'").next_step
    assert "pip install 'llm" not in death_of("ModuleNotFoundError: No module named 'uvicorn'").next_step
