"""``mars generate``: one prompt streamed to the terminal, a file of prompts to a file of results, or a dialogue."""

import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marscli.checkpoint import check_model_source, check_tokenizer_source
from marscli.cli import console, options
from marscli.cli.show import Totals, count, show_stream
from marscli.core.params import exact_number
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.prompts import PromptFile, PromptRow
from marscli.output import prepared_output_file, to_json, write_jsonl

if TYPE_CHECKING:
    from marscli.generation.api import GenerationResult, Preparation
    from marscli.generation.files import ResultFile


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
    verify: options.Verify = True,
    block_size: options.BlockSize = None,
    draft_tokens: options.DraftTokens = None,
    cache: options.Cache = "row",
    cache_block: options.CacheBlock = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    stop: options.Stop = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines with prompt or messages; a row may carry its own threshold, max_new_tokens, temperature, "
            "top_p, top_k, confidence, seed, stop. Other keys are passed through.",
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
    resume: options.Resume = False,
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
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Colour the text by how many tokens came from one forward.",
            rich_help_panel=options.DATA,
        ),
    ] = False,
    trace_html: Annotated[
        Path | None,
        typer.Option(
            "--trace-html",
            help="Write a page that shows which forward gave what.",
            metavar="FILE.html",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk to the model; /help there.", rich_help_panel=options.DATA)
    ] = False,
    chat_template: options.ChatTemplate = None,
    system: options.System = None,
    batch_size: options.BatchSize = 1,
    compile: options.Compile = False,
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
    mars generate -m runs/mars "Why is the sky blue?" --trace
    mars generate -m runs/mars --chat
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
        draft_tokens=draft_tokens,
        cache=cache,
        cache_block=cache_block,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        seed=seed,
        compile=compile,
        batch_size=batch_size,
        chat_template=chat_template,
        system=system,
    )
    _check_combinations(
        prompt, input_file, output, chat=chat, json=json, stream=stream, trace=trace or trace_html is not None
    )
    if limit is not None and (input_file is None or limit < 1):
        raise InputError(
            f"--limit {limit}: it takes a number of rows of --input", hint="for example --input x.jsonl -L 5"
        )
    if resume and (force or output is None or input_file is None):
        raise InputError(
            "--resume goes on with --output for the same --input" + (", --force replaces it" if force else ""),
            hint="for example --input x.jsonl --output y.jsonl --resume",
        )
    rows = PromptFile(input_file, limit) if input_file is not None else [] if chat else [_prompt_row(prompt)]
    for row in rows:
        row.params(cfg)
    check_model_source(model, gguf=True)
    check_tokenizer_source(tokenizer or model, "--tokenizer" if tokenizer else "--model")
    with ExitStack() as stack:
        path = page = None
        if output is not None:
            path = stack.enter_context(prepared_output_file(output, force=force, resume=resume))
        if trace_html is not None:
            page = stack.enter_context(prepared_output_file(trace_html, force=force, option="--trace-html"))

        from marscli.generation import api

        preparation = api.Preparation(model, cfg)
        if chat:
            _chat(preparation, prompt, trace)
        elif isinstance(rows, PromptFile):
            _many(preparation, rows, path, resume)
        else:
            as_stream = path is None and not json and stream is not False
            _one(preparation, rows[0], path, page, json=json, stream=as_stream, trace=trace)


def _check_combinations(
    prompt: str | None,
    input_file: Path | None,
    output: Path | None,
    *,
    chat: bool,
    json: bool,
    stream: bool | None,
    trace: bool,
) -> None:
    """Refuse options that contradict each other."""
    files = input_file is not None or output is not None
    if chat and (json or files or stream is False or prompt == "-"):
        raise InputError(
            "--chat is a dialogue in the terminal", hint="drop --json, --input, --output, --no-stream or -"
        )
    if stream and (json or files):
        raise InputError(
            "--stream: JSON results are not streamed", hint="drop --stream, or --json, --input and --output"
        )
    if trace and (json or files or stream is False):
        raise InputError(
            "--trace shows one answer while it comes", hint="drop --trace, or --json, --input, --output and --no-stream"
        )
    if output is not None and input_file is not None and output.resolve() == input_file.resolve():
        raise InputError(f"--output {output} is the --input file", hint="write the results to another file")
    if input_file is not None and prompt is not None:
        raise InputError("there is a prompt, and --input too", hint="give one of the two")


