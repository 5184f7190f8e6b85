"""The engine: requests in, step records out. Everything that decodes is a loop over it.

One `Engine.step` is one forward pass, over the rows that were just admitted (their prompts) or over all running
rows. Per row it runs the newest tokens, whose keys and values are not cached yet, and the masks behind them; the
newest token's logits give the next token as AR decoding would (offset 0), the masks' logits the ones after it
(offsets 1, 2, …). These are kept strictly left to right while their confidence passes τ (arXiv 2604.07023). With
``verify`` the rest become drafts: the next step runs them as if they were accepted, keeps those that AR decoding would
have chosen, and goes on from the masks of the group that stands for as many right drafts. AR decoding is the same loop
without masks.

The engine knows token ids, not text: no stop strings, no templates, no files.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from marscli.core.acceptance import Decision, decide, oriented, row_certainties
from marscli.core.caching import RowCache
from marscli.core.layout import decode_layout
from marscli.core.model import check_decodable, forward_logits, unwrap
from marscli.core.params import CONFIDENCES, DecodingParams
from marscli.core.sampling import SamplingSettings, choose_tokens

FinishReason = Literal["stop", "length", "context"]
CacheKind = Literal["row", "none"]
CACHES: tuple[CacheKind, ...] = get_args(CacheKind)

MAX_PREFILL_ENTRIES = 8192  # rows admitted together are padded to the longest; this bounds the step's activations


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
class _Row:
    """A running request. Real tokens that are cached: ``cached``; accepted but not cached yet: ``newest``.

    Behind them ``drafts``, which the next step verifies; the masks that made them had ``draft_offsets``.
    """

    request_id: int
    params: DecodingParams
    newest: list[int]
    prompt_tokens: int
    drafts: list[int] = field(default_factory=list)
    draft_offsets: list[int] = field(default_factory=list)
    cached: int = 0
    generated: int = 0

    def room(self, context_length: int) -> int:
        """Tokens that may still be generated."""
        return min(self.params.max_new_tokens, context_length - self.prompt_tokens) - self.generated


@dataclass(frozen=True)
class _Outcome:
    """What one step gave one row, on the host."""

    tokens: list[int]
    certainties: list[float]
    offsets: list[int]
    verified: int
    drafts: list[int]
    draft_offsets: list[int]
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
        cache: CacheKind = "row",
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
        self._eos = torch.tensor(sorted(set(eos_token_ids)), dtype=torch.long, device=self.device)
        self._ids = itertools.count()
        self._queue: deque[_Row] = deque()
        self._rows: list[_Row] = []  # a row's index is its place in the cache

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
        self._check_masks(request.params)
        request_id = next(self._ids)
        self._queue.append(_Row(request_id, request.params, list(request.ids), len(request.ids)))
        return request_id

    def _check_masks(self, params: DecodingParams) -> None:
        if params.masks and self.mask_token_id is None:
            raise ValueError("a threshold below exact needs a model with a mask token")

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
        self._check_masks(params)
        if params.max_new_tokens <= row.generated:
            raise ValueError(f"request {request_id} has {row.generated} tokens, more than max_new_tokens allows")
        row.params = params
        room = row.room(self.context_length)
        row.drafts, row.draft_offsets = row.drafts[: room - 1], row.draft_offsets[: room - 1]

    def _find(self, request_id: int) -> _Row:
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
        outcomes = self._forward(rows, places)
        seconds = time.perf_counter() - started
        records = []
        for row, outcome in zip(rows, outcomes, strict=True):
            self._advance(row, outcome)
            records.append(
                StepRecord(
                    request_id=row.request_id,
                    tokens=outcome.tokens,
                    confidences=[oriented(c, row.params.confidence) for c in outcome.certainties],
                    offsets=outcome.offsets,
                    finish_reason=self._finish_reason(row, outcome.ended),
                    prefill=prefill,
                    seconds=seconds,
                )
            )
        for index in reversed(range(len(rows))):  # from behind: a vacated place is filled by the last row
            if records[index].finish_reason is not None:
                self._vacate(places.start + index)
        return records

    def _advance(self, row: _Row, outcome: _Outcome) -> None:
        """Note what a step gave a row: right drafts are cached already, what follows them is newest."""
        if self.cache is None:
            row.newest += outcome.tokens
        else:
            row.cached += len(row.newest) + outcome.verified
            row.newest = outcome.tokens[outcome.verified :]
        row.generated += len(outcome.tokens)
        row.drafts, row.draft_offsets = outcome.drafts, outcome.draft_offsets

    def _admit(self) -> None:
        """Give free places to waiting requests, in order."""
        widest = count = 0
        while self._queue and len(self._rows) < self.max_rows:
            widest = max(widest, len(self._queue[0].newest) + self._queue[0].params.masks)
            count += 1
            if count > 1 and widest * count > MAX_PREFILL_ENTRIES:
                return
            self._rows.append(self._queue.popleft())

    def _vacate(self, index: int) -> None:
        """Remove a running row; the last row takes its place, so that the rows in use stay neighbours."""
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last
            if self.cache is not None:
                self.cache.move_row(len(self._rows), index, last.cached)

    def _finish_reason(self, row: _Row, ended: bool) -> FinishReason | None:
        if ended:
            return "stop"
        if row.generated >= row.params.max_new_tokens:
            return "length"
        return "context" if row.room(self.context_length) <= 0 else None

    def _forward(self, rows: Sequence[_Row], places: slice) -> list[_Outcome]:
        """Run the model over a step's rows and decide what is accepted.

        The step's only synchronisation with the device is the transfer of the decision.
        """
        spare = [row.room(self.context_length) - 1 for row in rows]
        masks = [min(row.params.masks, most) for row, most in zip(rows, spare, strict=True)]
        real = [len(row.newest) + len(row.drafts) for row in rows]
        width = max(r + (len(row.drafts) + 1) * m for r, row, m in zip(real, rows, masks, strict=True))
        most = max(len(row.drafts) for row in rows), max(masks)
        num_slots = max(row.cached for row in rows) + width
        # Without a mask token no row has masks, and the filler below is only padding, which nothing reads.
        filler = self.mask_token_id or 0
        lines = [row.newest + row.drafts for row in rows]
        input_ids = torch.tensor([line + [filler] * (width - len(line)) for line in lines], device=self.device)
        drafts = torch.tensor([row.drafts + [-1] * (most[0] - len(row.drafts)) for row in rows], device=self.device)
        facts = [
            (row.cached, len(row.newest), len(row.drafts), m, s, row.params.drafts)
            for row, m, s in zip(rows, masks, spare, strict=True)
        ]
        cached, newest, draft_counts, mask_counts, spares, most_drafts = torch.tensor(facts, device=self.device).unbind(
            1
        )
        layout = decode_layout(cached, newest, draft_counts, mask_counts, spares, width=width, most=most)
        if self.cache is not None:
            self.cache.begin_step(places, layout.visibility.slot, num_slots)
        logits = forward_logits(
            self.model,
            input_ids=input_ids,
            position_ids=layout.position_ids,
            mask=layout.visibility.dense(num_slots),
            keep=layout.read,
            cache=self.cache,
        ).float()
        if self.mask_token_id is not None:
            logits[..., self.mask_token_id] = -torch.inf
        next_positions = layout.position_ids.gather(1, layout.read) + 1
        sampling = self._sampling_settings(rows)
        tokens = choose_tokens(logits, next_positions, sampling)
        measures = [row.params.confidence for row in rows]
        codes = torch.tensor([CONFIDENCES.index(measure) for measure in measures], device=self.device)
        thresholds = [oriented(row.params.threshold or 0.0, row.params.confidence) for row in rows]
        decision = decide(
            tokens,
            row_certainties(logits, codes, set(measures)),
            torch.ones_like(tokens, dtype=torch.bool) if sampling is None else tokens == logits.argmax(-1),
            drafts=drafts.view(len(rows), -1),
            draft_counts=draft_counts,
            masks=mask_counts,
            spare=spares,
            most_drafts=most_drafts,
            threshold=torch.tensor(thresholds, device=self.device),
            exact=torch.tensor([row.params.exact for row in rows], device=self.device),
            eos_token_ids=self._eos,
        )
        return _outcomes(rows, decision)

    def _sampling_settings(self, rows: Sequence[_Row]) -> SamplingSettings | None:
        params = [row.params for row in rows]
        if all(p.temperature == 0 for p in params):
            return None
        return SamplingSettings(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=self.device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=self.device),
            top_k=torch.tensor([p.top_k for p in params], device=self.device),
            seed=torch.tensor([p.seed for p in params], device=self.device),
        )


def _outcomes(rows: Sequence[_Row], decision: Decision) -> list[_Outcome]:
    """Bring a decision to the host, in one transfer: token ids are below 2²⁴, so float32 carries them exactly."""
    length = decision.tokens.shape[1]
    counts = (decision.verified, decision.accepted, decision.drafts, decision.ended)
    packed = torch.cat([decision.tokens.float(), decision.certainties, *(c[:, None].float() for c in counts)], dim=1)
    outcomes = []
    for row, line in zip(rows, packed.tolist(), strict=True):
        verified, accepted, drafts, ended = (int(count) for count in line[-4:])
        tokens = [int(token) for token in line[: accepted + drafts]]
        # The token after the right drafts comes from real tokens alone: offset 0. Masks follow it: 1, 2, …
        offsets = [*row.draft_offsets[:verified], *range(accepted + drafts - verified)]
        outcomes.append(
            _Outcome(
                tokens=tokens[:accepted],
                certainties=line[length : length + accepted],
                offsets=offsets[:accepted],
                verified=min(verified, accepted),
                drafts=tokens[accepted:],
                draft_offsets=offsets[accepted:],
                ended=bool(ended),
            )
        )
    return outcomes


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

    Args:
        engine: An engine without other work.
        requests: What to decode.
        on_step: Called with the records of each step, e.g. to show progress.

    Returns:
        Completions in the order of the requests.
    """
    prompt_tokens: dict[int, int] = {}
    for request in requests:
        prompt_tokens[engine.add(request)] = len(request.ids)
    records: dict[int, list[StepRecord]] = {request_id: [] for request_id in prompt_tokens}
    while engine.has_work:
        step = engine.step()
        for record in step:
            records[record.request_id].append(record)
        if on_step is not None:
            on_step(step)
    completions = []
    for request_id, mine in records.items():
        reason = mine[-1].finish_reason
        assert reason is not None, "a row ends with a reason"
        tokens = [token for record in mine for token in record.tokens]
        completions.append(Completion(tokens, reason, prompt_tokens[request_id], mine))
    return completions
