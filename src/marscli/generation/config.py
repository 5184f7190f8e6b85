"""The settings of ``mars generate`` and `marscli.generate`, checked before anything is loaded. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from marscli.core.params import Confidence, DecodingParams, parse_threshold
from marscli.errors import InputError

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = ("row", "block", "none")


@dataclass(frozen=True)
class GenerateConfig:
    """How text is generated; names and defaults are the command line's.

    Attributes:
        threshold: ``"exact"`` or None, or τ as a number or its text.
        verify: Keep what τ did not pass as drafts, which the next forward verifies.
        block_size: None takes the checkpoint's.
        draft_tokens: Masks a group and drafts verified; None lets the engine choose.
        cache: ``row``; ``block``, the paper's, which does not verify; ``none``, which computes everything anew.
        cache_block: Tokens a block of the block cache.
        stop: Strings that end an answer; the text is cut before the first of them.
        chat_template: None uses the tokenizer's template where it has one.
        compile: Compile the model's calls with torch.compile.
        batch_size: Rows decoded together; more prompts wait for a place.

    Raises:
        InputError: A value is outside its range; the message names the option.
    """

    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    threshold: str | float | None = "exact"
    confidence: Confidence = "probability"
    verify: bool = True
    block_size: int | None = None
    draft_tokens: int | None = None
    cache: str = "row"
    cache_block: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | Sequence[str] | None = None
    seed: int = 0
    compile: bool = False
    batch_size: int = 1
    chat_template: bool | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype!r} is unknown", hint=f"use one of {', '.join(DTYPES)}")
        if self.cache not in CACHES:
            raise InputError(f"--cache {self.cache!r} is unknown", hint=f"use one of {', '.join(CACHES)}")
        if self.cache_block is not None and (self.cache != "block" or self.cache_block < 1):
            raise InputError(
                f"--cache-block {self.cache_block}: it takes the tokens a block of --cache block",
                hint="for example --cache block --cache-block 32",
            )
        if self.draft_tokens is not None and self.cache == "block":
            raise InputError("--draft-tokens: --cache block verifies no drafts", hint="drop one of the two")
        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} is below 1", hint="use 1 or more rows")
        if self.draft_tokens is not None and not self.verify:
            raise InputError("--draft-tokens: without --verify there are no drafts", hint="drop one of the two")
        if self.system is not None and self.chat_template is False:
            raise InputError(
                "--system needs a chat template, and --no-chat-template is given", hint="drop one of the two"
            )
        stop_strings(self.stop)
        self.params(1 if self.block_size is None else self.block_size)

    def params(self, block_size: int, **overrides: object) -> DecodingParams:
        """Make the parameters of one request.

        Args:
            block_size: B as resolved from flag and checkpoint.
            overrides: What a row of an input file says otherwise: threshold, confidence, max_new_tokens, temperature,
                top_p, top_k, seed.

        Raises:
            InputError: A value is outside its range, or the confidence is another one and τ is not.
        """
        confidence: Confidence = overrides.pop("confidence", self.confidence)  # type: ignore[assignment]
        threshold = overrides.pop("threshold", None)
        if threshold is None:
            threshold = self.threshold
            if confidence != self.confidence and parse_threshold(threshold, self.confidence) is not None:
                raise InputError(
                    f"confidence {confidence!r} is not the one that --threshold {threshold} was chosen for",
                    hint="give a threshold of its own beside it",
                )
            threshold = parse_threshold(threshold, self.confidence)
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            **overrides,
        }
        return DecodingParams(
            threshold=parse_threshold(threshold, confidence),  # type: ignore[arg-type]
            confidence=confidence,
            verify=self.verify and self.cache != "block",
            block_size=block_size,
            draft_tokens=self.draft_tokens,
            **settings,  # type: ignore[arg-type]
        )


def stop_strings(stop: object) -> tuple[str, ...]:
    """One stop string or several as a tuple.

    Raises:
        InputError: Something else, or an empty string.
    """
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(each, str) for each in stops):
        raise InputError(f"stop is {stop!r}", hint="stop takes a text, or a list of texts")
    if "" in stops:
        raise InputError("stop is empty", hint="give the text before which an answer ends, such as '\\n\\n'")
    return tuple(stops)
