"""Every command and snippet of the README: run on a tiny model, or, where it is marked as needing the Hub, parsed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from marscli import checkpoint
from marscli.cli import app
from tiny_chat import make_model, make_tokenizer, save_model, sums, write_rows

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- needs: [^>]*-->\n)?```(bash|python)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [(bool(mark), line) for mark, kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
RUN_HERE = [line for marked, line in COMMANDS if not marked and "mars " in line]
ONLY_PARSED = [line for marked, line in COMMANDS if marked]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with what the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    save_model(folder / "runs" / "ar")
    metadata = checkpoint.MarsMetadata(block_size=4, ar_weight=1.0, base_model="base", mask_token_id=3)
    checkpoint.save(folder / "runs" / "mars-ready", make_model(), make_tokenizer(mask_token="<|mask|>"), mars=metadata)
    write_rows(folder / "data.jsonl", sums(12))
    write_rows(
        folder / "prompts.jsonl", [{"prompt": "What is 1 plus 2?"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    )
    return folder


def test_the_readme_has_what_is_tested_here():
    assert len(RUN_HERE) >= 7
    assert len(ONLY_PARSED) >= 3
    assert "make demo" in README
    assert "make test" in README


def test_commands_run_in_the_order_of_the_readme(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    (folder / "runs" / "mars").mkdir(exist_ok=True)
    for line in RUN_HERE:
        piped = line.split("| mars ", 1)
        arguments = shlex.split(piped[-1].removeprefix("mars "))
        if len(piped) == 2:
            text = shlex.split(piped[0])[1]
            done = subprocess.run(
                [sys.executable, "-m", "marscli", *arguments], input=text, text=True, capture_output=True, timeout=120
            )
            assert done.returncode == 0, (line, done.stderr)
        else:
            code = app.run(arguments)
            assert code == 0, (line, capfd.readouterr().err)
    for name in ("runs/mars/model.safetensors", "runs/mars/loss.png", "answers.jsonl", "runs/bench/speedup.png"):
        assert (folder / name).is_file(), name


@pytest.mark.parametrize("line", ONLY_PARSED)
def test_commands_that_need_the_hub_are_spelled_right(line):
    name, *arguments = shlex.split(line.removeprefix("mars "))
    root = typer.main.get_command(app.app)
    context = root.context_class(root, info_name="mars", **root.context_settings)
    command = root.commands[name]
    command.make_context(name, arguments, parent=context)


def test_python_snippets_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    snippets = [text for _, kind, text in BLOCKS if kind == "python"]
    assert len(snippets) == 3
    for snippet in snippets:
        exec(compile(snippet.replace("runs/mars", "runs/mars-ready"), "README.md", "exec"), {})
    assert capsys.readouterr().out
