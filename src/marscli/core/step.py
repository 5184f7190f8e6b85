"""One forward pass over a batch of rows: from tokens and drafts to what is accepted.

Layout and decision are small arrays and stay on the host, in numpy. One transfer goes to the device before the model,
one comes back after it: the step's only synchronisation. What a row is and when it runs is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from marscli.core.acceptance import Decision, decide, oriented, row_certainties
from marscli.core.attention import folded_mask
from marscli.core.caching import RowCache
from marscli.core.layout import Ints, StepLayout, decode_layout
from marscli.core.linear import few_entries
from marscli.core.masking import Visibility
from marscli.core.model import forward_logits, unwrap
from marscli.core.params import CONFIDENCES, DecodingParams
from marscli.core.sampling import SamplingSettings, choose_tokens, top_tokens

Floats = npt.NDArray[np.float32]


class RowSettings:
    """The parameters of a step's rows, as arrays. Made anew only when rows or parameters change."""

    def __init__(self, params: Sequence[DecodingParams], device: torch.device) -> None:
        self.params = list(params)
        self.masks = np.array([p.masks for p in params])
        self.most_drafts = np.array([p.drafts for p in params])
        self.exact = np.array([p.exact for p in params])
        self.all_exact = bool(self.exact.all())
        self.threshold = np.array([[oriented(p.threshold or 0.0, p.confidence)] for p in params], dtype=np.float32)
        self.is_entropy = np.array([[p.confidence == "entropy"] for p in params])
        self.adaptive = [index for index, p in enumerate(params) if p.adaptive]
        self.measures = {p.confidence for p in params}
        self.measure_codes = torch.tensor([CONFIDENCES.index(p.confidence) for p in params], device=device)
        self.sampling = None
        if any(p.temperature > 0 for p in params):
            self.sampling = SamplingSettings(
                temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
                top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
                top_k=torch.tensor([p.top_k for p in params], device=device),
                seed=torch.tensor([p.seed for p in params], device=device),
                cuts=any(p.top_p < 1 or p.top_k for p in params),
            )


