"""Our lm-eval model against lm-eval's own: the same texts and likelihoods, and an honest count of what they cost."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny_lm import ScriptedModel, make_model

from marscli.core import decoding
from marscli.errors import InputError, MarsError
from marscli.evaluation.lm import MarsLM, StopStrings

WORDS = ["Anna", "has", "3", "apples", "\n", "and", "green", "boxes", "12", "*", "5", "é", "🙂"]


def requests(count: int, settings, *, seed: int = 0) -> list[Instance]:
    """Prompts of unequal length; ``settings`` are one dictionary or one for each."""
    rng = random.Random(seed)
    settings = settings if isinstance(settings, list) else [settings] * count
    prompts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(count)]
    return [
        Instance(request_type="generate_until", doc={}, arguments=(p, s), idx=0, metadata=("task", i, 1))
        for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
    ]


@pytest.fixture
def mars(model, tokenizer, usual_eos):
    return lambda **options: MarsLM(
        model, tokenizer, mask_token_id=tokenizer.mask_token_id, eos_token_ids=usual_eos,
        **{"context_length": 4096, "block_size": 4, "batch_size": 3, **options},
    )  # fmt: skip


@pytest.fixture
def reference(model, tokenizer):
    """lm-eval's own model with the mask suppressed, one question at a time."""
    model.generation_config.suppress_tokens = [tokenizer.mask_token_id]
    yield HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    model.generation_config.suppress_tokens = None


def test_compile_compiles_the_model(mars, monkeypatch):
    compiled = []
    monkeypatch.setattr(decoding, "CompiledModel", lambda model: compiled.append(model) or model)
    asked = requests(4, {"until": ["\n"], "max_gen_toks": 6})
    assert mars(compile=True).generate_until(asked) == mars().generate_until(asked)
    assert len(compiled) == 1


@pytest.mark.parametrize("verified", [{}, {"verify": True}, {"verify": True, "draft_tokens": 1}])
def test_exact_answers_are_those_of_lm_evals_own_model(mars, reference, verified):
    settings = [
        {"until": ["Question:", "\n\n"], "max_gen_toks": 40, "do_sample": False},
        {"until": [" a", "1"], "max_gen_toks": 17},
        {"until": [], "max_gen_toks": 5},
        {"max_gen_toks": 30, "until": ["<|im_start|>", "e"]},
    ]
    asked = requests(24, [settings[i % 4] for i in range(24)])
    mine = mars(**verified)
    assert mine.generate_until(asked) == reference.generate_until(asked, disable_tqdm=True)
    answers = mine.take_usage().answers
    assert len(answers) == 24
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    if not verified:
        assert all(answer.forwards == len(answer.tokens) for answer in answers)  # one token a forward


def test_verified_drafts_save_forwards_and_change_nothing(tokenizer, usual_eos):
    model = make_model(len(tokenizer), eos=usual_eos, favoured=slice(300, 306))
    model.generation_config.suppress_tokens = [tokenizer.mask_token_id]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    mine = MarsLM(
        model, tokenizer, mask_token_id=tokenizer.mask_token_id, eos_token_ids=usual_eos, context_length=4096,
        block_size=4, batch_size=3, verify=True, draft_tokens=2,
    )  # fmt: skip
    asked = requests(8, {"until": ["\n"], "max_gen_toks": 40})
    assert mine.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    answers = mine.take_usage().answers
    assert sum(len(answer.tokens) for answer in answers) > sum(answer.forwards for answer in answers)


