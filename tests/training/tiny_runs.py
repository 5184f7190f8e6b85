"""Whole training runs of a tiny model, and comparing what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import marscli
from marscli.training.callbacks import read_log

FIGURES = ("step", "loss", "loss_masked", "loss_clean", "accuracy", "lr")


def train(base: Path, data: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Train as a user would from Python."""
    settings = {"batch_size": 4, "lr": 3e-3, "dtype": "float32", "device": "cpu", **options}
    sources = list(map(str, data)) if isinstance(data, list) else str(data)
    return marscli.train(model=str(base), dataset=sources, output_dir=folder, **settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def log_figures(folder: Path) -> list[list[Any]]:
    """What does not depend on the clock, line by line."""
    return [[line[key] for key in FIGURES] for line in read_log(folder / "train_log.jsonl") if "loss" in line]


def assert_same_run(a: Path, b: Path) -> None:
    """Two runs with equal weights and logs, bit for bit."""
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name
    assert log_figures(a) == log_figures(b)
