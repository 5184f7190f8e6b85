"""Adapters: what is trained and saved, that they resume, merge and load."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tiny_runs import train
from transformers import AutoModelForCausalLM

import marscli
from marscli import checkpoint
from marscli.errors import InputError
from tiny_chat import make_model, save_model

OPTIONS = {"max_steps": 6, "save_steps": 3, "lora_rank": 4}
IDS = torch.tensor([[1, 50, 60, 3, 3, 3]])  # 3 is the mask


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    return train_adapters(tmp_path_factory.mktemp("lora"), data, tied=True)


@pytest.fixture(scope="module", params=["tied", "untied"])
def either(request, trained, tmp_path_factory, data):
    """With tied weights and without."""
    if request.param == "tied":
        return trained
    return train_adapters(tmp_path_factory.mktemp("lora"), data, tied=False)


def train_adapters(folder, data, *, tied):
    base = save_model(folder / "base", make_model(tie_word_embeddings=tied))
    train(base, data, folder / "adapters", **OPTIONS)
    return base, folder / "adapters"


def test_adapters_and_one_row_are_trained_and_saved(either):
    base, folder = either
    assert not (folder / "model.safetensors").exists()
    for place in (folder, folder / "checkpoint-3"):
        saved = load_file(place / "adapter_model.safetensors")
        rows = {name: value.shape for name, value in saved.items() if "lora_" not in name}
        assert list(rows.values()) == [(1, 32)], "the mask token's row, not the embedding"
    linear = {name.split(".")[-3] for name in saved if "lora_A" in name}
    assert linear == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    loaded, before = marscli.load(folder), marscli.load(base)
    assert (loaded.mask_token_id, loaded.block_size, loaded.eos_token_ids) == (3, 4, before.eos_token_ids)
    assert checkpoint.load_settings(folder)[0].block_size == 4
    change = loaded.model.get_input_embeddings().weight - before.model.get_input_embeddings().weight
    assert change.abs().sum(1).nonzero().flatten().tolist() == [3]


@torch.no_grad()
def test_every_way_to_load_them_gives_the_same_model(either):
    base, folder = either
    merged = marscli.load(folder).model(IDS).logits
    for auto_class in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        torch.testing.assert_close(auto_class.from_pretrained(folder)(IDS).logits, merged, atol=1e-5, rtol=0)
    assert (marscli.load(base).model(IDS).logits - merged).abs().max() > 0.01


def test_merged_is_an_ordinary_checkpoint(either, data, tmp_path):
    base, folder = either
    train(base, data, tmp_path, **OPTIONS, merge=True)
    assert not (tmp_path / "adapter_config.json").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["mask_token_id"], config["mars"]["block_size"]) == (3, 4)
    before = marscli.load(base).model
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == before.num_parameters()
    assert config["tie_word_embeddings"] == before.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, marscli.load(folder).model(IDS).logits)


def test_adapters_resume_bit_for_bit(trained, data, tmp_path):
    base, folder = trained
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    assert train(base, data, tmp_path, **OPTIONS, resume=True)["resumed_from_step"] == 3
    a, b = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path))
    assert all(torch.equal(a[name], b[name]) for name in a | b)


def test_adapters_whose_base_model_is_gone(trained, tmp_path):
    _, folder = trained
    shutil.copytree(folder, tmp_path / "x")
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone/base"}))
    with pytest.raises(InputError, match=r"adapter_config.json: base model /gone/base: there is no such folder"):
        marscli.load(tmp_path / "x")


def test_adapters_of_the_ar_objective(trained, data, tmp_path):
    base, _ = trained
    train(base, data, tmp_path, max_steps=2, lora_rank=2, objective="ar")
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert marscli.load(tmp_path).mask_token_id is None


def test_under_bfloat16_the_frozen_weights_are_stored_so_and_the_trained_ones_are_not(trained, data, tmp_path):
    base, _ = trained
    train(base, data, tmp_path / "x", max_steps=2, lora_rank=2, dtype="bfloat16", save_steps=1)
    saved = load_file(tmp_path / "x" / "checkpoint-1" / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    train(base, data, tmp_path / "y", max_steps=1, lora_rank=2, dtype="bfloat16", merge=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "y").dtype == torch.bfloat16


def test_training_goes_on_from_adapters(trained, data, tmp_path):
    """The second stage on the first one's adapters: an ordinary checkpoint with all weights trained."""
    _, folder = trained
    summary = train(folder, data, tmp_path, max_steps=2)
    assert summary["loss"] > 0
    before, after = marscli.load(folder).model, AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
