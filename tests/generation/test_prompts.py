"""Prompt files, conversations and templates: what is taken, what is refused, and how the refusal names the culprit."""

import pytest

from marscli.errors import InputError
from marscli.generation.config import GenerateConfig
from marscli.generation.prompts import PromptFile, PromptRow, encode, rows_from

from .conftest import byte_level_tokenizer

USER = {"role": "user", "content": "Hi"}


def read_rows(path):
    return list(PromptFile(path))


@pytest.fixture
def rows_file(tmp_path):
    def write(content):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_rows_of_a_file(rows_file):
    path = rows_file(
        b'\xef\xbb\xbf{"prompt": "a", "id": 7, "threshold": "exact", "seed": 3}\n\n'
        b'{"messages": [{"role": "user", "content": "b"}], "max_new_tokens": 2, "temperature": 0.5, "threshold": 0.9}'
    )
    first, second = read_rows(path)
    assert (first.prompt, first.extra, first.overrides) == ("a", {"id": 7}, {"threshold": "exact", "seed": 3})
    assert first.where.endswith("rows.jsonl, line 1")
    assert second.messages == [{"role": "user", "content": "b"}]
    assert second.extra == {"messages": second.messages}
    assert second.where.endswith("rows.jsonl, line 3")
    params = second.params(GenerateConfig(threshold="exact", max_new_tokens=9, top_k=4))
    assert (params.threshold, params.max_new_tokens, params.temperature, params.seed, params.top_k) == (
        0.9,
        2,
        0.5,
        0,
        4,
    )
    assert first.params(GenerateConfig(threshold=0.5)).threshold is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2: list instead of an object"),
        ('{"text": "a", "id": 1}', r"line 1: neither prompt nor messages \(found: text, id\)"),
        ("{}", "neither prompt nor messages .found: no keys"),
        ('{"prompt": "a", "messages": []}', "both prompt and messages"),
        ('{"prompt": 3}', "prompt is int, not text"),
        ('{"messages": []}', "line 1: messages is not a list of messages, or empty"),
        ('{"messages": "hi"}', "messages is not a list"),
        ('{"messages": [{"content": "hi"}]}', r"messages\[0\] has no role"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no content"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"messages\[0\] has int content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
        ('{"prompt": "a", "max_new_tokens": "3"}', "line 1: max_new_tokens is '3'"),
        ('{"prompt": "a", "seed": true}', "seed is True"),
        ('{"prompt": "a"}\n{"prompt": "a", "stop": 3}', "line 2: stop is 3"),
        ('{"prompt": "a", "stop": ["b", 4]}', "line 1: stop is .'b', 4."),
        ('{"prompt": "a", "stop": ""}', "line 1: stop is empty"),
        ('{"prompt": "a", "top_k": 0.5}', "line 1: top_k is 0.5"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content part of type 'image'"),
        ("", "the file holds no rows"),
        ("\n \n", "the file holds no rows"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_bad_files_are_refused_by_line(content, message, rows_file):
    with pytest.raises(InputError, match=message) as caught:
        read_rows(rows_file(content))
    assert "rows.jsonl" in caught.value.message
    assert caught.value.hint


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"threshold": 1.5}, "line 4: --threshold 1.5"),
        ({"max_new_tokens": 0}, "line 4: --max-new-tokens 0"),
        ({"temperature": -1}, "line 4: --temperature -1"),
        ({"seed": 2**70}, "line 4: --seed 1"),
    ],
)
def test_a_rows_own_wishes_are_checked(overrides, message):
    row = PromptRow("a", overrides=overrides, where="line 4")
    with pytest.raises(InputError, match=message):
        row.params(GenerateConfig())


def test_what_python_callers_may_give():
    assert [row.prompt for row in rows_from("a")] == ["a"]
    assert [row.prompt for row in rows_from(["a", "b"])] == ["a", "b"]
    assert [row.messages for row in rows_from([USER])] == [[USER]]
    assert [row.messages or row.prompt for row in rows_from([[USER], "b", {"prompt": "c"}])] == [[USER], "b", "c"]
    for wrong in ([], 3, [3]):
        with pytest.raises(InputError):
            rows_from(wrong)


def texts(tokenizer, row, **options):
    ids, _ = encode(tokenizer, row, context_length=64, **options)
    return tokenizer.decode(ids)


