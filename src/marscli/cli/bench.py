"""``mars bench``: several ways of decoding one model, measured side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marscli.benchmarking.config import DEFAULTS, METHODS, QUICK, SUITES, BenchConfig
from marscli.cli import console, options
from marscli.errors import InputError, MarsError

if TYPE_CHECKING:
    from marscli.benchmarking.runner import BenchResult

COMPARE = "What is compared"
EARLIER = "Two earlier runs"
WIDE = 118  # columns of a terminal from which on the table is shown whole


def _default(name: str) -> str:
    """The default as ``--help`` shows it; None stands for it in the code, so that a suite can have another."""
    value = DEFAULTS[name]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{text}; {QUICK[name]} with --quick" if name in QUICK else text


def bench(
    model: options.OptionalModel = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Folder for the results.", rich_help_panel=options.DATA),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help=f"Of {', '.join(METHODS)}; docs/BENCHMARKING.md says what each runs.",
            metavar="LIST",
            show_default=_default("methods"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    thresholds: Annotated[
        list[str] | None,
        typer.Option(
            "--thresholds",
            help="τ of the methods that take one: exact, in (0, 1] for probability and margin, ≥ 0 for entropy; "
            "entropy:0.3 is for that measure alone.",
            metavar="LIST",
            show_default=_default("thresholds"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    confidence: Annotated[
        list[str] | None,
        typer.Option(
            "--confidence",
            help="What τ is compared with: probability, entropy, margin, or several.",
            metavar="LIST",
            show_default=_default("confidence"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    batch_sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--batch-sizes",
            help="Rows decoded together.",
            metavar="LIST",
            show_default=_default("batch_sizes"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    cache_blocks: Annotated[
        list[str] | None,
        typer.Option(
            "--cache-blocks",
            help="Block sizes of block-cache.",
            metavar="LIST",
            show_default=_default("cache_blocks"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Small model of the same tokenizer, for hf-assisted.",
            show_default=False,
            rich_help_panel=COMPARE,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="|".join(SUITES),
            help="The paper's comparisons on GSM8K: τ sweep, block-cache sizes, batch sizes.",
            show_default=False,
            rich_help_panel=COMPARE,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: fewer prompts and repeats.", rich_help_panel=COMPARE)
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            metavar="N",
            help="Timed passes of every row; medians are shown.",
            show_default=_default("repeats"),
            rich_help_panel=COMPARE,
        ),
    ] = None,
    block_size: options.BlockSize = None,
    draft_tokens: options.DraftTokens = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Never exceeded.",
            show_default=_default("max_new_tokens"),
            rich_help_panel=options.DECODING,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            help="File or Hub id (org/name:config:split) with prompt, messages or question (an answer as in GSM8K "
            "beside it gives accuracy). Default: built-in prompts.",
            metavar="DATA",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-L",
            metavar="N",
            help="Only the first N prompts.",
            show_default=_default("limit"),
            rich_help_panel=options.DATA,
        ),
    ] = None,
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
    resume: options.Resume = False,
    json: options.Json = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Two results.json: what changed. Exit code 1 if a speed-up fell. Needs no model.",
            show_default=False,
            rich_help_panel=EARLIER,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            help="With --compare: the share by which it may fall.",
            rich_help_panel=EARLIER,
        ),
    ] = 0.1,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    compile: options.Compile = False,
    seed: options.Seed = 0,
    config: options.Config = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
    debug: options.Debug = False,
) -> None:
    """Measure how fast a model decodes, against transformers and against itself one token at a time.

    Writes results.json, results.csv, report.md, passes.jsonl, pareto.png, speedup.png and acceptance.png, and prints
    the table.

    Examples:

    \b
    mars bench -m runs/mars -o runs/bench --quick
    mars bench -m runs/mars -d problems.jsonl --thresholds exact,0.95,0.8 --batch-sizes 1,4,16 -o runs/bench
    mars bench -m runs/mars --methods hf,hf-lookup,hf-assisted,ar,verified --draft runs/small -o runs/assisted
    mars bench -m runs/mars --suite paper -o runs/paper
    mars bench --compare runs/before/results.json runs/after/results.json --tolerance 0.1
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    if compare is not None:
        _compare(*compare, tolerance, json)
        return
    for option, value in (("--model", model), ("--output-dir", output_dir)):
        if not value:
            raise InputError(f"missing {option}", hint="`mars bench --help` shows examples")
    assert model is not None

    def listed(values: list[str] | None) -> tuple[str, ...] | None:
        return None if values is None else tuple(options.split_list(values))

    cfg = BenchConfig(
        model=model,
        output_dir=output_dir,
        dataset=dataset,
        methods=listed(methods),
        thresholds=listed(thresholds),
        confidence=listed(confidence),
        draft_tokens=draft_tokens,
        cache_blocks=listed(cache_blocks),  # type: ignore[arg-type]
        batch_sizes=listed(batch_sizes),  # type: ignore[arg-type]
        limit=limit,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        block_size=block_size,
        draft=draft,
        suite=suite,
        quick=quick,
        tokenizer=tokenizer,
        chat_template=chat_template,
        system=system,
        device=device,
        dtype=dtype,
        compile=compile,
        seed=seed,
        trust_remote_code=trust_remote_code,
        force=force,
        resume=resume,
    )
    from marscli.benchmarking.plan import passes
    from marscli.benchmarking.runner import BenchInterrupted, run_bench

    def show(result: "BenchResult") -> None:
        if json:
            from marscli.output import to_json

            console.echo(to_json({"meta": result.meta, "rows": result.rows}, indent=2))
        else:
            _print_table(result)
        console.note(f"results, table and pictures are in {output_dir}")

    with console.progress("measuring", total=passes(cfg)) as advance:
        try:
            result = run_bench(cfg, progress=advance)
        except BenchInterrupted as interrupted:
            show(interrupted.result)
            raise
    show(result)


def _compare(before: Path, after: Path, tolerance: float, json: bool) -> None:
    from marscli.benchmarking.compare import compare

    found = compare(before, after, tolerance=tolerance)
    if json:
        from marscli.output import to_json

        console.echo(to_json(found.as_json(), indent=2))
    else:
        console.echo(found.table())
    for note in found.notes:
        console.note(f"the runs differ in {note}")
    if found.regressions:
        raise MarsError(
            "; ".join(found.regressions),
            hint=f"--tolerance {tolerance:g} is how far a ratio may fall; repeat the run on a quiet machine to be sure",
        )


def _print_table(result: "BenchResult") -> None:
    import sys
    from io import StringIO

    from rich.console import Console

    from marscli.benchmarking.report import table

    if sys.stdout.isatty():
        terminal = Console(file=sys.stdout)
        terminal.print(table(result.meta, result.rows, details=terminal.width >= WIDE))
        return
    # A pipe has no width of its own, and a table folded to 80 columns is hard to read in a log.
    text = Console(file=StringIO(), width=160)
    with text.capture() as capture:
        text.print(table(result.meta, result.rows))
    console.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
