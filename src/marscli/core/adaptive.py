"""Between the engine's rows and the width policy: rows to arrays before a step, what came of it after the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import nn

from marscli.core.layout import Ints
from marscli.core.step import RowSettings, StepPlan, StepResult
from marscli.core.width import Floats, WidthPolicy, policy_of

if TYPE_CHECKING:
    from marscli.core.decoding import Row


class AdaptiveWidths:
    """The widths of those rows of an engine that leave them open (`RowSettings.adaptive`).

    Args:
        model: Its policy is used where none is given.
        policy: See `Engine`.
    """

    def __init__(self, model: nn.Module, policy: WidthPolicy | None) -> None:
        self.model = model
        self.policy = policy

    def choose(self, rows: Sequence[Row], settings: RowSettings, counts: Ints, groups: Ints, spare: Ints) -> None:
        """Choose drafts and masks of a step that reads no prompts.

        Args:
            rows: The step's rows.
            settings: Theirs.
            counts: (rows,) drafts that each row has; changed to those that it shall verify.
            groups: (rows, K + 1) masks for each outcome; changed alike.
            spare: See `StepPlan`.
        """
        mine = settings.adaptive
        needed = np.array([len(row.newest) for row in rows]) + counts + groups.sum(1)
        needed[mine] = 1
        chosen = self._policy_for(settings).choose(
            _confidence(rows, settings, groups.shape[1] - 1),
            counts[mine],
            spare[mine],
            rows=len(rows),
            floor=int(needed.max()),
        )
        counts[mine] = chosen.drafts
        groups[mine] = np.minimum(chosen.groups, settings.masks[mine, None])

    def learn(
        self,
        rows: Sequence[Row],
        settings: RowSettings,
        plan: StepPlan,
        result: StepResult,
        *,
        seconds: float,
        prefill: bool,
    ) -> None:
        """Tell the policy what a step took and what came of drafts and masks; rows are as they were before it."""
        policy, decision, mine = self._policy_for(settings), result.decision, settings.adaptive
        policy.cost.observe(len(rows) * result.width, seconds)
        if not prefill:
            tried = np.array([len(plan.drafts[index]) for index in mine])
            if tried.any():
                had = max(len(rows[index].draft_certainties) for index in mine)
                policy.learn_drafts(_confidence(rows, settings, had), tried, decision.verified[mine])
            policy.learn_rate(float(decision.accepted[mine].mean()), rows=len(rows), width=result.width)
        made = decision.drafts[mine]
        if made.any():
            behind = decision.accepted[mine, None] + np.arange(made.max())
            certainties = np.take_along_axis(
                result.certainties[mine], behind.clip(max=result.certainties.shape[1] - 1), 1
            )
            policy.learn_groups(_as_confidence(certainties, settings), made)

    def _policy_for(self, settings: RowSettings) -> WidthPolicy:
        most = int(settings.masks.max())
        if self.policy is None or self.policy.most_masks < most:
            self.policy = policy_of(self.model, most)
        return self.policy


def _confidence(rows: Sequence[Row], settings: RowSettings, width: int) -> Floats:
    """Of the adaptive rows' drafts, (adaptive rows, width)."""
    array = np.zeros((len(settings.adaptive), width))
    for index, row in enumerate(settings.adaptive):
        certainties = rows[row].draft_certainties
        array[index, : len(certainties)] = certainties
    return _as_confidence(array, settings)


def _as_confidence(certainties: npt.NDArray[np.floating], settings: RowSettings) -> Floats:
    """Certainties in numbers of 0 … 1: a negative entropy is none of these yet."""
    return np.where(settings.is_entropy[settings.adaptive], np.exp(certainties), certainties)