def test_templates_give_exactly_one_beginning_of_sequence_token(tokenizer):
    begins = byte_level_tokenizer()
    from tokenizers.processors import TemplateProcessing

    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A <|end|>",
        special_tokens=[("<|begin|>", begins.bos_token_id), ("<|end|>", begins.eos_token_id)],
    )
    assert begins("a").input_ids[0] == begins.bos_token_id
    for each in (tokenizer, begins):
        assert texts(each, PromptRow("Hi")) == "<|begin|><|user|>Hi<|end|><|assistant|>"
    assert texts(begins, PromptRow("Hi"), chat_template=False) == "<|begin|>Hi"
    assert texts(begins, PromptRow("<|begin|>Hi"), chat_template=False).startswith("<|begin|>Hi")
    assert texts(tokenizer, PromptRow("Hi"), chat_template=False) == "Hi"


def test_system_messages(tokenizer):
    assert texts(tokenizer, PromptRow("Hi"), system="Be brief.").startswith(
        "<|begin|><|system|>Be brief.<|end|><|user|>"
    )
    own = PromptRow(messages=[{"role": "system", "content": "Mine"}, USER])
    assert texts(tokenizer, own, system="Yours") == "<|begin|><|system|>Mine<|end|><|user|>Hi<|end|><|assistant|>"
    assert len(own.messages) == 2


def test_the_shown_prompt(tokenizer):
    assert encode(tokenizer, PromptRow("Hi"), context_length=64)[1] == "Hi"
    shown = encode(tokenizer, PromptRow(messages=[USER]), context_length=64)[1]
    assert shown == "<|begin|><|user|>Hi<|end|><|assistant|>"


def test_empty_prompts_are_refused_unless_a_template_fills_them(tokenizer):
    assert texts(tokenizer, PromptRow("")) == "<|begin|><|user|><|end|><|assistant|>"
    with pytest.raises(InputError, match="x, line 2: the prompt is empty"):
        encode(tokenizer, PromptRow("", where="x, line 2"), context_length=64, chat_template=False)


def test_prompts_must_leave_room_for_an_answer(tokenizer):
    row = PromptRow("a" * 9, where="line 1")
    length = len(encode(tokenizer, row, context_length=64, chat_template=False)[0])
    encode(tokenizer, row, context_length=length + 1, chat_template=False)
    with pytest.raises(InputError, match=f"line 1: the prompt has {length} tokens: 1 too many"):
        encode(tokenizer, row, context_length=length, chat_template=False)
    with pytest.raises(InputError, match="3 too many") as caught:
        encode(tokenizer, row, context_length=length - 2, chat_template=False)
    assert f"at most {length - 3} tokens" in caught.value.hint


def test_templates_that_are_missing_or_refuse(tokenizer):
    bare = byte_level_tokenizer(chat_template=None)
    with pytest.raises(InputError, match="--chat-template"):
        encode(bare, PromptRow("a"), context_length=64, chat_template=True)
    with pytest.raises(InputError, match="line 3: messages need a chat template"):
        encode(bare, PromptRow(messages=[USER], where="line 3"), context_length=64)
    with pytest.raises(InputError, match="--system"):
        encode(bare, PromptRow("a"), context_length=64, system="b")
    refused = PromptRow(messages=[{"role": "assistant", "content": "a"}, USER], where="line 5")
    with pytest.raises(InputError, match="line 5: the chat template refuses this: the assistant cannot begin"):
        encode(tokenizer, refused, context_length=64)
    broken = byte_level_tokenizer(chat_template="{{ messages[0].content.nothing.at_all }}")
    with pytest.raises(InputError, match="the chat template refuses this"):
        encode(broken, PromptRow("a"), context_length=64)


def test_text_parts_and_tool_calls_are_what_training_gives_a_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    (row,) = rows_from([[{"role": "user", "content": parts}, call, {"role": "tool", "content": "5", "name": None}]])
    assert row.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]},
        {"role": "tool", "content": "5"},
    ]


def test_a_rows_own_stop_and_sampling(rows_file):
    lines = '{"prompt": "a", "stop": "x", "top_p": 0.5, "top_k": 3, "confidence": "margin"}\n{"prompt": "b"}'
    first, second = read_rows(rows_file(lines))
    cfg = GenerateConfig(stop=["y", "z"])
    assert (first.stops(cfg), second.stops(cfg)) == (("x",), ("y", "z"))
    params = first.params(cfg)
    assert (params.top_p, params.top_k, params.confidence) == (0.5, 3, "margin")
    with pytest.raises(InputError, match="line 1: confidence 'margin' is not the one"):
        first.params(GenerateConfig(threshold=0.9))


def test_a_limited_file_knows_that_there_is_more(rows_file):
    path = rows_file('{"prompt": "a"}\n\n{"prompt": "b"}\nbroken\n')
    rows = PromptFile(path, 2)
    assert [row.prompt for row in rows] == [row.prompt for row in rows] == ["a", "b"]
    assert rows.is_cut
    whole = PromptFile(rows_file('{"prompt": "a"}\n\n'), 1)
    assert len(list(whole)) == 1
    assert not whole.is_cut
