"""Several processes that answer a run's requests together, each with a copy of the model: ``--num-processes N``.

Process 0 is the run: it alone knows tasks, scores and files. It hands out requests by `Peers.share` and gets the
results back in their order; the others (`serve`) load the model and answer. So no request is asked twice or lost,
whatever their number. They talk through accelerate, over gloo on every device: what travels are texts and numbers.

`started` starts the others on this machine; under ``accelerate launch -m marscli eval …`` they are there already.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marscli.errors import InputError, MarsError

if TYPE_CHECKING:
    from marscli.evaluation.config import EvalConfig
    from marscli.evaluation.lm import MarsLM

READY = "ready"
PATIENCE = timedelta(days=30)  # one process may wait that long for another: a task takes what it takes
GRACE = 10.0  # seconds in which a process that was told to end does so


@dataclass(frozen=True)
class Job:
    """Requests for all processes: ``owners[i]`` is the rank that answers ``requests[i]``."""

    method: str
    threshold: float | None
    requests: Sequence[Any]
    owners: Sequence[int]


@dataclass
class Part:
    """What one process did of a job: results by the request's place, or why there are none."""

    results: dict[int, Any] = field(default_factory=dict)
    cut_contexts: set[str] = field(default_factory=set)
    error: str | None = None
    hint: str = ""


def launched() -> int:
    """Processes that ``accelerate launch`` started; 1 if it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))


def check(config: EvalConfig, device_type: str) -> None:
    """Refuse a number of processes that this machine cannot run.

    Raises:
        InputError: There are not as many devices, or another number was launched.
    """
    number = config.num_processes
    if launched() > 1 and number not in (1, launched()):
        raise InputError(
            f"--num-processes {number}, but {launched()} processes were launched",
            hint="leave the option out under `accelerate launch`",
        )
    if number == 1:
        return
    if device_type == "mps":
        raise InputError("--num-processes: several processes cannot share mps", hint="use --device cpu, or one process")
    if device_type == "cuda":
        import torch

        devices = torch.cuda.device_count()
        if number > devices or ":" in config.device:
            raise InputError(
                f"--num-processes {number} with --device {config.device}: this machine has {devices} CUDA devices",
                hint="one process a device, and --device cuda or auto",
            )


class Peers:
    """This process's place among several; joining waits for the others.

    Attributes:
        rank: This process's number; 0 is the run.
        number: How many there are.
    """

    def __init__(self) -> None:
        from accelerate import PartialState

        state = PartialState(cpu=True, timeout=PATIENCE)
        self.rank: int = state.process_index
        self.number: int = state.num_processes
        self.why_gone: Callable[[], str] = lambda: "see its own messages"

    def tell(self, value: Any = None) -> Any:
        """Process 0's value, in every process; all must call it."""
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def share(self, lm: MarsLM, method: str, requests: Sequence[Any], keys: Sequence[str]) -> list[Any]:
        """Have all processes answer; for process 0.

        Args:
            lm: This process's model.
            method: Its method, which takes a list of requests and returns as many results.
            requests: What to answer.
            keys: One for each request; equal keys go to the same process.

        Returns:
            The results in the order of the requests.

        Raises:
            MarsError: A process failed.
        """
        places: dict[str, int] = {}
        owners = [places.setdefault(key, len(places)) % self.number for key in keys]
        job = Job(method, lm.threshold, requests, owners)
        try:
            self.tell(job)
            parts = self.work(lm, job)
        except RuntimeError as error:  # gloo's word for a broken connection
            raise MarsError(
                f"--num-processes: one of {self.number} processes is gone: {self.why_gone()}",
                hint="the tasks that had ended are saved; go on with --resume, or use fewer processes",
            ) from error
        for part in parts:
            if part.error is not None:
                raise MarsError(part.error, hint=part.hint)
            lm.note_cut(part.cut_contexts)
        merged = {place: result for part in parts for place, result in part.results.items()}
        return [merged[place] for place in range(len(requests))]

    def work(self, lm: MarsLM, job: Job) -> list[Part]:
        """Answer this process's requests and exchange the results; all must call it."""
        from accelerate.utils import gather_object

        mine = [place for place, owner in enumerate(job.owners) if owner == self.rank]
        lm.threshold = job.threshold
        part = Part()
        try:
            results = getattr(lm, job.method)([job.requests[place] for place in mine]) if mine else []
            part.results = dict(zip(mine, results, strict=True))
        except Exception as error:
            if self.rank == 0:
                raise
            part.error = f"process {self.rank}: {getattr(error, 'message', f'{type(error).__name__}: {error}')}"
            part.hint = getattr(error, "hint", "a smaller --batch-size or --dtype bfloat16 needs less memory")
        if self.rank > 0:
            part.cut_contexts = lm.take_usage().cut_contexts
        return gather_object([part])


