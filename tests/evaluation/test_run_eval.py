"""`mars eval` from the command line to the files it writes, on a tiny model and local tasks."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_lm import make_model, make_tokenizer

import marscli
from marscli.cli.app import run
from marscli.errors import InputError
from marscli.evaluation.config import EvalConfig
from marscli.evaluation.lm import MarsLM
from marscli.evaluation.report import table, text
from marscli.evaluation.runner import run_eval
from marscli.evaluation.task_names import own_names


@pytest.fixture
def arguments(model_dir, tasks, tmp_path):
    """The options that every run here needs."""
    return ["eval", "-m", str(model_dir), "--include-path", str(tasks.folder), "-o", str(tmp_path / "out")]


def test_scores_equal_lm_evals_own_and_files_are_complete(
    arguments, tasks, model, tokenizer, tmp_path, capsys, monkeypatch
):
    tasks.sums("sums_a")
    tasks.sums("sums_b", max_gen_toks=9)
    tasks.group("all_sums", ["sums_a", "sums_b"], "exact_match", "number")
    tasks.colours()
    counted = []
    likelihood = MarsLM.loglikelihood
    monkeypatch.setattr(MarsLM, "loglikelihood", lambda *a, **k: counted.append(1) or likelihood(*a, **k))
    command = [*arguments, "--tasks", "colours,all_sums", "--threshold", "exact,0.1", "-n", "24", "--limit", "5"]
    assert run([*command, "-b", "3", "--log-samples", "--no-verify"]) == 0
    shown = capsys.readouterr()

    document = json.loads((tmp_path / "out" / "results.json").read_text())
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=_without(model, tokenizer.mask_token_id), tokenizer=tokenizer, batch_size=1),
        tasks=["colours", "all_sums"],
        task_manager=TaskManager(include_path=str(tasks.folder), include_defaults=False),
        gen_kwargs={"max_gen_toks": 24},
        limit=5,
        apply_chat_template=True,
    )
    model.generation_config.suppress_tokens = None
    for key in ("results", "groups", "group_subtasks", "n-shot", "versions", "higher_is_better", "n-samples"):
        assert document[key] == json.loads(json.dumps(theirs[key])), key
    assert len(counted) == 1  # multiple choice is scored once for both thresholds

    for name in ("sums_a", "sums_b"):
        rows = [
            json.loads(line) for line in (tmp_path / "out" / f"samples_{name}_exact.jsonl").read_text().splitlines()
        ]
        assert [row["resps"] for row in rows] == [row["resps"] for row in theirs["samples"][name]]
        usage = document["mars"]["runs"][0]["tasks"][name]
        assert sum(row["tokens"] for row in rows) == usage["tokens"] == usage["forwards"]
    assert (tmp_path / "out" / "samples_colours_exact.jsonl").exists()
    assert not (tmp_path / "out" / "samples_colours_0.1.jsonl").exists()

    exact, fast = document["mars"]["runs"]
    assert (exact["threshold"], fast["threshold"], exact["verify"]) == (1.0, 0.1, False)
    assert exact["results"]["colours"] == fast["results"]["colours"]
    cost = fast["tasks"]["sums_a"]
    assert set(cost) >= {"tokens", "forwards", "tokens_per_forward", "seconds", "tokens_per_second", "hit_limit"}
    assert cost["tokens_per_forward"] == cost["tokens"] / cost["forwards"] > 1
    assert fast["tasks"]["colours"]["tokens_per_forward"] is None
    assert document["mars"]["complete"]
    assert document["meta"]["options"]["threshold"] == ["exact", "0.1"]
    assert (tmp_path / "out" / "pareto.png").read_bytes().startswith(b"\x89PNG")

    lines = shown.out.splitlines()
    assert shown.out.strip() == text(document)  # stdout carries the table alone, and a saved document gives it again
    assert [line.split("|")[1].strip() for line in table(document).splitlines()][2:] == [
        "any",
        "exact",
        "",
        "",
        "0.1",
        "",
        "",
    ]
    assert "Partial: only the first 5 problems" in lines[-1]
    assert "sums_a: 5 of 6 problems, at most 24 new tokens each (--max-new-tokens)" in shown.err
    assert "cut off at the token limit" in shown.err


def _without(model, token: int):
    model.generation_config.suppress_tokens = [token]
    return model


def test_the_tasks_own_limit_is_used_and_said(arguments, tasks, tmp_path, capsys):
    tasks.sums("short", max_gen_toks=3)
    tasks.sums("alias", max_tokens=4)
    assert run([*arguments, "--tasks", "short", "--tasks", "alias", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document == json.loads((tmp_path / "out" / "results.json").read_text())
    cost = document["mars"]["runs"][0]["tasks"]
    assert cost["short"]["tokens"] <= 3 * 6
    assert cost["alias"]["tokens"] <= 4 * 6
    assert "short: 6 problems, at most 3 new tokens each (the task's own limit), 8 rows together" in shown.err
    assert "alias: 6 problems, at most 4 new tokens each" in shown.err


def test_finished_tasks_are_on_disk_when_a_run_breaks_off(model_dir, tasks, tmp_path):
    config = EvalConfig(
        model=str(model_dir), tasks=[tasks.sums("first"), tasks.sums("second")], include_path=tasks.folder,
        output_dir=tmp_path / "out", max_new_tokens=4, threshold=["exact", 0.5],
    )  # fmt: skip

    @contextmanager
    def interrupted(description: str, total: int):
        if description.startswith("second"):
            raise KeyboardInterrupt
        assert total == 6
        yield lambda: None

    with pytest.raises(KeyboardInterrupt):
        run_eval(config, progress=interrupted)
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(document["results"]) == ["first"]
    assert document["mars"]["complete"] is False
    assert [list(run["tasks"]) for run in document["mars"]["runs"]] == [["first"], ["first"]]
    assert table(document).count("first") == 2


GSM8K_README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
---
"""


