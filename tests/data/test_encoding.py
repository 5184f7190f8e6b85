"""Token ids and places of responses: what is trained is what decoding will see and must write."""

from __future__ import annotations

import pytest

from marscli.data.encoding import Encoder
from marscli.data.rows import Conversation, RowError
from tiny_chat import make_tokenizer

END = 2  # <|im_end|>, which is the padding token too
CHAT = Conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2 🙂"},
        {"role": "user", "content": "and 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
)


def pieces(tokenizer, encoded):
    """The text of each response."""
    return [tokenizer.decode(encoded.ids[start:end]) for start, end in encoded.turns]


def test_every_assistant_turn_is_found_with_its_end():
    tokenizer = make_tokenizer()
    (encoded,) = Encoder(tokenizer, [END]).encode(CHAT)
    assert pieces(tokenizer, encoded) == ["2 🙂<|im_end|>", "4<|im_end|>"]
    assert encoded.ids[-1] == END
    for turn, (start, _) in zip((2, 4), encoded.turns, strict=True):
        prompt = tokenizer.apply_chat_template(CHAT.messages[:turn], add_generation_prompt=True, return_dict=False)
        assert encoded.ids[:start].tolist() == prompt


def test_a_token_over_the_start_of_the_answer_is_cut_there():
    tokenizer = make_tokenizer(merges=(("Ċ", "4"),))
    (encoded,) = Encoder(tokenizer, [END]).encode(CHAT)
    assert pieces(tokenizer, encoded) == ["2 🙂<|im_end|>", "4<|im_end|>"]
    prompt = tokenizer.apply_chat_template(CHAT.messages[:4], add_generation_prompt=True, return_dict=False)
    assert encoded.ids[: encoded.turns[1][0]].tolist() == prompt


def test_templates_that_rewrite_earlier_turns_give_one_example_a_turn():
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last or m['role'] == 'user' else 'old' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    first, second = Encoder(tokenizer, [END]).encode(CHAT)
    assert pieces(tokenizer, first) == ["2 🙂<|im_end|>"]
    assert pieces(tokenizer, second) == ["4<|im_end|>"]
    assert "old<|im_end|>" in tokenizer.decode(second.ids)


def test_templates_that_do_not_continue_their_own_prompt():
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    encoded = Encoder(tokenizer, [END]).encode(CHAT)[-1]
    assert tokenizer.decode(encoded.ids).endswith("user:and 2 + 2?\nassistant:<think>4<|im_end|>")
    assert pieces(tokenizer, encoded) == ["4<|im_end|>"]


def test_templates_without_an_end_get_one():
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    (encoded,) = Encoder(tokenizer, [END]).encode(CHAT)
    assert pieces(tokenizer, encoded) == ["2 🙂", "4<|im_end|>"]


def test_exactly_one_beginning_of_sequence_token():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ bos_token if loop.first }}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    for text in (template, template.replace("{{ bos_token if loop.first }}", "")):
        tokenizer = make_tokenizer(template=text, bos_token="<|endoftext|>")
        (encoded,) = Encoder(tokenizer, [END]).encode(CHAT)
        assert encoded.ids[:2].tolist() == [0, *tokenizer("B")["input_ids"]]
        assert pieces(tokenizer, encoded) == ["2 🙂<|im_end|>", "4<|im_end|>"]


def test_plain_text_without_a_template():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(template=None, bos_token="<|endoftext|>")
    chat = Conversation([{"role": "user", "content": "Q:"}, {"role": "assistant", "content": "A"}])
    (encoded,) = Encoder(tokenizer, [END]).encode(chat)
    assert tokenizer.decode(encoded.ids) == "Q:A<|im_end|>"
    assert encoded.turns == ((2, 4),)
    processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = processor
    (encoded,) = Encoder(tokenizer, [END]).encode(chat)
    assert tokenizer.decode(encoded.ids) == "<|endoftext|>Q:A<|im_end|>"
    assert encoded.turns == ((3, 5),)


def test_a_template_that_refuses_gives_no_traceback():
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowError, match="refuses this row: roles must alternate"):
        Encoder(tokenizer, [END]).encode(CHAT)
    tokenizer = make_tokenizer(template="{{ messages[0]['content'] + 1 }}")
    with pytest.raises(RowError, match="refuses this row"):
        Encoder(tokenizer, [END]).encode(CHAT)


def test_cutting_keeps_what_is_left_of_a_response():
    (encoded,) = Encoder(make_tokenizer(), [END]).encode(CHAT)
    (start, end), (second, last) = encoded.turns
    assert encoded.cut(last) is encoded
    assert encoded.cut(last - 1).turns == ((start, end), (second, last - 1))
    assert encoded.cut(second).turns == ((start, end),)
    assert len(encoded.cut(second).ids) == end
    assert encoded.cut(start + 1).turns == ((start, start + 1),)
    assert encoded.cut(start) is None


def test_tool_calls_are_trained_and_tools_are_shown():
    template = (
        "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for call in m['tool_calls'] or [] %}CALL {{ call['function'] | tojson }}{% endfor %}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    tokenizer = make_tokenizer(template=template)
    (encoded,) = Encoder(tokenizer, [END]).encode(Conversation(messages, tools=[{"name": "add"}]))
    asked, told = pieces(tokenizer, encoded)
    assert asked == 'CALL {"name": "add", "arguments": {"a": 1}}<|im_end|>'
    assert told == "It is 2.<|im_end|>"
    assert tokenizer.decode(encoded.ids).startswith('tools: [{"name": "add"}]')
