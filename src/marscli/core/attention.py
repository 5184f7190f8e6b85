"""Attention with an explicit mask that does not copy keys and values once per query head.

With a mask, transformers' SDPA path repeats keys and values for every query head of a group (`repeat_kv`), which at
many rows costs more than the attention itself. Folding the query heads of a group into the query length gives the same
products with keys and values as they lie in the cache. The mask has to be repeated then, and SDPA turns a bool mask
into numbers: `folded_mask` does both once a step, so that no layer has to.

Without a mask or without head groups, transformers' own SDPA function does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "mars_grouped_sdpa"


def grouped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention.

    Args:
        module: The attention layer; its ``num_key_value_groups`` (G) says how many query heads share keys and values.
        query: (B, kv_heads · G, T, head_dim).
        key: (B, kv_heads, S, head_dim), and value alike.
        value: See ``key``.
        attention_mask: What `folded_mask` gives; or bool (B, 1, T, S), True where a query may look.
        dropout: Dropout probability.
        scaling: Factor of the scores.
        kwargs: What else transformers passes on; only its SDPA function reads them.

    Returns:
        The output, (B, T, kv_heads · G, head_dim), and None for the weights.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    if attention_mask is None or groups == 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    batch, heads, queries, head_dim = query.shape
    folded = query.reshape(batch, heads // groups, groups * queries, head_dim)
    if attention_mask.shape[2] == queries:
        attention_mask = _fold(attention_mask, groups)
    output = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def _fold(mask: Tensor, groups: int) -> Tensor:
    return mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)  # one query's mask serves all its heads


def folded_mask(visible: Tensor, config: PretrainedConfig, dtype: torch.dtype) -> Tensor:
    """Prepare a mask for all layers of a model.

    Args:
        visible: bool (B, 1, T, S), True where a query may look; every query sees something.
        config: The model's.
        dtype: Of the model's queries.

    Returns:
        0 and −inf, (B, 1, G · T, S) with G query heads a group; (B, 1, 1, S) for T = 1.
    """
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    numbers = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return _fold(numbers, groups)


AttentionInterface.register(NAME, grouped_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model's layers use `grouped_attention_forward` from now on; plain calls of it give what they gave."""
    model.config._attn_implementation = NAME


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model's layers use `grouped_attention_forward`, and put back what they used before.

    A model that uses it for good (`use_grouped_attention`) is left alone: setting it costs time at every step.
    """
    config = model.config
    before = config._attn_implementation
    if before == NAME:
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
