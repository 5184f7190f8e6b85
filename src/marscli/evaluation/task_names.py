"""Which folder of lm-eval's task files defines which name: known in under a second, without parsing 14,000 YAML files.

lm-eval's own index takes half a minute on a slow machine. This looks for the lines that name a task, group or tag, as
text, so that a misspelt name is refused at once and only the folders that are needed are parsed. It may know too many
names, never too few: `tasks` asks lm-eval's index in the end.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from marscli.errors import InputError
from marscli.evaluation.suites import PAPER

# At the start of a line: `task: name`, `"group": "name"`, `tag: [one, two]`, `tag:` with a list below it, and
# `include: ../other/file`.
_LINE = re.compile(
    rb"""^["']?(?:task|group|tag)["']?:[ \t]*(?P<names>[^\n#]+)"""
    rb"""|^["']?tag["']?:[ \t]*\n(?P<listed>(?:[ \t]*-[ \t]*[^\n]+\n?)+)"""
    rb"""|^include:[ \t]*["']?(?P<include>\.\./[^\s"']+)""",
    re.MULTILINE,
)
_BETWEEN = re.compile(r"""[\s,\[\]"']+(?:-\s+)?""")
_OTHER_FILES = (".py", ".pyc", ".md", ".json", ".jsonl", ".txt")


class TaskNames:
    """Names and where they stand.

    Args:
        root: lm-eval's folder of tasks.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders: dict[str, set[str]] = {}
        self._includers: dict[str, set[str]] = {}  # folder → folders whose files include one of its files
        for path in _task_files(root):
            self._read(path)

    def _read(self, path: Path) -> None:
        folder = path.relative_to(self.root).parts[0]
        for match in _LINE.finditer(path.read_bytes()):
            if match["include"]:
                other = (path.parent / match["include"].decode()).resolve()
                if other.is_relative_to(self.root):
                    self._includers.setdefault(other.relative_to(self.root).parts[0], set()).add(folder)
                continue
            text = (match["names"] or match["listed"]).decode(errors="replace")
            for name in filter(None, _BETWEEN.split(text.strip().removeprefix("- "))):
                self._folders.setdefault(name, set()).add(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._folders

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def folders(self, names: Iterable[str]) -> list[Path]:
        """The folders that may define or tag what the names stand for, sorted."""
        found = {folder for name in names for folder in self._folders.get(name, ())}
        found |= {other for folder in found for other in self._includers.get(folder, ())}
        return [self.root / folder for folder in sorted(found)]


@cache
def own_names() -> TaskNames:
    """The names of the installed lm-eval."""
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return TaskNames(Path(spec.submodule_search_locations[0]).resolve() / "tasks")


def check_names(names: Iterable[str], include_path: Iterable[Path] = ()) -> None:
    """Refuse what is surely no name of a task, group or tag, before lm-eval is even imported. Wildcards pass.

    Raises:
        InputError: Names the nearest ones.
    """
    known = [own_names(), *(TaskNames(folder) for folder in include_path)]
    for name in names:
        if name != PAPER and not has_wildcard(name) and not any(name in some for some in known):
            raise unknown_name(name, {PAPER}.union(*known))


def has_wildcard(name: str) -> bool:
    """Whether a name stands for all that match it."""
    return any(c in name for c in "*?[")


def unknown_name(name: str, known: Iterable[str]) -> InputError:
    """The error for a name that there is not, with those near it."""
    known = sorted(known)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    near += [other for other in sorted(known, key=len) if name.lower() in other.lower() and other not in near]
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "--list-tasks shows all names"
    return InputError(f"--tasks: there is no task, group or tag {name!r}", hint=hint)


def _task_files(folder: Path) -> Iterator[Path]:
    for base, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(_OTHER_FILES):
                yield Path(base, name)
