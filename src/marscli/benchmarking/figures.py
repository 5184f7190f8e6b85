"""The pictures of a bench, as PNG bytes: quality against speed, speed-up by batch size, tokens by offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from marscli.benchmarking.config import SWEPT
from marscli.benchmarking.results import is_exact, label, line_label, tau_label
from marscli.benchmarking.style import (
    COLOURS,
    HALO,
    INK,
    LABEL,
    MARKERS,
    NOTE,
    PALE,
    PointLabel,
    distinct,
    finish,
    panels,
    place_labels,
    png,
    tint,
)

NAMES = {
    "hf": "hf: transformers generate",
    "hf-lookup": "hf-lookup: its prompt lookup",
    "hf-assisted": "hf-assisted: drafts of a small model",
    "ar": "ar: one token a forward",
    "threshold": "threshold: the paper's scheme",
    "verified": "verified: drafts verified",
    "block-cache": "block-cache: the paper's cache, fastest size",
    "no-cache": "no-cache: the paper's scheme uncached",
    "jacobi": "jacobi: the model's own guesses",
}

DASHES: dict[str, Any] = {"probability": "solid", "margin": (0, (4, 2)), "entropy": (0, (1, 1.3))}
# Their forwards are not those of the others: a second model's come on top, or they are the paper's scheme once more.
NOT_BY_FORWARD = ("hf-assisted", "no-cache")

Row = dict[str, Any]


def pareto(rows: Sequence[Row], subtitle: str) -> bytes | None:
    """Quality (accuracy where known, else agreement with ar) against tokens per forward and against tokens per second.

    Returns:
        PNG bytes, or None where no row has a quality.
    """
    quality = "accuracy" if any(row["accuracy"] is not None for row in rows) else "agrees_with_ar"
    rows = _fastest_block_sizes([row for row in rows if row[quality] is not None])
    if not rows:
        return None
    batches = sorted({row["batch_size"] for row in rows})
    shown = [("tokens_per_forward", batches[0]), *(("tokens_per_second", batch) for batch in batches)]
    figure, axes = panels(len(shown), width=4.3, height=3.7, across=3, sharey=True)
    values = [100 * row[quality] for row in rows]
    room = max(5.0, 0.2 * (max(values) - min(values)))
    labels: list[PointLabel] = []
    for ax, (x, batch) in zip(axes, shown, strict=True):
        ax.set_title(f"batch size {batch}", fontsize=LABEL, color=INK)
        ax.set_xlabel(x.replace("_", " "), fontsize=LABEL, color=INK)
        if ax.get_subplotspec().is_first_col():
            name = "accuracy (%)" if quality == "accuracy" else "prompts with ar's output (%)"
            ax.set_ylabel(name, fontsize=LABEL, color=INK)
        by_forward = x == "tokens_per_forward"
        mine = [row for row in rows if row["batch_size"] == batch]
        for line in _lines([row for row in mine if not (by_forward and row["method"] in NOT_BY_FORWARD)]):
            labels += _draw_line(ax, line, x, quality)
        ax.margins(x=0.18)
        low, high = ax.get_xlim()
        ax.set_xlim((min(low, 0.85), max(high, 1.3)) if by_forward else (max(low, 0.0), high))
    axes[0].set_ylim(max(min(values) - room, -4), max(values) + room)
    axes[0].set_yticks([tick for tick in axes[0].get_yticks() if 0 <= tick <= 100])
    kinds = distinct((row["method"], row["confidence"]) for row in rows)
    title = "Quality against speed" + (", τ at the points" if any(row["method"] in SWEPT for row in rows) else "")
    finish(figure, title, subtitle, [_handle(*kind) for kind in kinds])
    place_labels(figure, labels)
    return png(figure)


def _fastest_block_sizes(rows: Sequence[Row]) -> list[Row]:
    """Of the rows of a block cache that differ in its size alone, the fastest."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["method"], row["threshold"], row["confidence"], row["batch_size"])
        if key not in best or row["tokens_per_second"] > best[key]["tokens_per_second"]:
            best[key] = row
    return list(best.values())


def _lines(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in τ alone, from exact downwards (for entropy that is from 0 up)."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["confidence"]), []).append(row)
    for (method, _), line in found.items():
        # Exact is the same for every measure and was measured with the first.
        exact = next((row for row in rows if row["method"] == method and is_exact(row)), None)
        if exact is not None and exact not in line:
            line.append(exact)
        line.sort(key=lambda row: (not is_exact(row), row["threshold"] * (1 if row["confidence"] == "entropy" else -1)))
    return list(found.values())


def _draw_line(ax: Axes, line: Sequence[Row], x: str, quality: str) -> list[PointLabel]:
    method, measure = line[-1]["method"], line[-1]["confidence"]
    swept = method in SWEPT
    xs, ys = [row[x] for row in line], [100 * row[quality] for row in line]
    ax.plot(
        xs,
        ys,
        color=COLOURS[method],
        linestyle=DASHES[measure],
        marker=MARKERS[method],
        markersize=8 if swept else 11,
        # Baselines are rings under the swept points: all of them lie together where τ is exact.
        markerfacecolor=COLOURS[method] if swept else "white",
        markeredgewidth=1 if swept else 2,
        markeredgecolor="white" if swept else COLOURS[method],
        linewidth=2,
        zorder=4 if swept else 3,
        clip_on=False,
    )
    if not swept:
        return []
    return [
        PointLabel(ax, a, b, "exact" if is_exact(row) else f"{row['threshold']:g}", COLOURS[method])
        for a, b, row in zip(xs, ys, line, strict=True)
        if row["confidence"] == measure  # the exact point of another measure has its label already
    ]


def _handle(method: str, measure: str) -> Line2D:
    swept = method in SWEPT
    return Line2D(
        [],
        [],
        color=COLOURS[method],
        marker=MARKERS[method],
        markersize=9,
        markeredgewidth=2,
        markerfacecolor=COLOURS[method] if swept else "white",
        linewidth=2 if swept else 0,
        linestyle=DASHES[measure],
        label=NAMES[method] if measure == "probability" else f"{method}: {measure}",
    )


def speedup(rows: Sequence[Row], subtitle: str) -> bytes | None:
    """Bars of speed-up, a panel a batch size; the baseline (``hf``, else ``ar``) is the line at 1.

    Returns:
        PNG bytes, or None where there is no baseline or nothing to compare with it.
    """
    ran = {row["method"] for row in rows if not row["skipped"]}
    baseline = next((name for name in ("hf", "ar") if name in ran), None)
    key = f"speedup_vs_{baseline}"
    bars = [row for row in rows if baseline and row["method"] != baseline and row[key] is not None]
    if not bars:
        return None
    kinds = distinct(label(row) for row in bars)
    batches = sorted({row["batch_size"] for row in bars})
    figure, axes = panels(
        len(batches),
        width={1: 7.0, 2: 4.4}.get(len(batches), 3.4),
        height=0.6 + 0.34 * len(kinds),
        across=4,
        sharey=True,
    )
    colours = _bar_colours(bars)
    top = max(row[key] * max(1.0, row["seconds"] / row["seconds_min"]) for row in bars)
    for ax, batch in zip(axes, batches, strict=True):
        ax.grid(axis="y", visible=False)
        ax.set_title(f"batch size {batch}", fontsize=LABEL, color=INK)
        ax.set_xlabel(f"speed-up over {baseline} (tokens/s)", fontsize=LABEL, color=INK)
        for place, kind in enumerate(kinds):
            row = next((row for row in rows if row["batch_size"] == batch and label(row) == kind), None)
            if row is None:
                continue
            if row["skipped"]:
                ax.text(1 + 0.03 * top, place, "skipped", va="center", fontsize=NOTE, color=PALE)
                continue
            height = row[key]
            low, high = (height * row["seconds"] / row[name] for name in ("seconds_max", "seconds_min"))
            ax.barh(place, height, 0.74, color=colours[kind], zorder=3)
            if row["repeats"] > 1:
                ax.plot([low, high], [place, place], color=INK, linewidth=1.4, zorder=4)
            end = max(height, high if row["repeats"] > 1 else 0.0)
            text = ax.text(end + 0.03 * top, place, f"{height:.2f}×", va="center", fontsize=NOTE, color=INK, zorder=6)
            text.set_path_effects(HALO)
        ax.axvline(1, color=INK, linewidth=1.8, linestyle=(0, (5, 3)), zorder=5)
        ax.set_xlim(0, max(1.12, top * 1.27))
    axes[0].set_yticks(range(len(kinds)), kinds)
    axes[0].set_ylim(len(kinds) - 0.4, -0.6)
    line = Line2D([], [], color=INK, linewidth=1.8, linestyle=(0, (5, 3)), label=f"baseline {NAMES[str(baseline)]}")
    spread = Line2D([], [], color=INK, linewidth=1.4, label="slowest to fastest repeat")
    handles = [line, *([spread] if any(row["repeats"] > 1 for row in bars) else [])]
    finish(figure, f"Speed-up over {baseline}", subtitle, handles)
    return png(figure)


def _bar_colours(rows: Sequence[Row]) -> dict[str, Any]:
    """A colour for each kind of row: its method's, paler for each further setting of the method."""
    kinds = {label(row): row["method"] for row in rows}
    colours = {}
    for method in distinct(kinds.values()):
        mine = [kind for kind in kinds if kinds[kind] == method]
        for step, kind in enumerate(mine):
            colours[kind] = tint(COLOURS[method], step, len(mine))
    return colours


def acceptance(rows: Sequence[Row], subtitle: str) -> bytes | None:
    """How many of a row's forwards gave a token at each offset, a panel a method, a line a τ.

    Returns:
        PNG bytes, or None where every token was predicted at offset 0.
    """
    chosen: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["batch_size"]):
        # Another cache does not change what a mask predicts.
        if len(row["acceptance_by_offset"] or ()) > 1 and row["method"] not in ("block-cache", "no-cache"):
            chosen.setdefault((line_label(row), tau_label(row)), row)
    if not chosen:
        return None
    methods = distinct(row["method"] for row in chosen.values())
    figure, axes = panels(len(methods), width=4.0, height=3.4, across=3, sharey=True)
    for ax, method in zip(axes, methods, strict=True):
        mine = [(name, row) for (name, _), row in chosen.items() if row["method"] == method]
        mine.sort(key=lambda pair: not is_exact(pair[1]))
        batch = mine[0][1]["batch_size"]
        for step, (name, row) in enumerate(mine):
            text = tau_label(row) if method in SWEPT else f"{row['tokens_per_forward']:.2f} tokens a forward"
            if name != method and method in SWEPT:
                text = f"{name.removeprefix(method).strip()} {text}"
            ax.plot(
                [100 * share for share in row["acceptance_by_offset"]],
                color=tint(COLOURS[method], step, len(mine)),
                marker=MARKERS[method],
                markersize=8,
                linewidth=2,
                label=text,
                clip_on=False,
                zorder=4,
            )
        longest = max(len(row["acceptance_by_offset"]) for _, row in mine)
        ax.set_xticks(range(0, longest, 1 if longest <= 10 else 5))
        ax.set_xlabel("offset of the mask" if method in SWEPT else "place of the draft", fontsize=LABEL, color=INK)
        ax.set_title(f"{method}, batch size {batch}", fontsize=LABEL, color=INK)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("forwards that gave a token there (%)", fontsize=LABEL, color=INK)
        ax.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.9, fontsize=NOTE, labelcolor=INK)
    axes[0].set_ylim(0, 104)
    finish(figure, "Tokens by offset (0: from real tokens alone)", subtitle)
    return png(figure)
