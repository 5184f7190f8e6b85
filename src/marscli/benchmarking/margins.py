"""How close a call it was where a lossless method's output parts ways with that of ``ar``.

In float32 this does not happen. In bfloat16 forwards of different shapes round differently: then the two tokens should
be about equally likely, and a large margin means a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from marscli.benchmarking.hf import stock
from marscli.benchmarking.results import Cell, first_difference
from marscli.checkpoint import Checkpoint


@torch.inference_mode()
def note_margins(cells: Sequence[Cell], checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]) -> None:
    """Set ``largest_margin`` of the cells that keep nothing unverified and differ from ``ar`` all the same.

    One forward pass for each prompt whose outputs differ, outside what is timed.
    """
    baselines = {cell.batch_size: cell for cell in cells if cell.setting.method == "ar" and cell.passes}
    for cell in cells:
        ar = baselines.get(cell.batch_size)
        if ar is None or not cell.passes or cell.setting.threshold is not None:
            continue
        margins = []
        for prompt, ours, theirs in zip(prompts, cell.passes[0].outputs, ar.passes[0].outputs, strict=True):
            place = first_difference(ours, theirs)
            if place is not None and place < min(len(ours), len(theirs)):
                margins.append(_margin(checkpoint, [*prompt, *theirs[:place]], ours[place], theirs[place]))
        cell.largest_margin = max(margins, default=None)


def _margin(checkpoint: Checkpoint, prefix: Sequence[int], one: int, other: int) -> float:
    """Distance of two tokens' log-probabilities after a prefix, in nats."""
    with stock(checkpoint.model):
        logits = (
            checkpoint.model(input_ids=torch.tensor([list(prefix)], device=checkpoint.device)).logits[0, -1].float()
        )
    return abs(float(logits[one] - logits[other]))
