"""Low-rank adapters (arXiv 2106.09685) through `peft`: all linear layers, and the one embedding row that is new."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from marscli.errors import InputError


def check_available() -> None:
    """Refuse ``--lora-rank`` where peft is missing.

    Raises:
        InputError: It is not installed.
    """
    if find_spec("peft") is None:
        raise InputError("--lora-rank needs the package peft", hint="pip install 'marscli[lora]'")


def add_adapters(model: Any, *, rank: int, alpha: float | None, mask_token_id: int | None) -> Any:
    """Wrap a model so that only adapters and the mask token's embedding row are trained.

    Args:
        model: A transformers causal LM.
        rank: Of the adapters.
        alpha: Their scale is alpha / rank; None is twice the rank.
        mask_token_id: Its row is trained and saved by itself, a tied output row with it; None for the AR objective.

    Returns:
        A `peft.PeftModel`; what is trained is float32. Its dropout is off, so that a resumed run meets no random
        numbers.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha if alpha is not None else 2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        trainable_token_indices=None if mask_token_id is None else [mask_token_id],
    )
    wrapped = get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped
