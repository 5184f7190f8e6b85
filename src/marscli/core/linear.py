"""Linear layers for steps of few entries on a CPU.

Between one entry and some ten, a float32 product ``x Wᵀ`` takes nearly twice the time of one with a single vector: the
library packs the whole weight matrix for every call. ``(W xᵀ)ᵀ`` is the same product with the small matrix packed
(docs/PERFORMANCE.md has the times). Steps of that width are what verified decoding consists of, so it matters here and
hardly anywhere else; outside of our steps the layers do what they always did. bfloat16 and GPUs have no such jump.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MOST_ENTRIES = 12  # from here on the usual product is as fast

_few_entries = False


class FewEntriesLinear(nn.Linear):
    """`torch.nn.Linear` that multiplies the other way round inside of `few_entries`."""

    def forward(self, input: Tensor) -> Tensor:
        """See `torch.nn.Linear`."""
        if not _few_entries:
            return super().forward(input)
        output = torch.mm(self.weight, input.reshape(-1, self.in_features).t())
        if self.bias is not None:
            output += self.bias[:, None]
        return output.t().contiguous().view(*input.shape[:-1], self.out_features)


def prepare_linear_layers(model: nn.Module) -> None:
    """Let a model's linear layers take part, if they are plain ones in float32 on a CPU. Weights stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_cpu:
            module.__class__ = FewEntriesLinear


@contextmanager
def few_entries(entries: int) -> Iterator[None]:
    """Multiply the other way round while the block runs, if a step has so few entries, all rows together."""
    global _few_entries
    _few_entries = entries <= MOST_ENTRIES
    try:
        yield
    finally:
        _few_entries = False