@dataclass(frozen=True)
class StepPlan:
    """What each row runs.

    Attributes:
        newest: Accepted tokens that are not cached yet, at least one a row.
        drafts: Tokens to verify behind them.
        cached: (rows,) tokens whose keys and values are cached.
        groups: (rows, K + 1) masks for each outcome of the verification; K is the largest number of drafts.
        spare: (rows,) tokens that may follow the one that the step is sure to give.
        width: Entries to run in every row, if more than the widest one needs.
        guesses: The predictions behind the first wrong draft are the next drafts (Jacobi decoding); no masks.
    """

    newest: Sequence[Sequence[int]]
    drafts: Sequence[Sequence[int]]
    cached: Ints
    groups: Ints
    spare: Ints
    width: int | None = None
    guesses: bool = False


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
        decision: What is accepted, and the next drafts.
        certainties: float32 (rows, K + 1 + M), of ``decision.tokens``, where these are accepted or drafts.
        width: Entries that every row ran.
    """

    decision: Decision
    certainties: Floats
    width: int


class Stepper:
    """Runs steps of one model.

    Args:
        model: See `Engine`.
        mask_token_id: See `Engine`.
        eos_token_ids: See `Engine`.
    """

    def __init__(self, model: nn.Module, mask_token_id: int | None, eos_token_ids: Iterable[int]) -> None:
        inner = unwrap(model)
        self.model = model
        self.device = inner.device
        self.mask_token_id = mask_token_id
        self._config = inner.config.get_text_config()
        self._dtype = getattr(inner, "dtype", torch.float32)  # stand-ins for a model need not have one
        self._eos = np.array(sorted(set(eos_token_ids)), dtype=np.int64)

    def run(self, plan: StepPlan, settings: RowSettings, cache: RowCache | None, places: slice) -> StepResult:
        """Run the model over a plan's rows, which stand in ``places`` of the cache, and decide what is accepted."""
        newest = np.array([len(tokens) for tokens in plan.newest])
        draft_counts = np.array([len(tokens) for tokens in plan.drafts])
        layout = decode_layout(plan.cached, newest, draft_counts, plan.groups, plan.width)
        logits = self._logits(plan, layout, cache, places)
        top = top_tokens(logits)
        tokens = top
        if settings.sampling is not None:
            positions = np.take_along_axis(layout.position_ids, layout.read, 1) + 1
            tokens = choose_tokens(logits, torch.from_numpy(positions).to(self.device), settings.sampling, top)
        # Where everything is exact nothing depends on certainties, and a CPU has time only for those that are kept.
        late = settings.all_exact and logits.is_cpu and logits.shape[1] > 1
        certainties = None if late else row_certainties(logits, settings.measure_codes, settings.measures)
        chosen, is_top, sureness = _to_host(tokens, tokens == top, certainties)
        sure = None
        if not settings.all_exact:
            assert sureness is not None, "only exact steps do without"
            sure = is_top & (sureness >= settings.threshold) & ~settings.exact[:, None]
        nth = np.arange(plan.groups.shape[1])
        decision = decide(
            chosen,
            sure,
            drafts=_padded(plan.drafts, plan.groups.shape[1] - 1, -1),
            draft_counts=draft_counts,
            groups=(draft_counts[:, None] - nth).clip(min=0) if plan.guesses else plan.groups,
            group_read=np.broadcast_to(nth + 1, plan.groups.shape) if plan.guesses else layout.group_read,
            spare=plan.spare,
            most_drafts=draft_counts if plan.guesses else settings.most_drafts,
            eos_token_ids=self._eos,
        )
        if sureness is None:
            kept = self._certainties_of_kept(logits, decision, settings)
        else:
            kept = np.take_along_axis(sureness, decision.source, 1)
        return StepResult(decision, kept, layout.slot.shape[1])

    def _logits(self, plan: StepPlan, layout: StepLayout, cache: RowCache | None, places: slice) -> Tensor:
        width = layout.slot.shape[1]
        num_slots = int(plan.cached.max()) + width
        # Without a mask token no row has masks, and the filler below is only padding, which nothing reads.
        lines = [[*newest, *drafts] for newest, drafts in zip(plan.newest, plan.drafts, strict=True)]
        arrays = (
            _padded(lines, width, self.mask_token_id or 0),
            layout.position_ids,
            layout.context_end,
            layout.group_start,
            layout.slot,
            layout.read,
        )
        ends = accumulate(array.shape[1] for array in arrays[:-1])
        moved = torch.from_numpy(np.concatenate(arrays, axis=1)).to(self.device, non_blocking=True)
        input_ids, position_ids, context_end, group_start, slot, read = moved.tensor_split(tuple(ends), dim=1)
        visibility = Visibility(torch.zeros_like(slot), context_end, group_start, slot)
        if cache is not None:
            cache.begin_step(places, slot, num_slots)
        with few_entries(input_ids.numel()):
            logits = forward_logits(
                self.model,
                input_ids=input_ids,
                position_ids=position_ids,
                mask=folded_mask(visibility.dense(num_slots), self._config, self._dtype),
                keep=read,
                cache=cache,
            ).float()
        if self.mask_token_id is not None:
            logits[..., self.mask_token_id] = -torch.inf
        return logits

    def _certainties_of_kept(self, logits: Tensor, decision: Decision, settings: RowSettings) -> Floats:
        kept = np.arange(decision.tokens.shape[1]) < (decision.accepted + decision.drafts)[:, None]
        row = np.nonzero(kept)[0]
        wanted = logits[torch.from_numpy(row), torch.from_numpy(decision.source[kept])]
        codes = settings.measure_codes[torch.from_numpy(row)]
        certainties = np.zeros(kept.shape, dtype=np.float32)
        certainties[kept] = row_certainties(wanted[:, None], codes, settings.measures)[:, 0].numpy()
        return certainties


def _padded(lines: Sequence[Sequence[int]], width: int, fill: int) -> Ints:
    array = np.full((len(lines), width), fill, dtype=np.int64)
    for row, line in enumerate(lines):
        array[row, : len(line)] = line
    return array


def _to_host(
    tokens: Tensor, is_top: Tensor, certainties: Tensor | None
) -> tuple[Ints, npt.NDArray[np.bool_], Floats | None]:
    """Bring predictions to the host in one transfer: token ids are below 2²⁴, so float32 carries them exactly."""
    if certainties is None:
        return tokens.cpu().numpy(), np.empty(0, dtype=bool), None
    packed = torch.stack([tokens.float(), is_top.float(), certainties]).cpu().numpy()
    return packed[0].astype(np.int64), packed[1] > 0, packed[2]
