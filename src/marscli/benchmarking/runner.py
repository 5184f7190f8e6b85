"""Runs a bench: warm-up, interleaved repeats, results saved whatever happens.

Order: within each repeat and for each batch size every method makes one pass over all prompts, the next repeat goes
through them backwards. A machine that gets slower or faster meanwhile thus does so for all of them.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marscli import checkpoint as checkpoints
from marscli.benchmarking import report
from marscli.benchmarking.bandwidth import measure_bandwidth, weight_bytes
from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.hf import LOOKUP_TOKENS
from marscli.benchmarking.margins import note_margins
from marscli.benchmarking.memory import peak_megabytes, start_watching
from marscli.benchmarking.methods import METHODS, Decoder, Open
from marscli.benchmarking.passes import FILE as PASSES
from marscli.benchmarking.passes import PassLog, identity
from marscli.benchmarking.plan import plan
from marscli.benchmarking.prompts import Prompt, checks, encode_prompts, load_prompts
from marscli.benchmarking.results import Cell, Pass, table_rows
from marscli.checkpoint import Checkpoint, MarsMetadata
from marscli.errors import InputError, MarsError
from marscli.meta import collect_meta
from marscli.output import prepared_output_dir

logger = logging.getLogger(__name__)

Progress = Callable[[], None]
"""Called after each pass, warm-ups included; there are `plan.passes` of them."""

WARM_UP_TOKENS = 16


@dataclass
class BenchResult:
    """What a bench found; ``rows`` are those of ``results.json``."""

    meta: dict[str, Any]
    rows: list[dict[str, Any]]


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
    files = (*report.FILES, PASSES)
    output = (
        prepared_output_dir(config.output_dir, files, force=config.force, resume=config.resume)
        if config.output_dir
        else nullcontext(None)
    )
    with output as folder:
        device = checkpoints.resolve_device(config.device)
        ids, mars = _encoded(config, prompts)
        cells = plan(config, mars)
        _refuse_if_nothing_runs(cells, InputError)
        if mars is None and any(cell.setting.method in ("threshold", "verified") for cell in cells):
            logger.warning("%s was never MARS-trained: exact decoding is one token a forward, as ar", config.model)
        draft_wanted = any(cell.setting.method == "hf-assisted" and not cell.skipped for cell in cells)
        if draft_wanted:
            _check_draft(config)
        log = PassLog(folder, identity(config, ids, _machine(device)), cells, resume=config.resume) if folder else None
        if any(cell.passes for cell in cells):
            logger.info("going on after %d passes", sum(len(cell.passes) for cell in cells))
        checkpoint = _load(config, config.model, tokenizer=config.tokenizer, block_size=config.block_size)
        draft = _load(config, config.draft) if draft_wanted and config.draft else None
        torch.manual_seed(config.seed)
        bandwidth, weights = measure_bandwidth(checkpoint.device), weight_bytes(checkpoint.model)
        facts = {
            "load_before": _check_load(checkpoint.device),
            "bandwidth_gb_per_second": bandwidth / 1e9,
            "weights_mb": weights / 1e6,
            **_workload(config, ids, available),
        }
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
            return BenchResult(meta, table_rows(cells, correct, weights / bandwidth))

        def keep_numbers() -> None:
            # A run that is killed leaves the repeats that it had finished.
            if folder is not None:
                partial = result(interrupted=True)
                report.write_numbers(partial.meta, partial.rows, folder)

        try:
            measure(
                cells,
                checkpoint,
                ids,
                config.max_new_tokens,
                config.repeats,
                progress,
                draft=draft,
                after_pass=log.add if log else None,
                after_repeat=keep_numbers,
            )
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
        _refuse_if_nothing_runs(cells, MarsError)
        if correct:
            _warn_of_cut_answers(cells, checkpoint.eos_token_ids, config.max_new_tokens)
        note_margins(cells, checkpoint, ids)
        done = result(interrupted=False)
        _save(done, folder)
        return done


def _load(config: BenchConfig, name: str, **options: Any) -> Checkpoint:
    return checkpoints.load(
        name, device=config.device, dtype=config.dtype, trust_remote_code=config.trust_remote_code, **options
    )


def _machine(device: torch.device) -> dict[str, Any]:
    """What times depend on besides the options."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "device_name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def _workload(config: BenchConfig, prompts: Sequence[Sequence[int]], available: int) -> dict[str, Any]:
    """What was decoded, and what the speed-ups refer to."""
    return {
        "baselines": {
            "hf": "transformers generate, greedy, KV cache, sdpa",
            "hf-lookup": f"the same with prompt lookup of {LOOKUP_TOKENS} tokens",
            "hf-assisted": f"the same with drafts of {config.draft}, the library's defaults",
            "ar": "marscli, one token a forward",
        },
        "data": config.dataset or "built-in prompts",
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


def _refuse_if_nothing_runs(cells: Sequence[Cell], error: type[MarsError]) -> None:
    if all(cell.skipped for cell in cells):
        reason = cells[0].skipped if cells else "the suite has no row for these methods, thresholds and batch sizes"
        raise error(f"--methods: no method can run: {reason}", hint="choose others; hf and ar run on every model")


def measure(
    cells: Sequence[Cell],
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repeats: int,
    progress: Progress | None = None,
    *,
    draft: Checkpoint | None = None,
    methods: Mapping[str, Open] = METHODS,
    after_pass: Callable[[Cell, Pass], None] | None = None,
    after_repeat: Callable[[], None] | None = None,
) -> None:
    """Warm up each cell, then bring each to `repeats` passes, interleaved.

    A cell that runs out of memory, or that transformers refuses, is marked as skipped; the others go on.
    """
    gc.collect()
    gc.freeze()  # what lives already need not be searched for garbage in or between the passes
    device = torch.device(checkpoint.device)
    decoders: dict[int, Decoder] = {}

    def turn(place: int, repeat: int) -> None:
        cell = cells[place]
        if cell.skipped or len(cell.passes) > (repeat if repeat >= 0 else repeats - 1):
            return
        try:
            if repeat < 0:
                decoders[place] = methods[cell.setting.method](checkpoint, cell.setting, cell.batch_size, draft)
                decoders[place](prompts[: cell.batch_size], min(max_new_tokens, WARM_UP_TOKENS))
                return
            cell.passes.append(_watched(decoders[place], prompts, max_new_tokens, device))
        except (RuntimeError, ValueError) as error:
            cell.skipped = _reason(error, cell)
            cell.passes.clear()
            decoders.pop(place, None)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return
        if after_pass is not None:
            after_pass(cell, cell.passes[-1])

    try:
        for repeat in range(-1, repeats):  # -1 is the warm-up
            for place in _order(len(cells), repeat):
                turn(place, repeat)
                if progress is not None:
                    progress()
            if repeat >= 0 and after_repeat is not None:
                after_repeat()
    finally:
        gc.unfreeze()


def _reason(error: RuntimeError | ValueError, cell: Cell) -> str:
    """Why a row is skipped; errors that are no property of method and machine are raised again."""
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    if isinstance(error, ValueError) and cell.setting.method in ("hf-lookup", "hf-assisted"):
        return f"transformers refuses it: {str(error).splitlines()[0]}"
    raise error


def _order(count: int, repeat: int) -> Iterator[int]:
    places = range(count)
    return iter(places if repeat % 2 == 0 else reversed(places))


def _watched(decode: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device) -> Pass:
    gc.collect()
    start_watching(device)
    one = decode(prompts, max_new_tokens)
    one.peak_memory_mb = peak_megabytes(device)
    return one


def _encoded(config: BenchConfig, prompts: Sequence[Prompt]) -> tuple[list[list[int]], MarsMetadata | None]:
    """The prompts' token ids and what the checkpoint says of itself, before the weights are loaded.

    What does not fit the model is refused.
    """
    mars, context = checkpoints.load_settings(config.model, trust_remote_code=config.trust_remote_code)
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
    return encoded, mars


def _check_draft(config: BenchConfig) -> None:
    """Refuse a small model that does not speak the model's tokens."""
    assert config.draft is not None
    checkpoints.check_model_source(config.draft, "--draft")
    checkpoints.load_settings(config.draft, trust_remote_code=config.trust_remote_code)
    vocabularies = []
    for name in (config.tokenizer or config.model, config.draft):
        tokenizer = checkpoints.load_tokenizer(name, trust_remote_code=config.trust_remote_code)
        # MARS training may have added the mask token to one of them.
        vocabularies.append({text: i for text, i in tokenizer.get_vocab().items() if i != tokenizer.mask_token_id})
    ours, theirs = vocabularies
    shared = ours.keys() & theirs.keys()
    differing = [text for text in shared if ours[text] != theirs[text]]
    if differing or len(shared) < 0.99 * len(ours):
        raise InputError(
            f"--draft {config.draft}: its tokenizer is not the model's",
            hint="take a smaller model of the same family, or leave hf-assisted out of --methods",
        )


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
        report.write(result.meta, result.rows, folder)