def write_gsm8k(root: Path) -> None:
    """The real task's data set in the Hub's layout, with three problems."""
    folder = root / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(GSM8K_README)
    for split in ("train", "test"):
        rows = [{"question": f"Anna has {n} apples and buys 4. How many?", "answer": f"#### {n + 4}"} for n in range(3)]
        (folder / "main" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_gsm8k_from_a_data_root(model_dir, tmp_path):
    write_gsm8k(tmp_path / "hub")
    document = marscli.evaluate(
        model_dir, "gsm8k_cot_zeroshot,gsm8k", tmp_path / "out", data_root=tmp_path / "hub", max_new_tokens=5,
        num_fewshot=2, include_path=Path(lm_eval.__file__).parent / "tasks" / "gsm8k",
    )  # fmt: skip
    assert document["n-shot"] == {"gsm8k": 2, "gsm8k_cot_zeroshot": 0}
    assert document["n-samples"]["gsm8k"] == {"original": 3, "effective": 3}
    assert document["configs"]["gsm8k"]["dataset_path"] == "openai/gsm8k"
    assert {"exact_match,strict-match", "exact_match,flexible-extract"} <= set(document["results"]["gsm8k"])
    (tmp_path / "hub" / "openai" / "gsm8k" / "main" / "test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "#### 2"}'
    )
    again = marscli.evaluate(
        model_dir, "gsm8k", data_root=tmp_path / "hub", max_new_tokens=5, num_fewshot=3,
        include_path=Path(lm_eval.__file__).parent / "tasks" / "gsm8k",
    )  # fmt: skip
    assert again["n-samples"]["gsm8k"]["original"] == 1  # changed data is read anew


def test_the_timing_script_compares_with_lm_evals_own_model(model_dir, tmp_path, monkeypatch):
    write_gsm8k(tmp_path / "hub")
    script, out = Path(__file__).parents[2] / "benchmarks" / "eval_time.py", tmp_path / "out.json"
    arguments = ["-m", model_dir, "--data-root", tmp_path / "hub", "--dtype", "float32", "-b", 2, "--repeats", 1]
    arguments += ["--thresholds", "exact,0.9", "--json", out]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    runpy.run_path(str(script), run_name="__main__")
    rows = json.loads(out.read_text())
    assert [row["model"] for row in rows] == ["lm-eval hf", "mars exact", "mars τ=0.9"]
    assert [row["same_texts"] for row in rows][:2] == [3, 3]
    assert rows[0]["tokens_per_forward"] is None
    assert rows[1]["tokens_per_forward"] >= 1
    assert all(0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"] for row in rows)


def test_more_examples_than_there_are(arguments, tasks, capsys):
    said = refused([*arguments, "--tasks", tasks.colours(), "--num-fewshot", "7"], capsys)
    assert "colours has 6 worked examples to choose from, not 7" in said


def refused(arguments, capsys, *, code: int = 2) -> str:
    """Run, expect the exit code, and return what stderr says."""
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\nhint: " in shown.err
    return shown.err


def test_data_sets_out_of_reach(arguments, tasks, tmp_path, capsys):
    tasks.add(
        "far", dataset_path="org/far-away", output_type="generate_until", test_split="test", doc_to_text="{{q}}",
        doc_to_target="{{a}}",
    )  # fmt: skip
    (tmp_path / "hub").mkdir()
    with_root = [*arguments, "--tasks", "far", "--data-root", str(tmp_path / "hub")]
    assert "error: data set org/far-away cannot be reached" in refused([*arguments, "--tasks", "far"], capsys)
    assert f"is not in --data-root {tmp_path / 'hub'}" in refused(with_root, capsys)
    (tmp_path / "hub" / "org" / "far-away").mkdir(parents=True)
    assert "hub/org/far-away cannot be read as data set org/far-away" in refused(with_root, capsys)
    assert not (tmp_path / "out").exists()  # a folder that the refused run made is gone


def test_an_unknown_task_names_its_neighbours(model_dir, tmp_path, capsys):
    said = refused(["eval", "-m", str(model_dir), "-o", str(tmp_path / "out"), "--tasks", "mmlu,gsm8kk"], capsys)
    assert "there is no task, group or tag 'gsm8kk'" in said
    assert "hint: did you mean gsm8k or" in said
    assert not (tmp_path / "out").exists()


def test_folders_with_tasks_are_comma_separated_or_repeated(tasks, tmp_path, capsys):
    other = tmp_path / "a,b"
    other.mkdir()
    listing = ["eval", "--list-tasks", "--include-path"]
    assert "--include-path /nowhere" in refused([*listing, f"{tasks.folder},/nowhere"], capsys)
    assert "--include-path /nowhere" in refused([*listing, str(other), "--include-path", "/nowhere"], capsys)


def test_the_list_of_tasks(capsys):
    assert run(["eval", "--list-tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"task\tgsm8k", "group\tmmlu", "group\tbbh_cot_fewshot", "task\thumaneval"} <= set(lines)
    assert len(lines) > 10_000
    # No name may be missing among those that are found as text, without parsing the files.
    assert all(line.split("\t")[1] in own_names() for line in lines if line != "group\tpaper")


def test_code_is_run_only_with_consent(arguments, tasks, capsys):
    tasks.add("coding", **tasks.data(), output_type="generate_until", test_split="test", unsafe_code=True,
              doc_to_text="{{question}}", doc_to_target="{{answer}}")  # fmt: skip
    tasks.group("all_code", ["coding"], "exact_match")
    said = refused([*arguments, "--tasks", "all_code"], capsys)
    assert "coding runs code that the model writes" in said
    assert "--confirm-run-unsafe-code" in said


def test_a_model_without_mars_training(arguments, tasks, tmp_path, capsys, monkeypatch):
    tokenizer = make_tokenizer(chat_template=False)
    tokenizer.save_pretrained(tmp_path / "plain")
    make_model(len(tokenizer), eos=[tokenizer.eos_token_id]).save_pretrained(tmp_path / "plain")
    command = [*arguments, "--tasks", tasks.sums(), "-n", "4", "-m", str(tmp_path / "plain")]
    with monkeypatch.context() as patch:
        patch.setattr("marscli.checkpoint.load", None)  # both are refused before it
        said = refused([*command, "--threshold", "0.9"], capsys)
        assert "--threshold 0.9" in said
        assert "mars train" in said
        assert "--chat-template" in refused([*command, "--chat-template"], capsys)
    assert run(command) == 0
    assert capsys.readouterr().err.count("never MARS-trained") == 1
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert document["chat_template"] is None
    assert document["mars"]["block_size"] == 1


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--threshold", "1.5"], "--threshold 1.5"),
        (["--threshold", "exact,fast"], "--threshold 'fast'"),
        (["--no-verify", "--draft-tokens", "2"], "--draft-tokens"),
        (["--draft-tokens", "-1"], "--draft-tokens -1"),
        (["--resume", "--force"], "--resume"),
        (["--num-processes", "0"], "--num-processes 0"),
        (["-b", "auto"], "--batch-size auto: an automatic batch size is not supported"),
        (["-b", "many"], "--batch-size many"),
        (["--limit", "0"], "--limit 0"),
        (["--block-size", "0"], "--block-size 0"),
        (["-b", "0"], "--batch-size 0"),
        (["-n", "0"], "--max-new-tokens 0"),
        (["-n", "1000000"], "--max-new-tokens 1000000"),
        (["--num-fewshot", "-1"], "--num-fewshot -1"),
        (["--data-root", "/nowhere"], "--data-root /nowhere"),
        (["--include-path", "/nowhere"], "--include-path /nowhere"),
        (["-m", "/nowhere"], "/nowhere"),
        (["--device", "gpu"], "--device gpu"),
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "1" * 12], "--seed 1"),
        (["--tasks", ","], "--tasks"),
        (["--task", "sums"], "--task"),
    ],
)
def test_wrong_input_is_refused_before_anything_happens(arguments, tasks, tmp_path, capsys, options, culprit):
    name = [] if options[0] == "--tasks" else ["--tasks", tasks.sums()]
    assert culprit in refused([*arguments, *name, *options], capsys)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(arguments, capsys):
    assert "missing --tasks" in refused(arguments, capsys)
    assert "missing --model" in refused(["eval", "--tasks", "gsm8k", "-o", "out"], capsys)
    assert "missing --output-dir" in refused(["eval", "--tasks", "gsm8k", "-m", "org/model"], capsys)


