"""Make hardware_catalog/kernels/*.csv from the measured kernel latencies of the PyPI package aiconfigurator-core.

Run:  pip install pyarrow numpy pyyaml packaging aiconfigurator-core==0.12.0
      python scripts/fit_kernels.py [--package DIR] [--out hardware_catalog/kernels]

A surface holds roofline time / measured time at the grid points of axes.yaml. Where several frameworks measured the same
kernel the fastest is taken. Attention was measured on its grid: points off it are held back. Matrix products were measured at any shape: the
grid is fitted to four points of five (kernel_grids.py), the fifth is held back. The errors on points held back are written into fit_error.yaml.
"""

from __future__ import annotations

import argparse
import glob
import os
from collections import defaultdict

import numpy as np
import pyarrow.parquet as pq
import yaml
from kernel_grids import error, fill, fitted, inside, is_held_back, nearest, off_grid
from packaging.version import Version

SYSTEMS = {  # folder of the package -> surface name
    "a100_sxm": "a100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
GEMM_DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}
MOE_DTYPES = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "fp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
    "int4_wo": "int4",
}
AXES = {
    "gemm": {"n": [256, 512, 1024, 2048, 4096, 8192, 16384, 65536], "k": [256, 512, 1024, 2048, 4096, 8192, 16384, 51200],
             "m": [1, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192]},
    "gemm_powers": {"n": [256, 512, 1024, 2048, 4096, 8192, 16384, 65536], "k": [256, 512, 1024, 2048, 4096, 8192, 16384, 51200],
                    "m": [1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]},
    "decode_attention": {"sequences_x_kv_heads": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048],
                         "context": [128, 512, 1024, 2048, 4096, 8192, 16384, 32768]},
    "prefill_attention": {"sequences_x_heads": [4, 8, 16, 32, 64, 128, 256], "tokens": [128, 256, 512, 1024, 2048, 4096, 8192, 16384]},
}  # fmt: skip
EXPERT_AXES = {"width": [128, 512, 2048, 8192], "touched_mb": [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096],
               "tokens_per_expert": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]}  # fmt: skip
EXPERT_TOKENS = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
FAMILIES = ("vllm", "sglang", "trtllm")  # whose kernels were measured: they differ by up to a factor of two
LINKS = {
    "a100": "nvswitch-nvlink3",
    "h100": "nvswitch-nvlink4",
    "h200": "nvswitch-nvlink4",
    "b200": "nvswitch-nvlink5",
    "b300": "nvswitch-nvlink5",
    "gb200": "nvlink5-nvl72",
}  # what joined the GPUs of the all-reduces (hardware_catalog/links.yaml)
MESSAGES = [2**x for x in range(10, 30)]  # bytes; the package counts elements of 16 bit
TILE = 64  # rows; planner/estimator/time/kernels.yaml has the same
STREAMING = 0.92  # share of the bandwidth that decode attention reaches on long caches (H100, H200, B200: 0.88 to 0.92)
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625, "mxfp4": 0.53125, "int4": 0.5625}
ACTIVATION_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625, "mxfp4": 2.0, "int4": 2.0}
PEAK_KEY = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "fp4": "fp4", "mxfp4": "bf16", "int4": "bf16"}


def peaks(package: str, system: str) -> dict[str, float]:
    """Dense peaks and bandwidth of a system, as the package states them."""
    with open(f"{package}/systems/{system}.yaml") as handle:
        gpu = yaml.safe_load(handle)["gpu"]
    found = {"bf16": gpu["bfloat16_tc_flops"], "bandwidth": gpu["mem_bw"]}
    for key, field in (("fp8", "fp8_tc_flops"), ("fp4", "fp4_tc_flops")):
        if gpu.get(field):
            found[key] = gpu[field]
    return found


def tables(package: str, system: str, folder: str, file: str) -> list[tuple[str, dict]]:
    """Every table of a kernel: frameworks and versions."""
    found = []
    for path in sorted(glob.glob(f"{package}/systems/data/{system}/{folder}/*/*/{file}")):
        table = pq.read_table(path)
        columns = table.to_pydict()
        columns.setdefault("window_size", [0] * table.num_rows)
        found.append((path, columns))
    return found


