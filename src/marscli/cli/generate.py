"""``mars generate``: one prompt streamed to the terminal, or a file of prompts to a file of results."""

from pathlib import Path
from typing import Annotated

import typer

from marscli.cli import console, options
from marscli.generation.config import GenerateConfig


def generate(
    model: options.Model,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads it from stdin.", metavar="PROMPT", show_default=False),
    ] = None,
    tokenizer: options.Tokenizer = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    threshold: options.Threshold = "exact",
    confidence: options.Confidence = "probability",
    verify: options.Verify = False,
    block_size: options.BlockSize = None,
    cache: options.Cache = "row",
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines with prompt or messages; a row may carry its own threshold, max_new_tokens, temperature, "
            "seed. Other keys are passed through.",
            metavar="FILE.jsonl",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Where the results go, one JSON object a line. Default: stdout.",
            metavar="FILE.jsonl",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    force: options.Force = False,
    limit: options.Limit = None,
    json: options.Json = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Show the text while it is written. Default: for one prompt.",
            show_default=False,
            rich_help_panel=options.DATA,
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    system: options.System = None,
    batch_size: options.BatchSize = 1,
    seed: options.Seed = 0,
    config: options.Config = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
    debug: options.Debug = False,
) -> None:
    """Write text with a model, several tokens per forward pass.

    Examples:

    \b
    mars generate -m runs/mars "Why is the sky blue?"
    mars generate -m runs/mars "Why is the sky blue?" --threshold 0.9 -n 100
    cat question.txt | mars generate -m runs/mars - --json
    mars generate -m runs/mars --input prompts.jsonl --output answers.jsonl -b 8
    """
    console.configure(quiet=quiet, no_progress=no_progress, debug=debug)
    cfg = GenerateConfig(
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        threshold=threshold,
        confidence=confidence,
        verify=verify,
        block_size=block_size,
        cache=cache,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        batch_size=batch_size,
        chat_template=chat_template,
        system=system,
    )
