"""The paper's block cache and Jacobi decoding, against transformers' ``generate`` and a slow block decoder."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marscli.core.block_cache import BlockEngine
from marscli.core.decoding import Engine, Request, decode
from marscli.core.engines import make_engine
from marscli.core.jacobi import JacobiEngine
from marscli.core.params import DecodingParams

from .test_decoding import THRESHOLDS, assert_invariants, assert_same, batches
from .tiny_models import MASK, memoriser, paper_reference, random_ids, tiny_model, transformers_greedy


def run(model, prompts, params, *, eos=(), rows=3, **options):
    engine = make_engine(model, mask_token_id=MASK, eos_token_ids=eos, context_length=256, max_rows=rows, **options)
    completions = decode(engine, [Request(prompt, params) for prompt in prompts])
    assert not engine.has_work
    return completions


@given(batches(), st.integers(1, 16), st.sampled_from(["jacobi", "block"]), st.integers(0, 6))
@settings(max_examples=24)
def test_exact_equals_transformers_generate(batch, max_new_tokens, mode, width):
    model, prompts, eos = batch
    params = DecodingParams(max_new_tokens=max_new_tokens, verify=mode == "jacobi", draft_tokens=width)
    options = {"jacobi": True} if mode == "jacobi" else {"cache": "block", "cache_block": width + 1}
    for prompt, completion in zip(prompts, run(model, prompts, params, eos=eos, **options), strict=True):
        assert_same(model, prompt, completion.tokens, transformers_greedy(model, prompt, max_new_tokens, eos))
        assert_invariants(completion, max_new_tokens, width + 1 if mode == "jacobi" else 1, eos)


def block_reference(model, prompt, *, limit, threshold, block_size, eos, cache_block):
    """The paper's scheme, its steps cut off at the ends of blocks; the first token of a block comes alone."""
    out = paper_reference(model, prompt, max_new_tokens=1, threshold=1.0, block_size=1, eos=eos)
    while len(out) < limit and out[-1] not in eos:
        in_block = (len(out) - 1) % cache_block + 1
        left = limit - len(out)
        most = 1 if in_block == cache_block else min(block_size, cache_block - in_block, left)
        wanted = min(most, left)
        out += paper_reference(
            model, prompt + out, max_new_tokens=wanted, threshold=threshold, block_size=wanted, eos=eos
        )[: _one_step(model, prompt + out, wanted, threshold, eos)]
    return out


def _one_step(model, ids, width, threshold, eos):
    """Tokens that one step of `paper_reference` keeps."""
    engine = Engine(model, mask_token_id=MASK, eos_token_ids=eos, context_length=256)
    engine.add(Request(ids, DecodingParams(max_new_tokens=width, threshold=threshold, block_size=width)))
    return len(engine.step()[0].tokens)


@given(batches(), THRESHOLDS, st.integers(1, 5), st.integers(1, 9), st.integers(1, 11))
@settings(max_examples=12)
def test_block_cache_equals_the_paper_alone(batch, threshold, block_size, cache_block, limit):
    model, prompts, eos = batch
    params = DecodingParams(max_new_tokens=limit, threshold=threshold, block_size=block_size)
    completions = run(model, prompts, params, eos=eos, cache="block", cache_block=cache_block)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = block_reference(
            model, prompt, limit=limit, threshold=threshold, block_size=block_size, eos=eos, cache_block=cache_block
        )
        assert_same(model, prompt, completion.tokens, expected)
        assert_invariants(completion, limit, block_size, eos)


def test_rows_of_a_block_wait_for_the_slowest_and_are_refilled_together():
    model, texts = memoriser()
    engine = BlockEngine(model, cache_block=8, mask_token_id=MASK, eos_token_ids=[], context_length=256, max_rows=2)
    fast = DecodingParams(max_new_tokens=12, threshold=0.5)
    slow = DecodingParams(max_new_tokens=12)
    ids = [engine.add(Request(texts[0][:4], params)) for params in (fast, slow, fast)]
    steps = []
    while engine.has_work:
        steps.append({record.request_id: len(record.tokens) for record in engine.step()})
    first, second, third = ids
    # One token with the prompt, 4 + 3 to the block's end; then it waits until the slow one has its eight.
    assert steps[:3] == [{first: 1, second: 1}, {first: 4, second: 1}, {first: 3, second: 1}]
    assert steps[3:8] == [{second: 1}] * 5
    assert steps[8] == {first: 1, second: 1}  # the block is cached
    assert all(third not in step for step in steps[:12])  # no refill before the last row has ended
    assert sum(step.get(third, 0) for step in steps) == 12
    assert all(1 <= count <= 4 for step in steps for count in step.values())


def test_jacobi_accepts_right_guesses():
    """A model that repeats itself is guessed right, without masks; offsets tell the guess's place."""
    model = tiny_model("llama", seed=2)
    prompts = [random_ids(8, seed) for seed in range(4)]
    completions = run(model, prompts, DecodingParams(max_new_tokens=60, draft_tokens=4), jacobi=True)
    assert max(completion.tokens_per_forward for completion in completions) > 1.1
    offsets = {offset for c in completions for record in c.records for offset in record.offsets}
    assert offsets <= {0, 1, 2, 3, 4}
    assert offsets > {0}


def test_what_cannot_be_combined_is_refused():
    model = tiny_model("llama")
    options = {"mask_token_id": None, "eos_token_ids": [], "context_length": 64}
    engine = make_engine(model, jacobi=True, **options)
    assert isinstance(engine, JacobiEngine)
    with pytest.raises(ValueError, match="threshold"):
        engine.add(Request([1, 2], DecodingParams(threshold=0.5)))
    with pytest.raises(ValueError, match="block cache"):
        make_engine(model, cache="block", jacobi=True, **options)
    with pytest.raises(ValueError, match="block"):
        BlockEngine(model, cache_block=0, **options)
