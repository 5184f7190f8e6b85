"""The arithmetic of a row."""

import csv
import io

import pytest

from marscli.benchmarking.results import FIELDS, Cell, Pass, Setting, first_difference, table_rows, to_csv


def cell(method, seconds, outputs, forwards, batch_size=1, **setting):
    made = Cell(Setting(method, **setting), batch_size)
    counts = {"steps": 3, "step_width": 2.5, "tokens_by_offset": [sum(forwards), 1]}
    made.passes = [
        Pass(outputs, forwards, s, s / 4, prefill_tokens=2, first_token_seconds=s / 8, peak_memory_mb=s, **counts)
        for s in seconds
    ]
    return made


def test_medians_spread_and_both_baselines():
    same = [[1, 2, 3, 4], [5, 6, 7, 8]]
    hf = cell("hf", [4.0, 2.0, 1.0], same, [4, 4])
    ar = cell("ar", [8.0, 4.0, 2.0], same, [4, 4])
    fast = cell("threshold", [1.0, 0.5, 3.0], [[1, 2, 3, 4], [5, 9, 7]], [2, 1], threshold=0.9, block_size=4)
    other = cell("threshold", [1.0], same, [1, 1], batch_size=2, threshold=0.9)
    rows = table_rows([hf, ar, fast, other])
    assert rows[0]["tokens_per_second"] == 8 / 2.0
    assert rows[0]["speedup_vs_hf"] == 1.0
    row = rows[2]
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (1.0, 0.5, 3.0)
    assert (row["tokens"], row["forwards"], row["tokens_per_forward"]) == (7, 3, 7 / 3)
    assert row["tokens_per_second"] == 7.0
    assert row["prefill_seconds"] == 0.25
    assert row["decode_tokens_per_second"] == pytest.approx((7 - 2) / 0.75)
    assert row["speedup_vs_hf"] == 7.0 / 4.0
    assert row["speedup_vs_ar"] == 7.0 / 2.0
    assert row["agrees_with_ar"] == 0.5
    assert row["first_difference"] == 1
    assert row["peak_memory_mb"] == 3.0
    assert row["first_token_seconds"] == 0.125
    assert row["step_milliseconds"] == 250.0
    assert row["step_width"] == 2.5
    assert row["acceptance_by_offset"] == [1.0, 1 / 3]
    assert row["floor_milliseconds"] is None
    assert rows[3]["speedup_vs_hf"] is None, "another batch size is no baseline"
    assert rows[3]["agrees_with_ar"] is None


def test_accuracy_counts_only_prompts_with_a_reference():
    made = cell("ar", [1.0], [[1], [2], [3]], [1, 1, 1])
    (row,) = table_rows([made], [lambda ids: ids == [1], None, lambda ids: ids == [1]])
    assert row["accuracy"] == 0.5


def test_the_floor_is_that_of_one_models_weights():
    cells = [cell(method, [1.0], [[1]], [1]) for method in ("ar", "hf-assisted")]
    ar, assisted = table_rows([*cells, Cell(Setting("hf"), 1, skipped="no")], floor_seconds=0.5)[:2]
    assert ar["floor_milliseconds"] == 500
    assert assisted["floor_milliseconds"] is None


def test_skipped_row_and_csv():
    rows = table_rows([Cell(Setting("hf"), 4, skipped="no, it cannot"), cell("ar", [1.0], [[1]], [1])])
    assert tuple(rows[0]) == tuple(rows[1]) == FIELDS
    assert rows[0]["tokens"] is None
    assert rows[0]["threshold"] == 1.0
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert read[0]["skipped"] == "no, it cannot"
    assert read[0]["tokens"] == ""
    assert float(read[1]["seconds"]) == 1.0
    assert read[1]["acceptance_by_offset"] == "1.0 1.0"


def test_exact_threshold_is_a_number_in_each_measure():
    settings = [Setting("threshold", None, measure) for measure in ("probability", "margin", "entropy")]
    assert [row["threshold"] for row in table_rows([Cell(s, 1, skipped="x") for s in settings])] == [1.0, 1.0, 0.0]


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert first_difference([], []) is None


def test_labels():
    assert Setting("hf").label == "hf"
    assert Setting("threshold").label == "threshold exact"
    assert Setting("threshold", 0.95).label == "threshold τ=0.95"
    assert Setting("threshold", 0.3, "entropy").label == "threshold entropy τ=0.3"
    assert Setting("verified", None, "entropy").label == "verified exact"
    assert Setting("block-cache", 0.5, cache="block", cache_block=16).label == "block-cache 16 τ=0.5"
    assert Setting("jacobi", draft_tokens=3).label == "jacobi"
