"""A tiny chat model on disk: byte-level tokenizer with a chat template, random weights. For data and training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE, merges: tuple[tuple[str, str], ...] = (), **special: Any) -> Any:
    """A token for every byte, the special tokens, and one for each merge; padding equals the end-of-sequence token."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def make_model(architecture: str = "qwen2", *, seed: int = 0, **changes: Any) -> Any:
    """Random float32 weights; 272 embedding rows, some more than the tokenizer uses."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        **changes,
    }
    if architecture == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
    return model.float()


def save_model(folder: Path, model: Any = None, tokenizer: Any = None) -> Path:
    """Write a checkpoint as users have it and return its folder."""
    (model if model is not None else make_model()).save_pretrained(folder)
    (tokenizer if tokenizer is not None else make_tokenizer()).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(count: int) -> list[dict[str, str]]:
    """Rows of unequal lengths."""
    return [
        {"question": f"{n} + {n * 7}?", "answer": f"{n} and {n * 7} make " + f"{n * 8}, " * (1 + n % 4) + "so it is."}
        for n in range(1, count + 1)
    ]
