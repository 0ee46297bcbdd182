"""Exact bytes of a checkpoint from its safetensors index or headers, without reading the weights."""

from __future__ import annotations

import struct
from pathlib import Path

from planner.errors import ModelConfigError

_MAX_HEADER = 100 * 2**20


def checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of all tensors of a folder: from *.safetensors headers, else the index; None when neither is there."""
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return sum(header_bytes(path) for path in found)
    index = folder / "model.safetensors.index.json"
    return index_bytes(index) if index.is_file() else None


def index_bytes(index: Path) -> int | None:
    """metadata.total_size of a safetensors index file."""
    return index_total(index.read_bytes(), str(index))


def index_total(content: bytes, name: str) -> int | None:
    """metadata.total_size of the content of a safetensors index; None when it states none."""
    from planner.models.load import parse_json

    raw = parse_json(content, name)
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**60 else None


def header_bytes(path: Path) -> int:
    """Bytes of the tensors that a safetensors file declares (8-byte length, then JSON with data_offsets)."""
    from planner.models.load import parse_json

    with path.open("rb") as stream:
        raw = stream.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        if not 2 <= length <= _MAX_HEADER:
            raise ModelConfigError(f"{path} has no valid safetensors header", "", "Download the file again.")
        header = parse_json(stream.read(length), str(path))
    try:
        return max((int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"), default=0)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        raise ModelConfigError(f"{path} has no valid safetensors header", "", "Download the file again.") from None
