"""Going on with a run that broke off: what it had done, and whether its settings are those of this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marscli.errors import InputError
from marscli.evaluation.config import EvalConfig

# Options that change no result.
_FREE = ("output_dir", "resume", "force", "paper_reference")


def earlier_document(folder: Path, config: EvalConfig, versions: Mapping[str, str | None]) -> dict[str, Any] | None:
    """The result document of the run that ``--resume`` goes on with.

    Args:
        folder: The output folder.
        config: This run.
        versions: This run's, as `marscli.meta.versions` gives them.

    Returns:
        The document; None if no task had ended.

    Raises:
        InputError: It is not one of ours, or its settings, its model or its libraries were others: says which.
    """
    path = folder / "results.json"
    if not path.exists():
        return None
    document = read_document(path, "--resume")
    mine = {
        **config.resolved(),
        "model's files": model_files(config.model),
        **{f"version of {name}": version for name, version in versions.items()},
    }
    theirs = {
        **document["meta"]["options"],
        "model's files": document["mars"].get("model_files"),
        **{f"version of {name}": version for name, version in document["meta"]["versions"].items()},
    }
    for name in mine:
        if name not in _FREE and theirs.get(name) != mine[name]:
            option = f"--{name.replace('_', '-')}" if name in config.resolved() else name
            raise InputError(
                f"--resume: {path} is of a run with another {option}: {_shown(theirs.get(name))}, "
                f"now {_shown(mine[name])}",
                hint="give the same settings, or another --output-dir, or --force to begin anew",
            )
    return document


def read_document(path: Path, option: str) -> dict[str, Any]:
    """Read a ``results.json`` of ``mars eval``.

    Raises:
        InputError: It is not there, broken, or another program's.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _ = document["mars"]["runs"], document["meta"]["options"]
    except OSError as error:
        raise InputError(
            f"{option} {path}: cannot be read ({error.strerror or error})",
            hint="name a results.json that mars eval wrote, or its folder",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{option} {path}: not a result of mars eval", hint="name a results.json that mars eval wrote"
        ) from error
    return dict(document)


def model_files(model: str) -> dict[str, str] | None:
    """Size and time of a local checkpoint's files, to notice that it was trained anew; None for a Hub id."""
    path = Path(model)
    if not path.exists():
        return None
    kinds = (".safetensors", ".json", ".jinja")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in kinds)
    return {file.name: f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)[:200]
