"""What happens beside the training loop: log file, progress bar, checkpoints made whole, stopping on a signal."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from marscli.errors import MarsError
from marscli.output import write_json, write_text
from marscli.training import launch
from marscli.training.checkpoints import RUN_FILE

logger = logging.getLogger(__name__)


class ProgressFactory(Protocol):
    """Makes a progress bar: ``with factory("training", total=steps) as advance: advance(1, status="loss 0.7")``."""

    def __call__(self, description: str, total: int | None = None) -> AbstractContextManager[Callable[..., None]]:
        """Open the bar."""


class LogCallback(TrainerCallback):
    """Appends every log line to ``train_log.jsonl``.

    Args:
        path: The file; None in processes that do not write.
        before: Lines of the run that is now resumed, which come first.
    """

    def __init__(self, path: Path | None, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path = path
        if path is not None:
            write_text(path, "".join(json.dumps(entry) + "\n" for entry in before))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Have the last step logged, whatever its number."""
        if state.global_step >= state.max_steps or control.should_training_stop:
            control.should_log = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Write one line."""
        if self.path is None:
            return
        entry = {"step": state.global_step, **{key: _short(value) for key, value in logs.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class ProgressCallback(TrainerCallback):
    """Moves a progress bar, a step at a time, and keeps the latest figures beside it."""

    def __init__(self, advance: Callable[..., None]) -> None:
        self.advance = advance

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count what a resumed run has behind it."""
        self.advance(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count one step."""
        self.advance(1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Show the figures of a log line."""
        if "loss" not in logs:  # of an evaluation
            return
        status = f"loss {logs['loss']:.3f}"
        if logs["loss_masked"] is not None:
            status += f" (masked {logs['loss_masked']:.3f}, clean {logs['loss_clean']:.3f})"
        self.advance(0, status=f"{status}, {logs['tokens_per_second']:,.0f} tokens/s")


class CheckpointCallback(TrainerCallback):
    """Completes each ``checkpoint-N``: its tokenizer, and last of all a file that says which run it is of.

    A checkpoint without that file was broken off while it was written, or holds weights that are not finite.

    Args:
        tokenizer: Saved beside the weights.
        run: What a resumed run must agree with.
        spare_last: Have none made after the last step, where the trained model itself follows.
    """

    def __init__(self, tokenizer: Any, run: Mapping[str, Any], *, spare_last: bool) -> None:
        self.tokenizer = tokenizer
        self.run = run
        self.spare_last = spare_last

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the checkpoint that the library has just written."""
        if not state.is_world_process_zero:
            return
        if not launch.is_sharded():
            check_finite(kwargs["model"], state.global_step)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.tokenizer.save_pretrained(folder)
        write_json(folder / RUN_FILE, self.run)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Spare the checkpoint that the library makes after the last step."""
        if self.spare_last and state.global_step >= state.max_steps:
            control.should_save = False


class StopCallback(TrainerCallback):
    """On Ctrl-C or SIGTERM: finishes the step, has a checkpoint saved, and stops. A second Ctrl-C stops at once.

    Attributes:
        stopped: Whether it has stopped the run.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.stopped = False

    @contextmanager
    def listening(self) -> Iterator[StopCallback]:
        """Take the signals while the block runs; outside of the main thread they cannot be taken."""
        before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._on_signal)
        except ValueError:
            logger.debug("not in the main thread: Ctrl-C will not save a checkpoint")
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        logger.warning("stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, if any process was asked to; after the last step there is nothing to stop."""
        if launch.any_process(self.signal is not None, args.device) and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True


def check_finite(model: torch.nn.Module, step: int) -> None:
    """Refuse to save weights that are no numbers any more."""
    with torch.no_grad():
        sums = torch.stack([parameter.float().sum() for parameter in model.parameters()])
    if not torch.isfinite(sums).all():
        raise MarsError(
            f"the weights are not finite after step {step}",
            hint="start again with a lower --lr, or with --dtype float32",
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``train_log.jsonl``; a last line that was broken off is left out."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
