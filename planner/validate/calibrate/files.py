"""The catalog folder of a measured machine: gpus.yaml, links.yaml, kernels/<name>.csv, README.md; whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import __version__
from planner.clock import today
from planner.errors import InvalidValueError
from planner.estimator.time.surfaces import LENT
from planner.units import GB, GIB, TERA
from planner.validate.calibrate.grid import Point, filled, lines
from planner.validate.calibrate.group import link_of
from planner.validate.calibrate.machine import Machine

LEAST_BUSY = 0.9
HEADER = "Made by planner calibrate"


@dataclass(frozen=True)
class Measured:
    """The result of a measurement. collectives: (message bytes, seconds) by name, empty for one device.

    busy: share of its core that a process of one thread got while kernels were measured, None where nobody can tell.
    """

    memory_bytes_per_s: float
    host_bytes_per_s: float
    flops: dict[str, float]
    constants: dict[str, float]
    points: dict[str, list[Point]]
    collectives: dict[str, list[tuple[float, float]]]
    busy: float | None = None

    @property
    def disturbed(self) -> str:
        """A sentence when other programs took the cores; '' when they did not."""
        if self.busy is None or self.busy >= LEAST_BUSY:
            return ""
        return f"other programs took {1 - self.busy:.0%} of the cores during the measurement: measure again on a quiet machine"


def kernel_text(points: dict[str, list[Point]], lender: str, about: str) -> str:
    """kernels/<name>.csv. Experts were not measured: their rows are those of the surface `lender`."""
    rows = [f"# {line}" for line in about.splitlines()]
    for kernel, found in points.items():
        rows.append(f"# {kernel}: {len(found)} points measured, the others filled from their nearest neighbours")
        rows += lines(kernel, "bf16", filled(kernel, found))
    rows += ["# experts: not measured, the grouped products of another GPU stand in", f"{LENT}{lender}"]
    return "\n".join(rows) + "\n"


def source(machine: Machine) -> str:
    """Where the figures come from, in one line."""
    return f"measured by planner {__version__} on {machine.model}, {machine.software}, {today().isoformat()}"


def _gpu(name: str, machine: Machine, m: Measured, link: str) -> dict[str, Any]:
    known = machine.known
    usable, label = machine.usable_bytes / GIB, machine.memory_bytes / GB
    peaks = {"fp32": m.flops["fp32"] / TERA, "bf16": m.flops["bf16"] / TERA}
    row: dict[str, Any] = {
        "vendor": machine.vendor,
        "architecture": known.architecture if known else "cpu" if machine.device == "cpu" else "unknown",
        "memory_gb": round(max(known.memory_gb if known else 0.0, label), 2),
        "usable_gib": round(usable, 2),
        "bandwidth_gb_per_s": known.bandwidth_gb_per_s if known else _short(m.memory_bytes_per_s / GB),
        "pcie_gen": known.pcie_gen if known else 4,
        "peak_tflops": dict(known.peak_tflops) if known else {k: _short(v) for k, v in peaks.items()},
        "default_link": link,
        "measured": {k: _short(v) for k, v in sorted(_constants(m).items())},
        "source": source(machine),
    }
    if machine.device == "cpu":
        row["cpu_threads"] = machine.threads
        caveats = [f"one of {machine.devices} equal shares of the machine's cores and memory", m.disturbed]
        row["caveat"] = "; ".join(filter(None, caveats))
    else:
        row["compute_capability"], row["tdp_w"] = machine.compute_capability, known.tdp_w if known else None
    return {name: {k: v for k, v in row.items() if v is not None}}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _constants(m: Measured) -> dict[str, float]:
    """Constants of the device: of its kernels and layers, and the host link."""
    return dict(m.constants) | {"host_link_gb_per_s": m.host_bytes_per_s / GB}


def _link(name: str, machine: Machine, m: Measured) -> dict[str, Any]:
    values = link_of(m.collectives, machine.devices)
    rate = _short(values["busbw_gb_per_s"])
    return {
        name: {
            "kind": "process-group" if machine.device == "cpu" else "pcie-p2p",
            "bandwidth_gb_per_s": rate,
            "measured_busbw_gb_per_s": rate,
            "latency_us": _short(values["latency_us"]),
            "all_reduce_factor": _short(values["all_reduce_factor"]),
            "reduce_scatter_factor": _short(values["reduce_scatter_factor"]),
            "max_gpus": machine.devices,
            "verified": True,
            "source": source(machine),
        }
    }


def catalog_files(name: str, machine: Machine, m: Measured, lender: str) -> dict[str, str]:
    """Texts by file name."""
    import yaml

    def dump(tree: dict[str, Any]) -> str:
        return f"# {HEADER}. Fields: hardware_catalog/SCHEMA.md\n" + yaml.safe_dump(tree, sort_keys=False, width=110)

    own_link = f"{name}-link"
    fallback = machine.known.default_link if machine.known else "none" if machine.device == "cpu" else "pcie4-host"
    texts = {"gpus.yaml": dump(_gpu(name, machine, m, own_link if m.collectives else fallback))}
    if m.collectives:
        texts["links.yaml"] = dump(_link(own_link, machine, m))
    texts[f"kernels/{name}.csv"] = kernel_text(m.points, lender, f"{HEADER}: {source(machine)}\n{_COLUMNS}")
    return texts


_COLUMNS = "kernel,dtype,row axes...,then roofline time / measured time along the last axis; axes: hardware_catalog/kernels/axes.yaml"


def check_target(out: Path) -> None:
    """Refuse a folder that holds anything else or cannot be written, before minutes are spent on measuring."""
    try:
        if out.exists() and not out.is_dir():
            raise InvalidValueError(f"{str(out)!r} is not a folder", "", "Choose another --out.")
        _try_writing(out)
        if not out.exists() or not any(out.iterdir()):
            return
    except OSError as error:
        raise _cannot_write(out, error) from None
    try:
        ours = HEADER in (out / "gpus.yaml").read_text("utf-8", errors="replace")[:200]
    except OSError:
        ours = False
    if not ours:
        raise InvalidValueError(
            f"{str(out)!r} is not empty", "it was not written by planner calibrate", "Choose another --out."
        )


def _try_writing(out: Path) -> None:
    """A folder made where `write` makes its own, and removed again: in the nearest folder above that exists."""
    place = next(p for p in out.absolute().parents if p.exists())
    Path(tempfile.mkdtemp(dir=place, prefix=f".{out.name}.")).rmdir()


def _cannot_write(out: Path, error: OSError) -> InvalidValueError:
    return InvalidValueError(f"cannot write {str(out)!r}", error.strerror or "", "Choose another --out.")


def write(out: Path, texts: dict[str, str]) -> list[Path]:
    """Write the folder beside its place and move it there; an earlier measurement is replaced as a whole."""
    check_target(out)
    fresh = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        for name, text in texts.items():
            (fresh / name).parent.mkdir(exist_ok=True)
            (fresh / name).write_text(text, encoding="utf-8")
        fresh.chmod(0o755)
        old = None
        if out.exists():
            old = fresh.with_name(fresh.name + ".old")
            os.replace(out, old)
        os.replace(fresh, out)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise _cannot_write(out, error) from None
    finally:
        if fresh is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(fresh, ignore_errors=True)
    return [out / name for name in texts]
