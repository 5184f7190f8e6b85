"""Watches a model being called: how wide each call is, and when the first one is done.

The same for every method, transformers' and ours, so that steps and widths are what was run and not what was planned.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch
from torch import nn

from marscli.benchmarking.memory import synchronize


class ModelCalls:
    """A context in which a model's calls are noted.

    Attributes:
        widths: Entries that each call ran for every row, since `start`.
        first_done_at: `time.perf_counter` when the device had finished the first call since `start`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.widths: list[int] = []
        self.first_done_at: float | None = None
        self._model = model
        self._device = device
        self._hooks: list[Any] = []

    def __enter__(self) -> ModelCalls:
        self._hooks = [self._model.register_forward_hook(self._note, with_kwargs=True)]
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Forget what was noted."""
        self.widths, self.first_done_at = [], None

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.widths.append(ids.shape[1])
        if self.first_done_at is None:
            synchronize(self._device)
            self.first_done_at = time.perf_counter()
