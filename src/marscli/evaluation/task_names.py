"""Which folder of lm-eval's task files defines which name: known in under a second, without parsing 14,000 YAML files.

lm-eval's own index takes half a minute on a slow machine. This looks for the lines that name a task, group or tag, as
text, so that a misspelt name is refused at once and only the folders that are needed are parsed. It may know too many
names (an item of some other list), never too few: `tasks` asks lm-eval's index in the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# `task: name`, `"group": "name"`, `- task: name`; an item of a list may be a tag; `include: ../other/file`.
_LINE = re.compile(
    rb"""^[ \t-]*["']?(?:task|group|tag)["']?:[ \t]*["']?(?P<key>[^\s"'#\[\],]+)"""
    rb"""|^[ \t]*-[ \t]*["']?(?P<item>[\w.+-]+)["']?[ \t]*$"""
    rb"""|^include:[ \t]*["']?(?P<include>\.\./[^\s"']+)""",
    re.MULTILINE,
)
_OTHER_FILES = (".py", ".pyc", ".md", ".json", ".jsonl", ".txt")


class TaskNames:
    """Names and where they stand.

    Args:
        root: lm-eval's folder of tasks.

    Attributes:
        named: Names that stand behind ``task:``, ``group:`` or ``tag:``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.named: set[str] = set()
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
            name = (match["key"] or match["item"]).decode(errors="replace")
            self._folders.setdefault(name, set()).add(folder)
            if match["key"]:
                self.named.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._folders

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


def _task_files(folder: Path) -> Iterator[Path]:
    for base, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(_OTHER_FILES):
                yield Path(base, name)
