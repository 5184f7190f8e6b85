"""``mars train``: fine-tune a model to predict several tokens per forward pass, or plainly."""

import os
from pathlib import Path
from typing import Annotated

import typer

from marscli.cli import console, options
from marscli.errors import InputError
from marscli.training.config import TrainConfig

LEARNING = "Training"


def train(
    model: options.Model,
    dataset: Annotated[
        list[str],
        typer.Option(
            "--dataset",
            "-d",
            help="A .jsonl, .json, .parquet or .csv file, or a Hub id: org/name[:config[:split]]. Repeatable. "
            "Rows: messages; prompt + completion; instruction + output; question + answer.",
            metavar="DATA",
            rich_help_panel=options.DATA,
        ),
    ],
    output_dir: options.OutputDir,
    objective: Annotated[
        str, typer.Option("--objective", help="mars, or ar for ordinary fine-tuning.", rich_help_panel=LEARNING)
    ] = "mars",
    block_size: Annotated[
        int, typer.Option("--block-size", help="B: tokens a block of masks stands for.", rich_help_panel=LEARNING)
    ] = 4,
    ar_weight: Annotated[
        float,
        typer.Option(
            "--ar-weight", help="Weight of the clean stream's loss; 0 leaves it out.", rich_help_panel=LEARNING
        ),
    ] = 1.0,
    distill: Annotated[
        bool,
        typer.Option(
            "--distill", help="Teach the masks the clean stream's own distribution.", rich_help_panel=LEARNING
        ),
    ] = False,
    balance: Annotated[
        bool, typer.Option("--balance", help="Weigh the two losses as the run goes.", rich_help_panel=LEARNING)
    ] = False,
    random_offset: Annotated[
        bool,
        typer.Option("--random-offset", help="Begin each block grid at a random place.", rich_help_panel=LEARNING),
    ] = False,
    block_curriculum: Annotated[
        bool,
        typer.Option(
            "--block-curriculum", help="Blocks grow from 2 to B over the first half.", rich_help_panel=LEARNING
        ),
    ] = False,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the data.", rich_help_panel=LEARNING)] = 5,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps", help="Optimizer steps, instead of --epochs.", show_default=False, rich_help_panel=LEARNING
        ),
    ] = None,
    lr: Annotated[
        float,
        typer.Option("--lr", "--learning-rate", help="Peak; cosine decay to zero.", rich_help_panel=LEARNING),
    ] = 5e-6,
    warmup_ratio: Annotated[
        float, typer.Option("--warmup-ratio", help="Share of the steps with a rising rate.", rich_help_panel=LEARNING)
    ] = 0.03,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Examples per device and forward.", rich_help_panel=LEARNING)
    ] = 8,
    grad_accum: Annotated[
        int, typer.Option("--grad-accum", help="Forwards per optimizer step.", rich_help_panel=LEARNING)
    ] = 1,
    max_length: Annotated[
        int,
        typer.Option(
            "--max-length", help="Longest example in tokens; what is longer is cut.", rich_help_panel=LEARNING
        ),
    ] = 512,
    packing: Annotated[
        bool,
        typer.Option("--packing/--no-packing", help="Several examples a row, kept apart.", rich_help_panel=LEARNING),
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Less memory, more time.", rich_help_panel=LEARNING),
    ] = False,
    lora_rank: Annotated[
        int | None,
        typer.Option(
            "--lora-rank",
            metavar="N",
            help="Train adapters (all linear layers) and the mask's embedding only. Needs peft.",
            show_default=False,
            rich_help_panel=LEARNING,
        ),
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(
            "--lora-alpha", help="Scale of the adapters. Default: 2·N.", show_default=False, rich_help_panel=LEARNING
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Merge the adapters: an ordinary checkpoint, not the adapters alone.",
            rich_help_panel=LEARNING,
        ),
    ] = False,
    save_steps: Annotated[
        int | None,
        typer.Option(
            "--save-steps",
            metavar="N",
            help="Steps between two checkpoints, which then stay. Default: 500, and none stays after the last step.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    eval_dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--eval-dataset",
            metavar="DATA",
            help="Held-out data: its loss is measured on the way. As --dataset.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    eval_steps: Annotated[
        int | None,
        typer.Option(
            "--eval-steps",
            metavar="N",
            help="Steps between two measurements. Default: --save-steps.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    early_stopping: Annotated[
        int | None,
        typer.Option(
            "--early-stopping",
            metavar="N",
            help="Stop after N measurements without a lower loss; the best checkpoint is the result.",
            show_default=False,
            rich_help_panel=LEARNING,
        ),
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            "--report-to",
            metavar="NAMES",
            help="Send the log there too: tensorboard, wandb, ... (if installed).",
            rich_help_panel=options.RUN,
        ),
    ] = None,
    num_processes: Annotated[
        int,
        typer.Option(
            "--num-processes",
            metavar="N",
            help="Processes that train together, one a device. Or: accelerate launch -m marscli train ...",
            rich_help_panel=options.RUN,
        ),
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show one example, the counts and the memory needed, and stop. Loads no weights, writes nothing.",
            rich_help_panel=options.RUN,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest complete checkpoint.", rich_help_panel=options.DATA),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume-from", metavar="PATH", help="Go on from this checkpoint-N.", rich_help_panel=options.DATA
        ),
    ] = None,
    force: options.Force = False,
    prompt_field: Annotated[
        str | None,
        typer.Option("--prompt-field", help="Key of the prompt, if not a usual one.", rich_help_panel=options.DATA),
    ] = None,
    response_field: Annotated[
        str | None,
        typer.Option("--response-field", help="Key of the response, if not a usual one.", rich_help_panel=options.DATA),
    ] = None,
    skip_bad_rows: Annotated[
        bool,
        typer.Option(
            "--skip-bad-rows", help="Count and leave out rows that cannot be used.", rich_help_panel=options.DATA
        ),
    ] = False,
    limit: options.Limit = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming",
            help="Read rows as they are needed: data larger than memory. Needs --max-steps.",
            rich_help_panel=options.DATA,
        ),
    ] = False,
    chat_template: options.ChatTemplate = None,
    system: options.System = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="bfloat16, float32, or auto: bfloat16 where the device does it well. Weights stay float32 meanwhile.",
            metavar="DTYPE",
            rich_help_panel=options.MODEL,
        ),
    ] = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    json: options.Json = False,
    config: options.Config = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
    debug: options.Debug = False,
) -> None:
    """Teach a model to predict several tokens per forward pass; the result is an ordinary checkpoint.

    Best in two stages on the same data: --objective ar, then mars from its result.

    Examples:

    \b
    mars train -m Qwen/Qwen2.5-0.5B-Instruct -d data.jsonl -o runs/ar --objective ar
    mars train -m runs/ar -d data.jsonl -o runs/mars
    mars train -m runs/ar -d openai/gsm8k:main -o runs/mars --lr 2e-5 --epochs 2 -b 4 --grad-accum 8
    mars train -m runs/ar -d data.jsonl -o runs/mars --resume
    mars train -m runs/ar -d data.jsonl -o runs/mars --dry-run
    mars train --config examples/lora_24gb.yaml
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    cfg = TrainConfig(
        model=model,
        dataset=options.split_paths(dataset),
        output_dir=Path(output_dir),
        objective=objective,
        block_size=block_size,
        ar_weight=ar_weight,
        distill=distill,
        balance=balance,
        random_offset=random_offset,
        block_curriculum=block_curriculum,
        epochs=epochs,
        max_steps=max_steps,
        lr=lr,
        warmup_ratio=warmup_ratio,
        batch_size=batch_size,
        grad_accum=grad_accum,
        max_length=max_length,
        packing=packing,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        merge=merge,
        save_steps=save_steps,
        eval_dataset=options.split_paths(eval_dataset) or None,
        eval_steps=eval_steps,
        early_stopping=early_stopping,
        report_to=options.split_list(report_to),
        num_processes=num_processes,
        dry_run=dry_run,
        resume=resume,
        resume_from=resume_from,
        force=force,
        prompt_field=prompt_field,
        response_field=response_field,
        skip_bad_rows=skip_bad_rows,
        limit=limit,
        streaming=streaming,
        chat_template=chat_template,
        system=system,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    # Read by torch when it is imported: huge pages on a CPU, where page faults took a sixth of a step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from marscli.output import to_json
    from marscli.training import launch
    from marscli.training import train as run_training

    if cfg.dry_run:
        from marscli.training.preview import preview

        seen = preview(cfg)
        if json:
            console.echo(to_json(seen.to_json(), indent=2))
        else:
            console.show(seen.to_rich())
        return
    if launch.is_wanted(cfg):
        flags = {"--quiet": quiet, "--no-progress": no_progress, "--debug": debug}
        summary = launch.run(cfg, [flag for flag, given in flags.items() if given])
    else:
        try:
            summary = run_training(cfg, progress=console.progress)
        except InputError as error:
            if launch.rank() > 0:  # process 0 says it
                raise typer.Exit(error.exit_code) from error
            raise
    if json and summary:
        console.echo(to_json(summary, indent=2))
