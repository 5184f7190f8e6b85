"""One training run from options to checkpoint: the data, then the model, then the loop, then what it leaves behind."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, TrainingArguments, set_seed

from marscli import checkpoint
from marscli.data.encoding import Encoded
from marscli.errors import InputError, MarsError
from marscli.meta import collect_meta
from marscli.output import prepared_output_dir, write_json, write_text
from marscli.training import checkpoints, launch, lora
from marscli.training.arguments import check_reporting, choose_dtype, training_arguments
from marscli.training.batching import TrainingSet, curriculum
from marscli.training.callbacks import (
    CheckpointCallback,
    LogCallback,
    ProgressCallback,
    ProgressFactory,
    StopCallback,
    check_finite,
    read_log,
)
from marscli.training.card import model_card
from marscli.training.checkpoints import LOG_FILE, Resumed
from marscli.training.config import TrainConfig
from marscli.training.inputs import Inputs, count_steps, read_inputs
from marscli.training.launch import SUMMARY_FILE
from marscli.training.objective import Objective
from marscli.training.plot import plot_training
from marscli.training.streaming import TrainingStream
from marscli.training.trainer import MarsTrainer

logger = logging.getLogger(__name__)

PLOT_FILE, CARD_FILE = "loss.png", "README.md"
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
    "adapter_config.json",
    checkpoint.ADAPTER_METADATA,
    "*.safetensors*",
    "checkpoint-*",
)


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
    writes = launch.rank() == 0
    if not writes:
        logging.getLogger("marscli").setLevel(logging.ERROR)
    goes_on = config.resume or (
        config.resume_from is not None and Path(config.resume_from).resolve().parent == output_dir.resolve()
    )
    prepared = prepared_output_dir(
        output_dir,
        RESULT_FILES,
        force=config.force,
        resume=goes_on,
        hint="go on with --resume, choose another folder, or add --force to replace them",
    )
    with prepared if writes else nullcontext(output_dir) as folder:
        checkpoint.check_model_source(config.model)
        checkpoint.check_tokenizer_source(
            config.tokenizer or config.model, "--tokenizer" if config.tokenizer else "--model"
        )
        if config.resume and (folder / SUMMARY_FILE).is_file():
            logger.info(f"{folder} holds a finished run already; nothing is left to do")
            return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        checkpoint.resolve_device(config.device)
        check_reporting(config.report_to or ())
        if config.lora_rank is not None:
            lora.check_available()
        inputs = read_inputs(config)
        course = {
            **config.decides_course(),
            "examples": None if inputs.examples is None else len(inputs.examples),
            "processes": launch.world_size(),
        }
        resumed = checkpoints.find_checkpoint(config, folder, course)
        if writes and goes_on:
            checkpoints.remove_broken(folder)
        if writes and config.force:
            _remove_results(folder)
        with checkpoints.nothing_without_a_checkpoint(folder), checkpoints.disk_errors(folder):
            return _train(config, folder, inputs, course, resumed, progress)


def _remove_results(folder: Path) -> None:
    for path in {match for pattern in RESULT_FILES for match in folder.glob(pattern)}:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class _Model:
    """The model to train, and what was decided with it."""

    model: Any
    mask_token_id: int | None
    pad_token_id: int
    device: torch.device
    dtype: torch.dtype


def _load_model(config: TrainConfig, inputs: Inputs) -> _Model:
    device = launch.own_device(checkpoint.resolve_device(config.device))
    dtype = choose_dtype(config.dtype, device)
    set_seed(config.seed)
    loaded = checkpoint.load(
        config.model,
        tokenizer=config.tokenizer,
        device="cpu" if launch.is_sharded() else str(device),
        # Frozen weights take no updates that could be lost in rounding.
        dtype="float32" if config.lora_rank is None else str(dtype).removeprefix("torch."),
        trust_remote_code=config.trust_remote_code,
    )
    model = loaded.model.train()
    mask_token_id = None
    if config.objective == "mars":
        mask_token, mask_token_id = checkpoint.choose_mask_token(
            inputs.tokenizer, model.get_input_embeddings().weight.shape[0]
        )
        logger.info(f"mask token: {mask_token} (id {mask_token_id})")
    if config.lora_rank is not None:
        model = lora.add_adapters(model, rank=config.lora_rank, alpha=config.lora_alpha, mask_token_id=mask_token_id)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        logger.info(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} weights are trained")
    pad = inputs.tokenizer.pad_token_id
    return _Model(model, mask_token_id, pad if pad is not None else inputs.eos_token_ids[0], device, dtype)


def _examples_a_step(config: TrainConfig) -> int:
    return config.batch_size * config.grad_accum * launch.world_size()


def _make_trainer(
    config: TrainConfig, inputs: Inputs, loaded: _Model, arguments: TrainingArguments, callbacks: list[Any]
) -> MarsTrainer:
    def laid_out(examples: Sequence[Encoded], *, random_offset: bool) -> TrainingSet:
        return TrainingSet(
            examples,
            block_size=None if loaded.mask_token_id is None else config.block_size,
            mask_token_id=loaded.mask_token_id,
            random_offset=random_offset,
            seed=config.seed,
        )

    train_set: Any
    if inputs.examples is None:
        train_set = TrainingStream(
            inputs.reader,
            laid_out((), random_offset=config.random_offset),
            seed=config.seed,
            examples_a_step=_examples_a_step(config),
            block_sizes=curriculum(config.block_size, arguments.max_steps) if config.block_curriculum else None,
        )
    else:
        train_set = laid_out(inputs.examples, random_offset=config.random_offset)
    trainer = MarsTrainer(
        model=loaded.model,
        args=arguments,
        train_set=train_set,
        eval_set=laid_out(inputs.eval_examples, random_offset=False) if inputs.eval_examples else None,
        pad_token_id=loaded.pad_token_id,
        objective=Objective(
            ar_weight=config.ar_weight if config.objective == "mars" else 1.0,
            distill=config.distill,
            balance=config.balance,
        ),
        packing=config.packing,
        max_length=config.max_length,
        block_curriculum=config.block_curriculum,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for results
    return trainer


def _train(
    config: TrainConfig,
    folder: Path,
    inputs: Inputs,
    course: Mapping[str, Any],
    resumed: Resumed | None,
    progress: ProgressFactory | None,
) -> dict[str, Any]:
    writes = launch.rank() == 0
    loaded = _load_model(config, inputs)
    steps = count_steps(config, inputs.examples, launch.world_size())
    before = []
    if resumed is not None:
        log_before = read_log(resumed.folder.parent / LOG_FILE)
        before = [entry for entry in log_before if entry["step"] <= resumed.step]
    stop = StopCallback()
    callbacks = [
        CheckpointCallback(inputs.tokenizer, course, spare_last=config.early_stopping is None),
        stop,
        LogCallback(folder / LOG_FILE if writes else None, before),
    ]
    if config.early_stopping is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=config.early_stopping))
    processes = f" in {launch.world_size()} processes" if launch.world_size() > 1 else ""
    rows = _count(_examples_a_step(config), "row" if config.packing else "example")
    dtype = str(loaded.dtype).removeprefix("torch.")
    logger.info(f"{_count(steps, 'step')} of {rows} on {loaded.device}{processes}, {dtype}")
    started = time.perf_counter()
    bar = progress("training", steps) if progress and writes else nullcontext(lambda n=1, status="": None)
    with stop.listening(), bar as advance:
        try:
            arguments = training_arguments(config, folder, loaded.device, loaded.dtype, steps)
            trainer = _make_trainer(config, inputs, loaded, arguments, [*callbacks, ProgressCallback(advance)])
            trainer.train(resume_from_checkpoint=str(resumed.folder) if resumed else None)
        except InputError as error:  # of a stream
            raise MarsError(error.message, hint=f"{error.hint}; checkpoints stay, --resume goes on") from error
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            raise MarsError(
                f"out of memory on {loaded.device}: {str(error).splitlines()[0]}",
                hint=f"use a smaller --batch-size than {config.batch_size} with a larger --grad-accum, a smaller "
                f"--max-length than {config.max_length}, --activation-checkpointing or --lora-rank",
            ) from error
    seconds = time.perf_counter() - started
    done = trainer.state.global_step
    # Process 0 may still be writing a checkpoint, and ends when another one does.
    trainer.accelerator.wait_for_everyone()
    if stop.stopped:
        logger.warning(f"stopped at step {done} of {steps}; give the same command with --resume to go on")
        raise KeyboardInterrupt
    if config.early_stopping is not None:
        best = trainer.state.best_global_step
        early = f"stopped early, at step {done} of {steps}; " if done < steps else ""
        logger.info(f"{early}the checkpoint of step {best} is the best: held-out loss {trainer.state.best_metric:.4f}")
    _save_model(config, folder, trainer, loaded, inputs)
    summary = {}
    if writes:
        summary = _write_results(config, folder, trainer, loaded, inputs, resumed, seconds)
        if config.save_steps is None:
            checkpoints.remove_all(folder)
    trainer.accelerator.wait_for_everyone()
    return summary


def _save_model(config: TrainConfig, folder: Path, trainer: MarsTrainer, loaded: _Model, inputs: Inputs) -> None:
    """Write the trained checkpoint, or the adapters; all processes take part where the model is sharded."""
    model, state_dict = loaded.model, None
    if launch.is_sharded():
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        state_dict = {name: value.to(loaded.dtype) for name, value in (state_dict or {}).items()}
    else:
        check_finite(model, trainer.state.global_step)
    if launch.rank() != 0:
        return
    mars = None
    if loaded.mask_token_id is not None:
        mars = checkpoint.MarsMetadata(config.block_size, config.ar_weight, config.model, loaded.mask_token_id)
    if config.lora_rank is not None and not config.merge:
        checkpoint.save_adapter(folder, model, inputs.tokenizer, mars=mars)
        return
    if config.lora_rank is not None:
        model = model.merge_and_unload()
    checkpoint.save(folder, model.to(loaded.dtype), inputs.tokenizer, mars=mars, state_dict=state_dict)


def _write_results(
    config: TrainConfig,
    folder: Path,
    trainer: MarsTrainer,
    loaded: _Model,
    inputs: Inputs,
    resumed: Resumed | None,
    seconds: float,
) -> dict[str, Any]:
    done = trainer.state.global_step
    log = read_log(folder / LOG_FILE)
    trained = [entry for entry in log if "loss" in entry]
    evaluated = [entry for entry in log if "eval_loss" in entry]
    plot_training(log, folder / PLOT_FILE, title=_title(config, done))
    last = trained[-1]
    summary = {
        "meta": collect_meta(
            config, seed=config.seed, device=loaded.device, dtype=loaded.dtype, partial=config.limit is not None
        ),
        "objective": config.objective,
        "steps": done,
        "epochs": None if config.streaming else round(trainer.state.epoch or 0.0, 4),
        "processes": launch.world_size(),
        "resumed_from_step": resumed.step if resumed else None,
        "rows": inputs.reader.report.to_json(),
        **{key: last[key] for key in ("loss", "loss_masked", "loss_clean", "accuracy")},
        "eval_loss": evaluated[-1]["eval_loss"] if evaluated else None,
        "best_step": trainer.state.best_global_step if config.early_stopping is not None else done,
        "tokens": trainer.entries_seen,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(trainer.entries_seen / seconds, 1),
    }
    write_text(folder / CARD_FILE, model_card(config, summary))
    write_json(folder / SUMMARY_FILE, summary)
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s"
    logger.info(f"loss {last['loss']:.3f} after {_count(done, 'step')}, {seconds:,.0f} s, {speed}; saved to {folder}")
    return summary


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(config: TrainConfig, steps: int) -> str:
    blocks = f", block size {config.block_size}" if config.objective == "mars" else ""
    return f"{Path(config.model).name} · {config.objective}{blocks} · {_count(steps, 'step')} · lr {config.lr:g}"
