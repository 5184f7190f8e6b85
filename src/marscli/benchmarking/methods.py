"""The methods that a bench compares, each a value in one registry.

A method says which settings it has (`settings`), when it cannot run (`refusal`) and how a pass over the prompts is made
(`open`). Everything between prompt ids and completion ids is timed, the building of tensors and of caches included, and
nothing else: no text is encoded or decoded here. A further method is one more entry of `METHODS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.memory import synchronize
from marscli.benchmarking.results import Pass, Setting
from marscli.checkpoint import Checkpoint
from marscli.core.decoding import Engine, Request, StepRecord, decode
from marscli.core.params import DecodingParams

Prompts = Sequence[Sequence[int]]
Decoder = Callable[[Prompts, int], Pass]
"""(prompt ids, most new tokens) → one timed pass."""


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Args:
        name: As in ``--methods``.
        settings: (options, block size of the masks or None) → the lines that this method has in the table.
        refusal: (checkpoint, setting, batch size) → why it cannot run, or None.
        open: (checkpoint, setting, batch size) → a function that makes one timed pass.
    """

    name: str
    settings: Callable[[BenchConfig, int | None], list[Setting]]
    refusal: Callable[[Checkpoint, Setting, int], str | None]
    open: Callable[[Checkpoint, Setting, int], Decoder]


# --- transformers' own generate ---------------------------------------------------------------------------------------


class _SuppressAndClock(LogitsProcessor):
    """Keeps the mask token from being chosen and notes when the prompts have been read.

    transformers' `suppress_tokens` does the first too, but searches the whole vocabulary at every step; this costs the
    baseline next to nothing.
    """

    def __init__(self, token: int | None, device: torch.device) -> None:
        self.token = token
        self.device = device
        self.first_logits_at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.first_logits_at is None:
            synchronize(self.device)
            self.first_logits_at = time.perf_counter()
        if self.token is not None:
            scores[:, self.token] = -torch.inf
        return scores


@contextmanager
def _stock(model: Any) -> Iterator[None]:
    """The model as transformers runs it best and plainly: sdpa attention, no penalties of its generation config."""
    attention, defaults = model.config._attn_implementation, model.generation_config
    model.generation_config = GenerationConfig()
    if attention != "sdpa":
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.generation_config = defaults
        if attention != "sdpa":
            model.set_attn_implementation(attention)


def left_padded(prompts: Prompts, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as (rows, longest) ids and attention mask, padding on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def cut_after_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Ids up to and including the first end-of-sequence token.

    >>> cut_after_end([7, 8, 2, 2], [2])
    [7, 8, 2]
    """
    place = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: place + 1])


def _open_hf(checkpoint: Checkpoint, setting: Setting, batch_size: int) -> Decoder:
    model, device, ends = checkpoint.model, torch.device(checkpoint.device), list(checkpoint.eos_token_ids)
    pad = ends[0] if ends else 0

    @torch.inference_mode()
    def run(prompts: Prompts, max_new_tokens: int) -> Pass:
        outputs: list[list[int]] = []
        prefill = 0.0
        synchronize(device)
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            began = time.perf_counter()
            ids, mask = left_padded(prompts[first : first + batch_size], pad, device)
            clock = _SuppressAndClock(checkpoint.mask_token_id, device)
            with _stock(model):
                rows = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    num_beams=1,
                    use_cache=True,
                    eos_token_id=ends or None,
                    pad_token_id=pad,
                    logits_processor=LogitsProcessorList([clock]),
                )
            outputs += [cut_after_end(row, ends) for row in rows[:, ids.shape[1] :].tolist()]
            prefill += (clock.first_logits_at or began) - began
        seconds = time.perf_counter() - start
        # One forward a token: the prompt's gives the first, and after its end a row has no entries of its own.
        return Pass(outputs, [len(output) for output in outputs], seconds, prefill, prefill_tokens=len(outputs))

    return run


# --- our engine -------------------------------------------------------------------------------------------------------


def _open_engine(checkpoint: Checkpoint, setting: Setting, batch_size: int) -> Decoder:
    device = torch.device(checkpoint.device)

    def run(prompts: Prompts, max_new_tokens: int) -> Pass:
        params = DecodingParams(
            max_new_tokens=max_new_tokens,
            threshold=setting.threshold,
            confidence=setting.confidence,  # type: ignore[arg-type]
            block_size=setting.block_size,
        )
        prefill, prefill_tokens = 0.0, 0

        def note_prefill(records: list[StepRecord]) -> None:
            nonlocal prefill, prefill_tokens
            if records[0].prefill:  # true of all records of a step, or of none
                prefill += records[0].seconds
                prefill_tokens += sum(len(record.tokens) for record in records)

        synchronize(device)
        start = time.perf_counter()
        engine = Engine(
            checkpoint.model,
            mask_token_id=checkpoint.mask_token_id,
            eos_token_ids=checkpoint.eos_token_ids,
            context_length=checkpoint.context_length,
            max_rows=batch_size,
        )
        completions = decode(engine, [Request(prompt, params) for prompt in prompts], note_prefill)
        seconds = time.perf_counter() - start  # tokens came back to the host in every step: the device has finished
        outputs = [completion.tokens for completion in completions]
        return Pass(outputs, [completion.forwards for completion in completions], seconds, prefill, prefill_tokens)

    return run


def _never(checkpoint: Checkpoint, setting: Setting, batch_size: int) -> None:
    return None


def _needs_masks(checkpoint: Checkpoint, setting: Setting, batch_size: int) -> str | None:
    if setting.threshold is None:
        return None
    if checkpoint.mask_token_id is None or setting.block_size < 2:
        return "the checkpoint was never MARS-trained (no mask token, or no block size); see mars train"
    return None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("hf", lambda config, block: [Setting("hf", cache="dynamic")], _never, _open_hf),
        Method("ar", lambda config, block: [Setting("ar")], _never, _open_engine),
        Method(
            "threshold",
            lambda config, block: [
                Setting(
                    "threshold",
                    tau,
                    config.confidence,
                    block_size=block or 1,
                    draft_tokens=0 if tau is None else (block or 1) - 1,
                )
                for tau in config.thresholds
            ],
            _needs_masks,
            _open_engine,
        ),
    )
}
