"""The prompts of a bench: read and checked before a model is loaded, turned into token ids after.

Greedy speed depends on what is written, so the built-in prompts mix the everyday uses of an instruct model: arithmetic
word problems, explanations, lists, code, rewriting. A file of one's own is better evidence for one's own use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def load_prompts(path: Path | None, limit: int) -> tuple[list[Prompt], int]:
    """Read the prompts.

    Args:
        path: JSONL file with rows of ``prompt``, ``messages`` or ``question`` (``answer`` beside it, as in GSM8K, gives
            the accuracy); None takes the built-in ones.
        limit: Only the first so many.

    Returns:
        The prompts, and how many there are without the limit.

    Raises:
        InputError: The file cannot be read, holds no prompt, or a row is not understood (names file and line).
    """
    if path is None:
        prompts = [Prompt(PromptRow(text)) for text in BUILT_IN]
    else:
        prompts = [_prompt(row, f"--dataset {path}, line {line}") for line, row in _rows(path)]
        if not prompts:
            raise InputError(f"--dataset {path}: no rows in the file", hint='write one {"prompt": "…"} object a line')
    return prompts[:limit], len(prompts)


def _rows(path: Path) -> list[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"--dataset {path}: no such file", hint="give a JSONL file with a prompt a line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--dataset {path}: cannot be read ({error})", hint="give a JSONL file in UTF-8") from None
    rows = []
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            try:
                rows.append((line, json.loads(content)))
            except json.JSONDecodeError as error:
                raise InputError(
                    f"--dataset {path}, line {line}: not valid JSON ({error.msg})", hint="write one JSON object a line"
                ) from None
    return rows


def _prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise InputError(f"{where}: not a JSON object", hint='for example {"prompt": "Why is the sky blue?"}')
    wanted = {key: row[key] for key in ("messages", "prompt", "question") if row.get(key) is not None}
    if not wanted:
        raise InputError(
            f"{where}: no prompt; its keys are {', '.join(map(repr, row)) or 'none'}",
            hint="a row needs a text under prompt or question, or a list under messages",
        )
    key, value = next(iter(wanted.items()))
    if key == "messages" and isinstance(value, list):
        # Training rows end with the answer that the model is to write now.
        while value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
            value = value[:-1]
    return Prompt(
        row_from({"messages" if key == "messages" else "prompt": value}, where), reference_number(row.get("answer"))
    )


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


def checks(prompts: Sequence[Prompt], tokenizer: Any) -> list[Callable[[Sequence[int]], bool] | None] | None:
    """One function a prompt, completion ids → whether its number is the reference's; None if none has a reference."""
    if all(prompt.answer is None for prompt in prompts):
        return None

    def check(answer: float) -> Callable[[Sequence[int]], bool]:
        return lambda ids: given_number(tokenizer.decode(list(ids), skip_special_tokens=True)) == answer

    return [None if prompt.answer is None else check(prompt.answer) for prompt in prompts]
