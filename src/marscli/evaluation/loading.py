"""A run's model, as every process of it loads it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from marscli import checkpoint as checkpoints
from marscli.evaluation.config import EvalConfig
from marscli.evaluation.lm import MarsLM, Progress

if TYPE_CHECKING:
    from marscli.evaluation.processes import Peers

logger = logging.getLogger(__name__)


def load_lm(
    config: EvalConfig, block_size: int, *, peers: Peers | None = None, progress: Progress | None = None
) -> tuple[checkpoints.Checkpoint, MarsLM]:
    """Load the checkpoint onto this process's device and make lm-eval's model of it.

    Raises:
        MarsError: Weights cannot be read or downloaded.
    """
    device = config.device
    if peers is not None and checkpoints.resolve_device(device).type == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    checkpoint = checkpoints.load(
        config.model,
        tokenizer=config.tokenizer,
        device=device,
        dtype=config.dtype,
        block_size=config.block_size,
        trust_remote_code=config.trust_remote_code,
    )
    penalty = getattr(checkpoint.model.generation_config, "repetition_penalty", None)
    if penalty not in (None, 1.0) and (peers is None or peers.rank == 0):
        logger.warning(
            "generation_config.json of %s sets repetition_penalty=%s, which lm-eval's hf model applies even to greedy "
            "answers; here the model's own choice is scored",
            config.model,
            penalty,
        )
    lm = MarsLM(
        checkpoint.model,
        checkpoint.tokenizer,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        batch_size=int(config.batch_size),
        block_size=block_size,
        confidence=config.confidence,
        verify=config.verify,
        draft_tokens=config.draft_tokens,
        compile=config.compile,
        seed=config.seed,
        progress=progress,
        peers=peers,
    )
    return checkpoint, lm
