"""``python -m marscli.demo``: the demo with its few options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: The arguments; the process's own by default.

    Returns:
        The exit code, as of ``mars``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m marscli.demo",
        description="Train a tiny model on generated word problems, then generate, bench and eval with it: about five "
        "minutes on two CPU cores, no network.",
    )
    parser.add_argument("-o", "--output-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and training; default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace an earlier demo in the folder")
    options = parser.parse_args(argv)

    from transformers.utils.logging import disable_progress_bar

    from marscli.demo.showcase import Settings, run
    from marscli.errors import MarsError

    disable_progress_bar()  # saving so small a model needs none
    try:
        table = run(options.output_dir, Settings(seed=options.seed), force=options.force)
    except MarsError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    sys.stdout.write(f"\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
