"""The demo from random weights to a table: everything that `mars` does, on a model small enough for two CPU cores.

It makes the data and the model's starting point, runs the ordinary commands as a user would, each in a process of its
own, and reads the table from the files that they wrote. It computes no figure itself.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marscli.demo.base import write_base
from marscli.demo.problems import LARGEST, Problem, make_problems
from marscli.errors import MarsError
from marscli.output import markdown_table, prepared_output_dir, write_jsonl, write_text

TASK = "mars_demo"
DATASET = "marscli/word-problems"
ANSWER_TOKENS = 80  # no right answer is longer
# Of torch. More threads would only get in each other's way on so small a model, and threads that wait actively
# make it many times slower where another process needs a core.
THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Settings:
    """How much the demo does; the defaults fit into five minutes on two CPU cores.

    Attributes:
        problems: Problems to train on.
        held_out: Problems to test on; none of their questions occurs in training.
        ar_steps: Optimizer steps of the first stage, from random weights.
        mars_steps: Optimizer steps of the second.
        batch_size: Problems a step.
        thresholds: τ values to compare with one-token mode, the first of which answers the shown problem.
        timed: Held-out problems that are timed.
        repeats: Times that each of them is timed.
        seed: Of everything random.
    """

    problems: int = 10_000
    held_out: int = 300
    ar_steps: int = 1500
    mars_steps: int = 1000
    batch_size: int = 16
    thresholds: tuple[float, ...] = (0.95, 0.9, 0.8, 0.6)
    timed: int = 10
    repeats: int = 3
    seed: int = 0


def write_inputs(folder: Path, settings: Settings) -> Problem:
    """Write the problems to ``folder/data`` and the random model to ``folder/base``.

    Returns:
        A held-out problem.
    """
    training, held_out = make_problems(settings.problems, held_out=settings.held_out, seed=settings.seed)
    # The folder of a data set as the Hub has them, so that --data-root finds it.
    data = folder / "data" / DATASET
    data.mkdir(parents=True, exist_ok=True)
    write_jsonl(data / "train.jsonl", (problem.row() for problem in training))
    write_jsonl(data / "test.jsonl", (problem.row() for problem in held_out))
    # A fraction holds every word.
    texts = [text for problem in training[: len(training) // 5] for text in (problem.question, problem.answer)]
    parameters = write_base(folder / "base", texts, largest_number=LARGEST, seed=settings.seed)
    _say(f"{folder / 'base'}: a Qwen2 model of {parameters:,} parameters with random weights, and its tokenizer")
    _say(f"{data}: {len(training):,} problems for training, {len(held_out):,} others for testing")
    return held_out[0]


def commands(folder: Path, settings: Settings, question: str) -> list[list[str]]:
    """The command lines of the demo, in order, without the leading ``mars``."""
    data = folder / "data" / DATASET
    thresholds = ",".join(f"{threshold:g}" for threshold in settings.thresholds)
    everywhere = {"seed": settings.seed, "device": "cpu", "dtype": "float32"}
    training = {"dataset": data / "train.jsonl", "batch_size": settings.batch_size, **everywhere}
    ar = {"model": folder / "base", "objective": "ar", "lr": 6e-3, "max_steps": settings.ar_steps, **training}
    mars = {"model": folder / "ar", "lr": 4e-3, "max_steps": settings.mars_steps, **training}
    trained = {"model": folder / "mars", **everywhere}
    timing = {"dataset": data / "test.jsonl", "limit": settings.timed, "repeats": settings.repeats}
    timing |= {"thresholds": thresholds, "batch_sizes": 1, "max_new_tokens": ANSWER_TOKENS}
    scoring = {"tasks": TASK, "include_path": Path(__file__).parent, "data_root": folder / "data", "batch_size": 32}
    scoring |= {"threshold": f"exact,{thresholds}"}
    asking = {"threshold": f"{settings.thresholds[0]:g}", "max_new_tokens": ANSWER_TOKENS}
    return [
        _command("train", {**ar, "output_dir": folder / "ar"}),
        _command("train", {**mars, "output_dir": folder / "mars"}),
        _command("generate", {**trained, **asking}, question),
        _command("bench", {**trained, **timing, "output_dir": folder / "bench"}),
        _command("eval", {**trained, **scoring, "output_dir": folder / "eval"}),
    ]


def _command(name: str, options: Mapping[str, Any], *arguments: str) -> list[str]:
    """A command line; what writes to a folder may replace what an earlier demo left there."""
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return [name, *arguments, *flags, *(["--force"] if "output_dir" in options else [])]


def table(folder: Path, settings: Settings) -> str:
    """The demo's one table, from the result files of ``mars bench`` and ``mars eval``."""
    bench = json.loads((folder / "bench" / "results.json").read_text(encoding="utf-8"))
    scores = json.loads((folder / "eval" / "results.json").read_text(encoding="utf-8"))
    timed = {(row["method"], row["threshold"]): row for row in bench["rows"]}
    evaluated = {run["threshold"]: run for run in scores["mars"]["runs"]}
    hf = next(row for (method, _), row in timed.items() if method == "hf")
    ar = next(row for (method, _), row in timed.items() if method == "ar")
    rows = [
        ["transformers generate", None, 1.0, *_speed(hf)],
        ["one-token mode (exact)", *_quality(evaluated[1.0]), *_speed(ar)],
    ]
    rows += [[f"τ = {t:g}", *_quality(evaluated[t]), *_speed(timed["threshold", t])] for t in settings.thresholds]
    return markdown_table(["mode", "accuracy", "tokens per forward", "tokens per second", "against one-token"], rows)


def run(folder: Path, settings: Settings | None = None, *, force: bool = False) -> str:
    """Run the whole demo.

    Args:
        folder: For everything that is made: ``data``, ``base``, ``ar``, ``mars``, ``bench``, ``eval``, ``table.md``.
        settings: How much of it.
        force: Replace what an earlier run left there.

    Returns:
        The table.

    Raises:
        InputError: The folder cannot be written to, or holds a demo already.
        MarsError: One of the commands failed.
    """
    settings = settings or Settings()
    begun = time.perf_counter()
    made = ("data", "base", "ar", "mars", "bench", "eval", "table.md")
    with prepared_output_dir(folder, made, force=force):
        problem = write_inputs(folder, settings)
        for arguments in commands(folder, settings, problem.question):
            _run_command(arguments)
        text = table(folder, settings)
        write_text(folder / "table.md", text + "\n")
    _say(f"accuracy against speed: {folder / 'eval' / 'pareto.png'}; all of it in {time.perf_counter() - begun:.0f} s")
    return text


def _run_command(arguments: list[str]) -> None:
    _say(f"$ {shlex.join(['mars', *arguments])}")
    begun = time.perf_counter()
    environment = {**THREADS, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **os.environ}
    # What the commands print is for watching; standard output is for the table alone.
    done = subprocess.run([sys.executable, "-m", "marscli", *arguments], env=environment, stdout=sys.stderr)
    if done.returncode:
        raise MarsError(
            f"`mars {arguments[0]}` ended with exit code {done.returncode}", hint="what it printed above says why"
        )
    _say(f"  ({time.perf_counter() - begun:.0f} s)")


def _quality(evaluated: Mapping[str, Any]) -> tuple[str, float]:
    accuracy = evaluated["results"][TASK]["exact_match,final-answer"]
    return f"{accuracy:.1%}", evaluated["tasks"][TASK]["tokens_per_forward"]


def _speed(timed: Mapping[str, Any]) -> tuple[str, str]:
    return f"{timed['tokens_per_second']:.0f}", f"{timed['speedup_vs_ar']:.2f}×"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
