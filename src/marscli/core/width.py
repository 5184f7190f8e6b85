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

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import nn

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_ENTRIES = 32  # of a row; wider steps are not considered
BUCKETS = 8  # of confidence
LEAST_PRICE = 0.01  # of an entry in every row, in AR steps: times of different moments make entries look free
FIRST_REST, LONGEST_REST = 8, 64  # AR steps before masks are tried again
TRIES = 0.02  # share of the time that tries may take, if the rest is shorter otherwise


class StepCost:
    """Seconds of a step by its entries, all rows together, learned from the steps that were seen.

    AR decoding's steps stand for themselves; on wider ones lies a line. Dense models show a line from two entries to
    several hundred, and often a jump before it, where a product with one vector becomes one of matrices
    (docs/PERFORMANCE.md). Steps are sorted into classes of about the same size, so that a thousand narrow steps do not
    outvote the few wide ones; a class is worth the median of its last steps: one that was disturbed does not count.
    """

    REMEMBERED = 9
    CLASSES_PER_OCTAVE = 4
    UNSEEN_SLOPE = 0.02  # of an entry, relative to the first: before two sizes were seen, weights dominate

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}  # (seconds, entries) of the last steps of a class
        self._classes: dict[int, tuple[float, int, int]] = {}  # (seconds, entries, number of steps) of a class

    def observe(self, entries: int, seconds: float) -> None:
        """Note a step."""
        steps = self._steps.setdefault(self._class(entries), deque(maxlen=self.REMEMBERED))
        steps.append((seconds, entries))
        self._classes[self._class(entries)] = (*sorted(steps)[len(steps) // 2], len(steps))

    def _class(self, entries: int) -> int:
        return round(self.CLASSES_PER_OCTAVE * math.log2(entries))

    def seconds(self, rows: int, widths: Ints) -> Floats:
        """What steps of so many rows take at these widths; relative figures as long as nothing was observed."""
        base, slope = self._line(rows, rows * int(widths[-1]))
        seconds = base + slope * rows * widths.astype(np.float64)
        own = self._classes.get(self._class(rows))
        if own is not None and own[1] == rows:
            seconds[widths == 1] = own[0]
        return seconds

    def entry_seconds(self, rows: int, widest: int) -> float:
        """What one more entry of every row adds to a step that is not AR decoding's."""
        return self._line(rows, rows * widest)[1] * rows

    def _line(self, rows: int, most: int) -> tuple[float, float]:
        """Fit the classes wider than AR decoding's and up to ``most``; if they are fewer than two, take others too."""
        seen = list(self._classes.values())
        wider = [c for c in seen if c[1] > rows]
        near = [c for c in wider if c[1] <= most]
        chosen = next((some for some in (near, wider, seen) if len(some) >= 2), seen)
        if len(chosen) < 2:
            first = chosen[0][0] if chosen else 1.0
            return first, self.UNSEEN_SLOPE * first
        # Least squares of relative errors, each class as sure as it has steps.
        seconds, entries, steps = np.array(chosen, dtype=np.float64).T
        weights = steps / seconds**2
        mean_s, mean_e = weights @ seconds / weights.sum(), weights @ entries / weights.sum()
        off = weights * (entries - mean_e)
        spread = off @ (entries - mean_e)
        slope = max(float(off @ (seconds - mean_s) / spread), 0.0) if spread > 0 else 0.0
        return max(float(mean_s - slope * mean_e), 0.0), slope


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
        elif not self._resting and (spare > 1).any():  # rows at their end say nothing about masks
            self._trying = True
            masks, price = self._try(rows)
            best.groups[:, 0] = np.where(best.drafts == 0, (spare - 1).clip(0, masks), 0)
            self._resting = max(self._rest, int(price / TRIES))
            self._rest = min(2 * self._rest, LONGEST_REST)
        return best

    def _try(self, rows: int) -> tuple[int, float]:
        """Masks of a try, more than one where the others add less than half of its cost; and the price in AR steps."""
        plain, first = self.cost.seconds(rows, np.array([1, 2]))
        more = self.cost.entry_seconds(rows, 2)
        first_price = max(float(first - plain), 0.0)  # by disturbed times a wider step can look cheaper
        others = int(first_price / (2 * more)) if more > 0 else self.most_masks
        masks = 1 + min(others, self.most_masks - 1)
        return masks, (first_price + (masks - 1) * more) / float(plain)

    def _best(self, confidence: Floats, counts: Ints, spare: Ints, rows: int, floor: int) -> Widths:
        """Weigh all widths for all rows, and every number of drafts k at each."""
        tables = _tables(confidence.shape[1], self.most_masks)
        chance = np.where(tables.draft < counts[:, None], self.record.chances(confidence), 0.0)
        # at_least[row, i]: the first i drafts are right. exactly[row, k, j]: of k drafts the first j and no more.
        at_least = np.concatenate([np.ones((len(counts), 1)), chance.cumprod(1)], axis=1)
        next_one = np.concatenate([at_least[:, 1:], np.zeros((len(counts), 1))], axis=1)
        exactly = (at_least[:, None] - next_one[:, None] * tables.below) * tables.possible
        price, price_of_entry = self._prices(rows, tables.widths, floor)
        # masks[row, k, (j, i)]: what the i-th mask of group j brings.
        worth = np.maximum(self._reach - price_of_entry, 1e-3 * self._reach)
        worth_of_row = np.where(tables.offset < spare[:, None, None], worth, 0.0)
        masks = (exactly[..., None] * worth_of_row[:, None]).reshape(*exactly.shape[:2], -1)
        by_masks = np.zeros((*masks.shape[:2], masks.shape[2] + 1))
        (-np.sort(-masks)).cumsum(2, out=by_masks[..., 1:])
        by_drafts = at_least.cumsum(1) - 1
        gains = by_drafts[..., None] + np.take_along_axis(by_masks, tables.masks_at, 2)
        gains = np.where(tables.fits & (tables.outcome <= counts[:, None])[..., None], gains, -np.inf)
        width = int((gains.max(1).sum(0) - price).argmax())
        drafts = gains[:, :, width].argmax(1)
        best = masks[np.arange(len(drafts)), drafts]
        rank = (-best).argsort(1, kind="stable").argsort(1)
        taken = (rank < (width - drafts)[:, None]) & (best > 0)
        return Widths(drafts, taken.reshape(len(drafts), -1, self.most_masks).sum(2))

    def _prices(self, rows: int, widths: Ints, floor: int) -> tuple[Floats, float]:
        """What each width costs beyond AR decoding, and what one entry of a row does.

        In tokens: those that the time would have given at the going rate. Up to ``floor`` width is free.
        """
        seconds = self.cost.seconds(rows, widths)
        rate = max(self._tokens / self._time, 1.0)  # tokens a row, in the time of an AR step
        price = np.maximum((seconds - seconds[0]) / seconds[0], LEAST_PRICE * (widths - 1))
        of_entry = max(self.cost.entry_seconds(rows, int(widths[-1])) / float(seconds[0]), LEAST_PRICE)
        return rate * rows * np.where(widths > floor, price, 0.0), rate * of_entry

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
        ar, this = self.cost.seconds(rows, np.array([1, width]))
        self._tokens += self.RATE_MEMORY * (tokens - self._tokens)
        self._time += self.RATE_MEMORY * (this / ar - self._time)


@dataclass(frozen=True)
class _Tables:
    """Index arrays that depend on K drafts and M masks alone.

    Attributes:
        draft: (K,).
        outcome: (K + 1,), also the number of drafts that are verified.
        below: (K + 1, K + 1) [k, j], whether j < k.
        possible: (K + 1, K + 1) [k, j], whether j ≤ k.
        offset: (K + 1, M) [j, i], tokens from the step's sure one to the one that the draft of a mask stands for.
        widths: (W,) 1, 2, …
        masks_at: (1, K + 1, W) [k, width], masks that the width has room for behind k drafts.
        fits: (K + 1, W) [k, width], whether k drafts fit.
    """

    draft: Ints
    outcome: Ints
    below: npt.NDArray[np.bool_]
    possible: npt.NDArray[np.bool_]
    offset: Ints
    widths: Ints
    masks_at: Ints
    fits: npt.NDArray[np.bool_]


@lru_cache
def _tables(most_drafts: int, most_masks: int) -> _Tables:
    outcome = np.arange(most_drafts + 1)
    all_masks = (most_drafts + 1) * most_masks
    widths = np.arange(1, min(1 + most_drafts + all_masks, MOST_ENTRIES) + 1)
    room = widths - 1 - outcome[:, None]
    return _Tables(
        draft=np.arange(most_drafts),
        outcome=outcome,
        below=outcome < outcome[:, None],
        possible=outcome <= outcome[:, None],
        offset=outcome[:, None] + np.arange(1, most_masks + 1),
        widths=widths,
        masks_at=room.clip(0, all_masks)[None],
        fits=room >= 0,
    )


_POLICIES: WeakKeyDictionary[nn.Module, dict[int, WidthPolicy]] = WeakKeyDictionary()


def policy_of(model: nn.Module, most_masks: int) -> WidthPolicy:
    """The policy of a model in this process; each engine goes on with what the ones before it learned."""
    policies = _POLICIES.setdefault(model, {})
    if most_masks not in policies:
        policies[most_masks] = WidthPolicy(most_masks)
    return policies[most_masks]
