"""Checkpoints in other layouts, read as the plain models that they hold: GGUF files and the published MARS checkpoints.

The published ones have the model type ``a2d-qwen2``, which only code of their own would know, and say neither their
block size nor their mask token: their weights are a plain Qwen2's, the mask token is their tokenizer's ``<|mask|>``.
GGUF files are dequantised by transformers, with the package ``gguf``.

`check_gguf` needs no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marscli.errors import InputError

GGUF_MAGIC = b"GGUF"
PUBLISHED_PREFIX = "a2d-"  # of the model type of a checkpoint whose rest of the name is the plain model's
PUBLISHED_BLOCK_SIZE = 4  # of the checkpoints that the paper's figures are mostly of
PUBLISHED_MASK_TOKEN = "<|mask|>"


def is_gguf(model: str | Path) -> bool:
    """Whether a name is that of a GGUF file here."""
    return str(model).endswith(".gguf") and Path(model).is_file()


def check_gguf(model: str | Path, option: str) -> None:
    """Refuse a GGUF file that cannot be read here.

    Raises:
        InputError: It is no GGUF file, or the package that reads them is missing.
    """
    with Path(model).open("rb") as handle:
        if handle.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise InputError(f"{option} {model} is no GGUF file", hint="is the download complete?")
    if find_spec("gguf") is None:
        raise InputError(f"{option} {model}: GGUF files need the package gguf", hint="pip install 'marscli[gguf]'")


def located(model: str | Path) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` is called with: name or folder, and options."""
    if is_gguf(model):
        return str(Path(model).parent), {"gguf_file": Path(model).name}
    return str(model), {}


class ConfigReader:
    """`AutoConfig` that also knows the published checkpoints; their config is a plain one with a ``mars`` block."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        """Read a config from a Hub id or folder; options as for `AutoConfig`."""
        from transformers import AutoConfig

        values = _published(name, options)
        if values is None:
            return AutoConfig.from_pretrained(name, **options)
        own = ("model_type", "architectures", "auto_map")
        plain = {key: value for key, value in values.items() if key not in own}
        config = AutoConfig.for_model(values["model_type"].removeprefix(PUBLISHED_PREFIX), **plain)
        if getattr(config, "mars", None) is None:
            config.mars = {"version": 1, "block_size": PUBLISHED_BLOCK_SIZE, "block_size_is_assumed": True}
        if getattr(config, "mask_token_id", None) is None:
            vocabulary = TokenizerReader.from_pretrained(name).get_vocab()
            if PUBLISHED_MASK_TOKEN not in vocabulary:
                raise InputError(
                    f"{name}: its tokenizer has no mask token {PUBLISHED_MASK_TOKEN}", hint="is the folder complete?"
                )
            config.mask_token_id = vocabulary[PUBLISHED_MASK_TOKEN]
        return config


class TokenizerReader:
    """`AutoTokenizer` that also knows the published checkpoints."""

    @staticmethod
    def from_pretrained(name: str, **options: Any) -> Any:
        """Read a tokenizer from a Hub id or folder; options as for `AutoTokenizer`."""
        from transformers import AutoConfig, AutoTokenizer

        values = _published(name, options)
        if values is not None:  # else the model type in config.json would be looked for
            options["config"] = AutoConfig.for_model(values["model_type"].removeprefix(PUBLISHED_PREFIX))
        return AutoTokenizer.from_pretrained(name, **options)


def _published(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """What ``config.json`` of a published checkpoint says; None if it is none, or has no such file."""
    from transformers import PretrainedConfig

    if "gguf_file" in options:
        return None
    try:
        values, _ = PretrainedConfig.get_config_dict(name)
    except OSError:
        return None
    return values if str(values.get("model_type", "")).startswith(PUBLISHED_PREFIX) else None
