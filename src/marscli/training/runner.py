"""One training run from options to checkpoint: the data, then the model, then the loop, then what it leaves behind."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainingArguments, set_seed

from marscli import checkpoint
from marscli.data.encoding import Encoded, Encoder
from marscli.data.prepare import DataReport, encode_conversations, read_conversations
from marscli.errors import InputError, MarsError
from marscli.meta import collect_meta
from marscli.output import prepared_output_dir, write_json, write_text
from marscli.training.batching import TrainingSet
from marscli.training.callbacks import (
    RUN_FILE,
    CheckpointCallback,
    LogCallback,
    ProgressCallback,
    ProgressFactory,
    StopCallback,
    check_finite,
    read_log,
)
from marscli.training.card import model_card
from marscli.training.config import TrainConfig
from marscli.training.objective import Objective
from marscli.training.plot import plot_training
from marscli.training.trainer import MarsTrainer

logger = logging.getLogger(__name__)

LOG_FILE, SUMMARY_FILE, PLOT_FILE, CARD_FILE = "train_log.jsonl", "summary.json", "loss.png", "README.md"
RESULT_FILES = (
    LOG_FILE,
    SUMMARY_FILE,
    PLOT_FILE,
    CARD_FILE,
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer*",
    "special_tokens_map.json",
    "*.safetensors*",
    "checkpoint-*",
)
CHECKPOINT_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json", RUN_FILE)
DISK_FULL = ("No space left", "quota exceeded", "inline_container")  # the last is torch.save's
# AdamW's average of squared gradients, as language models are commonly trained: the library's 0.999 remembers a
# thousand steps, more than many a fine-tuning has. The demo's first stage came to 38 % accuracy with it, and to 87 %
# with this.
ADAM_BETA2 = 0.95
LOG_LINES = 200  # roughly, of a long run: enough for a smooth picture, too few to cost anything


@dataclass(frozen=True)
class _Data:
    """What there is to train on."""

    examples: list[Encoded]
    report: DataReport
    tokenizer: Any


@dataclass(frozen=True)
class _Resumed:
    """A checkpoint to go on from."""

    folder: Path
    step: int


def run(config: TrainConfig, *, progress: ProgressFactory | None = None) -> dict[str, Any]:
    """Do one training run.

    Args:
        config: What to do.
        progress: Makes the progress bar.

    Returns:
        What ``summary.json`` holds.

    Raises:
        InputError: Wrong options or data; nothing was trained.
        MarsError: The loss or the weights are not finite any more, or memory does not suffice.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, after a checkpoint was saved.
    """
    output_dir = Path(config.output_dir)
    if Path(config.model).is_dir() and output_dir.resolve() == Path(config.model).resolve():
        raise InputError(
            f"--output-dir {output_dir} is the folder of --model", hint="write the result to another folder"
        )
    with prepared_output_dir(output_dir, RESULT_FILES, force=config.force, resume=config.resume) as folder:
        checkpoint.check_model_source(config.model)
        checkpoint.check_tokenizer_source(
            config.tokenizer or config.model, "--tokenizer" if config.tokenizer else "--model"
        )
        if config.resume and (folder / SUMMARY_FILE).is_file():
            logger.info(f"{folder} holds a finished run already; nothing is left to do")
            return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        checkpoint.resolve_device(config.device)
        data = _prepare_data(config)
        course = {**config.decides_course(), "examples": len(data.examples)}
        resumed = _find_checkpoint(folder, course) if config.resume else None
        if config.force:
            _remove_results(folder)
        with _nothing_without_a_checkpoint(folder), _disk_errors(folder):
            return _train(config, folder, data, course, resumed, progress)


def _prepare_data(config: TrainConfig) -> _Data:
    prepared = read_conversations(
        config.dataset,
        prompt_field=config.prompt_field,
        response_field=config.response_field,
        system=config.system,
        skip_bad_rows=config.skip_bad_rows,
        limit=config.limit,
    )
    tokenizer = checkpoint.load_tokenizer(config.tokenizer or config.model, trust_remote_code=config.trust_remote_code)
    if config.chat_template and not tokenizer.chat_template:
        raise InputError(
            "--chat-template: the tokenizer has none", hint="leave the option out, or use an instruction-tuned model"
        )
    ends = checkpoint.eos_token_ids(config.model, tokenizer)
    if not ends:
        raise InputError(
            f"--model {config.model} has no end-of-sequence token, so no answer would ever end",
            hint="set eos_token in its tokenizer, or eos_token_id in its generation_config.json",
        )
    encoder = Encoder(tokenizer, ends, chat_template=config.chat_template is not False)
    if config.system is not None and not encoder.uses_template:
        raise InputError(
            "--system: without a chat template there is no place for a system message",
            hint="leave it out, or write it at the beginning of the prompts",
        )
    if not encoder.uses_template:
        logger.info("no chat template is used: prompt and answer are joined as they are")
    examples = encode_conversations(prepared, encoder, max_length=config.max_length)
    report = prepared.report
    logger.info(
        f"{report.used:,} of {report.rows:,} rows, {report.tokens:,} tokens, {report.response_tokens:,} in responses"
    )
    if report.dropped:
        logger.warning("rows left out: " + ", ".join(f"{count} ({reason})" for reason, count in report.dropped.items()))
    if report.truncated:
        logger.warning(f"{_count(report.truncated, 'response')} cut at --max-length {config.max_length}")
    return _Data(examples, report, tokenizer)


def _find_checkpoint(folder: Path, course: dict[str, Any]) -> _Resumed | None:
    """The newest complete checkpoint, if it is of the same run."""
    found = []
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and all((path / name).is_file() for name in CHECKPOINT_FILES):
            found.append(_Resumed(path, int(step)))
        else:
            logger.warning(f"{path} is not complete and is passed over")
    if not found:
        logger.warning(f"--resume: no complete checkpoint in {folder}; training starts from the beginning")
        return None
    newest = max(found, key=lambda resumed: resumed.step)
    before = json.loads((newest.folder / RUN_FILE).read_text(encoding="utf-8"))
    changed = [name for name, value in course.items() if before.get(name) != value]
    if changed:
        name = changed[0]
        raise InputError(
            f"--resume: {newest.folder} was made with {name.replace('_', '-')} {before.get(name)}, not {course[name]}",
            hint="give the options of the first run again, or start a new run in another folder",
        )
    logger.info(f"resuming from {newest.folder}")
    return newest


@contextmanager
def _nothing_without_a_checkpoint(folder: Path) -> Iterator[None]:
    """Where a run fails before its first checkpoint, take its log away: nothing could go on from it."""
    try:
        yield
    except BaseException:
        if not any(folder.glob("checkpoint-*")) and not (folder / "config.json").exists():
            (folder / LOG_FILE).unlink(missing_ok=True)
        raise


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Say in one way that the disk is full: every library that writes has an exception of its own for it."""
    try:
        yield
    except (MarsError, KeyboardInterrupt):
        raise
    except Exception as error:
        text = str(error)
        if not any(sign in text for sign in DISK_FULL):
            raise
        for path in folder.glob("checkpoint-*"):
            if not (path / RUN_FILE).exists():
                shutil.rmtree(path)
        raise MarsError(
            f"the disk of {folder} is full: {text.splitlines()[0]}",
            hint="make room, then give the same command with --resume; checkpoints that were complete still are",
        ) from error


