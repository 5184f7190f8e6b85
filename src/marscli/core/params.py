"""What a request may ask of the decoder, as one frozen value. Imports no torch, so the command line can use it.

τ (``threshold``) is a float, or None for the exact setting. Exactness is a switch and not a comparison: in float32 a
probability can round to 1.0, so ``>= 1.0`` would keep an unverified token now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from marscli.errors import InputError

Confidence = Literal["probability", "entropy", "margin"]
CONFIDENCES: tuple[Confidence, ...] = get_args(Confidence)

LARGEST_INT = 2**63 - 1  # of the tensors that carry a request's numbers
LARGEST_SEED = 2**32 - 2**16  # numpy's limit, less what lm-eval's own seeds add


@dataclass(frozen=True)
class DecodingParams:
    """Parameters of one request; any of them may change between two steps (`Engine.set_params`).

    Attributes:
        max_new_tokens: Upper limit of completion tokens, the end-of-sequence token included. Never exceeded.
        threshold: τ, what may be kept unverified; None is the exact setting (one-token mode's output).
        confidence: The measure that τ is compared with: probability of the top token (keep while ≥ τ), entropy in
            nats (keep while ≤ τ), or margin p1 − p2 (keep while ≥ τ).
        verify: Keep what τ did not pass as drafts, which the next forward verifies: then exact decoding too takes
            several tokens from a forward.
        block_size: B; a step predicts at most B tokens, from B − 1 masks. 1 is AR decoding.
        draft_tokens: With ``verify``: masks a group and drafts verified a step. None takes B − 1 below exact; in exact
            mode, where the output cannot depend on it, the engine then chooses step by step, up to B − 1.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Number of candidates; 0 is off.
        seed: Sampling noise is a function of (seed, position, token) alone.

    Raises:
        InputError: A value is outside its range.
    """

    max_new_tokens: int = 256
    threshold: float | None = None
    confidence: Confidence = "probability"
    verify: bool = False
    block_size: int = 4
    draft_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise InputError(
                f"--confidence {self.confidence!r} is unknown", hint=f"use one of {', '.join(CONFIDENCES)}"
            )
        if self.threshold is not None:
            check_threshold(self.threshold, self.confidence)
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens {self.max_new_tokens} is below 1", hint="ask for at least one token")
        if self.block_size < 1:
            raise InputError(
                f"--block-size {self.block_size} is below 1",
                hint="use 1 for AR decoding, or the checkpoint's block size",
            )
        if self.draft_tokens is not None and self.draft_tokens < 0:
            raise InputError(f"--draft-tokens {self.draft_tokens} is negative", hint="0 is one token a forward")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"--temperature {self.temperature} is not a number ≥ 0", hint="0 is greedy decoding")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p {self.top_p} is outside (0, 1]", hint="1 switches nucleus sampling off")
        if not 0 <= self.top_k <= LARGEST_INT:
            raise InputError(f"--top-k {self.top_k} is not a number of tokens", hint="0 switches top-k sampling off")
        if abs(self.seed) > LARGEST_INT:
            raise InputError(f"--seed {self.seed} does not fit into 64 bits", hint="use a smaller number")

    @property
    def exact(self) -> bool:
        """Whether nothing may be kept unverified."""
        return self.threshold is None

    @property
    def masks(self) -> int:
        """Masks a group: as many as could be kept unverified or as drafts."""
        if self.verify and self.draft_tokens is not None:
            return self.draft_tokens
        return self.block_size - 1 if self.verify or not self.exact else 0

    @property
    def adaptive(self) -> bool:
        """Whether the engine chooses the width."""
        return self.exact and self.verify and self.draft_tokens is None and self.block_size > 1

    @property
    def drafts(self) -> int:
        """Drafts that a step may leave for the next one to verify."""
        return self.masks if self.verify else 0


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy or torch would not take; for runs that seed more than their sampling noise."""
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"--seed {seed} is outside 0 … {LARGEST_SEED}", hint="use a small whole number, such as 0")


def check_threshold(threshold: float, confidence: Confidence) -> None:
    """Refuse a τ outside the range of its measure."""
    if confidence == "entropy":
        if not (math.isfinite(threshold) and threshold >= 0):
            raise InputError(
                f"--threshold {threshold} is not an entropy in nats (≥ 0)", hint="use a number such as 0.3, or exact"
            )
    elif not 0 < threshold <= 1:
        raise InputError(
            f"--threshold {threshold} is outside (0, 1]",
            hint="use exact, or a number such as 0.9: lower keeps more tokens a forward",
        )


def parse_threshold(value: str | float | None, confidence: Confidence = "probability") -> float | None:
    """Read τ as the command line takes it.

    Args:
        value: ``"exact"`` (or None, as Python callers may put it), or a number: in (0, 1] for probability and margin,
            ≥ 0 for entropy.
        confidence: The measure that τ belongs to.

    Returns:
        τ, or None for the exact setting, which 1.0 (for entropy 0) means too.

    Raises:
        InputError: Not a number, or outside the measure's range.

    Example:
        >>> parse_threshold("exact"), parse_threshold("0.9"), parse_threshold(1.0), parse_threshold(0, "entropy")
        (None, 0.9, None, None)
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == "exact"):
        return None
    try:
        threshold = float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"--threshold {value!r} is neither exact nor a number", hint="for example exact, or 0.9"
        ) from None
    check_threshold(threshold, confidence)
    return None if threshold == exact_number(confidence) else threshold


def exact_number(confidence: Confidence) -> float:
    """The number that stands for the exact setting: 1.0, for entropy 0.0."""
    return 0.0 if confidence == "entropy" else 1.0


def threshold_number(threshold: float | None, confidence: Confidence = "probability") -> float:
    """τ as JSON results hold it: a number, `exact_number` when exact."""
    return exact_number(confidence) if threshold is None else threshold
