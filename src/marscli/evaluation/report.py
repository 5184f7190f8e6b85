"""What an evaluation shows: lm-eval's table with its speed columns, and the Pareto picture.

Both are made from the result document alone, so a ``results.json`` that was read from disk will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marscli.core.params import exact_number
from marscli.evaluation.config import threshold_label
from marscli.output import atomic_write, markdown_table

Document = Mapping[str, Any]

_COLUMNS = ("Threshold", "Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
_SPEED_COLUMNS = ("Tokens/forward", "Tokens/s")
_DIRECTIONS = {True: "↑", False: "↓"}


def table(document: Document) -> str:
    """lm-eval's table with a block of rows for each τ, and what a forward and a second gave.

    Tasks that only compare likelihoods do not depend on τ: they are shown once, as τ ``any``.
    """
    rows: list[list[Any]] = []
    for index, run in enumerate(document["mars"]["runs"]):
        for generated in (False, True):
            if not generated and index > 0:
                continue
            label = run_label(document, run) if generated else "any"
            for name, depth in _tree(document, run):
                speed = _speed(document, run, name)
                if (speed is not None) == generated:
                    for row in _metric_rows(document, run, name, depth, speed or (None, None)):
                        rows.append([label, *row])
                        label = ""
    text = markdown_table([*_COLUMNS, *_SPEED_COLUMNS], rows)
    limit = document["mars"]["limit"]
    return (
        text if limit is None else f"{text}\n\nPartial: only the first {limit} problems of each task (--limit {limit})."
    )


def run_label(document: Document, run: Mapping[str, Any]) -> str:
    """τ of a run as it is shown: ``exact`` or the number."""
    threshold: float = run["threshold"]
    exact = threshold == exact_number(document["mars"]["confidence"])
    return threshold_label(None if exact else threshold)


def _children(document: Document, name: str) -> list[str]:
    members: list[str] = document["group_subtasks"].get(name, [])
    return members


def _tree(document: Document, run: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Names and depths in the order in which lm-eval shows them: groups above their members."""
    inner = {child for name in document["group_subtasks"] for child in _children(document, name)}
    depths: dict[str, int] = {}

    def visit(name: str, depth: int) -> None:
        if name in run["results"]:
            depths.setdefault(name, depth)
        for child in _children(document, name):
            visit(child, depth + 1)

    for name in (*document["group_subtasks"], *run["results"]):
        if name not in inner:
            visit(name, 0)
    return list(depths.items())


def _leaves(document: Document, name: str) -> list[str]:
    """The tasks that a group stands for; a task stands for itself."""
    children = _children(document, name)
    return [leaf for child in children for leaf in _leaves(document, child)] if children else [name]


