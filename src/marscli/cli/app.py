"""The ``mars`` command: subcommands, exit codes, and the one form in which errors are shown.

`run` is `main` without leaving the process: tests and other programs call it with a list of arguments and get the exit
code back.

Exit codes: 0 done · 2 wrong usage or input, found before a model is loaded · 1 the run failed later · 130 Ctrl-C.
"""

import difflib
import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import marscli
from marscli.cli import console
from marscli.cli.bench import bench
from marscli.cli.eval import eval_
from marscli.cli.generate import generate
from marscli.cli.train import train

# Newer typer carries a click of its own; this finds the exceptions of whichever click it uses.
_click_exceptions = sys.modules[typer.BadParameter.__module__]


class Command(TyperCommand):
    """A command whose ``--help`` groups the options under plain headings.

    Rich panels would cost a fifth of a second of imports, and squeeze the descriptions into a third of the line.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one definition list a panel, in the order in which the command first names them."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Help"
                panels.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(TyperGroup):
    """The commands, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one definition list."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_paragraph(self.commands[name])) for name in self.list_commands(ctx)])


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


app = typer.Typer(
    name="mars",
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    # `--max_new_tokens` is what users of other tools have in their fingers.
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["--help", "-h"],
        "max_content_width": 110,
    },
)

for _command in (train, generate, bench, eval_):
    app.command(_command.__name__.rstrip("_"), cls=Command)(_command)


def _show_version(value: bool) -> None:
    if value:
        console.echo(f"marscli {marscli.__version__}")
        raise typer.Exit


@app.callback()
def _mars(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make any instruction-tuned language model write several tokens per forward pass.

    \b
    mars train -m Qwen/Qwen2.5-0.5B-Instruct -d data.jsonl -o runs/mars
    mars generate -m runs/mars "Why is the sky blue?" --threshold 0.95
    mars bench -m runs/mars -o runs/bench
    mars eval -m runs/mars --tasks gsm8k -o runs/eval
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show τ must not end a run
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line in this process.

    Args:
        argv: The arguments after ``mars``; the process's own by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    debug = "--debug" in arguments
    console.configure(debug=debug)
    try:
        root = typer.main.get_command(app)
        help_text = _help(root, arguments)
        if help_text is not None:
            console.echo(help_text)
            return 0
        code = root.main(args=arguments, prog_name="mars", standalone_mode=False)
        if code == 130:  # the parser's way to pass on Ctrl-C
            raise KeyboardInterrupt
    except _click_exceptions.UsageError as error:
        console.show_error(*_explain(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        console.note("interrupted")
        return 130
    except Exception as error:
        return console.show_exception(error, debug=debug)
    finally:
        console.restore()
    return code if isinstance(code, int) else 0


def _help(root: Any, arguments: list[str]) -> str | None:
    """Answer ``--help`` before anything is parsed: the parser's type conversion is what takes longest to import."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if {"--help", "-h"}.isdisjoint(options):
        return None
    context = root.context_class(root, info_name="mars", **root.context_settings)
    if arguments[0] in root.commands:
        command = root.commands[arguments[0]]
        context = command.context_class(command, parent=context, info_name=arguments[0])
    elif not arguments[0].startswith("-"):
        return None  # an unknown command: the parser has the right error for it
    return str(context.get_help())


def _explain(error: Any) -> tuple[str, str]:
    """Turn a usage error of the argument parser into our message and hint."""
    context = error.ctx
    command = context.command_path if context is not None else "mars"
    more = f"`{command} --help` shows the options and examples"
    if isinstance(error, _click_exceptions.NoSuchOption):
        return f"no such option: {error.option_name}", _near_option(error.option_name, context) or more
    if isinstance(error, _click_exceptions.MissingParameter):
        name = _parameter_name(error)
        text = getattr(error.param, "help", None)
        return f"missing {name}", f"{name}: {text}" if text else more
    if isinstance(error, typer.BadParameter):
        return f"{_parameter_name(error)}: {_sentence(error.message)}{_origin(error)}", more
    message, _, suggestion = _sentence(error.format_message()).partition(". Did you mean ")
    return message, f"did you mean {suggestion}" if suggestion else more


def _near_option(option: str, context: Any) -> str | None:
    """What a wrong option was probably meant to be: a slip of the fingers, a beginning, or another command's."""
    if context is None:
        return None
    name = option.replace("_", "-").lstrip("-")
    known = _options(context.command)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    near = near or [other for other in known if len(name) > 2 and other.startswith(name)][:1]
    if near:
        return f"did you mean --{near[0]}?"
    commands = getattr(context.find_root().command, "commands", {})
    others = [f"`mars {command}`" for command in commands if name in _options(commands[command])]
    return f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else None


def _options(command: Any) -> list[str]:
    names = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    return [name.removeprefix("--") for name in names if name.startswith("--")]


def _parameter_name(error: Any) -> str:
    if error.param is None:
        return "input"
    options = [option for option in error.param.opts if option.startswith("-")]
    return "/".join(options) if options else str(error.param.name).upper()


def _origin(error: Any) -> str:
    """Name the config file where the bad value came from it."""
    context, param = error.ctx, error.param
    if context is None or param is None:
        return ""
    source = context.get_parameter_source(param.name)
    return (
        f" (from --config {context.params.get('config')})"
        if source is not None and source.name == "DEFAULT_MAP"
        else ""
    )


def _sentence(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip().rstrip(".").removeprefix("value error, ").removeprefix("Value error, ")
    return text[:1].lower() + text[1:]