def _prompt_row(prompt: str | None) -> PromptRow:
    if prompt is None:
        raise InputError("there is no prompt", hint='give one, as in mars generate -m MODEL "Why is the sky blue?"')
    if prompt != "-":
        return PromptRow(prompt=prompt)
    try:
        return PromptRow(prompt=sys.stdin.read().removeprefix("\ufeff").rstrip("\n"))
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not text ({error.reason})", hint="send UTF-8 text") from error


def _chat(preparation: "Preparation", first: str | None, trace: bool) -> None:
    from marscli.cli.chat import Chat

    preparation.job(PromptRow(messages=[{"role": "user", "content": first or ""}]))  # refuses a model without template
    Chat(preparation.open(), preparation.cfg, trace=trace).run(first)


def _one(
    preparation: "Preparation",
    row: PromptRow,
    path: Path | None,
    page: Path | None,
    *,
    json: bool,
    stream: bool,
    trace: bool,
) -> None:
    """Answer one prompt."""
    from marscli.generation import api

    cfg = preparation.cfg
    job = preparation.job(row)
    checkpoint = preparation.open()
    totals = Totals(exact_number(cfg.confidence))
    started = time.perf_counter()
    if stream:
        result = show_stream(api.TextStream(checkpoint, job, cfg), trace=trace)
    else:
        (result,) = api.iterate(checkpoint, [job], cfg)
        if path is None:
            console.echo(to_json(result.to_dict()) if json else result.text)
    totals.add(result)
    if path is not None:
        write_jsonl(path, [result.to_dict()])
    if page is not None:
        from marscli.generation.trace import write_page

        write_page(page, result, checkpoint.tokenizer, preparation.name)
        console.note(f"the trace is in {page}")
    console.note(totals.footer(time.perf_counter() - started))


def _many(preparation: "Preparation", rows: PromptFile, path: Path | None, resume: bool) -> None:
    """Answer a file of prompts, row by row to a file or to stdout."""
    from marscli.generation import api
    from marscli.generation.files import ResultFile, resume_point

    cfg = preparation.cfg
    point = resume_point(path if resume else None, map(preparation.job, rows))
    partial = {"partial": True} if rows.is_cut else {}
    left = point.total - point.done
    totals = Totals(exact_number(cfg.confidence))
    started = time.perf_counter()
    if left:
        checkpoint = preparation.open()
        jobs = map(preparation.job, islice(rows, point.done, None))
        started = time.perf_counter()
        unwelcome = path is None and sys.stdout.isatty()  # a bar and lines of results would share one screen
        with nullcontext(_nothing) if unwelcome else console.progress("generating", point.total) as advance:
            advance(point.done)

            def progress(result: "GenerationResult") -> None:
                totals.add(result)
                advance(1, totals.rates(time.perf_counter() - started))

            found = api.iterate(checkpoint, jobs, cfg, first_index=point.done, progress=progress)
            objects = ({**result.to_dict(), **partial} for result in found)
            if path is None:
                for each in objects:
                    console.echo(to_json(each))
            else:
                _save(objects, ResultFile(path, point.size), point.done, point.total)
    if totals.answers:
        console.note(totals.footer(time.perf_counter() - started))
    if path is not None and point.done:
        console.note(f"{point.done} of {count(point.total, 'result')} were there already")
    if partial:
        console.note(f"partial: only the first {count(point.total, 'row')} (--limit)")


def _save(objects: Iterable[dict[str, object]], file: "ResultFile", done: int, total: int) -> None:
    """Write results as they come; a run that is broken off says what is there and how to go on."""
    with closing(file):
        try:
            for each in objects:
                file.write(each)
        finally:
            written = done + file.count
            console.note(f"{written} of {count(total, 'result')} are in {file.path}")
            if written < total:
                console.note("the same command with --resume does the rest")


def _nothing(n: int = 1, status: str = "") -> None:
    """Stand in for a bar's function where there is no bar."""
