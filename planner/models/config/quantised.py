"""quantization_config and hf_quant_config.json: which precision the checkpoint is in, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.models.config.fields import Fields
from planner.models.config.ignored import Ignored, exceptions_of
from planner.models.precision import precision
from planner.models.spec import Layer

_TOO_MANY = "weights are counted at 16 bit, which is too many"
_IGNORE = (
    "ignore",
    "modules_to_not_convert",
    "exclude_modules",
    "ignored_layers",
    "llm_int8_skip_modules",
    "skip_modules",
)
_GGUF = {
    "q8_0": "gguf-q8_0",
    "q6_k": "gguf-q6_k",
    "q5_k_m": "gguf-q5_k_m",
    "q4_k_m": "gguf-q4_k_m",
    "q2_k": "gguf-q2_k",
}
Result = tuple[str, tuple[str, ...], list[str]]


def quantisation_of(f: Fields, top: Fields, extra: Mapping[str, Any] | None, layers: tuple[Layer, ...]) -> Result:
    """(native precision, exceptions, assumptions).

    An exception is a module class left at 16 bit ('attention', 'lm_head', ...), with '@0-2,60' for some layers only,
    and with '=fp8' when it is in another precision instead.
    """
    dtype = f.get("torch_dtype", "dtype") or top.get("torch_dtype", "dtype")
    plain = {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}.get(
        dtype if isinstance(dtype, str) else "", "bf16"
    )
    q = f.level("quantization_config") or top.level("quantization_config")
    if extra is not None and (q is None or not q.text("quant_method").startswith("compressed")):
        outer = Fields(extra, "hf_quant_config.")
        q = outer.level("quantization") or q
    if q is None or not q.raw:
        return plain, (), []
    if q.has("quantized_layers") or q.text("quant_algo").upper() == "MIXED_PRECISION":
        return _mixed(q, plain, layers)
    name, notes = _method(q, plain)
    ignored = next((q.items(n) for n in _IGNORE if isinstance(q.get(n), list)), None) or []
    if name == plain:
        return plain, (), notes
    rules = Ignored([e for e in ignored if isinstance(e, str)])
    found = exceptions_of(rules, layers)
    if name == "int4-g32" and "attention" not in found:
        name = "int4-w4a16"
        notes.append("group size 32: scales counted as for 128")
    if rules.odd:
        notes.append(f"ignore patterns not understood and left out: {', '.join(rules.odd[:3])[:100]}")
    return name, found, notes


def _method(q: Fields, plain: str) -> tuple[str, list[str]]:
    """The precision of one method, from its own fields."""
    method = (q.text("quant_method") or q.text("quant_algo") or q.text("producer")).lower()
    algo = q.text("quant_algo").upper()
    if method == "compressed-tensors":
        return _compressed(q, plain)
    if algo:
        return _modelopt(algo, plain)
    if method in ("fp8", "fbgemm_fp8"):
        return ("fp8-block" if q.has("weight_block_size") else "fp8"), []
    if method in ("gptq", "awq", "gptq_marlin", "awq_marlin", "auto-round", "autoround"):
        return _grouped(q, "int4-awq" if method.startswith("awq") else "int4-gptq", plain)
    if method in ("bitsandbytes", "bnb"):
        four = q.flag("load_in_4bit", "_load_in_4bit")
        return ("bnb-nf4" if four else "bnb-int8"), [] if four or q.flag("load_in_8bit", "_load_in_8bit") else [
            "bitsandbytes without load_in_*: read as 8 bit"
        ]
    if method in ("torchao", "hqq", "quark", "mxfp4", "bitnet", "gguf"):
        return _others(q, method, plain)
    return plain, [f"quantisation method {method or 'without a name'!r} is not known here: {_TOO_MANY}"]


def _others(q: Fields, method: str, plain: str) -> tuple[str, list[str]]:
    if method == "torchao":
        kind = str(q.get("quant_type") or "").lower()
        return (
            "torchao-int4"
            if "int4" in kind or "4" in kind.replace("float8", "")
            else "fp8"
            if "float8" in kind
            else "torchao-int8"
        ), []
    if method == "hqq":
        inner = q.level("quant_config")
        bits = inner.level("weight_quant_params") if inner else None
        return "hqq-int4", [] if bits is None or bits.count("nbits", default=4) == 4 else [
            "HQQ in other than 4 bits is counted as 4"
        ]
    if method == "gguf":
        kind = q.text("gguf_type", "file_type", "quant_type").lower()
        return _GGUF.get(kind, "gguf-q8_0"), [] if kind in _GGUF else [
            f"GGUF type {kind or 'not stated'!r}: counted as Q8_0"
        ]
    if method == "quark":
        return plain, [
            "Quark checkpoints state their layout per layer: weights are counted at 16 bit, which is too many"
        ]
    return {"mxfp4": "mxfp4", "bitnet": "ternary"}[method], []


def _grouped(q: Fields, name: str, plain: str) -> tuple[str, list[str]]:
    bits, group = q.count("bits", "w_bit", default=4), q.count("group_size", "q_group_size", default=128, low=-1)
    if bits == 8:
        return "torchao-int8", ["8-bit GPTQ is counted as int8 with one scale a channel"]
    if bits != 4:
        return name, [f"{bits}-bit weights are counted as 4 bit"]
    return name, [] if group in (128, -1) else [f"group size {group}: scales counted as for 128"]


def _compressed(q: Fields, plain: str) -> tuple[str, list[str]]:
    groups = q.level("config_groups")
    first = next(
        (Fields(g, "config_groups.") for g in (groups.raw.values() if groups else ()) if isinstance(g, Mapping)), None
    )
    w = first.level("weights") if first else None
    if first is None or w is None:
        return plain, [f"compressed-tensors without config_groups: {_TOO_MANY}"]
    bits, kind, group = w.count("num_bits", default=8), w.text("type", default="int"), w.optional("group_size", low=-1)
    if kind == "float":
        if bits == 4:
            return ("mxfp4" if group == 32 else "nvfp4"), []
        return ("fp8-block" if w.text("strategy") == "block" else "fp8"), []
    if bits == 4:
        return ("int4-g32" if group == 32 else "int4-w4a16"), [] if group in (32, 64, 128, -1, None) else [
            f"group size {group}: scales counted as for 128"
        ]
    return ("int8-w8a8" if first.has("input_activations") else "torchao-int8"), []


def _modelopt(algo: str, plain: str) -> tuple[str, list[str]]:
    known = {
        "FP8": "fp8",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
        "FP8_PB_WO": "fp8-block",
        "NVFP4": "nvfp4",
        "NVFP4_AWQ": "nvfp4",
        "W4A16_AWQ": "int4-awq",
        "W4A8_AWQ": "int4-awq",
        "INT8_SQ": "int8-w8a8",
        "W8A8_SQ_PER_CHANNEL": "int8-w8a8",
        "MXFP4": "mxfp4",
        "MXFP8": "fp8",
        "W4A16_NVFP4": "nvfp4",
    }
    if algo in known:
        return known[algo], []
    return plain, [
        f"ModelOpt algorithm {algo[:40]!r} is not known here: weights are counted at 16 bit, which is too many"
    ]


def _mixed(q: Fields, plain: str, layers: tuple[Layer, ...]) -> Result:
    """Layer by layer lists of ModelOpt: the most frequent method is the checkpoint's, the rest are exceptions."""
    listed = q.raw.get("quantized_layers")
    if not isinstance(listed, Mapping):
        return plain, (), [f"mixed precision without a list of layers: {_TOO_MANY}"]
    by: dict[str, list[str]] = {}
    for name, row in listed.items():
        algo = str(row.get("quant_algo", "")).upper() if isinstance(row, Mapping) else ""
        by.setdefault(_modelopt(algo, plain)[0], []).append(str(name))
    main = min(by, key=lambda name: precision(name).bits, default=plain)
    rest = "=fp8-block" if q.has("weight_block_size") else ""
    found = [
        e + rest for e in exceptions_of(Ignored([n for names in by.values() for n in names]), layers, inverse=True)
    ]
    for name, names in by.items():
        rules = Ignored(names)
        if name != main:
            found += [f"{e}={name}" for e in exceptions_of(rules, layers)]
        elif rules.matches("lm_head"):
            found.append(f"lm_head={main}")
    return main, tuple(found), []
