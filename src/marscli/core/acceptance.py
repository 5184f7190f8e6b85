"""Confidence of predictions, and how many of them a step keeps. Acceptance is strictly left to right.

All measures are of the untempered distribution, in float32, and oriented so that higher is surer: entropy and its τ
change sign. What the engine calls exact never comes here: with it nothing is kept unverified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from marscli.core.params import CONFIDENCES, Confidence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def certainty(logits: Tensor, measure: Confidence) -> Tensor:
    """How sure the model is of its top token; higher is surer.

    Args:
        logits: float32 (..., V).
        measure: ``probability`` (p1), ``margin`` (p1 − p2), or ``entropy`` (nats, negated).

    Returns:
        float32 (...).
    """
    if measure == "probability":
        return logits.softmax(-1).amax(-1)
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


def leading(kept: Bools) -> Ints:
    """Number of True before the first False.

    Args:
        kept: (rows, Q).

    Returns:
        (rows,) integers in 0 … Q.

    Example:
        >>> leading(np.array([[True, True, False, True], [False, True, True, True]])).tolist()
        [2, 0]
    """
    return np.logical_and.accumulate(kept, axis=1).sum(1)


def cut_after_end(tokens: Ints, accepted: Ints, eos_token_ids: Ints) -> tuple[Ints, Bools]:
    """End a row at its first accepted end-of-sequence token.

    Args:
        tokens: (rows, Q) predictions, left to right.
        accepted: (rows,) how many of them are accepted.
        eos_token_ids: (E,).

    Returns:
        (rows,) accepted, cut behind the first end-of-sequence token; and (rows,) bool, whether there was one.
    """
    until_end = leading(~_is_end(tokens, eos_token_ids)) + 1
    ended = until_end <= accepted
    return np.where(ended, until_end, accepted), ended


def _is_end(tokens: Ints, eos_token_ids: Ints) -> Bools:
    return (tokens[..., None] == eos_token_ids).any(-1)  # a handful of ids: several times faster than np.isin


@dataclass(frozen=True)
class Decision:
    """What a step makes of its predictions; every array has a row for each row of the step.

    Attributes:
        tokens: (rows, K + 1 + M), the continuation: drafts that were right, the token after them, the masks' tokens.
        source: (rows, K + 1 + M), which of the step's predictions each of these is.
        verified: (rows,) j, drafts that were right.
        accepted: (rows,), how many of ``tokens`` are kept: at least j + 1, unless the row ends before.
        drafts: (rows,), how many of the tokens behind these the next step may verify.
        ended: (rows,) bool, whether an end-of-sequence token is the last accepted one.
    """

    tokens: Ints
    source: Ints
    verified: Ints
    accepted: Ints
    drafts: Ints
    ended: Bools


def decide(
    tokens: Ints,
    sure: Bools | None,
    *,
    drafts: Ints,
    draft_counts: Ints,
    groups: Ints,
    group_read: Ints,
    spare: Ints,
    most_drafts: Ints,
    eos_token_ids: Ints,
) -> Decision:
    """Verify drafts, take one more token, keep what is certain enough, and choose the next drafts.

    In symbols, with v₀ … v_K the predictions at the newest token and the drafts d₁ … d_K:
    j = the largest with dᵢ = vᵢ₋₁ for all i ≤ j; accepted are v₀ … v_j, then the masks' tokens of group j up to the
    first that is not sure; the rest of group j are drafts.

    On the host, in numpy: a step's decision is some twenty operations on arrays of a few dozen elements.

    Args:
        tokens: (rows, Q), predictions in the order of `StepLayout.read`.
        sure: (rows, Q), whether a prediction may be kept unverified; None where none may (exact).
        drafts: (rows, K) the tokens that were verified.
        draft_counts: (rows,) k, how many of them a row really has.
        groups: (rows, K + 1) predictions of each group.
        group_read: (rows, K + 1) where in ``tokens`` each group begins.
        spare: (rows,) tokens that may follow the first one of this step.
        most_drafts: (rows,) drafts that a row may have in its next step.
        eos_token_ids: (E,).
    """
    if tokens.shape[1] == 1:  # AR decoding, at twice the speed
        one = np.ones(len(tokens), dtype=np.int64)
        return Decision(tokens, one[:, None] - 1, one - 1, one, one - 1, _is_end(tokens[:, 0], eos_token_ids))
    most = drafts.shape[1]
    nth = np.arange(most + 1 + groups.max(initial=0))
    right = (tokens[:, :most] == drafts) & (nth[:most] < draft_counts[:, None])
    verified = leading(right)
    j = verified[:, None]
    # Prediction t of the continuation is v_t up to t = j, then the masks' of group j.
    in_group = np.take_along_axis(group_read, j, 1) + nth - j - 1
    source = np.where(nth <= j, nth, in_group).clip(max=tokens.shape[1] - 1)
    tokens = np.take_along_axis(tokens, source, 1)
    available = np.minimum(verified + 1 + np.take_along_axis(groups, j, 1)[:, 0], 1 + spare)
    kept = nth <= j
    if sure is not None:
        kept |= np.take_along_axis(sure, source, 1) & (nth < available[:, None])
    accepted, ended = cut_after_end(tokens, leading(kept), eos_token_ids)
    ends = (nth >= accepted[:, None]) & _is_end(tokens, eos_token_ids)
    until_end = leading(~ends) + 1  # drafts are cut after an end-of-sequence token too
    # A step gives one token beyond its drafts, so the last spare token is never worth a draft.
    last_draft = np.minimum.reduce([available, until_end, accepted + most_drafts, spare])
    next_drafts = np.where(ended, 0, (last_draft - accepted).clip(min=0))
    return Decision(tokens, source, verified, accepted, next_drafts, ended)
