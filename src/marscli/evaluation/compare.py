"""``mars eval --compare A B``: the differences of two results, with their standard errors.

Scores of the same questions are not independent, so where both runs logged their samples the standard error is that of
the differences sample by sample; else it is that of two independent scores, √(a² + b²), which is too large.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marscli.errors import InputError
from marscli.evaluation import report
from marscli.evaluation.resume import read_document
from marscli.output import markdown_table

_COLUMNS = ("Threshold", "Task", "Metric", "A", "B", "B - A", "±", "Stderr", "by", "A tok/fwd", "B tok/fwd")
# Settings that make scores another measurement, and how they are called.
_MATTERS = ("tasks", "limit", "num_fewshot", "max_new_tokens", "chat_template", "system", "seed", "data_root")


def load(path: str | Path) -> tuple[dict[str, Any], Path]:
    """The result document of a folder or file, and the folder.

    Raises:
        InputError: It is not there, or not one of ours.
    """
    file = Path(path).expanduser()
    file = file / "results.json" if file.is_dir() else file
    return read_document(file, "--compare"), file.parent


def compare(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """The differences of two evaluations, B − A.

    Args:
        a: Folder, or its ``results.json``.
        b: The other one.

    Returns:
        An object for each τ, task and metric that both have: ``threshold_a, threshold_b, task, metric, a, b,
        difference, stderr`` (None where unknown)``, paired, tokens_per_forward_a, tokens_per_forward_b``.

    Raises:
        InputError: A result is not there, or they have nothing in common.
    """
    (first, first_folder), (second, second_folder) = load(a), load(b)
    rows = []
    for run_a, run_b in _pairs(first, second):
        for task, metrics in run_a["results"].items():
            other = run_b["results"].get(task, {})
            for key, value in report.scores(metrics).items():
                if not isinstance(value, int | float) or not isinstance(other.get(key), int | float):
                    continue
                paired = _paired_error(
                    _samples(first_folder, task, report.run_label(first, run_a)),
                    _samples(second_folder, task, report.run_label(second, run_b)),
                    key,
                )
                rows.append(
                    {
                        "threshold_a": report.run_label(first, run_a),
                        "threshold_b": report.run_label(second, run_b),
                        "task": task,
                        "metric": key,
                        "a": value,
                        "b": other[key],
                        "difference": other[key] - value,
                        "stderr": _error(metrics, other, key) if paired is None else paired,
                        "paired": paired is not None,
                        "tokens_per_forward_a": report.tokens_per_forward(first, run_a, task),
                        "tokens_per_forward_b": report.tokens_per_forward(second, run_b, task),
                    }
                )
    if not rows:
        raise InputError(
            f"--compare: {a} and {b} have no task at the same threshold in common",
            hint="compare runs of the same --tasks and --threshold",
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The differences as a table."""
    shown = []
    for row in rows:
        a, b = row["threshold_a"], row["threshold_b"]
        error = row["stderr"]
        shown.append(
            [
                a if a == b else f"{a} → {b}",
                row["task"],
                row["metric"],
                *(f"{row[key]:.4f}" for key in ("a", "b")),
                f"{row['difference']:+.4f}",
                "" if error is None else "±",
                "–" if error is None else f"{error:.4f}",
                "" if error is None else "sample" if row["paired"] else "score",
                row["tokens_per_forward_a"],
                row["tokens_per_forward_b"],
            ]
        )
    return markdown_table(_COLUMNS, shown)


def other_settings(a: str | Path, b: str | Path) -> list[str]:
    """Settings in which the two runs differ so that their scores are not of the same measurement, in words."""
    one, other = (load(path)[0]["meta"]["options"] for path in (a, b))
    return [
        f"--{name.replace('_', '-')}: A {_shown(one.get(name))}, B {_shown(other.get(name))}"
        for name in _MATTERS
        if one.get(name) != other.get(name)
    ]


def _shown(value: Any) -> str:
    return "none" if value is None else ",".join(value) if isinstance(value, list) else str(value)


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Runs at the same τ; two results of one τ each are compared whatever it is."""
    ours, theirs = first["mars"]["runs"], second["mars"]["runs"]
    if len(ours) == len(theirs) == 1:
        yield ours[0], theirs[0]
        return
    by_label = {report.run_label(second, run): run for run in theirs}
    for run in ours:
        if report.run_label(first, run) in by_label:
            yield run, by_label[report.run_label(first, run)]


def _error(metrics: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float | None:
    metric, _, filter_name = key.partition(",")
    errors = [scores.get(f"{metric}_stderr,{filter_name}") for scores in (metrics, other)]
    if not all(isinstance(error, int | float) for error in errors):
        return None
    return math.hypot(*errors)


def _samples(folder: Path, task: str, label: str) -> dict[tuple[str, int], dict[str, Any]]:
    """A task's logged samples by filter and number of the document; none if they were not logged."""
    path = folder / f"samples_{task.replace('/', '_')}_{label}.jsonl"
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {(row["filter"], row["doc_id"]): row for row in rows}


def _paired_error(
    first: Mapping[tuple[str, int], Mapping[str, Any]], second: Mapping[tuple[str, int], Mapping[str, Any]], key: str
) -> float | None:
    """Standard error of the mean difference over the same documents; None where that cannot be had."""
    metric, _, filter_name = key.partition(",")
    places = [place for place in first if place[0] == filter_name]
    if len(places) < 2 or {place for place in second if place[0] == filter_name} != set(places):
        return None
    differences = []
    for place in places:
        one, other = first[place], second[place]
        values = one.get(metric), other.get(metric)
        if one.get("doc_hash") != other.get("doc_hash") or not all(isinstance(v, int | float) for v in values):
            return None
        differences.append(values[1] - values[0])
    mean = math.fsum(differences) / len(differences)
    variance = math.fsum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return math.sqrt(variance / len(differences))
