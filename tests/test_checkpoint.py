"""Checkpoints: mask token without a new parameter, an ordinary folder, clear refusals."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from marscli import checkpoint
from marscli.checkpoint import MarsMetadata, choose_mask_token, load, save
from marscli.errors import InputError, MarsError
from tiny_chat import make_model, make_tokenizer, save_model


def metadata(mask_token_id, block_size=4):
    return MarsMetadata(block_size=block_size, ar_weight=1.0, base_model="base", mask_token_id=mask_token_id)


def tokenizer_without(*tokens):
    """As `make_tokenizer`, but with other texts in place of these special tokens."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for token in tokens:
        index = vocab.pop(token)
        vocab[f"word{index}"] = index
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != token]
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|im_end|>")


def test_a_named_mask_token_is_used_as_it_is():
    tokenizer = make_tokenizer(mask_token="<|mask|>")
    assert choose_mask_token(tokenizer, 272) == ("<|mask|>", 3)


def test_a_mask_token_in_the_vocabulary_is_found():
    tokenizer = make_tokenizer()
    assert tokenizer.mask_token is None
    assert choose_mask_token(tokenizer, 260) == ("<|mask|>", 3)
    assert tokenizer.mask_token_id == 3


def test_a_spare_embedding_row_is_used_and_nothing_is_resized(tmp_path):
    tokenizer = tokenizer_without("<|mask|>")
    size = len(tokenizer)
    assert choose_mask_token(tokenizer, 272) == ("<|mask|>", size)
    model = make_model()
    save(tmp_path, model, tokenizer, mars=metadata(size))
    loaded = load(tmp_path)
    assert loaded.mask_token_id == loaded.tokenizer.mask_token_id == size
    assert loaded.model.get_input_embeddings().weight.shape == model.get_input_embeddings().weight.shape


@pytest.mark.parametrize(
    "reserved", ["<empty_output>", "<|reserved_special_token_4|>", "<unused7>", "<|dummy_0|>", "[control_9]"]
)
def test_a_full_vocabulary_gives_a_reserved_token(reserved):
    tokenizer = tokenizer_without("<|mask|>")
    tokenizer.add_special_tokens({"extra_special_tokens": [reserved]})
    token, index = choose_mask_token(tokenizer, len(tokenizer))
    assert (token, index) == (reserved, len(tokenizer) - 1)
    assert tokenizer.mask_token == reserved


def test_a_full_vocabulary_without_reserved_tokens_is_refused():
    tokenizer = tokenizer_without("<|mask|>")
    with pytest.raises(InputError, match="spare embedding row"):
        choose_mask_token(tokenizer, len(tokenizer))
    assert tokenizer.mask_token is None


def test_a_saved_folder_is_an_ordinary_checkpoint(tmp_path):
    model, tokenizer = make_model("llama"), make_tokenizer(mask_token="<|mask|>")
    model.config.use_cache = False  # as the trainer leaves it
    (tmp_path / "README.md").write_text("mine")
    save(tmp_path, model, tokenizer, mars=metadata(3, block_size=8))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mars"] == {"version": 1, "block_size": 8, "ar_weight": 1.0, "base_model": "base"}
    assert (config["mask_token_id"], config["pard_token"], config["use_cache"]) == (3, 3, True)
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not list(tmp_path.glob(".saving-*"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    loaded = load(tmp_path)
    assert (loaded.block_size, loaded.is_mars, loaded.eos_token_ids) == (8, True, (2,))
    assert loaded.context_length == 512
    assert loaded.tokenizer.chat_template == tokenizer.chat_template


def test_a_plain_checkpoint_loses_the_mars_block(tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    save(tmp_path, model, tokenizer, mars=metadata(3))
    save(tmp_path, model, tokenizer, mars=None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"mars", "mask_token_id", "pard_token"} & set(config)
    assert not load(tmp_path).is_mars


def test_a_broken_off_save_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    model, tokenizer = make_model(), make_tokenizer()
    save(tmp_path, model, tokenizer, mars=None)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, make_model(seed=1), tokenizer, mars=metadata(3))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_wrong_folders_are_refused_by_name(tmp_path):
    good = save_model(tmp_path / "good")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no such folder") as refusal:
        checkpoint.check_model_source(tmp_path / "goood")
    assert "good" in refusal.value.hint  # what there is
    with pytest.raises(InputError, match=r"no config\.json"):
        checkpoint.check_model_source(empty)
    with pytest.raises(InputError, match="is a file"):
        checkpoint.check_model_source(good / "config.json")
    (good / "model.safetensors").rename(good / "pytorch_model.bin")
    with pytest.raises(InputError, match="no safetensors") as refusal:
        checkpoint.check_model_source(good)
    assert "run code" in refusal.value.hint
    (good / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="no weights"):
        checkpoint.check_model_source(good)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        load(tmp_path)


def test_damaged_weights_are_an_error_with_a_hint(tmp_path):
    save_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(MarsError, match="weights") as refusal:
        load(tmp_path)
    assert "damaged" in refusal.value.hint


def test_an_unreachable_hub_id_says_what_to_check():
    with pytest.raises(MarsError, match="from the Hub") as refusal:
        load("nobody/no-such-model")
    assert refusal.value.exit_code == 1


def test_code_from_a_checkpoint_is_refused(tmp_path):
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(InputError, match="Python code of its own") as refusal:
        load(tmp_path)
    assert "--trust-remote-code" in refusal.value.hint


@pytest.mark.parametrize("broken", [{"version": 2, "block_size": 4}, {"version": 1}])
def test_an_unreadable_mars_block_is_refused(tmp_path, broken):
    save(tmp_path, make_model(), make_tokenizer(mask_token="<|mask|>"), mars=metadata(3))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mars": broken}))
    with pytest.raises(InputError, match="mars block"):
        load(tmp_path)


@pytest.mark.parametrize(("device", "named"), [("cuda:99", "cuda:99"), ("tpu", "unknown")])
def test_devices_that_are_not_there_are_refused(device, named):
    with pytest.raises(InputError, match=named):
        checkpoint.resolve_device(device)
