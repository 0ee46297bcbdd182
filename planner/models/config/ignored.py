"""Ignore lists of quantised checkpoints, resolved to module classes. Patterns are never run as regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from planner.models.spec import Attention, DenseMlp, LatentAttention, Layer, MoeMlp, StateMixer

_MAX_ENTRIES, _MAX_LENGTH, _MAX_STARS = 400_000, 300, 8
_BESIDE = ("mtp", "visual", "vision", "audio", "mm_projector", "multi_modal_projector")
_ATTENTION = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_b_proj",
    "attention.wo",
    "mixer.q_proj",
    "mixer.o_proj",
    "attn.wq_a",
)
_STATE = (
    "linear_attn.in_proj_qkvz",
    "linear_attn.in_proj_qkv",
    "linear_attn.out_proj",
    "mixer.in_proj",
    "mixer.out_proj",
    "mamba.in_proj",
    "self_attn.k_proj",
)
_DENSE = (
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "feed_forward.w1",
    "mixer.up_proj",
    "mixer.down_proj",
    "ffn.w1",
)
_SHARED = (
    "mlp.shared_experts.up_proj",
    "mlp.shared_expert.up_proj",
    "mlp.shared_experts.down_proj",
    "mixer.shared_experts.up_proj",
    "block_sparse_moe.shared_experts.up_proj",
    "ffn.shared_experts.w1",
)
_EXPERTS = (
    "mlp.experts.0.up_proj",
    "mlp.experts.0.down_proj",
    "mlp.experts",
    "block_sparse_moe.experts.0.w1",
    "mixer.experts.0.up_proj",
    "ffn.experts",
    "ffn.experts.0.w1",
)


def _globs(pattern: str) -> list[str] | None:
    """A simple regular expression as globs ('a|b' groups expanded); None when it is not simple."""
    text = pattern.removeprefix("re:").removeprefix("^").removesuffix("$")
    text = text.replace("\\.", "\0").replace("\\d+", "*").replace(".*", "*").replace(".+", "*").replace("\0", ".")
    group = re.search(r"\((?:\?:)?([A-Za-z0-9_|.*]*)\)", text)
    if group:
        parts = [_globs(text[: group.start()] + option + text[group.end() :]) for option in group[1].split("|")[:20]]
        return None if any(p is None for p in parts) or len(parts) > 20 else [g for p in parts if p for g in p][:200]
    return None if re.search(r"[\\()\[\]{}+?|^$]", text) else [text]


class Ignored:
    """An ignore list. Plain entries match whole path components, globs and simple regular expressions the path."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.odd: list[str] = []
        self.globs: list[str] = []
        self.tails: set[str] = set()
        for entry in entries[:_MAX_ENTRIES]:
            self._add(entry)

    def _add(self, entry: str) -> None:
        if entry.removeprefix("model.").startswith(_BESIDE):
            return
        if len(entry) > _MAX_LENGTH or entry.count("*") > _MAX_STARS:
            self.odd.append(entry[:40])
        elif entry.startswith("re:"):
            found = _globs(entry)
            if found is None:
                self.odd.append(entry[:40])
            else:
                self.globs += [_tail(g) for g in found if g.count("*") <= _MAX_STARS]
        elif "*" in entry:
            self.globs.append(_tail(entry))
        else:
            self.tails.add(_tail(entry))

    def matches(self, path: str) -> bool:
        """True when the list names this module, one of its parents or its kind."""
        parts = path.split(".")
        for i in range(len(parts)):
            for j in range(i + 1, len(parts) + 1):
                if ".".join(parts[i:j]) in self.tails:
                    return True
        return any(fnmatch.fnmatchcase(path, g) or fnmatch.fnmatchcase(path, g + ".*") for g in self.globs)


def _tail(entry: str) -> str:
    """An entry from 'layers.' on, or its last component: what stands before is the wrapper's name."""
    cut = entry.find("layers.")
    return (
        entry[cut:]
        if cut >= 0
        else (entry if "*" in entry else entry.rpartition(".")[2] if entry.endswith("lm_head") else entry)
    )


def _classes(layer: Layer) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for mixer in layer.mixers:
        if isinstance(mixer, Attention | LatentAttention):
            found["attention"] = _ATTENTION
        elif isinstance(mixer, StateMixer):
            found["state"] = _STATE
    if isinstance(layer.mlp, DenseMlp):
        found["dense_mlp"] = _DENSE
    elif isinstance(layer.mlp, MoeMlp):
        found["experts"] = _EXPERTS
        if layer.mlp.shared_intermediate:
            found["shared_experts"] = _SHARED
    return found


def exceptions_of(rules: Ignored, layers: tuple[Layer, ...], inverse: bool = False) -> tuple[str, ...]:
    """Module classes that the list names (inverse: that it does not), with the layers when it is not all of them."""
    hit: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    generic: dict[tuple[str, str], bool] = {}
    numbered = any(ch.isdigit() for t in rules.tails for ch in t) or any(ch.isdigit() for g in rules.globs for ch in g)
    for i, layer in enumerate(layers):
        for name, paths in _classes(layer).items():
            seen[name] = seen.get(name, 0) + 1
            key = (name, str(i) if numbered else "")
            if key not in generic:
                generic[key] = any(rules.matches(f"layers.{i}.{p}") for p in paths)
            if generic[key] != inverse:
                hit.setdefault(name, []).append(i)
    found = [name if len(where) == seen[name] else f"{name}@{_ranges(where)}" for name, where in hit.items()]
    if (rules.matches("lm_head") or rules.matches("head")) != inverse:
        found.append("lm_head")
    return tuple(found)


def _ranges(numbers: list[int]) -> str:
    """'0-2,5' of [0, 1, 2, 5]."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
