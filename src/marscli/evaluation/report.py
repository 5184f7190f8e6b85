"""What an evaluation shows: lm-eval's table with its speed columns, a row for each τ, and the Pareto picture.

All are made from the result document alone, so a ``results.json`` that was read from disk will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marscli.core.params import exact_number
from marscli.evaluation.config import threshold_label
from marscli.evaluation.suites import BENCHMARKS, PUBLISHED, SOURCE, Benchmark
from marscli.output import atomic_write, markdown_table

Document = Mapping[str, Any]

_COLUMNS = ("Threshold", "Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
_SPEED_COLUMNS = ("Tokens/forward", "Tokens/s", "Seconds")
_DIRECTIONS = {True: "↑", False: "↓"}


def text(document: Document) -> str:
    """All that ``mars eval`` prints: `table`, `summary` and, where it was asked for, `paper_reference`."""
    parts = [table(document), summary(document)]
    if "paper_reference" in document["mars"]:
        parts.append(paper_reference(document))
    return "\n\n".join(part for part in (*parts, *_remarks(document)) if part)


def table(document: Document) -> str:
    """lm-eval's table with a block of rows for each τ, and what a forward and a second gave.

    Tasks that only compare likelihoods do not depend on τ: they are shown once, as τ ``any``. With several τ, exact
    among them, a column gives each score's change against exact.
    """
    exact = _exact_run(document)
    rows: list[list[Any]] = []
    for index, run in enumerate(document["mars"]["runs"]):
        for generated in (False, True):
            if not generated and index > 0:
                continue
            label = run_label(document, run) if generated else "any"
            for name, depth in _tree(document, run):
                if (_speed(document, run, name) is not None) == generated:
                    for row in _metric_rows(document, run, name, depth, exact):
                        rows.append([label, *row])
                        label = ""
    change = ("Change",) if exact is not None else ()
    return markdown_table([*_COLUMNS, *change, *_SPEED_COLUMNS], rows)


def _remarks(document: Document) -> Iterator[str]:
    """What the reader of the tables must know."""
    limit = document["mars"]["limit"]
    if limit is not None:
        yield f"Partial: only the first {limit} problems of each task (--limit {limit})."
    for name, said in document["mars"].get("stand_ins", {}).items():
        yield f"{name}: not the benchmark's own data. {said}"
    if document["mars"].get("paper") or "paper_reference" in document["mars"]:
        for benchmark in BENCHMARKS:
            column = next((c for c in _score_columns(document) if c.name == benchmark.task), None)
            if column is not None and not column.stand_in and column.problems != benchmark.problems:
                yield f"{benchmark.title}: the data set here has {column.problems} of {benchmark.problems} problems."


def _exact_run(document: Document) -> Mapping[str, Any] | None:
    """The exact run that others are compared with; None where there are no others."""
    runs = document["mars"]["runs"]
    exact = [run for run in runs if run["threshold"] == exact_number(document["mars"]["confidence"])]
    return exact[0] if exact and len(runs) > 1 else None


@dataclass(frozen=True)
class _ScoreColumn:
    """A task, or a group with a score of its own, that generates text.

    Attributes:
        name: The task's.
        title: The benchmark's name where it is one of the paper's, with its own data.
        problems: How many the data set has.
        stand_in: Whether the data only stands in for the benchmark's.
    """

    name: str
    title: str
    problems: int
    stand_in: bool


def _score_columns(document: Document) -> list[_ScoreColumn]:
    scored = [name for name in document["group_subtasks"] if name in document.get("groups", {})]
    hidden = {member for name in scored for member in _descendants(document, name)}
    benchmarks: dict[str, Benchmark] = {benchmark.task: benchmark for benchmark in BENCHMARKS}
    columns = []
    first = document["mars"]["runs"][0]
    for name, metrics in first["results"].items():
        if name in hidden or main_score(metrics) is None or _speed(document, first, name) is None:
            continue
        leaves = _leaves(document, name)
        stand_in = any(leaf in document["mars"].get("stand_ins", {}) for leaf in leaves)
        problems = sum(document["n-samples"][leaf]["original"] for leaf in leaves if leaf in document["n-samples"])
        title = benchmarks[name].title if name in benchmarks and not stand_in else _marked(document, name)
        columns.append(_ScoreColumn(name, title, problems, stand_in))
    asked = [benchmark.task for benchmark in BENCHMARKS]
    if document["mars"].get("paper"):
        columns.sort(key=lambda column: asked.index(column.name) if column.name in asked else len(asked))
    return columns


def _marked(document: Document, name: str) -> str:
    stand_ins = document["mars"].get("stand_ins", {})
    return f"{name} (stand-in data)" if any(leaf in stand_ins for leaf in _leaves(document, name)) else name


def summary(document: Document) -> str:
    """A row for each τ, as in table 4 of the paper: scores in %, their average, its change against exact, the speed.

    Stand-ins do not count in the average. Empty with one τ, or where nothing was generated.
    """
    columns = _score_columns(document)
    runs = document["mars"]["runs"]
    if len(runs) < 2 or not columns:
        return ""
    exact = _exact_run(document)
    averages = [_average(document, run, columns) for run in runs]
    base = None if exact is None else averages[runs.index(exact)]
    rows = []
    for run, average in zip(runs, averages, strict=True):
        scores = [_percent(run, column.name) for column in columns]
        change = [None if base is None or average is None else f"{average - base:+.1f}"]
        rows.append(
            [run_label(document, run), *map(_one_decimal, scores), _one_decimal(average)]
            + (change if exact is not None else [])
            + list(_total_speed(run) or (None, None, None))
        )
    counted = sum(not column.stand_in for column in columns)
    names = ["Threshold", *(column.title for column in columns), f"Average of {counted}"]
    return markdown_table([*names, *(["Change"] if exact is not None else []), *_SPEED_COLUMNS], rows)


def paper_reference(document: Document) -> str:
    """Our rows, and below them those that the paper published, marked as such."""
    columns = {column.name: column for column in _score_columns(document) if not column.stand_in}
    exact = _exact_run(document)
    six = [columns.get(benchmark.task) for benchmark in BENCHMARKS]
    whole = [column for column in six if column is not None]
    rows: list[list[Any]] = []
    base: float | None = None
    if exact is not None and len(whole) == len(six):
        base = _average(document, exact, whole)
    name = Path(document["model_name"]).name
    for run in document["mars"]["runs"]:
        scores = [None if column is None else _percent(run, column.name) for column in six]
        average = _average(document, run, whole) if len(whole) == len(six) else None
        change = None if base is None or average is None or run is exact else f"{average - base:+.1f}"
        speed = _total_speed(run)
        cells = [*map(_one_decimal, scores), _one_decimal(average), change, None if speed is None else speed[0]]
        rows.append([f"{name} (measured)", run_label(document, run), *cells])
    for row in PUBLISHED:
        label = "exact" if row.threshold == 1.0 else f"{row.threshold:g}"
        cells = [_one_decimal(row.scores.get(benchmark.title)) for benchmark in BENCHMARKS]
        cells += [_one_decimal(row.average), None if row.change is None else f"{row.change:+.1f}"]
        rows.append([f"{row.model} (published, table {row.table})", label, *cells, row.tokens_per_forward])
    titles = [benchmark.title for benchmark in BENCHMARKS]
    shown = markdown_table(["Model", "Threshold", *titles, "Average", "Change", "Tokens/forward"], rows)
    return f"{shown}\n\nPublished rows: {SOURCE}; Qwen2.5 models, not measured here."


def _average(document: Document, run: Mapping[str, Any], columns: Sequence[_ScoreColumn]) -> float | None:
    scores = [_percent(run, column.name) for column in columns if not column.stand_in]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None


def _percent(run: Mapping[str, Any], name: str) -> float | None:
    score = main_score(run["results"][name]) if name in run["results"] else None
    return None if score is None else 100 * score[1]


def _one_decimal(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _total_speed(run: Mapping[str, Any]) -> tuple[float, float, float] | None:
    return _sum_speed(list(run["tasks"].values()))


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


def _usages(document: Document, run: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return [run["tasks"][leaf] for leaf in _leaves(document, name) if leaf in run["tasks"]]


def _speed(document: Document, run: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Tokens per forward, per second and seconds of a task, or of a group; None where nothing was generated."""
    return _sum_speed(_usages(document, run, name))


