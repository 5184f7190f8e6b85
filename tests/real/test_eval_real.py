"""On the real 135M model: exact answers and likelihoods are those of lm-eval's own Hugging Face model."""

from __future__ import annotations

import os

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from marscli.checkpoint import load
from marscli.evaluation.lm import MarsLM

pytestmark = pytest.mark.real

QUESTIONS = [
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell altogether?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "Anna has 3 apples. She buys 4 bags with 5 apples each. How many apples does she have now?",
]


def test_answers_and_likelihoods_equal_lm_evals_own():
    checkpoint = load(os.environ["MARS_TEST_MODEL"], dtype="float32", device="cpu")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    mars = MarsLM(
        model,
        tokenizer,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        context_length=checkpoint.context_length,
        block_size=checkpoint.block_size or 1,
        batch_size=2,
    )
    settings = {"until": ["Q:", "\n\n"], "do_sample": False, "max_gen_toks": 48}
    prompts = [mars.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    asked = [Instance("generate_until", {}, (p, settings), 0, ("gsm8k", i, 1)) for i, p in enumerate(prompts)]
    model.generation_config.suppress_tokens = None if checkpoint.mask_token_id is None else [checkpoint.mask_token_id]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    assert mars.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    assert all(answer.forwards == len(answer.tokens) for answer in mars.take_usage().answers)

    if checkpoint.is_mars:
        mars.threshold = 0.8
        mars.generate_until(asked)
        answers = mars.take_usage().answers
        assert sum(len(a.tokens) for a in answers) > sum(a.forwards for a in answers)

    pairs = [(question, f" {number}") for question in QUESTIONS for number in (72, 3, 23)]
    choices = [Instance("loglikelihood", {}, pair, 0, ("choice", 0, 1)) for pair in pairs]
    ours, expected = mars.loglikelihood(choices), theirs.loglikelihood(choices, disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=1e-4)
