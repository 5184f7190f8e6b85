"""``loss.png``: both terms of the loss, and the accuracy by offset, over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marscli.output import atomic_write

MASKED, CLEAN, INK = "#d1495b", "#00798c", "#2b2d42"
MOST_LABELS = 9


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean over up to ``reach`` neighbours on either side; a steep beginning is not flattened by what follows it."""
    return [
        sum(near) / len(near) for i in range(len(values)) if (near := values[max(i - reach, 0) : i + min(reach, i) + 1])
    ]


def plot_training(entries: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw a training log.

    Args:
        entries: Lines of ``train_log.jsonl``; those of evaluations become points.
        path: The PNG file.
        title: One line above the panels.
    """
    # The Agg canvas draws without a display and leaves the caller's own figures alone.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    evaluated = [entry for entry in entries if "eval_loss" in entry]
    entries = [entry for entry in entries if "loss" in entry]
    steps = [entry["step"] for entry in entries]
    reach = 0 if len(steps) < 20 else max(1, len(steps) // 25)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    losses, accuracies = figure.subplots(1, 2)

    def draw(axes: Any, values: list[float], label: str, color: Any) -> None:
        if reach:
            axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(
            steps,
            smooth(values, reach),
            color=color,
            linewidth=2,
            label=label,
            marker="o" if len(steps) < 20 else None,
            markersize=4,
        )

    if entries[0]["loss_masked"] is not None:
        draw(losses, [entry["loss_masked"] for entry in entries], "masked stream", MASKED)
    draw(losses, [entry["loss_clean"] for entry in entries], "clean stream", CLEAN)
    for key, label, color in (
        ("eval_loss_masked", "held out, masked", MASKED),
        ("eval_loss_clean", "held out, clean", CLEAN),
    ):
        points = [(entry["step"], entry[key]) for entry in evaluated if entry.get(key) is not None]
        if points:
            losses.plot(
                *zip(*points, strict=True), "D", color=color, markersize=6, markeredgecolor="white", label=label
            )
    losses.set(title="Loss", ylabel="nats per token")
    losses.set_ylim(bottom=0)

    offsets = list(entries[0]["accuracy"])
    colors = [CLEAN, *(colormaps["plasma"](0.15 + 0.7 * i / max(len(offsets) - 2, 1)) for i in range(len(offsets) - 1))]
    for offset, color in zip(offsets, colors, strict=True):
        label = "0 (from real tokens)" if offset == "0" else offset
        if len(offsets) > MOST_LABELS and int(offset) & (int(offset) - 1):  # of many, powers of two
            label = "_"
        draw(accuracies, [entry["accuracy"][offset] for entry in entries], label, color)
    accuracies.set(title="Right top token, by offset", ylim=(0, 1))
    accuracies.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (losses, accuracies):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.title.set_fontweight("bold")
    losses.legend(frameon=False)
    accuracies.legend(frameon=False, title="offset", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, color=INK, fontsize=11)
    with atomic_write(path, "wb") as file:
        canvas.print_png(file, metadata={"Software": "marscli"})
