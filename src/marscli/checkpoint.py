"""Checkpoints: ordinary Hugging Face folders, with the little that MARS adds to them.

A MARS checkpoint is an ordinary causal LM whose tokenizer names a mask token and whose ``config.json`` holds::

    "mask_token_id": 16, "pard_token": 16,
    "mars": {"version": 1, "block_size": 4, "ar_weight": 1.0, "base_model": "..."}

Adapters (LoRA) have no ``config.json`` of their own: those keys are in ``mars.json`` beside ``adapter_config.json``,
which names the base model. `load` merges them into it, so that decoding meets an ordinary model.

The mask token adds no parameter: it takes a spare embedding row, or a reserved token of the model's own vocabulary.
No code from a checkpoint is run unless asked for, and only safetensors weights are read.

`check_model_source` needs no torch, so that a wrong path is refused before anything slow is imported.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marscli import formats
from marscli.errors import InputError, MarsError

if TYPE_CHECKING:
    import torch

    from marscli.generation.api import GenerationResult, TextStream

logger = logging.getLogger(__name__)

METADATA_VERSION = 1
METADATA_KEYS = ("mars", "mask_token_id", "pard_token")
ADAPTER_CONFIG, ADAPTER_METADATA = "adapter_config.json", "mars.json"
NEW_MASK_TOKEN = "<|mask|>"

# Reserved tokens that model families ship and never train on, best first.
RESERVED_TOKENS = (
    r"<empty_output>",  # SmolLM, StarCoder
    r"<\|reserved_special_token_\d+\|>",  # Llama 3
    r"<unused\d+>",  # Gemma
    r"<\|dummy_\d+\|>",  # Phi
    r"\[control_\d+\]",  # Mistral
    r"<\|?extra_\d+\|?>",  # Qwen
    r"\[unused\d+\]",
)


@dataclass(frozen=True)
class MarsMetadata:
    """What the ``mars`` block and the mask token keys of ``config.json`` hold.

    Attributes:
        block_size: B that the checkpoint was trained with.
        ar_weight: Weight of the clean stream's loss.
        base_model: Name of the model that training started from.
        mask_token_id: The mask token.
        is_assumed: Whether the block size is a guess, since the checkpoint does not say it.
    """

    block_size: int
    ar_weight: float
    base_model: str
    mask_token_id: int
    is_assumed: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with all that decoding needs to know.

    Attributes:
        model: A transformers causal LM in eval mode.
        tokenizer: Its tokenizer.
        name: Hub id or folder.
        mask_token_id: None if the checkpoint was never MARS-trained: it decodes one token a forward.
        block_size: B, None likewise.
        eos_token_ids: Tokens that end an answer.
        context_length: Longest sequence, prompt and answer together.
    """

    model: Any
    tokenizer: Any
    name: str
    mask_token_id: int | None
    block_size: int | None
    eos_token_ids: tuple[int, ...]
    context_length: int

    @property
    def is_mars(self) -> bool:
        """Whether the checkpoint can predict from mask tokens."""
        return self.mask_token_id is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in."""
        return self.model.dtype

    def generate(self, prompts: Any, **options: Any) -> list[GenerationResult]:
        """Complete prompts: `marscli.generate` with this model."""
        from marscli.generation import api

        return api.generate(self, prompts, **options)

    def stream(self, prompt: Any, **options: Any) -> TextStream:
        """Complete one prompt and hand out the text while it is written: `marscli.stream` with this model."""
        from marscli.generation import api

        return api.stream(self, prompt, **options)


def check_model_source(model: str | Path, option: str = "--model", *, gguf: bool = False) -> None:
    """Refuse a model folder that cannot work, before anything slow happens. Hub ids are left to `load`.

    Args:
        gguf: Whether a GGUF file will do, which can be decoded with but not trained.

    Raises:
        InputError: The folder is missing or incomplete, or the name is neither a folder nor a Hub id.
    """
    folder = Path(model)
    if gguf and formats.is_gguf(model):
        formats.check_gguf(model, option)
        return
    if folder.is_file():
        raise InputError(f"{option} {model} is a file", hint="give the folder that holds config.json and the weights")
    if not folder.is_dir():
        _check_hub_id(model, option)
        return
    names = sorted(path.name for path in folder.iterdir())
    if ADAPTER_CONFIG in names:
        check_model_source(base_of(model), f"{model}/{ADAPTER_CONFIG}: base model")
    elif "config.json" not in names:
        found = ", ".join(names[:8]) or "nothing"
        raise InputError(f"{option} {model} holds no config.json (found: {found})", hint=_nearby(folder / "x"))
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        if pickled:
            raise InputError(
                f"{option} {model} holds {pickled[0]} but no safetensors weights",
                hint="pickled weights can run code and are not read; convert them with save_pretrained",
            )
        raise InputError(
            f"{option} {model} holds no weights (*.safetensors)", hint="is the download or the training run complete?"
        )


def check_tokenizer_source(tokenizer: str | Path, option: str = "--model") -> None:
    """Refuse a folder without a tokenizer; Hub ids are left to `load_tokenizer`.

    Raises:
        InputError: The folder is missing or holds no tokenizer file, or the name is neither a folder nor a Hub id.
    """
    folder = Path(tokenizer)
    if formats.is_gguf(tokenizer):
        formats.check_gguf(tokenizer, option)
        return
    if folder.is_file():
        raise InputError(f"{option} {tokenizer} is a file", hint="give the folder that holds tokenizer.json")
    if not folder.is_dir():
        _check_hub_id(tokenizer, option)
        return
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        raise InputError(
            f"{option} {tokenizer} holds no tokenizer (tokenizer.json)",
            hint="copy the base model's tokenizer files there, or name a tokenizer with --tokenizer",
        )


def _check_hub_id(name: str | Path, option: str) -> None:
    """Refuse the name of a missing folder that cannot be a Hub id either."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) or str(name).startswith((".", "~")):
        raise InputError(f"{option} {name}: there is no such folder", hint=_nearby(Path(name)))


