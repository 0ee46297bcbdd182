"""From a Hugging Face config.json to a ModelSpec: small readers, one per trait of the architecture."""
