"""A serving plan that was edited: engine, precision, checkpoint, cache and lengths must go together."""

from __future__ import annotations

from collections.abc import Sequence

from planner.engines.formats import loaders
from planner.engines.plan_words import MEND, check_version, wrong
from planner.engines.records import EngineSpec, engine, engine_on_cpu, engines
from planner.errors import UnknownNameError
from planner.hardware.records import Gpu
from planner.models.checkpoints import all_checkpoints, published
from planner.models.lookup import find_repackaged
from planner.models.precision import UNQUANTISED, kv_dtype, precision
from planner.plan import Deployment, Plan, ServeSettings
from planner.plan_check import short
from planner.plan_seal import as_solved


def check_serving(plan: Plan, dep: Deployment, serve: ServeSettings, gpus: Sequence[Gpu]) -> None:
    """Raises PlanFileError or UnknownNameError for the first value that cannot be. gpus: of the offers, none where they are not known."""
    try:
        spec = engine(dep.engine)
        precision(dep.precision)
        kv_dtype(dep.kv_cache_dtype)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error.kind} of the plan", error.name, error.suggestions, MEND) from None
    check_version(dep, {name: e.version for name, e in engines().items()})
    _check_parallel(dep, serve)
    _check_precision(dep, spec, gpus)
    _check_checkpoint(plan, dep, spec)
    _check_lengths(plan, serve)
    _check_cache(plan, serve)
    if spec.batching == "continuous":
        _check_batch(serve, spec)


def _check_parallel(dep: Deployment, serve: ServeSettings) -> None:
    """Experts and attention groups are shared out over the whole tensor-parallel group, or not at all; no sequence is cut."""
    if dep.context_parallel != 1:
        raise wrong(f"deployment.context_parallel of the plan is {dep.context_parallel}", "it is 1 in serving")
    for name, value in (
        ("deployment.expert_parallel", dep.expert_parallel),
        ("deployment.serve.attention_data_parallel", serve.attention_data_parallel),
    ):
        if value not in (1, dep.tensor_parallel):
            raise wrong(
                f"{name} of the plan is {value}", f"it is 1, or tensor_parallel, which is {dep.tensor_parallel}"
            )


def _check_precision(dep: Deployment, spec: EngineSpec, gpus: Sequence[Gpu]) -> None:
    """The engine runs precision and KV-cache dtype, on these GPUs where they are known."""
    rows = [row.precision for row in spec.precisions]
    if dep.precision not in rows:
        raise wrong(f"deployment.precision of the plan is {dep.precision}", f"{spec.name} runs {', '.join(rows)}")
    for gpu in gpus:
        here = spec if gpu.vendor != "cpu" else engine_on_cpu(spec.name)
        if here is None or not here.supports_gpu(gpu):
            raise wrong(f"deployment.engine of the plan is {spec.name}", f"it does not run on {gpu.name}")
        if here.support(dep.precision, gpu) is None:
            there = ", ".join(row for row in rows if here.support(row, gpu) is not None)
            raise wrong(
                f"deployment.precision of the plan is {dep.precision}", f"on {gpu.name} {spec.name} runs {there}"
            )
        if not here.supports_kv(dep.kv_cache_dtype, gpu):
            there = ", ".join(kind for kind in here.kv_dtypes if here.supports_kv(kind, gpu))
            raise wrong(
                f"deployment.kv_cache_dtype of the plan is {dep.kv_cache_dtype}",
                f"on {gpu.name} {spec.name} keeps {there}",
            )


def _check_checkpoint(plan: Plan, dep: Deployment, spec: EngineSpec) -> None:
    """The weights that are loaded are of the plan's model, in the plan's precision, in a format that the engine loads."""
    native, support = plan.model.native_precision, next(r for r in spec.precisions if r.precision == dep.precision)
    if dep.checkpoint is None:
        made = not support.needs_checkpoint and native not in (*UNQUANTISED, "")
        if made and dep.precision != native:
            raise wrong(
                f"deployment.precision of the plan is {dep.precision}",
                f"{plan.model.hf_id or plan.model.name} is published in {native}, and deployment.checkpoint names no other weights",
            )
        return
    row = next((c for c in all_checkpoints() if c.repo == dep.checkpoint), None)
    named = find_repackaged(dep.checkpoint) if row is None else None
    holds = row.precision if row is not None else named[2] if named is not None else dep.precision
    if holds != dep.precision:
        raise wrong(
            f"deployment.precision of the plan is {dep.precision}",
            f"deployment.checkpoint, {short(dep.checkpoint)}, holds {holds} weights",
        )
    if row is None:
        return
    if row not in published(plan.model.hf_id, row.precision):
        raise wrong(
            f"deployment.checkpoint of the plan is {row.repo}",
            f"it was made from {row.base}, not from {plan.model.hf_id}",
        )
    loader = loaders(spec.name).get(row.format)
    if loader is None or row.precision not in loader.precisions:
        raise wrong(
            f"deployment.checkpoint of the plan is {row.repo}",
            f"{spec.name} does not load {row.format} files in {row.precision}",
        )


def _check_lengths(plan: Plan, serve: ServeSettings) -> None:
    """The longest request is one that the model reads, and no shorter than those of the load."""
    longest, most = serve.max_model_len, plan.model.max_context
    if 0 < most < longest:
        raise wrong(
            f"deployment.serve.max_model_len of the plan is {longest}", f"{plan.model.name} reads at most {most} tokens"
        )
    load = plan.request.get("workload")
    lengths = [load.get(name) for name in ("input_tokens", "output_tokens")] if isinstance(load, dict) else []
    tokens = sum(n for n in lengths if isinstance(n, int))
    if longest < tokens:
        raise wrong(
            f"deployment.serve.max_model_len of the plan is {longest}", f"a request of its load has {tokens} tokens"
        )


def _check_cache(plan: Plan, serve: ServeSettings) -> None:
    """The cache holds the longest request; engines refuse to start without. Estimated plans were held to it when they were solved, by
    layer kind; of an edited one only the tokens are known."""
    if plan.memory is None or as_solved(plan):
        return
    holds = plan.memory.kv_cache_tokens // serve.attention_data_parallel
    if holds < serve.max_model_len:
        raise wrong(
            f"deployment.serve.max_model_len of the plan is {serve.max_model_len}",
            f"its cache (memory.kv_cache_tokens) holds {holds} tokens, less than one such request",
            "Solve again with --max-model-len, or lower it.",
        )


def _check_batch(serve: ServeSettings, spec: EngineSpec) -> None:
    """A step holds a token of every running sequence (vLLM refuses to start with fewer); prompts longer than a step are cut, so that
    max_model_len sets no least but where the engine wants prompts whole."""
    if spec.whole_prompts and serve.max_num_batched_tokens < serve.max_model_len:
        raise wrong(
            f"deployment.serve.max_num_batched_tokens of the plan is {serve.max_num_batched_tokens}",
            f"a step of {spec.name} holds a whole prompt, of up to max_model_len {serve.max_model_len} tokens",
        )
    running = -(-serve.max_num_seqs // serve.attention_data_parallel)
    if serve.max_num_batched_tokens < running:
        raise wrong(
            f"deployment.serve.max_num_batched_tokens of the plan is {serve.max_num_batched_tokens}",
            f"a step of max_num_seqs {serve.max_num_seqs} has at least {running} tokens",
        )
