"""How wide to step: how many drafts to verify, and how many masks to give each of their outcomes.

For exact decoding only. There the output cannot depend on the width, so any choice is right and the only question is
what pays. All of it is in the terms of one trade: an entry of a step costs time, and time is worth the tokens that
decoding at the going rate would have given meanwhile.

* What an entry costs (`StepCost`): a line through the times of the steps that were run. There is no measurement up
  front: reading the prompt gives the first wide point, and every step adds one.
* What a draft brings (`DraftRecord`): the chance that it is right, by its confidence and its place in its group,
  counted from the drafts that were verified.
* What a mask brings: the chance that its group's outcome comes true, times what its draft will bring then.

`WidthPolicy.choose` takes the step whose entries bring most beyond their cost, for all rows together, as the rows of a
step are padded to one width. No masks and no drafts is among the choices: AR decoding. After that it rests, and tries a
mask again at growing intervals. All in numpy: these are a few small arrays, and they are
on the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import nn

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_ENTRIES = 32  # of a row; wider steps are not considered
BUCKETS = 8  # of confidence
FIRST_REST, LONGEST_REST = 8, 64  # AR steps before masks are tried again
TRIES = 0.02  # share of the time that tries may take, if the rest is shorter otherwise


class StepCost:
    """Seconds of a step by its entries, all rows together: a line, fitted to the steps that were seen.

    A line is what dense models show from one entry to several hundred (docs/PERFORMANCE.md). Steps are sorted into
    classes of about the same size, so that a thousand narrow steps do not outvote the few wide ones; a class is worth
    the median of its last steps, so that one that was disturbed does not count.
    """

    REMEMBERED = 9
    CLASSES_PER_OCTAVE = 4
    UNSEEN_SLOPE = 0.02  # of an entry, relative to the first: before two sizes were seen, weights dominate

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._line: tuple[float, float] | None = None

    def observe(self, entries: int, seconds: float) -> None:
        """Note a step."""
        size = round(self.CLASSES_PER_OCTAVE * np.log2(entries))
        self._seen.setdefault(size, deque(maxlen=self.REMEMBERED)).append((entries, seconds))
        self._line = None

    def seconds(self, entries: Ints) -> Floats:
        """What steps of so many entries take; relative figures as long as nothing was observed."""
        if self._line is None:
            self._line = self._fit()
        base, slope = self._line
        return base + slope * entries.astype(np.float64)

    def _fit(self) -> tuple[float, float]:
        if not self._seen:
            return 1.0, self.UNSEEN_SLOPE
        entries, seconds, count = np.array(
            [(*np.median(steps, axis=0), len(steps)) for steps in self._seen.values()], dtype=np.float64
        ).T
        if len(entries) == 1:
            return float(seconds[0]), self.UNSEEN_SLOPE * float(seconds[0])
        # Near the origin relative errors are what counts, and the wide steps of prompts must not rule.
        weight = count / (seconds * entries) ** 2
        mean_e, mean_s = np.average(entries, weights=weight), np.average(seconds, weights=weight)
        spread = np.average((entries - mean_e) ** 2, weights=weight)
        slope = max(np.average((entries - mean_e) * (seconds - mean_s), weights=weight) / spread, 0.0)
        base = max(mean_s - slope * mean_e, 0.0)
        return float(base), float(slope)


class DraftRecord:
    """How often drafts were right, by their place in the group and by confidence."""

    PRIOR = 3.0  # drafts that the first guess is worth
    MEMORY = 300.0  # drafts after which older ones fade

    def __init__(self, most_masks: int) -> None:
        middle = (np.arange(BUCKETS) + 0.5) / BUCKETS
        # Masks are often right before they are confident (METHOD.md), so the first guess is above the confidence.
        self._right = self.PRIOR * np.tile(middle**0.6, (most_masks, 1))
        self._tried = np.full((most_masks, BUCKETS), self.PRIOR)

    @staticmethod
    def _bucket(confidence: Floats) -> Ints:
        return np.clip((confidence * BUCKETS).astype(np.int64), 0, BUCKETS - 1)

    def chances(self, confidence: Floats) -> Floats:
        """The chance of each draft to be right if those before it are.

        Args:
            confidence: (rows, K), in 0 … 1.
        """
        place = np.arange(confidence.shape[1])
        bucket = self._bucket(confidence)
        return self._right[place, bucket] / self._tried[place, bucket]

    def observe(self, confidence: Floats, tried: Ints, right: Ints) -> None:
        """Note what became of verified drafts.

        Args:
            confidence: (rows, K).
            tried: (rows,) drafts verified; those behind the first wrong one tell nothing.
            right: (rows,) drafts that were right.
        """
        place = np.arange(confidence.shape[1])
        known = place < np.minimum(tried, right + 1)[:, None]
        was_right = (place < right[:, None])[known]
        where = np.broadcast_to(place, known.shape)[known], self._bucket(confidence)[known]
        np.add.at(self._tried, where, 1.0)
        np.add.at(self._right, where, was_right)
        fade = np.minimum(self.MEMORY / self._tried, 1.0)
        self._tried *= fade
        self._right *= fade


@dataclass(frozen=True)
class Widths:
    """What the rows of a step run.

    Attributes:
        drafts: (rows,) k, how many of its drafts a row verifies.
        groups: (rows, K + 1) masks of the group for each outcome.
    """

    drafts: Ints
    groups: Ints


class WidthPolicy:
    """Chooses widths, and learns from what came of them.

    Args:
        most_masks: M ≥ 1, the most masks a group and drafts a step: B − 1.
    """

    RATE_MEMORY = 0.05  # share of a new step in the running mean
    REACH_MEMORY = 0.03  # share of a new group
    REACH_MEMORY_OF_TRY = 0.25  # tries are rare

    def __init__(self, most_masks: int) -> None:
        self.most_masks = most_masks
        self.cost = StepCost()
        self.record = DraftRecord(most_masks)
        self._reach = 0.6 ** np.arange(1.0, most_masks + 1)  # running mean: the first i masks of a new group are right
        self._tokens = 1.0  # running mean: tokens a row and step …
        self._time = 1.0  # … and the step's time, AR decoding's being 1
        self._resting = 0  # steps until masks are tried again
        self._rest = FIRST_REST  # how long the next rest will be
        self._trying = False

    def choose(self, confidence: Floats, counts: Ints, spare: Ints, *, rows: int, floor: int = 1) -> Widths:
        """Choose what each row runs.

        Args:
            confidence: (adaptive rows, K) of the drafts that the last step left, K ≤ M.
            counts: (adaptive rows,) how many drafts a row has.
            spare: (adaptive rows,) tokens that may follow the one that the step is sure to give.
            rows: All rows of the step.
            floor: A width that other rows of the step have anyway.
        """
        self._trying = False
        if self._resting and not counts.any():
            self._resting -= 1
            return Widths(counts, np.zeros((len(counts), 1), dtype=np.int64))
        best = self._best(confidence, counts, spare, rows, floor)
        if best.groups.any():
            self._resting, self._rest = 0, FIRST_REST
        elif not self._resting:
            self._trying = True
            best.groups[:, 0] = (best.drafts == 0) & (spare > 1)
            plain, wider = self.cost.seconds(np.array([rows, 2 * rows]))
            self._resting = max(self._rest, int((wider - plain) / plain / TRIES))
            self._rest = min(2 * self._rest, LONGEST_REST)
        return best

    def _best(self, confidence: Floats, counts: Ints, spare: Ints, rows: int, floor: int) -> Widths:
        place = np.arange(confidence.shape[1])
        chance = np.where(place < counts[:, None], self.record.chances(confidence), 0.0)
        reach = np.concatenate(
            [np.ones((len(counts), 1)), chance.cumprod(1)], axis=1
        )  # column i: the first i are right
        most = confidence.shape[1]
        widths = np.arange(1, min(1 + most + (most + 1) * self.most_masks, max(MOST_ENTRIES, floor)) + 1)
        price = self._prices(rows, widths, floor)
        value = self._mask_values(price_of_entry=price[-1] / (rows * max(widths[-1] - floor, 1)))
        masks = [self._group_values(reach, value, spare, k) for k in range(most + 1)]
        gains = np.stack([self._gains(reach, masks[k], counts, k, len(widths)) for k in range(most + 1)])
        profit = gains.max(0).sum(0) - price
        width = int(widths[profit.argmax()])
        return _fill(masks, gains[:, :, width - 1].argmax(0), width)

    def _prices(self, rows: int, widths: Ints, floor: int) -> Floats:
        """What each width costs beyond AR decoding, in the tokens that the time would have given at the going rate."""
        seconds = self.cost.seconds(rows * widths)
        rate = max(self._tokens / self._time, 1.0)  # tokens a row, in the time of an AR step
        return rate * rows * np.where(widths > floor, seconds - seconds[0], 0.0) / seconds[0]

    def _mask_values(self, price_of_entry: float) -> Floats:
        """What the i-th mask of the group that comes true brings: its draft, less the entry that verifies it."""
        # Where the width is there anyway, a mask that hardly pays is better than none.
        return np.maximum(self._reach - price_of_entry, 1e-3 * self._reach)

    def _group_values(self, reach: Floats, value: Floats, spare: Ints, k: int) -> Floats:
        """What each mask brings when k drafts are verified, (rows, k + 1, M)."""
        exactly = reach[:, : k + 1].copy()
        exactly[:, :k] -= reach[:, 1 : k + 1]
        offset = np.arange(k + 1)[:, None] + np.arange(1, self.most_masks + 1)
        return np.where(offset < spare[:, None, None], exactly[:, :, None] * value, 0.0)

    @staticmethod
    def _gains(reach: Floats, masks: Floats, counts: Ints, k: int, widths: int) -> Floats:
        """What k verified drafts and the best masks bring at each width, (rows, widths)."""
        best_first = -np.sort(-masks.reshape(len(masks), -1), axis=1)
        by_masks = np.concatenate([np.zeros((len(masks), 1)), best_first.cumsum(1)], axis=1)
        used = np.arange(widths) - k
        gains = reach[:, 1 : k + 1].sum(1, keepdims=True) + by_masks[:, used.clip(0, by_masks.shape[1] - 1)]
        return np.where((used >= 0) & (k <= counts[:, None]), gains, -np.inf)

    def learn_drafts(self, confidence: Floats, tried: Ints, right: Ints) -> None:
        """See `DraftRecord.observe`."""
        self.record.observe(confidence, tried, right)

    def learn_groups(self, confidence: Floats, counts: Ints) -> None:
        """Note the drafts that new groups made.

        Args:
            confidence: (rows, K).
            counts: (rows,) drafts of each row; rows without any do not count.
        """
        chance = self.record.chances(confidence).cumprod(1)
        for place in range(confidence.shape[1]):
            mine = chance[counts > place, place]
            if len(mine):
                memory = self.REACH_MEMORY_OF_TRY if self._trying else self.REACH_MEMORY
                share = 1 - (1 - memory) ** len(mine)
                self._reach[place] += share * (mine.mean() - self._reach[place])

    def learn_rate(self, tokens: float, *, rows: int, width: int) -> None:
        """Note how many tokens a row got on average in a step of this width."""
        ar, this = self.cost.seconds(np.array([rows, rows * width]))
        self._tokens += self.RATE_MEMORY * (tokens - self._tokens)
        self._time += self.RATE_MEMORY * (this / ar - self._time)


def _fill(masks: list[Floats], drafts: Ints, width: int) -> Widths:
    """Give each row the most valuable masks that the width has room for."""
    groups = np.zeros((len(drafts), len(masks)), dtype=np.int64)
    for k in np.unique(drafts):
        mine = np.flatnonzero(drafts == k)
        values = masks[k][mine]
        rank = (-values.reshape(len(mine), -1)).argsort(1, kind="stable").argsort(1).reshape(values.shape)
        groups[mine, : k + 1] = ((rank < width - 1 - k) & (values > 0)).sum(2)
    return Widths(drafts, groups)


_POLICIES: WeakKeyDictionary[nn.Module, dict[int, WidthPolicy]] = WeakKeyDictionary()


def policy_of(model: nn.Module, most_masks: int) -> WidthPolicy:
    """The policy of a model in this process; each engine goes on with what the ones before it learned."""
    policies = _POLICIES.setdefault(model, {})
    if most_masks not in policies:
        policies[most_masks] = WidthPolicy(most_masks)
    return policies[most_masks]