def _nearby(folder: Path) -> str:
    """What the user may have meant: checkpoint folders near the one that was asked for, the likest name first."""
    return _checkpoints_near(folder) or (
        "give a folder with config.json and safetensors weights, or a Hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    )


def _checkpoints_near(folder: Path) -> str | None:
    parent = next((each for each in folder.parents if each.is_dir()), Path())
    try:
        children = [path for path in parent.iterdir() if path.is_dir()]
        found = [path for path in children if (path / "config.json").is_file()]
        if not found:  # perhaps one level down, as in runs/mars
            found = [path for child in children for path in child.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return None
    names = sorted(str(path.relative_to(parent)) for path in found)
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, folder.name, Path(name).name).ratio())
    return f"checkpoint folders in {parent.resolve()}: {', '.join(names[:6])}" if names else None


def resolve_device(device: str = "auto") -> torch.device:
    """The torch device for ``auto``, ``cpu``, ``cuda[:N]`` or ``mps``.

    Raises:
        InputError: No such device, or it is not there.
    """
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise InputError(f"--device {device} is unknown", hint="use auto, cpu, cuda, cuda:N or mps")
    resolved = torch.device(device)
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices", hint="use --device auto"
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("--device mps is not available on this machine", hint="use --device auto")
    return resolved


def resolve_dtype(dtype: str) -> torch.dtype | str:
    """The torch dtype of a name; ``auto`` stays, and means the checkpoint's own.

    Raises:
        InputError: An unknown name.
    """
    import torch

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return dtype
    if dtype not in names:
        raise InputError(f"--dtype {dtype} is unknown", hint=f"use auto, {', '.join(names)}")
    return names[dtype]


