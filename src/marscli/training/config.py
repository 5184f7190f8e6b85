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
        epochs: Passes over the data; a part of one is allowed.
        max_steps: Optimizer steps, instead of epochs.
        lr: Peak learning rate; cosine decay to zero.
        warmup_ratio: Share of the steps over which the learning rate rises.
        batch_size: Examples per device and forward.
        grad_accum: Forwards per optimizer step.
        max_length: Tokens of an example kept, prompt and response.
        save_steps: Steps between two checkpoints on the way.
        resume: Go on from the newest complete checkpoint in the output folder.
        force: Replace what an earlier run left in the output folder.
        prompt_field: Key of the prompt in the rows, if not a usual one.
        response_field: Key of the response, likewise.
        skip_bad_rows: Count and leave out rows that cannot be used.
        limit: Only the first rows.
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
    epochs: float = 5
    max_steps: int | None = None
    lr: float = 5e-6
    warmup_ratio: float = 0.03
    batch_size: int = 8
    grad_accum: int = 1
    max_length: int = 512
    save_steps: int = 500
    resume: bool = False
    force: bool = False
    prompt_field: str | None = None
    response_field: str | None = None
    skip_bad_rows: bool = False
    limit: int | None = None
    chat_template: bool | None = None
    system: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sources = (self.dataset,) if isinstance(self.dataset, str | Path) else self.dataset
        object.__setattr__(self, "dataset", tuple(map(str, sources)))
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        if not self.dataset:
            raise InputError("no --dataset is given", hint="name a .jsonl file or a Hub id: -d data.jsonl")
        _one_of("--objective", self.objective, OBJECTIVES)
        _one_of("--dtype", self.dtype, DTYPES)
        for option in ("batch_size", "grad_accum", "save_steps", "max_steps", "limit"):
            _at_least(option, getattr(self, option), 1)
        _at_least("max_length", self.max_length, 2)
        check_seed(self.seed)
        if self.block_size < 2 and self.objective == "mars":
            raise InputError(
                f"--block-size {self.block_size}: blocks of masks need at least 2 tokens",
                hint="4 is the paper's; for ordinary fine-tuning use --objective ar",
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr {self.lr} is not a number above 0", hint="for example 5e-6, the paper's")
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InputError(f"--epochs {self.epochs} is not a number above 0", hint="for example 5, the paper's")
        if not (math.isfinite(self.ar_weight) and self.ar_weight >= 0):
            raise InputError(f"--ar-weight {self.ar_weight} is not a number ≥ 0", hint="1 is the paper's")
        if not 0 <= self.warmup_ratio < 1:
            raise InputError(f"--warmup-ratio {self.warmup_ratio} is outside [0, 1)", hint="0.03 is the paper's")
        if self.resume and self.force:
            raise InputError(
                "--resume and --force contradict each other", hint="--resume goes on, --force starts again"
            )

    def decides_course(self) -> dict[str, Any]:
        """The options that must stay as they are when a run is resumed."""
        free = ("output_dir", "save_steps", "resume", "force", "device", "trust_remote_code")
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in free
        }


def _at_least(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"--{option.replace('_', '-')} {value} is below {least}", hint=f"use {least} or more")


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value!r} is unknown", hint=f"use one of {', '.join(allowed)}")
