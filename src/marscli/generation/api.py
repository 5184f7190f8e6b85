"""`generate` and `stream`: text in, text out, over the core's engine; the command line is a thin layer over them.

    checkpoint = marscli.load("runs/mars")
    results = marscli.generate(checkpoint, ["Why is the sky blue?", "Name three rivers."], threshold=0.9, batch_size=2)
    for chunk in marscli.stream(checkpoint, "Why is the sky blue?"):
        print(chunk, end="", flush=True)

Keywords have the names and defaults of the command line.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from marscli.checkpoint import Checkpoint, load, load_settings, load_tokenizer
from marscli.core.decoding import Completion, Engine, Request, StepRecord
from marscli.core.engines import make_engine
from marscli.core.params import threshold_number
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.detokenize import TextBuilder
from marscli.generation.prompts import PromptRow, encode, rows_from

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

WAITING_PER_ROW = 4  # prompts in the engine for each row that it decodes: the next ones are ready when a row ends
MOST_UNORDERED = 1024  # results that may wait for a slower one before them


@dataclass(frozen=True)
class GenerationResult:
    """What came of one prompt.

    Attributes:
        index: Place among the prompts.
        prompt: The prompt's text; for messages, as the chat template renders them.
        text: ``tokenizer.decode(token_ids, skip_special_tokens=True)``, cut before a stop string.
        finish_reason: ``stop`` (end-of-sequence token or stop string), ``length`` (max_new_tokens), ``context`` (no
            room left).
        completion_tokens: Tokens generated, the end-of-sequence token, or the one that completes a stop string,
            included.
        forwards: Model calls in which the prompt's row took part, the one that read the prompt included.
        seconds: Time of these calls.
        threshold: τ as a number; 1.0 (0 for entropy) is exact.
        verified: Whether drafts were verified.
        token_ids: The completion's tokens; not part of JSON results, as the following.
        records: What each forward gave, see `StepRecord`.
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
    records: list[StepRecord] = field(default_factory=list, repr=False)
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
    preparation = Preparation(model, cfg)
    jobs = [preparation.job(row) for row in rows]
    return list(iterate(preparation.open(), jobs, cfg))


def stream(model: str | Path | Checkpoint, prompt: str | Messages, **options: Any) -> "TextStream":
    """Complete one prompt and hand out the text while it is written; arguments as for `generate`.

    Returns:
        An iterator of chunks, which joined equal the text that `generate` gives; its ``result`` is set at the end.
    """
    rows = rows_from(prompt)
    if len(rows) != 1:
        raise InputError(f"a stream takes one prompt, not {len(rows)}", hint="use generate for several")
    cfg = GenerateConfig(**options)
    preparation = Preparation(model, cfg)
    job = preparation.job(rows[0])
    return TextStream(preparation.open(), job, cfg)


@dataclass(frozen=True)
class Job:
    """A row made ready for the engine."""

    row: PromptRow
    prompt: str
    request: Request
    stops: tuple[str, ...] = ()

    @property
    def threshold(self) -> float:
        """τ as results hold it."""
        return threshold_number(self.request.params.threshold, self.request.params.confidence)

    @property
    def verified(self) -> bool:
        """Whether drafts are verified."""
        return self.request.params.drafts > 0


class Preparation:
    """What a model's settings and tokenizer say about rows, before its weights are loaded.

    Args:
        model: Hub id, folder, or a loaded checkpoint.
        cfg: The options.

    Raises:
        InputError: The model cannot be used.
    """

    def __init__(self, model: str | Path | Checkpoint, cfg: GenerateConfig) -> None:
        self.model = model
        self.cfg = cfg
        if isinstance(model, Checkpoint):
            self.tokenizer, self.name = model.tokenizer, model.name
            self.trained, self.context_length = model.block_size, model.context_length
        else:
            self.name = str(model)
            settings, self.context_length = load_settings(self.name, trust_remote_code=cfg.trust_remote_code)
            self.trained = None if settings is None else settings.block_size
            if settings is not None and settings.is_assumed and cfg.block_size is not None:
                self.trained = cfg.block_size
            self.tokenizer = load_tokenizer(cfg.tokenizer or self.name, trust_remote_code=cfg.trust_remote_code)
        self.block_size = 1 if self.trained is None else cfg.block_size or self.trained

    def job(self, row: PromptRow) -> Job:
        """Make a row ready.

        Raises:
            InputError: It does not suit the model.
        """
        params = row.params(self.cfg, self.block_size)
        if self.trained is None:
            if params.threshold is not None:
                raise row.error(
                    f"--threshold {params.threshold:g}: {self.name} was never MARS-trained",
                    hint="train it with `mars train` first, or use --threshold exact",
                )
            params = replace(params, verify=False, draft_tokens=None)
        ids, prompt = encode(
            self.tokenizer,
            row,
            context_length=self.context_length,
            chat_template=self.cfg.chat_template,
            system=self.cfg.system,
        )
        return Job(row, prompt, Request(ids, params), row.stops(self.cfg))

    def open(self) -> Checkpoint:
        """Load the weights, unless they are loaded already.

        Raises:
            MarsError: They cannot be loaded.
        """
        if self.trained is None:
            logger.warning("%s was never MARS-trained: it decodes one token per forward", self.name)
        elif self.block_size > self.trained:
            logger.warning(
                "--block-size %d is more than %s was trained with (%d): tokens past that are guesses",
                self.block_size,
                self.name,
                self.trained,
            )
        if isinstance(self.model, Checkpoint):
            return self.model
        return load(
            self.model,
            tokenizer=self.cfg.tokenizer,
            device=self.cfg.device,
            dtype=self.cfg.dtype,
            block_size=self.cfg.block_size,
            trust_remote_code=self.cfg.trust_remote_code,
        )


