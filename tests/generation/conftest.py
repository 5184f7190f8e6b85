"""Small real tokenizers and models with random weights, saved as ordinary checkpoints."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "Why is the sky blue? Because the air scatters short waves.",
    "A train leaves at nine and it's three hours late, isn't it?",
    "Größe, naïveté, 東京は大きい。 Привет, мир! 🙂🚀👩‍🚀",
]
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the assistant cannot begin') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 64


def byte_level_tokenizer(chat_template=TEMPLATE, mask=True):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|system|>", "<|mask|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|end|>",
        bos_token="<|begin|>",
        extra_special_tokens=special[2:5],
        **({"mask_token": "<|mask|>"} if mask else {}),
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_level_tokenizer()


def save_model(folder, *, mars, chat_template=TEMPLATE):
    """Save a tiny Llama; weights are scaled up so that its choices are clear."""
    tokenizer = byte_level_tokenizer(chat_template, mask=mars)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if mars:
        path = folder / "config.json"
        keys = {"version": 1, "block_size": 4, "ar_weight": 1.0, "base_model": "tiny"}
        settings = json.loads(path.read_text())
        mask = tokenizer.mask_token_id
        path.write_text(json.dumps({**settings, "mask_token_id": mask, "pard_token": mask, "mars": keys}))
    assert AutoTokenizer.from_pretrained(folder)("sky blue").input_ids == tokenizer("sky blue").input_ids
    return folder


@pytest.fixture(scope="session")
def mars_model(tmp_path_factory):
    """Folder of a model with a mask token and a mars block."""
    return save_model(tmp_path_factory.mktemp("mars"), mars=True)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory):
    """Folder of a model that was never MARS-trained and has no chat template."""
    return save_model(tmp_path_factory.mktemp("plain"), mars=False, chat_template=None)
