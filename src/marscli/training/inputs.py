"""What a run is fed with: the tokenizer, and the rows of its data sets as token ids."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marscli import checkpoint
from marscli.data.encoding import Encoder
from marscli.data.prepare import DataReport, ExampleReader
from marscli.data.rows import check_source
from marscli.data.store import ExampleStore
from marscli.errors import InputError
from marscli.training.batching import TrainingSet, pack_rows
from marscli.training.config import TrainConfig

logger = logging.getLogger(__name__)

STREAM_PROBE = 100


@dataclass(frozen=True)
class Inputs:
    """A run's tokenizer and data.

    Attributes:
        tokenizer: Of the model.
        eos_token_ids: Tokens that end an answer.
        reader: Of the training data; its report tells what was read.
        examples: The training data; None when it is streamed.
        eval_examples: The data held out, if there is any.
        eval_report: What became of its rows.
    """

    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    reader: ExampleReader
    examples: ExampleStore | None
    eval_examples: ExampleStore | None = None
    eval_report: DataReport | None = None


def read_inputs(config: TrainConfig) -> Inputs:
    """Load the tokenizer and read all data, or of streamed data nothing yet.

    Raises:
        InputError: A source that cannot be read, bad rows, no row left, or a tokenizer that does not fit the options.
    """
    for source in config.dataset:
        check_source(source)
    encoder = make_encoder(config)
    reader = make_reader(config, config.dataset, encoder, limit=config.limit)
    examples = None
    if config.streaming:
        # Most faults of a data set show in its first rows: better now than once the model is loaded.
        make_reader(config, config.dataset, encoder, limit=min(config.limit or STREAM_PROBE, STREAM_PROBE)).read_all()
    else:
        examples = reader.read_all()
        _tell(config, reader.report, "")
    eval_examples = eval_report = None
    if config.eval_dataset:
        held_out = make_reader(config, config.eval_dataset, encoder)
        try:
            eval_examples = held_out.read_all()
        except InputError as error:
            raise InputError(error.message.replace("--dataset", "--eval-dataset"), hint=error.hint) from error
        eval_report = held_out.report
        _tell(config, eval_report, "held out: ")
    return Inputs(encoder.tokenizer, tuple(sorted(encoder.eos_token_ids)), reader, examples, eval_examples, eval_report)


def count_steps(config: TrainConfig, examples: ExampleStore | None, processes: int) -> int:
    """Optimizer steps of a run over these examples; None where they are streamed."""
    if config.max_steps is not None:
        return config.max_steps
    assert examples is not None
    rows = len(examples)
    if config.packing:
        lengths = entries(config, examples)
        rows = len(pack_rows(lengths, max(config.max_length, *lengths), config.seed))
    forwards = math.ceil(rows / (config.batch_size * processes))
    return math.ceil(config.epochs * math.ceil(forwards / config.grad_accum))


def entries(config: TrainConfig, examples: ExampleStore) -> list[int]:
    """Entries of each example in a forward: L + R, for the AR objective L."""
    block_size = config.block_size if config.objective == "mars" else None
    return TrainingSet(examples, block_size=block_size, mask_token_id=None).lengths()


def make_encoder(config: TrainConfig) -> Encoder:
    """The encoder for the model's tokenizer.

    Raises:
        InputError: The tokenizer cannot be read or does not fit the options.
    """
    tokenizer = checkpoint.load_tokenizer(config.tokenizer or config.model, trust_remote_code=config.trust_remote_code)
    if config.chat_template and not tokenizer.chat_template:
        raise InputError(
            "--chat-template: the tokenizer has none", hint="leave the option out, or use an instruction-tuned model"
        )
    ends = checkpoint.eos_token_ids(config.model, tokenizer)
    if not ends:
        raise InputError(
            f"--model {config.model} has no end-of-sequence token, so no answer would ever end",
            hint="set eos_token in its tokenizer, or eos_token_id in its generation_config.json",
        )
    encoder = Encoder(tokenizer, ends, chat_template=config.chat_template is not False)
    if config.system is not None and not encoder.uses_template:
        raise InputError(
            "--system: without a chat template there is no place for a system message",
            hint="leave it out, or write it at the beginning of the prompts",
        )
    if not encoder.uses_template:
        logger.info("no chat template is used: prompt and answer are joined as they are")
    return encoder


def make_reader(
    config: TrainConfig, sources: Sequence[str], encoder: Encoder, limit: int | None = None
) -> ExampleReader:
    """A reader of data sets, by the run's options."""
    return ExampleReader(
        sources,
        encoder,
        max_length=config.max_length,
        prompt_field=config.prompt_field,
        response_field=config.response_field,
        system=config.system,
        skip_bad_rows=config.skip_bad_rows,
        limit=limit,
    )


def _tell(config: TrainConfig, report: DataReport, what: str) -> None:
    logger.info(
        f"{what}{report.used:,} of {report.rows:,} rows, {report.tokens:,} tokens, "
        f"{report.response_tokens:,} in responses"
    )
    if report.dropped:
        reasons = ", ".join(f"{number} ({reason})" for reason, number in report.dropped.items())
        logger.warning(f"{what}rows left out: {reasons}")
    if report.truncated:
        noun = "response" if report.truncated == 1 else "responses"
        logger.warning(f"{what}{report.truncated:,} {noun} cut at --max-length {config.max_length}")
