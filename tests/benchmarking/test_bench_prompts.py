"""Prompts from files; numbers in answers."""

import pytest

from marscli.benchmarking.prompts import (
    BUILT_IN,
    checks,
    encode_prompts,
    given_number,
    load_prompts,
    reference_number,
)
from marscli.errors import InputError
from tiny_chat import make_tokenizer, write_rows


def test_built_in_prompts_fill_the_default_limit():
    prompts, available = load_prompts(None, 16)
    assert len(prompts) == available == len(set(BUILT_IN)) == 16


def test_rows_of_all_kinds(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl",
        [
            {"prompt": "one", "threshold": "ignored"},
            {"question": "two", "answer": "so\n#### 1,234"},
            {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "left out"}]},
            {"prompt": "four", "answer": 5},
            {"instruction": "five", "input": "with this", "output": "left out"},
        ],
    )
    prompts, available = load_prompts(str(path), 16)
    assert available == 5
    assert [prompt.answer for prompt in prompts] == [None, 1234.0, None, 5.0, None]
    tokenizer = make_tokenizer()
    ids = encode_prompts(prompts, tokenizer, context_length=100)
    texts = [tokenizer.decode(one) for one in ids]
    assert texts[0] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert "left out" not in texts[2]
    assert "five\n\nwith this<" in texts[4]
    plain = encode_prompts(prompts[:2], tokenizer, context_length=100, chat_template=False)
    assert [tokenizer.decode(one) for one in plain] == ["one", "two"]
    assert load_prompts(str(path), 2)[1] == 5
    assert len(load_prompts(str(path), 2)[0]) == 2


def test_synthetic_lengths():
    prompts, _ = load_prompts(None, 3)
    for length in (1, 40, 5000):
        ids = encode_prompts(prompts, make_tokenizer(), context_length=400, prompt_tokens=length)
        assert [len(one) for one in ids] == [length] * 3
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("text", "names", "culprit"),
    [
        ("", "", "no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', ":2", "not a JSON line"),
        ('\n["a"]\n', ":2", "a JSON object is expected"),
        ('{"text": "a"}\n', ":1", "'text'"),
        ('{"prompt": 3}\n', ":1", "prompt"),
        ('{"messages": []}\n', ":1", "messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', ":1", "messages"),
        ('{"messages": "hello"}\n', ":1", "messages"),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, text, names, culprit):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_prompts(str(path), 16)
    for part in ("--dataset", str(path), names, culprit):
        assert part in error.value.message
    assert error.value.hint


def test_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="--dataset"):
            load_prompts(str(path), 16)


def test_numbers():
    assert reference_number("a 3\n#### -1,200") == -1200
    assert reference_number("$12.50") == 12.5
    assert reference_number(7) == 7
    assert reference_number("about 7 apples") is None
    assert reference_number(None) is None
    assert given_number("First 3, then 1,234.") == 1234
    assert given_number("7 #### 8, not 9") == 9
    assert given_number("none") is None


def test_checks_are_made_only_where_there_is_an_answer(tmp_path):
    tokenizer = make_tokenizer()
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "#### 12"}])
    none, twelve = checks(load_prompts(str(path), 16)[0], tokenizer)
    assert none is None
    assert twelve(tokenizer("it is 12.").input_ids)
    assert not twelve(tokenizer("it is 13").input_ids)
    assert checks(load_prompts(None, 2)[0], tokenizer) is None
