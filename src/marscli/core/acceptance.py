"""Confidence of predictions, and how many of them a step keeps. Acceptance is strictly left to right.

All measures are of the untempered distribution, in float32, and oriented so that higher is surer: entropy and its τ
change sign. What the engine calls exact never comes here: with it nothing is kept unverified.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from marscli.core.params import CONFIDENCES, Confidence


def certainty(logits: Tensor, measure: Confidence) -> Tensor:
    """How sure the model is of its top token; higher is surer.

    Args:
        logits: float32 (..., V).
        measure: ``probability`` (p1), ``margin`` (p1 − p2), or ``entropy`` (nats, negated).

    Returns:
        float32 (...).
    """
    if measure == "probability":
        return (logits.amax(-1) - logits.logsumexp(-1)).exp()
    log_p = logits.log_softmax(-1)
    if measure == "margin":
        top = log_p.topk(2, dim=-1).values.exp()
        return top[..., 0] - top[..., 1]
    p = log_p.exp()
    return torch.where(p > 0, p * log_p, 0.0).sum(-1)


def row_certainties(logits: Tensor, measure_codes: Tensor, measures: Iterable[Confidence]) -> Tensor:
    """`certainty` where each row has a measure of its own.

    Args:
        logits: float32 (rows, Q, V).
        measure_codes: (rows,), indices into `CONFIDENCES`.
        measures: The measures that occur; only these are computed.

    Returns:
        float32 (rows, Q).
    """
    out = torch.zeros(logits.shape[:-1], device=logits.device)
    for measure in measures:
        mine = measure_codes[:, None] == CONFIDENCES.index(measure)
        out = torch.where(mine, certainty(logits, measure), out)
    return out


def oriented(value: float, measure: Confidence) -> float:
    """Turn a τ into the orientation of `certainty`, or a certainty back into the measure's own numbers."""
    return -value if measure == "entropy" else value


def leading(kept: Tensor) -> Tensor:
    """Number of True before the first False.

    Args:
        kept: bool (rows, Q).

    Returns:
        (rows,) integers in 0 … Q.

    Example:
        >>> leading(torch.tensor([[True, True, False, True], [False, True, True, True]])).tolist()
        [2, 0]
    """
    return kept.long().cumprod(-1).sum(-1)


def cut_after_end(tokens: Tensor, accepted: Tensor, eos_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """End a row at its first accepted end-of-sequence token.

    Args:
        tokens: (rows, Q) predictions, left to right.
        accepted: (rows,) how many of them are accepted.
        eos_token_ids: (E,).

    Returns:
        (rows,) accepted, cut behind the first end-of-sequence token; and (rows,) bool, whether there was one.
    """
    until_end = leading(~torch.isin(tokens, eos_token_ids)) + 1
    ended = until_end <= accepted
    return torch.where(ended, until_end, accepted), ended
