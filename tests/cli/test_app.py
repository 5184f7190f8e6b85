"""Manners of the command line that hold for every command: help, exit codes, the form of errors."""

import os
import re
import resource
import subprocess
import sys

import pytest
import typer

import marscli
from marscli.cli import app, console
from marscli.cli.app import run
from marscli.errors import InputError, MarsError

HEAVY = ("torch", "transformers", "datasets", "lm_eval", "matplotlib")
COMMANDS = ("train", "generate", "bench", "eval")
# What users and CI jobs may rely on: short and long names.
EVERYWHERE = "-m --model --tokenizer --device --dtype --seed --limit -L --config --json --force --resume --quiet "
EVERYWHERE += "--no-progress --debug --trust-remote-code --block-size --chat-template --system"
DECODING = "--confidence --draft-tokens --compile --no-compile -n --max-new-tokens"
OPTIONS = {
    "train": "-d --dataset -o --output-dir --objective --ar-weight --epochs --max-steps --lr -b --batch-size "
    "--grad-accum --max-length --warmup-ratio --packing --no-packing --save-steps --resume-from --eval-dataset "
    "--report-to --num-processes --prompt-field --response-field --skip-bad-rows --lora-rank --merge --dry-run",
    "generate": f"{DECODING} --threshold --verify --no-verify --cache --cache-block -t --temperature --top-p --top-k "
    "-b --batch-size --no-chat-template --input --output --stream --no-stream --trace --trace-html --stop --chat",
    "bench": f"{DECODING} -o --output-dir -d --dataset --methods --thresholds --batch-sizes --repeats --draft --suite "
    "--quick --compare --tolerance",
    "eval": f"{DECODING} -o --output-dir --tasks --threshold --verify --no-verify --num-fewshot --log-samples "
    "--include-path --data-root --confirm-run-unsafe-code --num-processes --list-tasks --compare --paper-reference "
    "-b --batch-size --no-chat-template",
}


@pytest.fixture
def one_command(monkeypatch):
    """Replace the commands by a single one that does what the test says."""

    def install(action):
        small = typer.Typer(context_settings=app.app.info.context_settings)
        small.callback()(lambda: None)
        small.command("work")(lambda: action())
        monkeypatch.setattr(app, "app", small)

    return install


def test_help_is_fast_and_imports_nothing_heavy():
    """Best of three, in CPU time: how long a busy machine lets us wait says nothing about us."""
    for arguments in ([], *([command] for command in COMMANDS)):
        times = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            result = subprocess.run(
                [sys.executable, "-m", "marscli", *arguments, "--help"], capture_output=True, text=True, check=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if times[-1] < 0.5:
                break
        assert min(times) < 0.5
        assert result.stdout.startswith("Usage: mars")
        assert result.stderr == ""
    code = f"import sys; from marscli.cli.app import run; run(['eval', '-h']); print(set({HEAVY}) & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("set()\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_that_users_rely_on_are_there(command):
    parameters = typer.main.get_command(app.app).commands[command].params
    there = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    assert set(f"{EVERYWHERE} {OPTIONS[command]}".split()) - there == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_groups_options_and_shows_examples(command, capsys):
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"  mars {command} -m ") >= 2 or command == "generate"
    for panel in ("Model:", "Run:", "Input and output:"):
        assert f"\n{panel}\n" in text


def test_no_arguments_show_help(capsys):
    assert run([]) == 0
    assert "mars train -m" in capsys.readouterr().out


