"""lm-eval's Hugging Face model, with `generate_until` on our engine.

Likelihoods are inherited: they are the clean AR model's, lm-eval's own numbers. Only generation is ours: rows leave the
batch at an end-of-sequence token, a stop string or their limit and the next question takes their place; nothing after
the end is ever decoded into an answer. What an answer cost is kept beside it (`MarsLM.take_usage`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from marscli.core.decoding import Engine, Request
from marscli.core.params import Confidence, DecodingParams
from marscli.errors import MarsError

logger = getLogger(__name__)

Progress = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""``progress(description, total)``: a context that yields a function to call once per finished item."""

# Settings of transformers' generate that tasks write down at their neutral value.
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1, "use_cache": True}


@dataclass
class Answer:
    """One generated answer and its cost, as CONTRACT's words define them.

    Attributes:
        instance: The request, with its document's number.
        tokens: Completion tokens; the end-of-sequence token, or the one that completes a stop string, is the last.
        forwards: Model calls in which the row had entries of its own, the one that read the prompt included.
        finish_reason: ``stop``, ``length`` or ``context``.
        prompt_cut: Tokens cut off the prompt's left end.
    """

    instance: Instance
    prompt_cut: int
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
        seed: Seed of sampling, for tasks that ask for it.
        progress: Shows how far generation is.
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
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=context_length
        )
        self.mask_token_id = mask_token_id
        self.eos_token_ids = {*eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self.block_size = block_size
        self.confidence: Confidence = confidence
        self.seed = seed
        self.progress = progress or (lambda _description, _total: nullcontext(lambda: None))
        self.threshold: float | None = None
        self._usage = Usage()
        self._ignored: set[str] = set()

    def take_usage(self) -> Usage:
        """What was done since the last call."""
        usage, self._usage = self._usage, Usage()
        return usage

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer requests; lm-eval's method.

        Args:
            requests: Each with ``args`` (context, generation settings); settings may differ between requests.
            disable_tqdm: Unused: bars are `progress`'s.

        Returns:
            The answers' texts in the order of the requests.
        """
        items = [(*request.args, request, self._encode(request.args[0])) for request in requests]
        # Longest first, as in HFLM: if memory does not suffice, that shows at once.
        order = Collator(items, sort_fn=lambda item: (-len(item[3]), item[0]), group_by="gen_kwargs")
        texts: list[str] = []
        tau = "exact" if self.threshold is None else f"{self.threshold:g}"
        with self.progress(f"{_task(requests)} τ={tau}", len(requests)) as advance:
            for group in order.get_batched(n=0):
                texts += self._answer_group(group, advance)
        return order.get_original(texts)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """HFLM's, with `progress` for its bars."""
        with self._counted(requests):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """HFLM's, with `progress` for its bars."""
        with self._counted(requests):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

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

    def _answer_group(self, group: Sequence[tuple[Any, ...]], advance: Callable[[], object]) -> list[str]:
        """Answer requests of equal generation settings, in their order."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(group[0][1], self.max_gen_toks))
        until = handle_stop_sequences(
            settings.pop("until"), eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        params = self._params(settings, group[0][2].task_name)
        room = self.max_length - params.max_new_tokens
        if room < 1:
            raise MarsError(
                f"{group[0][2].task_name}: {params.max_new_tokens} new tokens leave no room for a prompt in the "
                f"model's context of {self.max_length}",
                hint=f"use --max-new-tokens {max(1, self.max_length // 2)} or a model with a longer context",
            )
        engine = Engine(
            self.model,
            mask_token_id=self.mask_token_id,
            eos_token_ids=self.eos_token_ids | self._special_stops(until),
            context_length=self.max_length,
            max_rows=min(self.batch_size, len(group)),  # the cache holds a place for each
        )
        asked: Counter[str] = Counter()
        answers: dict[int, Answer] = {}
        for context, _, instance, ids in group:
            # A question that a task repeats gets another seed each time.
            row_params = replace(params, seed=params.seed + asked[context])
            asked[context] += 1
            answers[engine.add(Request(ids[-room:], row_params))] = Answer(instance, max(0, len(ids) - room))
        started = time.perf_counter()
        self._run(engine, answers, StopStrings(until, self.tok_decode), advance)
        self._usage.seconds += time.perf_counter() - started
        self._usage.answers += answers.values()
        return [
            postprocess_generated_text(self.tok_decode(answer.tokens), stop=until, think_end_token=None)
            for answer in answers.values()
        ]

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

    def _params(self, settings: dict[str, Any], task: str) -> DecodingParams:
        """The engine's parameters for lm-eval's normalised generation settings."""
        sampled = bool(settings.pop("do_sample", False))
        temperature = settings.pop("temperature", None)
        params = DecodingParams(
            max_new_tokens=settings.pop("max_gen_toks"),
            threshold=self.threshold,
            confidence=self.confidence,
            block_size=self.block_size,
            temperature=(1.0 if temperature is None else float(temperature)) if sampled else 0.0,
            top_p=float(settings.pop("top_p", None) or 1.0) if sampled else 1.0,
            top_k=max(0, int(settings.pop("top_k", None) or 0)) if sampled else 0,
            seed=self.seed,
        )
        unused = {"top_p", "top_k"}  # of no effect where the task does not sample
        for name, value in settings.items():
            if name not in unused and value is not None and value != _NEUTRAL.get(name) and name not in self._ignored:
                self._ignored.add(name)
                logger.warning("%s asks for the generation setting %s=%r, which is ignored", task, name, value)
        return params

    def _special_stops(self, until: Iterable[str]) -> set[int]:
        """Stop strings that are special tokens: they never show in decoded text, so their ids end the row."""
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        special |= {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {special[stop] for stop in until if stop in special}
