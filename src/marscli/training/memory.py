"""How much memory a training step needs, estimated from the model's config alone.

With P weights of which P' are trained, L layers, hidden size h, query width q, key and value width k, MLP width f,
vocabulary V, and a forward of N entries in rows of T, in bytes (e = 4, or 2 under bfloat16 autocast):

    weights        4 P, and under autocast their bfloat16 copies 2 P
    gradients      4 P'
    optimizer      8 P'                                          AdamW's two averages
    activations    N L (2 (4 h + e h) + e (4 q + 4 k + 3 h + 4 f))
    mask           N T
    logits         3 · 4 · rows · V                              at most a chunk's rows at a time

The activations are what one layer keeps for its backward pass: two norms in float32 and their outputs, queries and keys
before and after rotation with values as attention takes them, attention's output, and the MLP's gate, its activation,
its up projection and their product. With activation checkpointing a layer keeps its input alone, e h, and one layer
at a time the rest. What the allocator and the libraries take beside it is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marscli.training.config import TrainConfig

LOGIT_ROWS = 1024


def count_weights(model_config: Any, *, trust_remote_code: bool = False) -> int:
    """Number of weights of a model, without any of them: a tied head counts once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    return model.num_parameters()


def estimate_memory(
    config: TrainConfig,
    model_config: Any,
    *,
    weights: int,
    trained: int,
    rows: int,
    entries: int,
    half: bool,
) -> dict[str, int]:
    """Bytes by kind, and their ``total``, for one device of a run that shards nothing.

    Args:
        config: The run.
        model_config: The model's config.
        weights: P.
        trained: P'.
        rows: Rows of a forward.
        entries: T, entries of its longest row.
        half: Whether bfloat16 autocast is on.
    """
    text = model_config.get_text_config()
    size = 2 if half else 4
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    h, q, k = text.hidden_size, heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
    f = text.intermediate_size
    layer = 2 * (4 * h + size * h) + size * (4 * q + 4 * k + 3 * h + 4 * f)
    layers = text.num_hidden_layers
    kept = layer * layers if not config.activation_checkpointing else size * h * layers + layer
    number = rows * entries
    estimate = {
        "weights": weights * (4 + (2 if half else 0)),
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "activations": number * kept + number * entries,
        "logits": 12 * min(number, LOGIT_ROWS) * text.vocab_size,
    }
    return {**estimate, "total": sum(estimate.values())}


def lora_weights(model_config: Any, rank: int) -> int:
    """Weights of adapters on all linear layers, and of one embedding row."""
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    h, q, k = text.hidden_size, heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
    f = text.intermediate_size
    shapes: Mapping[str, tuple[int, int]] = {
        "q": (h, q),
        "k": (h, k),
        "v": (h, k),
        "o": (q, h),
        "gate": (h, f),
        "up": (h, f),
        "down": (f, h),
    }
    return text.num_hidden_layers * sum(rank * (a + b) for a, b in shapes.values()) + h
