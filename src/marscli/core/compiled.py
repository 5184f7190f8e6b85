"""A model whose calls are compiled by torch.compile, for engines that decode for long.

Sizes are left open, so rows, entries and slots may change from step to step. torch makes one variant for a size of one
and one for larger sizes: a handful of compilations, whatever is decoded. No CUDA graphs: these need fixed sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from marscli.errors import MarsError


class CompiledModel(nn.Module):
    """Stands for a model where `forward_logits` calls it; parameters and buffers are the model's own.

    Args:
        model: A transformers causal LM.
        backend: Of torch.compile.

    Raises:
        MarsError: At a call: it cannot be compiled here.
    """

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.module = model
        self._call = torch.compile(model.__call__, dynamic=True, backend=backend)

    def forward(self, **inputs: Any) -> Any:
        """See the model."""
        try:
            return self._call(**inputs)
        except TorchDynamoException as error:
            # A back end's error is wrapped, and the first line of the wrapper names only the back end.
            cause = getattr(error, "inner_exception", error)
            reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            raise MarsError(
                f"--compile: torch.compile failed here: {reason}",
                hint="leave --compile out; on a CPU it needs a C++ compiler, on a GPU triton",
            ) from error
