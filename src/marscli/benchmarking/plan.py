"""Which rows a bench's table has, and which of them cannot run here. Known before any weights are loaded.

A row is a setting (a method with its parameters) at a batch size. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.results import Cell, Setting
from marscli.checkpoint import MarsMetadata

UNTRAINED_GUESSES = 3  # of Jacobi decoding where no checkpoint or option names a block size
PAPER_THRESHOLD = 0.95  # of the paper's wall-clock comparison


def plan(config: BenchConfig, mars: MarsMetadata | None) -> list[Cell]:
    """The rows of the table, those that cannot run here marked with the reason.

    Args:
        config: What is asked for.
        mars: What the checkpoint says of itself; None: never MARS-trained.
    """
    cells = []
    for batch_size in config.batch_sizes:
        for method in config.methods:
            for setting in _settings(method, config, mars):
                if not method.startswith("hf"):
                    setting = replace(setting, compile=config.compile)
                if config.suite is None or in_suite(setting, batch_size, config):
                    cells.append(Cell(setting, batch_size, skipped=_refusal(setting, batch_size, mars, config.draft)))
    return cells


def passes(config: BenchConfig) -> int:
    """Passes over the prompts in all, warm-ups included: the length of a progress bar."""
    return len(plan(config, None)) * (config.repeats + 1)


def _settings(method: str, config: BenchConfig, mars: MarsMetadata | None) -> Iterator[Setting]:
    """The lines that a method has in the table at each batch size."""
    block_size = config.block_size or (mars.block_size if mars else None)
    if method.startswith("hf"):
        yield Setting(method, cache="dynamic")
    elif method == "ar":
        yield Setting(method)
    elif method == "jacobi":
        guesses = UNTRAINED_GUESSES if block_size is None else block_size - 1
        yield Setting(method, draft_tokens=guesses if config.draft_tokens is None else config.draft_tokens)
    else:
        cache = {"block-cache": "block", "no-cache": "none"}.get(method, "row")
        block = block_size or 1 if mars else 1  # without masks exact decoding is ar's
        for size in config.cache_blocks if cache == "block" else (None,):
            for confidence, threshold in config.points:
                yield Setting(
                    method, threshold, confidence, block, _drafts(method, threshold, block, config), cache, size
                )


def _drafts(method: str, threshold: float | None, block: int, config: BenchConfig) -> int | None:
    """Masks a group; None where the engine chooses."""
    if block == 1 or (method != "verified" and threshold is None):
        return 0
    if method == "verified" and (config.draft_tokens is not None or threshold is None):
        return config.draft_tokens
    return block - 1


def in_suite(setting: Setting, batch_size: int, config: BenchConfig) -> bool:
    """Whether the paper's tables hold a row: all τ at the smallest batch size, one τ for the clock at the others."""
    sweep = batch_size == config.batch_sizes[0]
    clock = not sweep or len(config.batch_sizes) == 1
    if setting.method in ("block-cache", "no-cache"):
        return clock and setting.threshold == PAPER_THRESHOLD
    lossless = setting.threshold is None and setting.method != "threshold"
    return sweep or lossless or setting.threshold == PAPER_THRESHOLD


def _refusal(setting: Setting, batch_size: int, mars: MarsMetadata | None, draft: str | None) -> str | None:
    """Why a row cannot run, or None."""
    if setting.method == "hf-assisted" and draft is None:
        return "assisted decoding needs a small model of the same tokenizer; see --draft"
    if setting.method in ("hf-lookup", "hf-assisted") and batch_size > 1:
        return f"{setting.method}: transformers does it for one row at a time"
    if setting.threshold is not None and (mars is None or setting.block_size < 2):
        return "the checkpoint was never MARS-trained (no mask token, or no block size); see mars train"
    return None
