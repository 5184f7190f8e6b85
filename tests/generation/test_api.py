"""`generate` and `stream` on a tiny model: the same text alone, in a batch and streamed; counts by definition."""

import json

import pytest

import marscli
from marscli.core import decoding
from marscli.errors import InputError

FIXED = {"draft_tokens": 3}  # else the width, and with it the number of forwards, goes by what pays
PROMPTS = ["Why is the sky blue?", "A", "It's three hours late", "東京"]


@pytest.fixture(scope="module")
def checkpoint(mars_model):
    return marscli.load(str(mars_model), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "options",
    [
        FIXED,
        {"verify": False},
        {"threshold": 0.1},
        {"threshold": 0.1, "verify": False},
        {"temperature": 1.0, "seed": 5, **FIXED},
        {"chat_template": False, **FIXED},
    ],
)
def test_alone_in_a_batch_and_streamed_are_the_same(checkpoint, options):
    options = {"max_new_tokens": 14, **options}
    batched = marscli.generate(checkpoint, PROMPTS, batch_size=3, **options)
    assert [result.index for result in batched] == [0, 1, 2, 3]
    for prompt, result in zip(PROMPTS, batched, strict=True):
        (alone,) = marscli.generate(checkpoint, prompt, **options)
        assert alone.text == result.text
        assert alone.token_ids == result.token_ids
        assert (alone.forwards, alone.finish_reason) == (result.forwards, result.finish_reason)
        streamed = marscli.stream(checkpoint, prompt, **options)
        assert streamed.result is None
        chunks = list(streamed)
        assert all(chunks)
        assert "".join(chunks) == alone.text
        assert streamed.result.token_ids == alone.token_ids


def test_compile_compiles_the_model_and_changes_no_text(checkpoint, monkeypatch):
    compiled = []
    monkeypatch.setattr(decoding, "CompiledModel", lambda model: compiled.append(model) or model)
    texts = [[r.text for r in marscli.generate(checkpoint, PROMPTS, compile=flag)] for flag in (False, True)]
    assert compiled == [checkpoint.model]
    assert texts[0] == texts[1]


def test_exact_text_is_what_transformers_generates(checkpoint):
    tokenizer = checkpoint.tokenizer
    (result,) = marscli.generate(checkpoint, "Why is the sky blue?", max_new_tokens=15, verify=False)
    (verified,) = marscli.generate(checkpoint, "Why is the sky blue?", max_new_tokens=15)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue?"}], add_generation_prompt=True, return_tensors="pt"
    )
    reference = checkpoint.model.generate(
        **inputs, max_new_tokens=15, do_sample=False, suppress_tokens=[checkpoint.mask_token_id]
    )[0, inputs["input_ids"].shape[1] :]
    assert result.token_ids == reference.tolist()
    assert result.text == tokenizer.decode(reference, skip_special_tokens=True)
    assert result.prompt_tokens == inputs["input_ids"].shape[1]
    assert result.completion_tokens == len(result.token_ids) == result.forwards
    assert (result.tokens_per_forward, result.threshold, result.verified) == (1.0, 1.0, False)
    assert result.prompt == "Why is the sky blue?"
    assert verified.token_ids == result.token_ids
    assert verified.forwards <= result.forwards
    assert (verified.threshold, verified.verified) == (1.0, True)


def test_a_threshold_saves_forwards_and_block_size_bounds_them(checkpoint):
    (loose,) = marscli.generate(checkpoint, PROMPTS[0], threshold=1e-9, max_new_tokens=12)
    assert loose.forwards < loose.completion_tokens
    assert loose.tokens_per_forward <= 4
    assert loose.threshold == 1e-9
    (single,) = marscli.generate(checkpoint, PROMPTS[0], threshold=1e-9, block_size=1, max_new_tokens=12)
    assert not single.verified
    assert single.forwards == single.completion_tokens
    (entropy,) = marscli.generate(checkpoint, PROMPTS[0], confidence="entropy", max_new_tokens=3)
    assert entropy.threshold == 0.0


