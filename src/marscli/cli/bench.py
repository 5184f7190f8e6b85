"""``mars bench``: several ways of decoding one model, measured side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marscli.benchmarking.config import METHODS, BenchConfig
from marscli.cli import console, options

if TYPE_CHECKING:
    from marscli.benchmarking.runner import BenchResult

COMPARE = "What is compared"
DEFAULT_METHODS, DEFAULT_THRESHOLDS, DEFAULT_BATCH_SIZES = [",".join(METHODS)], ["exact,0.95"], ["1,4"]


def bench(
    model: options.Model,
    output_dir: options.OutputDir,
    methods: Annotated[
        list[str],
        typer.Option(
            "--methods",
            help="hf: transformers generate, greedy, KV cache. ar: marscli, one token a forward. "
            "threshold: the paper's scheme, at each τ.",
            metavar="LIST",
            rich_help_panel=COMPARE,
        ),
    ] = DEFAULT_METHODS,
    thresholds: Annotated[
        list[str],
        typer.Option(
            "--thresholds",
            help="τ of the methods that take one: exact, in (0, 1] for probability and margin, ≥ 0 for entropy.",
            metavar="LIST",
            rich_help_panel=COMPARE,
        ),
    ] = DEFAULT_THRESHOLDS,
    batch_sizes: Annotated[
        list[str],
        typer.Option(
            "--batch-sizes",
            help="Rows decoded together.",
            metavar="LIST",
            rich_help_panel=COMPARE,
        ),
    ] = DEFAULT_BATCH_SIZES,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", metavar="N", help="Timed passes of every row; medians are shown.", rich_help_panel=COMPARE
        ),
    ] = 3,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            "-d",
            help="JSON lines with prompt, messages or question (an answer as in GSM8K beside it gives accuracy). "
            "Default: built-in prompts.",
            metavar="FILE.jsonl",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-L", metavar="N", help="Only the first N prompts.", rich_help_panel=options.DATA)
    ] = 16,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            metavar="N",
            help="Make every prompt exactly this long, of the prompts' own tokens.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    system: options.System = None,
    force: options.Force = False,
    json: options.Json = False,
    confidence: options.Confidence = "probability",
    block_size: options.BlockSize = None,
    max_new_tokens: options.MaxNewTokens = 128,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    config: options.Config = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
    debug: options.Debug = False,
) -> None:
    """Measure how fast a model decodes, against transformers and against itself one token at a time.

    Writes results.json, results.csv, report.md, pareto.png and speedup.png, and prints the table.

    Examples:

    \b
    mars bench -m runs/mars -o runs/bench
    mars bench -m runs/mars -d problems.jsonl --thresholds exact,0.95,0.8 --batch-sizes 1,4,16 -o runs/bench
    mars bench -m runs/mars --methods hf,ar --limit 4 -n 64 --json -o runs/quick
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    cfg = BenchConfig(
        model=model,
        output_dir=output_dir,
        dataset=dataset,
        methods=tuple(options.split_list(methods)),
        thresholds=tuple(options.split_list(thresholds)),  # type: ignore[arg-type]
        batch_sizes=tuple(options.split_list(batch_sizes)),  # type: ignore[arg-type]
        limit=limit,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        confidence=confidence,
        block_size=block_size,
        tokenizer=tokenizer,
        chat_template=chat_template,
        system=system,
        device=device,
        dtype=dtype,
        seed=seed,
        trust_remote_code=trust_remote_code,
        force=force,
    )
    from marscli.benchmarking.runner import BenchInterrupted, run_bench

    def show(result: "BenchResult") -> None:
        if json:
            from marscli.output import to_json

            console.echo(to_json({"meta": result.meta, "rows": result.rows}, indent=2))
        else:
            _print_table(result)
        console.note(f"results, table and pictures are in {output_dir}")

    with console.progress("measuring", total=cfg.passes) as advance:
        try:
            result = run_bench(cfg, progress=advance)
        except BenchInterrupted as interrupted:
            show(interrupted.result)
            raise
    show(result)


def _print_table(result: "BenchResult") -> None:
    import sys
    from io import StringIO

    from rich.console import Console

    from marscli.benchmarking.report import table

    shown = table(result.meta, result.rows, result.labels)
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(shown)
        return
    # A pipe has no width of its own, and a table folded to 80 columns is hard to read in a log.
    text = Console(file=StringIO(), width=120)
    with text.capture() as capture:
        text.print(shown)
    console.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
