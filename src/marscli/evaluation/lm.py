"""lm-eval's Hugging Face model, with `generate_until` on our engine.

Likelihoods are inherited: they are the clean AR model's, lm-eval's own numbers. Only generation is ours: rows leave the
batch at an end-of-sequence token, a stop string or their limit and the next question takes their place; nothing after
the end is ever decoded into an answer. What an answer cost is kept beside it (`MarsLM.take_usage`).

With several processes (`processes.Peers`) each answers a share of the requests; lm-eval sees one model, in process 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from logging import getLogger
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from marscli.core.decoding import Engine, Request
from marscli.core.params import Confidence, DecodingParams
from marscli.errors import InputError, MarsError

if TYPE_CHECKING:
    from marscli.evaluation.processes import Peers

logger = getLogger(__name__)

Progress = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""``progress(description, total)``: a context that yields a function to call once per finished item."""

# Settings of transformers' generate that tasks write down at the value which switches them off.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "use_cache": True,
    "early_stopping": False,
}
_HONOURED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
_ONLY_SAMPLING = {"typical_p", "min_p"}  # beside top_p and top_k: of no effect where the task does not sample


@dataclass(frozen=True)
class Question:
    """A `generate_until` request as it travels between processes.

    Attributes:
        index: Its place among the requests.
        context: The prompt's text.
        settings: lm-eval's generation settings.
        task: Name of the task.
        doc_id: Number of its document.
        repeat: How many requests before it have the same context; its sampling seed depends on that.
    """

    index: int
    context: str
    settings: dict[str, Any]
    task: str
    doc_id: int | None
    repeat: int


@dataclass
class Answer:
    """One generated answer and its cost, as CONTRACT's words define them.

    Attributes:
        question: What was asked.
        prompt_cut: Tokens cut off the prompt's left end.
        text: The answer, cut before a stop string.
        tokens: Completion tokens; the end-of-sequence token, or the one that completes a stop string, is the last.
        forwards: Model calls in which the row had entries of its own, the one that read the prompt included.
        finish_reason: ``stop``, ``length`` or ``context``.
    """

    question: Question
    prompt_cut: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    finish_reason: str | None = None

    @property
    def hit_limit(self) -> bool:
        """Whether the answer was cut off before the model ended it."""
        return self.finish_reason in ("length", "context")


@dataclass
class Usage:
    """What was done since the last `MarsLM.take_usage`.

    Attributes:
        answers: Generated answers.
        seconds: Time of generation, reading the prompts included; all rows together.
        cut_contexts: Contexts of likelihoods that were too long and lost their left end.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    cut_contexts: set[str] = field(default_factory=set)


class StopStrings:
    """Finds where an answer is complete because one of several strings has appeared in it.

    Args:
        stops: The strings.
        decode: Token ids → text.
    """

    def __init__(self, stops: Iterable[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.decode = decode
        # A token adds at least a byte; two more, as in lm-eval, for tokenizers that strip a space from the first token.
        self.window = max((len(stop.encode()) for stop in self.stops), default=0) + 2

    def length(self, tokens: Sequence[int], new: int) -> int | None:
        """Number of tokens that the answer needs until a stop string is in it.

        Args:
            tokens: The answer so far.
            new: How many at its end were not looked at before.

        Returns:
            The length up to and including the token that completes a stop string; None if there is none.
        """
        if not self._within(tokens[max(0, len(tokens) - new - self.window) :]):
            return None
        # The window may begin inside a character: the whole answer decides.
        return next((n for n in range(len(tokens) - new + 1, len(tokens) + 1) if self._within(tokens[:n])), None)

    def _within(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.stops)


class _ProgressHook:
    """Stands where lm-eval puts its cache of results, and counts them."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self.advance = advance

    def add_partial(self, *_result: Any) -> None:
        self.advance()


def check_settings(settings: dict[str, Any], task: str) -> None:
    """Refuse generation settings that the engine cannot honour.

    Args:
        settings: lm-eval's, as the task gives them.
        task: Name of the task, for the message.

    Raises:
        InputError: Names the setting.
    """
    normalised: dict[str, Any] = dict(normalize_gen_kwargs(settings))
    ignored = _HONOURED if normalised["do_sample"] else _HONOURED | _ONLY_SAMPLING
    for name, value in normalised.items():
        if name not in ignored and value is not None and value != _NEUTRAL.get(name):
            raise InputError(
                f"{task} asks for the generation setting {name}={value!r}, which this engine does not have",
                hint="leave the task out, or give a copy of its YAML file without the setting with --include-path",
            )


