"""``mars eval``: lm-evaluation-harness tasks, with tokens per forward and per second beside the scores."""

from pathlib import Path
from typing import Annotated

import typer

from marscli.cli import console, options
from marscli.errors import InputError
from marscli.evaluation.config import EvalConfig, task_folders

TASKS = "Tasks"
EXACT = ["exact"]


def eval_(
    model: options.OptionalModel = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="Names of lm-eval tasks, groups or tags; wildcards work. `paper`: the paper's six in its settings.",
            metavar="LIST",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    list_tasks: Annotated[
        bool, typer.Option("--list-tasks", help="List every name that --tasks takes, and exit.", rich_help_panel=TASKS)
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            help="Print the differences of two results (folders or results.json), and exit.",
            metavar="A B",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    paper_reference: Annotated[
        bool,
        typer.Option(
            "--paper-reference",
            help="Show the figures that the paper published beside these, marked as such.",
            rich_help_panel=TASKS,
        ),
    ] = False,
    include_path: Annotated[
        list[Path] | None,
        typer.Option(
            "--include-path",
            help="Folder with task files (YAML) of your own.",
            metavar="DIR",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            metavar="N",
            help="Worked examples before each question. Default: the task's own.",
            show_default=False,
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: options.Limit = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="Allow tasks that run the code which the model writes (HumanEval).",
            rich_help_panel=TASKS,
        ),
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Folder for the results.", rich_help_panel=options.DATA),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root",
            help="Read data set org/name from DIR/org/name if it is there: for machines without a network.",
            metavar="DIR",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    log_samples: Annotated[
        bool,
        typer.Option(
            "--log-samples",
            help="Write every question, answer and its cost to samples_TASK_THRESHOLD.jsonl.",
            rich_help_panel=options.DATA,
        ),
    ] = False,
    chat_template: options.ChatTemplate = None,
    system: options.System = None,
    resume: options.Resume = False,
    force: options.Force = False,
    json: options.Json = False,
    threshold: Annotated[
        list[str],
        typer.Option(
            "--threshold",
            help="One or several of exact (the AR model's own output) and τ, smaller is faster and less exact: "
            "in (0, 1] for probability and margin, ≥ 0 for entropy.",
            metavar="LIST",
            rich_help_panel=options.DECODING,
        ),
    ] = EXACT,
    confidence: options.Confidence = "probability",
    verify: options.Verify = True,
    draft_tokens: options.DraftTokens = None,
    block_size: options.BlockSize = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Of each answer, never exceeded. Default: the task's own, else 256.",
            show_default=False,
            rich_help_panel=options.DECODING,
        ),
    ] = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    batch_size: Annotated[
        str,
        typer.Option(
            "--batch-size",
            "-b",
            metavar="N",
            help="Rows decoded together, in each process.",
            rich_help_panel=options.RUN,
        ),
    ] = "8",
    num_processes: Annotated[
        int,
        typer.Option(
            "--num-processes",
            metavar="N",
            help="Processes that answer together, one a device. Or: accelerate launch -m marscli eval ...",
            rich_help_panel=options.RUN,
        ),
    ] = 1,
    compile: options.Compile = False,
    seed: options.Seed = 0,
    config: options.Config = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
    debug: options.Debug = False,
) -> None:
    """Score a model on lm-evaluation-harness tasks, at one threshold or several.

    Generated answers come from the multi-token engine; multiple-choice tasks are scored by the AR likelihoods, as
    lm-eval does it, once for all thresholds. Writes results.json as each task ends, and pareto.png for several
    thresholds.

    Examples:

    \b
    mars eval -m runs/mars --tasks gsm8k_cot_zeroshot --limit 100 -o runs/eval
    mars eval -m runs/mars --tasks gsm8k,mmlu --threshold exact,0.95,0.8 -b 16 -o runs/eval
    mars eval -m runs/mars --tasks my_task --include-path tasks --data-root data --log-samples -o runs/eval
    mars eval -m runs/mars --tasks paper --threshold exact,0.95 --confirm-run-unsafe-code --paper-reference -o runs/six
    mars eval --compare runs/eval-a runs/eval-b
    mars eval --list-tasks | grep gsm8k
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    if list_tasks:
        _list_tasks(options.split_paths(include_path), json)
        return
    if compare is not None:
        _compare(compare, json)
        return
    for option, value in (("--model", model), ("--tasks", tasks), ("--output-dir", output_dir)):
        if not value:
            raise InputError(f"missing {option}", hint="`mars eval --help` shows examples")
    assert model is not None
    cfg = EvalConfig(
        model=model,
        tasks=options.split_list(tasks),
        output_dir=output_dir,
        threshold=options.split_list(threshold),
        confidence=confidence,
        verify=verify,
        draft_tokens=draft_tokens,
        block_size=block_size,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        num_fewshot=num_fewshot,
        limit=limit,
        chat_template=chat_template,
        system=system,
        log_samples=log_samples,
        include_path=[Path(name) for name in options.split_paths(include_path)],
        data_root=data_root,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        compile=compile,
        seed=seed,
        num_processes=num_processes,
        paper_reference=paper_reference,
        trust_remote_code=trust_remote_code,
        resume=resume,
        force=force,
    )
    from marscli.evaluation import processes
    from marscli.evaluation.task_names import check_names

    check_names(cfg.tasks, cfg.include_path)
    if processes.launched_rank() > 0:
        processes.serve()
        return
    from marscli.evaluation.runner import run_eval

    document = run_eval(cfg, progress=console.progress)
    if json:
        from marscli.output import to_json

        console.echo(to_json(document, indent=2))
    else:
        from marscli.evaluation.report import text

        console.echo(text(document))
    console.note(f"results are in {output_dir}")


def _compare(paths: tuple[str, str], json: bool) -> None:
    from marscli.evaluation.compare import compare, other_settings, table

    rows = compare(*paths)
    for setting in other_settings(*paths):
        console.warn(f"not the same measurement: {setting}")
    if json:
        from marscli.output import to_json

        console.echo(to_json(rows, indent=2))
    else:
        console.echo(table(rows))


def _list_tasks(include_path: list[str], json: bool) -> None:
    folders = task_folders(include_path)
    from marscli.evaluation.tasks import list_tasks

    listed = list_tasks(folders)
    if json:
        from marscli.output import to_json

        console.echo(to_json([{"name": name, "kind": kind} for name, kind in listed], indent=2))
    else:
        console.echo("\n".join(f"{kind}\t{name}" for name, kind in listed))
