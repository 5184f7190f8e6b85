"""HumanEval's metric: does generated code pass the tests, and pass@k from that. No network, no torch.

It stands in for `evaluate`'s ``code_eval`` (which is a script on the Hugging Face Hub) and takes and returns the same:
`compute` counts a candidate as right if candidate and test, run as one program, come to their end within the time.
Each program runs in a process of its own (`code_child`) with limited time and memory, an empty environment and a
working folder that is thrown away. Consent is not asked here: `tasks` refuses before anything is built.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import comb
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("code_child.py")
SECONDS = 3.0  # evaluate's default
MEMORY = 2 * 2**30  # bytes of address space: room for numpy, not for harm
WORKERS = 4  # evaluate's default
START_UP = 20.0  # seconds that a busy machine may need to start Python, beside the program's own time


def run_program(program: str, *, seconds: float = SECONDS, memory: int = MEMORY) -> str:
    """Run a program in a process of its own.

    Args:
        program: Python source.
        seconds: Time that it may take.
        memory: Bytes of address space that it may have.

    Returns:
        ``passed``, ``timed out`` or ``failed: why``.
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="mars-code-", ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(CHILD), str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        job = json.dumps({"program": program, "token": token}).encode()
        try:
            said = child.communicate(job, timeout=seconds + START_UP)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            said = "timed out"
        finally:
            with suppress(ProcessLookupError):  # whatever the program started goes with it
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if said == token:
        return "passed"
    return said or f"failed: the process ended with code {child.returncode}"


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples is right: the unbiased estimate of arXiv 2107.03374, section 2.1.

    Args:
        samples: Candidates of one problem, n.
        right: How many of them are right, c.
        k: At most n.

    Returns:
        1 − C(n − c, k) / C(n, k).

    Example:
        >>> pass_at_k(samples=4, right=1, k=2)
        0.5
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


class CodeEval:
    """What `evaluate.load("code_eval")` gives: an object with `compute`."""

    name = "code_eval"

    def compute(
        self,
        *,
        predictions: Sequence[Sequence[str]],
        references: Sequence[str],
        k: Sequence[int] = (1, 10, 100),
        num_workers: int = WORKERS,
        timeout: float = SECONDS,
    ) -> tuple[dict[str, float], Mapping[int, list[tuple[int, dict[str, Any]]]]]:
        """Run every candidate against its problem's test.

        Args:
            predictions: For each problem its candidates.
            references: For each problem its test, as code.
            k: For which k to estimate pass@k; those above a problem's number of candidates are left out.
            num_workers: Programs that run at a time.
            timeout: Seconds a program.

        Returns:
            ``{"pass@k": mean over the problems}``, and for each problem its candidates as ``(number, {"passed", …})``.
        """
        jobs = [
            (task, number, f"{candidate}\n{test}")
            for task, (candidates, test) in enumerate(zip(predictions, references, strict=True))
            for number, candidate in enumerate(candidates)
        ]
        with ThreadPoolExecutor(max_workers=num_workers) as pool:
            said = list(pool.map(lambda job: run_program(job[2], seconds=timeout), jobs))
        results: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for (task, number, _), result in zip(jobs, said, strict=True):
            entry = {"task_id": task, "passed": result == "passed", "result": result, "completion_id": number}
            results.setdefault(task, []).append((number, entry))
        counts = [(len(mine), sum(entry["passed"] for _, entry in mine)) for mine in results.values()]
        scores = {
            f"pass@{size}": sum(pass_at_k(n, right, size) for n, right in counts) / len(counts)
            for size in k
            if counts and all(n >= size for n, _ in counts)
        }
        return scores, results
