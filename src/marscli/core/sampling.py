"""Logits to tokens: greedy, or sampled with noise that depends on nothing but seed, position and token.

A sampled token is ``argmax(log p_warped + g)`` with Gumbel noise ``g(seed, position, token)`` from a counter-based hash
(the Gumbel-max trick draws exactly from p_warped). So the output is a function of weights, prompt, settings and seed:
the same alone, in any batch, and however many tokens a forward pass predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """How each row draws its tokens; every tensor (rows,).

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus mass; 1 is off.
        top_k: Candidates; 0 is off.
        seed: 64-bit integer.
        cuts: Whether any row has a top-p or top-k; without, the vocabulary need not be sorted.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    cuts: bool = True


def choose_tokens(logits: Tensor, positions: Tensor, settings: SamplingSettings, top: Tensor) -> Tensor:
    """Choose a token from each distribution.

    Args:
        logits: float32 (rows, Q, V).
        positions: (rows, Q), the position that each chosen token will have.
        settings: Rows of temperature 0 are greedy.
        top: (rows, Q), what `top_tokens` gives for these logits.

    Returns:
        (rows, Q) token ids.
    """
    warped = warp(logits, settings)
    noise = gumbel_noise(settings.seed[:, None], positions, logits.shape[-1])
    drawn = (warped + noise).argmax(-1)
    return torch.where(settings.temperature[:, None] > 0, drawn, top)


def top_tokens(logits: Tensor) -> Tensor:
    """Argmax over the last dimension; of equals the first.

    On a CPU by numpy, whose argmax is about seven times as fast as torch's: over a large vocabulary this is more than
    a tenth of a batched step.
    """
    if logits.is_cpu:
        return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))
    return logits.argmax(-1)


def warp(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Apply temperature, then top-k, then top-p, as transformers does.

    Args:
        logits: float32 (rows, Q, V).
        settings: See `SamplingSettings`. A row of temperature 0 is left as with temperature 1.

    Returns:
        Unnormalised log-probabilities (rows, Q, V), −inf for tokens that are cut away.
    """
    temperature = settings.temperature[:, None, None]
    # The largest logit becomes 0 first, so that a tiny temperature sends the others to −inf and nothing to +inf.
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    if not settings.cuts:
        return scores
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = settings.top_k[:, None, None]
    cut = (top_k > 0) & (rank >= top_k)
    probabilities = ranked.masked_fill(cut, -torch.inf).softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    top_p = settings.top_p[:, None, None]
    cut = cut | ((top_p < 1) & (mass_before >= top_p))
    return torch.empty_like(scores).scatter_(-1, order, ranked.masked_fill(cut, -torch.inf))


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    Args:
        seed: Integer, broadcasts with ``position``.
        position: (rows, Q).
        vocab_size: V.

    Returns:
        float32 (rows, Q, V), a pure function of (seed, position, token).
    """
    token = torch.arange(vocab_size, device=position.device)
    key = _mix(_mix(seed) ^ position)
    bits = _mix(key[..., None] ^ token)
    # 23 bits and a half: every value is exact in float32 and strictly inside (0, 1).
    uniform = ((bits & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors; products wrap around, shifts are made logical by masking."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
