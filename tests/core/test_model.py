"""The model call: logits where they are wanted, grouped attention, and models that are refused by name."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, T5Config

from marscli.core import model as core_model
from marscli.core.attention import NAME, grouped_attention, use_grouped_attention
from marscli.core.compiled import CompiledModel
from marscli.core.layout import decode_layout
from marscli.core.model import check_decodable, forward_logits, select_before_head
from marscli.errors import InputError, MarsError

from .tiny_models import ARCHITECTURES, on_device, random_ids, tiny_model


def step_inputs():
    cached, newest, drafts = (np.array(column) for column in ([0, 0], [4, 2], [1, 0]))
    layout = decode_layout(cached, newest, drafts, np.array([[1, 1], [3, 0]]), width=8)
    position_ids, visibility, read = on_device(layout)
    ids = torch.tensor([random_ids(8, 1), random_ids(8, 2)])
    return {"input_ids": ids, "position_ids": position_ids, "mask": visibility.dense()}, read


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("native", [True, False])
def test_chosen_logits_equal_slices_of_all(architecture, native, monkeypatch):
    if native and not core_model.SELECTS_PER_ROW:
        pytest.skip("this transformers selects no positions per row")
    monkeypatch.setattr(core_model, "SELECTS_PER_ROW", native)
    model = tiny_model(architecture)
    inputs, read = step_inputs()
    everything = forward_logits(model, **inputs, keep=torch.ones(2, 8, dtype=torch.bool)).view(2, 8, -1)
    chosen = forward_logits(model, **inputs, keep=read)
    torch.testing.assert_close(chosen, everything.gather(1, read[..., None].expand(-1, -1, everything.shape[-1])))
    some = torch.rand(2, 8) > 0.5
    torch.testing.assert_close(forward_logits(model, **inputs, keep=some), everything[some])


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_grouped_attention_equals_transformers_sdpa(architecture):
    model = tiny_model(architecture, clear=False)
    inputs, _ = step_inputs()
    call = {"attention_mask": inputs["mask"], **{k: inputs[k] for k in ("input_ids", "position_ids")}}
    expected = model(**call).logits
    with grouped_attention(model):
        assert model.config._attn_implementation == NAME
        torch.testing.assert_close(model(**call).logits, expected, atol=1e-5, rtol=0)
        plain = model(call["input_ids"]).logits  # no mask of ours: transformers' own path
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(plain, model(call["input_ids"]).logits)


def test_a_model_that_uses_grouped_attention_for_good_keeps_it():
    model = tiny_model("llama", seed=7)
    ids = torch.tensor([random_ids(9, 3)])
    expected = model.generate(ids, do_sample=False, max_new_tokens=6)
    use_grouped_attention(model)
    with grouped_attention(model):
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == NAME
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=6), expected)


def test_attention_and_head_are_put_back_after_an_error():
    model = tiny_model("qwen2")
    with (
        pytest.raises(ZeroDivisionError),
        grouped_attention(model),
        select_before_head(model, torch.zeros(1, 1).long()),
    ):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MistralConfig(sliding_window=64), "sliding window of 64"),
        (Gemma2Config(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding_attention"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (T5Config(), "encoder-decoder"),
    ],
)
def test_what_masks_would_get_silently_wrong_is_refused_by_name(config, named):
    with pytest.raises(InputError, match=named) as refusal:
        check_decodable(config)
    assert config.model_type in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    "config", [Qwen2Config(), LlamaConfig(), MistralConfig(sliding_window=None), Qwen2Config(sliding_window=4096)]
)
def test_full_attention_is_accepted(config):
    check_decodable(config)


def test_a_failed_compilation_says_what_to_do():
    def broken(graph, example_inputs):
        raise RuntimeError("no compiler found")

    model = CompiledModel(tiny_model("llama"), backend=broken)
    with pytest.raises(MarsError, match="no compiler found") as caught:
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert "--compile" in caught.value.hint
