"""The pictures of a bench, as PNG bytes: quality against speed, and speed-up by batch size.

White ground, so that they read the same in print and on a dark page; colours that colour-blind readers tell apart;
type large enough for half size.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from marscli.benchmarking.config import SWEPT

COLOURS = {"hf": "#7a7a7a", "ar": "#0072b2", "threshold": "#d55e00"}
MARKERS = {"hf": "D", "ar": "s", "threshold": "o"}
MORE_COLOURS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NAMES = {
    "hf": "hf (transformers generate)",
    "ar": "ar (one token a forward)",
    "threshold": "threshold (τ at the points)",
}
INK, GRID = "#222222", "#d9d9d9"
HALO = [withStroke(linewidth=3, foreground="white")]  # text stays readable where it crosses a line
PANELS_A_LINE = 3
STYLE = {"labelsize": 12, "tick": 11, "note": 10.5, "title": 12.5}

Row = dict[str, Any]


def pareto(rows: Sequence[Row], subtitle: str) -> bytes | None:
    """Quality (accuracy where known, else agreement with ar) against tokens per forward and against tokens per second.

    Returns:
        PNG bytes, or None where no row has a quality.
    """
    quality = "accuracy" if any(row["accuracy"] is not None for row in rows) else "agrees_with_ar"
    rows = [row for row in rows if row[quality] is not None]
    if not rows:
        return None
    batches = sorted({row["batch_size"] for row in rows})
    panels = [("tokens_per_forward", batches[0]), *(("tokens_per_second", batch) for batch in batches)]
    across = 2 if len(panels) == 4 else min(len(panels), PANELS_A_LINE)
    lines = -(-len(panels) // across)
    figure = Figure(figsize=(3.7 * across + 0.6, 3.5 * lines + 1.25), facecolor="white", layout="constrained")
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for ax, (x, batch) in zip(axes, panels, strict=False):
        _pareto_panel(ax, [row for row in rows if row["batch_size"] == batch], x, quality)
        ax.set_title(f"batch size {batch}", fontsize=STYLE["labelsize"], color=INK)
        ax.set_xlabel(
            "tokens per forward" if x == "tokens_per_forward" else "tokens per second", fontsize=STYLE["labelsize"]
        )
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    values = [100 * row[quality] for row in rows]
    room = max(6.0, 0.22 * (max(values) - min(values)))
    label = "accuracy (%)" if quality == "accuracy" else "prompts with ar's output (%)"
    for line in grid:
        line[0].set_ylabel(label, fontsize=STYLE["labelsize"])
        line[0].set_ylim(max(min(values) - room, -4), max(values) + room)
        line[0].set_yticks([tick for tick in line[0].get_yticks() if 0 <= tick <= 100])
    _finish(figure, [row["method"] for row in rows], "Quality against speed", subtitle)
    return _png(figure)


def _pareto_panel(ax: Axes, rows: Sequence[Row], x: str, quality: str) -> None:
    _frame(ax)
    for method in _distinct(row["method"] for row in rows):
        # Along τ from exact downwards: for entropy that is from 0 up.
        points = sorted(
            (row for row in rows if row["method"] == method),
            key=lambda row: row["threshold"] if row["confidence"] == "entropy" else -row["threshold"],
        )
        xs, ys = [row[x] for row in points], [100 * row[quality] for row in points]
        swept = method in SWEPT
        ax.plot(
            xs,
            ys,
            color=_colour(method),
            marker=MARKERS.get(method, "o"),
            markersize=8 if swept else 11,
            # Baselines are rings under the swept points: all three lie together where τ is exact.
            markerfacecolor=_colour(method) if swept else "white",
            markeredgewidth=2,
            linewidth=2,
            zorder=4 if swept else 3,
            clip_on=False,
        )
        for place, (at_x, at_y, row) in enumerate(zip(xs, ys, points, strict=True) if swept else ()):
            exact = row["threshold"] == (0.0 if row["confidence"] == "entropy" else 1.0)
            ax.annotate(
                "exact" if exact else f"τ={row['threshold']:g}",
                (at_x, at_y),
                # To the right, since quality falls there; at heights that differ, as neighbours are often close.
                xytext=(7, (7, -20, 24)[place % 3]),
                textcoords="offset points",
                fontsize=STYLE["note"],
                color=_colour(method),
                path_effects=HALO,
                zorder=5,
            )
    ax.margins(x=0.2)
    if x == "tokens_per_forward":
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, 0.85), max(high, 1.3))


def speedup(rows: Sequence[Row], labels: Sequence[str], subtitle: str) -> bytes | None:
    """Bars of speed-up by batch size; the baseline (``hf``, else ``ar``) is the line at 1, thin lines are the spread.

    Returns:
        PNG bytes, or None where there is no baseline or nothing to compare with it.
    """
    pairs = [(row, label) for row, label in zip(rows, labels, strict=True) if not row["skipped"]]
    baseline = next((name for name in ("hf", "ar") if any(row["method"] == name for row, _ in pairs)), None)
    bars = [(row, label) for row, label in pairs if row["method"] != baseline]
    if baseline is None:
        return None
    key = f"speedup_vs_{baseline}"
    bars = [(row, label) for row, label in bars if row[key] is not None]
    if not bars:
        return None
    batches = sorted({row["batch_size"] for row, _ in bars})
    kinds = list(_distinct(label for _, label in bars))
    width = 0.8 / len(kinds)
    figure = Figure(
        figsize=(max(8.0, 1.6 + 0.75 * len(batches) * len(kinds)), 4.6), facecolor="white", layout="constrained"
    )
    ax = figure.subplots()
    _frame(ax)
    ax.grid(axis="x", visible=False)
    shades: dict[str, int] = {}
    top = 1.0
    for number, kind in enumerate(kinds):
        of_kind = [row for row, label in bars if label == kind]
        method = of_kind[0]["method"]
        shade = shades[method] = shades.get(method, 0) + 1
        xs = [batches.index(row["batch_size"]) + (number - (len(kinds) - 1) / 2) * width for row in of_kind]
        heights = [row[key] for row in of_kind]
        low = [max(0.0, h - h * row["seconds"] / row["seconds_max"]) for h, row in zip(heights, of_kind, strict=True)]
        high = [max(0.0, h * row["seconds"] / row["seconds_min"] - h) for h, row in zip(heights, of_kind, strict=True)]
        ax.bar(xs, heights, width * 0.9, color=_tint(_colour(method), shade - 1), label=kind, zorder=3)
        ax.errorbar(xs, heights, yerr=[low, high], fmt="none", ecolor=INK, elinewidth=1.3, capsize=3, zorder=4)
        for at, height, up in zip(xs, heights, high, strict=True):
            top = max(top, height + up)
            ax.annotate(
                f"{height:.2f}×",
                (at, height + up),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=STYLE["note"],
                color=INK,
                path_effects=HALO,
                zorder=6,
            )
    name = "transformers generate" if baseline == "hf" else "one token a forward"
    line = ax.axhline(
        1, color=INK, linewidth=1.8, linestyle=(0, (5, 3)), zorder=5, label=f"baseline: {baseline} ({name})"
    )
    ax.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    ax.set_xlim(-0.6, len(batches) - 0.4)
    ax.set_ylim(0, top * 1.15)
    ax.set_xlabel("batch size (rows decoded together)", fontsize=STYLE["labelsize"])
    ax.set_ylabel(f"speed-up over {baseline} (tokens/s)", fontsize=STYLE["labelsize"])
    handles, names = ax.get_legend_handles_labels()
    order = [handles.index(line), *(i for i, handle in enumerate(handles) if handle is not line)]
    figure.legend(
        [handles[i] for i in order],
        [names[i] for i in order],
        loc="outside lower center",
        ncols=_legend_columns(figure),
        frameon=False,
        fontsize=STYLE["note"],
    )
    _title(figure, f"Speed-up over {baseline}", subtitle)
    return _png(figure)


def _legend_columns(figure: Figure) -> int:
    return 2 if figure.get_figwidth() < 9.5 else 3


def _frame(ax: Axes) -> None:
    ax.set_facecolor("white")
    ax.grid(color=GRID, linewidth=0.8, zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#888888")
    ax.tick_params(labelsize=STYLE["tick"], colors=INK)
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)


def _finish(figure: Figure, methods: Sequence[str], title: str, subtitle: str) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=_colour(method),
            marker=MARKERS.get(method, "o"),
            markersize=9,
            markeredgewidth=2,
            markerfacecolor=_colour(method) if method in SWEPT else "white",
            linewidth=2 if method in SWEPT else 0,
            label=NAMES.get(method, method),
        )
        for method in _distinct(methods)
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=_legend_columns(figure),
        frameon=False,
        fontsize=STYLE["note"],
    )
    _title(figure, title, subtitle)


def _title(figure: Figure, title: str, subtitle: str) -> None:
    """Title and, below it, the subtitle: broken between its parts where the picture is narrow."""
    lines, width = [""], figure.get_figwidth() * 10
    for part in subtitle.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = longer
    figure.suptitle("\n".join([title, *lines]), fontsize=STYLE["title"], color=INK)


def _colour(method: str) -> str:
    known = COLOURS.get(method)
    return known or MORE_COLOURS[sum(map(ord, method)) % len(MORE_COLOURS)]


def _tint(colour: str, step: int) -> tuple[float, float, float]:
    """The colour for the first setting of a method, paler for each further one."""
    from matplotlib.colors import to_rgb

    share = min(0.65, 0.28 * step)
    red, green, blue = ((1 - share) * part + share for part in to_rgb(colour))
    return red, green, blue


def _distinct(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=170, facecolor="white")
    return data.getvalue()
