"""What people type for a GPU, and which catalog entry they mean."""

from __future__ import annotations

import re

from planner.errors import UnknownNameError
from planner.hardware.records import Catalog, Gpu

_NOISE = re.compile(r"nvidia|geforce|tesla|instinct|amd(?![a-z])|google|gpu|\(.*?\)", re.I)


def name_key(name: str) -> str:
    """What two spellings of one GPU share: 'NVIDIA GeForce RTX 4090' and 'rtx_4090' both give 'rtx4090'."""
    return re.sub(r"[^a-z0-9]", "", _NOISE.sub("", name.lower()))


def gpu_names(catalog: Catalog) -> dict[str, str]:
    """Every accepted spelling (as a key of name_key) and the GPU it stands for: name, name with memory, aliases."""
    table: dict[str, str] = {}
    for gpu in catalog.gpus.values():
        for alias in gpu.aliases:
            table.setdefault(name_key(alias), gpu.name)
            table.setdefault(f"{name_key(alias)}{gpu.memory_gb:g}gb", gpu.name)
    for gpu in catalog.gpus.values():
        key = name_key(gpu.name)
        table[key] = gpu.name
        table.setdefault(f"{key}{gpu.memory_gb:g}gb", gpu.name)
        table.setdefault(f"{key}gb", gpu.name)
    return table


def _beginnings(name: str) -> set[str]:
    """Keys of the whole words a name begins with: 'v100-sxm2-16' gives 'v100' and 'v100sxm2'."""
    words = name.split("-")
    return {name_key("".join(words[:n])) for n in range(1, len(words))} - {""}


def find_gpu(name: str, catalog: Catalog) -> Gpu:
    """The GPU that `name` means: its catalog name or an alias, whatever the case, spaces, '-' or '_'.

    Short names with an obvious default resolve to it ('h100' is h100-sxm, 'a100' is a100-sxm-80: their aliases say so);
    others that fit several ('v100') are refused with the candidates. Errors: UnknownNameError with the nearest names.
    """
    if name in catalog.gpus:
        return catalog.gpus[name]
    key = name_key(name[:200])
    table = gpu_names(catalog)
    if key in table:
        return catalog.gpus[table[key]]
    family = sorted(gpu for gpu in catalog.gpus if key in _beginnings(gpu))
    if len(family) == 1:
        return catalog.gpus[family[0]]
    if family:
        raise UnknownNameError("GPU", name, (), f"It could be {', '.join(family[:8])}: name one of them.")
    raise UnknownNameError("GPU", name, catalog.gpus, "`planner catalog list` shows all.")
