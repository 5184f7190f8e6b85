"""The engine: requests in, step records out. Everything that decodes is a loop over it.

One `Engine.step` is one forward pass, over the rows that were just admitted (their prompts) or over all running
rows. Per row it runs the newest tokens, whose keys and values are not cached yet, and the masks behind them; the
newest token's logits give the next token as AR decoding would (offset 0), the masks' logits the ones after it
(offsets 1, 2, …). These are kept strictly left to right while their confidence passes τ (arXiv 2604.07023). With
``verify`` the rest become drafts: the next step runs them as if they were accepted, keeps those that AR decoding would
have chosen, and goes on from the masks of the group that stands for as many right drafts. AR decoding is the same loop
without masks.

What each row runs is planned here (`Engine._plan`; in exact mode `width` chooses), how it is run
is `step`'s.

The engine knows token ids, not text: no stop strings, no templates, no files.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from marscli.core.acceptance import oriented
from marscli.core.adaptive import AdaptiveWidths
from marscli.core.caching import RowCache
from marscli.core.compiled import CompiledModel
from marscli.core.linear import prepare_linear_layers
from marscli.core.model import check_decodable, unwrap
from marscli.core.params import DecodingParams
from marscli.core.step import RowSettings, Stepper, StepPlan, StepResult
from marscli.core.width import WidthPolicy

FinishReason = Literal["stop", "length", "context"]

# Rows admitted together are padded to the longest. The first bounds a step's activations; the others what is wasted, in
# entries and as a share of the prompts' tokens: another forward pass costs less than much padding.
MAX_PREFILL_ENTRIES = 8192
FREE_PREFILL_PADDING, MAX_PREFILL_PADDING = 64, 0.25


@dataclass(frozen=True)
class Request:
    """A prompt to complete: its token ids, and how."""

    ids: Sequence[int]
    params: DecodingParams = field(default_factory=DecodingParams)


@dataclass(frozen=True)
class StepRecord:
    """What one forward pass gave one row. A request has one record for each forward that it had entries in.

    Attributes:
        request_id: As `Engine.add` returned it.
        tokens: Accepted in this forward, at least one; an end-of-sequence token is the last.
        confidences: Of these tokens, in the request's measure.
        offsets: How each token was predicted: 0 from real tokens alone, i ≥ 1 by the i-th mask after them. Verified
            drafts have the offset of the mask that made them.
        finish_reason: ``stop`` (end-of-sequence token), ``length`` (max_new_tokens), ``context`` (the model's context
            is full), or None while the row goes on.
        prefill: Whether this forward read the prompt.
        seconds: Duration of the whole step, all rows together.
    """

    request_id: int
    tokens: list[int]
    confidences: list[float]
    offsets: list[int]
    finish_reason: FinishReason | None
    prefill: bool
    seconds: float


@dataclass
class Row:
    """A running request. Real tokens that are cached: ``cached``; accepted but not cached yet: ``newest``.

    Behind them ``drafts``, which the next step may verify; the masks that made them had ``draft_offsets``.
    """

    request_id: int
    params: DecodingParams
    newest: list[int]
    prompt_tokens: int
    drafts: list[int] = field(default_factory=list)
    draft_offsets: list[int] = field(default_factory=list)
    draft_certainties: list[float] = field(default_factory=list)
    cached: int = 0
    generated: int = 0

    def room(self, context_length: int) -> int:
        """Tokens that may still be generated."""
        return min(self.params.max_new_tokens, context_length - self.prompt_tokens) - self.generated


@dataclass(frozen=True)
class Outcome:
    """What one step gave one row, on the host."""

    tokens: list[int]
    certainties: list[float]
    offsets: list[int]
    verified: int
    drafts: list[int]
    draft_offsets: list[int]
    draft_certainties: list[float]
    ended: bool


class Engine:
    """Decodes any number of requests with up to ``max_rows`` rows at a time; others wait in a queue.

    Args:
        model: A transformers causal LM with full attention. Put into eval mode.
        mask_token_id: The mask token, never chosen as a token; None if the model has none, which leaves one-token mode.
        eos_token_ids: Tokens that end a row.
        context_length: Prompt and completion together never exceed it.
        max_rows: Rows decoded together.
        cache: ``row``, or ``none``: every step computes the whole sequence anew (the reference for tests and research).
        policy: Chooses the width where a request leaves it open; None takes the model's own, which goes on with what it
            learned in earlier engines.
        compile: Compile the model's calls (`compiled`). Takes minutes at the first steps; pays for long runs of models
            whose Python takes a large part of a step.

    Raises:
        InputError: The model has layers that are not handled.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mask_token_id: int | None,
        eos_token_ids: Iterable[int],
        context_length: int,
        max_rows: int = 1,
        cache: Literal["row", "none"] = "row",
        policy: WidthPolicy | None = None,
        compile: bool = False,
    ) -> None:
        inner = unwrap(model)
        check_decodable(inner.config)
        model.eval()
        self.model = model
        self.device = inner.device
        self.mask_token_id = mask_token_id
        self.context_length = context_length
        self.max_rows = max_rows
        layers = inner.config.get_text_config().num_hidden_layers
        self.cache = RowCache(layers, places=max_rows) if cache == "row" else None
        if not compile:  # a compiler chooses its own products
            prepare_linear_layers(inner)
        self._stepper = Stepper(CompiledModel(model) if compile else model, mask_token_id, eos_token_ids)
        self._settings = RowSettings([], self.device)
        self._widths = AdaptiveWidths(model, policy)
        self._ids = itertools.count()
        self._queue: deque[Row] = deque()
        self._rows: list[Row] = []  # a row's index is its place in the cache

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._queue or self._rows)

    def add(self, request: Request) -> int:
        """Queue a request; it joins at one of the next steps.

        Returns:
            The request's id, counted up from 0.

        Raises:
            ValueError: An empty prompt, one that leaves no room in the context, or masks without a mask token.
        """
        if len(request.ids) == 0:
            raise ValueError("the prompt is empty")
        excess = len(request.ids) - self.context_length + 1
        if excess > 0:
            raise ValueError(
                f"the prompt has {len(request.ids)} tokens, {excess} more than leaves room for an answer in the "
                f"model's context of {self.context_length}"
            )
        self._check(request.params)
        request_id = next(self._ids)
        self._queue.append(Row(request_id, request.params, list(request.ids), len(request.ids)))
        return request_id

    def _check(self, params: DecodingParams) -> None:
        if params.masks and self.mask_token_id is None:
            raise ValueError("verification and a threshold below exact need a model with a mask token")

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Drop a request, running or waiting.

        Raises:
            KeyError: No such request, or it is finished.
        """
        row = self._find(request_id)
        if row in self._queue:
            self._queue.remove(row)
        else:
            self._vacate(self._rows.index(row))

    def set_params(self, request_id: int, **changes: Any) -> None:
        """Change parameters of a request from its next step on, e.g. ``set_params(id, threshold=0.8)``.

        Raises:
            KeyError: No such request, or it is finished.
            InputError: A value outside its range.
            ValueError: Masks without a mask token, or fewer new tokens than the request has already.
        """
        row = self._find(request_id)
        params = replace(row.params, **changes)
        self._check(params)
        if params.max_new_tokens <= row.generated:
            raise ValueError(f"request {request_id} has {row.generated} tokens, more than max_new_tokens allows")
        row.params = params
        room = row.room(self.context_length)
        del row.drafts[room - 1 :], row.draft_offsets[room - 1 :], row.draft_certainties[room - 1 :]

    def _find(self, request_id: int) -> Row:
        for row in itertools.chain(self._rows, self._queue):
            if row.request_id == request_id:
                return row
        raise KeyError(f"request {request_id} is neither running nor waiting")

    @torch.inference_mode()
    def step(self) -> list[StepRecord]:
        """Run one forward pass.

        Returns:
            A record for each row that took part; empty if there is no work.
        """
        started = time.perf_counter()
        first = len(self._rows)
        self._admit()
        prefill = len(self._rows) > first
        places = slice(first if prefill else 0, len(self._rows))
        rows = self._rows[places]
        if not rows:
            return []
        params = [row.params for row in rows]
        if params != self._settings.params:
            self._settings = RowSettings(params, self.device)
        plan = self._plan(rows, prefill)
        result = self._stepper.run(plan, self._settings, self.cache, places)
        seconds = time.perf_counter() - started
        if self._settings.adaptive and self.cache is not None and not plan.guesses:
            self._widths.learn(rows, self._settings, plan, result, seconds=seconds, prefill=prefill)
        records = []
        finished = []
        for index, (row, outcome) in enumerate(zip(rows, _outcomes(rows, result), strict=True)):
            if not self._advance(row, outcome):
                continue
            reason = self._finish_reason(row, outcome.ended)
            if reason is not None:
                finished.append(places.start + index)
            records.append(
                StepRecord(
                    request_id=row.request_id,
                    tokens=outcome.tokens,
                    confidences=[oriented(c, row.params.confidence) for c in outcome.certainties],
                    offsets=outcome.offsets,
                    finish_reason=reason,
                    prefill=prefill,
                    seconds=seconds,
                )
            )
        for place in reversed(finished):  # from behind: a vacated place is filled by the last row
            self._vacate(place)
        return records

    def _plan(self, rows: Sequence[Row], prefill: bool) -> StepPlan:
        """Say what each row runs: its newest tokens, its drafts, and masks for each outcome."""
        settings = self._settings
        spare = np.array([row.room(self.context_length) - 1 for row in rows])
        counts = np.array([len(row.drafts) for row in rows])
        nth = np.arange(counts.max() + 1)
        # In exact mode a mask only makes a draft, and the last spare token is never worth one.
        useful = (spare - settings.exact)[:, None] - nth
        groups = np.where(nth <= counts[:, None], np.clip(useful, 0, settings.masks[:, None]), 0)
        if settings.adaptive and self.cache is not None and not prefill:  # beside a prompt a group costs nothing
            self._widths.choose(rows, settings, counts, groups, spare)
        return StepPlan(
            newest=[row.newest for row in rows],
            drafts=[row.drafts[:count] for row, count in zip(rows, counts.tolist(), strict=True)],
            cached=np.array([row.cached for row in rows]),
            groups=groups[:, : counts.max() + 1],
            spare=spare,
        )

    def _advance(self, row: Row, outcome: Outcome) -> bool:
        """Note what a step gave a row: right drafts are cached already, what follows them is newest.

        Returns:
            Whether the row took part; if not, there is no record of it.
        """
        if self.cache is None:
            row.newest = row.newest + outcome.tokens
        else:
            row.cached += len(row.newest) + outcome.verified
            row.newest = outcome.tokens[outcome.verified :]
        row.generated += len(outcome.tokens)
        row.drafts, row.draft_offsets = outcome.drafts, outcome.draft_offsets
        row.draft_certainties = outcome.draft_certainties
        return True

    def _admit(self) -> None:
        """Give free places to waiting requests, in order."""
        widest = total = count = 0
        while self._queue and len(self._rows) < self.max_rows:
            entries = len(self._queue[0].newest)
            widest, total, count = max(widest, entries), total + entries, count + 1
            padding = widest * count - total
            too_unlike = padding > max(FREE_PREFILL_PADDING, MAX_PREFILL_PADDING * total)
            if count > 1 and (widest * count > MAX_PREFILL_ENTRIES or too_unlike):
                return
            self._rows.append(self._queue.popleft())

    def _vacate(self, index: int) -> None:
        """Remove a running row; the last row takes its place, so that the rows in use stay neighbours."""
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last
            if self.cache is not None:
                self.cache.move_row(len(self._rows), index, last.cached)

    def _finish_reason(self, row: Row, ended: bool) -> FinishReason | None:
        if ended:
            return "stop"
        if row.generated >= row.params.max_new_tokens:
            return "length"
        return "context" if row.room(self.context_length) <= 0 else None


def _outcomes(rows: Sequence[Row], result: StepResult) -> Iterator[Outcome]:
    decision = result.decision
    counts = np.stack([decision.verified, decision.accepted, decision.drafts, decision.ended], axis=1)
    lines = zip(rows, decision.tokens.tolist(), result.certainties.tolist(), counts.tolist(), strict=True)
    for row, tokens, certainties, (verified, accepted, drafts, ended) in lines:
        end = accepted + drafts
        # The token after the right drafts comes from real tokens alone: offset 0. Masks follow it: 1, 2, …
        offsets = [*row.draft_offsets[:verified], *range(end - verified)]
        yield Outcome(
            tokens=tokens[:accepted],
            certainties=certainties[:accepted],
            offsets=offsets[:accepted],
            verified=min(verified, accepted),
            drafts=tokens[accepted:end],
            draft_offsets=offsets[accepted:end],
            draft_certainties=certainties[accepted:end],
            ended=bool(ended),
        )


@dataclass
class Completion:
    """All that a request came to.

    Attributes:
        tokens: Completion tokens, the end-of-sequence token included, nothing after it.
        finish_reason: See `StepRecord`.
        prompt_tokens: Length of the prompt.
        records: One for each forward that the request had entries in.
    """

    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    records: list[StepRecord]

    @property
    def forwards(self) -> int:
        """Model calls in which the row had entries of its own, the one that read the prompt included."""
        return len(self.records)

    @property
    def tokens_per_forward(self) -> float:
        """1.0 for AR decoding, by definition."""
        return len(self.tokens) / self.forwards

    @property
    def seconds(self) -> float:
        """Time of the steps that the row took part in."""
        return sum(record.seconds for record in self.records)


def decode(
    engine: Engine, requests: Iterable[Request], on_step: Callable[[list[StepRecord]], None] | None = None
) -> list[Completion]:
    """Run requests to their end.

    Longest prompts start first: those that are read together are of like lengths, and memory is short at once or never.

    Args:
        engine: An engine without other work.
        requests: What to decode.
        on_step: Called with the records of each step, e.g. to show progress.

    Returns:
        Completions in the order of the requests.
    """
    requests = list(requests)
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].ids), reverse=True)
    index_of = {engine.add(requests[index]): index for index in order}
    records: list[list[StepRecord]] = [[] for _ in requests]
    while engine.has_work:
        step = engine.step()
        for record in step:
            records[index_of[record.request_id]].append(record)
        if on_step is not None:
            on_step(step)
    completions = []
    for request, mine in zip(requests, records, strict=True):
        reason = mine[-1].finish_reason
        assert reason is not None, "a row ends with a reason"
        tokens = [token for record in mine for token in record.tokens]
        completions.append(Completion(tokens, reason, len(request.ids), mine))
    return completions
