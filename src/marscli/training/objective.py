"""The training loss as plain functions of logits: L = L_masked + ar_weight · L_clean.

Each term is the sum of cross-entropies over its labels divided by the number of such labels in the *whole optimizer
step*, so four forwards of one example give the gradient of one forward of four. How the logits are made is not known
here, but for `step_logits`, which computes them only where there is a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marscli.core.layout import NO_TARGET, TrainingBatch
from marscli.core.model import forward_logits


@dataclass(frozen=True)
class LossTerms:
    """The loss of one forward and its parts.

    Attributes:
        loss: Scalar with gradient, normalised over the optimizer step.
        sums: (2,) detached sums of cross-entropies in nats: masked, clean.
        correct: (B + 1,) detached number of right top tokens by offset; offset 0 is the clean stream.
    """

    loss: Tensor
    sums: Tensor
    correct: Tensor


def label_counts(batches: Sequence[TrainingBatch], block_size: int) -> Tensor:
    """Labels by offset, of all forwards of an optimizer step together.

    Args:
        batches: The step's batches.
        block_size: B, the largest offset.

    Returns:
        int64 (B + 1,); offset 0 is the clean stream, the rest together the masked one.
    """
    offsets = torch.cat([batch.offsets[batch.targets != NO_TARGET] for batch in batches])
    return torch.bincount(offsets, minlength=block_size + 1)


def step_logits(model: nn.Module, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Run the model over a batch, logits only where there is a label.

    Returns:
        Logits (N, V), targets (N,) and offsets (N,) of the N labelled entries in row order.
    """
    labelled = batch.targets != NO_TARGET
    logits = forward_logits(
        model,
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        mask=batch.visibility.dense(),
        keep=labelled,
    )
    return logits, batch.targets[labelled], batch.offsets[labelled]


def two_stream_loss(
    logits: Tensor, targets: Tensor, offsets: Tensor, counts: Tensor, *, ar_weight: float = 1.0
) -> LossTerms:
    """The MARS loss of one forward; without masked labels it is the ordinary AR loss times ``ar_weight``.

    Args:
        logits: (N, V).
        targets: (N,).
        offsets: (N,), 0 for the clean stream.
        counts: (B + 1,) labels by offset in the whole optimizer step (`label_counts`), this forward's included.
        ar_weight: Weight of the clean term.

    Example:
        Two equal logits everywhere, one clean and one masked label: both terms are log 2.

        >>> counts = torch.tensor([1, 1])
        >>> terms = two_stream_loss(torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([0, 1]), counts)
        >>> round(terms.loss.item(), 4), [round(s, 4) for s in terms.sums.tolist()], terms.correct.tolist()
        (1.3863, [0.6931, 0.6931], [1, 0])
    """
    losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    clean = (offsets == 0).to(losses.dtype)
    sum_clean = (losses * clean).sum()
    sum_masked = (losses * (1 - clean)).sum()
    number_clean, number_masked = counts[0].clamp(min=1), counts[1:].sum().clamp(min=1)
    loss = sum_masked / number_masked + ar_weight * sum_clean / number_clean
    with torch.no_grad():
        right = logits.argmax(-1) == targets
        correct = torch.bincount(offsets[right], minlength=len(counts))
        sums = torch.stack([sum_masked, sum_clean]).detach()
    return LossTerms(loss, sums, correct)
