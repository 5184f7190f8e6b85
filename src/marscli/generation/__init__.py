"""Text in, text out: chat templates, prompt files, incremental detokenisation, on top of the core's engine.

Public names are imported lazily, so that the configuration can be used without torch.
"""

from typing import TYPE_CHECKING, Any

from marscli.generation.config import GenerateConfig

if TYPE_CHECKING:
    from marscli.generation.api import GenerationResult, TextStream, generate, stream

__all__ = ["GenerateConfig", "GenerationResult", "TextStream", "generate", "stream"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from marscli.generation import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
