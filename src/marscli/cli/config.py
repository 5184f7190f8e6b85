"""``--config FILE.yaml``: any option by its long name; precedence is defaults < file < flags.

A command gets it by the parameter ``config: options.Config = None`` and need not look at it: the file is read before
the other options are, becomes their defaults, and so also satisfies required ones.

    model: HuggingFaceTB/SmolLM2-135M-Instruct
    max-new-tokens: 64          # max_new_tokens works too
    threshold: [exact, 0.95]    # a list option takes a list, or "exact,0.95"
"""

import difflib
from pathlib import Path
from typing import Any

import typer

from marscli.errors import InputError


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read the file into the context's defaults (the callback of the ``--config`` option).

    Raises:
        InputError: The file is missing or no YAML mapping, or a key is unknown, double or of the wrong kind.
    """
    if path is None or ctx.resilient_parsing:
        return path
    names = {
        option.removeprefix("--"): param
        for param in ctx.command.params
        for option in getattr(param, "opts", [])
        if option.startswith("--") and option not in ("--config", "--help")
    }
    negative = {option.removeprefix("--"): param for param in ctx.command.params for option in param.secondary_opts}
    defaults: dict[str, Any] = {}
    for key, value in _read_mapping(path).items():
        name = str(key).replace("_", "-")
        if name in negative and isinstance(value, bool):  # no-stream: true
            name, value = negative[name].opts[0].removeprefix("--"), not value
        param = names.get(name)
        if param is None:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
            raise InputError(
                f"--config {path}: unknown key {str(key)!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"`{ctx.command_path} --help` lists the keys",
            )
        assert param.name is not None
        if param.name in defaults:
            raise InputError(f"--config {path}: {str(key)!r} is given twice", hint="keep one of the two spellings")
        if value is not None:
            defaults[param.name] = _default_for(param, value, f"--config {path}: {str(key)!r}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _default_for(param: Any, value: Any, where: str) -> Any:
    """Give the value the form that the option's parser expects: text, truth or a list of texts."""
    if isinstance(value, dict):
        raise InputError(f"{where} takes a plain value, not a mapping", hint="write `option: value` lines only")
    if getattr(param, "multiple", False):
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        raise InputError(f"{where} takes one value, not a list", hint="give a single value")
    return value if isinstance(value, bool) else str(value)


def _read_mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"--config {path}: no such file", hint="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read ({error})", hint="give a YAML text file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"--config {path}{line}: {problem}", hint="write one `option: value` a line") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"--config {path}: not a mapping of options", hint="write one `option: value` a line")
    return data
