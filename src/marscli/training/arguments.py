"""From our options to the library's: `transformers.TrainingArguments`, the dtype, and where else the log goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from marscli.errors import InputError
from marscli.training import launch
from marscli.training.config import TrainConfig

# AdamW's average of squared gradients, as language models are commonly trained: the library's 0.999 remembers a
# thousand steps, more than many a fine-tuning has. The demo's first stage came to 38 % accuracy with it, and to 87 %
# with this.
ADAM_BETA2 = 0.95
LOG_LINES = 200  # roughly, of a long run: enough for a smooth picture, too few to cost anything
SAVE_STEPS = 500


def check_reporting(names: Sequence[str]) -> None:
    """Refuse a tracker that the library does not know, or whose package is missing.

    Raises:
        InputError: It cannot be reported to.
    """
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise InputError(
                f"--report-to {name} is unknown", hint=f"use one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            )
        if name not in get_available_reporting_integrations():
            package = name.replace("_", "-")
            raise InputError(
                f"--report-to {name}: the package {package} is not installed", hint=f"pip install {package}"
            )


def training_arguments(
    config: TrainConfig, folder: Path, device: torch.device, dtype: torch.dtype, steps: int
) -> TrainingArguments:
    """The library's arguments for a run of so many steps."""
    save_steps = config.save_steps or SAVE_STEPS
    eval_steps = config.eval_steps or save_steps
    if config.early_stopping is not None:
        save_steps = eval_steps  # the best one can only be gone back to where it was saved
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr,
        adam_beta2=ADAM_BETA2,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup_ratio * steps),
        logging_steps=max(1, steps // LOG_LINES),
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="steps" if config.eval_dataset else "no",
        eval_steps=eval_steps if config.eval_dataset else None,
        prediction_loss_only=True,
        load_best_model_at_end=config.early_stopping is not None,
        metric_for_best_model="eval_loss" if config.early_stopping is not None else None,
        greater_is_better=False if config.early_stopping is not None else None,
        restore_callback_states_from_checkpoint=config.early_stopping is not None,
        gradient_checkpointing=config.activation_checkpointing,
        # Every process reads a stream itself and takes its own examples: batches of unequal width cannot be sent.
        accelerator_config={"dispatch_batches": False},
        ddp_find_unused_parameters=False,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=list(config.report_to or ()) or "none",
        seed=config.seed,
    )
    if device.type == "cuda" and arguments.world_size == 1:
        # The library takes cuda:0, and every GPU that it sees for torch.nn.DataParallel.
        torch.cuda.set_device(device)
        arguments.__dict__["_setup_devices"] = device
        arguments._n_gpu = 1
    return arguments


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of the computation; ``auto`` is bfloat16 where the device does it well. One for all processes."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = _fast_bfloat16_on_cpu()
        if launch.world_size() > 1:  # a measurement may come out otherwise in each
            fast = launch.agreed(fast)
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