def test_existing_results_are_kept_unless_forced(arguments, tasks, tmp_path, capsys):
    command = [*arguments, "--tasks", tasks.colours(), "--threshold", "exact,0.9"]
    (tmp_path / "out").mkdir()
    for file in ("results.json", "pareto.png", "samples_sums_exact.jsonl"):
        (tmp_path / "out" / file).write_text("old")
    assert "--force" in refused(command, capsys)
    assert (tmp_path / "out" / "results.json").read_text() == "old"
    assert run([*command, "--force"]) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["results"]["colours"]["acc,none"] >= 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]
    assert "no pareto.png" in capsys.readouterr().err


def test_broken_task_files_are_named(arguments, tasks, capsys):
    tasks.add("broken", **tasks.data(), output_type="no_such_type", test_split="test", doc_to_text="{{question}}")
    assert "--tasks broken: lm-eval cannot build the task" in refused([*arguments, "--tasks", "broken"], capsys)
    tasks.group("twice", [tasks.sums()], "exact_match")
    assert "Duplicate task 'sums'" in refused([*arguments, "--tasks", "twice,sums"], capsys)


def test_python_takes_the_command_lines_names():
    config = EvalConfig(model="m", tasks="a, b,a", threshold=[None, 0.9, "1.0"])
    assert (config.tasks, config.threshold) == (("a", "b"), (None, 0.9))
    assert EvalConfig(model="m", tasks=["a"], threshold=0.3, confidence="entropy").threshold == (0.3,)
    with pytest.raises(InputError):
        EvalConfig(model="m", tasks=[])
