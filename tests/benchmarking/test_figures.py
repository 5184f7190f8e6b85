"""Pictures of tables that are not the usual one."""

import pytest

from marscli.benchmarking import figures, style
from marscli.benchmarking.config import METHODS, SWEPT
from marscli.benchmarking.results import Cell, Pass, Setting, table_rows


def rows_of(*settings, seconds=(1 / 3, 0.1, 0.7), batches=(1, 4)):
    cells = []
    for batch in batches:
        for setting in settings:
            offsets = [2, 1] if setting.draft_tokens else [2]
            passes = [Pass([[1, 2]], [2], s, s / 7, 1, tokens_by_offset=offsets) for s in seconds]
            cells.append(Cell(setting, batch, passes))
    return table_rows(cells)


HF, AR, EXACT, LOW = Setting("hf"), Setting("ar"), Setting("threshold"), Setting("threshold", 0.5, draft_tokens=3)


@pytest.mark.parametrize("seconds", [(1 / 3,), (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("batches", [(1,), (1, 2, 4), (1, 2, 4, 8, 16)])
def test_any_number_of_repeats_and_batch_sizes(seconds, batches):
    rows = rows_of(HF, AR, EXACT, LOW, seconds=seconds, batches=batches)
    assert figures.pareto(rows, "a · b").startswith(b"\x89PNG")
    assert figures.speedup(rows, "a · b").startswith(b"\x89PNG")
    assert figures.acceptance(rows, "a · b").startswith(b"\x89PNG")


def test_without_a_baseline_or_a_quality_there_is_no_picture():
    rows = rows_of(LOW)
    assert figures.pareto(rows, "") is None
    assert figures.speedup(rows, "") is None
    rows = rows_of(HF)
    assert figures.speedup(rows, "") is None
    rows = rows_of(AR, LOW)
    assert figures.speedup(rows, "").startswith(b"\x89PNG")
    skipped = table_rows([Cell(HF, 1, skipped="no"), Cell(AR, 1, skipped="no")])
    assert figures.pareto(skipped, "") is None
    assert figures.speedup(skipped, "") is None
    assert figures.acceptance(skipped, "") is None
    assert figures.acceptance(rows_of(HF, AR), "") is None


def test_every_method_has_its_colour_marker_and_name():
    assert set(METHODS) == set(style.COLOURS) == set(style.MARKERS) == set(figures.NAMES)
    everything = [Setting(name, cache_block=8, draft_tokens=3) for name in METHODS]
    everything += [
        Setting(name, tau, measure) for name in SWEPT for tau, measure in ((0.9, "margin"), (0.3, "entropy"))
    ]
    rows = rows_of(*everything)
    for picture in (figures.pareto, figures.speedup, figures.acceptance):
        assert picture(rows, "").startswith(b"\x89PNG")


def test_labels_avoid_each_other():
    """Ten labels for one point and its neighbour: no two of them overlap, none leaves the panel."""
    figure, (ax,) = style.panels(1, width=5, height=4, across=1)
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 10)
    ax.plot([5, 5.2], [5, 5.1])
    labels = [style.PointLabel(ax, 5 + 0.2 * (n % 2), 5 + 0.1 * (n % 2), f"0.{n}5", "black") for n in range(10)]
    style.place_labels(figure, labels)
    boxes = [text.get_window_extent() for text in ax.texts]
    panel = ax.get_window_extent()
    assert len(boxes) == 10
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert all(panel.contains(*corner) for box in boxes for corner in (box.min, box.max))
