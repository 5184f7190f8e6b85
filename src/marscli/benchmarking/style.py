"""What the pictures of a bench have in common, and where their labels go.

White ground, so that they read the same in print and on a dark page; colours that colour-blind readers tell apart, and
a marker for each method beside its colour; type large enough for half size.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

COLOURS = {
    "hf": "#6e6e6e",
    "hf-lookup": "#6e6e6e",
    "hf-assisted": "#6e6e6e",
    "ar": "#0072b2",
    "threshold": "#d55e00",
    "verified": "#009e73",
    "block-cache": "#cc79a7",
    "no-cache": "#b58900",
    "jacobi": "#56b4e9",
}
MARKERS = {
    "hf": "D",
    "hf-lookup": "<",
    "hf-assisted": ">",
    "ar": "s",
    "threshold": "o",
    "verified": "^",
    "block-cache": "v",
    "no-cache": "p",
    "jacobi": "h",
}
INK, PALE, GRID = "#222222", "#777777", "#d9d9d9"
HALO = [withStroke(linewidth=3, foreground="white")]  # text stays readable where it crosses a line
LABEL, TICK, NOTE, TITLE = 12, 11, 10.5, 12.5  # points
DPI = 170


def panels(count: int, *, width: float, height: float, across: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, at most `across` side by side; sizes in inches, of one panel.

    Returns:
        The figure and its panels; places that no panel needs are left empty.
    """
    across = -(-count // -(-count // across))  # no line is much shorter than the others
    lines = -(-count // across)
    figure = Figure(figsize=(width * across + 0.6, height * lines + 1.25), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, across, squeeze=False, **options).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes[:count]:
        _frame(ax)
    return figure, axes[:count]


def _frame(ax: Axes) -> None:
    ax.set_facecolor("white")
    ax.grid(color=GRID, linewidth=0.8, zorder=0)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#888888")
    ax.tick_params(labelsize=TICK, colors=INK)


def finish(figure: Figure, title: str, subtitle: str, handles: Sequence[Any] = ()) -> None:
    """Title, subtitle (broken between its parts where the picture is narrow) and legend."""
    lines, width = [""], figure.get_figwidth() * 10
    for part in subtitle.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = longer
    figure.suptitle("\n".join([title, *lines]), fontsize=TITLE, color=INK)
    if handles:
        most = max(len(handle.get_label()) for handle in handles)
        columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.085 * most + 0.7))))
        figure.legend(
            handles=list(handles),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=NOTE,
            labelcolor=INK,
        )


def png(figure: Figure) -> bytes:
    """The picture's bytes."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, facecolor="white")
    return data.getvalue()


def tint(colour: str, step: int, steps: int = 3) -> tuple[float, float, float]:
    """The colour for the first of a method's settings, paler for each further one of ``steps``."""
    share = 0.68 * step / max(steps - 1, 2)
    red, green, blue = ((1 - share) * part + share for part in to_rgb(colour))
    return red, green, blue


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values in order, each once."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class PointLabel:
    """Text that belongs to a point of a panel."""

    ax: Axes
    x: float
    y: float
    text: str
    colour: Any


_SIDES: tuple[tuple[float, float], ...] = ((1, 0), (0.8, 1), (0.8, -1), (0, 1), (0, -1), (-0.8, 1), (-0.8, -1), (-1, 0))
_DISTANCES = (9, 18, 30)  # points


def place_labels(figure: Figure, labels: Sequence[PointLabel]) -> None:
    """Put each label beside its point, where it covers least of other labels, of lines, and of what is outside.

    Args:
        figure: Drawn already but for the labels.
        labels: In the order in which they choose.
    """
    figure.draw_without_rendering()  # settles where the panels are
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    drawn = {ax: [box for line in ax.lines for box in _boxes(line, figure.dpi / 72)] for ax in figure.axes}
    taken: dict[Axes, list[Bbox]] = {ax: [] for ax in figure.axes}
    for label in labels:
        note = label.ax.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=NOTE,
            color=label.colour,
            path_effects=HALO,
            zorder=6,
            annotation_clip=False,
        )
        note.set_in_layout(False)
        size = note.get_window_extent(renderer).padded(1.5)
        point = label.ax.transData.transform((label.x, label.y))
        # Of equally good places min takes the first: the nearest, to the right, where quality falls.
        places = ((distance, *side) for distance in _DISTANCES for side in _SIDES)
        boxes = [(place, _box(point, size, place, figure.dpi / 72)) for place in places]
        inside, others = [label.ax.get_window_extent()], (taken[label.ax], drawn[label.ax])
        place, box = min(boxes, key=lambda choice: _cost(choice[1], inside, *others))
        _move(note, *place)
        taken[label.ax].append(box)


def _cost(box: Bbox, inside: Sequence[Bbox], texts: Sequence[Bbox], drawn: Sequence[Bbox]) -> float:
    outside = box.width * box.height - _overlap(box, inside)
    return 4 * (_overlap(box, texts) + outside) + _overlap(box, drawn)


def _box(point: Any, size: Bbox, place: tuple[float, float, float], pixels: float) -> Bbox:
    """Where a text of this size lies once it is moved to a place; see `_move`."""
    distance, x, y = place
    left = point[0] + x * distance * pixels - size.width * (0 if x > 0 else 1 if x < 0 else 0.5)
    bottom = point[1] + y * distance * pixels - size.height * (0 if y > 0 else 1 if y < 0 else 0.5)
    return Bbox.from_bounds(left, bottom, size.width, size.height)


def _boxes(line: Line2D, pixels: float) -> Iterator[Bbox]:
    """What a line covers: its markers, and small pieces along it."""
    points = line.axes.transData.transform(line.get_xydata())
    for (x, y), half in [
        *((point, 6 * pixels) for point in points),
        *((p, 2 * pixels) for p in _along(points, pixels)),
    ]:
        yield Bbox.from_extents(x - half, y - half, x + half, y + half)


def _along(points: Any, pixels: float) -> Iterator[tuple[float, float]]:
    for (x, y), (next_x, next_y) in pairwise(points):
        pieces = int(max(abs(next_x - x), abs(next_y - y)) / (4 * pixels))
        for piece in range(1, pieces):
            share = piece / pieces
            yield x + share * (next_x - x), y + share * (next_y - y)


def _move(note: Any, distance: float, x: float, y: float) -> None:
    note.xyann = (x * distance, y * distance)
    note.set_horizontalalignment("left" if x > 0 else "right" if x < 0 else "center")
    note.set_verticalalignment("bottom" if y > 0 else "top" if y < 0 else "center")


def _overlap(box: Bbox, others: Iterable[Bbox]) -> float:
    parts = (Bbox.intersection(box, other) for other in others)
    return sum(part.width * part.height for part in parts if part is not None)
