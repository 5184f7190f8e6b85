"""One constructor for all ways of decoding. What it returns takes requests and gives step records, as `Engine` does."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import nn

from marscli.core.block_cache import BlockEngine
from marscli.core.decoding import Engine
from marscli.core.jacobi import JacobiEngine

CacheKind = Literal["row", "block", "none"]
CACHES: tuple[CacheKind, ...] = get_args(CacheKind)


def make_engine(
    model: nn.Module, *, cache: CacheKind = "row", cache_block: int = 32, jacobi: bool = False, **options: Any
) -> Engine:
    """Make an engine.

    Args:
        model: See `Engine`, as for ``options``.
        cache: ``row``; ``block``, the paper's (`BlockEngine`), which does not verify; ``none``.
        cache_block: Tokens a block of the block cache.
        jacobi: Jacobi decoding (`JacobiEngine`); any model, no masks.

    Raises:
        ValueError: Jacobi decoding with the block cache.
    """
    if cache == "block":
        if jacobi:
            raise ValueError("Jacobi decoding verifies its guesses, and the block cache cannot")
        return BlockEngine(model, cache_block=cache_block, **options)
    return (JacobiEngine if jacobi else Engine)(model, cache=cache, **options)
