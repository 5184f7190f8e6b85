"""The floor of a decode step: every weight must come from memory once a forward, whatever else is done.

The bandwidth is measured on the spot: the faster of copying and of summing a buffer that no cache holds.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from marscli.benchmarking.memory import synchronize

BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}
TRIES = 4


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device moves to or from its memory."""
    count = BUFFER_BYTES.get(device.type, 2**28) // 4
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for moved, move in ((2, lambda: target.copy_(source)), (1, source.sum)):
        for _ in range(TRIES):
            synchronize(device)
            start = time.perf_counter()
            move()
            synchronize(device)
            best = max(best, 4 * count * moved / (time.perf_counter() - start))
    return best


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a forward pass reads: all but an embedding of which only single rows are looked up."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if embedding is None or head is None or head.weight is embedding.weight:
        return total
    return total - embedding.weight.numel() * embedding.weight.element_size()
