"""What is deployed: models by name or config.json, precisions, counts."""

from planner.models.load import load_model
from planner.models.spec import ModelSpec

__all__ = ["ModelSpec", "load_model"]