def load(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    block_size: int | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Load a checkpoint for decoding.

    Args:
        model: Hub id or folder.
        tokenizer: Hub id or folder; by default the model's.
        device: ``auto``, ``cpu``, ``cuda[:N]`` or ``mps``.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        block_size: B, for a published checkpoint, which does not say its own.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        InputError: The folder, the tokenizer, the device or the kind of model is not usable.
        MarsError: Weights cannot be read or downloaded.
    """
    check_model_source(model, gguf=True)
    check_tokenizer_source(tokenizer or model, "--tokenizer" if tokenizer else "--model")
    torch_device, torch_dtype = resolve_device(device), resolve_dtype(dtype)

    import torch
    from transformers import AutoModelForCausalLM

    from marscli.core.attention import use_grouped_attention
    from marscli.core.model import check_decodable, check_model

    name = str(model)
    base = base_of(name)
    config = _read_config(base, trust_remote_code=trust_remote_code)
    check_decodable(config, name)
    mars = metadata_of(config, name)
    if mars is not None and mars.is_assumed:
        if block_size is None:
            logger.warning("%s does not say its block size: %d is taken (--block-size)", name, mars.block_size)
        mars = replace(mars, block_size=block_size or mars.block_size)
    loaded_tokenizer = load_tokenizer(tokenizer or model, trust_remote_code=trust_remote_code)
    try:
        source, options = formats.located(base)
        loaded_model = _from_hub(
            AutoModelForCausalLM,
            source,
            "weights",
            **options,
            config=config,
            dtype=torch_dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
        if base != name:
            loaded_model = _merge_adapter(loaded_model, name)
        loaded_model = loaded_model.to(torch_device)
    except torch.OutOfMemoryError as error:
        raise MarsError(
            f"{name} does not fit into the memory of {torch_device}", hint="try --dtype bfloat16"
        ) from error
    check_model(loaded_model.eval(), name)
    use_grouped_attention(loaded_model)
    text_config = config.get_text_config()
    return Checkpoint(
        model=loaded_model,
        tokenizer=loaded_tokenizer,
        name=name,
        mask_token_id=mars.mask_token_id if mars else None,
        block_size=mars.block_size if mars else None,
        eos_token_ids=_eos_token_ids(loaded_model.generation_config, text_config, loaded_tokenizer),
        context_length=text_config.max_position_embeddings,
    )


def load_settings(model: str | Path, *, trust_remote_code: bool = False) -> tuple[MarsMetadata | None, int]:
    """Read what ``config.json`` says, without the weights: enough to refuse wrong input before they are loaded.

    Returns:
        The MARS settings (None: never MARS-trained) and the context length.

    Raises:
        InputError: The checkpoint or its kind of model is not usable.
    """
    check_model_source(model, gguf=True)
    from marscli.core.model import check_decodable

    config = _read_config(base_of(model), trust_remote_code=trust_remote_code)
    check_decodable(config, str(model))
    return metadata_of(config, str(model)), config.get_text_config().max_position_embeddings


def load_tokenizer(tokenizer: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer from a Hub id or folder.

    Raises:
        InputError: The folder holds none, or it cannot be read.
    """
    check_tokenizer_source(tokenizer)
    source, options = formats.located(tokenizer)
    return _from_hub(formats.TokenizerReader, source, "tokenizer", trust_remote_code=trust_remote_code, **options)


def _read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    source, options = formats.located(name)
    return _from_hub(formats.ConfigReader, source, "config", trust_remote_code=trust_remote_code, **options)


def base_of(model: str | Path) -> str:
    """Where config and weights are: the base model of a folder of adapters, else the model itself.

    Raises:
        InputError: The adapters name no base model.
    """
    path = Path(model) / ADAPTER_CONFIG
    if not path.is_file():
        return str(model)
    try:
        return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{path} names no base model", hint="is the folder complete and undamaged?") from error


def _merge_adapter(model: Any, folder: str) -> Any:
    """The model with the adapters of a folder merged in: an ordinary model again."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            f"--model {folder} holds adapters, which need the package peft", hint="pip install 'marscli[lora]'"
        ) from error
    merged = _from_hub(partial(PeftModel.from_pretrained, model), folder, "adapters").merge_and_unload()
    return merged.requires_grad_(True)  # peft froze it, but it may be trained further


def _from_hub(load: Any, name: str, what: str, **options: Any) -> Any:
    """``from_pretrained``, of a class or by itself, with errors that say what to do."""
    from safetensors import SafetensorError

    try:
        return getattr(load, "from_pretrained", load)(name, **options)
    except MarsError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error) and not options.get("trust_remote_code"):
            raise InputError(
                f"--model {name} needs Python code of its own",
                hint="read that code, then pass --trust-remote-code to run it",
            ) from error
        if Path(name).is_dir():
            raise InputError(
                f"the {what} in {name} cannot be read: {first_line}", hint="is the folder complete and undamaged?"
            ) from error
        raise MarsError(
            f"{name} is no folder here, and its {what} cannot be had from the Hub: {first_line}",
            hint=("/" not in name and _checkpoints_near(Path(name)))
            or "check the name and the network (HF_HUB_OFFLINE, HF_TOKEN for gated models), or give a local folder",
        ) from error


def eos_token_ids(model: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer, without loading the weights.

    Args:
        model: Hub id or folder.
        tokenizer: Its tokenizer.
    """
    from transformers import GenerationConfig

    base = base_of(model)
    config = _read_config(base)
    try:
        generation_config = GenerationConfig.from_pretrained(base)
    except OSError:  # the file is optional
        generation_config = None
    return _eos_token_ids(generation_config, config.get_text_config(), tokenizer)


def _eos_token_ids(generation_config: Any, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """As transformers' ``generate`` does: the generation config's, else the config's; else the tokenizer's."""
    for source in (generation_config, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def metadata_of(config: Any, name: str) -> MarsMetadata | None:
    """What a config says about MARS; None if the model was never MARS-trained.

    Raises:
        InputError: It says so in a way that this version does not read.
    """
    path = Path(name) / ADAPTER_METADATA
    if path.is_file():  # of adapters, whose config is the base model's
        _set_metadata(config, json.loads(path.read_text(encoding="utf-8")))
    block = getattr(config, "mars", None)
    if block is None:
        return None
    version = block.get("version")
    if version != METADATA_VERSION:
        raise InputError(
            f"{name}: its config.json has a mars block of version {version}, not {METADATA_VERSION}",
            hint="install a newer marscli",
        )
    mask_token_id = getattr(config, "mask_token_id", None)
    block_size = block.get("block_size")
    if mask_token_id is None or not isinstance(block_size, int) or block_size < 1:
        raise InputError(
            f"{name}: its config.json has a mars block without mask_token_id or block_size",
            hint="restore the config.json that `mars train` wrote",
        )
    return MarsMetadata(
        block_size=block_size,
        ar_weight=block.get("ar_weight", 1.0),
        base_model=block.get("base_model", ""),
        mask_token_id=mask_token_id,
        is_assumed=block.get("block_size_is_assumed", False),
    )


def choose_mask_token(tokenizer: Any, embedding_rows: int) -> tuple[str, int]:
    """Give a tokenizer a mask token that costs no parameter: the embedding is never resized.

    Args:
        tokenizer: Changed in place: its ``mask_token`` is set.
        embedding_rows: Rows of the model's embedding.

    Returns:
        The token and its id: the tokenizer's own mask token, else a new ``<|mask|>`` on a spare embedding row, else a
        reserved token of the vocabulary.

    Raises:
        InputError: The vocabulary has no room and no reserved token.
    """
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < embedding_rows:
        return tokenizer.mask_token, tokenizer.mask_token_id
    vocabulary = tokenizer.get_vocab()
    if NEW_MASK_TOKEN in vocabulary or max(vocabulary.values()) + 1 < embedding_rows:
        tokenizer.add_special_tokens({"mask_token": NEW_MASK_TOKEN})
        return NEW_MASK_TOKEN, tokenizer.mask_token_id
    roles = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id")
    in_use = {getattr(tokenizer, role, None) for role in roles}
    for pattern in RESERVED_TOKENS:
        matches = [(index, token) for token, index in vocabulary.items() if re.fullmatch(pattern, token)]
        free = [(index, token) for index, token in sorted(matches) if index not in in_use and index < embedding_rows]
        if free:
            index, token = free[0]
            tokenizer.add_special_tokens({"mask_token": token})
            return token, index
    raise InputError(
        "the model's vocabulary has neither a spare embedding row nor a known reserved token for the mask",
        hint="set tokenizer.mask_token to a token that its text never uses, save it, and pass it with --tokenizer",
    )


def save(
    directory: str | Path,
    model: Any,
    tokenizer: Any,
    *,
    mars: MarsMetadata | None,
    state_dict: Mapping[str, Any] | None = None,
) -> None:
    """Write an ordinary checkpoint folder: safetensors weights, config, generation config, tokenizer, chat template.

    Files are written beside their places and moved in, weights first and ``config.json`` last, so that a broken-off
    save leaves no folder that looks complete.

    Args:
        directory: Where to; made if missing. Other files in it are left alone.
        model: A transformers causal LM; its dtype is what is written.
        tokenizer: Its tokenizer.
        mars: None for a plain AR checkpoint.
        state_dict: The weights, where the model holds only a part of them (FSDP, DeepSpeed).
    """
    model.config.use_cache = True  # the trainer switches it off
    _set_metadata(model.config, _metadata_keys(mars))
    _save_in(directory, tokenizer, partial(model.save_pretrained, state_dict=state_dict), last="config.json")


def save_adapter(directory: str | Path, model: Any, tokenizer: Any, *, mars: MarsMetadata | None) -> None:
    """Write a folder of adapters, which `load` and peft's auto classes load; as `save` does.

    Args:
        directory: Where to; made if missing. Other files in it are left alone.
        model: A `peft.PeftModel`.
        tokenizer: Its tokenizer.
        mars: None for a plain AR model.
    """
    for adapter in model.peft_config.values():
        base = Path(adapter.base_model_name_or_path)
        if base.is_dir():  # a relative path would be lost when the folder moves
            adapter.base_model_name_or_path = str(base.resolve())

    def write(folder: Path) -> None:
        # Only the adapters and the mask token's row; peft would add the whole embedding of a tied model.
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty card
        if mars is not None:
            (folder / ADAPTER_METADATA).write_text(json.dumps(_metadata_keys(mars), indent=2), encoding="utf-8")

    _save_in(directory, tokenizer, write, last=ADAPTER_CONFIG)


def _metadata_keys(mars: MarsMetadata | None) -> dict[str, Any]:
    if mars is None:
        return {}
    return {
        "mask_token_id": mars.mask_token_id,
        "pard_token": mars.mask_token_id,  # vLLM's name for it in a parallel draft model
        "mars": {
            "version": METADATA_VERSION,
            "block_size": mars.block_size,
            "ar_weight": mars.ar_weight,
            "base_model": mars.base_model,
        },
    }


def _set_metadata(config: Any, values: Mapping[str, Any]) -> None:
    """Give a config these MARS keys, and none of another training."""
    for key in METADATA_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    for key, value in values.items():
        setattr(config, key, value)


def _save_in(directory: str | Path, tokenizer: Any, write: Callable[[Path], Any], last: str) -> None:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
    try:
        write(staging)
        tokenizer.save_pretrained(staging)
        for path in sorted(staging.iterdir(), key=lambda path: (path.name == last, path.suffix == ".json")):
            path.replace(directory / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
