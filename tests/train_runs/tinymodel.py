"""A tiny random Llama with a tokenizer and a small text, made on the spot: python -m tests.train_runs.tinymodel DIR."""

from __future__ import annotations

import sys
from pathlib import Path

SENTENCE = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun"


def make(folder: Path, layers: int = 4) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [SENTENCE], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=256)
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = SENTENCE.split()
    lines = [" ".join(words[(i + j) % len(words)] for j in range(30)) for i in range(400)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
