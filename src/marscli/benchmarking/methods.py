"""How each method makes a timed pass over the prompts.

Everything between prompt ids and completion ids is timed, the building of tensors and of caches included, and nothing
else: no text is encoded or decoded here. Which rows a table has is `plan`'s business. A further method is one more
entry of `METHODS` and a line in `plan`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import torch

from marscli.benchmarking.calls import ModelCalls
from marscli.benchmarking.config import METHODS as NAMES
from marscli.benchmarking.hf import open_hf
from marscli.benchmarking.memory import synchronize
from marscli.benchmarking.results import Pass, Setting
from marscli.checkpoint import Checkpoint
from marscli.core.decoding import Engine, Request, StepRecord, decode
from marscli.core.engines import make_engine
from marscli.core.params import DecodingParams

Prompts = Sequence[Sequence[int]]
Decoder = Callable[[Prompts, int], Pass]
"""(prompt ids, most new tokens) → one timed pass."""

Open = Callable[[Checkpoint, Setting, int, Checkpoint | None], Decoder]
"""(model, setting, batch size, small model) → a function that makes one timed pass."""


def open_engine(checkpoint: Checkpoint, setting: Setting, batch_size: int, draft: Checkpoint | None = None) -> Decoder:
    """See `Open`; our engine, in all its modes."""
    device = torch.device(checkpoint.device)

    def run(prompts: Prompts, max_new_tokens: int) -> Pass:
        params = DecodingParams(
            max_new_tokens=max_new_tokens,
            threshold=setting.threshold,
            confidence=setting.confidence,  # type: ignore[arg-type]
            block_size=setting.block_size,
            verify=setting.method == "verified",
            draft_tokens=setting.draft_tokens if setting.method in ("verified", "jacobi") else None,
        )
        one = Pass([], [], 0.0, 0.0, 0)
        first_tokens: list[float] = []
        widths: list[int] = []

        def note(records: list[StepRecord]) -> None:
            if records[0].prefill:  # true of all records of a step, or of none
                one.prefill_seconds += records[0].seconds
                one.prefill_tokens += sum(len(record.tokens) for record in records)
                first_tokens.extend(record.seconds for record in records)
            else:
                widths.append(calls.widths[-1])

        with ModelCalls(checkpoint.model, device) as calls:
            synchronize(device)
            start = time.perf_counter()
            completions = decode(_engine(checkpoint, setting, batch_size), [Request(p, params) for p in prompts], note)
            one.seconds = time.perf_counter() - start  # tokens came to the host in every step: the device has finished
        one.outputs = [completion.tokens for completion in completions]
        one.forwards = [completion.forwards for completion in completions]
        one.first_token_seconds = median(first_tokens)
        one.steps, one.step_width = len(widths), sum(widths) / len(widths) if widths else None
        offsets = Counter(offset for done in completions for record in done.records for offset in record.offsets)
        one.tokens_by_offset = [offsets[offset] for offset in range(max(offsets) + 1)]
        return one

    return run


def _engine(checkpoint: Checkpoint, setting: Setting, batch_size: int) -> Engine:
    return make_engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        max_rows=batch_size,
        cache=setting.cache,  # type: ignore[arg-type]
        jacobi=setting.method == "jacobi",
        compile=setting.compile,
        **({} if setting.cache_block is None else {"cache_block": setting.cache_block}),
    )


METHODS: dict[str, Open] = {name: open_hf if name.startswith("hf") else open_engine for name in NAMES}
