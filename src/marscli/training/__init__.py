"""Fine-tuning: `config` says what, `objective` is the loss, `trainer` and `callbacks` run it, `runner` is the job.

Beside them: `inputs` and `streaming` (data), `checkpoints` (on the way), `launch` (several processes), `lora`,
`arguments` (the library's), `preview` and `memory` (``--dry-run``), `plot` and `card` (what a run leaves). Importing
this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marscli.training.config import TrainConfig

if TYPE_CHECKING:
    from marscli.training.callbacks import ProgressFactory


def train(
    config: TrainConfig | None = None, *, progress: ProgressFactory | None = None, **options: Any
) -> dict[str, Any]:
    """Fine-tune a model and write an ordinary checkpoint.

    Args:
        config: What to do; or give its fields as keywords: ``train(model=…, dataset=…, output_dir=…)``.
        progress: Makes a progress bar, see `callbacks.ProgressFactory`. None shows nothing.
        options: Fields of `TrainConfig`, which are the command's options with underscores.

    Returns:
        What ``summary.json`` in the output folder holds; with ``dry_run`` what ``--dry-run --json`` prints.

    Raises:
        InputError: Wrong options or data; nothing was trained.
        MarsError: The run failed; the message says why and what remains.
    """
    config = config if config is not None else TrainConfig(**options)
    if config.dry_run:
        from marscli.training.preview import preview

        return preview(config).to_json()
    from marscli.training import launch

    if launch.is_wanted(config):
        return launch.run(config, ["--no-progress"])
    from marscli.training.runner import run

    return run(config, progress=progress)


__all__ = ["TrainConfig", "train"]
