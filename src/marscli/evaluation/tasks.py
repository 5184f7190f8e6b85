"""lm-eval's tasks: names found and checked, then built, with data sets read from a local folder where there is one.

Everything here happens before a model is loaded, so whatever is wrong with a task is an `InputError`. It ignores how a
task is scored: that is lm-eval's own business.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind

from marscli.errors import InputError, MarsError


def load_tasks(
    names: Sequence[str],
    *,
    include_path: Sequence[Path] = (),
    data_root: Path | None = None,
    confirm_run_unsafe_code: bool = False,
) -> tuple[dict[str, Task], dict[str, Group]]:
    """Find and build tasks.

    Args:
        names: Names of tasks, groups or tags; wildcards are matched against all names.
        include_path: Folders with further task files; their tasks win over lm-eval's of the same name.
        data_root: Data set ``org/name`` is read from ``data_root/org/name`` if that folder exists.
        confirm_run_unsafe_code: Whether tasks that run the model's code are allowed.

    Returns:
        Every leaf task by name, in the order asked for, and every group by name.

    Raises:
        InputError: A name is unknown, a task needs consent, a package or a data set that is not at hand, or it is asked
            for twice.
    """
    manager, names = _index(names, include_path)
    leaves = list(dict.fromkeys(leaf for name in names for leaf in _leaves(manager.task_index, name)))
    _check_consent(manager.task_index, leaves, confirm_run_unsafe_code)
    with _local_datasets(data_root):
        loaded = _build(manager, names)
    if not loaded["tasks"]:
        raise InputError(f"--tasks {','.join(names)}: holds no task", hint="--list-tasks shows all names")
    return loaded["tasks"], loaded.get("groups", {})


def list_tasks(include_path: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """Every name that ``--tasks`` takes, with what it is: ``task``, ``group`` or ``tag``."""
    index = _manager(tuple(include_path)).task_index
    return [(name, "task" if _is_leaf(index[name]) else index[name].kind.name.lower()) for name in sorted(index)]


def _manager(include_path: tuple[Path, ...]) -> TaskManager:
    """lm-eval's own tasks, which are read once a process, and the user's, which may change meanwhile."""
    return TaskManager(include_path=list(include_path)) if include_path else _own_tasks()


@cache
def _own_tasks() -> TaskManager:
    return TaskManager()


def _index(names: Sequence[str], include_path: Sequence[Path]) -> tuple[TaskManager, list[str]]:
    """Read the task files that are needed, and resolve names against them.

    Reading all of lm-eval's own 13,000 takes many seconds, so the user's folders are tried by themselves first.
    """
    if include_path:
        manager = TaskManager(include_path=list(include_path), include_defaults=False)
        if all(_is_self_contained(manager.task_index, name) for name in names):
            return manager, list(names)
    manager = _manager(tuple(include_path))
    found: list[str] = []
    for name in names:
        if name in manager.task_index:
            found.append(name)
            continue
        matches = fnmatch.filter(manager.all_tasks, name) if any(c in name for c in "*?[") else []
        if not matches:
            raise _unknown(name, manager.all_tasks)
        found += matches
    return manager, list(dict.fromkeys(found))


def _is_self_contained(index: dict[str, Entry], name: str) -> bool:
    return name in index and all(leaf in index for leaf in _leaves(index, name))


def _is_leaf(entry: Entry) -> bool:
    return entry.kind in (Kind.TASK, Kind.PY_TASK)


def _leaves(index: dict[str, Entry], name: str) -> Iterator[str]:
    """Names of the tasks that a task, group or tag stands for; a name that the index lacks stands for itself."""
    entry = index.get(name)
    if entry is None or _is_leaf(entry):
        yield name
    elif entry.kind is Kind.TAG:
        yield from sorted(entry.tags)
    else:
        yield from _members(index, entry.cfg or {})


def _members(index: dict[str, Entry], config: dict[str, Any]) -> Iterator[str]:
    members = config.get("task") or []
    for member in members if isinstance(members, list) else [members]:
        if isinstance(member, str):
            yield from _leaves(index, member)
        elif member.get("group") in index:
            yield from _leaves(index, member["group"])
        elif "group" in member:
            yield from _members(index, member)  # a group that is written out inside another
        else:
            yield from _leaves(index, member["task"])


def _check_consent(index: dict[str, Entry], leaves: Sequence[str], consent: bool) -> None:
    """Refuse tasks that run generated code, before building one: building HumanEval already runs a piece of code."""
    unsafe = [name for name in leaves if name in index and (index[name].cfg or {}).get("unsafe_code")]
    if unsafe and not consent:
        raise InputError(
            f"--tasks: {unsafe[0]} runs code that the model writes, on this machine",
            hint="add --confirm-run-unsafe-code if that is all right, best inside a container",
        )
    if unsafe:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric's own switch for the same consent


def _build(manager: TaskManager, names: list[str]) -> Any:
    """Have lm-eval build the tasks, and say what is missing where it cannot."""
    asked = ", ".join(names)
    try:
        return manager.load(names)
    except MarsError:
        raise
    except ModuleNotFoundError as error:
        raise InputError(
            f"--tasks {asked}: needs the Python package {error.name}, which is not installed",
            hint=f"pip install {error.name}, or the extra that lm-eval names for this task",
        ) from error
    except ValueError as error:
        if "Duplicate task" not in str(error):
            raise _cannot_build(asked, error) from error
        raise InputError(f"--tasks: {error}", hint="name either the group or the task, not both") from error
    except Exception as error:  # task files hold code of their own, which may fail in any way
        raise _cannot_build(asked, error) from error


def _cannot_build(asked: str, error: Exception) -> InputError:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError):
        return InputError(
            f"--tasks {asked}: a file that the task needs cannot be read or downloaded: {text}",
            hint="run it once where the Hugging Face Hub can be reached, or leave the task out",
        )
    return InputError(f"--tasks {asked}: lm-eval cannot build the task: {text}", hint="check the task's YAML file")


def _unknown(name: str, known: Sequence[str]) -> InputError:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    near += [other for other in sorted(known, key=len) if name.lower() in other.lower() and other not in near]
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "--list-tasks shows all names"
    return InputError(f"--tasks: there is no task, group or tag {name!r}", hint=hint)


def _cache_for(folder: Path) -> str:
    """A cache of its own for the present content of a local data set.

    `datasets` tells local folders apart by their last name alone: without this it would go on using another folder's
    data, or an old version of the file.
    """
    digest = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "marscli" / digest.hexdigest()[:16])


@contextmanager
def _local_datasets(root: Path | None) -> Iterator[None]:
    """Let `datasets.load_dataset` look into a folder first, and explain what it cannot find.

    lm-eval and the tasks that are Python code all read their data through this one function, and a task's configuration
    keeps naming the data set by its id on the Hub.
    """
    original = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        local = None if root is None else root / path
        if local is not None and local.is_dir():
            try:
                return original(str(local), name, *args, **{"cache_dir": _cache_for(local), **kwargs})
            except (ValueError, OSError) as error:
                raise InputError(
                    f"--data-root: {local} cannot be read as data set {path}{f', {name}' if name else ''}: "
                    f"{' '.join(str(error).split())}",
                    hint="lay it out as on the Hub: a README.md whose `configs:` names the files of each split",
                ) from error
        try:
            return original(path, name, *args, **kwargs)
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError, FileNotFoundError, TimeoutError) as error:
            where = f" and is not in --data-root {root}" if root is not None else ""
            raise InputError(
                f"data set {path} cannot be reached on the Hugging Face Hub{where}: {' '.join(str(error).split())}",
                hint=f"without a network put it into DIR/{path} and pass --data-root DIR; "
                "for a gated data set run `hf auth login` first",
            ) from error

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = original
