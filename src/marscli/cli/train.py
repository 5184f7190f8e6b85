"""``mars train``: fine-tune a model to predict several tokens per forward pass, or plainly."""

from pathlib import Path
from typing import Annotated

import typer

from marscli.cli import console, options
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
        int, typer.Option("--batch-size", "-b", help="Examples per forward.", rich_help_panel=LEARNING)
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
    save_steps: Annotated[
        int,
        typer.Option("--save-steps", help="Steps between two checkpoints on the way.", rich_help_panel=options.DATA),
    ] = 500,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest complete checkpoint.", rich_help_panel=options.DATA),
    ] = False,
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
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    cfg = TrainConfig(
        model=model,
        dataset=options.split_paths(dataset),
        output_dir=Path(output_dir),
        objective=objective,
        block_size=block_size,
        ar_weight=ar_weight,
        epochs=epochs,
        max_steps=max_steps,
        lr=lr,
        warmup_ratio=warmup_ratio,
        batch_size=batch_size,
        grad_accum=grad_accum,
        max_length=max_length,
        save_steps=save_steps,
        resume=resume,
        force=force,
        prompt_field=prompt_field,
        response_field=response_field,
        skip_bad_rows=skip_bad_rows,
        limit=limit,
        chat_template=chat_template,
        system=system,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    from marscli.output import to_json
    from marscli.training import train as run_training

    summary = run_training(cfg, progress=console.progress)
    if json:
        console.echo(to_json(summary, indent=2))
