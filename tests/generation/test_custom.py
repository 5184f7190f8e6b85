"""`custom_generate` inside transformers' own ``generate``: the same ids, padding and settings; the rest refused."""

import pytest
import torch

import marscli
from core.tiny_models import MASK, random_ids, tiny_model
from marscli.errors import InputError


def padded(lengths, seed=0):
    """Left-padded prompts of these lengths."""
    width = max(lengths)
    rows = [[0] * (width - n) + random_ids(n, seed + n) for n in lengths]
    mask = [[0] * (width - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"draft_tokens": 3, "block_size": 4}])
def test_exact_greedy_equals_generate(architecture, options):
    model = tiny_model(architecture)
    decoder = marscli.custom_generate(mask_token_id=MASK, **options)
    for seed, lengths in enumerate([(9, 4, 6), (1, 12), (5,)]):
        inputs = padded(lengths, seed)
        for eos in (None, [7, 9, 11, 23]):
            settings = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
            expected = model.generate(**inputs, **settings, suppress_tokens=[MASK])
            assert torch.equal(model.generate(**inputs, **settings, custom_generate=decoder), expected)
            both = model.generate(**inputs, **settings, suppress_tokens=[MASK], custom_generate=decoder)
            assert torch.equal(both, expected)


def test_a_loaded_checkpoint_needs_no_more_than_a_threshold(mars_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(mars_model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(mars_model, padding_side="left")
    inputs = tokenizer(["Why is the sky blue?", "A"], return_tensors="pt", padding=True)
    calls = []
    forward = model.forward
    model.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    decoder = marscli.custom_generate(threshold=1e-9, verify=False)
    output = model.generate(**inputs, max_new_tokens=16, custom_generate=decoder, do_sample=False)
    del model.forward
    assert len(calls) == 4
    checkpoint = marscli.load(str(mars_model), dtype="float32")
    for row, prompt in zip(output, ["Why is the sky blue?", "A"], strict=True):
        (alone,) = checkpoint.generate(prompt, threshold=1e-9, verify=False, max_new_tokens=16, chat_template=False)
        answer = row[inputs["input_ids"].shape[1] :].tolist()
        assert answer[: len(alone.token_ids)] == alone.token_ids
        assert set(answer[len(alone.token_ids) :]) <= {tokenizer.pad_token_id}


def test_sampling_settings_and_seeds():
    model = tiny_model("llama")
    inputs = {"input_ids": torch.tensor([random_ids(5, 1)] * 3)}
    settings = {"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}

    def draw(decoder_options, **changes):
        decoder = marscli.custom_generate(mask_token_id=MASK, **decoder_options)
        return model.generate(**inputs, **settings, **changes, custom_generate=decoder)

    first = draw({"seed": 3})
    assert torch.equal(first, draw({"seed": 3, "verify": False}))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, draw({"seed": 4}))
    torch.manual_seed(0)
    free = draw({})
    assert not torch.equal(free, draw({}))
    torch.manual_seed(0)
    assert torch.equal(free, draw({}))
    greedy = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, suppress_tokens=[MASK])
    assert torch.equal(draw({"seed": 3}, top_k=1), greedy)
    assert torch.equal(draw({"seed": 3}, temperature=1e-6), greedy)
    assert torch.equal(draw({"seed": 3}, top_p=1e-6), greedy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_new_tokens": 2, "eos_token_id": 7}, "MinLengthLogitsProcessor"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ],
)
def test_what_the_engine_does_not_do_is_refused(settings, message):
    model = tiny_model("llama")
    decoder = marscli.custom_generate(mask_token_id=MASK)
    with pytest.raises(InputError, match=message) as refusal:
        model.generate(**padded([4]), max_new_tokens=3, pad_token_id=0, custom_generate=decoder, **settings)
    assert refusal.value.hint


def test_a_plain_model_decodes_exactly_or_is_told_to_train():
    model = tiny_model("qwen2")
    inputs = padded([6, 3])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=marscli.custom_generate()), expected)
    with pytest.raises(InputError, match="never MARS-trained"):
        model.generate(**inputs, **settings, custom_generate=marscli.custom_generate(threshold=0.9))
    with pytest.raises(InputError, match="--threshold"):
        marscli.custom_generate(threshold=2)
