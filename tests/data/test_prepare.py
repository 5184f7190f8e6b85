"""Whole sources: counts of what was used and dropped, and errors that name file and line."""

from __future__ import annotations

import pytest

from marscli.data.encoding import Encoder
from marscli.data.prepare import CUT_OFF, encode_conversations, read_conversations
from marscli.errors import InputError
from tiny_chat import make_tokenizer, sums, write_rows

GOOD = {"question": "Q", "answer": "A"}


def prepare(*paths, max_length=512, template=None, **options):
    prepared = read_conversations([str(path) for path in paths], **options)
    tokenizer = make_tokenizer(**({"template": template} if template else {}))
    return encode_conversations(prepared, Encoder(tokenizer, [2]), max_length=max_length), prepared.report


def test_several_sources_and_a_limit(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", sums(3)), write_rows(tmp_path / "b.jsonl", sums(5))
    examples, report = prepare(a, b)
    assert (len(examples), report.rows, report.used, report.examples) == (8, 8, 8, 8)
    assert report.tokens == sum(len(e.ids) for e in examples)
    _, report = prepare(a, b, limit=4)
    assert report.rows == 4


def test_the_first_bad_row_is_named_and_the_others_counted(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [GOOD, {"text": "x"}, GOOD, {"question": "Q", "answer": " "}])
    with pytest.raises(InputError) as caught:
        prepare(path)
    assert caught.value.message.startswith(f"{path}:2: keys found: text; keys expected: messages;")
    assert caught.value.message.endswith("(1 more bad row)")
    assert "--prompt-field" in caught.value.hint
    assert "--skip-bad-rows" in caught.value.hint
    _, report = prepare(path, skip_bad_rows=True)
    assert (report.rows, report.used) == (4, 2)
    assert report.to_json()["dropped"] == {"unknown keys": 1, "empty response": 1}


def test_rows_that_the_template_refuses_are_named_too(tmp_path):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    template += "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    rows = [GOOD, {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]}]
    rows[1]["messages"].append({"role": "assistant", "content": "A"})
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError) as caught:
        prepare(path, template=template)
    assert caught.value.message == f"{path}:2: the chat template refuses this row: no system turn"
    _, report = prepare(path, template=template, skip_bad_rows=True)
    assert report.dropped == {"refused by the chat template": 1}


def test_rows_without_a_response_after_cutting_are_dropped_and_counted(tmp_path):
    long = {"question": "Q" * 100, "answer": "A"}
    path = write_rows(tmp_path / "a.jsonl", [GOOD, long, {"question": "Q", "answer": "A" * 100}])
    examples, report = prepare(path, max_length=60)
    assert report.dropped == {CUT_OFF: 1}
    assert (report.used, report.truncated) == (2, 1)
    assert len(examples[1].ids) == 60
    with pytest.raises(InputError) as caught:
        prepare(write_rows(tmp_path / "b.jsonl", [long, long]), max_length=60)
    assert caught.value.message == f"no row is left to train on: 2 {CUT_OFF}"
    assert "--max-length" in caught.value.hint


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_empty_files(tmp_path, text):
    path = tmp_path / ("a.json" if text == "[]" else "a.jsonl")
    path.write_text(text)
    with pytest.raises(InputError, match=r"is empty"):
        prepare(path)


def test_nothing_but_bad_rows(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(InputError, match=r"no row is left to train on: 1 unknown keys"):
        prepare(path, skip_bad_rows=True)