def test_likelihoods_are_those_of_lm_evals_own_model(mars, model, tokenizer):
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    pairs = [("What is 3 + 4?", " 7"), ("What is 3 + 4?", " green apples"), ("", "Anna has 3"), ("red blue", " x y z")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    mine = mars(batch_size=2)
    ours, expected = mine.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=1e-4)
    rolling = [Instance("loglikelihood_rolling", {}, ("Anna has 3 apples and buys 4 more. " * 3,), 0)]
    assert mine.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-4
    )
    assert not mine.take_usage().answers


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.9, 0.05])
def test_a_row_in_a_batch_is_that_row_alone(mars, threshold, verify):
    asked = requests(7, {"until": ["\n", "ap"], "max_gen_toks": 11}, seed=3)
    # A fixed width: the engine may choose another for another batch, and with it other counts.
    together, alone = (mars(batch_size=b, verify=verify, draft_tokens=2 if verify else None) for b in (4, 1))
    together.threshold = alone.threshold = threshold
    assert together.generate_until(asked) == [alone.generate_until([one])[0] for one in asked]
    cost = [(a.question.index, a.tokens, a.forwards) for a in together.take_usage().answers]
    assert [c[1:] for c in cost] == [(a.tokens, a.forwards) for a in alone.take_usage().answers]
    assert all(len(tokens) <= 11 for _, tokens, _ in cost)


def scripted(tokenizer, text: str, start: int, threshold: float, **options) -> MarsLM:
    script = tokenizer.encode(text)
    model = ScriptedModel(script, start, len(tokenizer), tokenizer.mask_token_id, **options)
    lm = MarsLM(
        model, tokenizer, mask_token_id=tokenizer.mask_token_id, eos_token_ids=[tokenizer.eos_token_id],
        context_length=512, block_size=4, batch_size=2,
    )  # fmt: skip
    lm.threshold = threshold
    return lm


def ask(lm: MarsLM, prompt: str, **settings) -> str:
    arguments = (prompt, {"max_gen_toks": 64, "until": [], **settings})
    return lm.generate_until([Instance("generate_until", {}, arguments, 0, ("task", 0, 1))])[0]


