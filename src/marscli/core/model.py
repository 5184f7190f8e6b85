"""The one place where a transformers model is called: explicit mask and positions in, the wanted logits out.

Hides what differs between transformers versions, and refuses models whose layers would make our masks silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_utils
from transformers.cache_utils import Cache

from marscli.core.attention import folded_mask, grouped_attention
from marscli.errors import InputError

# transformers ≥ 5.2x selects positions per row itself; before, its 1-D `logits_to_keep` selects the same for all rows.
SELECTS_PER_ROW = hasattr(modeling_utils, "slice_logits_to_keep")

HINT = "models with full causal attention in every layer work: Qwen2, Qwen3, Llama, SmolLM, Gemma, Phi and their like"

# Model types whose tiny random models decode as transformers does, every mode and cache (tests/core/test_families.py).
PROVEN = {
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral"),
    *("olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
}

# Rotary scalings that look at the largest position of the whole batch: a neighbour or a mask would change a row.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_decodable(config: PretrainedConfig, name: str = "the model") -> None:
    """Refuse what explicit masks and row caches would get silently wrong.

    Raises:
        InputError: Encoder-decoder models, sliding-window, linear or otherwise special attention layers, and rotary
            scaling that depends on the whole batch.
    """
    config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{name} ({config.model_type}) is an encoder-decoder model", hint=HINT)
    special = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"})
    if special:
        raise InputError(
            f"{name} ({config.model_type}) has {', '.join(special)} layers, which are not handled", hint=HINT
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "layer_types", None) is None and getattr(config, "use_sliding_window", True):
        raise InputError(f"{name} ({config.model_type}) has a sliding window of {window} tokens", hint=HINT)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise InputError(f"{name} ({config.model_type}) caps its attention scores, which is not handled", hint=HINT)
    if getattr(config, "max_position_embeddings", None) is None:
        raise InputError(f"{name} ({config.model_type}) does not say how long its context is", hint=HINT)
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in BATCH_DEPENDENT_ROPE:
        raise InputError(
            f"{name} ({config.model_type}) uses {kind!r} rotary scaling, which depends on a batch's largest position",
            hint="set rope_parameters in its config.json to a fixed kind (default, linear, yarn, llama3)",
        )


@torch.no_grad()
def check_model(model: PreTrainedModel, name: str = "the model") -> None:
    """Refuse a model of a kind that was not proven if it computes something else with masks and positions of ours.

    A few tokens run as the model itself does it, and as the engine does: with an explicit mask, and two of them again
    at the end, in the place that a group of masks has. What differs ignores positions or masks, or hands its attention
    function more than ours looks at.

    Args:
        model: In eval mode, with the attention function that it was loaded with.
        name: How errors name it.

    Raises:
        InputError: The two differ, or the model fails.
    """
    config = model.config.get_text_config()
    if config.model_type in PROVEN:
        return
    again = slice(4, 6)
    ids = torch.arange(8, device=model.device) * (config.vocab_size // 8)
    positions = torch.arange(8, device=model.device)
    mask = torch.ones(10, 10, dtype=torch.bool, device=model.device).tril()
    mask[8:, again.start : 8] = False
    try:
        own = model(ids[None], use_cache=False).logits[0].float()
        ours = forward_logits(
            model,
            input_ids=torch.cat([ids, ids[again]])[None],
            position_ids=torch.cat([positions, positions[again]])[None],
            mask=folded_mask(mask[None, None], config, model.dtype),
            keep=torch.arange(10, device=model.device)[None],
        )[0].float()
        off = (ours - torch.cat([own, own[again]])).abs().max() / own.std()
    except Exception as error:  # a model's code may raise anything on what it does not expect
        raise InputError(
            f"{name} ({config.model_type}) cannot be called as the engine does: {type(error).__name__}", hint=HINT
        ) from error
    if not off < (1e-3 if model.dtype == torch.float32 else 0.2):
        raise InputError(
            f"{name} ({config.model_type}) computes something else with masks and positions given by the engine",
            hint=HINT,
        )


def forward_logits(
    model: nn.Module,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    mask: Tensor,
    keep: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    """Run a causal LM and compute logits only where they are wanted.

    Args:
        model: A transformers causal LM, or what wraps one (DDP).
        input_ids: (B, T).
        position_ids: (B, T).
        mask: bool (B, 1, T, S), True where a query may look (`Visibility.dense`).
        keep: Integer (B, K), the entries of each row whose logits are wanted; or bool (B, T), any number of each row.
        cache: Where keys and values are written and read; None computes all of them anew (S = T).

    Returns:
        (B, K, V), or for a bool ``keep`` (number of True, V) in row order.
    """
    inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask}
    inputs["use_cache"] = cache is not None
    if cache is not None:
        inputs[_cache_argument(cast(Any, type(unwrap(model))))] = cache
    with grouped_attention(unwrap(model)):
        if SELECTS_PER_ROW:
            return model(**inputs, logits_to_keep=keep).logits
        with select_before_head(unwrap(model), keep):
            return model(**inputs).logits


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside data-parallel wrappers."""
    while not isinstance(model, PreTrainedModel) and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return cast(PreTrainedModel, model)


@lru_cache
def _cache_argument(model_class: Any) -> str:
    """``cache`` in newer transformers, ``past_key_values`` in older ones."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"


@contextmanager
def select_before_head(model: PreTrainedModel, keep: Tensor) -> Iterator[None]:
    """Let the output head see only the entries in ``keep``, as `forward_logits` takes it."""

    def select(head: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        hidden = args[0]
        return hidden[keep] if keep.dtype == torch.bool else torch.take_along_dim(hidden, keep[..., None], dim=1)

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
