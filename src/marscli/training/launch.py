"""Several processes that train together: starting them on this machine, and what each needs to know of the others.

`run` is ``--num-processes N``. Under ``accelerate launch -m marscli train …`` the processes are there already and only
the rest is used. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from marscli.errors import InputError, MarsError
from marscli.output import write_json
from marscli.training.config import TrainConfig

if TYPE_CHECKING:
    import torch

SUMMARY_FILE = "summary.json"


def world_size() -> int:
    """Processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number among them; 0 writes and speaks."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def own_device(device: torch.device) -> torch.device:
    """The device of this process where each has one; else the given one."""
    import torch

    if device.type == "cuda" and world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def is_sharded() -> bool:
    """Whether no process holds the whole model: FSDP or DeepSpeed, as ``accelerate launch`` announces them."""
    return any(os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true" for kind in ("FSDP", "DEEPSPEED"))


def is_wanted(config: TrainConfig) -> bool:
    """Whether processes must be started for a run.

    Raises:
        InputError: They were started already, but their number is another.
    """
    if "WORLD_SIZE" not in os.environ:
        return config.num_processes > 1
    if config.num_processes not in (1, world_size()):
        raise InputError(
            f"--num-processes {config.num_processes}, but {world_size()} processes were launched",
            hint="leave the option out under `accelerate launch`",
        )
    return False


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is true in any of the processes; all of them must ask."""
    import torch

    if world_size() == 1:
        return flag
    told = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    return bool(told)


def agreed(flag: bool) -> bool:
    """Process 0's value, in all of them; on CPUs."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    PartialState(cpu=True)
    return broadcast_object_list([flag])[0]


def run(config: TrainConfig, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Do one training run in ``num_processes`` processes of this machine and wait for it.

    Args:
        config: The run.
        flags: Options of ``mars train`` beside it, such as ``--quiet``.

    Returns:
        What ``summary.json`` holds.

    Raises:
        InputError: There are not as many GPUs, or the processes refused the input.
        MarsError: A process failed.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, once the processes have saved a checkpoint.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    from marscli import checkpoint

    number = config.num_processes
    device = checkpoint.resolve_device(config.device)
    if device.type == "cuda":
        import torch

        if number > torch.cuda.device_count():
            raise InputError(
                f"--num-processes {number}: this machine has {torch.cuda.device_count()} CUDA devices",
                hint="one process a device",
            )
    elif device.type == "mps":
        raise InputError("--num-processes: several processes cannot share mps", hint="use --device cpu, or one process")
    # It reports every process that it ends, and we say it in our own words.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="mars-train-") as scratch:
        options = Path(scratch) / "options.json"
        write_json(options, _options(config))
        common = {
            "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number))),
            **({"ACCELERATE_USE_CPU": "true"} if device.type == "cpu" else {}),
        }
        command = ("-m", "marscli", "train", "--config", str(options), *flags)
        context = start_processes(
            name="mars train",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(number), command),
            envs={i: {**common, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(number)},
            logs_specs=DefaultLogsSpecs(log_dir=scratch, redirects=dict.fromkeys(range(1, number), Std.ALL)),
        )
        with _passing_on_signals(context) as received:
            result = context.wait()
        assert result is not None
        if result.failures:
            if received:
                raise KeyboardInterrupt
            _fail(result)
    return json.loads((Path(config.output_dir) / SUMMARY_FILE).read_text(encoding="utf-8"))


def _options(config: TrainConfig) -> dict[str, Any]:
    """The run as ``--config`` takes it."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items() if value is not None
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _passing_on_signals(context: Any) -> Iterator[list[int]]:
    """Tell the processes, which are not in the terminal's group, of Ctrl-C and SIGTERM; yields those received."""
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        for pid in context.pids().values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, pass_on)
    except ValueError:  # not in the main thread
        pass
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(result: Any) -> NoReturn:
    """Raise for the process that failed first; process 0 has said itself what was wrong."""
    own = result.failures.get(0)
    if own is not None and own.exitcode == InputError.exit_code:
        raise InputError("the training processes refused the input", hint="see the error above")
    if own is not None and own.exitcode > 0:
        raise MarsError("the training processes failed", hint="see the error above")
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    path = Path(result.stderrs.get(first.local_rank) or os.devnull)
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = " | ".join(lines[-2:]) or "it said nothing"
    raise MarsError(
        f"training process {first.local_rank} ended with code {first.exitcode}: {said}",
        hint="where a checkpoint was saved, the same command with --resume goes on from it",
    )
