"""The dialogue: driven through pipes for what it says, and through a pseudo-terminal for Ctrl-C."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

import marscli
from marscli.cli.app import run
from marscli.cli.chat import Chat
from marscli.generation.config import GenerateConfig


@pytest.fixture(scope="module")
def checkpoint(mars_model):
    return marscli.load(str(mars_model), device="cpu", dtype="float32")


def talk(checkpoint, monkeypatch, *said, first=None, **options):
    """Let a dialogue run to the end of what is said; returns it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in said)))
    dialogue = Chat(checkpoint, GenerateConfig(max_new_tokens=6, **options))
    dialogue.run(first)
    return dialogue


def in_a_terminal(arguments, *keys, timeout=240):
    """Run the command with a pseudo-terminal as all its streams; keys are (text to wait for, what to type then)."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "marscli", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
        # a test run started in the background of a script passes an ignored SIGINT on to its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(follower)
    shown, waiting, seen = "", list(keys), 0
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        while waiting and waiting[0][0] in shown[seen:]:
            awaited, typed = waiting.pop(0)
            seen += shown[seen:].index(awaited) + len(awaited)
            if typed == "\x03":
                time.sleep(1)  # the prompt is shown a moment before the process waits for a line
                process.send_signal(signal.SIGINT)
            else:
                os.write(leader, typed.encode())
        if not select.select([leader], [], [], 1)[0]:
            continue
        try:
            shown += os.read(leader, 65536).decode(errors="replace")
        except OSError:
            break
    else:
        process.kill()
    process.wait()
    os.close(leader)
    assert not waiting, shown
    assert process.returncode == 0, shown
    return shown


def test_answers_and_what_the_model_is_told(checkpoint, monkeypatch, capsys):
    dialogue = talk(checkpoint, monkeypatch, "Why?", "", "And?", "/quit", "never said")
    out, err = capsys.readouterr()
    first, second = (message["content"] for message in dialogue.messages if message["role"] == "assistant")
    assert out == f"{first}\n{second}\n"
    assert [m["content"] for m in dialogue.messages if m["role"] == "user"] == ["Why?", "And?"]
    user, assistant = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": first}
    assert marscli.generate(checkpoint, [user], max_new_tokens=6)[0].text == first
    again = marscli.generate(checkpoint, [user, assistant, {"role": "user", "content": "And?"}], max_new_tokens=6)
    assert again[0].text == second
    assert err.count(" tokens/forward · ") == 2


def test_commands(checkpoint, monkeypatch, capsys):
    dialogue = talk(checkpoint, monkeypatch, "/help", "/threshold 0.5", "/verify off", first="Why?")
    assert (dialogue.cfg.threshold, dialogue.cfg.verify) == ("0.5", False)
    assert "/verify on|off" in capsys.readouterr().err
    dialogue = talk(checkpoint, monkeypatch, "Why?", "/reset", "/threshold exact", "/verify on")
    assert dialogue.messages == []
    assert (dialogue.cfg.threshold, dialogue.cfg.verify) == ("exact", True)


@pytest.mark.parametrize("line", ["/threshold 2", "/threshold", "/verify maybe", "/what", "/threshold high"])
def test_wrong_commands_are_refused_and_the_dialogue_goes_on(line, checkpoint, monkeypatch, capsys):
    dialogue = talk(checkpoint, monkeypatch, line, "Why?")
    out, err = capsys.readouterr()
    assert "error: " in err
    assert "hint: " in err
    assert len(dialogue.messages) == 2
    assert out


def test_a_dialogue_that_outgrows_the_context_says_what_to_do(checkpoint, monkeypatch, capsys):
    dialogue = talk(checkpoint, monkeypatch, "Why?", "word " * 60, "/reset", "Why?")
    assert "/reset forgets the dialogue" in capsys.readouterr().err
    assert len(dialogue.messages) == 2


def test_a_plain_model_and_one_without_a_template(plain_model, monkeypatch, capsys):
    assert run(["generate", "-m", str(plain_model), "--chat"]) == 2
    assert "messages need a chat template" in capsys.readouterr().err
    plain = marscli.load(str(plain_model))
    talk(plain, monkeypatch, "/threshold 0.5")
    assert "never MARS-trained" in capsys.readouterr().err


def test_ctrl_c_breaks_off_an_answer_and_not_the_dialogue(checkpoint, monkeypatch, capsys):
    class Interrupted:
        """A stream that the user breaks off after its first chunk."""

        text = ""

        def __init__(self, *_):
            pass

        def __iter__(self):
            self.text = "Because"
            yield "Because"
            raise KeyboardInterrupt

    monkeypatch.setattr("marscli.generation.api.TextStream", Interrupted)
    dialogue = talk(checkpoint, monkeypatch, "Why?", "/verify off")
    assert [message["content"] for message in dialogue.messages] == ["Why?", "Because"]
    assert not dialogue.cfg.verify
    assert "interrupted" in capsys.readouterr().err


def test_a_dialogue_in_a_terminal(mars_model):
    shown = in_a_terminal(
        [*["generate", "--chat", "--trace", "-n", "12", "--threshold", "1e-9", "--no-verify"], "-m", str(mars_model)],
        ("> ", "Why?\n"),
        ("tokens/forward", ""),
        ("> ", "\x03"),
        ("/quit leaves", ""),
        ("> ", "/quit\n"),
    )
    assert "Traceback" not in shown
    assert "\x1b[33m" in shown  # four tokens from one forward
    assert "tokens from one forward:" in shown
