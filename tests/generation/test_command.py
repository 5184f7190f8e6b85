"""``mars generate`` from end to end on a tiny model: what goes to stdout, stderr and files, and what is refused."""

import inspect
import io
import json
import subprocess
import sys

import pytest

import marscli
from marscli.cli import generate as command
from marscli.cli.app import run
from marscli.core.decoding import Engine
from marscli.generation.config import GenerateConfig

KEYS = {
    "index",
    "prompt",
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "forwards",
    "tokens_per_forward",
    "seconds",
    "tokens_per_second",
    "threshold",
    "verified",
}


@pytest.fixture
def rows_file(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="module")
def expected(mars_model):
    """The text of the Python API, for comparison."""
    return marscli.generate(str(mars_model), "Why?", max_new_tokens=9, verify=False)[0]


def mars(capsys, *arguments):
    code = run(["generate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("streaming", [[], ["--stream"], ["--no-stream"]])
def test_one_prompt(streaming, mars_model, expected, capsys):
    code, out, err = mars(capsys, "-m", mars_model, "Why?", "-n", 9, "--no-verify", *streaming)
    assert code == 0
    assert out == expected.text + "\n"
    (footer,) = err.splitlines()
    for part in (f"{expected.prompt_tokens} prompt tokens", "9 tokens", "9 forwards", "1.00 tokens/forward", "τ exact"):
        assert part in footer
    assert footer.endswith(expected.finish_reason)


def test_quiet_json_on_stdout_is_nothing_but_the_result(mars_model, expected, capsys):
    code, out, err = mars(capsys, "-m", mars_model, "Why?", "-n", 9, "--json", "--quiet")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == KEYS
    assert (result["text"], result["prompt"], result["completion_tokens"]) == (expected.text, "Why?", 9)


def test_prompt_from_stdin(mars_model, expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffWhy?\n"))  # some Windows programs write the mark
    assert mars(capsys, "-m", mars_model, "-", "-n", 9)[1] == expected.text + "\n"


def test_a_file_of_prompts(mars_model, rows_file, tmp_path, capsys):
    rows = [{"prompt": f"Question {i}", "id": i, "max_new_tokens": 9 - 2 * i} for i in range(4)]
    code, out, err = mars(capsys, "-m", mars_model, "--input", rows_file(*rows), "-b", 3)
    assert code == 0
    printed = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["id"], r["prompt"]) for r in printed] == [(i, i, f"Question {i}") for i in range(4)]
    assert [r["completion_tokens"] for r in printed] == [9, 7, 5, 3]
    assert "4 prompts" in err
    target = tmp_path / "new" / "out.jsonl"
    code, out, err = mars(capsys, "-m", mars_model, "--input", rows_file(*rows), "--output", target, "-L", 2)
    assert (code, out) == (0, "")
    saved = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["text"] for r in saved] == [r["text"] for r in printed[:2]]
    assert all(r["partial"] for r in saved)
    assert "partial: only the first 2 rows" in err
    assert list(target.parent.iterdir()) == [target]
    code, _, err = mars(capsys, "-m", mars_model, "Why?", "--output", target)
    assert code == 2
    assert "the file exists already" in err
    assert mars(capsys, "-m", mars_model, "Why?", "-n", 2, "--output", target, "--force")[0] == 0
    assert json.loads(target.read_text())["prompt"] == "Why?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "no/such/folder/x", "Hi"], "no/such/folder/x"),
        (["Hi", "--threshold", "1.5"], "--threshold 1.5"),
        (["Hi", "--block-size", "0"], "--block-size 0"),
        (["Hi", "--no-verify", "--draft-tokens", "2"], "--draft-tokens: without --verify"),
        (["Hi", "--stop", ""], "stop is empty"),
        (["Hi", "--resume"], "--resume goes on with --output"),
        (["--input", "x.jsonl", "--resume"], "--resume goes on with --output"),
        (["--input", "x.jsonl", "--output", "y.jsonl", "--resume", "--force"], "--force replaces it"),
        (["Hi", "--trace", "--json"], "--trace shows one answer"),
        (["Hi", "--trace-html", "x.html", "--no-stream"], "--trace shows one answer"),
        (["--chat", "--json"], "--chat is a dialogue"),
        (["--chat", "--input", "x.jsonl"], "--chat is a dialogue"),
        (["Hi", "-n", "0"], "--max-new-tokens 0"),
        (["Hi", "-L", "3"], "--limit 3"),
        (["Hi", "--input", "x.jsonl"], "there is a prompt, and --input too"),
        ([], "there is no prompt"),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["Hi", "--json", "--stream"], "--stream"),
        (["Hi", "--device", "quantum"], "quantum"),
        (["Hi", "--output", "/dev/null/x/y.jsonl"], "cannot write there"),
        (["", "--no-chat-template"], "the prompt is empty"),
        (["word " * 100], "too many for the model's context of 64"),
        (["Hi \udcff"], "half of a character"),
        (["Hi", "--tokenizer", "no/such/folder/x"], "--tokenizer no/such/folder/x"),
        (["Hi", "--seed", "1" * 30], "--seed 1"),
        (["Hi", "--top-k", "1" * 30], "--top-k 1"),
        (["Hi", "--cache", "paged"], "--cache: 'paged' is not one of"),
        (["Hi", "--cache-block", "8"], "--cache-block 8"),
        (["Hi", "--cache", "block", "--cache-block", "0"], "--cache-block 0"),
        (["Hi", "--cache", "block", "--draft-tokens", "2"], "--draft-tokens: --cache block"),
    ],
)
def test_wrong_input_is_refused_with_a_hint(arguments, message, mars_model, capsys):
    model = [] if "-m" in arguments else ["-m", mars_model]
    code, out, err = mars(capsys, *model, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err.splitlines()[0]
    assert err.splitlines()[-1].startswith("hint: ")
    assert "Traceback" not in err


def test_refused_input_leaves_no_folder(mars_model, rows_file, tmp_path, capsys):
    target = tmp_path / "new" / "deeper" / "out.jsonl"
    path = rows_file({"prompt": "fine"}, {"prompt": "word " * 100})
    code, _, err = mars(capsys, "-m", mars_model, "--input", path, "--output", target)
    assert code == 2
    assert "rows.jsonl, line 2: the prompt has" in err
    assert not (tmp_path / "new").exists()


def test_the_input_file_is_not_overwritten(mars_model, rows_file, capsys):
    path = rows_file({"prompt": "Why?"})
    code, _, err = mars(capsys, "-m", mars_model, "--input", path, "--output", path, "--force")
    assert code == 2
    assert "is the --input file" in err


def test_places_are_allocated_for_the_prompts_there_are(mars_model, monkeypatch):
    rows = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: rows.append(engine.max_rows) or step(engine))
    marscli.generate(str(mars_model), ["a", "b"], max_new_tokens=1, batch_size=10**9)
    assert set(rows) == {2}


