"""Fixtures of the evaluation tests: a tiny MARS model in memory and on disk, and a folder for local tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_lm import Tasks, make_model, make_tokenizer, save_checkpoint
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def usual_eos(tokenizer) -> list[int]:
    """Two ordinary tokens that random text soon meets are declared to end it, beside the tokenizer's own."""
    return [tokenizer.eos_token_id, 40, 41]


@pytest.fixture(scope="session")
def model(tokenizer, usual_eos) -> LlamaForCausalLM:
    return make_model(len(tokenizer), eos=usual_eos)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, model, tokenizer) -> Path:
    """The tiny model as a MARS checkpoint on disk."""
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny-mars", model, tokenizer)


@pytest.fixture
def tasks(tmp_path) -> Tasks:
    folder = tmp_path / "tasks"
    folder.mkdir()
    return Tasks(folder)
