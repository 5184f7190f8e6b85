"""The result document of an evaluation: lm-eval's own keys, and under ``mars`` what each τ scored and cost.

It ignores how answers came about; its input is lm-eval's results for each task alone and the usage counted beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lm_eval.api.group import Group
from lm_eval.evaluator_utils import EvalAcc, aggregate_groups
from lm_eval.utils import handle_non_serializable

from marscli.core.params import Confidence, threshold_number
from marscli.evaluation.lm import Usage

# What lm-eval says of a task beside its scores.
_FACTS = ("configs", "versions", "n-shot", "higher_is_better", "n-samples")


@dataclass(frozen=True)
class TaskUsage:
    """What the answers of one task cost at one τ. A task that only compares likelihoods has no tokens, only seconds."""

    answers: int
    tokens: int
    forwards: int
    seconds: float
    hit_limit: int
    prompts_cut: int

    @classmethod
    def of(cls, usage: Usage, likelihood_seconds: float) -> TaskUsage:
        """Sum up a task's answers; a task without any is given the time of its likelihoods."""
        return cls(
            answers=len(usage.answers),
            tokens=sum(len(answer.tokens) for answer in usage.answers),
            forwards=sum(answer.forwards for answer in usage.answers),
            seconds=usage.seconds if usage.answers else likelihood_seconds,
            hit_limit=sum(answer.hit_limit for answer in usage.answers),
            prompts_cut=sum(answer.prompt_cut > 0 for answer in usage.answers) + len(usage.cut_contexts),
        )

    def to_dict(self) -> dict[str, Any]:
        """As the document holds it, with the ratios (None where nothing was generated)."""
        return {
            **asdict(self),
            "tokens_per_forward": self.tokens / self.forwards if self.forwards else None,
            "tokens_per_second": self.tokens / self.seconds if self.tokens and self.seconds else None,
        }


@dataclass
class Run:
    """The tasks done so far at one τ.

    Attributes:
        threshold: τ; None is exact.
        results: What `lm_eval.evaluate` returned for each task alone.
        usage: What each task cost.
    """

    threshold: float | None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, TaskUsage] = field(default_factory=dict)

    @classmethod
    def restored(cls, threshold: float | None, entry: Mapping[str, Any], document: Mapping[str, Any]) -> Run:
        """The tasks that an earlier run had done.

        Args:
            threshold: τ.
            entry: One of the document's ``mars.runs``.
            document: The whole; what a task is does not depend on τ and stands there once.
        """
        run = cls(threshold)
        costs = {f.name for f in fields(TaskUsage)}
        for name, usage in entry["tasks"].items():
            metrics = {key: float("nan") if value is None else value for key, value in entry["results"][name].items()}
            facts = {key: {name: document[key].get(name)} for key in _FACTS}
            run.results[name] = {"results": {name: metrics}, **facts}
            run.usage[name] = TaskUsage(**{key: value for key, value in usage.items() if key in costs})
        return run

    def forget(self, name: str) -> None:
        """Have a task done again."""
        self.results.pop(name, None)
        self.usage.pop(name, None)

    def combined(self, groups: Mapping[str, Group]) -> dict[str, Any]:
        """lm-eval's result keys for all tasks together as plain JSON values, the groups' scores computed by lm-eval."""
        whole = EvalAcc()
        whole.groups = {
            name: group
            for name, group in groups.items()
            if any(task.task_name in self.results for task in group.get_all_tasks())
        }
        for name, result in self.results.items():
            whole.metrics[name] = result["results"][name]
            whole.configs[name] = result["configs"][name]
            whole.versions[name] = result["versions"][name]
            whole.num_fewshot[name] = result["n-shot"][name]
            whole.higher_is_better[name] = result["higher_is_better"][name]
            whole.n_samples[name] = result["n-samples"][name]
        results: Any = aggregate_groups(whole)._to_eval_results()
        plain: dict[str, Any] = json.loads(json.dumps(results, default=handle_non_serializable))
        return plain

    def to_dict(self, groups: Mapping[str, Group], confidence: Confidence, verify: bool) -> dict[str, Any]:
        """One entry of ``mars.runs``."""
        return {
            "threshold": threshold_number(self.threshold, confidence),
            "verify": verify,
            "results": self.combined(groups)["results"],
            "tasks": {name: usage.to_dict() for name, usage in self.usage.items()},
        }
