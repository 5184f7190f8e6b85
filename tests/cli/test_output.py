"""Results are complete or absent, and folders are tested before work and tidied after a refusal."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from marscli.errors import InputError, MarsError
from marscli.meta import collect_meta
from marscli.output import (
    atomic_write,
    markdown_table,
    prepared_output_dir,
    prepared_output_file,
    to_json,
    write_json,
    write_jsonl,
)


def test_a_folder_is_made_with_its_parents(tmp_path):
    with prepared_output_dir(tmp_path / "a" / "b", ["x.json"]) as folder:
        assert list(folder.iterdir()) == []
        write_json(folder / "x.json", {})
    assert (tmp_path / "a" / "b" / "x.json").read_text() == "{}\n"


@pytest.mark.parametrize("error", [InputError("no", hint="x"), MarsError("no", hint="x"), KeyboardInterrupt()])
def test_folders_made_for_a_refused_run_vanish(tmp_path, error):
    (tmp_path / "mine").mkdir()
    with pytest.raises(type(error)), prepared_output_dir(tmp_path / "mine" / "a" / "b"):
        raise error
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_was_written_before_a_failure_stays(tmp_path):
    def work(folder):
        write_json(folder / "log.json", [])
        raise MarsError("late", hint="x")

    with pytest.raises(MarsError), prepared_output_dir(tmp_path / "a") as folder:
        work(folder)
    assert (tmp_path / "a" / "log.json").exists()


@pytest.mark.parametrize("pattern", ["results.json", "*.json", "checkpoint-*"])
def test_existing_results_are_not_overwritten_unasked(tmp_path, pattern):
    (tmp_path / "results.json").write_text("old")
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(InputError, match="holds results already") as caught, prepared_output_dir(tmp_path, [pattern]):
        pytest.fail("the block must not run")
    assert "--force" in caught.value.hint
    for permission in ({"force": True}, {"resume": True}):
        with prepared_output_dir(tmp_path, [pattern], **permission):
            pass
    with prepared_output_dir(tmp_path, ["other.json"]):
        pass


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot write there"),
        prepared_output_dir(tmp_path / "file" / "a"),
    ):
        pytest.fail("the block must not run")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(InputError, match="Permission denied"), prepared_output_dir(tmp_path / "locked"):
            pytest.fail("the block must not run")


def test_a_file_named_by_the_user(tmp_path):
    target = tmp_path / "new" / "out.jsonl"
    with pytest.raises(InputError), prepared_output_file(target):
        raise InputError("no", hint="x")
    assert not target.parent.exists()
    with prepared_output_file(target) as path:
        write_jsonl(path, [{"a": "ü"}, {"a": 2}])
    assert target.read_text(encoding="utf-8") == '{"a": "ü"}\n{"a": 2}\n'
    with pytest.raises(InputError, match="exists already"), prepared_output_file(target):
        pytest.fail("the block must not run")
    with prepared_output_file(target, force=True):
        pass
    with pytest.raises(InputError, match="this is a folder"), prepared_output_file(tmp_path):
        pytest.fail("the block must not run")


def test_a_broken_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")

    def work(handle):
        handle.write("half")
        raise RuntimeError

    with pytest.raises(RuntimeError), atomic_write(path) as handle:
        work(handle)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with atomic_write(path, "wb") as handle:
        handle.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@dataclass
class Settings:
    path: Path
    rates: tuple[float, ...]


def test_broken_text_costs_no_result(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [{"id": "\ud800"}])
    assert json.loads((tmp_path / "x.jsonl").read_text(encoding="utf-8")) == {"id": "\ud800"}


def test_json_is_strict():
    value = {"settings": Settings(Path("a/b"), (1.0, math.nan, -math.inf)), 3: {"x"}}
    assert json.loads(to_json(value)) == {"settings": {"path": "a/b", "rates": [1.0, None, None]}, "3": ["x"]}


def test_tables_read_well_as_text_and_markdown():
    table = markdown_table(["method", "tokens/s"], [["hf", 20.123], ["a|b", None]])
    assert table.splitlines() == [
        "| method | tokens/s |",
        "| ------ | -------: |",
        "| hf     |    20.12 |",
        "| a\\|b   |        – |",
    ]


def test_meta_tells_what_ran_where_with_which_settings():
    import torch

    meta = collect_meta(
        Settings(Path("a"), (0.5,)), seed=3, device=torch.device("cpu"), dtype=torch.bfloat16, partial=True
    )
    plain = json.loads(to_json(meta))
    assert set(plain["versions"]) >= {"marscli", "torch", "transformers", "lm_eval", "python"}
    assert plain["versions"]["torch"] == torch.__version__
    assert plain["options"] == {"path": "a", "rates": [0.5]}
    assert (plain["device"], plain["dtype"], plain["seed"], plain["partial"]) == ("cpu", "bfloat16", 3, True)
    assert plain["threads"] == torch.get_num_threads()
    assert plain["command"].startswith("mars")
    assert plain["git_commit"] is None or len(plain["git_commit"]) == 40
