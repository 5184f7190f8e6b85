"""The other way round is the same product, only where it is asked for, and nothing of the model changes."""

import pytest
import torch
from torch import nn

from marscli.core.linear import MOST_ENTRIES, FewEntriesLinear, few_entries, prepare_linear_layers

from .tiny_models import tiny_model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 4), (12,)])
def test_the_other_way_round_is_the_same_product(bias, shape):
    layer = nn.Linear(32, 20, bias=bias)
    states = torch.randn(*shape, 32)
    expected = layer(states)
    prepare_linear_layers(layer)
    assert torch.equal(layer(states), expected)
    with few_entries(shape[0]):
        found = layer(states)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.is_contiguous()


def test_wide_steps_are_left_alone(monkeypatch):
    layer = nn.Linear(8, 8)
    prepare_linear_layers(layer)
    calls = []
    monkeypatch.setattr(torch, "mm", lambda a, b: calls.append(b.shape[1]) or a @ b)
    for entries in (MOST_ENTRIES, MOST_ENTRIES + 1):
        with few_entries(entries):
            layer(torch.randn(entries, 8))
    assert calls == [MOST_ENTRIES]


def test_only_plain_float32_layers_take_part():
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)])
    weights = model.state_dict()
    prepare_linear_layers(model)
    prepare_linear_layers(model)
    assert [type(layer) for layer in model] == [FewEntriesLinear, Own, nn.Linear]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_prepared_model_still_computes_what_it_did():
    model = tiny_model("qwen2", seed=2)
    ids = torch.randint(0, 47, (1, 9))
    with torch.no_grad():
        before = model(ids).logits
        prepare_linear_layers(model)
        torch.testing.assert_close(model(ids).logits, before)
        with few_entries(9):
            torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
