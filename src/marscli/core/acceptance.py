"""Confidence of predictions, and how many of them a step keeps. Acceptance is strictly left to right.

All measures are of the untempered distribution, in float32, and oriented so that higher is surer: entropy and its τ
change sign. What the engine calls exact never comes here: with it nothing is kept unverified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    first, *others = measures
    out = certainty(logits, first)
    for measure in others:
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


@dataclass(frozen=True)
class Decision:
    """What a step makes of its predictions; every tensor has a row for each row of the step.

    Attributes:
        tokens: (rows, K + 1 + M), the continuation: drafts that were right, the token after them, the masks' tokens.
        certainties: (rows, K + 1 + M), of these predictions.
        verified: (rows,) j, drafts that were right.
        accepted: (rows,), how many of ``tokens`` are kept: at least j + 1, unless the row ends before.
        drafts: (rows,), how many of the tokens behind these the next step shall verify.
        ended: (rows,) bool, whether an end-of-sequence token is the last accepted one.
    """

    tokens: Tensor
    certainties: Tensor
    verified: Tensor
    accepted: Tensor
    drafts: Tensor
    ended: Tensor


def decide(
    tokens: Tensor,
    certainties: Tensor,
    first_choice: Tensor,
    *,
    drafts: Tensor,
    draft_counts: Tensor,
    masks: Tensor,
    spare: Tensor,
    most_drafts: Tensor,
    threshold: Tensor,
    exact: Tensor,
    eos_token_ids: Tensor,
) -> Decision:
    """Verify drafts, take one more token, keep what is certain enough, and choose the next drafts.

    In symbols, with v₀ … v_K the predictions at the newest token and the drafts d₁ … d_K:
    j = the largest with dᵢ = vᵢ₋₁ for all i ≤ j; accepted are v₀ … v_j, then the masks' tokens of group j up to the
    first that τ does not pass; the rest of group j are drafts.

    Args:
        tokens: (rows, (K + 1) · (1 + M)), predictions in the order of `StepLayout.read`.
        certainties: Of the same shape, oriented (`certainty`).
        first_choice: bool, of the same shape: whether the prediction is the model's top token. A drawn token that is
            not is never kept unverified.
        drafts: (rows, K) the tokens that were verified.
        draft_counts: (rows,) k, how many of them a row really has.
        masks: (rows,) m.
        spare: (rows,) tokens that may follow the first one of this step.
        most_drafts: (rows,) drafts that a row may have in its next step.
        threshold: (rows,) τ, oriented.
        exact: bool (rows,), nothing is kept unverified whatever τ says.
        eos_token_ids: (E,).
    """
    if tokens.shape[1] == 1:  # no drafts and no masks in any row: AR decoding
        one = torch.ones_like(draft_counts)
        ended = torch.isin(tokens[:, 0], eos_token_ids)
        return Decision(tokens, certainties, one - 1, one, one - 1, ended)
    width = drafts.shape[1]
    of_group = tokens.shape[1] // (width + 1) - 1
    nth = torch.arange(width + 1 + of_group, device=tokens.device)
    right = (tokens[:, :width] == drafts) & (nth[:width] < draft_counts[:, None])
    verified = leading(right)
    j = verified[:, None]
    # Prediction t of the continuation is v_t up to t = j, then the masks' of group j.
    in_group = (width + 1 + j * of_group + nth - j - 1).clamp(max=tokens.shape[1] - 1)
    order = torch.where(nth <= j, nth, in_group)
    tokens, certainties, first_choice = (x.gather(1, order) for x in (tokens, certainties, first_choice))
    available = torch.minimum(verified + 1 + masks, 1 + spare)
    sure = first_choice & (certainties >= threshold[:, None]) & ~exact[:, None]
    kept = (nth <= j) | (sure & (nth < available[:, None]))
    accepted, ended = cut_after_end(tokens, leading(kept), eos_token_ids)
    behind = nth >= accepted[:, None]
    ends = behind & torch.isin(tokens, eos_token_ids)
    until_end = leading(~ends) + 1  # drafts are cut after an end-of-sequence token too
    last_draft = torch.minimum(torch.minimum(available, until_end), accepted + most_drafts)
    # A step gives one token beyond its drafts, so the last spare token is never worth a draft.
    last_draft = torch.minimum(last_draft, spare)
    next_drafts = torch.where(ended, 0, (last_draft - accepted).clamp(min=0))
    return Decision(tokens, certainties, verified, accepted, next_drafts, ended)
