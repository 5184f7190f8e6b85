"""transformers' own ways of decoding: `generate` plain, with prompt lookup, and with a small model's drafts.

All greedy, with their KV cache and sdpa attention, and with the library's default settings of each way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from marscli.benchmarking.calls import ModelCalls
from marscli.benchmarking.memory import synchronize
from marscli.benchmarking.results import Pass, Setting
from marscli.checkpoint import Checkpoint

LOOKUP_TOKENS = 10  # as in the method's own code; transformers has no default


class _Suppress(LogitsProcessor):
    """Keeps the mask token from being chosen.

    transformers' `suppress_tokens` does so too, but searches the whole vocabulary at every step; this costs the
    baseline next to nothing.
    """

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.token] = -torch.inf
        return scores


class _StepSizes(BaseStreamer):
    """Notes how many tokens each step gives; `generate` hands it the prompt first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        return

    def within(self, length: int) -> list[int]:
        """The sizes of the steps that make up the first ``length`` tokens."""
        kept = []
        for size in self.sizes[1:]:
            kept.append(min(size, length - sum(kept)))
        return [size for size in kept if size > 0]


@contextmanager
def stock(model: Any) -> Iterator[None]:
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


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
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


def _drafting(setting: Setting, checkpoint: Checkpoint, draft: Checkpoint | None) -> dict[str, Any]:
    """The arguments of `generate` that say where drafts come from."""
    if setting.method == "hf-lookup":
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if setting.method == "hf-assisted":
        assert draft is not None, "`plan` asks for one"
        sizes = {one.model.config.get_text_config().vocab_size for one in (checkpoint, draft)}
        if len(sizes) == 1:
            return {"assistant_model": draft.model}
        # Families pad their embeddings to different sizes; transformers then wants to compare the tokenizers itself.
        tokenizers = {"tokenizer": checkpoint.tokenizer, "assistant_tokenizer": draft.tokenizer}
        return {"assistant_model": draft.model, **tokenizers}
    return {}


def open_hf(checkpoint: Checkpoint, setting: Setting, batch_size: int, draft: Checkpoint | None = None) -> Any:
    """See `methods.Open`."""
    model, device, ends = checkpoint.model, torch.device(checkpoint.device), list(checkpoint.eos_token_ids)
    pad = ends[0] if ends else 0
    drafting = _drafting(setting, checkpoint, draft)
    processors = [] if checkpoint.mask_token_id is None else [_Suppress(checkpoint.mask_token_id)]

    def complete(prompts: Sequence[Sequence[int]], max_new_tokens: int, **more: Any) -> list[list[int]]:
        ids, mask = left_padded(prompts, pad, device)
        rows = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList(processors),
            **more,
        )
        return [cut_after_end(row, ends) for row in rows[:, ids.shape[1] :].tolist()]

    @torch.inference_mode()
    def run(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Pass:
        one = Pass([], [], 0.0, 0.0, 0, tokens_by_offset=[])
        widths: list[int] = []
        first_tokens: list[float] = []
        with ExitStack() as stack:
            for each in (model, *([drafting["assistant_model"]] if "assistant_model" in drafting else [])):
                stack.enter_context(stock(each))
            calls = stack.enter_context(ModelCalls(model, device))
            synchronize(device)
            start = time.perf_counter()
            for first in range(0, len(prompts), batch_size):
                batch = prompts[first : first + batch_size]
                began = time.perf_counter()
                calls.start()
                steps = _StepSizes()
                outputs = complete(batch, max_new_tokens, **drafting, **({"streamer": steps} if drafting else {}))
                # Without drafts it is one forward a token: the prompt's gives the first, and after its end a row has
                # no entries of its own.
                sizes = steps.within(len(outputs[0])) if drafting else [1] * sum(map(len, outputs))
                one.forwards += [len(calls.widths)] if drafting else [len(output) for output in outputs]
                one.prefill_tokens += sizes[0] if drafting else len(outputs)
                _add_places(one, sizes)
                one.outputs += outputs
                waited = (calls.first_done_at or began) - began
                one.prefill_seconds += waited
                first_tokens += [waited] * len(batch)
                widths += calls.widths[1:]
            one.seconds = time.perf_counter() - start
        one.first_token_seconds = median(first_tokens)
        one.steps, one.step_width = len(widths), sum(widths) / len(widths) if widths else None
        return one

    return run


def _add_places(one: Pass, sizes: Sequence[int]) -> None:
    """Count a step's tokens by their places: 0 is what the model itself adds, drafts come before it: 1, 2, …"""
    assert one.tokens_by_offset is not None
    for size in sizes:
        one.tokens_by_offset += [0] * (size - len(one.tokens_by_offset))
        for place in range(size):
            one.tokens_by_offset[place] += 1
