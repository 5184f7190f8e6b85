"""How much memory a training step needs, estimated from the model's config alone.

With P weights of which P' are trained, L layers, hidden size h, query width q, key and value width k, MLP width f,
vocabulary V, G query heads a key head, and a forward of N entries in rows of T, in bytes (e = 4, or 2 under autocast):

    weights        4 P, and under autocast their bfloat16 copies 2 P; frozen ones under adapters e P
    gradients      4 P'
    optimizer      8 P'                                           AdamW's two averages
    activations    N L (2 (4 h + e h) + e (2 q + 2 k + 3 h + 4 f))
    mask           e N T G without flex attention                 one for all layers, as numbers
    logits         3 · 4 · min(N V, chunk)

The activations are what a layer keeps for its backward pass: two norms in float32 and their outputs; queries, keys and
values; attention's output; the MLP's gate, its activation, its up projection and their product. With activation
checkpointing a layer keeps its input alone, and one layer at a time the rest. What the allocator and the libraries take
beside it is not in it.
"""

from __future__ import annotations

from typing import Any

from marscli.training.config import TrainConfig
from marscli.training.objective import CHUNK_ELEMENTS


def count_weights(model_config: Any, *, trust_remote_code: bool = False) -> int:
    """Number of weights of a model, without any of them: a tied head counts once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    return model.num_parameters()


def estimate_memory(
    config: TrainConfig, model_config: Any, *, weights: int, rows: int, entries: int, half: bool, flex: bool
) -> dict[str, int]:
    """Bytes by kind, and their ``total``, for one device of a run that shards nothing.

    Args:
        config: The run.
        model_config: The model's config.
        weights: P, without adapters.
        rows: Rows of a forward.
        entries: T, entries of its longest row.
        half: Whether bfloat16 autocast is on.
        flex: Whether attention needs no masks as tensors.
    """
    text = model_config.get_text_config()
    h, q, k, f = _widths(text)
    layers, size, number = text.num_hidden_layers, 2 if half else 4, rows * entries
    mask = 0 if flex else size * number * entries * (q // k)
    layer = number * (2 * (4 * h + size * h) + size * (2 * q + 2 * k + 3 * h + 4 * f))
    kept = mask + (layers * number * size * h + layer if config.activation_checkpointing else layers * layer)
    trained, stored = weights, weights * (4 + (2 if half else 0))
    if config.lora_rank is not None:
        trained = lora_weights(model_config, config.lora_rank)
        stored = size * weights + 4 * trained
    estimate = {
        "weights": stored,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "activations": kept,
        "logits": 12 * min(number * text.vocab_size, CHUNK_ELEMENTS),
    }
    return {**estimate, "total": sum(estimate.values())}


def lora_weights(model_config: Any, rank: int) -> int:
    """Weights of adapters on all linear layers, and of one embedding row."""
    text = model_config.get_text_config()
    h, q, k, f = _widths(text)
    shapes = [(h, q), (h, k), (h, k), (q, h), (h, f), (h, f), (f, h)]  # query, key, value, output, gate, up, down
    return text.num_hidden_layers * sum(rank * (a + b) for a, b in shapes) + h


def _widths(text: Any) -> tuple[int, int, int, int]:
    """Hidden size; width of the queries; of the keys; of the MLP."""
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return text.hidden_size, heads * head, kv_heads * head, text.intermediate_size
