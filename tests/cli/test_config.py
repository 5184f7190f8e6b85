"""``--config``: precedence, spellings, and errors that name the nearest key."""

from typing import Annotated

import pytest
import typer

from marscli.cli import app, options
from marscli.cli.app import run


@pytest.fixture
def seen(monkeypatch):
    """A command with one option of each kind; returns what it was called with."""
    calls = []

    def work(
        model: options.Model,
        prompt: Annotated[str | None, typer.Argument()] = None,
        lists: Annotated[list[str] | None, typer.Option("--lists")] = None,
        max_new_tokens: options.MaxNewTokens = 256,
        threshold: options.Threshold = "exact",
        temperature: options.Temperature = 0.0,
        verify: options.Verify = False,
        chat_template: options.ChatTemplate = None,
        quiet: options.Quiet = False,
        config: options.Config = None,
    ) -> None:
        calls.append({key: value for key, value in locals().items() if key not in ("calls", "config", "prompt")})

    small = typer.Typer(context_settings=app.app.info.context_settings)
    small.callback()(lambda: None)
    small.command("work")(work)
    monkeypatch.setattr(app, "app", small)
    return calls


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_defaults_then_file_then_flags(seen, config_file):
    path = config_file(
        "model: from-file\nmax-new-tokens: 7\nthreshold: 0.9\ntemperature: 1e-1\nverify: true\n"
        "chat_template: false\nquiet: yes\nlists: [a, 0.5]\n"
    )
    assert run(["work", "--config", path]) == 0
    assert run(["work", "-n", "9", "--config", path, "--no-verify", "-m", "from-flag", "--lists", "b"]) == 0
    assert run(["work", "-m", "from-flag"]) == 0
    file = {
        "model": "from-file",
        "lists": ["a", "0.5"],
        "max_new_tokens": 7,
        "threshold": "0.9",
        "temperature": 0.1,
        "verify": True,
        "chat_template": False,
        "quiet": True,
    }
    assert seen[0] == file
    assert seen[1] == {**file, "max_new_tokens": 9, "verify": False, "model": "from-flag", "lists": ["b"]}
    assert seen[2] == {
        "model": "from-flag",
        "lists": None,
        "max_new_tokens": 256,
        "threshold": "exact",
        "temperature": 0.0,
        "verify": False,
        "chat_template": None,
        "quiet": False,
    }


def test_underscores_and_hyphens_are_the_same(seen, config_file):
    assert run(["work", "-m", "a", "--max_new_tokens", "3", "--no_verify", "--chat_template"]) == 0
    assert run(["work", "-m", "a", "--max_new_tokens=3", "--config", config_file("chat-template: on\n")]) == 0
    assert [(call["max_new_tokens"], call["chat_template"]) for call in seen] == [(3, True), (3, True)]


def test_a_switch_by_its_negative_name(seen, config_file):
    for text in ("no-verify: true\nno_chat_template: true", "verify: false\nchat-template: false"):
        assert run(["work", "-m", "a", "--config", config_file(text)]) == 0
    assert run(["work", "-m", "a", "--config", config_file("no-chat-template: false")]) == 0
    assert [(call["verify"], call["chat_template"]) for call in seen] == [(False, False), (False, False), (False, True)]


def test_an_empty_file_and_empty_values_change_nothing(seen, config_file):
    assert run(["work", "-m", "a", "--config", config_file("# nothing\n")]) == 0
    assert run(["work", "-m", "a", "--config", config_file("threshold:\n")]) == 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("max-new-token: 3", "unknown key 'max-new-token'", "did you mean 'max-new-tokens'?"),
        ("treshold: 3", "unknown key 'treshold'", "did you mean 'threshold'?"),
        ("model: a\nmax-new-tokens: 3\nmax_new_tokens: 4", "'max_new_tokens' is given twice", "keep one"),
        ("model: [a, b]", "'model' takes one value, not a list", "single"),
        ("model: {a: b}", "'model' takes a plain value, not a mapping", "option: value"),
        ("- model", "not a mapping of options", "option: value"),
        ("model: [a\nx: y", "c.yaml, line 2: ", "option: value"),
        ("model: a\nmax-new-tokens: many", "--max-new-tokens/-n:", "--help"),
        ("config: other.yaml", "unknown key 'config'", ""),
    ],
)
def test_errors_name_file_and_key(text, message, hint, seen, config_file, capsys):
    path = config_file(text)
    assert run(["work", "--config", path]) == 2
    error, hint_line = capsys.readouterr().err.splitlines()
    assert message in error
    assert path in error
    assert hint in hint_line
    assert seen == []


def test_a_missing_file(seen, capsys):
    assert run(["work", "-m", "a", "--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "error: --config nowhere.yaml: no such file\nhint: check the path\n"


def test_required_options_are_still_required(seen, config_file, capsys):
    assert run(["work", "--config", config_file("threshold: 0.5")]) == 2
    assert "missing --model/-m" in capsys.readouterr().err


def test_lists_are_comma_separated_or_repeated():
    assert options.split_list(["a, b", "c", "", "d,"]) == ["a", "b", "c", "d"]
    assert options.split_list(None) == []


def test_paths_may_hold_a_comma(tmp_path):
    (tmp_path / "a,b").touch()
    assert options.split_paths([f"{tmp_path}/a,b", "c,d"]) == [f"{tmp_path}/a,b", "c", "d"]
    assert options.split_paths(None) == []