@contextmanager
def started(number: int) -> Iterator[Peers | None]:
    """Start ``number − 1`` processes beside this one and end them afterwards; yields None for one alone.

    Raises:
        MarsError: A process could not be started.
    """
    if launched() > 1:
        peers = Peers()
        yield peers
        peers.tell(None)
        return
    if number == 1:
        yield None
        return
    from accelerate import PartialState

    world = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number))),
    }
    before = {name: os.environ.get(name) for name in (*world, "RANK", "LOCAL_RANK")}
    with tempfile.TemporaryDirectory(prefix="mars-eval-") as folder:
        children = _Children(number, world, Path(folder))
        try:
            children.wait_ready()
            os.environ.update({**world, "RANK": "0", "LOCAL_RANK": "0"})
            PartialState._reset_state()
            peers = Peers()
            peers.why_gone = children.last_words
            yield peers
            peers.tell(None)
            children.wait()
        finally:
            children.end()
            _leave()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _leave() -> None:
    """Forget that this process was one of several: another run may follow in it."""
    import torch
    from accelerate import PartialState

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    PartialState._reset_state()


class _Children:
    """The started processes. They are not in the terminal's group: Ctrl-C reaches process 0 alone, which ends them."""

    def __init__(self, number: int, world: dict[str, str], folder: Path) -> None:
        self.said = [folder / f"{rank}.txt" for rank in range(1, number)]
        self.processes = []
        for rank, path in enumerate(self.said, start=1):
            with path.open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import main; main()"],
                    env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            self.processes.append(process)

    def wait_ready(self) -> None:
        """Wait until each is about to join: who joins alone would wait for ever."""
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                raise MarsError(
                    f"--num-processes: a process did not start: {self.last_words()}", hint="use fewer processes"
                )

    def wait(self) -> None:
        """Give them time to end by themselves."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)

    def end(self) -> None:
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # they hold nothing that could be lost
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def last_words(self) -> str:
        """The last line that a process that failed wrote, with its exit code."""
        for process, path in zip(self.processes, self.said, strict=True):
            with suppress(subprocess.TimeoutExpired):
                if process.wait(1.0) != 0:
                    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
                    return f"exit code {process.returncode}, {lines[-1] if lines else 'it said nothing'}"
        return "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve() -> None:
    """Be one of the others: join, load what process 0 names, answer until it says that there is no more."""
    peers = Peers()
    setup = peers.tell()
    if setup is None:  # process 0 ended before it had work
        return
    from marscli.evaluation.loading import load_lm

    config, block_size = setup
    _, lm = load_lm(config, block_size, peers=peers)
    with suppress(RuntimeError):  # process 0 is gone
        while (job := peers.tell()) is not None:
            peers.work(lm, job)


def _end_with(parent: int) -> None:
    """End this process soon after the one that started it: a killed run must leave nobody who waits for it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """A started process: say that the imports are done, then `serve`."""
    _end_with(os.getppid())
    from marscli.evaluation import lm as _imported_before_joining  # noqa: F401

    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    serve()