def gemm_points(package: str, system: str, peak: dict[str, float]) -> dict:
    """Efficiency by (n, k, rows) and dtype. Above 64 kernels work in tiles of 64 rows: m counts as the rows it fills, their geometric mean where
    several were measured."""
    best: dict = defaultdict(dict)
    for path, d in tables(package, system, "gemm", "gemm_perf.parquet"):
        for dt, m, n, k, ms in zip(d["gemm_dtype"], d["m"], d["n"], d["k"], d["latency"], strict=True):
            if dt in GEMM_DTYPES and ms > 0:
                key = (GEMM_DTYPES[dt], n, k, m)
                best[key][path] = min(best[key].get(path, 1e9), ms * 1e-3)
    found: dict = defaultdict(lambda: defaultdict(list))
    for (dt, n, k, m), times in best.items():
        w, a = BYTES[dt], ACTIVATION_BYTES[dt]
        rows = m if m <= TILE else -(-m // TILE) * TILE
        roof = max(2 * rows * n * k / peak[PEAK_KEY[dt]], (w * n * k + a * rows * k + 2 * rows * n) / peak["bandwidth"])
        found[dt][n, k, rows].append(min(roof / min(times.values()), 1.0))
    return {dt: {at: float(np.exp(np.mean(np.log(v)))) for at, v in points.items()} for dt, points in found.items()}


def decode_points(package: str, system: str, peak: dict[str, float]) -> dict[str, dict]:
    """Efficiency by (sequences x KV heads, context) and cache dtype, for each family of kernels (newest version; a family nobody measured takes
    the fastest of the others), head width 128, 2 to 8 query heads on a KV head. What is faster than the best kernels read a large cache
    (STREAMING) found its data in the L2 cache, or was not measured right: it counts as those."""
    times: dict = defaultdict(lambda: defaultdict(list))
    for path, d in tables(package, system, "attention", "generation_attention_perf.parquet"):
        family, version = path.split("/")[-3:-1]
        for b, h, kv, hd, dt, step, win, ms in zip(d["batch_size"], d["num_heads"], d["num_key_value_heads"], d["head_dim"],
                                                   d["kv_cache_dtype"], d["step"], d["window_size"], d["latency"], strict=True):  # fmt: skip
            groups = kv or h
            if win == 0 and hd == 128 and dt in GEMM_DTYPES and 2 <= h // groups <= 8 and ms > 0:
                times[GEMM_DTYPES[dt], b * groups, step + 1][family, Version(version)].append(ms * 1e-3)
    newest = {f: max(v for kernels in times.values() for of, v in kernels if of == f) for f in FAMILIES
              if any(of == f for kernels in times.values() for of, _ in kernels)}  # fmt: skip
    found: dict = {family: {} for family in FAMILIES}
    for (dt, work, ctx), kernels in times.items():
        roof = 2 * 128 * BYTES[dt] * work * ctx / peak["bandwidth"]
        seconds = {f: float(np.median(kernels[f, v])) for f, v in newest.items() if (f, v) in kernels}
        for family in FAMILIES:
            own = seconds.get(family) if family in newest else min(seconds.values(), default=None)
            if own:
                found[family].setdefault(dt, {})[work, ctx] = min(roof / own, STREAMING)
    return found


def prefill_points(package: str, system: str, peak: dict[str, float]) -> dict:
    """Efficiency by (sequences x heads, tokens), causal, head width 128; roofline of the full square halved."""
    best: dict = defaultdict(lambda: defaultdict(list))
    for path, d in tables(package, system, "attention", "context_attention_perf.parquet"):
        for b, s, h, kv, hd, dt, win, ms in zip(d["batch_size"], d["isl"], d["num_heads"], d["num_key_value_heads"], d["head_dim"],
                                                d["kv_cache_dtype"], d["window_size"], d["latency"], strict=True):  # fmt: skip
            if win == 0 and hd == 128 and dt == "bfloat16" and (kv == 0 or h // kv in (4, 8, 16)) and ms > 0:
                best["bf16", b * h, s][path].append(ms * 1e-3)
    found: dict = {}
    for (dt, work, s), by_path in best.items():
        roof = 2 * 128 * work * float(s) * s / peak["bf16"]
        found.setdefault(dt, {})[work, s] = roof / min(float(np.median(v)) for v in by_path.values())
    return found


def expert_times(package: str, system: str, peak: dict[str, float]) -> dict[tuple, float]:
    """Seconds by (family, dtype, tokens, hidden, width on a rank, top, experts), the fastest version and activation type of each family.

    Routing is the skewed kind (power law, exponents 1.01 and 1.2), counted by the uniform formula as moe_s does. Measurements with
    expert parallelism are left out: they time the busiest rank of that skew, and moe_s has its imbalance apart.
    """
    best: dict = {}
    for path, d in tables(package, system, "moe", "moe_perf.parquet"):
        family, version = path.split("/")[-3:-1]
        for dt, m, h, inter, top, experts, tp, ep, dist, ms in zip(
            d["moe_dtype"], d["num_tokens"], d["hidden_size"], d["inter_size"], d["topk"], d["num_experts"], d["moe_tp_size"],
            d["moe_ep_size"], d["distribution"], d["latency"], strict=True):  # fmt: skip
            name = MOE_DTYPES.get(dt)
            known = name is not None and PEAK_KEY[name] in peak and family in FAMILIES
            if known and dist.startswith("power_law") and ms > 0 and inter // tp >= 64 and ep == 1:
                key = (family, name, m, h, inter // tp, top, experts)
                best.setdefault(key, {}).setdefault((version, dt), []).append(ms * 1e-3)
    old, found = outdated(best), {}
    for (family, name, *shape), times in best.items():
        seconds = [float(np.mean(t)) for kernel, t in times.items() if (family, name, kernel) not in old]
        if seconds:
            found[family, name, *shape] = min(seconds)
    return found


def expert_shapes(times: dict[tuple, float], peak: dict[str, float]) -> list[tuple[tuple, float, tuple, int]]:
    """((family, dtype, width, touched MB, tokens per expert), efficiency, (hidden, width, top, experts), tokens) of every measured shape."""
    found = []
    for (family, name, m, h, width, top, experts), seconds in times.items():
        touched = experts * (1 - (1 - top / experts) ** m)
        pairs = m * top
        weight = 3 * h * width * BYTES[name] * touched
        acts = pairs * ((h + width) * ACTIVATION_BYTES[name] + (2 * width + h) * 2)
        roof = max(6 * pairs * h * width / peak[PEAK_KEY[name]], (weight + acts) / peak["bandwidth"])
        values = zip(EXPERT_AXES.values(), (width, weight / 1e6, pairs / touched), strict=True)
        cell = tuple(nearest(axis, x) for axis, x in values)
        found.append(((family, name, *cell), roof / seconds, (h, width, top, experts), m))
    return found


def expert_lines(shapes: list) -> list[str]:
    """One line for each measured shape: family, dtype, hidden, width, top, experts, then the efficiency by tokens; between two measured
    numbers of tokens linear in the logarithms, at the ends as the last one."""
    curves: dict = defaultdict(dict)
    for (family, dtype, *_), efficiency, shape, tokens in shapes:
        curves[family, dtype, *shape][tokens] = efficiency
    lines = []
    for key, curve in sorted(curves.items()):
        known = sorted(curve)
        if len(known) >= 8:
            values = np.exp2(np.interp(np.log2(EXPERT_TOKENS), np.log2(known), np.log2([curve[m] for m in known])))
            lines.append(",".join([*map(str, key), *(f"{v:.2g}" for v in values)]))
    return lines


def outdated(best: dict) -> set[tuple]:
    """(family, dtype, (version, activation type)) whose kernels are over 1.3 times slower on the median shape than another's of that dtype that ran
    both (a version before the kernels that its successors run), or than the family's own 16-bit ones (no tuned kernel behind that dtype)."""
    ratios: dict = defaultdict(list)
    for (family, name, *shape), times in best.items():
        fastest = min(float(np.mean(t)) for t in times.values())
        plain = best.get((family, "bf16", *shape), {}) if BYTES[name] == 1.0 else {}
        whole = min((float(np.mean(t)) for t in plain.values()), default=0.0)
        for kernel, t in times.items():
            if len(times) > 1:
                ratios[family, name, kernel, "others"].append(float(np.mean(t)) / fastest)
            if whole:
                ratios[family, name, kernel, "16 bit"].append(float(np.mean(t)) / whole)
    return {key[:3] for key, values in ratios.items() if float(np.median(values)) > 1.3}


def expert_points(shapes: list) -> dict:
    """Median efficiency by (family, dtype) and cell. A dtype that a family was not measured in takes what the others reach."""
    cells: dict = defaultdict(lambda: defaultdict(list))
    for (family, dtype, *cell), efficiency, _, _ in shapes:
        cells[family, dtype][tuple(cell)].append(efficiency)
        cells["", dtype][tuple(cell)].append(efficiency)
    found = {}
    for dtype in {d for _, d in cells}:
        for family in FAMILIES:
            source = cells[family, dtype] if (family, dtype) in cells else cells["", dtype]
            found[family, dtype] = {cell: float(np.median(v)) for cell, v in source.items()}
    return found


def expert_error(shapes: list) -> dict:
    """[measured, held back, median, 90th percentile] of |fitted / measured time - 1| by (family, dtype), each model's shapes held back in turn."""
    cells: dict = defaultdict(lambda: defaultdict(list))
    for key, efficiency, (hidden, _, top, experts), _ in shapes:
        cells[key][hidden, experts, top].append(efficiency)
    off: dict = defaultdict(list)
    count: dict = defaultdict(int)
    for key, models in cells.items():
        for model, values in models.items():
            count[key[:2]] += len(values)
            others = [v for other, vs in models.items() if other != model for v in vs]
            if others:
                off[key[:2]] += [abs(v / float(np.median(others)) - 1) for v in values]
    return {
        key: [count[key], len(v), round(float(np.median(v)), 3), round(float(np.percentile(v, 90)), 3)]
        for key, v in off.items()
    }


def all_reduce_rows(package: str, system: str) -> dict[int, list[float]]:
    """Microseconds by message for each number of ranks, the faster of the newest versions of vLLM and TensorRT-LLM inside a CUDA graph."""
    seen: dict = defaultdict(dict)
    for path, d in tables(package, system, "comm", "custom_allreduce_perf.parquet"):
        family, version = path.split("/")[-3:-1]
        kinds = d.get("backend") or d.get("implementation") or d["kernel_source"]
        points = zip(kinds, d["allreduce_dtype"], d["num_gpus"], d["message_size"], d["latency"], strict=True)
        for kind, dtype, ranks, message, ms in points:
            if family in ("vllm", "trtllm") and dtype in ("bfloat16", "half", "float16") and not kind.endswith("eager"):
                seen[family].setdefault(Version(version), {})[ranks, 2 * message] = ms * 1e3
    newest = [versions[max(versions)] for versions in seen.values()]
    return {
        ranks: [min(v[ranks, m] for v in newest if (ranks, m) in v) for m in MESSAGES]
        for ranks in sorted({r for v in newest for r, _ in v})
    }


def streaming(package: str, system: str, peak: dict[str, float]) -> dict[str, float]:
    """Floor and rate of kernels that only move data, from the quantisation of activations (16 bit in, 8 bit out), the fastest framework."""
    best: dict = {}
    for _, d in tables(package, system, "quantize", "scale_matrix_perf.parquet"):
        for m, k, ms in zip(d["m"], d["k"], d["latency"], strict=True):
            if ms > 0:
                best[m, k] = min(best.get((m, k), 1e9), ms * 1e-3)
    if not best:
        return {}
    small = [t for (m, k), t in best.items() if m <= 16 and 2048 <= k <= 8192]
    large = [3.0 * m * k / t / peak["bandwidth"] for (m, k), t in best.items() if m >= 8192 and k >= 8192]
    return {
        "streaming_floor_us": round(float(np.median(small)) * 1e6, 2),
        "streaming_efficiency": round(float(np.median(large)), 2),
    }


def write_surfaces(path: str, surfaces: list[tuple[str, str, np.ndarray, list[list[int]]]]) -> None:
    """One CSV file of surfaces."""
    with open(path, "w") as out:
        out.write(
            "# kernel,dtype,row axes...,then roofline time / measured time along the last axis; axes in axes.yaml\n"
        )
        for kernel, dtype, grid, axes in surfaces:
            for index in np.ndindex(*grid.shape[:-1]):
                head = [kernel, dtype, *(str(axes[d][i]) for d, i in enumerate(index))]
                out.write(",".join(head + [f"{v:.2g}" for v in grid[index]]) + "\n")


def write_curves(path: str, about: str, labels: str, points: list[int], rows: list[str]) -> None:
    """One CSV file of labelled curves over `points`."""
    with open(path, "w") as out:
        out.write("\n".join([f"# {about}", ",".join([labels, *map(str, points)]), *rows]) + "\n")


def write_yaml(path: str, about: str, data: dict, sort: bool = False) -> None:
    """One YAML file that says where it comes from."""
    with open(path, "w") as out:
        out.write(f"# Made by scripts/fit_kernels.py: {about}.\n")
        yaml.safe_dump(data, out, sort_keys=sort)


def fit_dense(package: str, system: str, path: str, peak: dict[str, float]) -> dict[str, list]:
    """Write the surfaces of matrix products and attention; their errors by kernel and dtype."""
    products = gemm_points(package, system, peak)
    powers = {
        dt: {at: v for at, v in points.items() if at[2] & (at[2] - 1) == 0}
        for dt, points in products.items()
        if dt != "fp8_block"  # not of training here
    }
    made = {"gemm": products, "gemm_powers": powers, "prefill_attention": prefill_points(package, system, peak)}
    made |= {f"decode_attention_{f}": by_dtype for f, by_dtype in decode_points(package, system, peak).items()}
    found, errors = [], {}
    for kernel, by_dtype in made.items():
        axes = list(AXES["decode_attention" if kernel.startswith("decode_attention") else kernel].values())
        for dtype, points in by_dtype.items():
            if kernel.startswith("gemm"):
                within = inside(points, axes)
                held = {at: value for at, value in within.items() if is_held_back(at)}
                grid = fitted({at: value for at, value in within.items() if at not in held}, axes)
            else:
                held, grid = off_grid(points, axes), fill(points, axes)
            found.append((kernel, dtype, grid, axes))
            errors[f"{kernel} {dtype}"] = [len(points), *error(held, grid, axes)]
    write_surfaces(path, found)
    return errors


def fit_experts(package: str, system: str, path: str, peak: dict[str, float]) -> dict[str, list]:
    """Write the surfaces and the measured shapes of experts; errors of the surfaces by family and dtype."""
    shapes, axes = expert_shapes(expert_times(package, system, peak), peak), list(EXPERT_AXES.values())
    labels = "family,dtype,hidden,width,top,experts"
    write_curves(
        f"{path}-expert-shapes.csv",
        "roofline time / measured time by tokens",
        labels,
        EXPERT_TOKENS,
        expert_lines(shapes),
    )
    surfaces = sorted(expert_points(shapes).items())
    write_surfaces(
        f"{path}-experts.csv", [(f"moe_{family}", dtype, fill(p, axes), axes) for (family, dtype), p in surfaces]
    )
    return {f"moe_{family} {dtype}": row for (family, dtype), row in sorted(expert_error(shapes).items())}


def main() -> None:
    """All systems, all kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default=None, help="folder of aiconfigurator_core (default: the installed one)")
    parser.add_argument("--out", default="hardware_catalog/kernels")
    args = parser.parse_args()
    if args.package is None:
        import aiconfigurator_core

        args.package = os.path.dirname(aiconfigurator_core.__file__)
    errors, reduces, floors = {}, [], {}
    for system, name in SYSTEMS.items():
        peak, path = peaks(args.package, system), f"{args.out}/{name}"
        errors[name] = fit_dense(args.package, system, f"{path}.csv", peak) | fit_experts(
            args.package, system, path, peak
        )
        for kernel, row in errors[name].items():
            print(f"{name:14} {kernel:28} measured, held back, median, p90: {row}", flush=True)
        if moved := streaming(args.package, system, peak):
            floors[name] = moved
        for ranks, us in all_reduce_rows(args.package, system).items() if name in LINKS else ():
            reduces.append(",".join([name, LINKS[name], str(ranks), *(f"{v:.3g}" for v in us)]))
    write_curves(
        f"{args.out}/all-reduce.csv",
        "microseconds by message (bytes of the result)",
        "surface,link,ranks",
        MESSAGES,
        reduces,
    )
    about = "[points measured, points held back, median, 90th percentile of |fitted/measured time - 1|]"
    write_yaml(f"{args.out}/fit_error.yaml", about, errors, sort=True)
    about = "kernels that only move data, by surface; they take the place of kernels.yaml's constants"
    write_yaml(f"{args.out}/streaming.yaml", about, floors)
    about = "grid of each surface; the last axis runs along a line of the CSV files"
    shared = {f"decode_attention_{family}": AXES["decode_attention"] for family in FAMILIES}
    shared |= {f"moe_{family}": EXPERT_AXES for family in FAMILIES}
    write_yaml(f"{args.out}/axes.yaml", about, {**AXES, **shared})


if __name__ == "__main__":
    main()
