"""The ``meta`` object of JSON result files: what ran, where, with which settings.

    meta = collect_meta(cfg, seed=cfg.seed, device=checkpoint.device, dtype=checkpoint.dtype)
    write_json(folder / "results.json", {"meta": meta, "rows": rows})

`cfg` is the command's config dataclass (or a mapping): the options as resolved. Further facts go in as keywords. Call
it after the model is loaded, since it asks torch for its thread count.
"""

import dataclasses
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import marscli

_PACKAGES = ("torch", "transformers", "lm-eval", "datasets", "accelerate")


def collect_meta(options: Any, *, seed: int | None, device: Any, dtype: Any, **extra: Any) -> dict[str, Any]:
    """Describe a run.

    Args:
        options: Config dataclass or mapping with every option as resolved.
        seed: The seed of the run, if it has one.
        device: ``torch.device`` or its name.
        dtype: ``torch.dtype`` or its name; ``torch.`` is stripped.
        extra: Further keys, such as ``partial=True``.

    Returns:
        A mapping that `marscli.output.to_json` can write.
    """
    import torch

    resolved = options if isinstance(options, Mapping) else _fields(options)
    return {
        "versions": versions(),
        "git_commit": git_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if str(device).startswith("cuda") else platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in resolved.items()},
        "command": shlex.join(["mars", *sys.argv[1:]]),
        **extra,
    }


def versions() -> dict[str, str | None]:
    """Versions of marscli, Python and the libraries that decide results; None for what is not installed."""
    found: dict[str, str | None] = {"marscli": marscli.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package.replace("-", "_")] = None
    return found


def git_commit() -> str | None:
    """The commit of marscli's own source, where it runs from a checkout; None when installed as a package."""
    folder = Path(__file__).parent
    try:
        # A package installed inside another project's checkout must not report that project's commit.
        for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
            result = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10)
            if result.returncode != 0:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip()


def _fields(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
