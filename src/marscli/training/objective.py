"""The training loss: L = L_masked + ar_weight · L_clean (arXiv 2604.07023), over labelled entries alone.

Each term is the sum of cross-entropies over its labels divided by the number of such labels in the *whole optimizer
step*, so four forwards of one example give the gradient of one forward of four. `loss_terms` is the loss as a plain
function of logits. `step_loss` runs the model with its output head replaced by that function, applied to some hundreds
of labels at a time: the logits of all labels never exist together, and neither do their gradients.

Every label of the masked stream has a partner in the clean stream, the entry at the same position, which predicts the
same token from real tokens. With distillation its distribution is the mask's target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marscli.core.attention import NAME as GROUPED
from marscli.core.attention import folded_mask
from marscli.core.layout import NO_TARGET, TrainingBatch
from marscli.core.model import forward_logits, unwrap

# Logits computed together, in elements: 64 MiB in float32, and about thrice that with their gradients. Enough rows of a
# 50k vocabulary (341) that a product of matrices is as fast as it gets on a CPU.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        ar_weight: Weight of the clean term; 0 is the paper's "without SFT loss".
        distill: The masks' targets are the clean stream's own distributions, detached, instead of the data's tokens.
        balance: Scale the clean term so that, up to ``ar_weight``, both terms are equally large (`TermBalance`).
    """

    ar_weight: float = 1.0
    distill: bool = False
    balance: bool = False


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

    def __add__(self, other: LossTerms) -> LossTerms:
        return LossTerms(self.loss + other.loss, self.sums + other.sums, self.correct + other.correct)


@dataclass(frozen=True)
class Labels:
    """The P labelled entries of the clean stream, each with the mask that has the same target. Tensors are (P,).

    Attributes:
        clean: Index of the clean entry among the batch's B · T.
        mask: Index of its mask, likewise; the clean entry's own where it has none.
        targets: The token that both predict.
        offsets: The mask's offset; 0 where there is none.
    """

    clean: Tensor
    mask: Tensor
    targets: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch) -> Labels:
        """Find the labels of a batch."""
        rows, width = batch.targets.shape
        targets, offsets = batch.targets.flatten(), batch.offsets.flatten()
        labelled = targets != NO_TARGET
        clean = (labelled & (offsets == 0)).nonzero().squeeze(1)
        masked = (labelled & (offsets > 0)).nonzero().squeeze(1)
        first = torch.arange(rows, device=targets.device)[:, None] * width
        mask_of = torch.arange(rows * width, device=targets.device)
        mask_of[(first + batch.clean_slot).flatten()[masked]] = masked
        mask = mask_of[clean]
        return cls(clean, mask, targets[clean], offsets[mask])

    def __len__(self) -> int:
        return len(self.clean)

    def part(self, chunk: slice) -> Labels:
        """Some of the labels."""
        return Labels(self.clean[chunk], self.mask[chunk], self.targets[chunk], self.offsets[chunk])


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


def term_weights(counts: Tensor, ar_weight: float | Tensor = 1.0) -> Tensor:
    """What one label of each term weighs in the loss.

    Args:
        counts: (B + 1,) labels by offset in the whole optimizer step (`label_counts`), this forward's included.
        ar_weight: Weight of the clean term.

    Returns:
        float32 (2,): masked, clean.
    """
    number = torch.stack([counts[1:].sum(), counts[0]]).clamp(min=1)
    wanted = torch.ones(2, device=counts.device)
    wanted[1] = ar_weight
    return wanted / number


def loss_terms(
    clean: Tensor, mask: Tensor | None, labels: Labels, weights: Tensor, *, most_offsets: int, distill: bool = False
) -> LossTerms:
    """The loss as a plain function of logits.

    Args:
        clean: (P, V) logits of the labelled clean entries.
        mask: (P, V) logits of the masks with the same targets; what stands where there is no mask is not looked at.
            None for the AR objective.
        labels: Targets and offsets of these P labels.
        weights: (2,) of one label of each term, `term_weights`.
        most_offsets: B.
        distill: See `Objective`.

    Example:
        Two equal logits everywhere, one label of each stream: both terms are log 2.

        >>> labels = Labels(*torch.tensor([[0], [1], [1], [1]]))
        >>> terms = loss_terms(torch.zeros(1, 2), torch.zeros(1, 2), labels, torch.ones(2), most_offsets=1)
        >>> round(terms.loss.item(), 4), [round(s, 4) for s in terms.sums.tolist()], terms.correct.tolist()
        (1.3863, [0.6931, 0.6931], [0, 0])
    """
    targets, offsets = labels.targets, labels.offsets
    clean = clean.float()
    sum_clean = nn.functional.cross_entropy(clean, targets, reduction="sum")
    correct = torch.zeros(most_offsets + 1, dtype=torch.long, device=targets.device)
    sum_masked = torch.zeros_like(sum_clean)
    if mask is not None:
        mask = mask.float()
        masked = nn.functional.cross_entropy(mask, clean.detach().softmax(-1) if distill else targets, reduction="none")
        is_mask = offsets > 0
        sum_masked = (masked * is_mask).sum()
        correct.index_add_(0, offsets, (mask.argmax(-1) == targets).long())
    correct[0] = (clean.argmax(-1) == targets).sum()
    sums = torch.stack([sum_masked, sum_clean])
    return LossTerms((sums * weights).sum(), sums.detach(), correct)


