"""The engine against transformers' ``generate`` and against slow decoders, in float32.

A difference is excused only where the reference's two best logits are within 1e-5; those are counted and must be rare.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from marscli.core.decoding import MAX_PREFILL_ENTRIES, Engine, Request, decode
from marscli.core.params import DecodingParams
from marscli.core.width import StepCost, WidthPolicy, Widths
from marscli.errors import InputError

from .tiny_models import (
    ARCHITECTURES,
    MASK,
    is_tie,
    memoriser,
    paper_reference,
    random_ids,
    tiny_model,
    transformers_greedy,
)

counts = Counter()  # comparisons, and those that a tie excused
THRESHOLDS = st.sampled_from([0.05, 0.2, 0.4, 0.6, 0.9])


@pytest.fixture(scope="module", autouse=True)
def ties_are_rare():
    yield
    assert counts["excused"] <= counts["compared"] // 50, counts


def assert_same(model, prompt, got, expected):
    """Equal, or different from a tie on."""
    counts["compared"] += 1
    if got == expected:
        return
    agreed = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    assert agreed is not None, f"one is cut short: {got} {expected}"
    assert is_tie(model, prompt + expected[:agreed]), (agreed, got, expected)
    counts["excused"] += 1


def engine_for(model, eos=(), **options):
    options.setdefault("max_rows", 4)
    return Engine(model, mask_token_id=MASK, eos_token_ids=eos, context_length=256, **options)


def outputs(engine, prompts, params):
    params = params if isinstance(params, list) else [params] * len(prompts)
    requests = [Request(ids, p) for ids, p in zip(prompts, params, strict=True)]
    return decode(engine, requests)


@st.composite
def batches(draw):
    """A model, prompts of 1 … 40 tokens, and some of the model's usual tokens as end-of-sequence tokens."""
    model = tiny_model(draw(st.sampled_from(ARCHITECTURES)), seed=draw(st.integers(0, 2)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    prompts = [random_ids(length, draw(st.integers(0, 10**6))) for length in lengths]
    usual = transformers_greedy(model, prompts[0], 8, [])
    eos = draw(st.lists(st.sampled_from(usual), max_size=2, unique=True))
    return model, prompts, eos


@given(batches(), st.integers(1, 16))
@settings(max_examples=40)
def test_exact_equals_transformers_generate(batch, max_new_tokens):
    model, prompts, eos = batch
    params = DecodingParams(max_new_tokens=max_new_tokens, block_size=4)
    for prompt, completion in zip(prompts, outputs(engine_for(model, eos), prompts, params), strict=True):
        assert_same(model, prompt, completion.tokens, transformers_greedy(model, prompt, max_new_tokens, eos))
        assert completion.forwards == len(completion.tokens)


class RandomWidths(WidthPolicy):
    """Chooses any drafts and masks at all: exact decoding must give the same whatever a policy does."""

    def __init__(self, most_masks, seed):
        super().__init__(most_masks)
        self.random = np.random.default_rng(seed)

    def choose(self, confidence, counts, spare, *, rows, floor=1):
        drafts = self.random.integers(0, counts + 1)
        groups = self.random.integers(0, self.most_masks + 1, size=(len(counts), confidence.shape[1] + 1))
        return Widths(drafts, np.where(np.arange(groups.shape[1]) <= drafts[:, None], groups, 0))


@given(batches(), st.one_of(st.none(), st.integers(0, 5)), st.integers(1, 3), st.integers(1, 16), st.integers(0, 99))
@settings(max_examples=60)
def test_verified_exact_equals_transformers_generate(batch, draft_tokens, rows, max_new_tokens, seed):
    """Several tokens from a forward, and every one of them AR decoding's, at any width and whatever the drafts."""
    model, prompts, eos = batch
    params = DecodingParams(max_new_tokens=max_new_tokens, verify=True, draft_tokens=draft_tokens, block_size=5)
    policy = RandomWidths(4, seed) if seed % 2 else None
    completions = outputs(engine_for(model, eos, max_rows=rows, policy=policy), prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_same(model, prompt, completion.tokens, transformers_greedy(model, prompt, max_new_tokens, eos))
        assert_invariants(completion, max_new_tokens, 5 if draft_tokens is None else draft_tokens + 1, eos)


@given(
    batches(),
    st.one_of(st.none(), THRESHOLDS),
    st.one_of(st.none(), st.integers(0, 4)),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_verified_in_a_batch_equals_verified_alone_and_uncached(batch, threshold, draft_tokens, temperature, seed):
    """Also where the width is chosen step by step; below exact it is not, so that it cannot change the output."""
    model, prompts, eos = batch
    params = DecodingParams(
        max_new_tokens=11,
        threshold=threshold,
        verify=True,
        draft_tokens=draft_tokens,
        temperature=temperature,
        seed=seed,
    )
    together = outputs(engine_for(model, eos, max_rows=3, policy=RandomWidths(3, seed)), prompts, params)
    for prompt, completion in zip(prompts, together, strict=True):
        for cache in ("row", "none"):
            alone = outputs(engine_for(model, eos, cache=cache, max_rows=1), [prompt], params)[0]
            assert_same(model, prompt, completion.tokens, alone.tokens)
        if threshold is None:  # sampled too: the noise is a function of seed, position and token
            one_token = DecodingParams(max_new_tokens=11, temperature=temperature, seed=seed)
            plain = outputs(engine_for(model, eos, max_rows=1), [prompt], one_token)[0]
            assert_same(model, prompt, completion.tokens, plain.tokens)


@given(batches(), THRESHOLDS, st.integers(1, 5), st.data())
@settings(max_examples=40)
def test_threshold_in_a_batch_equals_the_paper_alone(batch, threshold, block_size, data):
    """Cached, batched, with refill, equals the definition: no cache, one row, an ordinary causal forward."""
    model, prompts, eos = batch
    limit = data.draw(st.integers(1, 2 * block_size + 1))
    params = DecodingParams(max_new_tokens=limit, threshold=threshold, block_size=block_size)
    engine = engine_for(model, eos, max_rows=data.draw(st.integers(1, 4)))
    for prompt, completion in zip(prompts, outputs(engine, prompts, params), strict=True):
        expected = paper_reference(
            model, prompt, max_new_tokens=limit, threshold=threshold, block_size=block_size, eos=eos
        )
        assert_same(model, prompt, completion.tokens, expected)
        assert_invariants(completion, limit, block_size, eos)
    assert not engine.has_work


def assert_invariants(completion, limit, block_size, eos):
    assert 1 <= len(completion.tokens) <= limit
    assert MASK not in completion.tokens
    assert not set(completion.tokens[:-1]) & set(eos)
    assert all(1 <= len(record.tokens) == len(record.offsets) <= block_size for record in completion.records)
    ended = completion.tokens[-1] in eos
    assert completion.finish_reason == ("stop" if ended else "length")
    assert ended or len(completion.tokens) == limit
    assert [r.finish_reason for r in completion.records[:-1]] == [None] * (completion.forwards - 1)
    assert [r.prefill for r in completion.records] == [True] + [False] * (completion.forwards - 1)


@given(batches(), st.lists(st.tuples(THRESHOLDS, st.integers(1, 5)), min_size=5, max_size=5), st.data())
@settings(max_examples=25)
def test_rows_with_settings_of_their_own_equal_these_rows_alone(batch, settings_of_rows, data):
    model, prompts, eos = batch
    measures = data.draw(st.lists(st.sampled_from(["probability", "margin", "entropy"]), min_size=5, max_size=5))
    params = [
        DecodingParams(
            max_new_tokens=12,
            threshold=threshold,
            confidence=measure,
            block_size=block_size,
            temperature=data.draw(st.sampled_from([0.0, 0.7])),
            top_k=data.draw(st.sampled_from([0, 5])),
            seed=seed,
        )
        for seed, ((threshold, block_size), measure) in enumerate(zip(settings_of_rows, measures, strict=True))
    ][: len(prompts)]
    together = outputs(engine_for(model, eos), prompts, params)
    for prompt, mine, completion in zip(prompts, params, together, strict=True):
        for cache in ("row", "none"):
            alone = outputs(engine_for(model, eos, cache=cache, max_rows=1), [prompt], mine)[0]
            assert_same(model, prompt, completion.tokens, alone.tokens)


@pytest.mark.parametrize("cache", ["row", "none"])
@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_max_new_tokens_is_never_exceeded(max_new_tokens, cache):
    """For every value from 1 to 2B + 1, also where everything is kept."""
    params = DecodingParams(max_new_tokens=max_new_tokens, threshold=1e-6, block_size=4)
    completion = outputs(engine_for(tiny_model("qwen2"), cache=cache), [random_ids(5, 1)], params)[0]
    assert len(completion.tokens) == max_new_tokens
    assert completion.finish_reason == "length"
    assert completion.forwards == -(-max_new_tokens // 4)


@pytest.mark.parametrize("threshold", [None, 1e-6])
@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_the_context_is_never_exceeded(threshold, room):
    engine = Engine(tiny_model("llama"), mask_token_id=MASK, eos_token_ids=[], context_length=20)
    params = DecodingParams(max_new_tokens=50, threshold=threshold)
    completion = outputs(engine, [random_ids(20 - room, 3)], params)[0]
    assert (len(completion.tokens), completion.finish_reason) == (room, "context")


@pytest.mark.parametrize("length", [20, 21, 35])
def test_a_prompt_that_fills_the_context_is_refused_by_how_much(length):
    engine = Engine(tiny_model("llama"), mask_token_id=MASK, eos_token_ids=[], context_length=20)
    with pytest.raises(ValueError, match=f"{length} tokens, {length - 19} more"):
        engine.add(Request(random_ids(length, 0)))
    with pytest.raises(ValueError, match="empty"):
        engine.add(Request([]))


def test_an_end_token_in_the_middle_of_a_step_ends_the_row():
    model = tiny_model("qwen2")
    prompt = random_ids(6, 2)
    everything = DecodingParams(max_new_tokens=8, threshold=1e-6, block_size=8)
    free = outputs(engine_for(model), [prompt], everything)[0].tokens
    middle = next(token for token in free[1:6] if token != free[0])
    cut = outputs(engine_for(model, [middle]), [prompt], everything)[0]
    assert cut.tokens == free[: free.index(middle) + 1]
    assert (cut.finish_reason, cut.forwards) == ("stop", 1)


def test_set_params_changes_a_running_request_and_only_that():
    model = tiny_model("qwen3")
    engine = engine_for(model)
    prompts = [random_ids(7, 4), random_ids(3, 5)]
    slow = DecodingParams(max_new_tokens=20, block_size=4)
    ids = [engine.add(Request(prompt, slow)) for prompt in prompts]
    kept = {request_id: [] for request_id in ids}
    for step in range(6):
        if step == 2:
            engine.set_params(ids[0], threshold=1e-6)
        if step == 4:
            engine.set_params(ids[0], threshold=None)
        for record in engine.step():
            kept[record.request_id].append(len(record.tokens))
    assert kept == {ids[0]: [1, 1, 4, 4, 1, 1], ids[1]: [1] * 6}
    with pytest.raises(ValueError, match="12 tokens"):
        engine.set_params(ids[0], max_new_tokens=12)
    with pytest.raises(InputError):
        engine.set_params(ids[0], threshold=1.5)


def test_cancelled_requests_leave_the_others_alone_and_nothing_behind():
    model = tiny_model("qwen2")
    prompts = [random_ids(4 + i, i) for i in range(6)]
    params = DecodingParams(max_new_tokens=9, threshold=0.3)
    alone = [outputs(engine_for(model, max_rows=1), [prompt], params)[0].tokens for prompt in prompts]
    engine = engine_for(model, max_rows=3)
    ids = [engine.add(Request(prompt, params)) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    for record in engine.step():
        tokens[record.request_id] += record.tokens
    for cancelled in (ids[0], ids[4]):  # one is running, one is waiting
        engine.cancel(cancelled)
        with pytest.raises(KeyError):
            engine.cancel(cancelled)
    while engine.has_work:
        for record in engine.step():
            tokens[record.request_id] += record.tokens
    for index, request_id in enumerate(ids):
        if request_id in (ids[0], ids[4]):
            assert tokens[request_id] != alone[index]
        else:
            assert tokens[request_id] == alone[index]


def test_the_cache_stays_flat_over_a_thousand_requests():
    engine = engine_for(tiny_model("llama"), max_rows=8)
    params = DecodingParams(max_new_tokens=4, threshold=0.3, verify=True)
    sizes = set()
    for start in range(0, 1000, 50):
        outputs(engine, [random_ids(5 + i % 7, start + i) for i in range(50)], params)
        sizes.add(engine.cache.nbytes)
    # 2 layers, keys and values, 8 places, 64 slots, 2 heads of 8, 4 bytes
    assert sizes == {2 * 2 * 8 * 64 * 2 * 8 * 4}


def test_two_hundred_cancelled_requests_leave_nothing_behind():
    engine = engine_for(tiny_model("qwen2"), max_rows=4)
    params = DecodingParams(max_new_tokens=40, verify=True)
    before = None
    for start in range(0, 200, 8):  # half of them are running, half are waiting
        ids = [engine.add(Request(random_ids(3 + i, start + i), params)) for i in range(8)]
        engine.step()
        engine.step()
        for request_id in ids:
            engine.cancel(request_id)
        assert not engine.has_work
        assert engine.step() == []
        before = before or engine.cache.nbytes
    assert engine.cache.nbytes == before
    prompt = random_ids(6, 1)
    alone = outputs(engine_for(tiny_model("qwen2"), max_rows=1), [prompt], params)[0]
    assert outputs(engine, [prompt], params)[0].tokens == alone.tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_two_hundred_prompts_at_every_width(architecture, temperature):
    """Verified exact decoding is one-token mode, at every fixed width, chosen widths and random ones."""
    model = tiny_model(architecture, seed=1)
    prompts = [random_ids(1 + number % 23, number) for number in range(200)]
    params = DecodingParams(max_new_tokens=10, block_size=4, temperature=temperature, seed=9)
    eos = transformers_greedy(model, prompts[0], 8, [])[-1:]
    expected = outputs(engine_for(model, eos, max_rows=32), prompts, params)
    ties = 0
    for draft_tokens, policy in (*((k, None) for k in range(4)), (None, None), (None, RandomWidths(3, 1))):
        verified = replace(params, verify=True, draft_tokens=draft_tokens)
        found = outputs(engine_for(model, eos, max_rows=32, policy=policy), prompts, verified)
        for prompt, one, several in zip(prompts, expected, found, strict=True):
            if temperature == 0:
                assert_same(model, prompt, several.tokens, one.tokens)
            else:
                ties += several.tokens != one.tokens
    assert ties <= 2  # of 1,200: draws whose scores agree to rounding


class FreeEntries(StepCost):
    """Steps of all widths cost about the same, whatever the clock says."""

    def observe(self, entries, seconds):
        super().observe(entries, 1.0 + 1e-3 * entries)


@pytest.mark.parametrize("draft_tokens", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_memoriser_takes_several_tokens_from_a_forward(draft_tokens, temperature):
    """All drafts are good: the other end from random weights."""
    model, texts = memoriser()
    policy = WidthPolicy(3)
    policy.cost = FreeEntries()
    prompts = [text[:4] for text in texts]
    params = DecodingParams(max_new_tokens=24, verify=True, draft_tokens=draft_tokens, temperature=temperature, seed=5)
    completions = outputs(engine_for(model, max_rows=3, policy=policy), prompts, params)
    one_token = DecodingParams(max_new_tokens=24, temperature=temperature, seed=5)
    for text, completion, plain in zip(texts, completions, outputs(engine_for(model), prompts, one_token), strict=True):
        assert completion.tokens == plain.tokens == text[4:28]
        assert completion.tokens_per_forward > 3
        assert {offset for record in completion.records for offset in record.offsets} == {0, 1, 2, 3}


def test_sampled_tokens_follow_the_models_distribution():
    """Chi-square over a 16-token vocabulary, and no worse than torch.multinomial's own draws."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model, prompt, draws = LlamaForCausalLM(config).eval(), [3, 1, 4, 1, 5], 3000
    with torch.no_grad():
        probabilities = (model(torch.tensor([prompt])).logits[0, -1] * 15).softmax(-1)
    requests = [
        Request(prompt, DecodingParams(max_new_tokens=1, temperature=1 / 15, seed=seed)) for seed in range(draws)
    ]
    engine = Engine(model, mask_token_id=None, eos_token_ids=[], context_length=64, max_rows=500)
    drawn = torch.tensor([completion.tokens[0] for completion in decode(engine, requests)])
    theirs = torch.multinomial(probabilities, draws, replacement=True)
    for tokens in (drawn, theirs):
        counts, expected = tokens.bincount(minlength=16), probabilities * draws
        assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, p = 0.001
    assert probabilities.max() < 0.5


def test_prompts_admitted_together_are_bounded_in_size():
    engine = engine_for(tiny_model("qwen2"), max_rows=100)
    engine.context_length = 10**6
    for seed in range(5):
        engine.add(Request(random_ids(MAX_PREFILL_ENTRIES // 4, seed), DecodingParams(max_new_tokens=1)))
    assert [len(engine.step()) for _ in range(2)] == [4, 1]


def test_a_model_without_a_mask_token_decodes_one_token_a_forward():
    engine = Engine(tiny_model("qwen2"), mask_token_id=None, eos_token_ids=[], context_length=64)
    assert outputs(engine, [[1, 2]], DecodingParams(max_new_tokens=3))[0].forwards == 3
    with pytest.raises(ValueError, match="mask token"):
        engine.add(Request([1, 2], DecodingParams(threshold=0.5)))


def test_confidences_are_in_the_measure_asked_for():
    model, prompt = tiny_model("qwen2"), random_ids(5, 8)
    logits = model(torch.tensor([prompt])).logits[0, -1].detach()
    logits[MASK] = -torch.inf
    p = logits.softmax(-1)
    top = p.topk(2).values
    expected = {
        "probability": top[0],
        "margin": top[0] - top[1],
        "entropy": -(p * p.clamp_min(1e-30).log()).sum(),
    }
    for measure, value in expected.items():
        params = DecodingParams(max_new_tokens=1, confidence=measure)
        got = outputs(engine_for(model), [prompt], params)[0].records[0].confidences
        assert got == pytest.approx([float(value)], abs=1e-5)


def test_sampling_below_exact_keeps_only_first_choices_unverified():
    model = tiny_model("qwen2")
    prompt = random_ids(6, 12)
    hot = DecodingParams(max_new_tokens=30, threshold=1e-6, block_size=4, temperature=50.0, seed=3)
    completion = outputs(engine_for(model), [prompt], hot)[0]
    out = []
    for record in completion.records:
        masks = len(record.tokens) - 1
        logits = model(torch.tensor([prompt + out + [MASK] * masks])).logits[0, len(prompt) + len(out) - 1 :]
        logits[:, MASK] = -torch.inf
        assert record.tokens[1:] == logits[1:].argmax(-1).tolist()
        out += record.tokens
    assert completion.forwards > 15  # at this temperature a drawn token is seldom the first choice