def _task(requests: Sequence[Instance]) -> str:
    return str(requests[0].task_name) if requests else ""


class MarsLM(HFLM):
    """A model as lm-eval sees it: likelihoods from HFLM, generation from the engine.

    Args:
        model: The loaded causal LM.
        tokenizer: Its tokenizer.
        mask_token_id: None if the model has none.
        eos_token_ids: Tokens that end an answer, beside the tokenizer's own.
        context_length: Prompt and answer together.
        batch_size: Rows decoded together; likelihoods are computed in batches of the same size.
        block_size: B.
        confidence: What τ is compared with.
        verify: Let the next forward verify what τ did not pass.
        draft_tokens: Masks a group and drafts; None leaves the width to the engine.
        compile: Compile the model's calls when it generates.
        seed: Seed of sampling, for tasks that ask for it.
        progress: Shows how far generation is.
        peers: Further processes that take their share of the requests; None works alone.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        mask_token_id: int | None,
        eos_token_ids: Iterable[int],
        context_length: int,
        batch_size: int = 8,
        block_size: int = 1,
        confidence: Confidence = "probability",
        verify: bool = False,
        draft_tokens: int | None = None,
        compile: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=context_length
        )
        self.mask_token_id = mask_token_id
        self.eos_token_ids = {*eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self.block_size = block_size
        self.confidence: Confidence = confidence
        self.verify = verify
        self.draft_tokens = draft_tokens
        self.compile = compile
        self.seed = seed
        self.progress = progress or (lambda _description, _total: nullcontext(lambda: None))
        self.peers = peers
        self.threshold: float | None = None
        self._usage = Usage()

    def take_usage(self) -> Usage:
        """What was done since the last call."""
        usage, self._usage = self._usage, Usage()
        return usage

    def note_cut(self, contexts: Iterable[str]) -> None:
        """Count contexts of likelihoods that another process had to cut."""
        self._usage.cut_contexts.update(contexts)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer requests; lm-eval's method.

        Args:
            requests: Each with ``args`` (context, generation settings); settings may differ between requests.
            disable_tqdm: Unused: bars are `progress`'s.

        Returns:
            The answers' texts in the order of the requests.
        """
        asked: Counter[str] = Counter()
        questions = []
        for index, request in enumerate(requests):
            context, settings = request.args
            question = Question(index, context, settings, str(request.task_name), request.doc_id, repeat=asked[context])
            asked[context] += 1
            questions.append(question)
        started = time.perf_counter()
        if self.peers is None:
            answers = self.answer(questions)
        else:
            answers = self.peers.share(self, "answer", questions, [question.context for question in questions])
        self._usage.seconds += time.perf_counter() - started
        self._usage.answers += answers
        return [answer.text for answer in answers]

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer questions in this process, whatever their settings; in their order."""
        items = [(question, self._encode(question.context)) for question in questions]
        # Longest first, as in HFLM: if memory does not suffice, that shows at once.
        order = Collator(
            items,
            sort_fn=lambda item: (-len(item[1]), item[0].context),
            group_fn=lambda item: item[0].settings,
            group_by="gen_kwargs",
        )
        answers: list[Answer] = []
        tau = "exact" if self.threshold is None else f"{self.threshold:g}"
        title = questions[0].task if questions else ""
        with self.progress(f"{title} τ={tau}", len(questions)) as advance:
            for group in order.get_batched(n=0):
                answers += self._answer_group(group, advance)
        return order.get_original(answers)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """HFLM's, with `progress` for its bars; shared with the other processes."""
        return self._shared("own_loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """HFLM's, with `progress` for its bars; shared with the other processes."""
        return self._shared("own_loglikelihood_rolling", requests)

    def own_loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """HFLM's `loglikelihood`, in this process."""
        with self._counted(requests):
            return super().loglikelihood(requests, disable_tqdm=True)

    def own_loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """HFLM's `loglikelihood_rolling`, in this process."""
        with self._counted(requests):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _shared(self, method: str, requests: list[Instance]) -> Any:
        if self.peers is None:
            return getattr(self, method)(requests)
        # The document stays behind: it may hold what does not travel. One context's choices stay together.
        asked = [
            Instance(request.request_type, {}, request.args, request.idx, (request.task_name, request.doc_id, 1))
            for request in requests
        ]
        return self.peers.share(self, method, asked, [str(request.args[0]) for request in asked])

    @contextmanager
    def _counted(self, requests: Sequence[Instance]) -> Iterator[None]:
        """Show how far HFLM is: it reports each result to lm-eval's hook for caches."""
        usual: Any = self.cache_hook  # type: ignore[has-type]
        with self.progress(_task(requests), len(requests)) as advance:
            self.cache_hook = _ProgressHook(advance)
            try:
                yield
            finally:
                self.cache_hook = usual

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[Any]:
        """HFLM's, which cuts what is too long without a word."""
        too_long = (texts for texts, context, rest in requests if len(context) + len(rest) > self.max_length + 1)
        self._usage.cut_contexts.update(str(texts and texts[0]) for texts in too_long)
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)

    def _encode(self, context: str) -> list[int]:
        """Token ids as HFLM makes them, with exactly one beginning-of-sequence token where the model wants one."""
        ids = self.tok_batch_encode([context])[0][0].tolist() if context else []
        return [int(token) for token in ids] or [self.prefix_token_id]

    def _answer_group(self, group: Sequence[tuple[Question, list[int]]], advance: Callable[[], object]) -> list[Answer]:
        """Answer questions of equal generation settings, in their order."""
        first = group[0][0]
        settings: dict[str, Any] = dict(normalize_gen_kwargs(first.settings, self.max_gen_toks))
        until = handle_stop_sequences(
            settings["until"], eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        room = self.max_length - settings["max_gen_toks"]
        if room < 1:
            raise MarsError(
                f"{first.task}: {settings['max_gen_toks']} new tokens leave no room for a prompt in the "
                f"model's context of {self.max_length}",
                hint=f"use --max-new-tokens {max(1, self.max_length // 2)} or a model with a longer context",
            )
        check_settings(first.settings, first.task)
        engine = Engine(
            self.model,
            mask_token_id=self.mask_token_id,
            eos_token_ids=self.eos_token_ids | self._special_stops(until),
            context_length=self.max_length,
            max_rows=min(self.batch_size, len(group)),  # the cache holds a place for each
            compile=self.compile,
        )
        answers: dict[int, Answer] = {}
        for question, ids in group:
            request = Request(ids[-room:], self._params(settings, question.repeat))
            answers[engine.add(request)] = Answer(question, max(0, len(ids) - room))
        self._run(engine, answers, StopStrings(until, self.tok_decode), advance)
        for answer in answers.values():
            answer.text = postprocess_generated_text(self.tok_decode(answer.tokens), stop=until, think_end_token=None)
        return list(answers.values())

    def _run(
        self, engine: Engine, answers: dict[int, Answer], stops: StopStrings, advance: Callable[[], object]
    ) -> None:
        while engine.has_work:
            for record in engine.step():
                answer = answers[record.request_id]
                answer.tokens += record.tokens
                answer.forwards += 1
                answer.finish_reason = record.finish_reason
                length = stops.length(answer.tokens, len(record.tokens))
                if length is not None:
                    del answer.tokens[length:]
                    answer.finish_reason = "stop"
                    if record.finish_reason is None:
                        engine.cancel(record.request_id)
                if answer.finish_reason is not None:
                    advance()

    def _params(self, settings: dict[str, Any], repeat: int) -> DecodingParams:
        """The engine's parameters for lm-eval's normalised generation settings.

        A question that a task repeats gets another seed each time.
        """
        sampled = bool(settings["do_sample"])
        temperature = settings.get("temperature")
        return DecodingParams(
            max_new_tokens=settings["max_gen_toks"],
            threshold=self.threshold,
            confidence=self.confidence,
            verify=self.verify,
            draft_tokens=self.draft_tokens,
            block_size=self.block_size,
            temperature=(1.0 if temperature is None else float(temperature)) if sampled else 0.0,
            top_p=float(settings.get("top_p") or 1.0) if sampled else 1.0,
            top_k=max(0, int(settings.get("top_k") or 0)) if sampled else 0,
            seed=self.seed + repeat,
        )

    def _special_stops(self, until: Iterable[str]) -> set[int]:
        """Stop strings that are special tokens: they never show in decoded text, so their ids end the row."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        special |= {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {special[stop] for stop in until if stop in special}