def _speed(document: Document, run: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Tokens per forward and per second of a task, or of all tasks of a group; None where nothing was generated."""
    done = [run["tasks"][leaf] for leaf in _leaves(document, name) if leaf in run["tasks"]]
    generated = [usage for usage in done if usage["forwards"]]
    if not generated:
        return None
    tokens, forwards, seconds = (sum(usage[key] for usage in generated) for key in ("tokens", "forwards", "seconds"))
    return tokens / forwards, tokens / seconds


def _metric_rows(
    document: Document, run: Mapping[str, Any], name: str, depth: int, speed: tuple[float | None, float | None]
) -> Iterator[list[Any]]:
    metrics = run["results"][name]
    title = " " * depth + ("- " if depth else "") + str(metrics.get("alias", name)).strip(" -")
    version = str(document["versions"].get(name, ""))
    shots: Any = document["n-shot"].get(name, "")
    for key, value in (_scores(metrics) or {"": ""}).items():  # a group without a score of its own is a heading
        metric, _, filter_name = key.partition(",")
        error = metrics.get(f"{metric}_stderr,{filter_name}")
        yield [
            title,
            version,
            filter_name,
            shots,
            metric,
            _DIRECTIONS.get(document["higher_is_better"].get(name, {}).get(metric), ""),
            f"{value:.4f}" if isinstance(value, float) else value,
            "" if error is None else "±",
            f"{error:.4f}" if isinstance(error, float) else error or "",
            *speed,
        ]
        title, version = "", ""


def _scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The scores among lm-eval's entries of a task, by ``metric,filter``."""
    return {
        key: value for key, value in metrics.items() if "," in key and not key.partition(",")[0].endswith("_stderr")
    }


def main_score(metrics: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """The one score that stands for a task in a picture: its name, value and standard error (0 where unknown).

    It is the first that the task names; of several filters the lenient ``flexible-extract``, since a strict one rather
    measures a wording.
    """
    scores = {key: float(value) for key, value in _scores(metrics).items() if isinstance(value, int | float)}
    for key in (*(key for key in scores if key.endswith(",flexible-extract")), *scores):
        metric, _, filter_name = key.partition(",")
        error = metrics.get(f"{metric}_stderr,{filter_name}")
        title = metric if filter_name == "none" else f"{metric}, {filter_name}"
        return title, scores[key], error if isinstance(error, float) else 0.0
    return None


def pareto(document: Document, path: Path) -> bool:
    """Draw score against tokens per forward: a line for each task, a point for each τ.

    Args:
        document: The results of several τ.
        path: The PNG to write.

    Returns:
        Whether there was anything to draw: tasks that only compare likelihoods have no speed.
    """
    lines = _lines(document)
    if not lines:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (title, points) in enumerate(lines.items()):
        color = f"C{index % 10}"
        xs, ys, errors, labels = zip(*points, strict=True)
        axes.errorbar(
            xs,
            ys,
            yerr=errors,
            color=color,
            marker="o",
            ms=6,
            lw=1.6,
            ecolor="0.7",
            elinewidth=1,
            capsize=2.5,
            label=title,
        )
        for place, (x, y, label) in enumerate(zip(xs, ys, labels, strict=True)):
            text = label if label == "exact" else f"τ = {label}"
            # By turns above and below: neighbouring thresholds are often close together.
            offset, side = ((6, 7), "left") if place % 2 == 0 else ((-6, -15), "right")
            axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=side, fontsize=9, color=color)
    limit = document["mars"]["limit"]
    partial = "" if limit is None else f"\npartial: the first {limit} problems of each task"
    axes.set_title(f"Score against speed: {Path(document['model_name']).name}{partial}", fontsize=11)
    axes.set_xlabel("tokens per forward pass")
    axes.set_ylabel("score (%), bars: one standard error")
    axes.margins(x=0.14, y=0.15)
    _widen(axes)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False)
    with atomic_write(path, "wb") as handle:
        figure.savefig(handle, format="png")
    return True


def _widen(axes: Any) -> None:
    """Show at least 4 points of score and half a token, so that noise does not look like a cliff."""
    for least, limits, set_limits in ((4.0, axes.get_ylim(), axes.set_ylim), (0.5, axes.get_xlim(), axes.set_xlim)):
        low, high = limits
        missing = max(0.0, least - (high - low)) / 2
        set_limits(low - missing, high + missing)


def _lines(document: Document) -> dict[str, list[tuple[float, float, float, str]]]:
    """By title: (tokens per forward, score in %, its standard error in %, τ) for each run.

    A group with a score of its own stands for its members.
    """
    scored = [name for name in document["group_subtasks"] if name in document.get("groups", {})]
    hidden = {member for name in scored for member in _descendants(document, name)}
    lines: dict[str, list[tuple[float, float, float, str]]] = {}
    for run in document["mars"]["runs"]:
        for name, metrics in run["results"].items():
            score, speed = main_score(metrics), _speed(document, run, name)
            if name not in hidden and score is not None and speed is not None:
                title, value, error = score
                point = (speed[0], 100 * value, 100 * error, run_label(document, run))
                lines.setdefault(f"{name} ({title})", []).append(point)
    return lines


def _descendants(document: Document, name: str) -> set[str]:
    children = _children(document, name)
    return {*children, *(inner for child in children for inner in _descendants(document, child))}
