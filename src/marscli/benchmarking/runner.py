"""Runs a bench: warm-up, interleaved repeats, results saved whatever happens.

Order: within each repeat and for each batch size every method makes one pass over all prompts, the next repeat goes
through them backwards. A machine that gets slower or faster meanwhile thus does so for all of them.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from marscli import checkpoint as checkpoints
from marscli.benchmarking import report
from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.memory import peak_megabytes, start_watching
from marscli.benchmarking.methods import METHODS, Decoder, Method
from marscli.benchmarking.prompts import Prompt, checks, encode_prompts, load_prompts
from marscli.benchmarking.results import Cell, Pass, table_rows
from marscli.checkpoint import Checkpoint
from marscli.errors import InputError, MarsError
from marscli.meta import collect_meta
from marscli.output import prepared_output_dir

logger = logging.getLogger(__name__)

Progress = Callable[[], None]
"""Called after each pass, warm-ups included; there are `BenchConfig.passes` of them."""

WARM_UP_TOKENS = 16


@dataclass
class BenchResult:
    """What a bench found; ``rows`` are those of ``results.json``."""

    meta: dict[str, Any]
    rows: list[dict[str, Any]]
    labels: list[str] = field(default_factory=list)


class BenchInterrupted(KeyboardInterrupt):
    """Ctrl-C: what was measured until then is saved, and is in ``result``."""

    def __init__(self, result: BenchResult) -> None:
        super().__init__("interrupted")
        self.result = result


def run_bench(config: BenchConfig, *, progress: Progress | None = None) -> BenchResult:
    """Compare the methods on one model and write the result files.

    Args:
        config: What to measure.
        progress: Called after each pass.

    Returns:
        The rows and the description of the run.

    Raises:
        InputError: Wrong input, found before the model is loaded.
        MarsError: The weights cannot be read, or no method could run.
        BenchInterrupted: Ctrl-C after the first measured pass.
    """
    prompts, available = load_prompts(config.dataset, config.limit)
    if config.batch_sizes[-1] > len(prompts):
        limited = f"--limit {config.limit}" if len(prompts) < available else f"there are {available}"
        raise InputError(
            f"--batch-sizes: {config.batch_sizes[-1]} rows need as many prompts, and {limited}",
            hint=f"give more prompts (--limit, --dataset), or batch sizes up to {len(prompts)}",
        )
    output = (
        prepared_output_dir(config.output_dir, report.FILES, force=config.force)
        if config.output_dir
        else nullcontext(None)
    )
    with output as folder:
        ids = _encoded(config, prompts)
        checkpoint = checkpoints.load(
            config.model,
            tokenizer=config.tokenizer,
            device=config.device,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        torch.manual_seed(config.seed)
        facts = {"load_before": _check_load(checkpoint.device), **_workload(config, ids, available)}
        cells = plan(config, checkpoint)
        _require_a_runnable(cells)
        correct = None if config.prompt_tokens else checks(prompts, checkpoint.tokenizer)

        def result(*, interrupted: bool) -> BenchResult:
            meta = collect_meta(
                config.resolved(),
                seed=config.seed,
                device=checkpoint.device,
                dtype=checkpoint.dtype,
                model=checkpoint.name,
                interrupted=interrupted,
                **facts,
            )
            return BenchResult(meta, table_rows(cells, correct), [cell.setting.label for cell in cells])

        def keep_numbers() -> None:
            # A run that is killed leaves the repeats that it had finished.
            if folder is not None:
                partial = result(interrupted=True)
                report.write_numbers(partial.meta, partial.rows, folder)

        try:
            measure(cells, checkpoint, ids, config.max_new_tokens, config.repeats, progress, after_repeat=keep_numbers)
        except BaseException as error:
            # Hours of measuring are worth keeping whatever ended them.
            if any(cell.passes for cell in cells):
                for cell in cells:
                    if not cell.passes:
                        cell.skipped = cell.skipped or "the run ended before its turn"
                partial = result(interrupted=True)
                _save(partial, folder)
                if isinstance(error, KeyboardInterrupt):
                    raise BenchInterrupted(partial) from error
            raise
        _require_a_runnable(cells)
        if correct:
            _warn_of_cut_answers(cells, checkpoint.eos_token_ids, config.max_new_tokens)
        done = result(interrupted=False)
        _save(done, folder)
        return done


def _workload(config: BenchConfig, prompts: Sequence[Sequence[int]], available: int) -> dict[str, Any]:
    """What was decoded, and what the speed-ups refer to."""
    return {
        "baselines": {"hf": "transformers generate, greedy, KV cache, sdpa", "ar": "marscli, one token a forward"},
        "data": str(config.dataset) if config.dataset else "built-in prompts",
        "prompts": {"used": len(prompts), "available": available, "partial": len(prompts) < available},
        "prompt_tokens": sum(map(len, prompts)),
    }


def _warn_of_cut_answers(cells: Sequence[Cell], ends: Sequence[int], limit: int) -> None:
    outputs = next(cell.passes[0].outputs for cell in cells if cell.passes)
    cut = sum(len(output) == limit and output[-1] not in ends for output in outputs)
    if cut > 0.05 * len(outputs):
        logger.warning(
            "%d of %d answers were cut off at --max-new-tokens %d, which counts against their accuracy",
            cut,
            len(outputs),
            limit,
        )


def _require_a_runnable(cells: Sequence[Cell]) -> None:
    if all(cell.skipped for cell in cells):
        raise MarsError(
            f"no method could run: {cells[0].skipped}", hint="choose other --methods; hf and ar run on every model"
        )


def plan(config: BenchConfig, checkpoint: Checkpoint) -> list[Cell]:
    """The rows of the table, those that cannot run here marked with the reason."""
    cells = []
    for batch_size in config.batch_sizes:
        for name in config.methods:
            for setting in METHODS[name].settings(config, config.block_size or checkpoint.block_size):
                reason = METHODS[name].refusal(checkpoint, setting, batch_size)
                cells.append(Cell(setting, batch_size, skipped=reason))
    return cells


def measure(
    cells: Sequence[Cell],
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repeats: int,
    progress: Progress | None = None,
    methods: dict[str, Method] = METHODS,
    after_repeat: Callable[[], None] = lambda: None,
) -> None:
    """Warm up each cell, then add `repeats` passes to each, interleaved.

    A cell that runs out of memory is marked as skipped; the others go on.
    """
    gc.collect()
    gc.freeze()  # what lives already need not be searched for garbage in or between the passes
    try:
        _measure(cells, checkpoint, prompts, max_new_tokens, repeats, progress or (lambda: None), methods, after_repeat)
    finally:
        gc.unfreeze()


def _measure(
    cells: Sequence[Cell],
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repeats: int,
    progress: Progress,
    methods: dict[str, Method],
    after_repeat: Callable[[], None],
) -> None:
    device = torch.device(checkpoint.device)
    decoders: dict[int, Decoder] = {}
    for repeat in range(-1, repeats):  # -1 is the warm-up
        for place in _order(len(cells), repeat):
            cell = cells[place]
            try:
                if cell.skipped:
                    continue
                if repeat < 0:
                    decoders[place] = methods[cell.setting.method].open(checkpoint, cell.setting, cell.batch_size)
                    decoders[place](prompts[: cell.batch_size], min(max_new_tokens, WARM_UP_TOKENS))
                else:
                    cell.passes.append(_watched(decoders[place], prompts, max_new_tokens, device))
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                cell.skipped = "out of memory"
                cell.passes.clear()
                decoders.pop(place, None)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            finally:
                progress()
        if repeat >= 0:
            after_repeat()


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def _order(count: int, repeat: int) -> Iterator[int]:
    places = range(count)
    return iter(places if repeat % 2 == 0 else reversed(places))


def _watched(decode: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device) -> Pass:
    gc.collect()
    start_watching(device)
    one = decode(prompts, max_new_tokens)
    one.peak_memory_mb = peak_megabytes(device)
    return one


def _encoded(config: BenchConfig, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The prompts' token ids, before the weights are loaded; what does not fit the model is refused."""
    _, context = checkpoints.load_settings(config.model, trust_remote_code=config.trust_remote_code)
    tokenizer = checkpoints.load_tokenizer(config.tokenizer or config.model, trust_remote_code=config.trust_remote_code)
    encoded = encode_prompts(
        prompts,
        tokenizer,
        context_length=context,
        chat_template=config.chat_template,
        system=config.system,
        prompt_tokens=config.prompt_tokens,
    )
    longest = max(map(len, encoded))
    excess = longest + config.max_new_tokens - context
    if excess > 0:
        where = prompts[[len(ids) for ids in encoded].index(longest)].row.where or "--max-new-tokens"
        raise InputError(
            f"{where}: a prompt of {longest} tokens and {config.max_new_tokens} new ones exceed the model's context of "
            f"{context} by {excess}",
            hint="lower --max-new-tokens or --prompt-tokens, or leave this prompt out",
        )
    return encoded


def _check_load(device: torch.device) -> float | None:
    """Warn where other programs want the same cores.

    Returns:
        Processes that wanted a core in the last minute; None where the system does not tell.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device.type == "cpu" and load > 0.5 * cores:
        logger.warning("the machine is busy (load %.1f on %d cores): times will be noisy", load, cores)
    return load


def _save(result: BenchResult, folder: Path | None) -> None:
    if folder is not None:
        report.write(result.meta, result.rows, result.labels, folder)
