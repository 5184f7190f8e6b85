"""Whole sources: counts of what was used and dropped, and errors that name file and line."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from marscli.data import prepare as prepare_module
from marscli.data.encoding import Encoded, Encoder
from marscli.data.prepare import CUT_OFF, ExampleReader
from marscli.data.store import ExampleStore
from marscli.errors import InputError
from tiny_chat import make_tokenizer, sums, write_rows

GOOD = {"question": "Q", "answer": "A"}


def prepare(*paths, max_length=512, template=None, **options):
    reader = make_reader(*paths, max_length=max_length, template=template, **options)
    return reader.read_all(), reader.report


def make_reader(*paths, max_length=512, template=None, **options):
    tokenizer = make_tokenizer(**({"template": template} if template else {}))
    return ExampleReader([str(path) for path in paths], Encoder(tokenizer, [2]), max_length=max_length, **options)


def test_several_sources_and_a_limit(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", sums(3)), write_rows(tmp_path / "b.jsonl", sums(5))
    examples, report = prepare(a, b)
    assert (len(examples), report.rows, report.used, report.examples) == (8, 8, 8, 8)
    assert report.tokens == sum(len(e.ids) for e in examples)
    assert report.response_tokens == sum(e.response_tokens for e in examples)
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


def test_sources_of_every_kind_at_once(tmp_path):
    import datasets

    rows = sums(2)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_csv(tmp_path / "b.csv")
    (tmp_path / "c.json").write_text(json.dumps([{"instruction": r["question"], "output": r["answer"]} for r in rows]))
    write_rows(tmp_path / "d.jsonl", [{"prompt": r["question"], "completion": r["answer"]} for r in rows])
    hub = tmp_path / "org" / "sums"
    hub.mkdir(parents=True)
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: x/train.jsonl\n---\n"
    )
    (hub / "x").mkdir()
    chats = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in rows
    ]
    write_rows(hub / "x" / "train.jsonl", chats)
    sources = [*(tmp_path / name for name in ("a.parquet", "b.csv", "c.json", "d.jsonl")), f"{hub}:small:train"]
    examples, report = prepare(*sources)
    assert (report.rows, report.used) == (10, 10)
    ids = [example.ids.tolist() for example in examples]
    assert ids == ids[:2] * 5
    reader = make_reader(*sources)
    stream = reader.stream(seed=0)
    assert sorted(next(stream).ids.tolist() for _ in range(10)) == sorted(ids)


def test_a_stream_is_a_shuffle_that_its_seed_decides(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", sums(30))
    monkeypatch.setattr(prepare_module, "SHUFFLE_BUFFER", 8)

    def first(number, seed=1):
        return [tuple(example.ids.tolist()) for example in islice(make_reader(path).stream(seed), number)]

    order = first(90)
    assert order == first(90)
    assert first(30, seed=2) != order[:30]
    rows = [tuple(example.ids.tolist()) for example in prepare(path)[0]]
    for number in range(3):
        assert sorted(order[30 * number : 30 * (number + 1)]) == sorted(rows), "every row once a pass"
    assert order[:30] != rows
    assert order[:30] != order[30:60]
    places = [rows.index(example) for example in order[:30]]
    assert all(place <= number + 8 for number, place in enumerate(places)), "no further ahead than the buffer"


def test_a_stream_names_a_bad_row_when_it_comes_to_it(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [*sums(3), {"text": "x"}, *sums(3)])
    with pytest.raises(InputError) as caught:
        next(make_reader(path).stream(seed=0))
    assert caught.value.message.startswith(f"{path}:4: keys found: text")
    reader = make_reader(path, skip_bad_rows=True)
    assert len(list(islice(reader.stream(seed=0), 6))) == 6
    assert reader.report.dropped == {"unknown keys": 1}
    with pytest.raises(InputError, match="no row is left"):
        next(make_reader(path, max_length=5, skip_bad_rows=True).stream(seed=0))


def test_the_store_gives_back_what_it_was_given():
    generator = np.random.default_rng(0)
    given = [
        Encoded(generator.integers(0, 200_000, length), tuple((s, s + 1) for s in range(1, length, 3)))
        for length in (2, 9, 1, 30)
    ]
    store = ExampleStore()
    for example in given:
        store.append(example)
    assert len(store) == 4
    for a, b in zip(given, store, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert b.ids.dtype == np.int64
        assert a.turns == b.turns
    with pytest.raises(IndexError):
        store[4]
