"""Comparing ways of decoding one model, on one machine, in one interleaved run. See docs/BENCHMARKING.md.

`bench` is the way in from Python; `runner.run_bench` with a `BenchConfig` is what it and the command call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marscli.benchmarking.runner import BenchResult


def bench(model: str | Path, output_dir: str | Path | None = None, **options: Any) -> BenchResult:
    """Compare ways of decoding a model, as ``mars bench`` does.

    Args:
        model: Hub id or folder.
        output_dir: Folder for ``results.json`` and its companions; None writes no files.
        options: Fields of `marscli.benchmarking.config.BenchConfig`, named as the command's options with underscores:
            ``methods=["hf", "ar"], thresholds=["exact", 0.9], batch_sizes=[1, 4], limit=8`` …

    Returns:
        The result: ``rows`` (one mapping a method, setting and batch size) and ``meta``.

    Raises:
        InputError: An option or the data is wrong; nothing was loaded.
        MarsError: The run failed for a reason that a user can act on.
    """
    from marscli.benchmarking.config import BenchConfig
    from marscli.benchmarking.runner import run_bench

    return run_bench(BenchConfig(model=str(model), output_dir=output_dir, **options))  # type: ignore[arg-type]
