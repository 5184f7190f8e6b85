"""The settings of ``mars generate`` and `marscli.generate`, checked before anything is loaded. Imports no torch."""

from dataclasses import dataclass

from marscli.core.params import Confidence, DecodingParams, parse_threshold
from marscli.errors import InputError

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = ("row", "none")


@dataclass(frozen=True)
class GenerateConfig:
    """How text is generated; names and defaults are the command line's.

    Attributes:
        threshold: ``"exact"`` or None, or τ as a number or its text.
        block_size: None takes the checkpoint's.
        chat_template: None uses the tokenizer's template where it has one.
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
    verify: bool = False
    block_size: int | None = None
    cache: str = "row"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    batch_size: int = 1
    chat_template: bool | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if self.verify:
            raise InputError(
                "--verify: verified decoding is not part of this release",
                hint="verified decoding comes in a later release; use --no-verify",
            )
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype!r} is unknown", hint=f"use one of {', '.join(DTYPES)}")
        if self.cache not in CACHES:
            raise InputError(f"--cache {self.cache!r} is unknown", hint=f"use one of {', '.join(CACHES)}")
        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} is below 1", hint="use 1 or more rows")
        if self.system is not None and self.chat_template is False:
            raise InputError(
                "--system needs a chat template, and --no-chat-template is given", hint="drop one of the two"
            )
        self.params(1 if self.block_size is None else self.block_size)

    def params(self, block_size: int, **overrides: object) -> DecodingParams:
        """Make the parameters of one request.

        Args:
            block_size: B as resolved from flag and checkpoint.
            overrides: What a row of an input file says otherwise: threshold, max_new_tokens, temperature, seed.
        """
        threshold = overrides.pop("threshold", self.threshold)
        settings = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            **overrides,
        }
        return DecodingParams(
            threshold=parse_threshold(threshold, self.confidence),  # type: ignore[arg-type]
            confidence=self.confidence,
            block_size=block_size,
            top_p=self.top_p,
            top_k=self.top_k,
            **settings,  # type: ignore[arg-type]
        )
