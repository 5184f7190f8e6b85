"""``mars generate``: one prompt streamed to the terminal, or a file of prompts to a file of results."""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marscli.checkpoint import check_model_source, check_tokenizer_source
from marscli.cli import console, options
from marscli.core.params import exact_number
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.prompts import PromptRow, read_rows
from marscli.output import prepared_output_file, to_json, write_jsonl

if TYPE_CHECKING:
    from marscli.generation.api import GenerationResult, TextStream


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
    one = input_file is None
    if limit is not None and (one or limit < 1):
        raise InputError(
            f"--limit {limit}: it takes a number of rows of --input", hint="for example --input x.jsonl -L 5"
        )
    if stream and (json or output is not None or not one):
        raise InputError(
            "--stream: JSON results are not streamed", hint="drop --stream, or --json, --input and --output"
        )
    if output is not None and input_file is not None and output.resolve() == input_file.resolve():
        raise InputError(f"--output {output} is the --input file", hint="write the results to another file")
    rows = [_prompt_row(prompt)] if input_file is None else _file_rows(input_file, prompt)
    partial = limit is not None and limit < len(rows)
    rows = rows[:limit]
    for row in rows:
        row.params(cfg)
    check_model_source(model)
    check_tokenizer_source(tokenizer or model, "--tokenizer" if tokenizer else "--model")
    with ExitStack() as stack:
        path = None if output is None else stack.enter_context(prepared_output_file(output, force=force))

        from marscli.generation import api

        checkpoint, jobs = api.prepare(model, rows, cfg)
        started = time.perf_counter()
        if one and path is None and not json and stream is not False:
            results = [_show_stream(api.TextStream(checkpoint, jobs[0], cfg))]
        else:
            # A bar and lines of results would share one screen.
            unwelcome = one or (path is None and sys.stdout.isatty())
            with nullcontext() if unwelcome else console.progress("generating", len(rows)) as advance:
                found = api.iterate(checkpoint, jobs, cfg, advance)
                if path is not None:
                    results = _save(found, path, len(rows), partial)
                else:
                    results = _print(found, as_json=json or not one, partial=partial)
        console.note(_footer(results, time.perf_counter() - started, exact_number(cfg.confidence)))
        if partial:
            console.note(f"partial: only the first {len(rows)} rows (--limit)")


def _prompt_row(prompt: str | None) -> PromptRow:
    if prompt is None:
        raise InputError("there is no prompt", hint='give one, as in mars generate -m MODEL "Why is the sky blue?"')
    if prompt != "-":
        return PromptRow(prompt=prompt)
    try:
        return PromptRow(prompt=sys.stdin.read().removeprefix("\ufeff").rstrip("\n"))
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not text ({error.reason})", hint="send UTF-8 text") from error


def _file_rows(path: Path, prompt: str | None) -> list[PromptRow]:
    if prompt is not None:
        raise InputError("there is a prompt, and --input too", hint="give one of the two")
    return read_rows(path)


def _show_stream(stream: "TextStream") -> "GenerationResult":
    for chunk in stream:
        console.echo(chunk, end="")
    console.echo("")
    assert stream.result is not None, "an exhausted stream has its result"
    return stream.result


def _print(found: Iterable["GenerationResult"], *, as_json: bool, partial: bool) -> list["GenerationResult"]:
    results = []
    for result in found:
        console.echo(to_json(_json_object(result, partial)) if as_json else result.text)
        results.append(result)
    return results


def _save(found: Iterable["GenerationResult"], path: Path, total: int, partial: bool) -> list["GenerationResult"]:
    """Write the results to a file; after an interruption or a failure those that are there."""
    results: list[GenerationResult] = []
    try:
        results.extend(found)
    finally:
        if results:
            write_jsonl(path, (_json_object(result, partial or len(results) < total) for result in results))
            console.note(f"{len(results)} of {total} results are in {path}")
    return results


def _json_object(result: "GenerationResult", partial: bool) -> dict[str, object]:
    return {**result.to_dict(), **({"partial": True} if partial else {})}


def _footer(results: Sequence["GenerationResult"], seconds: float, exact: float) -> str:
    tokens = sum(result.completion_tokens for result in results)
    forwards = sum(result.forwards for result in results)
    reasons = [result.finish_reason for result in results]
    limits = sorted({result.threshold for result in results}, reverse=True)
    parts = [
        *([f"{len(results)} prompts"] if len(results) != 1 else []),
        f"{sum(result.prompt_tokens for result in results)} prompt tokens",
        f"{tokens} tokens",
        f"{forwards} forwards",
        f"{tokens / forwards:.2f} tokens/forward",
        f"{tokens / seconds:.1f} tokens/s",
        "τ " + ", ".join("exact" if limit == exact else f"{limit:g}" for limit in limits),
        ", ".join(
            f"{reasons.count(r)} {r}" if len(results) > 1 else r for r in ("stop", "length", "context") if r in reasons
        ),
    ]
    return " · ".join(parts)
