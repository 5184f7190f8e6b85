"""``mars train --dry-run``: what would be trained on, how long and with how much memory, without a weight loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from marscli import checkpoint
from marscli.data.encoding import Encoded
from marscli.data.prepare import DataReport
from marscli.training import lora
from marscli.training.config import TrainConfig
from marscli.training.inputs import STREAM_PROBE, count_steps, entries, read_inputs

if TYPE_CHECKING:
    from rich.console import Group

GIBIBYTE = 2**30


@dataclass(frozen=True)
class Piece:
    """A part of the example shown.

    Attributes:
        text: What it says.
        block: Number of its block in its response, from 0; None where it is not trained.
    """

    text: str
    block: int | None


@dataclass(frozen=True)
class Preview:
    """What a dry run found.

    Attributes:
        pieces: The first example, part by part.
        report: What became of the rows.
        mask_token: The mask token, None for the AR objective.
        steps: Optimizer steps of the run.
        examples_a_step: The global batch.
        longest: Entries (L + R, or L) of the longest example.
        weights: Weights of the model.
        trained: Weights that are trained.
        memory: Bytes by kind, see `memory.estimate_memory`.
        streaming: Whether only the first rows were read.
    """

    pieces: list[Piece]
    report: DataReport
    mask_token: str | None
    steps: int
    examples_a_step: int
    longest: int
    weights: int
    trained: int
    memory: dict[str, int]
    streaming: bool

    def to_json(self) -> dict[str, Any]:
        """What ``--dry-run --json`` prints."""
        return {
            "rows": self.report.to_json(),
            "rows_are_partial": self.streaming,
            "mask_token": self.mask_token,
            "steps": self.steps,
            "examples_a_step": self.examples_a_step,
            "longest_entries": self.longest,
            "weights": self.weights,
            "trained_weights": self.trained,
            "memory_bytes": self.memory,
            "example": [{"text": piece.text, "block": piece.block} for piece in self.pieces],
        }

    def to_rich(self) -> Group:
        """For a terminal; without colour, strokes still part the blocks."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        example = Text()
        for piece, before in zip(self.pieces, [None, *self.pieces], strict=False):
            if piece.block is None:
                example.append(piece.text, style="dim")
                continue
            if before is None or before.block is None:
                example.append("▕", style="bold red")
            elif self.mask_token is not None:
                example.append("│", style="bold red")
            example.append(piece.text, style="black on cyan" if piece.block % 2 == 0 else "black on green")
        legend = Text("The first example: what is not trained is dim", style="bold")
        legend.append("; ▕ a response begins" + ("" if self.mask_token is None else ", │ a block of masks"))

        report = self.report
        counts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        rows = f"{report.used:,} of {report.rows:,} used" + (", the first ones of a stream" if self.streaming else "")
        counts.add_row("rows", rows)
        for reason, number in report.dropped.items():
            counts.add_row("", f"{number:,} left out: {reason}")
        if report.truncated:
            counts.add_row("", f"{report.truncated:,} cut at --max-length")
        counts.add_row("examples", f"{report.examples:,}")
        counts.add_row("tokens", f"{report.tokens:,}, of them {report.response_tokens:,} in responses")
        counts.add_row("mask token", self.mask_token or "none")
        counts.add_row("steps", f"{self.steps:,} of {self.examples_a_step:,} examples")
        share = f", {self.trained:,} of them trained" if self.trained != self.weights else ""
        counts.add_row("weights", f"{self.weights:,}{share}")
        parts = ", ".join(f"{kind} {value / GIBIBYTE:.2f}" for kind, value in self.memory.items() if kind != "total")
        counts.add_row("memory, estimated", f"{self.memory['total'] / GIBIBYTE:.2f} GiB a device ({parts})")
        return Group(legend, Text(), example, Text(), counts)


def preview(config: TrainConfig) -> Preview:
    """Read config, tokenizer and rows, and say what a run would do. Nothing is written, and no weight is loaded.

    All rows are read, since counts and steps depend on them; of streamed data the first hundred.

    Raises:
        InputError: What would refuse the run.
    """
    from transformers import AutoConfig

    from marscli.training.arguments import check_reporting, choose_dtype
    from marscli.training.memory import count_weights, estimate_memory, lora_weights

    checkpoint.load_settings(config.model, trust_remote_code=config.trust_remote_code)
    device = checkpoint.resolve_device(config.device)
    check_reporting(config.report_to or ())
    if config.lora_rank is not None:
        lora.check_available()
    limit = min(config.limit or STREAM_PROBE, STREAM_PROBE) if config.streaming else config.limit
    inputs = read_inputs(replace(config, streaming=False, limit=limit))
    tokenizer, examples = inputs.tokenizer, inputs.examples
    assert examples is not None

    model_config = AutoConfig.from_pretrained(
        checkpoint.base_of(config.model), trust_remote_code=config.trust_remote_code
    )
    mask_token = None
    if config.objective == "mars":
        mask_token, _ = checkpoint.choose_mask_token(tokenizer, model_config.get_text_config().vocab_size)
    weights = count_weights(model_config, trust_remote_code=config.trust_remote_code)
    trained = weights if config.lora_rank is None else lora_weights(model_config, config.lora_rank)
    longest = max(entries(config, examples))
    memory = estimate_memory(
        config,
        model_config,
        weights=weights,
        rows=min(config.batch_size, len(examples)),
        entries=max(longest, config.max_length) if config.packing else longest,
        half=choose_dtype(config.dtype, device).itemsize == 2,
        flex=device.type == "cuda",
    )
    return Preview(
        pieces=_pieces(examples[0], tokenizer, config.block_size if mask_token else None),
        report=inputs.reader.report,
        mask_token=mask_token,
        steps=count_steps(config, examples, config.num_processes),
        examples_a_step=config.batch_size * config.grad_accum * config.num_processes,
        longest=longest,
        weights=weights,
        trained=trained,
        memory=memory,
        streaming=config.streaming,
    )


def _pieces(example: Encoded, tokenizer: Any, block_size: int | None) -> list[Piece]:
    pieces, done = [], 0
    for start, end in example.turns:
        pieces.append(Piece(tokenizer.decode(example.ids[done:start]), None))
        width = block_size or end - start
        pieces += [
            Piece(tokenizer.decode(example.ids[place : min(place + width, end)]), number)
            for number, place in enumerate(range(start, end, width))
        ]
        done = end
    return pieces
