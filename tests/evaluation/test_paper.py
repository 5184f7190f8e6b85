"""`--tasks paper`: the paper's settings, its six columns, and its published figures, marked as such."""

from __future__ import annotations

import json

import nltk
import pytest
import yaml

from marscli.cli.app import run
from marscli.evaluation import report
from marscli.evaluation.suites import BENCHMARKS, PAPER_MAX_NEW_TOKENS, PUBLISHED
from marscli.evaluation.task_names import TaskNames, own_names


@pytest.fixture
def six(tasks):
    """Small tasks and groups of the six benchmarks' names."""
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pytest.skip("NLTK's punkt_tab is not here, which a task of the name ifeval is asked for")
    for name in ("ifeval", "gpqa_main_cot_zeroshot", "gsm8k_cot_zeroshot", "humaneval_instruct", "bbh_a", "pro_a"):
        tasks.sums(name, max_gen_toks=900)
    tasks.group("bbh_cot_fewshot", ["bbh_a"], "exact_match", "number")
    tasks.group("mmlu_pro", ["pro_a"], "exact_match", "number")
    path = tasks.folder / "pro_a.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "num_fewshot": 5}))
    return tasks


def test_settings_columns_and_published_figures(model_dir, six, tmp_path, capsys, monkeypatch):
    assert PAPER_MAX_NEW_TOKENS == 256
    monkeypatch.setattr("marscli.evaluation.runner.PAPER_MAX_NEW_TOKENS", 12)  # 256 take long
    out = tmp_path / "out"
    command = ["eval", "-m", str(model_dir), "--include-path", str(six.folder), "--tasks", "paper", "-o", str(out)]
    assert run([*command, "--limit", "1", "--threshold", "exact,0.3", "--no-verify", "--paper-reference"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("at most 12 new tokens each (the paper's limit)") == 6
    document = json.loads((out / "results.json").read_text())
    assert document["n-shot"]["pro_a"] == 0
    assert document["chat_template"]
    assert len(document["mars"]["paper_reference"]) == len(PUBLISHED)

    lines = report.summary(document).splitlines()
    titles = [benchmark.title for benchmark in BENCHMARKS]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["Threshold", *titles, "Average of 6", "Change", "Tokens/forward", "Tokens/s", "Seconds"]
    exact, fast = cells[2], cells[3]
    assert (exact[0], exact[8], fast[0]) == ("exact", "+0.0", "0.3")
    assert float(exact[7]) == pytest.approx(sum(map(float, exact[1:7])) / 6, abs=0.06)
    assert float(fast[8]) == pytest.approx(float(fast[7]) - float(exact[7]), abs=0.11)
    assert float(exact[9]) == 1.0 < float(fast[9])

    said = shown.out
    assert said.count("(published, table ") == len(PUBLISHED) == said.count("B=") + said.count("AR SFT")
    assert said.count("tiny-mars (measured)") == 2
    assert "0.5B MARS, B=4 (published, table 4)" in said
    assert "not measured here" in said
    assert "GSM8K: the data set here has 6 of 1319 problems." in said
    assert (out / "pareto.png").exists()


def test_options_win_over_the_papers_settings(model_dir, six, tmp_path, capsys):
    command = ["eval", "-m", str(model_dir), "--include-path", str(six.folder), "-o", str(tmp_path / "out")]
    assert run([*command, "--tasks", "paper", "-n", "3", "--limit", "1", "--num-fewshot", "1"]) == 0
    assert capsys.readouterr().err.count("at most 3 new tokens each (--max-new-tokens)") == 6
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert document["n-shot"]["pro_a"] == 1
    assert report.summary(document) == ""


def test_the_papers_table_adds_up():
    for row in PUBLISHED:
        if len(row.scores) == 6:
            assert row.average == pytest.approx(sum(row.scores.values()) / 6, abs=0.06)
        assert row.to_dict()["source"] == "published, not measured here"


def test_a_stand_in_is_not_shown_as_the_benchmark(model_dir, six, tmp_path, capsys):
    hub = tmp_path / "hub" / "org" / "stand"
    hub.mkdir(parents=True)
    (hub / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files:\n"
                                   "  - {split: test, path: data.jsonl}\n---\nA stand-in: made up.\n")  # fmt: skip
    (hub / "data.jsonl").write_text((six.folder / "data.jsonl").read_text())
    path = six.folder / "gpqa_main_cot_zeroshot.yaml"
    config = yaml.safe_load(path.read_text())
    del config["dataset_kwargs"]
    path.write_text(yaml.safe_dump({**config, "dataset_path": "org/stand"}))
    command = ["eval", "-m", str(model_dir), "--include-path", str(six.folder), "-o", str(tmp_path / "out")]
    command += ["--tasks", "gpqa_main_cot_zeroshot,gsm8k_cot_zeroshot", "-n", "3", "--data-root", str(tmp_path / "hub")]
    assert run([*command, "--threshold", "exact,0.5", "--paper-reference"]) == 0
    shown = capsys.readouterr().out
    assert "gpqa_main_cot_zeroshot (stand-in data)" in shown
    assert "gpqa_main_cot_zeroshot: not the benchmark's own data. A stand-in: made up." in shown
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "Average of 1" in report.summary(document)
    gpqa = report.paper_reference(document).splitlines()[2].split("|")[6].strip()
    assert gpqa == "–"


def test_names_are_found_as_text(tmp_path):
    root = tmp_path / "tasks"
    files = {
        "a/one.yaml": "task: one\ntag:\n  - listed\n  - other\n",
        "a/two.yaml": '"task": "two"\n"tag": [inline, again]\n',
        "a/_template": "tag: hidden\n",
        "b/group.yaml": "group: many\ntask:\n  - task: three\n    num_fewshot: 1\n  - one\n",
        "b/four.yaml": "include: ../a/_template\ntask: four\n",
        "b/utils.py": "task: no\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    names = TaskNames(root)
    for name in ("one", "two", "four", "many", "listed", "other", "inline", "again", "hidden"):
        assert name in names
    assert {"no", "three"}.isdisjoint(names)  # a group may change a task that stands elsewhere
    assert names.folders(["hidden"]) == [root / "a", root / "b"]  # b includes what is tagged in a
    assert {"gsm8k", "mmlu", "bbh_cot_fewshot", "leaderboard", "mgsm_direct"} <= set(own_names())
