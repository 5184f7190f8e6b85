"""Runs one program that a model wrote, in a process of its own: ``python -I code_child.py SECONDS BYTES``.

Standard input holds one JSON object, ``{"program": …, "token": …}``; the token is printed once the program has run to
its end, and nothing else counts as a pass: an early exit does not. Limits are set before the program is read. It
imports nothing of marscli and knows nothing of what is tested; `code_eval` starts it and judges.

What the program may not do to this machine by accident is switched off, as in the reference implementation of HumanEval
(arXiv 2107.03374). That is no sandbox: a hostile program needs a container.
"""

import builtins
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

FORBIDDEN = {
    builtins: ("exit", "quit"),
    os: [
        "kill",
        "killpg",
        "system",
        "putenv",
        "remove",
        "removedirs",
        "rmdir",
        "fchdir",
        "setuid",
        "fork",
        "forkpty",
        "rename",
        "renames",
        "truncate",
        "replace",
        "unlink",
        "fchmod",
        "fchown",
        "chmod",
        "chown",
        "chroot",
        "lchown",
        "chdir",
    ],
    shutil: ("rmtree", "move", "chown"),
    subprocess: ("Popen",),
}
NO_MODULES = ("ipdb", "joblib", "resource", "psutil", "tkinter")


class OutOfTime(BaseException):
    """The program ran too long; no ``except Exception`` of its own catches it."""


def limit(seconds: float, memory: int) -> None:
    """Limit time (a signal after ``seconds``), memory (bytes), the size of files, and what a crash leaves behind."""

    def stop(_signal: int, _frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for kind, most in (
        *([] if sys.platform == "darwin" else [(resource.RLIMIT_AS, memory)]),  # macOS has no such limit
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(seconds) + 2),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def main() -> None:
    """Read the job, run it, and say whether it came to its end."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a program that reads waits for nothing, one that prints says nothing
        os.dup2(silent, stream)
    if "numpy" in job["program"]:  # it sets environment variables when it is imported, which is forbidden below
        with suppress(ImportError):
            import_module("numpy")
    for module, names in FORBIDDEN.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, None)
    for name in NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    limit(float(sys.argv[1]), int(sys.argv[2]))
    try:
        exec(job["program"], {})
        verdict = str(job["token"])
    except OutOfTime:
        verdict = "timed out"
    except BaseException as error:  # SystemExit too: leaving early is no pass
        verdict = f"failed: {type(error).__name__}: {error}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    out.write(verdict)
    out.flush()
    os._exit(0)  # threads that the program left behind end here


if __name__ == "__main__":
    main()
