"""Everything that one training run is told, checked on its own. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marscli.core.params import check_seed
from marscli.errors import InputError

OBJECTIVES = ("mars", "ar")
DTYPES = ("auto", "float32", "bfloat16")
LARGEST_BLOCK = 32
AT_LEAST_ONE = (
    "batch_size",
    "grad_accum",
    "save_steps",
    "max_steps",
    "limit",
    "eval_steps",
    "early_stopping",
    "num_processes",
    "lora_rank",
)
NEEDS = {
    "streaming": "max_steps",
    "eval_steps": "eval_dataset",
    "early_stopping": "eval_dataset",
    "lora_alpha": "lora_rank",
    "merge": "lora_rank",
}
# What may change when a run is resumed, since the weights do not depend on it. The number of processes counts
# through the size of the global batch.
LEAVES_COURSE = (
    "output_dir",
    "save_steps",
    "eval_dataset",
    "eval_steps",
    "early_stopping",
    "report_to",
    "activation_checkpointing",
    "num_processes",
    "merge",
    "dry_run",
    "resume",
    "resume_from",
    "force",
    "device",
    "trust_remote_code",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of ``mars train``, with the paper's settings as defaults.

    Attributes:
        model: Hub id or folder of the model to start from.
        dataset: Files and Hub ids (``org/name:config:split``).
        output_dir: Folder that becomes the trained checkpoint.
        objective: ``mars``, or ``ar`` for ordinary supervised fine-tuning.
        block_size: B, the size of the blocks of masks.
        ar_weight: Weight of the clean stream's loss beside the masked stream's.
        distill: Train the masks on the clean stream's own distribution instead of the data's token.
        balance: Weigh the two terms against each other as the run goes, on top of ``ar_weight``.
        random_offset: Begin the block grid of each response at a random place, so that every token is met at every
            offset.
        block_curriculum: Let the block size grow from 2 to B over the first half of the steps.
        epochs: Passes over the data; a part of one is allowed.
        max_steps: Optimizer steps, instead of epochs.
        lr: Peak learning rate; cosine decay to zero.
        warmup_ratio: Share of the steps over which the learning rate rises.
        batch_size: Examples per device and forward.
        grad_accum: Forwards per optimizer step.
        max_length: Tokens of an example kept, prompt and response.
        packing: Fill rows up with several examples each, kept apart, instead of padding them.
        activation_checkpointing: Compute activations anew in the backward pass: less memory, more time.
        lora_rank: Train adapters of this rank on all linear layers, and the mask token's embedding, instead of all
            weights.
        lora_alpha: Scale of the adapters; None is twice the rank.
        merge: Write an ordinary checkpoint with the adapters merged in, instead of the adapters alone.
        save_steps: Steps between two checkpoints on the way. None: 500, and they go once the trained model is saved.
        resume: Go on from the newest complete checkpoint in the output folder.
        resume_from: Go on from this checkpoint.
        force: Replace what an earlier run left in the output folder.
        prompt_field: Key of the prompt in the rows, if not a usual one.
        response_field: Key of the response, likewise.
        skip_bad_rows: Count and leave out rows that cannot be used.
        limit: Only the first rows.
        streaming: Read, encode and drop rows as they are needed, for data larger than memory; needs ``max_steps``.
        eval_dataset: Data held out, of which the loss is measured on the way.
        eval_steps: Steps between two such measurements; None is ``save_steps``.
        early_stopping: Stop after this many measurements without a lower loss, and keep the best checkpoint.
        report_to: Where else the log goes, by the library's names: tensorboard, wandb, ...
        num_processes: Processes of this machine that train together, one a device; each takes ``batch_size`` examples.
        dry_run: Show what would be trained, and stop.
        chat_template: Use the tokenizer's chat template; None where it has one.
        system: System message for rows that have none.
        tokenizer: Hub id or folder, if not the model's.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        dtype: Of the computation and the saved checkpoint; weights and optimizer are float32 while training. ``auto``
            is bfloat16 where the device does it well.
        trust_remote_code: Run Python code that comes with the checkpoint.
        seed: Order of the data, and whatever else is random.
    """

    model: str
    dataset: str | Sequence[str]
    output_dir: str | Path
    objective: str = "mars"
    block_size: int = 4
    ar_weight: float = 1.0
    distill: bool = False
    balance: bool = False
    random_offset: bool = False
    block_curriculum: bool = False
    epochs: float = 5
    max_steps: int | None = None
    lr: float = 5e-6
    warmup_ratio: float = 0.03
    batch_size: int = 8
    grad_accum: int = 1
    max_length: int = 512
    packing: bool = False
    activation_checkpointing: bool = False
    lora_rank: int | None = None
    lora_alpha: float | None = None
    merge: bool = False
    save_steps: int | None = None
    eval_dataset: str | Sequence[str] | None = None
    eval_steps: int | None = None
    early_stopping: int | None = None
    report_to: str | Sequence[str] | None = None
    num_processes: int = 1
    dry_run: bool = False
    resume: bool = False
    resume_from: str | Path | None = None
    force: bool = False
    prompt_field: str | None = None
    response_field: str | None = None
    skip_bad_rows: bool = False
    limit: int | None = None
    streaming: bool = False
    chat_template: bool | None = None
    system: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", _names(self.dataset))
        object.__setattr__(self, "eval_dataset", _names(self.eval_dataset) or None)
        object.__setattr__(self, "report_to", tuple(name for name in _names(self.report_to) if name != "none") or None)
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        if not self.dataset:
            raise InputError("no --dataset is given", hint="name a .jsonl file or a Hub id: -d data.jsonl")
        _one_of("--objective", self.objective, OBJECTIVES)
        _one_of("--dtype", self.dtype, DTYPES)
        for option in AT_LEAST_ONE:
            _at_least(option, getattr(self, option), 1)
        _at_least("max_length", self.max_length, 2)
        check_seed(self.seed)
        self._check_objective()
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr {self.lr} is not a number above 0", hint="for example 5e-6, the paper's")
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InputError(f"--epochs {self.epochs} is not a number above 0", hint="for example 5, the paper's")
        if not 0 <= self.warmup_ratio < 1:
            raise InputError(f"--warmup-ratio {self.warmup_ratio} is outside [0, 1)", hint="0.03 is the paper's")
        if self.lora_alpha is not None and not (math.isfinite(self.lora_alpha) and self.lora_alpha > 0):
            raise InputError(f"--lora-alpha {self.lora_alpha} is not a number above 0", hint="twice the rank is common")
        self._check_combinations()

    def _check_objective(self) -> None:
        if not (math.isfinite(self.ar_weight) and self.ar_weight >= 0):
            raise InputError(f"--ar-weight {self.ar_weight} is not a number ≥ 0", hint="1 is the paper's")
        if self.objective == "mars":
            if not 2 <= self.block_size <= LARGEST_BLOCK:
                raise InputError(
                    f"--block-size {self.block_size} is outside 2 … {LARGEST_BLOCK}",
                    hint="4 is the paper's; for ordinary fine-tuning use --objective ar",
                )
            return
        for option in ("distill", "balance", "random_offset", "block_curriculum"):
            if getattr(self, option):
                raise InputError(
                    f"{_flag(option)} has no meaning with --objective ar, which knows no masks", hint="leave it out"
                )

    def _check_combinations(self) -> None:
        if self.force and (self.resume or self.resume_from):
            name = "--resume" if self.resume else "--resume-from"
            raise InputError(f"{name} and --force contradict each other", hint=f"{name} goes on, --force starts again")
        if self.resume and self.resume_from:
            raise InputError(
                "--resume and --resume-from are both given", hint="--resume takes the newest checkpoint of --output-dir"
            )
        for option, needed in NEEDS.items():
            if getattr(self, option) and not getattr(self, needed):
                raise InputError(f"{_flag(option)} needs {_flag(needed)}", hint=f"add {_flag(needed)}, or leave it out")
        if self.streaming and self.packing:
            raise InputError(
                "--streaming and --packing exclude each other: packing sorts all lengths first", hint="leave one out"
            )

    def decides_course(self) -> dict[str, Any]:
        """The options that must stay as they are when a run is resumed."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in LEAVES_COURSE
        }


def _names(values: Any) -> tuple[str, ...]:
    return (str(values),) if isinstance(values, str | Path) else tuple(map(str, values or ()))


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _at_least(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{_flag(option)} {value} is below {least}", hint=f"use {least} or more")


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value!r} is unknown", hint=f"use one of {', '.join(allowed)}")
