"""lm-eval's tasks: names found and checked, then built, with data sets read from a local folder where there is one.

Everything here happens before a model is loaded, so whatever is wrong with a task is an `InputError`. It ignores how a
task is scored: that is lm-eval's own business.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind

from marscli.errors import InputError, MarsError
from marscli.evaluation.code_eval import CodeEval, run_program
from marscli.evaluation.suites import BENCHMARKS, PAPER
from marscli.evaluation.task_names import check_names, has_wildcard, own_names, unknown_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks, ready to run.

    Attributes:
        tasks: Every leaf task by name, in the order asked for.
        groups: Every group by name.
        paper: Leaf tasks of ``--tasks paper``, with the paper's number of examples where it is not the task's own.
        stand_ins: Tasks whose local data set says itself that it only stands in for the real one, with its words.
    """

    tasks: dict[str, Task]
    groups: dict[str, Group]
    paper: dict[str, int | None] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)


def load_tasks(
    names: Sequence[str],
    *,
    include_path: Sequence[Path] = (),
    data_root: Path | None = None,
    confirm_run_unsafe_code: bool = False,
) -> LoadedTasks:
    """Find and build tasks.

    Args:
        names: Names of tasks, groups or tags; wildcards are matched against all names; ``paper`` is the paper's six.
        include_path: Folders with further task files; their tasks win over lm-eval's of the same name.
        data_root: Data set ``org/name`` is read from ``data_root/org/name`` if that folder exists.
        confirm_run_unsafe_code: Whether tasks that run the model's code are allowed.

    Raises:
        InputError: A name is unknown, a task needs consent, a package or a data set that is not at hand, or it is asked
            for twice.
    """
    six = BENCHMARKS if PAPER in names else ()
    names = [name for name in names if name != PAPER] + [benchmark.task for benchmark in six]
    manager, names = _index(names, include_path)
    index = manager.task_index
    leaves = list(dict.fromkeys(leaf for name in names for leaf in _leaves(index, name)))
    unsafe = _check_consent(index, leaves, confirm_run_unsafe_code)
    with _local_datasets(data_root), _local_code_eval() if unsafe else nullcontext():
        loaded = _build(manager, names)
    for name, task in loaded["tasks"].items():
        _check_metrics(name, task)
    if not loaded["tasks"]:
        raise InputError(f"--tasks {','.join(names)}: holds no task", hint="--list-tasks shows all names")
    return LoadedTasks(
        loaded["tasks"],
        loaded.get("groups", {}),
        {leaf: benchmark.num_fewshot for benchmark in six for leaf in _leaves(index, benchmark.task)},
        _stand_ins(loaded["tasks"], data_root),
    )