def tokens_per_forward(document: Document, run: Mapping[str, Any], name: str) -> float | None:
    """Of a task or group; None where nothing was generated."""
    speed = _speed(document, run, name)
    return None if speed is None else speed[0]


def _sum_speed(usages: Sequence[Mapping[str, Any]]) -> tuple[float, float, float] | None:
    generated = [usage for usage in usages if usage["forwards"]]
    if not generated:
        return None
    tokens, forwards, seconds = (sum(usage[key] for usage in generated) for key in ("tokens", "forwards", "seconds"))
    return tokens / forwards, tokens / seconds, seconds


def _metric_rows(
    document: Document, run: Mapping[str, Any], name: str, depth: int, exact: Mapping[str, Any] | None
) -> Iterator[list[Any]]:
    metrics = run["results"][name]
    title = " " * depth + ("- " if depth else "") + _marked(document, str(metrics.get("alias", name)).strip(" -"))
    version = str(document["versions"].get(name, ""))
    shots: Any = document["n-shot"].get(name, "")
    seconds = sum(usage["seconds"] for usage in _usages(document, run, name))
    speed = _speed(document, run, name) or (None, None, seconds)
    for key, value in (scores(metrics) or {"": ""}).items():  # a group without a score of its own is a heading
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
            *([] if exact is None else [_change(run, exact, name, key)]),
            *speed,
        ]
        title, version = "", ""


