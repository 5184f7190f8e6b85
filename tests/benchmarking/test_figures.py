"""Pictures of tables that are not the usual one."""

import pytest

from marscli.benchmarking import figures
from marscli.benchmarking.results import Cell, Pass, Setting, table_rows


def rows_of(*settings, seconds=(1 / 3, 0.1, 0.7), batches=(1, 4)):
    cells = []
    for batch in batches:
        for setting in settings:
            passes = [Pass([[1, 2]], [2], s, s / 7, 1) for s in seconds]
            cells.append(Cell(setting, batch, passes))
    return table_rows(cells), [cell.setting.label for cell in cells]


HF, AR, EXACT, LOW = Setting("hf"), Setting("ar"), Setting("threshold"), Setting("threshold", 0.5)


@pytest.mark.parametrize("seconds", [(1 / 3,), (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("batches", [(1,), (1, 2, 4), (1, 2, 4, 8, 16)])
def test_any_number_of_repeats_and_batch_sizes(seconds, batches):
    rows, labels = rows_of(HF, AR, EXACT, LOW, seconds=seconds, batches=batches)
    assert figures.pareto(rows, "a · b").startswith(b"\x89PNG")
    assert figures.speedup(rows, labels, "a · b").startswith(b"\x89PNG")


def test_without_a_baseline_or_a_quality_there_is_no_picture():
    rows, labels = rows_of(LOW)
    assert figures.pareto(rows, "") is None
    assert figures.speedup(rows, labels, "") is None
    rows, labels = rows_of(HF)
    assert figures.speedup(rows, labels, "") is None
    rows, labels = rows_of(AR, LOW)
    assert figures.speedup(rows, labels, "").startswith(b"\x89PNG")
    skipped = table_rows([Cell(HF, 1, skipped="no"), Cell(AR, 1, skipped="no")])
    assert figures.pareto(skipped, "") is None
    assert figures.speedup(skipped, ["hf", "ar"], "") is None