def test_help_of_the_program_names_the_commands_in_whole_sentences(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "completion" not in text
    summaries = " ".join(text.partition("Commands:")[2].split())
    assert "..." not in summaries
    assert "Write text with a model, several tokens per forward pass." in summaries
    assert (
        "Teach a model to predict several tokens per forward pass; the result is an ordinary checkpoint." in summaries
    )


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"marscli {marscli.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["generat"], "no such command 'generat'", "did you mean 'generate'"),
        (["nothing-like-it"], "no such command", "mars --help"),
        (["nothing-like-it", "--help"], "no such command", "mars --help"),
        (["generate", "--treshold", "1"], "no such option: --treshold", "did you mean --threshold?"),
        (["generate", "-m", "x", "--max_new_token", "3"], "no such option: --max", "did you mean --max-new-tokens?"),
        (["generate", "-m", "x", "--methods", "hi"], "no such option: --methods", "`mars bench` has it"),
        (["generate", "-m", "x", "--temp", "1", "hi"], "no such option: --temp", "did you mean --temperature?"),
        (["generate", "-m", "x", "--xyz", "hi"], "no such option: --xyz", "`mars generate --help`"),
        (["generate", "hello"], "missing --model/-m", "Hub id or folder"),
        (["generate", "-m"], "'-m' requires an argument", "--help"),
        (["generate", "-m", "x", "-n", "many", "hi"], "--max-new-tokens/-n:", "mars generate --help"),
        (["generate", "-m", "x", "--dtype", "f8", "hi"], "--dtype: 'f8' is not one of", "mars generate --help"),
        (["generate", "-m", "x", "hi", "there"], "unexpected extra argument", "--help"),
    ],
)
def test_wrong_usage_is_one_message_and_a_hint(arguments, message, hint, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("--this is wrong", hint="do that"), 2, "error: --this is wrong\nhint: do that\n"),
        (MarsError("it broke", hint="mend it"), 1, "error: it broke\nhint: mend it\n"),
        (OSError(28, "No space left on device", "x.json"), 1, "error: [Errno 28] No space left on device: 'x.json'\n"),
        (MemoryError("big"), 1, "error: out of memory: big\nhint: use a smaller --batch-size"),
        (RuntimeError("a\nb"), 1, "error: RuntimeError: a b\nhint: this may be a bug"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_failures_become_exit_codes(error, code, message, one_command, capsys):
    def fail():
        raise error

    one_command(fail)
    assert run(["work"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert "Traceback" not in err


def test_debug_shows_the_traceback_before_the_message(one_command, capsys):
    def fail():
        console.configure(debug=True)
        raise InputError("no", hint="yes")

    one_command(fail)
    assert run(["work"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("error: no\nhint: yes\n")


def test_a_reader_that_goes_away_is_no_traceback():
    program = "from marscli.cli import console\nfor i in range(100000): console.echo('x' * 100)"
    script = f"from marscli.cli import app\napp.app.command('w')(lambda: exec({program!r}))\napp.main(['w'])"
    result = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -c \"$1\" | head -1; exit ${{PIPESTATUS[0]}}", "bash", script],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr == ""


def test_a_terminal_without_unicode_is_no_traceback():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run(
        [sys.executable, "-m", "marscli", "generate", "--help"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0
    assert "\\u03c4" in result.stdout


def test_module_and_script_are_the_same_command():
    module = subprocess.run([sys.executable, "-m", "marscli", "bogus"], capture_output=True, text=True)
    assert module.returncode == 2
    assert module.stderr.startswith("error: no such command 'bogus'")


@pytest.mark.parametrize(("no_color", "colour"), [("", True), ("1", False)])
def test_colour_only_on_a_terminal_and_not_with_no_color(no_color, colour):
    """A pseudo-terminal as stderr: `script` is not everywhere, so Python's own."""
    import pty

    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": no_color}
    subprocess.run([sys.executable, "-m", "marscli", "bogus"], stderr=follower, env=environment)
    os.close(follower)
    text = os.read(leader, 4096).decode()
    os.close(leader)
    assert "no such command" in text
    assert ("\x1b[" in text) is colour


def test_a_note_beside_a_bar_gets_a_line_of_its_own():
    import pty

    leader, follower = pty.openpty()
    program = (
        "from marscli.cli import console\n"
        "with console.progress('working', total=1) as advance: advance(); console.note('said meanwhile')"
    )
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", program], stderr=follower, env=environment)
    os.close(follower)
    text = os.read(leader, 65536).decode()
    os.close(leader)
    before, _, _ = text.partition("said meanwhile")
    assert before != text
    assert re.sub(r"\x1b\[[0-9;]*m", "", before).endswith(("\x1b[2K", "\n"))  # the bar's line was wiped
