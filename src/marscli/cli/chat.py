"""``mars generate --chat``: a dialogue in the terminal. Answers go to stdout, everything else to stderr."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from marscli.cli import console
from marscli.cli.show import Totals, show_stream
from marscli.core.params import exact_number
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.prompts import PromptRow

if TYPE_CHECKING:
    from marscli.checkpoint import Checkpoint

HELP = """/threshold τ      what may be kept unverified: exact, or a number such as 0.8
/verify on|off    let the next forward verify what τ did not pass
/reset            forget the dialogue
/quit             leave; Ctrl-D does too
Ctrl-C breaks off an answer."""


class Chat:
    """A dialogue with a loaded model.

    Args:
        checkpoint: The model.
        cfg: The options; ``/threshold`` and ``/verify`` change them.
        trace: Colour answers by how many tokens came from one forward.
    """

    def __init__(self, checkpoint: "Checkpoint", cfg: GenerateConfig, *, trace: bool = False) -> None:
        self.checkpoint = checkpoint
        self.cfg = cfg
        self.trace = trace
        self.messages: list[dict[str, str]] = []

    def run(self, first: str | None = None) -> None:
        """Talk until the user leaves.

        Args:
            first: The first thing that the user says.
        """
        console.note("a dialogue: /help shows what there is, /quit leaves")
        line = first if first is not None else _read_line()
        while line is not None and line.strip() != "/quit":
            try:
                if line.startswith("/"):
                    self._obey(*line.split(maxsplit=1))
                elif line.strip():
                    self._answer(line)
            except InputError as error:
                console.show_error(error.message, error.hint)
            line = _read_line()

    def _obey(self, command: str, argument: str = "") -> None:
        argument = argument.strip()
        if command == "/help":
            console.note(HELP)
        elif command == "/reset":
            self.messages = []
            console.note("forgotten")
        elif command == "/threshold" and argument:
            cfg = replace(self.cfg, threshold=argument)
            if self.checkpoint.block_size is None and cfg.params(1).threshold is not None:
                raise InputError(
                    f"{self.checkpoint.name} was never MARS-trained", hint="it decodes with /threshold exact only"
                )
            self.cfg = cfg
            console.note(f"τ is {argument} from here on")
        elif command == "/verify" and argument in ("on", "off"):
            self.cfg = replace(self.cfg, verify=argument == "on", draft_tokens=None)
            console.note(f"verified decoding is {argument} from here on")
        else:
            raise InputError(f"{command} {argument}".rstrip() + " is no command", hint="/help shows what there is")

    def _answer(self, text: str) -> None:
        """Say something to the model. Of a broken-off answer the dialogue keeps what was shown."""
        from marscli.generation import api

        user = {"role": "user", "content": text}
        preparation = api.Preparation(self.checkpoint, self.cfg)
        try:
            job = preparation.job(PromptRow(messages=[*self.messages, user]))
        except InputError as error:
            raise InputError(error.message, hint="say less, or /reset forgets the dialogue") from error
        stream = api.TextStream(self.checkpoint, job, self.cfg)
        started = time.perf_counter()
        try:
            result = show_stream(stream, trace=self.trace)
        except KeyboardInterrupt:
            console.echo("")
            console.note("interrupted")
        else:
            totals = Totals(exact_number(self.cfg.confidence))
            totals.add(result)
            console.note(totals.footer(time.perf_counter() - started))
        if stream.text:
            self.messages += [user, {"role": "assistant", "content": stream.text}]


def _read_line() -> str | None:
    """What the user types; None at the end. Ctrl-C drops the line."""
    while True:
        try:
            if sys.stdin.isatty():
                import readline  # noqa: F401  # gives `input` editing and a history

                return input("> " if sys.stdout.isatty() else "")
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            console.echo("")
            return None
        except KeyboardInterrupt:
            console.echo("")
            console.note("/quit leaves")
