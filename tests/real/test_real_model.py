"""The second tier, on a real MARS-tuned 135M model in float32: MARS_TEST_MODEL=DIR make test-real (some minutes)."""

import json
import os
import subprocess
import sys

import pytest
import torch

import marscli
from marscli.core.decoding import Engine, Request, decode
from marscli.core.params import DecodingParams

pytestmark = pytest.mark.real

QUESTIONS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did she earn?",
    "What is 3 + 4?",
    "Tom has 5 apples and buys 12 more, then gives 3 away. How many are left?",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint():
    return marscli.load(os.environ["MARS_TEST_MODEL"], dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(checkpoint):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        checkpoint.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]


@pytest.fixture(scope="module")
def greedy(checkpoint, prompts):
    """What transformers' generate gives for each prompt alone."""
    outputs = []
    for ids in prompts:
        output = checkpoint.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            suppress_tokens=[checkpoint.mask_token_id],
        )
        outputs.append(output[0, len(ids) :].tolist())
    return outputs


def run(checkpoint, prompts, params, **options):
    engine = Engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        **options,
    )
    return decode(engine, [Request(ids, params) for ids in prompts])


@pytest.mark.parametrize("rows", [1, 3])
def test_exact_equals_transformers_generate(checkpoint, prompts, greedy, rows):
    completions = run(checkpoint, prompts, DecodingParams(max_new_tokens=NEW_TOKENS), max_rows=rows)
    assert [completion.tokens for completion in completions] == greedy
    assert all(completion.tokens_per_forward == 1 for completion in completions)


def test_a_row_in_a_batch_equals_that_row_alone_and_without_a_cache(checkpoint, prompts):
    params = DecodingParams(max_new_tokens=NEW_TOKENS, threshold=0.7, block_size=checkpoint.block_size)
    together = run(checkpoint, prompts, params, max_rows=3)
    for ids, completion in zip(prompts, together, strict=True):
        for cache in ("row", "none"):
            alone = run(checkpoint, [ids], params, cache=cache)[0]
            assert alone.tokens == completion.tokens
            assert alone.forwards == completion.forwards
    assert sum(c.forwards for c in together) < sum(len(c.tokens) for c in together)


def test_the_command_line_writes_what_the_library_does(checkpoint, tmp_path):
    rows = [{"prompt": question} for question in QUESTIONS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "marscli", "generate", "-m", os.environ["MARS_TEST_MODEL"], "--dtype", "float32"]
    command += ["--input", "prompts.jsonl", "--output", "out.jsonl", "-b", "2", "-n", "24", "--threshold", "0.8"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    library = marscli.generate(checkpoint, QUESTIONS, threshold=0.8, max_new_tokens=24, batch_size=4)
    assert [result["text"] for result in results] == [result.text for result in library]
    assert [result["forwards"] for result in results] == [result.forwards for result in library]