def test_a_threshold_needs_a_mars_model(plain_model, rows_file, capsys):
    code, _, err = mars(capsys, "-m", plain_model, "Hi", "--threshold", 0.9)
    assert code == 2
    assert "never MARS-trained" in err
    assert "mars train" in err
    code, _, err = mars(capsys, "-m", plain_model, "--input", rows_file({"prompt": "a", "threshold": 0.5}))
    assert code == 2
    assert "line 1: --threshold 0.5" in err
    code, _, err = mars(capsys, "-m", plain_model, "Hi", "-n", 3)
    assert code == 0
    assert err.count("warning: ") == 1


def test_every_option_reaches_its_setting(monkeypatch, capsys):
    seen = {}

    def record(**settings):
        seen.update(settings)
        raise SystemExit(0)

    monkeypatch.setattr(command, "GenerateConfig", record)
    values = {
        "tokenizer": "tok",
        "device": "cpu",
        "dtype": "float16",
        "trust_remote_code": True,
        "threshold": "0.7",
        "confidence": "margin",
        "verify": False,
        "block_size": 3,
        "draft_tokens": 2,
        "cache": "none",
        "cache_block": 8,
        "max_new_tokens": 17,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["a,b", "c"],
        "seed": 11,
        "batch_size": 6,
        "chat_template": False,
        "system": "Be brief.",
        "compile": True,
    }
    arguments = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list):
            arguments += [part for each in value for part in (option, each)]
        else:
            arguments += [option, str(value)]
    with pytest.raises(SystemExit):
        run(["generate", "-m", "x", "Hi", *arguments])
    assert seen == values


def test_names_and_defaults_are_those_of_the_python_interface():
    parameters = inspect.signature(command.generate).parameters
    for name, field in GenerateConfig.__dataclass_fields__.items():
        assert parameters[name].default == field.default, name


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError("full"), 1)])
def test_a_broken_off_run_saves_what_is_done(error, code, mars_model, rows_file, tmp_path, capsys, monkeypatch):
    target = tmp_path / "out.jsonl"
    steps = []
    step = Engine.step

    def interrupted(engine):
        steps.append(1)
        if len(steps) == 9:
            raise error
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    path = rows_file(*({"prompt": f"Question {i}"} for i in range(20)))
    result, _, err = mars(capsys, "-m", mars_model, "--input", path, "--output", target, "-n", "2")
    assert result == code
    assert "of 20 results are in" in err
    assert err.splitlines()[-1].startswith("interrupted" if code == 130 else "hint: ")
    saved = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["index"] for row in saved] == list(range(len(saved)))
    assert 4 <= len(saved) < 9
    assert "--resume does the rest" in err


def test_the_real_process_streams_and_exits_cleanly(mars_model, expected):
    result = subprocess.run(
        [sys.executable, "-m", "marscli", "generate", "-m", str(mars_model), "Why?", "-n", "9"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert result.stdout == expected.text + "\n"
    assert len(result.stderr.splitlines()) == 1, result.stderr
