"""Option types that several commands share: one spelling, one help text, one panel.

How to use them (a parameter's own default decides whether it is required):

    def bench(
        model: options.Model,                              # required
        block_size: options.BlockSize = None,
        thresholds: Annotated[list[str], typer.Option("--thresholds", help=…)] = ["exact", "0.95"],
        config: options.Config = None,
        quiet: options.Quiet = False, …
    ) -> None:

* Values are checked by the command's config dataclass (``InputError`` that names the flag), not here, so that Python
  callers meet the same checks.
* An option that takes a list: declare ``list[str]`` and pass the value through `split_list`; comma-separated and
  repeated both work.
* Hyphens and underscores in option names are the same (see app.py). The docstring of a command is its help; examples
  go below a line that holds only ``\\b``, which keeps the line breaks.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from marscli.cli.config import load_config

MODEL = "Model"
DECODING = "Decoding"
DATA = "Input and output"
RUN = "Run"


def split_list(values: Iterable[str | Path] | None) -> list[str]:
    """Flatten repeated and comma-separated values: ``["a,b", "c"]`` → ``["a", "b", "c"]``."""
    return [part.strip() for value in values or () for part in str(value).split(",") if part.strip()]


def split_paths(values: Iterable[str | Path] | None) -> list[str]:
    """`split_list` for names of files and folders: what exists as it stands is one name, commas or not."""
    return [name for value in values or () for name in ([str(value)] if Path(value).exists() else split_list([value]))]


Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help="Hub id or folder.", rich_help_panel=MODEL)]
OptionalModel = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="Hub id or folder.", rich_help_panel=MODEL)
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="TOKENIZER", help="Hub id or folder, if not the model's.", rich_help_panel=MODEL
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--dtype", help="auto (the checkpoint's), float32, bfloat16 or float16.", metavar="DTYPE", rich_help_panel=MODEL
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with a checkpoint.", rich_help_panel=MODEL),
]

Threshold = Annotated[
    str,
    typer.Option(
        "--threshold",
        help="What may be kept unverified: exact, or τ in (0, 1] (entropy: ≥ 0); a lower τ is faster and less exact.",
        metavar="τ|exact",
        rich_help_panel=DECODING,
    ),
]
Confidence = Annotated[
    Literal["probability", "entropy", "margin"],
    typer.Option(
        "--confidence",
        help="What τ is compared with: probability, entropy or margin.",
        metavar="KIND",
        rich_help_panel=DECODING,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify",
        help="Let the next forward verify what τ did not pass; --no-verify is the paper's scheme.",
        rich_help_panel=DECODING,
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        metavar="N",
        help="Masks a group, and drafts verified a step. Default: chosen by what pays; B - 1 below exact.",
        show_default=False,
        rich_help_panel=DECODING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End an answer before this text; repeat it for several.",
        show_default=False,
        rich_help_panel=DECODING,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="B",
        help="B - 1 masks a group; 1 is AR decoding. Default: the checkpoint's.",
        show_default=False,
        rich_help_panel=DECODING,
    ),
]
Cache = Annotated[
    Literal["row", "block", "none"],
    typer.Option(
        "--cache",
        help="row (a length per row), block (the paper's; implies --no-verify) or none (slow).",
        metavar="KIND",
        rich_help_panel=DECODING,
    ),
]
CacheBlock = Annotated[
    int | None,
    typer.Option(
        "--cache-block",
        metavar="N",
        help="Tokens a block of --cache block. Default: 32.",
        show_default=False,
        rich_help_panel=DECODING,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", metavar="N", help="Never exceeded.", rich_help_panel=DECODING),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", metavar="T", help="0 is greedy.", rich_help_panel=DECODING)
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", help="Sample from the smallest set with this probability.", rich_help_panel=DECODING
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="K", help="Sample from the k likeliest tokens; 0 is off.", rich_help_panel=DECODING
    ),
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Wrap prompts in the tokenizer's chat template. Default: where it has one.",
        show_default=False,
        rich_help_panel=DATA,
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message of the chat template.", rich_help_panel=DATA),
]
Limit = Annotated[
    int | None, typer.Option("--limit", "-L", metavar="N", help="Only the first N. Default: all.", rich_help_panel=DATA)
]
OutputDir = Annotated[
    Path, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder for the results.", rich_help_panel=DATA)
]
Force = Annotated[bool, typer.Option("--force", help="Replace existing result files.", rich_help_panel=DATA)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was broken off.", rich_help_panel=DATA)]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable stdout.", rich_help_panel=DATA)]

BatchSize = Annotated[
    int, typer.Option("--batch-size", "-b", metavar="N", help="Rows worked on together.", rich_help_panel=RUN)
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random.", rich_help_panel=RUN)]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with any of these options by long name; flags win over it.",
        metavar="FILE.yaml",
        is_eager=True,
        callback=load_config,
        rich_help_panel=RUN,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No notes and no bars on stderr.", rich_help_panel=RUN)]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No bars.", rich_help_panel=RUN)]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="torch.compile for our engine's model calls; takes minutes at first. Default: off, which measures better.",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and details.", rich_help_panel=RUN)]
