"""HumanEval's metric: programs run apart and within limits, only a program that comes to its end passes, pass@k."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from marscli.evaluation.code_eval import CodeEval, pass_at_k, run_program


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_estimate_of_the_paper(samples):
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            # Codex paper, figure 3: 1 - prod(1 - k / i for i in n - c + 1 … n).
            product = 1.0
            for i in range(samples - right + 1, samples + 1):
                product *= 1 - k / i
            expected = 1.0 if samples - right < k else 1 - product
            assert pass_at_k(samples, right, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def f(): return 3\nassert f() == 3", "passed"),
        ("print('much'); import sys; sys.stderr.write('more')", "passed"),
        ("assert 1 == 2, 'no'", "failed: AssertionError: no"),
        ("this is no code", "failed: SyntaxError"),
        ("import sys; sys.exit(0)", "failed: SystemExit"),
        ("raise KeyboardInterrupt", "failed: KeyboardInterrupt"),
        ("import os; os._exit(0)", "failed: the process ended with code 0"),
        ("input()", "failed: EOFError"),
        ("x = bytearray(4 * 2**30)", "failed: MemoryError"),
        ("import os; os.remove('/tmp/nothing')", "failed: TypeError"),
        ("import subprocess; subprocess.Popen('ls')", "failed: TypeError"),
        ("import os, signal; signal.raise_signal(9)", "failed: the process ended with code -9"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()", "passed"),
    ],
)
def test_only_a_program_that_comes_to_its_end_passes(program, said):
    assert run_program(program).startswith(said)


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time\ntry:\n    time.sleep(60)\nexcept Exception: pass",
     "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass"],
)  # fmt: skip
def test_a_program_has_limited_time(program):
    started = time.monotonic()
    assert run_program(program, seconds=0.5) in ("timed out", "failed: the process ended with code -9")
    assert time.monotonic() - started < 20


def test_a_program_sees_neither_our_folder_nor_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    program = "import os\nopen('left', 'w').write('x')\nassert 'HF_TOKEN' not in os.environ"
    assert run_program(program) == "passed"
    assert list(tmp_path.iterdir()) == []


def test_scores_are_those_of_evaluates_metric():
    right, wrong = "def add(a, b): return a + b", "def add(a, b): return a * b"
    scores, results = CodeEval().compute(
        references=["assert add(2, 3) == 5", "assert add(1, 1) == 2"],
        predictions=[[right, wrong, wrong], [wrong, wrong, wrong]],
        k=[1, 2, 10],
    )
    assert scores == {"pass@1": pytest.approx(1 / 6), "pass@2": pytest.approx(1 / 3)}  # 10 is more than there are
    assert [[entry["passed"] for _, entry in results[task]] for task in (0, 1)] == [[True, False, False], [False] * 3]
    assert results[0][1][1]["completion_id"] == 1


@pytest.mark.skipif(not os.environ.get("MARS_TEST_DATA"), reason="set MARS_TEST_DATA=DIR, a --data-root with HumanEval")
def test_humanevals_own_solutions_pass():
    (path,) = (Path(os.environ["MARS_TEST_DATA"]) / "openai" / "openai_humaneval").rglob("*.jsonl")
    problems = [json.loads(line) for line in path.read_text().splitlines()[:6]]
    tests = [f"{problem['test']}\ncheck({problem['entry_point']})" for problem in problems]
    right = [[problem["prompt"] + problem["canonical_solution"]] for problem in problems]
    wrong = [[problem["prompt"] + "    return None\n"] for problem in problems]
    assert CodeEval().compute(references=tests, predictions=right, k=[1])[0] == {"pass@1": 1.0}
    assert CodeEval().compute(references=tests, predictions=wrong, k=[1])[0] == {"pass@1": 0.0}
