"""A model whose logits are written down beforehand, so that tokens and forwards can be counted by hand.

It answers as transformers models do, but looks at nothing except positions and whether an entry is a mask.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig

from marscli.checkpoint import MarsMetadata

MASK, END = 1, 2
VOCABULARY = 32


def token_at(position: int) -> int:
    """The token that the model always writes at a position; never the mask or the end."""
    return 3 + position % 20


class ScriptedModel(nn.Module):
    """Predicts `token_at(p)` for every position p, from masks with the probability ``confidences[p]``.

    Args:
        confidences: Position → probability of the token there when a mask predicts it; 0.99 where none is given.
        end_at: Position at which the end-of-sequence token is written instead.
    """

    def __init__(self, confidences: dict[int, float], end_at: int | None = None) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
        self.device = torch.device("cpu")
        self.confidences = confidences
        self.end_at = end_at
        self.head = nn.Identity()
        self.calls = 0

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids, position_ids=None, attention_mask=None, cache=None, use_cache=True, logits_to_keep=None
    ):
        self.calls += 1
        probabilities = torch.ones_like(position_ids, dtype=torch.float32)
        tokens = torch.empty_like(position_ids)
        for row, column in torch.cartesian_prod(*map(torch.arange, position_ids.shape)).tolist():
            position = int(position_ids[row, column]) + 1
            tokens[row, column] = END if position == self.end_at else token_at(position)
            sure = input_ids[row, column] != MASK
            probabilities[row, column] = 0.999 if sure else self.confidences.get(position, 0.99)
        others = torch.log((1 - probabilities) / (VOCABULARY - 2))  # the mask itself can never be chosen
        logits = others[..., None].expand(*position_ids.shape, VOCABULARY).clone()
        logits.scatter_(2, tokens[..., None], probabilities.log()[..., None])
        assert math.isfinite(float(logits.min()))
        if logits_to_keep is not None:
            logits = torch.take_along_dim(logits, logits_to_keep[..., None], dim=1)
        return SimpleNamespace(logits=self.head(logits))


METADATA = MarsMetadata(block_size=4, ar_weight=1.0, base_model="scripted", mask_token_id=MASK)


def scripted_checkpoint(model: ScriptedModel, *, trained: bool = True) -> SimpleNamespace:
    """What methods and runner use of a checkpoint; `METADATA` is what its config.json would say."""
    return SimpleNamespace(
        model=model,
        tokenizer=None,
        mask_token_id=MASK if trained else None,
        block_size=4 if trained else None,
        eos_token_ids=(END,),
        context_length=1000,
        name="scripted",
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