def step_loss(
    model: nn.Module,
    batch: TrainingBatch,
    weights: Tensor,
    *,
    most_offsets: int,
    distill: bool = False,
    head_is_last: bool = True,
) -> LossTerms:
    """Run the model over a batch and compute the loss, logits only where there is a label.

    Args:
        model: A causal LM, or what wraps one (DDP), whose attention takes a bool mask (`use_grouped_attention`, SDPA)
            or is ``flex_attention``.
        batch: (B, T).
        weights: (2,) of one label of each term, `term_weights`.
        most_offsets: B, the largest offset; 0 for the AR objective.
        distill: See `Objective`.
        head_is_last: Whether the head's output is the logits (`head_is_last`). Where a model goes on to scale or cap
            them, the logits of all labels are computed at once.
    """
    inner = unwrap(model)
    labels = Labels.of(batch)
    two_streams = most_offsets > 0
    flex = inner.config._attn_implementation == "flex_attention"
    # Made once for all layers: each would otherwise keep a copy of its own for the backward pass.
    mask = batch.visibility.block_mask() if flex else _dense_mask(inner, batch)

    def terms_of(clean: Tensor, masked: Tensor | None, part: Labels) -> LossTerms:
        return loss_terms(clean, masked, part, weights, most_offsets=most_offsets, distill=distill)

    if not head_is_last:
        logits = forward_logits(
            model,
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            mask=mask,
            keep=batch.targets != NO_TARGET,
        )
        row = (batch.targets != NO_TARGET).flatten().cumsum(0) - 1
        return terms_of(logits[row[labels.clean]], logits[row[labels.mask]] if two_streams else None, labels)

    outcome: list[LossTerms] = []

    def loss_instead_of_logits(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        entries = torch.stack([labels.clean, labels.mask] if two_streams else [labels.clean], dim=1)

        def terms_of_chunk(chunk_hidden: Tensor, chunk: slice) -> LossTerms:
            logits = head(chunk_hidden)
            return terms_of(logits[:, 0], logits[:, 1] if two_streams else None, labels.part(chunk))

        head_parameters = [p for p in inner.get_output_embeddings().parameters() if p.requires_grad]
        per_chunk = max(1, CHUNK_ELEMENTS // (inner.config.get_text_config().vocab_size * entries.shape[1]))
        loss = _LossInChunks.apply(
            hidden.flatten(0, 1)[entries],
            terms_of_chunk,
            per_chunk,
            outcome,
            torch.is_grad_enabled(),
            *head_parameters,
        )
        # Through the model's own output, and not beside it: that is what FSDP hooks into.
        return loss.reshape(1, 1, 1)

    with _head_replaced(inner, loss_instead_of_logits):
        output = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False
        ).logits
    return LossTerms(output.squeeze(), outcome[0].sums, outcome[0].correct)


def _dense_mask(model: Any, batch: TrainingBatch) -> Tensor:
    visible = batch.visibility.dense()
    if model.config._attn_implementation != GROUPED:
        return visible
    device = visible.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    return folded_mask(visible, model.config.get_text_config(), dtype)


class _LossInChunks(torch.autograd.Function):
    """Sum of a loss over chunks of labels. Gradients are taken chunk by chunk in the forward pass already.

    So a chunk's logits are gone before the next one's are made, and nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        terms_of_chunk: Callable[[Tensor, slice], LossTerms],
        per_chunk: int,
        outcome: list[LossTerms],
        needs_grad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        """Compute the loss of ``hidden``, (P, streams, D), and append its `LossTerms` to ``outcome``."""
        gradients = [torch.zeros_like(hidden), *map(torch.zeros_like, parameters)] if needs_grad else []
        terms = None
        for start in range(0, max(len(hidden), 1), per_chunk):
            chunk = slice(start, start + per_chunk)
            with torch.set_grad_enabled(needs_grad):
                part = hidden[chunk].detach().requires_grad_(needs_grad)
                of_chunk = terms_of_chunk(part, chunk)
            if needs_grad:
                to_hidden, *to_parameters = torch.autograd.grad(of_chunk.loss, (part, *parameters))
                gradients[0][chunk] = to_hidden
                for total, gradient in zip(gradients[1:], to_parameters, strict=True):
                    total += gradient
            of_chunk = LossTerms(of_chunk.loss.detach(), of_chunk.sums, of_chunk.correct)
            terms = of_chunk if terms is None else terms + of_chunk
        assert terms is not None
        outcome.append(terms)
        ctx.gradients = gradients
        return terms.loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass found."""
        hidden, *parameters = (gradient.mul_(outer[0]) for gradient in ctx.gradients)
        ctx.gradients = []
        return hidden, None, None, None, None, *parameters


@contextmanager
def _head_replaced(model: Any, function: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Iterator[None]:
    """Let ``function(head, hidden)`` stand for the output head inside the model's forward pass."""
    head = model.get_output_embeddings()
    original = head.forward
    head.forward = lambda hidden: function(original, hidden)
    try:
        yield
    finally:
        del head.forward


@torch.no_grad()
def head_is_last(model: nn.Module) -> bool:
    """Whether a model's logits are its output head's output as it is: some go on to scale or cap them."""
    inner = unwrap(model)
    seen: list[Tensor] = []
    hook = inner.get_output_embeddings().register_forward_hook(lambda head, args, output: seen.append(output))
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=inner.device)
        logits = inner(input_ids=token, use_cache=False).logits
    finally:
        hook.remove()
    return len(seen) == 1 and torch.equal(seen[0], logits)