class _Answer:
    """A job under way: its records, and their text."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.job = job
        self.builder = TextBuilder(tokenizer, job.stops)
        self.records: list[StepRecord] = []

    def take(self, record: StepRecord, engine: Engine) -> str:
        """Add what one forward gave, up to a stop string, which ends the request; return the text settled by it."""
        before = len(self.builder.ids)
        chunk = self.builder.push(record.tokens)
        if self.builder.stopped:
            if record.finish_reason is None:
                engine.cancel(record.request_id)
            kept = len(self.builder.ids) - before
            record = replace(
                record,
                tokens=record.tokens[:kept],
                confidences=record.confidences[:kept],
                offsets=record.offsets[:kept],
                finish_reason="stop",
            )
        self.records.append(record)
        return chunk

    @property
    def is_finished(self) -> bool:
        """Whether the last record has a finish reason."""
        return bool(self.records) and self.records[-1].finish_reason is not None

    def result(self, index: int) -> GenerationResult:
        """Sum up the finished request."""
        reason = self.records[-1].finish_reason
        assert reason is not None, "a finished row has a reason"
        completion = Completion(self.builder.ids, reason, len(self.job.request.ids), self.records)
        return GenerationResult(
            index=index,
            prompt=self.job.prompt,
            text=self.builder.text(),
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=len(completion.tokens),
            forwards=completion.forwards,
            seconds=completion.seconds,
            threshold=self.job.threshold,
            verified=self.job.verified,
            token_ids=completion.tokens,
            records=completion.records,
            extra=self.job.row.extra,
        )


class TextStream(Iterator[str]):
    """The text of one prompt, in chunks. A chunk is never empty.

    Attributes:
        record: What the last forward gave.
        text: The chunks so far.
        result: The whole result, once the iterator is exhausted.
    """

    def __init__(self, checkpoint: Checkpoint, job: Job, cfg: GenerateConfig) -> None:
        self.record: StepRecord | None = None
        self.text = ""
        self.result: GenerationResult | None = None
        self._answer = _Answer(job, checkpoint.tokenizer)
        self._engine = _engine(checkpoint, cfg, max_rows=1)
        self._chunks = self._run()

    def __next__(self) -> str:
        chunk = next(self._chunks)
        self.text += chunk
        return chunk

    def _run(self) -> Iterator[str]:
        answer = self._answer
        self._engine.add(answer.job.request)
        while self._engine.has_work:
            (record,) = self._engine.step()
            chunk = answer.take(record, self._engine)
            self.record = answer.records[-1]
            if chunk:
                yield chunk
        rest = answer.builder.finish()
        if rest:
            yield rest
        self.result = answer.result(0)


def iterate(
    checkpoint: Checkpoint,
    jobs: Iterable[Job],
    cfg: GenerateConfig,
    *,
    first_index: int = 0,
    progress: Callable[[GenerationResult], None] | None = None,
) -> Iterator[GenerationResult]:
    """Complete many prompts, `cfg.batch_size` at a time; a finished row's place goes to the next prompt.

    Jobs are taken as the engine needs them, and what is held in memory is bounded, so there may be any number.

    Args:
        first_index: Index of the first job's result.
        progress: Called with the result whenever a prompt is done, in whatever order they end.

    Yields:
        Results in the order of the jobs, each as soon as it and all before it are done.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, cfg.batch_size))  # of a huge batch size only as many rows as there are prompts
    if not first:
        return
    engine = _engine(checkpoint, cfg, len(first))
    answers: dict[int, _Answer] = {}
    index_of: dict[int, int] = {}
    done: dict[int, GenerationResult] = {}
    added = upcoming = first_index

    def add(more: Iterable[Job]) -> None:
        nonlocal added
        for job in more:
            request_id = engine.add(job.request)
            answers[request_id] = _Answer(job, checkpoint.tokenizer)
            index_of[request_id] = added
            added += 1

    add(first)
    while True:
        room = min(WAITING_PER_ROW * len(first) - len(answers), MOST_UNORDERED + len(first) - (added - upcoming))
        add(islice(waiting, max(0, room)))
        if not engine.has_work:
            return
        for record in engine.step():
            answer = answers[record.request_id]
            answer.take(record, engine)
            if answer.is_finished:
                del answers[record.request_id]
                result = answer.result(index_of.pop(record.request_id))
                done[result.index] = result
                if progress is not None:
                    progress(result)
        while upcoming in done:
            yield done.pop(upcoming)
            upcoming += 1


def _engine(checkpoint: Checkpoint, cfg: GenerateConfig, max_rows: int) -> Engine:
    return make_engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        max_rows=max_rows,  # the cache holds a place for each
        compile=cfg.compile,
        cache=cfg.cache,  # type: ignore[arg-type]  # checked by GenerateConfig
        **({} if cfg.cache_block is None else {"cache_block": cfg.cache_block}),
    )