def _change(run: Mapping[str, Any], exact: Mapping[str, Any], name: str, key: str) -> str:
    """A score's difference to the exact run's; empty for the exact run itself and where there is none."""
    value, base = run["results"][name].get(key), exact["results"].get(name, {}).get(key)
    if run is exact or not isinstance(value, int | float) or not isinstance(base, int | float):
        return ""
    return f"{value - base:+.4f}"


def scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The scores among lm-eval's entries of a task, by ``metric,filter``."""
    return {
        key: value for key, value in metrics.items() if "," in key and not key.partition(",")[0].endswith("_stderr")
    }


def main_score(metrics: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """The one score that stands for a task in a picture: its name, value and standard error (0 where unknown).

    It is the first that the task names; of several filters the lenient ``flexible-extract``, since a strict one rather
    measures a wording.
    """
    values = {key: float(value) for key, value in scores(metrics).items() if isinstance(value, int | float)}
    for key in (*(key for key in values if key.endswith(",flexible-extract")), *values):
        metric, _, filter_name = key.partition(",")
        error = metrics.get(f"{metric}_stderr,{filter_name}")
        title = metric if filter_name == "none" else f"{metric}, {filter_name}"
        return title, values[key], error if isinstance(error, float) else 0.0
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

    legend_columns = 1 if len(lines) == 1 else 2
    height = 5 + 0.2 * -(-len(lines) // legend_columns)
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
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
    # Below the axes, where it hides no point.
    figure.legend(loc="outside lower center", ncols=legend_columns, fontsize=8, frameon=False)
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
    lines: dict[str, list[tuple[float, float, float, str]]] = {}
    for column in _score_columns(document):
        for run in document["mars"]["runs"]:
            score = main_score(run["results"].get(column.name, {}))
            speed = _speed(document, run, column.name)
            if score is not None and speed is not None:
                title, value, error = score
                point = (speed[0], 100 * value, 100 * error, run_label(document, run))
                lines.setdefault(f"{_marked(document, column.name)} ({title})", []).append(point)
    return lines


def _descendants(document: Document, name: str) -> set[str]:
    children = _children(document, name)
    return {*children, *(inner for child in children for inner in _descendants(document, child))}
