"""The demo's chain of commands, with the real commands on almost no data, and its task file."""

import json
import re

import pytest
from lm_eval.tasks import TaskManager

from marscli.cli import app
from marscli.demo import __main__ as command_line
from marscli.demo import showcase
from marscli.demo.showcase import DATASET, TASK, Settings
from marscli.evaluation.tasks import load_tasks

TINY = Settings(problems=1500, held_out=4, ar_steps=2, mars_steps=2, thresholds=(0.9, 0.5), timed=2, repeats=1, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo's folder after all commands ran, in this process."""
    folder = tmp_path_factory.mktemp("demo")
    problem = showcase.write_inputs(folder, TINY)
    for arguments in showcase.commands(folder, TINY, problem.question):
        assert app.run(arguments) == 0, arguments
    return folder


def test_the_table_has_one_token_mode_and_every_threshold(folder):
    lines = showcase.table(folder, TINY).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "transformers generate",
        "one-token mode (exact)",
        "τ = 0.9",
        "τ = 0.5",
    ]
    assert "1.00×" in lines[3]


def test_the_commands_leave_what_the_demo_promises(folder):
    for name in ("ar/model.safetensors", "mars/model.safetensors", "bench/results.json", "eval/pareto.png"):
        assert (folder / name).is_file(), name
    assert json.loads((folder / "mars" / "config.json").read_text())["mars"]["block_size"] == 4


def test_the_held_out_problems_are_not_in_the_training_file(folder):
    questions = {
        split: {json.loads(line)["question"] for line in (folder / "data" / DATASET / f"{split}.jsonl").open()}
        for split in ("train", "test")
    }
    assert len(questions["test"]) == 4
    assert not questions["train"] & questions["test"]


def test_the_task_file_stands_alone_and_scores_the_final_number(folder):
    task_folder = showcase.__file__.rpartition("/")[0]
    assert TASK in TaskManager(include_path=task_folder, include_defaults=False).all_tasks
    task = load_tasks([TASK], include_path=[task_folder], data_root=folder / "data").tasks[TASK]
    doc = next(iter(task.test_docs()))
    assert task.doc_to_text(doc) == doc["question"]
    pattern = task.config.filter_list[0]["filter"][0]["regex_pattern"]
    assert re.findall(pattern, doc["answer"]) == [str(doc["result"])]
    assert task.process_results(doc, [str(doc["result"])]) == {"exact_match": 1}
    assert task.process_results(doc, [str(doc["result"] + 1)]) == {"exact_match": 0}


def test_an_existing_demo_is_not_replaced_without_force(folder, capsys):
    assert command_line.main(["--output-dir", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "holds results already" in error
    assert "hint: " in error