@pytest.mark.parametrize("threshold", [None, 0.9])
def test_nothing_after_the_end_reaches_the_answer(tokenizer, threshold):
    prompt = "What is 3 + 4?"
    start = len(tokenizer.encode(prompt))
    for filler in ("", " a", " a b", " a b c"):  # the end falls on every place of a step
        told = f" It is 8{filler}."
        lm = scripted(tokenizer, f"{told}<|im_end|> The answer is 7. The answer is 7.", start, threshold)
        assert ask(lm, prompt) == told
        (answer,) = lm.take_usage().answers
        count = len(tokenizer.encode(told)) + 1  # the end itself counts
        assert (len(answer.tokens), answer.finish_reason) == (count, "stop")
        assert answer.forwards == (count if threshold is None else -(-count // 4))


@pytest.mark.parametrize("threshold", [None, 0.9])
def test_a_special_token_as_stop_string_ends_the_answer(tokenizer, threshold):
    start = len(tokenizer.encode("Hi"))
    lm = scripted(tokenizer, "7 apples<|im_start|>user 8 9 10 11 12", start, threshold)
    assert ask(lm, "Hi", until=["<|im_start|>"]) == "7 apples"
    assert lm.take_usage().answers[0].tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize("threshold", [None, 0.9])
@pytest.mark.parametrize("stop", ["\n\n", "b", "7.", " 🙂", "apples b"])
def test_stop_strings_at_any_offset(tokenizer, threshold, stop):
    text = "It is 7. or 3 apples b\n\n 🙂 and so on and on"
    for prefix in ("", " x", " x y", " x y z"):
        start = len(tokenizer.encode("Hi"))
        lm = scripted(tokenizer, prefix + text, start, threshold)
        assert ask(lm, "Hi", until=["never", stop]) == (prefix + text).split(stop)[0]
        answer = lm.take_usage().answers[0]
        assert stop in tokenizer.decode(answer.tokens)  # the last token is the one that completes it
        assert stop not in tokenizer.decode(answer.tokens[:-1])
        assert answer.finish_reason == "stop"


def test_counts_with_scripted_confidences(tokenizer):
    start = len(tokenizer.encode("Hi"))
    text = "3 apples and 4 boxes and 5 boxes and 7 apples and 8 and 9"
    for sure, forwards in ((0.99, 3), (0.5, 10)):  # 4 + 4 + 2 tokens, or one at a time
        lm = scripted(tokenizer, text, start, 0.9, sure=sure)
        ask(lm, "Hi", max_gen_toks=10)
        (answer,) = lm.take_usage().answers
        assert (len(answer.tokens), answer.forwards, answer.finish_reason) == (10, forwards, "length")
        assert answer.hit_limit


def test_long_prompts_lose_their_left_end_as_in_lm_eval(tokenizer, usual_eos):
    model = make_model(len(tokenizer), context=64, eos=usual_eos)
    model.generation_config.suppress_tokens = [tokenizer.mask_token_id]
    mine = MarsLM(
        model,
        tokenizer,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=usual_eos,
        context_length=64,
        batch_size=2,
    )
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    asked = requests(6, {"until": [], "max_gen_toks": 30})
    assert mine.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    lengths = {i: len(tokenizer.encode(one.args[0])) for i, one in enumerate(asked)}
    cut = {answer.question.doc_id: answer.prompt_cut for answer in mine.take_usage().answers}
    assert cut == {i: max(0, n - 34) for i, n in lengths.items()}
    assert any(cut.values())
    mine.loglikelihood([Instance("loglikelihood", {}, ("red " * 100, c), 0) for c in (" a", " b")], disable_tqdm=True)
    assert len(mine.take_usage().cut_contexts) == 1
    with pytest.raises(MarsError, match="64 new tokens leave no room") as caught:
        mine.generate_until(requests(1, {"until": [], "max_gen_toks": 64}))
    assert "--max-new-tokens" in caught.value.hint


def test_sampling_settings_and_unknown_ones(mars):
    lm = mars()
    greedy, sampled = {"until": [], "max_gen_toks": 12}, {"do_sample": True, "temperature": 3.0, "top_p": 0.9}
    prompt = requests(1, greedy)
    repeated = requests(1, {**greedy, **sampled}) * 3
    texts = lm.generate_until(repeated)
    assert len(set(texts)) == 3  # a repeated question is drawn anew
    assert lm.generate_until(repeated) == texts  # and the same in every run
    assert lm.generate_until(requests(1, {**greedy, "do_sample": False, "temperature": 0.7})) == lm.generate_until(
        prompt
    )
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "top_p": 0.5, "min_p": 0.1}
    assert lm.generate_until(requests(1, {**greedy, **neutral})) == lm.generate_until(prompt)  # min_p only if sampling
    for unknown in ({"repetition_penalty": 1.3}, {"num_beams": 4}, {**sampled, "min_p": 0.1}, {"seed": 3}):
        with pytest.raises(InputError, match=f"generation setting {list(unknown)[-1]}="):
            lm.generate_until(requests(1, {**greedy, **unknown}))


@pytest.mark.parametrize("verify", [False, True])
def test_sampled_answers_are_the_same_verified_in_a_batch_and_alone(mars, verify):
    settings = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20}
    asked = requests(5, settings, seed=4)
    alone = [mars(batch_size=1).generate_until([one])[0] for one in asked]
    assert mars(batch_size=3, verify=verify, draft_tokens=2 if verify else None).generate_until(asked) == alone


def test_stop_strings_look_at_every_new_token(tokenizer):
    stops = StopStrings(["and", ""], tokenizer.decode)
    tokens = tokenizer.encode("3 apples and 4 boxes")
    first = next(n for n in range(len(tokens)) if "and" in tokenizer.decode(tokens[:n]))
    assert stops.length(tokens, len(tokens)) == first
    assert stops.length(tokens[: first - 1], first - 1) is None
    assert StopStrings([], tokenizer.decode).length(tokens, len(tokens)) is None


def test_progress_counts_every_request(model, tokenizer):
    seen: list[tuple[str, int]] = []
    count = iter(range(1000))

    @contextmanager
    def progress(description, total):
        seen.append((description, total))
        yield lambda: next(count)

    lm = MarsLM(
        model, tokenizer, mask_token_id=None, eos_token_ids=[], context_length=4096, batch_size=2, progress=progress
    )
    lm.generate_until(requests(5, {"until": [], "max_gen_toks": 3}))
    pairs = [Instance("loglikelihood", {}, ("red", choice), 0, ("colours", 0, 1)) for choice in (" a", " b", " blue")]
    lm.loglikelihood(pairs)
    assert seen == [("task τ=exact", 5), ("colours", 3)]
    assert next(count) == 8
