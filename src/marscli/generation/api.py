"""`generate` and `stream`: text in, text out, over the core's engine; the command line is a thin layer over them.

    checkpoint = marscli.load("runs/mars")
    results = marscli.generate(checkpoint, ["Why is the sky blue?", "Name three rivers."], threshold=0.9, batch_size=2)
    for chunk in marscli.stream(checkpoint, "Why is the sky blue?"):
        print(chunk, end="", flush=True)

Keywords have the names and defaults of the command line.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marscli.checkpoint import Checkpoint, load, load_settings, load_tokenizer
from marscli.core.decoding import Completion, Engine, Request, StepRecord
from marscli.core.params import threshold_number
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.detokenize import TextBuilder
from marscli.generation.prompts import PromptRow, encode, rows_from

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GenerationResult:
    """What came of one prompt.

    Attributes:
        index: Place among the prompts.
        prompt: The prompt's text; for messages, as the chat template renders them.
        text: ``tokenizer.decode(token_ids, skip_special_tokens=True)``.
        finish_reason: ``stop`` (end-of-sequence token), ``length`` (max_new_tokens), ``context`` (no room left).
        completion_tokens: Tokens generated, the end-of-sequence token included.
        forwards: Model calls in which the prompt's row took part, the one that read the prompt included.
        seconds: Time of these calls.
        threshold: τ as a number; 1.0 (0 for entropy) is exact.
        verified: Whether drafts were verified.
        token_ids: The completion's tokens; not part of JSON results.
        extra: Other keys of the prompt's row.
    """

    index: int
    prompt: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    forwards: int
    seconds: float
    threshold: float
    verified: bool = False
    token_ids: list[int] = field(default_factory=list, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def tokens_per_forward(self) -> float:
        """1.0 for AR decoding, by definition."""
        return self.completion_tokens / self.forwards

    @property
    def tokens_per_second(self) -> float:
        """Of this row alone, whatever else was in the batch."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give the object of JSON results.

        Keys of the prompt's row come along; one that has the name of a result is renamed to ``input_NAME``.
        """
        result = {
            "index": self.index,
            "prompt": self.prompt,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 4),
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "threshold": self.threshold,
            "verified": self.verified,
        }
        passed = {f"input_{key}" if key in result else key: value for key, value in self.extra.items()}
        return {**result, **passed}


def generate(
    model: str | Path | Checkpoint,
    prompts: str | Messages | Sequence[str | Messages],
    **options: Any,
) -> list[GenerationResult]:
    """Complete prompts.

    Args:
        model: Hub id, folder, or what `marscli.load` returned.
        prompts: A text or a conversation (a list of messages), or a list of these.
        options: The options of ``mars generate`` by name: see `GenerateConfig` for names and defaults.

    Returns:
        One result a prompt, in order.

    Raises:
        InputError: An option or a prompt is not valid.
        MarsError: The model cannot be used.
    """
    rows = rows_from(prompts)
    cfg = GenerateConfig(**options)
    checkpoint, jobs = prepare(model, rows, cfg)
    return list(iterate(checkpoint, jobs, cfg))


def stream(model: str | Path | Checkpoint, prompt: str | Messages, **options: Any) -> "TextStream":
    """Complete one prompt and hand out the text while it is written; arguments as for `generate`.

    Returns:
        An iterator of chunks, which joined equal the text that `generate` gives; its ``result`` is set at the end.
    """
    rows = rows_from(prompt)
    if len(rows) != 1:
        raise InputError(f"a stream takes one prompt, not {len(rows)}", hint="use generate for several")
    cfg = GenerateConfig(**options)
    checkpoint, jobs = prepare(model, rows, cfg)
    return TextStream(checkpoint, jobs[0], cfg)


@dataclass(frozen=True)
class Job:
    """A row made ready for the engine."""

    row: PromptRow
    prompt: str
    request: Request

    def result(self, index: int, records: list[StepRecord], tokenizer: Any) -> GenerationResult:
        """Sum up the finished request."""
        reason = records[-1].finish_reason
        assert reason is not None, "a finished row has a reason"
        tokens = [token for record in records for token in record.tokens]
        completion = Completion(tokens, reason, len(self.request.ids), records)
        params = self.request.params
        return GenerationResult(
            index=index,
            prompt=self.prompt,
            text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=len(tokens),
            forwards=completion.forwards,
            seconds=completion.seconds,
            threshold=threshold_number(params.threshold, params.confidence),
            token_ids=tokens,
            extra=self.row.extra,
        )


def prepare(
    model: str | Path | Checkpoint, rows: Sequence[PromptRow], cfg: GenerateConfig
) -> tuple[Checkpoint, list[Job]]:
    """Check rows against model and options, then load the model, unless it is loaded already.

    Raises:
        InputError: A row does not suit the model; its weights were not loaded.
        MarsError: The model cannot be used.
    """
    if isinstance(model, Checkpoint):
        tokenizer, name, trained, context_length = model.tokenizer, model.name, model.block_size, model.context_length
    else:
        name = str(model)
        settings, context_length = load_settings(name, trust_remote_code=cfg.trust_remote_code)
        trained = None if settings is None else settings.block_size
        tokenizer = load_tokenizer(cfg.tokenizer or name, trust_remote_code=cfg.trust_remote_code)
    block_size = 1 if trained is None else cfg.block_size or trained
    jobs = []
    for row in rows:
        params = row.params(cfg, block_size)
        if params.threshold is not None and trained is None:
            raise row.error(
                f"--threshold {params.threshold:g}: {name} was never MARS-trained",
                hint="train it with `mars train` first, or use --threshold exact",
            )
        ids, prompt = encode(
            tokenizer, row, context_length=context_length, chat_template=cfg.chat_template, system=cfg.system
        )
        jobs.append(Job(row, prompt, Request(ids, params)))
    if trained is None:
        logger.warning("%s was never MARS-trained: it decodes one token per forward", name)
    elif block_size > trained:
        logger.warning(
            "--block-size %d is more than %s was trained with (%d): tokens past that are guesses",
            block_size,
            name,
            trained,
        )
    return _open(model, cfg), jobs


def _open(model: str | Path | Checkpoint, cfg: GenerateConfig) -> Checkpoint:
    if isinstance(model, Checkpoint):
        return model
    return load(
        model,
        tokenizer=cfg.tokenizer,
        device=cfg.device,
        dtype=cfg.dtype,
        trust_remote_code=cfg.trust_remote_code,
    )


class TextStream(Iterator[str]):
    """The text of one prompt, in chunks. A chunk is never empty.

    Attributes:
        result: The whole result, once the iterator is exhausted.
    """

    def __init__(self, checkpoint: Checkpoint, job: Job, cfg: GenerateConfig) -> None:
        self.result: GenerationResult | None = None
        self._job = job
        self._engine = _engine(checkpoint, cfg, max_rows=1)
        self._tokenizer = checkpoint.tokenizer
        self._chunks = self._run()

    def __next__(self) -> str:
        return next(self._chunks)

    def _run(self) -> Iterator[str]:
        builder = TextBuilder(self._tokenizer)
        records: list[StepRecord] = []
        self._engine.add(self._job.request)
        while self._engine.has_work:
            (record,) = self._engine.step()
            records.append(record)
            chunk = builder.push(record.tokens)
            if chunk:
                yield chunk
        rest = builder.finish()
        if rest:
            yield rest
        self.result = self._job.result(0, records, self._tokenizer)


def iterate(
    checkpoint: Checkpoint,
    jobs: Sequence[Job],
    cfg: GenerateConfig,
    progress: Callable[[int], None] | None = None,
) -> Iterator[GenerationResult]:
    """Complete many prompts, `cfg.batch_size` at a time; a finished row's place goes to the next prompt.

    Args:
        progress: Called with 1 whenever a prompt is done, in whatever order they end.

    Yields:
        Results in the order of the jobs, each as soon as it and all before it are done.
    """
    engine = _engine(checkpoint, cfg, min(cfg.batch_size, len(jobs)))
    job_of = {engine.add(job.request): number for number, job in enumerate(jobs)}
    records: list[list[StepRecord]] = [[] for _ in jobs]
    done: dict[int, GenerationResult] = {}
    upcoming = 0
    while engine.has_work:
        for record in engine.step():
            number = job_of[record.request_id]
            records[number].append(record)
            if record.finish_reason is not None:
                done[number] = jobs[number].result(number, records[number], checkpoint.tokenizer)
                records[number] = []
                if progress is not None:
                    progress(1)
        while upcoming in done:
            yield done.pop(upcoming)
            upcoming += 1


def _engine(checkpoint: Checkpoint, cfg: GenerateConfig, max_rows: int) -> Engine:
    return Engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        max_rows=max_rows,  # the cache holds a place for each
        cache=cfg.cache,  # type: ignore[arg-type]  # checked by GenerateConfig
    )
