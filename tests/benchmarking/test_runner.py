"""Interleaving, what survives an interruption, rows without memory."""

from types import SimpleNamespace

import pytest
import torch

from marscli.benchmarking.results import Cell, Pass, Setting
from marscli.benchmarking.runner import measure

CHECKPOINT = SimpleNamespace(device=torch.device("cpu"))
PROMPTS = [[1], [2], [3]]


def recording(log, name, error=None, fails_at=None):
    def open_(checkpoint, setting, batch_size, draft):
        def decode(prompts, max_new_tokens):
            log.append((name, batch_size, len(prompts), max_new_tokens))
            if error is not None and len(log) == fails_at:
                raise error
            return Pass([[7]] * len(prompts), [1] * len(prompts), 1.0, 0.5, len(prompts))

        return decode

    return open_


def test_passes_alternate_between_methods_and_every_second_repeat_runs_backwards():
    log = []
    methods = {name: recording(log, name) for name in "ab"}
    cells = [Cell(Setting(name), batch) for batch in (1, 2) for name in "ab"]
    ticks = []
    measure(cells, CHECKPOINT, PROMPTS, 40, 2, progress=lambda: ticks.append(1), methods=methods)
    forwards = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [entry[:2] for entry in log] == forwards[::-1] + forwards + forwards[::-1]
    assert {entry[2:] for entry in log[:4]} == {(1, 16), (2, 16)}, "the warm-up is one short batch"
    assert {entry[2:] for entry in log[4:]} == {(3, 40)}
    assert [len(cell.passes) for cell in cells] == [2, 2, 2, 2]
    assert len(ticks) == len(log)
    assert all(one.peak_memory_mb > 1 for cell in cells for one in cell.passes)


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_a_method_without_memory_is_skipped_and_the_others_go_on(fails_at):
    log = []
    methods = {"a": recording(log, "a"), "b": recording(log, "b", torch.OutOfMemoryError("no"), fails_at)}
    cells = [Cell(Setting("a"), 1), Cell(Setting("b"), 1)]
    measure(cells, CHECKPOINT, PROMPTS, 4, 2, methods=methods)
    assert len(cells[0].passes) == 2
    if log[fails_at - 1][0] == "b":
        assert cells[1].skipped == "out of memory"
        assert not cells[1].passes


def test_other_errors_are_not_swallowed():
    methods = {"a": recording([], "a", RuntimeError("shapes"), 1)}
    with pytest.raises(RuntimeError, match="shapes"):
        measure([Cell(Setting("a"), 1)], CHECKPOINT, PROMPTS, 4, 1, methods=methods)


def test_skipped_cells_are_left_alone():
    log = []
    cell = Cell(Setting("a"), 1, skipped="because")
    measure([cell], CHECKPOINT, PROMPTS, 4, 2, methods={"a": recording(log, "a")})
    assert not log
    assert cell.skipped == "because"


def test_what_transformers_refuses_is_a_row_with_the_reason_and_only_there():
    refusal = ValueError("no such cache\nmore")
    for name, raises in (("hf-lookup", False), ("ar", True)):
        cell = Cell(Setting(name), 1)
        methods = {name: recording([], name, refusal, 1)}
        if raises:
            with pytest.raises(ValueError, match="no such cache"):
                measure([cell], CHECKPOINT, PROMPTS, 4, 1, methods=methods)
        else:
            measure([cell], CHECKPOINT, PROMPTS, 4, 1, methods=methods)
            assert cell.skipped == "transformers refuses it: no such cache"


def test_cells_with_passes_are_brought_to_the_number_asked_for_and_each_pass_is_told():
    log, told = [], []
    methods = {name: recording(log, name) for name in "abc"}
    cells = [Cell(Setting(name), 1) for name in "abc"]
    done = Pass([[7]] * 3, [1] * 3, 1.0, 0.5, 3)
    cells[0].passes, cells[1].passes = [done, done], [done]
    measure(cells, CHECKPOINT, PROMPTS, 4, 2, methods=methods, after_pass=lambda cell, _: told.append(cell))
    assert [len(cell.passes) for cell in cells] == [2, 2, 2]
    assert [name for name, *_ in log] == ["c", "b", "c", "c", "b"], "warm-ups backwards, then two repeats"
    assert [cell.setting.method for cell in told] == ["c", "c", "b"]
