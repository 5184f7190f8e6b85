"""The prompts of a bench: read and checked before a model is loaded, turned into token ids after.

Greedy speed depends on what is written, so the built-in prompts mix the everyday uses of an instruct model: arithmetic
word problems, explanations, lists, code, rewriting. A file of one's own is better evidence for one's own use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marscli.benchmarking.results import Check
from marscli.data.rows import Row, RowError, read_rows
from marscli.errors import InputError
from marscli.generation.prompts import PromptRow, encode, row_from

BUILT_IN = (
    "A baker makes 24 rolls in the morning and 18 in the afternoon. She sells 29 of them. How many are left?",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a short docstring.",
    "List five things to check before a long bicycle trip.",
    "A train travels 60 km in the first hour and 75 km in the second. How far is it from a goal 180 km away?",
    "Rewrite this more politely: Send me the report today, I have been waiting for a week.",
    "What is the difference between weather and climate?",
    "Tom has 3 boxes with 12 pencils each and gives away 10 pencils. How many pencils does he keep?",
    "Summarise how a bill becomes a law, in three steps.",
    "Give me a simple recipe for pancakes with the amounts.",
    "Write a short e-mail that moves a meeting from Tuesday to Thursday.",
    "A shirt costs 40 dollars and is reduced by 25 percent. What do 3 such shirts cost?",
    "Name three causes of the First World War and explain each in one sentence.",
    "Write an SQL query that counts the orders of each customer in the year 2023.",
    "How do vaccines protect us against a disease?",
    "Anna reads 15 pages a day. Her book has 240 pages and she has read 90. How many more days does she need?",
)

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """One prompt, and the reference answer's number where the data carries one."""

    row: PromptRow
    answer: float | None = None


def load_prompts(source: str | None, limit: int) -> tuple[list[Prompt], int]:
    """Read the prompts.

    Args:
        source: File or Hub id, as `data.rows.read_rows` takes it, with rows of ``prompt``, ``messages``, ``question``
            or ``instruction`` (``answer`` beside it, as in GSM8K, gives the accuracy); None takes the built-in ones.
        limit: Only the first so many.

    Returns:
        The prompts, and how many there are without the limit.

    Raises:
        InputError: The source cannot be read, holds no prompt, or a row is not understood (names file and line).
    """
    if source is None:
        prompts = [Prompt(PromptRow(text)) for text in BUILT_IN]
        return prompts[:limit], len(prompts)
    rows = list(read_rows(source))
    if not rows:
        raise InputError(f"--dataset {source}: no rows in the file", hint='write one {"prompt": "…"} object a line')
    return [_prompt(row) for row in rows[:limit]], len(rows)


def _prompt(row: Row) -> Prompt:
    where, data = f"--dataset {row.where}", row.data
    if isinstance(data, RowError):
        raise InputError(f"{where}: {data}", hint='for example {"prompt": "Why is the sky blue?"}')
    wanted = {key: data[key] for key in ("messages", "prompt", "question", "instruction") if data.get(key) is not None}
    if not wanted:
        raise InputError(
            f"{where}: no prompt; its keys are {', '.join(map(repr, data)) or 'none'}",
            hint="a row needs a text under prompt, question or instruction, or a list under messages",
        )
    key, value = next(iter(wanted.items()))
    if isinstance(value, list):
        # Training rows end with the answer that the model is to write now.
        while value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
            value = value[:-1]
    elif key == "instruction" and data.get("input"):
        value = f"{value}\n\n{data['input']}"
    key = "messages" if key == "messages" or isinstance(value, list) else "prompt"
    return Prompt(row_from({key: value}, where), reference_number(data.get("answer")))


def reference_number(answer: Any) -> float | None:
    """The number of a GSM8K-style answer (after ``####``) or of an answer that is a number; None for anything else."""
    text = str(answer).rpartition("####")[2].strip()
    match = _NUMBER.fullmatch(text.lstrip("$").rstrip("."))
    return float(match[0].replace(",", "")) if match and answer is not None else None


def given_number(text: str) -> float | None:
    """The last number of a text, that after ``####`` first."""
    numbers = _NUMBER.findall(text.rpartition("####")[2]) or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    context_length: int,
    chat_template: bool | None = None,
    system: str | None = None,
    prompt_tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of the prompts.

    Args:
        prompts: As read.
        tokenizer: Of the model.
        context_length: Of the model.
        chat_template: Whether to use the tokenizer's chat template; None: where it has one.
        system: System message put before each dialogue.
        prompt_tokens: Give every prompt this length: the ids of all prompts make a ring, read from its own start.

    Raises:
        InputError: A prompt is empty or too long, or there is no chat template where one is needed.
    """
    encoded = [
        encode(tokenizer, prompt.row, context_length=context_length, chat_template=chat_template, system=system)[0]
        for prompt in prompts
    ]
    if prompt_tokens is None:
        return encoded
    ring = [token for ids in encoded for token in ids]
    starts = [sum(map(len, encoded[:place])) for place in range(len(encoded))]
    return [[ring[(start + step) % len(ring)] for step in range(prompt_tokens)] for start in starts]


def checks(prompts: Sequence[Prompt], tokenizer: Any) -> list[Check | None] | None:
    """One function a prompt, completion ids → whether its number is the reference's; None if none has a reference."""
    if all(prompt.answer is None for prompt in prompts):
        return None

    def check(answer: float) -> Check:
        return lambda ids: given_number(tokenizer.decode(list(ids), skip_special_tokens=True)) == answer

    return [None if prompt.answer is None else check(prompt.answer) for prompt in prompts]