def list_tasks(include_path: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """Every name that ``--tasks`` takes, with what it is: ``task``, ``group`` or ``tag``."""
    index = _manager(tuple(include_path)).task_index
    kinds = {name: "task" if _is_leaf(entry) else entry.kind.name.lower() for name, entry in index.items()}
    return sorted({**kinds, PAPER: "group"}.items())


def _manager(include_path: tuple[Path, ...]) -> TaskManager:
    """lm-eval's own tasks, which are read once a process, and the user's, which may change meanwhile."""
    logger.info("reading lm-eval's own 13,000 task files, which takes a while")
    return TaskManager(include_path=list(include_path)) if include_path else _own_tasks()


@cache
def _own_tasks() -> TaskManager:
    return TaskManager()


def _index(names: Sequence[str], include_path: Sequence[Path]) -> tuple[TaskManager, list[str]]:
    """Read the task files that are needed, and resolve names against them.

    Parsing all of lm-eval's own 13,000 takes half a minute, so the user's folders are tried by themselves first, and
    then those of lm-eval's folders in which the names stand.
    """
    if include_path:
        manager = TaskManager(include_path=list(include_path), include_defaults=False)
        if all(_is_self_contained(manager.task_index, name) for name in names):
            return manager, list(names)
    check_names(names, include_path)
    if not any(has_wildcard(name) for name in names):
        manager = _partial_manager(names, include_path)
        if all(_is_self_contained(manager.task_index, name) for name in names) and not _has_spread_tag(manager, names):
            return manager, list(names)
    manager = _manager(tuple(include_path))
    found: list[str] = []
    for name in names:
        if name in manager.task_index:
            found.append(name)
            continue
        matches = fnmatch.filter(manager.all_tasks, name) if has_wildcard(name) else []
        if not matches:
            raise unknown_name(name, manager.all_tasks)
        found += matches
    return manager, list(dict.fromkeys(found))


def _partial_manager(names: Sequence[str], include_path: Sequence[Path]) -> TaskManager:
    """Read the user's folders and those of lm-eval's that the names, or what their groups hold, may stand in."""
    wanted, folders = set(names), None
    while True:
        needed = own_names().folders(wanted)
        if needed != folders:
            folders = needed
            manager = TaskManager(include_path=[*folders, *include_path], include_defaults=False)
        found = {inner for name in names for inner in _mentioned(manager.task_index, name)}
        if found <= wanted:
            return manager
        wanted |= found


def _has_spread_tag(manager: TaskManager, names: Sequence[str]) -> bool:
    """Whether a tag stands in several of lm-eval's folders: read one by one, the last would hide the others."""
    index = manager.task_index
    mentioned = {inner for name in names for inner in _mentioned(index, name) if inner in index}
    return any(len(own_names().folders([name])) > 1 for name in mentioned if index[name].kind is Kind.TAG)


def _is_self_contained(index: dict[str, Entry], name: str) -> bool:
    return name in index and all(leaf in index for leaf in _leaves(index, name))


def _is_leaf(entry: Entry) -> bool:
    return entry.kind in (Kind.TASK, Kind.PY_TASK)


def _leaves(index: dict[str, Entry], name: str) -> Iterator[str]:
    """Names of the tasks that a task, group or tag stands for; a name that the index lacks stands for itself."""
    return (inner for inner in _mentioned(index, name) if inner not in index or _is_leaf(index[inner]))


def _mentioned(index: dict[str, Entry], name: str) -> Iterator[str]:
    """A name, and all names of groups, tags and tasks below it."""
    yield name
    entry = index.get(name)
    if entry is not None and entry.kind is Kind.TAG:
        yield from sorted(entry.tags)
    elif entry is not None and not _is_leaf(entry):
        yield from _members(index, entry.cfg or {})


def _members(index: dict[str, Entry], config: dict[str, Any]) -> Iterator[str]:
    members = config.get("task") or []
    for member in members if isinstance(members, list) else [members]:
        if isinstance(member, str):
            yield from _mentioned(index, member)
        elif member.get("group") in index:
            yield from _mentioned(index, member["group"])
        elif "group" in member:
            yield from _members(index, member)  # a group that is written out inside another
        else:
            yield from _mentioned(index, member["task"])


def _check_consent(index: dict[str, Entry], leaves: Sequence[str], consent: bool) -> bool:
    """Whether any task runs generated code; refused without consent, before one is built: HumanEval then runs some."""
    unsafe = [name for name in leaves if name in index and (index[name].cfg or {}).get("unsafe_code")]
    if unsafe and not consent:
        raise InputError(
            f"--tasks: {unsafe[0]} runs code that the model writes, on this machine",
            hint="add --confirm-run-unsafe-code if that is all right, best inside a container",
        )
    return bool(unsafe)


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


_STAND_IN = re.compile(r"^a stand-in\b.*", re.IGNORECASE | re.MULTILINE)


def _stand_ins(tasks: dict[str, Task], root: Path | None) -> dict[str, str]:
    """Tasks whose folder in ``--data-root`` begins a line of its README with "A stand-in", and that line."""
    found = {}
    for name, task in tasks.items():
        readme = None if root is None else root / str(task.get_config("dataset_path")) / "README.md"
        said = readme and readme.is_file() and _STAND_IN.search(readme.read_text(encoding="utf-8"))
        if said:
            found[name] = said[0].strip()
    return found


def _check_metrics(name: str, task: Task) -> None:
    """Refuse a task whose metric could not be had: lm-eval only logs that, and fails when all answers are there."""
    metrics = getattr(task, "_metric_fn_list", {})
    scored_by_task = getattr(task.config, "process_results", None) is not None
    missing = [metric for metric, function in metrics.items() if function is None]
    if missing and not scored_by_task:
        raise InputError(
            f"{name}: metric {missing[0]} is neither lm-eval's own nor reachable in the library `evaluate` on the Hub",
            hint="run the task once where the Hugging Face Hub can be reached, or leave it out",
        )
    if "ifeval" in name:
        import nltk

        try:
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError:
            raise InputError(
                f"{name}: NLTK's punkt_tab, which the metric needs, is not here and could not be downloaded",
                hint="run `python -m nltk.downloader punkt_tab` where there is a network; NLTK_DATA names its folder",
            ) from None


@contextmanager
def _local_code_eval() -> Iterator[None]:
    """Give tasks our `CodeEval` where they load the metric ``code_eval``, which `evaluate` would fetch from the Hub."""
    said = "there are no process limits on this system" if os.name != "posix" else run_program("")
    if said != "passed":  # every answer would be counted as wrong
        raise InputError(
            f"--tasks: programs that a model wrote cannot be run on this machine: {said}",
            hint="leave tasks such as HumanEval out, or run them on Linux",
        )
    import evaluate  # takes seconds, and only tasks that run code need it here

    original = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return CodeEval() if path == "code_eval" else original(path, *args, **kwargs)

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = original


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
