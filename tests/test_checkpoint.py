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


def published(folder, *, tokenizer_class=True, mask=True):
    """A tiny checkpoint in the layout of the published ones."""
    save_model(folder, tokenizer=make_tokenizer() if mask else tokenizer_without("<|mask|>"))
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "modeling_qwen2.A2DQwen2Config", "AutoModelForCausalLM": "modeling_qwen2.A2DQwen2LMHeadModel"}
    config |= {"model_type": "a2d-qwen2", "architectures": ["A2DQwen2LMHeadModel"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_qwen2.py").write_text("raise SystemExit('this code ran')")
    if not tokenizer_class:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("tokenizer_class")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_published_layout_loads_as_the_plain_model_that_it_is(tmp_path, caplog):
    folder = published(tmp_path / "published")
    caplog.set_level("WARNING", logger="marscli")
    settings, context = checkpoint.load_settings(folder)
    assert (settings.block_size, settings.mask_token_id, settings.is_assumed, context) == (4, 3, True, 512)
    loaded = load(folder, dtype="float32")
    assert type(loaded.model).__name__ == "Qwen2ForCausalLM"
    assert (loaded.block_size, loaded.mask_token_id, loaded.eos_token_ids) == (4, 3, (2,))
    assert caplog.text.count("does not say its block size: 4 is taken") == 1
    plain = make_model()
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), plain.parameters(), strict=True))
    (one,) = loaded.generate("Hi", max_new_tokens=9, verify=False)
    (several,) = loaded.generate("Hi", max_new_tokens=9, draft_tokens=3)
    assert several.token_ids == one.token_ids
    assert loaded.generate("Hi", max_new_tokens=9, threshold=1e-9, verify=False)[0].forwards == 3


def test_the_block_size_of_a_published_checkpoint_can_be_given(tmp_path, caplog, capsys):
    from marscli.cli.app import run

    folder = published(tmp_path / "published")
    assert load(folder, block_size=8).block_size == 8
    assert "block size" not in caplog.text
    options = ["-n", "16", "--threshold", "1e-9", "--no-verify", "--dtype", "float32", "--json"]
    assert run(["generate", "-m", str(folder), "Hi", *options, "--block-size", "8"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["forwards"] == 2
    assert "warning" not in err
    assert run(["generate", "-m", str(folder), "Hi", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["forwards"] == 4
    assert err.count("warning: ") == 1


def test_a_published_checkpoint_without_its_mask_token_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no mask token <\|mask\|>"):
        load(published(tmp_path, mask=False))


def gguf_file(path):
    """A tiny Llama with a byte-level vocabulary, as llama.cpp's converter writes it; returns the model."""
    gguf = pytest.importorskip("gguf")
    model, tokenizer = make_model("llama", num_key_value_heads=4), make_tokenizer(template=None, merges=(("H", "e"),))
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    tokens += [f"<extra{index}>" for index in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 4 else 1 for index in range(len(tokens))])
    writer.add_token_merges(["H e"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp's order of rotary pairs
            heads = config.num_attention_heads
            array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_decodes_as_the_model_that_it_was_made_of(tmp_path, caplog):
    model = gguf_file(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert not loaded.is_mars
    assert loaded.context_length == 512
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name].float(), tensor)
    ids = loaded.tokenizer("Hello").input_ids
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=2)[0, len(ids) :]
    (result,) = loaded.generate("Hello", max_new_tokens=8)
    assert result.token_ids == expected.tolist()


def test_a_gguf_file_on_the_command_line(tmp_path, capsys, monkeypatch):
    from marscli.cli.app import run

    gguf_file(tmp_path / "tiny.gguf")
    assert run(["generate", "-m", str(tmp_path / "tiny.gguf"), "Hello", "-n", "3"]) == 0
    assert "1.00 tokens/forward" in capsys.readouterr().err
    (tmp_path / "broken.gguf").write_bytes(b"no")
    assert run(["generate", "-m", str(tmp_path / "broken.gguf"), "Hello"]) == 2
    assert "no GGUF file" in capsys.readouterr().err
    monkeypatch.setattr("marscli.formats.find_spec", lambda name: None)
    assert run(["generate", "-m", str(tmp_path / "tiny.gguf"), "Hello"]) == 2
    assert "pip install 'marscli[gguf]'" in capsys.readouterr().err


def test_a_wrong_path_shows_the_checkpoints_near_it(tmp_path, monkeypatch):
    for name in ("runs/mars", "runs/ar", "runs/empty"):
        (tmp_path / name).mkdir(parents=True)
    save_model(tmp_path / "runs" / "mars")
    save_model(tmp_path / "runs" / "ar")
    for wrong in ("runs/marz", "run/mars/x", "./nope"):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError) as refusal:
            checkpoint.check_model_source(wrong if wrong.startswith(".") else tmp_path / wrong)
        assert "mars" in refusal.value.hint
        assert "empty" not in refusal.value.hint
    with pytest.raises(InputError) as refusal:
        checkpoint.check_model_source(tmp_path / "runs" / "marz")
    assert refusal.value.hint.endswith("mars, ar")
    with pytest.raises(MarsError) as refusal:  # it could be a Hub id
        load("marz")
    assert refusal.value.hint.endswith(": runs/mars, runs/ar")
