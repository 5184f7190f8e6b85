"""The second tier, on a real MARS-tuned 135M model in float32: MARS_TEST_MODEL=DIR make test-real (some minutes)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import marscli
from marscli.core import decoding
from marscli.core.compiled import CompiledModel
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


@pytest.mark.parametrize("draft_tokens", [None, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_verified_exact_equals_transformers_generate_in_fewer_forwards(checkpoint, prompts, greedy, rows, draft_tokens):
    """The width chosen step by step, and a fixed one."""
    params = DecodingParams(
        max_new_tokens=NEW_TOKENS, verify=True, draft_tokens=draft_tokens, block_size=checkpoint.block_size
    )
    completions = run(checkpoint, prompts, params, max_rows=rows)
    assert [completion.tokens for completion in completions] == greedy
    if draft_tokens is not None:
        tokens, forwards = sum(len(c.tokens) for c in completions), sum(c.forwards for c in completions)
        assert tokens > 1.5 * forwards


def test_sampled_verified_equals_sampled_one_token(checkpoint, prompts):
    settings = {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.95, "seed": 11}
    verified = DecodingParams(verify=True, block_size=checkpoint.block_size, **settings)
    one_token = run(checkpoint, prompts, DecodingParams(**settings), max_rows=4)
    assert [c.tokens for c in run(checkpoint, prompts, verified, max_rows=2)] == [c.tokens for c in one_token]


def test_a_compiled_model_gives_the_same_in_a_handful_of_compilations(monkeypatch):
    """Without code generation, which takes minutes; a tiny model, since tracing alone takes most of one."""
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    monkeypatch.setattr(decoding, "CompiledModel", lambda model: CompiledModel(model, backend="eager"))
    torch._dynamo.utils.counters.clear()
    requests = [
        Request(list(range(3, 8 + 9 * i)), DecodingParams(max_new_tokens=12, verify=verify, draft_tokens=2))
        for i in range(4)
        for verify in (False, True)
    ]
    for rows in (1, 3):
        options = {"mask_token_id": 1, "eos_token_ids": [], "context_length": 128, "max_rows": rows}
        compiled, plain = (decode(Engine(model, compile=flag, **options), requests) for flag in (True, False))
        assert [c.tokens for c in compiled] == [c.tokens for c in plain]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


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
