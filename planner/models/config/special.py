"""Layouts that no general rule covers."""

from __future__ import annotations

from planner.models.config.fields import Fields
from planner.models.config.mixers import mixers_of
from planner.models.config.mlps import _says
from planner.models.config.traits import Traits
from planner.models.spec import DenseMlp, Layer, MoeMlp


def nemotron_layers(f: Fields, traits: Traits, kinds: list[str], norms: int) -> tuple[Layer, ...]:
    """Nemotron-H: every block is ONE mixer, one dense feed-forward or one expert feed-forward, with one norm."""
    hidden = f.count("hidden_size")
    names = f.items("layers_block_type") or list(f.text("hybrid_override_pattern"))
    dense = DenseMlp(f.count("intermediate_size"), traits.gated, _says(f, traits.mlp_bias))
    moe = _nemotron_moe(f, hidden) if f.has("n_routed_experts") else None
    made: dict[str, Layer] = {}
    for name, kind in zip(names, kinds, strict=False):
        if name not in made:
            mlp = moe if name in ("E", "moe") else (dense if name in ("-", "mlp") else None)
            made[name] = Layer(mixers_of(f, traits, kind, 0), mlp, norms)
    return tuple(made[n] for n in names[: len(kinds)])


def _nemotron_moe(f: Fields, hidden: int) -> MoeMlp:
    """Experts may work in a latent width: down and up projections around them."""
    experts, width = f.count("n_routed_experts"), f.count("moe_intermediate_size")
    shared = f.count("moe_shared_expert_intermediate_size", default=0, low=0) * f.count("n_shared_experts", default=1, low=0)
    latent = f.optional("moe_latent_size")
    extra = 2 * hidden * latent if latent else 0
    return MoeMlp(experts, f.count("num_experts_per_tok"), width, shared, False, False, experts * hidden + experts, extra, latent)
