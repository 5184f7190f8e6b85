"""The demo's tokenizer and model: ordinary, small, and the same after saving and loading."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from marscli import checkpoint
from marscli.demo.base import END, MASK, PAD, ROLES, make_tokenizer, write_base
from marscli.demo.problems import LARGEST, make_problems


@pytest.fixture(scope="module")
def problems():
    training, held_out = make_problems(2000, held_out=300)
    return training + held_out


@pytest.fixture(scope="module")
def texts(problems):
    return [text for problem in problems[:2000] for text in (problem.question, problem.answer)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("base")
    assert write_base(folder, texts, largest_number=LARGEST) < 3_000_000
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_the_loaded_tokenizer_encodes_as_the_saved_one(tokenizer, texts):
    made = make_tokenizer(texts, largest_number=LARGEST)
    assert len(tokenizer) == len(made)
    assert tokenizer(texts[:200])["input_ids"] == made(texts[:200])["input_ids"]


def test_every_text_comes_back(tokenizer, problems):
    others = ["Is 145 ≥ 7 in Łódź? 🙂", "a\n\n  b\tc", "12", "3.14 apples"]
    for text in [text for problem in problems[:200] for text in (problem.question, problem.answer)] + others:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_words_and_numbers_are_one_token_each(tokenizer, problems):
    words = {word for problem in problems for word in problem.answer.replace(".", " ").replace(",", " ").split()}
    assert all(len(tokenizer(f" {word}")["input_ids"]) == 1 for word in words)
    assert all(len(tokenizer(f" {number}")["input_ids"]) == 1 for number in range(LARGEST + 1))


def test_answers_have_at_least_25_tokens(tokenizer, problems):
    assert min(len(tokenizer(problem.answer)["input_ids"]) for problem in problems) >= 25


def test_special_tokens_have_ids_of_their_own_within_the_embedding(tokenizer, folder):
    ids = tokenizer.convert_tokens_to_ids([PAD, END, MASK, *ROLES])
    assert len(set(ids)) == len(ids)
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.mask_token) == (PAD, END, MASK)
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_chat_template_ends_turns_and_its_prompt_begins_the_whole(tokenizer):
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Tom."}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>Who?<|end|><|assistant|>"
    assert whole == prompt + "Tom.<|end|>"


def test_marscli_loads_it_as_never_trained(folder):
    loaded = checkpoint.load(folder, device="cpu")
    assert loaded.block_size is None
    assert loaded.eos_token_ids == (loaded.tokenizer.eos_token_id,)
