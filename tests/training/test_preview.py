"""``mars train --dry-run``: what it shows, that its figures are right, and that it leaves nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny_runs import train

from marscli.cli.app import run
from marscli.core.layout import collate, two_stream_example
from marscli.training import memory, objective, preview
from marscli.training.config import TrainConfig
from marscli.training.trainer import choose_attention
from tiny_chat import make_model, make_tokenizer, save_model, write_rows


@pytest.fixture
def dry_run(base, tmp_path, capsys):
    def call(*arguments, data):
        options = ["-m", base, "-d", data, "-o", tmp_path / "out", "--device", "cpu", "--dtype", "float32", "--dry-run"]
        code = run(["train", *map(str, options), *map(str, arguments)])
        assert not (tmp_path / "out").exists()
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_example_shows_prompt_and_blocks(dry_run, tmp_path):
    data = write_rows(tmp_path / "a.jsonl", [{"question": "What is 1 + 2?", "answer": "It is 3."}])
    code, out, _ = dry_run("--epochs", 3, data=data)
    assert code == 0
    assert "What is 1 + 2?<|im_end|>\n<|im_start|>assistant\n▕It i│s 3.│<|im_end|>" in out
    assert "3 of 8 examples" in out
    assert "GiB" in out
    assert "\x1b[" not in out, "no colour where stdout is no terminal"
    _, out, _ = dry_run("--objective", "ar", data=data)
    assert "assistant\n▕It is 3.<|im_end|>" in out


def test_the_example_is_in_colour_on_a_terminal(base, data, tmp_path):
    from rich.console import Console

    seen = preview.preview(TrainConfig(model=str(base), dataset=str(data), output_dir=tmp_path / "x", device="cpu"))
    console = Console(force_terminal=True, color_system="standard", width=100)
    with console.capture() as capture:
        console.print(seen.to_rich())
    assert "\x1b[30;46m1 an\x1b[0m" in capture.get()


def test_json_counts_what_a_run_counts(dry_run, base, tmp_path):
    rows = [{"question": "Q" * n, "answer": "A" * n} for n in (5, 10, 100)]
    data = write_rows(tmp_path / "a.jsonl", [*rows, {"text": "x"}])
    options = ("--skip-bad-rows", "--max-length", 60, "--epochs", 4, "-b", 2)
    code, out, _ = dry_run(*options, "--json", data=data)
    assert code == 0
    counts = json.loads(out)
    summary = train(base, data, tmp_path / "real", skip_bad_rows=True, max_length=60, epochs=4, batch_size=2)
    assert counts["rows"] == summary["rows"]
    assert counts["rows"]["dropped"] == {"unknown keys": 1, "response cut off by --max-length": 1}
    assert counts["steps"] == summary["steps"]
    assert counts["mask_token"] == "<|mask|>"
    assert counts["weights"] == counts["trained_weights"] == make_model().num_parameters()
    code, out, _ = dry_run(*options, "--json", "--lora-rank", 4, data=data)
    from marscli.training import lora

    model = lora.add_adapters(make_model(), rank=4, alpha=None, mask_token_id=3)
    assert json.loads(out)["trained_weights"] == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_what_would_be_refused_is_refused(dry_run, tmp_path):
    data = write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    code, out, err = dry_run(data=data)
    assert (code, out) == (2, "")
    assert f"{data}:1: keys found: text" in err


def test_no_weights_are_needed(tmp_path, data):
    """A folder with weights that cannot be read is enough."""
    base = save_model(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"none")
    seen = preview.preview(TrainConfig(model=str(base), dataset=str(data), output_dir=tmp_path / "x", device="cpu"))
    assert seen.steps > 0


def test_a_stream_is_read_no_further_than_needed(dry_run, tmp_path):
    good = {"question": "Q", "answer": "A"}
    data = write_rows(tmp_path / "a.jsonl", [good] * preview.STREAM_PROBE + [{"text": "x"}])
    code, out, _ = dry_run("--streaming", "--max-steps", 7, "--json", data=data)
    assert code == 0
    counts = json.loads(out)
    assert (counts["rows"]["rows"], counts["rows_are_partial"], counts["steps"]) == (preview.STREAM_PROBE, True, 7)


@pytest.mark.parametrize("heads", [2, 4])
def test_the_estimate_of_activations_is_close_to_what_is_kept(heads):
    """Against the tensors that autograd really keeps, the logits' aside."""
    model = make_model(
        hidden_size=64, intermediate_size=176, num_hidden_layers=6, num_key_value_heads=heads, vocab_size=300
    )
    choose_attention(model.train(), torch.device("cpu"))
    text = make_tokenizer()("some text " * 15)["input_ids"]
    example = two_stream_example(text, [(50, len(text))], block_size=4, mask_token_id=3)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.shape[-1:] != (300,):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective.step_loss(model, collate([example] * 4, 2), torch.ones(2), most_offsets=4)
    config = TrainConfig(model="m", dataset="d.jsonl", output_dir="o")
    shape = {"weights": 1, "rows": 4, "entries": len(example), "half": False, "flex": False}
    estimate = memory.estimate_memory(config, model.config, **shape)
    assert sum(kept.values()) == pytest.approx(estimate["activations"], rel=0.15)
    less = replace(config, activation_checkpointing=True)
    assert memory.estimate_memory(less, model.config, **shape)["activations"] < estimate["activations"] / 3
    assert memory.estimate_memory(config, model.config, **{**shape, "half": True})["total"] < estimate["total"]
