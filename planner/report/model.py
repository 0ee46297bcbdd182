"""Printing of models: `planner model show` and `planner model list`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from planner.units import GB, GIB


def _count(value: float) -> str:
    return f"{value / 1e9:.3f}B" if value >= 1e9 else f"{value / 1e6:.1f}M"


def print_json(found: Any) -> None:
    """Any facts as JSON."""
    print(json.dumps(found, indent=2))


def print_model(found: dict[str, Any]) -> None:
    """One model, part by part."""
    print(f"{found['name']}  ({found['hf_id'] or found['family']})")
    print(f"  source: {found['source'] or 'the given config'}")
    for note in found["assumptions"]:
        print(f"  assumed: {note}")
    print(
        f"  parameters: {_count(found['params_total'])} in all ({found['params_total']:,}), "
        f"{_count(found['params_active'])} per token, embedding {_count(found['params_embedding'])}"
        f"{', tied to the head' if found['tied_embeddings'] else ', head ' + _count(found['params_lm_head'])}"
    )
    print(f"  width {found['hidden']:,}, vocabulary {found['vocab']:,}, context {found['max_context']:,} tokens")
    print(f"  {found['layers']} layers:")
    for kind in found["layer_kinds"]:
        print(f"    {kind['count']:3d} x {_count(kind['params']):>9}  {kind['words']}")
    for tower in found["beside_the_decoder"]:
        idle = "" if tower["loaded"] else " (not loaded for plain serving)"
        print(f"    beside: {tower['name']} {_count(tower['params'])}{idle}")
    _print_bytes(found)
    print("  operations:")
    for context, gflops in found["gflops_per_token"].items():
        prefill = found["prefill_tflops"][context]
        print(
            f"    at {int(context):,} tokens: {gflops:,.1f} GFLOP for the next token, {prefill:,.1f} TFLOP to read them"
        )
    for line in found["parallel"]:
        print(f"  {line}")


def _print_bytes(found: dict[str, Any]) -> None:
    native = found["native_precision"]
    left = f" (other: {', '.join(found['not_in_that_precision'])})" if found["not_in_that_precision"] else ""
    print(f"  checkpoint: {native}{left}")
    if found["checkpoint_bytes"]:
        size, difference = found["checkpoint_bytes"] / GB, found["counted_against_files_percent"]
        print(f"    its files hold {size:.2f} GB; the count from the config differs by {difference:+.2f}%")
    for row in found["weights"]:
        mark = " <- as published" if row["precision"] == native else ""
        print(
            f"    {row['precision']:<12} {row['bytes'] / GIB:9.2f} GiB ({row['bytes_per_param']:.2f} B a weight){mark}"
        )
    for row in found["kv_cache"]:
        print(
            f"  cache in {row['dtype']}: {row['bytes_per_token']:,.0f} bytes a token on one GPU; "
            f"{row['tokens']:,} tokens take {row['sequence_bytes'] / GIB:.3f} GiB in {row['engine']}"
        )
    if found["state_bytes_per_sequence"]:
        print(f"  fixed state: {found['state_bytes_per_sequence'] / 2**20:.1f} MiB a sequence")


def print_list(rows: Sequence[dict[str, Any]]) -> None:
    """All known models, one a line."""
    for row in rows:
        aliases = ", ".join(row["aliases"])
        print(f"{row['id']:<52} {_count(row['params']):>9}  {aliases}")
    print(
        f"{len(rows)} models; repositories of the same shape resolve to these, and any config.json or hub id is read."
    )
