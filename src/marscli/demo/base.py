"""The demo's starting point: a tiny Qwen2 model with random weights, and a tokenizer for the language of the problems.

Both are ordinary: the folder loads with `transformers` alone. The tokenizer is of Qwen's own kind, byte-level BPE, so
any text can be encoded; every word of the problems is one token, and so is every number up to a given one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CONTEXT_LENGTH = 256

_MOST_TOKENS = 4096  # far more than the words of the problems need: training ends when each of them is one token
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], *, largest_number: int) -> Qwen2Tokenizer:
    """Train the tokenizer.

    Args:
        texts: What its words are taken from.
        largest_number: Numbers from 0 to this one, with the space before them, are one token each; of larger ones each
            digit is a token or part of one.
    """
    from tokenizers import AddedToken, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # A Qwen2 folder's tokenizer is always read as a Qwen2Tokenizer, which splits and normalises text in its own way:
    # train on what an empty one makes of the texts.
    core = Qwen2Tokenizer(unk_token=PAD, eos_token=END, pad_token=PAD).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=_MOST_TOKENS,
        special_tokens=[PAD, END, MASK, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    model = json.loads(core.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        extra_special_tokens=list(ROLES),
        model_max_length=CONTEXT_LENGTH,
    )
    numbers = [AddedToken(f" {number}", normalized=False, special=False) for number in range(largest_number + 1)]
    tokenizer.add_tokens(numbers)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> Qwen2ForCausalLM:
    """Make the model: random weights, about 150,000 parameters, one embedding row for each token, tied to the head."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


def write_base(directory: Path, texts: Iterable[str], *, largest_number: int, seed: int = 0) -> int:
    """Write model and tokenizer to `directory` as an ordinary checkpoint.

    Args:
        directory: The folder; made if missing.
        texts: See `make_tokenizer`.
        largest_number: See `make_tokenizer`.
        seed: Of the weights.

    Returns:
        The number of parameters.
    """
    from marscli import checkpoint

    tokenizer = make_tokenizer(texts, largest_number=largest_number)
    model = make_model(tokenizer, seed=seed)
    checkpoint.save(directory, model, tokenizer, mars=None)
    return model.num_parameters()
