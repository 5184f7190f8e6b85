"""Row formats, and every way in which a row or a file can be wrong."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from marscli.data.rows import Row, RowError, check_source, read_rows, to_conversation
from marscli.errors import InputError
from tiny_chat import write_rows

CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def conversation(data, **options):
    return to_conversation(Row("f:1", data), **options)


@pytest.mark.parametrize(
    "data",
    [
        {"messages": CHAT},
        {"prompt": "Q", "messages": CHAT},
        {"prompt": "Q", "completion": "A"},
        {"prompt": "Q", "response": "A"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "Q", "input": "", "output": "A"},
        {"question": "Q", "answer": "A", "id": 7},
        {"messages": [{**m, "tool_calls": None, "name": None} for m in CHAT]},
        {"messages": [*CHAT, {"role": "user", "content": "thanks"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, CHAT[1]]},
    ],
)
def test_every_format_becomes_the_same_conversation(data):
    assert conversation(data).messages == CHAT


def test_input_is_joined_to_the_instruction():
    messages = conversation({"instruction": "Add.", "input": "1 2", "output": "3"}).messages
    assert messages[0]["content"] == "Add.\n\n1 2"


def test_named_fields_come_before_the_usual_ones():
    data = {"messages": [], "q": "Q", "answer": "A", "a": 42}
    assert conversation(data, prompt_field="q", response_field="answer").messages == CHAT
    assert conversation(data, prompt_field="q", response_field="a").messages[1]["content"] == "42"
    assert conversation({"q": "Q", "answer": "A"}, prompt_field="q").messages == CHAT


def test_system_message_is_added_where_there_is_none():
    assert conversation({"messages": CHAT}, system="S").messages == [{"role": "system", "content": "S"}, *CHAT]
    own = [{"role": "system", "content": "own"}, *CHAT]
    assert conversation({"messages": own}, system="S").messages == own


def test_tool_calls_need_no_content_and_have_plain_arguments():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = conversation({"messages": messages, "tools": json.dumps(tools)})
    assert result.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result.tools == tools


@pytest.mark.parametrize(
    ("data", "reason", "text"),
    [
        ({"text": "x", "id": 1}, "unknown keys", "keys found: text, id; keys expected: messages; prompt + completion"),
        ({}, "unknown keys", "keys found: none"),
        ({"messages": []}, "bad messages", "an empty list"),
        ({"messages": "Q"}, "bad messages", "text"),
        ({"messages": None}, "bad messages", "null"),
        ({"messages": [{"from": "human", "value": "Q"}]}, "bad messages", "message 1: keys found: from, value"),
        ({"messages": [{"role": "user"}, CHAT[1]]}, "bad messages", "message 1 (user) has no content"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "bad messages", "message 2 (assistant)"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, "empty response", "message 2"),
        ({"messages": CHAT[:1]}, "no assistant turn", "assistant"),
        ({"messages": CHAT[1:]}, "no prompt", "first message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]}, "bad messages", "'image'"),
        ({"messages": CHAT, "tools": "{"}, "bad tools", "tools"),
        ({"question": "Q", "answer": ""}, "empty response", "'answer' is empty"),
        ({"question": None, "answer": "A"}, "not text", "'question' must be text, not null"),
        ({"question": ["Q"], "answer": "A"}, "bad messages", "message 1"),
        ({"question": "Q\ud800", "answer": "A"}, "not text", "half of a character"),
    ],
)
def test_bad_rows_say_what_is_wrong(data, reason, text):
    with pytest.raises(RowError) as caught:
        conversation(data)
    assert caught.value.reason == reason
    assert text in str(caught.value)


def test_missing_named_fields_are_named():
    with pytest.raises(RowError, match=r"keys found: question, answer; keys expected: q \+ a"):
        conversation({"question": "Q", "answer": "A"}, prompt_field="q", response_field="a")


def test_json_lines_keep_their_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b", "completion": "c"}\n\n{"broken\n[1]\n', encoding="utf-8")
    rows = list(read_rows(str(path)))
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert rows[0].data["prompt"] == "a\u2028b"
    assert "not a JSON line" in str(rows[1].data)
    assert "not a list" in str(rows[2].data)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"prompt": "Q", "completion": "A"}]),
        json.dumps({"data": [{"prompt": "Q", "completion": "A"}]}),
        '{"prompt": "Q", "completion": "A"}\n',
        '{"prompt": "Q", "completion": "A"}\n' * 2,
    ],
)
def test_json_files(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert all(to_conversation(row).messages == CHAT for row in read_rows(str(path)))


def test_tables(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"question": "Q", "answer": 42}, {"question": "R", "answer": 43}])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_csv(tmp_path / "rows.csv")
    for name in ("rows.parquet", "rows.csv"):
        read = list(read_rows(str(tmp_path / name)))
        assert read[1].where == f"{tmp_path / name}, row 2"
        assert [to_conversation(row).messages[1]["content"] for row in read] == ["42", "43"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("train.josnl", "no such file", "train.jsonl"),
        ("nowhere/train.jsonl", "no such file", "Hub id"),
        ("notes.txt", "files ending in .txt are not read", ".jsonl"),
        (".", "is a folder", "train.jsonl"),
        ("bytes.jsonl", "not UTF-8", "UTF-8"),
        ("broken.json", "broken.json:1: not JSON", "one list of objects"),
        ("number.json", "no list of objects", "one list of objects"),
        ("broken.parquet", "cannot be loaded", "what its name says"),
    ],
)
def test_wrong_sources(tmp_path, name, message, hint):
    write_rows(tmp_path / "train.jsonl", [{}])
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "number.json").write_text("5")
    (tmp_path / "broken.parquet").write_text("x")
    with pytest.raises(InputError) as caught:
        list(read_rows(str(tmp_path / name)))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_folder_as_the_hub_has_them(tmp_path, monkeypatch):
    """A Hub id, offline: the loader finds a folder of that name where it runs, and takes it as the Hub's."""
    folder = tmp_path / "org" / "sums"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    write_rows(folder / "main" / "train.jsonl", [{"question": "Q", "answer": "A"}] * 3)
    write_rows(folder / "main" / "test.jsonl", [{"question": "R", "answer": "B"}])
    monkeypatch.chdir(tmp_path)
    for source in ("org/sums:main", "org/sums:main:train", str(folder)):
        for streaming in (False, True):
            rows = list(read_rows(source, streaming=streaming))
            assert [row.where for row in rows] == [f"{source}, row {n}" for n in (1, 2, 3)]
            assert to_conversation(rows[0]).messages == CHAT
    assert [row.data["question"] for row in read_rows("org/sums:main:test")] == ["R"]
    for source, message in (("org/sums:other", "other"), ("org/sums:main:dev", "dev")):
        with pytest.raises(InputError, match=f"{source} cannot be loaded: .*{message}"):
            list(read_rows(source))


def test_lines_come_one_by_one(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Q", "completion": "A"}] * 1000)
    with path.open("ab") as file:
        file.write(b"\xff\n")  # far behind the first rows
    rows = read_rows(str(path))
    assert next(rows).data["prompt"] == "Q"
    with pytest.raises(InputError, match="not UTF-8"):
        list(rows)


def test_a_file_larger_than_memory_can_be_read(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Q", "completion": "A" * 1000}] * 3000)
    tracemalloc.start()
    assert sum(1 for _ in read_rows(str(path))) == 3000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 20


def test_hub_ids_pass_the_first_check():
    for source in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:test"):
        check_source(source)
    with pytest.raises(InputError):
        check_source("gsm8k")
