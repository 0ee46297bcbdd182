"""Measured start-up facts: vLLM 0.19.0 on H100-80GB (79.19 GiB seen), max_num_seqs 1024, 8192 batched tokens.

Source: logs published with llm-d-incubation/llm-d-planner#205 (commit d3121e0). GiB on rank 0; tokens of the engine.
"""

# model, precision, tensor_parallel, pipeline_parallel, weights GiB, activation GiB, KV GiB, KV tokens
LOGS = [
    ("meta-llama/Llama-3.1-8B-Instruct", "bf16", 1, 1, 14.99, 1.89, 58.11, 476016),
    ("meta-llama/Llama-3.1-8B-Instruct", "fp32", 1, 1, 29.98, 2.21, 42.80, 175296),
    ("meta-llama/Llama-3.1-8B-Instruct", "fp8", 1, 1, 8.49, 1.89, 64.61, 529248),
    ("meta-llama/Llama-3.1-8B-Instruct", "bf16", 1, 2, 7.51, 1.10, 66.54, 1075312),
    ("meta-llama/Llama-3.1-8B-Instruct", "bf16", 1, 4, 4.26, 1.05, 69.80, 2257264),
    ("meta-llama/Llama-3.1-8B-Instruct", "bf16", 4, 1, 3.77, 1.89, 67.44, 2209792),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "int4-gptq", 1, 1, 5.38, 1.89, 67.71, 554704),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8", 2, 1, 33.88, 1.96, 37.28, 244304),
    ("google/gemma-3-12b-it", "bf16", 1, 1, 23.31, 3.94, 47.72, 130304),
    ("google/gemma-2-27b-it", "bf16", 1, 1, 50.72, 3.66, 20.59, 58672),
    ("google/gemma-7b", "bf16", 1, 1, 15.91, 3.63, 55.44, 129760),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "bf16", 4, 1, 53.12, 3.19, 16.75, 365968),
    ("microsoft/phi-2", "fp16", 1, 1, 5.19, 0.79, 69.00, 226112),
    ("microsoft/phi-4", "bf16", 1, 1, 27.39, 1.52, 46.08, 241568),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "bf16", 1, 1, 44.76, 2.03, 28.19, 184752),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "bf16", 2, 1, 43.51, 1.21, 28.44, 465936),
    ("moonshotai/Kimi-VL-A3B-Instruct", "bf16", 1, 1, 30.74, 2.92, 41.32, 1426368),
    ("Qwen/Qwen1.5-MoE-A2.7B", "bf16", 1, 1, 26.67, 2.47, 45.83, 250304),
    ("Qwen/Qwen3-8B", "bf16", 1, 1, 15.27, 2.21, 57.50, 418688),
    ("ibm-granite/granite-vision-3.3-2b", "bf16", 1, 1, 5.54, 0.79, 68.65, 899792),
]
CONTEXT = {"microsoft/phi-2": 2048}

# model, tensor_parallel, bytes a token adds on one GPU at short context
# (architecture rules confirmed by the same logs; gemma-3 by vLLM's padding of layer groups: 70/62 and 35/34)
TOKEN_BYTES = [
    ("meta-llama/Llama-3.1-8B-Instruct", 1, 131_072),
    ("meta-llama/Llama-3.3-70B-Instruct", 4, 81_920),
    ("deepseek-ai/DeepSeek-V2-Lite", 1, 31_104),
    ("deepseek-ai/DeepSeek-V2-Lite", 2, 31_104),
    ("openai/gpt-oss-20b", 2, 24_576),
    ("openai/gpt-oss-120b", 1, 73_728),
    ("google/gemma-2-27b-it", 1, 376_832),
    ("google/gemma-3-27b-it", 1, 573_440),
    ("google/gemma-3-12b-it", 1, 393_216),
    ("google/gemma-3-4b-it", 1, 35 * 4_096),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 4, 49_152),
    ("Qwen/Qwen2.5-7B-Instruct", 1, 57_344),
    ("Qwen/Qwen3-235B-A22B", 4, 48_128),
]

# MXFP4 weights in GiB, by version: vllm-project/vllm#33155 (0.11), #23278 is Marlin, logs of #205
MXFP4 = [("gpt-oss-120b", "0.11.2", 1, 64.38), ("gpt-oss-20b", "0.19.0", 1, 13.64), ("gpt-oss-20b", "0.19.0", 2, 7.01)]
