"""marscli: make any instruction-tuned language model write several tokens per forward pass.

    import marscli

    checkpoint = marscli.load("runs/mars")
    print(marscli.generate(checkpoint, "Why is the sky blue?", threshold=0.95)[0].text)

The public names are imported when they are first used, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marscli.benchmarking import bench
    from marscli.checkpoint import load
    from marscli.evaluation import evaluate
    from marscli.generation.api import generate, stream
    from marscli.generation.custom import custom_generate
    from marscli.training import train

__version__ = "0.1.0"

_PUBLIC = {
    "bench": "marscli.benchmarking",
    "evaluate": "marscli.evaluation",
    "custom_generate": "marscli.generation.custom",
    "load": "marscli.checkpoint",
    "generate": "marscli.generation.api",
    "stream": "marscli.generation.api",
    "train": "marscli.training",
}

__all__ = ["__version__", "bench", "custom_generate", "evaluate", "generate", "load", "stream", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