def test_rows_have_their_own_wishes_and_keep_their_other_keys(checkpoint):
    rows = [
        {"prompt": "a", "id": "x", "max_new_tokens": 2},
        {"messages": [{"role": "user", "content": "b"}], "threshold": 1e-9, "text": "kept"},
    ]
    first, second = marscli.generate(checkpoint, rows, max_new_tokens=8)
    assert first.completion_tokens <= 2
    assert first.to_dict()["id"] == "x"
    assert second.threshold == 1e-9
    shown = json.loads(json.dumps(second.to_dict()))
    assert shown["text"] == second.text
    assert shown["input_text"] == "kept"
    assert shown["messages"] == rows[1]["messages"]
    assert list(shown)[:12] == [
        "index",
        "prompt",
        "text",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "forwards",
        "tokens_per_forward",
        "seconds",
        "tokens_per_second",
        "threshold",
        "verified",
    ]


def test_a_full_context_ends_with_a_reason(checkpoint):
    (result,) = marscli.generate(
        checkpoint, "a b c d e f g h", chat_template=False, max_new_tokens=500, temperature=2.0
    )
    assert result.finish_reason in ("context", "stop")
    assert result.prompt_tokens + result.completion_tokens <= checkpoint.context_length


def test_a_model_without_mars_training_decodes_one_token_a_forward(plain_model, caplog):
    checkpoint = marscli.load(str(plain_model), device="cpu")
    caplog.set_level("WARNING", logger="marscli")
    (result,) = marscli.generate(checkpoint, "Hello", max_new_tokens=6)
    assert result.forwards == result.completion_tokens
    assert not result.verified
    assert caplog.text.count("never MARS-trained") == 1
    with pytest.raises(InputError, match="was never MARS-trained") as caught:
        marscli.generate(checkpoint, "Hello", threshold=0.9)
    assert "mars train" in caught.value.hint


def test_a_larger_block_than_trained_is_warned_of(checkpoint, caplog):
    caplog.set_level("WARNING", logger="marscli")
    marscli.generate(checkpoint, "a", block_size=6, threshold=0.5, max_new_tokens=2)
    assert "--block-size 6 is more than " in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 2, "verify": False}, "--draft-tokens: without --verify"),
        ({"draft_tokens": -1}, "--draft-tokens -1"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": ["a", None]}, "stop is "),
        ({"stop": ""}, "stop is empty"),
        ({"threshold": 1.5}, "--threshold 1.5"),
        ({"threshold": "high"}, "--threshold 'high'"),
        ({"confidence": "hope"}, "--confidence 'hope'"),
        ({"block_size": 0}, "--block-size 0"),
        ({"cache": "paged"}, "--cache 'paged'"),
        ({"cache": "row", "cache_block": 8}, "--cache-block 8"),
        ({"cache": "block", "draft_tokens": 2}, "--draft-tokens: --cache block"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_k": -1}, "--top-k -1"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"system": "s", "chat_template": False}, "--system"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_touched(options, message):
    with pytest.raises(InputError, match=message) as caught:
        marscli.generate("no/such/model", "a", **options)
    assert caught.value.hint


def test_prompts_are_checked_before_the_model_is_loaded(mars_model, monkeypatch):
    def fail(*_, **__):
        pytest.fail("the model must not be loaded")

    monkeypatch.setattr("marscli.generation.api.load", fail)
    with pytest.raises(InputError, match="too many for the model's context of 64"):
        marscli.generate(str(mars_model), "a" * 200)


def test_every_cache_gives_the_same_text(checkpoint):
    """Exactly and below exact; the block cache does not verify."""
    for threshold in ("exact", 0.1):
        rows = [
            marscli.generate(checkpoint, PROMPTS, threshold=threshold, max_new_tokens=14, verify=False, batch_size=4)
        ]
        for options in ({"cache": "none", "verify": False}, {"cache": "block"}, {"cache": "block", "cache_block": 8}):
            rows.append(
                marscli.generate(checkpoint, PROMPTS, threshold=threshold, max_new_tokens=14, batch_size=4, **options)
            )
            assert not any(result.verified for result in rows[-1])
        for results in rows[1:] if threshold == "exact" else rows[1:2]:
            assert [result.token_ids for result in results] == [result.token_ids for result in rows[0]]
