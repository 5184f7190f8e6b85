"""Model families: tiny random ones decode exactly as transformers' generate does, or are refused by name."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from marscli.core import model as core_model
from marscli.core.decoding import Engine, Request, decode
from marscli.core.model import PROVEN, check_decodable, check_model
from marscli.core.params import DecodingParams
from marscli.errors import InputError

from .tiny_models import MASK, VOCAB_SIZE, paper_reference, random_ids, transformers_greedy

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FULL = ["full_attention"] * 4
SPECIAL = {
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "layer_types": FULL, "attn_logit_softcapping": None},
    "gemma3_text": {"head_dim": 8, "layer_types": FULL},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt2": {"num_key_value_heads": 4, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.25},
    "phi": {"num_key_value_heads": 4},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
ASKED_FOR = ("qwen2", "qwen3", "llama", "smollm3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3")


def made(model_type, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**COMMON, **SPECIAL.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def test_the_families_that_are_asked_for_are_among_them():
    assert set(ASKED_FOR) <= PROVEN


@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_exact_and_threshold_decoding_are_right(model_type, monkeypatch):
    """Unequal prompts in one batch; with verified drafts, without a cache, and below exact."""
    model = made(model_type)
    check_decodable(model.config)
    monkeypatch.setattr(core_model, "PROVEN", set())
    check_model(model)  # the check of unproven models does not refuse right ones
    prompts = [random_ids(length, length) for length in (3, 11, 17)]
    expected = [transformers_greedy(model, ids, 16, []) for ids in prompts]
    for params, cache in (
        (DecodingParams(max_new_tokens=16), "row"),
        (DecodingParams(max_new_tokens=16, verify=True, draft_tokens=3), "row"),
        (DecodingParams(max_new_tokens=16, verify=True, draft_tokens=2), "none"),
    ):
        assert decoded(model, prompts, params, cache) == expected
    params = DecodingParams(max_new_tokens=16, threshold=0.2)
    assert decoded(model, prompts, params) == [
        paper_reference(model, ids, max_new_tokens=16, threshold=0.2, block_size=4, eos=[]) for ids in prompts
    ]


def decoded(model, prompts, params, cache="row"):
    engine = Engine(model, mask_token_id=MASK, eos_token_ids=[], context_length=128, max_rows=3, cache=cache)
    return [completion.tokens for completion in decode(engine, [Request(ids, params) for ids in prompts])]


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("gemma2", {"layer_types": None}, "sliding_attention"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "caps its attention scores"),
        ("gemma3_text", {"layer_types": None}, "sliding_attention"),
        ("mistral", {"sliding_window": 8}, "sliding window of 8"),
        ("phi3", {"sliding_window": 8}, "sliding window of 8"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4}, "sliding_attention"),
        ("bloom", {"max_position_embeddings": None}, "how long its context is"),
    ],
)
def test_configs_that_would_decode_wrongly_are_refused(model_type, changes, named):
    config = CONFIG_MAPPING[model_type](**{**COMMON, **SPECIAL.get(model_type, {}), **changes})
    with pytest.raises(InputError, match=named) as refusal:
        check_decodable(config)
    assert model_type in refusal.value.message


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt_oss", {"layer_types": FULL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("falcon", {}),
    ],
)
def test_models_whose_config_does_not_show_it_are_found_out(model_type, changes):
    """Attention sinks and rotary positions counted by the model itself: without the check silently wrong."""
    model = made(model_type, **changes)
    check_decodable(model.config)
    with pytest.raises(InputError, match=f"{model_type}.* (computes something else|cannot be called)"):
        check_model(model)
