"""How long it takes until `mars` says something: help, imports, the first token of an answer.

    python benchmarks/start_up.py                        # help and imports
    python benchmarks/start_up.py -m runs/mars --json start_up.json

Each figure is a process of its own, from its start to its end, or to its first byte on stdout. The runs take turns;
medians are shown, with the fastest and the slowest. One run of each is not counted: it brings the files into memory.

=================  =====================================================================================================
python             an interpreter that does nothing: the least that any of the others could take
import marscli     the package; its functions are imported when they are used
help               ``mars --help``
help of bench      ``mars bench --help``
import torch       what any command that touches a model must import, at least
import of load     torch, transformers and what else ``marscli.load`` needs
first token        ``mars generate`` from its start to the first byte of the answer (with ``-m``)
=================  =====================================================================================================
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from marscli.output import atomic_write, markdown_table

MARS = [sys.executable, "-m", "marscli"]
PROMPT = "Count to ten."


def commands(model: str | None) -> dict[str, list[str]]:
    """What is started, by its name in the table."""
    python = [sys.executable, "-c"]
    table = {
        "python": [*python, "pass"],
        "import marscli": [*python, "import marscli"],
        "help": [*MARS, "--help"],
        "help of bench": [*MARS, "bench", "--help"],
        "import torch": [*python, "import torch"],
        "import of load": [*python, "import marscli.checkpoint, marscli.core.model, marscli.core.attention"],
    }
    if model is not None:
        table["first token"] = [*MARS, "generate", "-m", model, PROMPT, "-n", "8", "--quiet"]
    return table


def seconds_until_first_byte(command: Sequence[str]) -> float:
    """From the start of a process to its first byte on stdout, or to its end if it writes none."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}:\n{errors.decode()}")
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="Hub id or folder, for the first token")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()

    table = commands(args.model)
    measured: dict[str, list[float]] = {name: [] for name in table}
    for repeat in range(args.repeats + 1):
        for name, command in table.items():
            seconds = seconds_until_first_byte(command)
            if repeat:
                measured[name].append(seconds)
    rows = [
        {"what": name, "seconds": statistics.median(all_), "seconds_min": min(all_), "seconds_max": max(all_)}
        for name, all_ in measured.items()
    ]
    lines = [[row["what"], row["seconds"], f"{row['seconds_min']:.2f}–{row['seconds_max']:.2f}"] for row in rows]
    print(markdown_table(["what", "seconds", "min–max"], lines))
    if args.json:
        with atomic_write(args.json) as file:
            json.dump({"repeats": args.repeats, "model": args.model, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
