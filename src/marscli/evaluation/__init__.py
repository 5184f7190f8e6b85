"""lm-evaluation-harness tasks, answered by our engine, with the speed beside the score.

`evaluate` is the Python form of ``mars eval``. Importing this package loads neither torch nor lm-eval.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from marscli.evaluation.config import EvalConfig

__all__ = ["EvalConfig", "evaluate"]


def evaluate(
    model: str | Path,
    tasks: str | Iterable[str],
    output_dir: str | Path | None = None,
    *,
    threshold: str | float | Iterable[str | float] = "exact",
    **options: Any,
) -> dict[str, Any]:
    """Score a model on lm-eval tasks and measure its tokens per forward and per second.

    Args:
        model: Hub id or folder.
        tasks: Names of lm-eval tasks, groups or tags: a list, or ``"gsm8k,mmlu"``.
        output_dir: Folder for ``results.json`` and the rest; None writes nothing.
        threshold: One τ or several, each ``"exact"`` or a number.
        options: Any further field of `EvalConfig`; names and defaults are the command line's.

    Returns:
        What ``results.json`` holds: lm-eval's own keys, ``mars`` and ``meta``.

    Raises:
        MarsError: What ``mars eval`` would show as an error; `InputError` where it is found before the model is loaded.

    Example:
        >>> scores = evaluate("runs/mars", "gsm8k", "runs/eval", threshold=["exact", 0.95], limit=100)  # doctest: +SKIP
    """
    from marscli.evaluation.runner import run_eval

    return run_eval(EvalConfig(model=str(model), tasks=tasks, output_dir=output_dir, threshold=threshold, **options))
