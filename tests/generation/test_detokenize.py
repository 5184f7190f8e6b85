"""Chunks joined equal the final text, whatever the tokens and wherever a step ends."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from marscli.generation.detokenize import TextBuilder

from .conftest import SENTENCES, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()


def byte_fallback_tokenizer():
    """As sentencepiece models have it: spaces as ▁, unknown characters as byte tokens that only decode as a whole."""
    words = ["▁", "▁a", "a", "b", "▁sky", "東"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", *words, *(f"<0x{i:02X}>" for i in range(256))])}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def cleaning_tokenizer():
    """Removes the space before punctuation and clitics, which changes text that was there before."""
    words = ["Hello", "do", " ", " .", ".", "n't", " n't", "'s", "'", ",", "n", "'t", " '", " do"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", *words])}, unk_token="</s>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=True)


TOKENIZERS = [BYTE_LEVEL, byte_fallback_tokenizer(), cleaning_tokenizer()]


def chunks_of(tokenizer, ids, cuts):
    builder = TextBuilder(tokenizer)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    chunks = [builder.push(ids[start:end]) for start, end in pairwise(edges)]
    return [*chunks, builder.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "byte-fallback", "clean-up"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chunks_joined_equal_the_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=12))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    chunks = chunks_of(tokenizer, ids, cuts)
    assert "".join(chunks) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("text", SENTENCES)
def test_characters_come_whole_and_soon(text):
    ids = BYTE_LEVEL(text).input_ids
    builder = TextBuilder(BYTE_LEVEL)
    shown = ""
    for end, token in enumerate(ids, start=1):
        shown += builder.push([token])
        whole = BYTE_LEVEL.decode(ids[:end], skip_special_tokens=True).rstrip("\ufffd")
        assert shown == whole
    assert shown + builder.finish() == text


def test_bytes_that_never_make_a_character_are_shown_at_the_end():
    ids = BYTE_LEVEL("🙂").input_ids[:-1] or BYTE_LEVEL("🙂").input_ids
    random_ids = [BYTE_LEVEL.convert_tokens_to_ids(token) for token in ("ð", "Ł")]
    builder = TextBuilder(BYTE_LEVEL)
    assert builder.push(random_ids) == ""
    assert builder.finish() == BYTE_LEVEL.decode(random_ids) != ""
    assert ids


def test_special_tokens_are_not_shown():
    builder = TextBuilder(BYTE_LEVEL)
    ids = [*BYTE_LEVEL("sky").input_ids, BYTE_LEVEL.eos_token_id]
    assert builder.push(ids) + builder.finish() == "sky"


def test_long_texts_in_random_steps():
    generator = random.Random(0)
    ids = [i for sentence in SENTENCES * 3 for i in BYTE_LEVEL(sentence).input_ids]
    cuts = [generator.randrange(len(ids)) for _ in range(len(ids) // 2)]
    assert "".join(chunks_of(BYTE_LEVEL, ids, cuts)) == "".join(SENTENCES * 3)


def test_the_cost_of_a_token_does_not_grow_with_the_text(monkeypatch):
    ids = [i for sentence in SENTENCES * 30 for i in BYTE_LEVEL(sentence).input_ids]
    decoded = []
    decode = TextBuilder._decode
    monkeypatch.setattr(TextBuilder, "_decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
    builder = TextBuilder(BYTE_LEVEL)
    chunks = [builder.push([token]) for token in ids]
    assert len(ids) > 2000
    assert max(decoded) < 100
    assert "".join([*chunks, builder.finish()]) == "".join(SENTENCES * 30)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "byte-fallback", "clean-up"])
@settings(max_examples=15)
@given(data=st.data())
def test_chunks_of_long_random_texts(tokenizer, data):
    """Long enough for the window to move, with runs of bytes and of special tokens that hold it."""
    token = st.integers(0, len(tokenizer) - 1)
    run = st.tuples(token, st.integers(1, 70)).map(lambda drawn: [drawn[0]] * drawn[1])
    pieces = st.lists(st.one_of(run, st.lists(token, min_size=10, max_size=60)), min_size=4, max_size=9)
    ids = [i for piece in data.draw(pieces) for i in piece]
    cuts = data.draw(st.lists(st.integers(0, 600), min_size=60, max_size=120))
    assert "".join(chunks_of(tokenizer, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)
