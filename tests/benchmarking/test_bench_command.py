"""The command from its flags to its files, on a tiny random model."""

import csv
import json

import pytest

import marscli
from marscli.benchmarking import runner
from marscli.benchmarking.results import FIELDS
from marscli.cli.app import run
from tiny_chat import make_model, make_tokenizer, save_model, sums, write_rows

PICTURES = {"pareto.png", "speedup.png", "acceptance.png"}
FILES = {"results.json", "results.csv", "report.md", "passes.jsonl", *PICTURES}
QUICK = ["--limit", "2", "-n", "6", "--batch-sizes", "1,2", "--repeats", "2", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model = make_model(max_position_embeddings=256)
    model.config.mask_token_id = model.config.pard_token = 3
    model.config.mars = {"version": 1, "block_size": 4, "ar_weight": 1.0, "base_model": "tiny"}
    return str(save_model(tmp_path_factory.mktemp("trained"), model, make_tokenizer(mask_token="<|mask|>")))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("untrained")))


def test_whole_run(trained, tmp_path, capsys):
    out = tmp_path / "new" / "bench"
    data = write_rows(tmp_path / "sums.jsonl", [{**row, "answer": "#### 8"} for row in sums(5)])
    thresholds = ["--thresholds", "exact", "--thresholds", "0.0001"]
    assert run(["bench", "-m", trained, "-d", str(data), "-o", str(out), *QUICK, *thresholds]) == 0
    shown = capsys.readouterr()
    assert {path.name for path in out.iterdir()} == FILES
    for text in ("hf", "ar", "threshold exact", "verified τ=0.0001", "2 of 5 prompts", "transformers generate", "GB/s"):
        assert text in shown.out
    assert "answers were cut off at --max-new-tokens 6" in shown.err
    results = json.loads((out / "results.json").read_text())
    meta, rows = results["meta"], results["rows"]
    assert meta["options"]["batch_sizes"] == [1, 2]
    assert meta["prompts"] == {"used": 2, "available": 5, "partial": True}
    assert meta["interrupted"] is False
    assert meta["versions"]["torch"]
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (batch, method) for batch in (1, 2) for method in ("hf", "ar", "threshold", "threshold", "verified", "verified")
    ]
    for row in rows:
        assert tuple(row) == FIELDS
        assert row["skipped"] is None
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["prefill_seconds"] < row["seconds"]
        assert row["repeats"] == 2
        assert row["accuracy"] in (0, 0.5, 1)
        assert row["peak_memory_mb"] > 10
        assert 0 < row["first_token_seconds"] < row["seconds"]
        assert row["step_milliseconds"] > row["floor_milliseconds"] > 0
        assert sum(row["acceptance_by_offset"]) == pytest.approx(row["tokens_per_forward"])
        if row["threshold"] == 1.0:
            assert row["agrees_with_ar"] == 1.0
            if row["method"] != "verified":
                assert (row["tokens_per_forward"], row["step_width"]) == (1.0, 1.0)
    wide = rows[3]
    assert (wide["block_size"], wide["draft_tokens"], wide["threshold"]) == (4, 3, 0.0001)
    assert wide["tokens_per_forward"] > 1.5
    assert rows[0]["speedup_vs_hf"] == rows[1]["speedup_vs_ar"] == 1.0
    with (out / "results.csv").open() as handle:
        read = list(csv.DictReader(handle))
    assert [float(row["tokens"]) for row in read] == [row["tokens"] for row in rows]
    report = (out / "report.md").read_text()
    for text in (*PICTURES, "| threshold τ=0.0001", "mars ", meta["versions"]["torch"]):
        assert text in report
    for name in PICTURES:
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    assert run(["bench", "-m", trained, "-o", str(out), *QUICK]) == 2, "finished results are not replaced"
    assert "--force" in capsys.readouterr().err
    assert run(["bench", "-m", trained, "-o", str(out), *QUICK, "--methods", "ar", "--force", "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "results" not in shown.err
    assert [row["method"] for row in json.loads(shown.out)["rows"]] == ["ar", "ar"]
    assert not (out / "speedup.png").exists(), "an older run's picture does not stay beside new numbers"
    assert len((out / "passes.jsonl").read_text().splitlines()) == 1 + 2 * 2


def test_a_model_never_trained_with_masks(untrained, tmp_path, capsys, monkeypatch):
    assert run(["bench", "-m", untrained, "-o", str(tmp_path), *QUICK, "--thresholds", "0.9", "--no-progress"]) == 0
    shown = capsys.readouterr()
    assert "skipped: the checkpoint was never MARS-trained" in shown.out
    assert shown.err.count("was never MARS-trained: exact decoding is one token a forward") == 1
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["skipped"] is None for row in rows] == [True, True, False, False] * 2
    assert rows[2]["tokens_per_second"] is None
    # What its config.json tells is told before its weights are read.
    monkeypatch.delattr(runner.checkpoints, "load")
    alone = ["--methods", "threshold,verified", "--thresholds", "0.9", "-o", str(tmp_path / "alone")]
    assert run(["bench", "-m", untrained, *QUICK, *alone]) == 2
    assert "no method can run: the checkpoint was never MARS-trained" in capsys.readouterr().err
    assert not (tmp_path / "alone").exists()


def test_lookup_and_a_small_model_of_the_same_tokenizer(trained, untrained, tmp_path, capsys):
    methods = ["--methods", "hf,hf-lookup,hf-assisted,ar", "--draft", untrained]
    assert run(["bench", "-m", trained, "-o", str(tmp_path), *QUICK, *methods]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["skipped"] is None for row in rows] == [True] * 4 + [True, False, False, True]
    assert [row["agrees_with_ar"] for row in rows[:4]] == [1.0] * 4
    assert all(row["speedup_vs_hf"] > 0 for row in rows[:4])
    assert f"drafts of {untrained}" in (tmp_path / "report.md").read_text()


def test_a_small_model_of_another_tokenizer_is_refused(trained, tmp_path, capsys, monkeypatch):
    other = str(save_model(tmp_path / "other", tokenizer=make_tokenizer(merges=(("a", "b"), ("c", "d")))))
    vocabulary = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    tokens = vocabulary["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(vocabulary))
    monkeypatch.delattr(runner.checkpoints, "load")
    assert run(["bench", "-m", trained, "-o", str(tmp_path / "out"), *QUICK, "--draft", other]) == 2
    assert "its tokenizer is not the model's" in capsys.readouterr().err


def test_quick_exists_and_is_small(trained, tmp_path):
    assert run(["bench", "-m", trained, "-o", str(tmp_path), "--quick", "-n", "3", "--methods", "ar"]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["meta"]["prompts"]["used"] == 4
    assert [row["repeats"] for row in document["rows"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--methods", "hf,verfied"], "--methods: there is no method 'verfied'"),
        (["--suite", "papers"], "--suite: there is no suite 'papers'"),
        (["--draft", "missing/draft/here"], "--draft missing/draft/here"),
        (["--thresholds", "1.5"], "--thresholds: 1.5"),
        (["--block-size", "0"], "--block-size"),
        (["--batch-sizes", "1,4"], "--batch-sizes: 4 rows need as many prompts"),
        (["-d", "missing.jsonl"], "missing.jsonl"),
        (["-d", "no/such-set"], "--dataset no/such-set"),
        (["--threshhold", "1"], "--threshhold"),
        (["-m", "no/such/folder/here"], "no/such/folder/here"),
        (["-o", "/proc/none"], "/proc/none"),
    ],
)
def test_wrong_usage_is_found_before_loading(trained, tmp_path, capsys, arguments, names, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(runner.checkpoints, "load", load)
    out = tmp_path / "out"
    assert run(["bench", "-m", trained, "-o", str(out), "--limit", "2", "--batch-sizes", "1", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert names in shown.err.splitlines()[0]
    assert shown.err.splitlines()[-1].startswith("hint: ")
    assert not out.exists()


def test_prompts_that_leave_no_room_are_refused_before_loading(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(runner.checkpoints, "load")
    out = tmp_path / "out"
    assert run(["bench", "-m", trained, "-o", str(out), *QUICK, "-n", "250"]) == 2
    error = capsys.readouterr().err
    assert "--max-new-tokens: a prompt of" in error
    assert "context" in error
    assert not out.exists()


def test_ctrl_c_saves_what_is_measured(trained, tmp_path, capsys, monkeypatch):
    measured = []
    watched = runner._watched

    def interrupted(*arguments):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(1)
        return watched(*arguments)

    monkeypatch.setattr(runner, "_watched", interrupted)
    assert run(["bench", "-m", trained, "-o", str(tmp_path), *QUICK]) == 130
    shown = capsys.readouterr()
    assert "INTERRUPTED" in shown.out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["interrupted"] is True
    assert [row["repeats"] for row in results["rows"]] == [1, 1, 1] + [0] * 9
    assert "before its turn" in results["rows"][3]["skipped"]


def test_a_run_that_was_killed_goes_on(trained, tmp_path, capsys, monkeypatch):
    """Every pass is on disk once it is made; what was being written at the end is measured again."""
    options = ["-m", trained, *QUICK, "--methods", "hf,ar,threshold"]
    command = ["bench", *options, "-o", str(tmp_path)]
    watched, made = runner._watched, []

    def killed(*arguments):
        if len(made) == 5:
            raise SystemExit(137)
        made.append(1)
        return watched(*arguments)

    monkeypatch.setattr(runner, "_watched", killed)
    with pytest.raises(SystemExit):
        run(command)
    log = tmp_path / "passes.jsonl"
    lines = log.read_text().splitlines()
    assert len(lines) == 1 + 5
    log.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    assert run(command) == 2, "without --resume nothing is replaced"
    capsys.readouterr()

    made.clear()
    monkeypatch.setattr(runner, "_watched", lambda *arguments: (made.append(1), watched(*arguments))[1])
    assert run([*command, "--resume"]) == 0
    assert "going on after 4 passes" in capsys.readouterr().err
    assert len(made) == 2 * 8 - 4
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["interrupted"] is False
    assert {row["repeats"] for row in results["rows"]} == {2}
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(kept) == 1 + 16
    assert [json.loads(line) for line in lines[1:5]] == kept[1:5]
    kept_seconds = [line["pass"]["seconds"] for line in kept[1:] if line["row"] == kept[1]["row"]]
    assert results["rows"][0]["seconds_min"] == min(kept_seconds)

    assert run([*command, "--resume", "-n", "5"]) == 2
    error = capsys.readouterr().err
    assert "--resume" in error
    assert "max_new_tokens was 6, is 5" in error
    made.clear()
    assert run([*command, "--resume"]) == 0, "a run that is complete is shown again"
    assert not made
    log.unlink()
    assert run([*command, "--resume"]) == 2, "results without their passes are not replaced"
    assert "no passes.jsonl to go on from" in capsys.readouterr().err


def test_python_function_has_the_same_defaults_and_needs_no_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = marscli.bench(trained, methods=["hf", "ar"], batch_sizes=[1], limit=1, max_new_tokens=4, repeats=1)
    assert [row["method"] for row in result.rows] == ["hf", "ar"]
    assert result.meta["options"]["seed"] == 0
    assert list(tmp_path.iterdir()) == []