def _remove_results(folder: Path) -> None:
    for path in {match for pattern in RESULT_FILES for match in folder.glob(pattern)}:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _train(
    config: TrainConfig,
    folder: Path,
    data: _Data,
    course: dict[str, Any],
    resumed: _Resumed | None,
    progress: ProgressFactory | None,
) -> dict[str, Any]:
    device = checkpoint.resolve_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    set_seed(config.seed)
    loaded = checkpoint.load(
        config.model,
        tokenizer=config.tokenizer,
        device=str(device),
        dtype="float32",
        trust_remote_code=config.trust_remote_code,
    )
    model = loaded.model.train()
    block_size = mask_token_id = None
    if config.objective == "mars":
        block_size = config.block_size
        mask_token, mask_token_id = checkpoint.choose_mask_token(
            data.tokenizer, model.get_input_embeddings().weight.shape[0]
        )
        logger.info(f"mask token: {mask_token} (id {mask_token_id})")
    steps_per_epoch = math.ceil(math.ceil(len(data.examples) / config.batch_size) / config.grad_accum)
    steps = config.max_steps or math.ceil(config.epochs * steps_per_epoch)
    pad = data.tokenizer.pad_token_id
    log = LogCallback(folder / LOG_FILE, resumed.step if resumed else 0)
    stop = StopCallback()
    logger.info(
        f"{_count(steps, 'step')} of {_count(config.batch_size * config.grad_accum, 'example')} on {device}, "
        + str(dtype).removeprefix("torch.")
    )
    started = time.perf_counter()
    bar = progress("training", steps) if progress else nullcontext(lambda n=1, status="": None)
    with stop.listening(), bar as advance:
        trainer = MarsTrainer(
            model=model,
            args=_training_arguments(config, folder, device, dtype, steps),
            train_set=TrainingSet(data.examples, block_size=block_size, mask_token_id=mask_token_id),
            pad_token_id=pad if pad is not None else loaded.eos_token_ids[0],
            objective=Objective(ar_weight=config.ar_weight if config.objective == "mars" else 1.0),
            max_length=config.max_length,
            callbacks=[CheckpointCallback(data.tokenizer, course), stop, log, ProgressCallback(advance)],
        )
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for results
        try:
            trainer.train(resume_from_checkpoint=str(resumed.folder) if resumed else None)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            raise MarsError(
                f"out of memory on {device}: {str(error).splitlines()[0]}",
                hint=f"use a smaller --batch-size than {config.batch_size} with a larger --grad-accum, or a smaller "
                f"--max-length than {config.max_length}",
            ) from error
    seconds = time.perf_counter() - started
    done = trainer.state.global_step
    if done < steps:
        logger.warning(f"stopped at step {done} of {steps}; give the same command with --resume to go on")
        raise KeyboardInterrupt
    check_finite(model, done)
    mars = None
    if mask_token_id is not None:
        mars = checkpoint.MarsMetadata(config.block_size, config.ar_weight, config.model, mask_token_id)
    checkpoint.save(folder, model.to(dtype), data.tokenizer, mars=mars)
    log_lines = read_log(folder / LOG_FILE)
    plot_training(log_lines, folder / PLOT_FILE, title=_title(config, steps))
    last = log_lines[-1]
    summary = {
        "meta": collect_meta(config, seed=config.seed, device=device, dtype=dtype, partial=config.limit is not None),
        "objective": config.objective,
        "steps": steps,
        "epochs": round(trainer.state.epoch or 0.0, 4),
        "resumed_from_step": resumed.step if resumed else None,
        "rows": data.report.to_json(),
        **{key: last[key] for key in ("loss", "loss_masked", "loss_clean", "accuracy")},
        "tokens": trainer.entries_seen,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(trainer.entries_seen / seconds, 1),
    }
    write_text(folder / CARD_FILE, model_card(config, summary))
    write_json(folder / SUMMARY_FILE, summary)
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s"
    logger.info(f"loss {last['loss']:.3f} after {_count(steps, 'step')}, {seconds:,.0f} s, {speed}; saved to {folder}")
    return summary


def _training_arguments(
    config: TrainConfig, folder: Path, device: torch.device, dtype: torch.dtype, steps: int
) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr,
        adam_beta2=ADAM_BETA2,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup_ratio * steps),
        logging_steps=max(1, steps // LOG_LINES),
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=2,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
        seed=config.seed,
    )
    if device.type == "cuda" and arguments.world_size == 1:
        # The library takes cuda:0, and every GPU that it sees for torch.nn.DataParallel.
        torch.cuda.set_device(device)
        arguments.__dict__["_setup_devices"] = device
        arguments._n_gpu = 1
    return arguments


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of the computation; ``auto`` is bfloat16 where the device does it well."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = _fast_bfloat16_on_cpu()
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def _fast_bfloat16_on_cpu() -> bool:
    """Measured: processors without instructions for it run bfloat16 several times slower than float32, not faster."""
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype)
        times.append(min(_seconds(matrix) for _ in range(4)))
    return times[0] > 1.5 * times[1]


def _seconds(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - started


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(config: TrainConfig, steps: int) -> str:
    blocks = f", block size {config.block_size}" if config.objective == "mars" else ""
    return f"{Path(config.model).name} · {config.objective}{blocks} · {_count(steps, 'step')} · lr {config.lr:g}"
