"""Stop strings: at any place, over any number of tokens and steps; the same streamed, alone and in a batch."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marscli
from marscli.core.decoding import Engine
from marscli.generation.detokenize import TextBuilder

from .test_detokenize import BYTE_LEVEL, TOKENIZERS

IDS = ["byte-level", "byte-fallback", "clean-up"]


def reference(tokenizer, ids, stops):
    """By the definition: complete at the first token after which the text holds a stop string, cut before it."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return ids[:end], text[: min(places)]
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


def built(tokenizer, ids, stops, cuts=()):
    builder = TextBuilder(tokenizer, stops)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    chunks = []
    for start, end in pairwise(edges):
        chunks.append(builder.push(ids[start:end]))
        if builder.stopped:
            break
    return builder, [*chunks, builder.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=IDS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_stop_in_any_text_in_any_steps(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=20))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    part = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    drawn = data.draw(st.lists(part, min_size=1, max_size=3))
    stops = [stop for start, size in drawn if "\ufffd" not in (stop := text[start : start + size] or "absent")]
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=12))
    builder, chunks = built(tokenizer, ids, stops, cuts)
    expected_ids, expected = reference(tokenizer, ids, stops)
    assert builder.ids == expected_ids
    assert builder.text() == "".join(chunks) == expected
    shown = ""
    for chunk in chunks:  # what is shown is never taken back, and never a part of a stop string
        shown += chunk
        assert expected.startswith(shown)


def test_stop_strings_of_a_special_token_end_the_text_there():
    ids = [*BYTE_LEVEL("sky").input_ids, BYTE_LEVEL.convert_tokens_to_ids("<|user|>"), *BYTE_LEVEL("more").input_ids]
    builder, chunks = built(BYTE_LEVEL, ids, ["<|user|>"])
    assert "".join(chunks) == "sky"
    assert builder.ids == ids[: len(BYTE_LEVEL("sky").input_ids) + 1]


@pytest.fixture(scope="module")
def checkpoint(mars_model):
    return marscli.load(str(mars_model), device="cpu", dtype="float32")


@pytest.mark.parametrize("options", [{"draft_tokens": 3}, {"threshold": 1e-9, "verify": False}, {"verify": False}])
def test_a_stop_at_every_offset(checkpoint, options):
    """Every piece of an answer as its stop string: text, tokens and counts by the definition, streamed or not."""
    options = {"max_new_tokens": 32, **options}
    (whole,) = marscli.generate(checkpoint, "Why?", **options)
    rows = []
    for size in (1, 3):
        for start in range(len(whole.text) - size + 1):
            stop = whole.text[start : start + size]
            if "\ufffd" not in stop:
                rows.append({"prompt": "Why?", "stop": stop})
    assert len(rows) > 12
    for row, result in zip(rows, marscli.generate(checkpoint, rows, batch_size=16, **options), strict=True):
        ids, text = reference(checkpoint.tokenizer, whole.token_ids, [row["stop"]])
        assert (result.token_ids, result.text, result.finish_reason) == (ids, text, "stop")
        assert result.completion_tokens == len(ids) == sum(len(record.tokens) for record in result.records)
        assert row["stop"] not in result.text
        streamed = marscli.stream(checkpoint, "Why?", stop=[row["stop"]], **options)
        assert "".join(streamed) == text
        assert streamed.result.token_ids == ids
        assert streamed.result.forwards == result.forwards == len(result.records)


def test_a_complete_stop_string_frees_the_row_at_once(checkpoint, monkeypatch):
    (whole,) = marscli.generate(checkpoint, "Why?", max_new_tokens=30, verify=False)
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: steps.append(1) or step(engine))
    stop = next(c for c in whole.text if c != "\ufffd")
    (result,) = marscli.generate(checkpoint, "Why?", max_new_tokens=30, verify=False, stop=stop)
    assert len(steps) == result.forwards < whole.forwards


def test_special_tokens_as_stops_and_rows_without(checkpoint):
    rows = [{"prompt": "Why?", "stop": ["<|user|>", "never in it"]}, {"prompt": "Why?", "stop": []}, {"prompt": "Why?"}]
    results = marscli.generate(checkpoint, rows, max_new_tokens=8, stop="e")
    assert results[0].token_ids == results[1].token_ids != []
    assert "e" not in results[2].text
