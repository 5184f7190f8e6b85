"""Whole runs: what they leave behind, resuming, stopping, and what the trained checkpoint is worth."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tiny_runs import assert_same_run, train, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import marscli
from marscli.core.decoding import Engine, Request, decode
from marscli.core.params import DecodingParams
from marscli.errors import InputError, MarsError
from marscli.training import callbacks
from marscli.training.callbacks import read_log
from tiny_chat import make_model, make_tokenizer, save_model, write_rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, data):
    folder = tmp_path_factory.mktemp("runs") / "mars"
    summary = train(base, data, folder, max_steps=10, save_steps=5)
    return folder, summary


def test_files_and_summary(trained, base):
    folder, summary = trained
    assert json.loads((folder / "summary.json").read_text())["loss"] == summary["loss"]
    assert summary["steps"] == 10
    assert summary["rows"] == {**summary["rows"], "rows": 20, "used": 20, "dropped": {}, "truncated": 0}
    assert summary["meta"]["options"]["block_size"] == 4
    log = read_log(folder / "train_log.jsonl")
    assert [line["step"] for line in log] == list(range(1, 11))
    assert summary["tokens"] > 0
    config = json.loads((folder / "config.json").read_text())
    before = json.loads((base / "config.json").read_text())
    assert config["mask_token_id"] == config["pard_token"] == 3
    assert config["mars"] == {"version": 1, "block_size": 4, "ar_weight": 1.0, "base_model": str(base)}
    assert config["use_cache"] is True
    for key in ("architectures", "model_type", "vocab_size", "eos_token_id", "tie_word_embeddings"):
        assert config[key] == before[key]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == make_tokenizer().chat_template
    assert (folder / "loss.png").stat().st_size > 10_000
    card = (folder / "README.md").read_text()
    assert "tiny, fine-tuned with MARS" in card
    assert str(base.parent) not in card
    assert not list(folder.glob(".*"))
    assert (folder / "checkpoint-5").is_dir()
    assert not (folder / "checkpoint-10").exists(), "the trained model itself is there"
    assert "mars generate -m . " in card
    assert "](http" not in card


def test_the_result_needs_no_marscli(trained, base, tmp_path):
    """Where marscli cannot be imported it loads, has the base's parameters, and writes what one-token mode writes."""
    folder, _ = trained
    script = tmp_path / "check.py"
    script.write_text(
        """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "marscli":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompts = json.loads(sys.argv[2])
answers = [
    model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False, suppress_tokens=[3])[0, len(ids):].tolist()
    for ids in prompts
]
print(json.dumps([sum(p.numel() for p in model.parameters()), answers, "marscli" in sys.modules]))
"""
    )
    prompts = [[1, 50, 60, 70], [1, 80, 90, 100, 110, 120, 130]]
    result = subprocess.run(
        [sys.executable, "-I", str(script), str(folder), json.dumps(prompts)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    parameters, answers, imported = json.loads(result.stdout)
    assert not imported
    assert parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base).parameters())
    checkpoint = marscli.load(folder)
    assert (checkpoint.mask_token_id, checkpoint.block_size) == (3, 4)
    engine = Engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        max_rows=2,
        context_length=512,
    )
    params = DecodingParams(max_new_tokens=30)
    assert [c.tokens for c in decode(engine, [Request(ids, params) for ids in prompts])] == answers


def test_ten_steps_are_five_and_resumed_five(trained, base, data, tmp_path):
    folder, _ = trained
    half = tmp_path / "half"
    half.mkdir()
    shutil.copytree(folder / "checkpoint-5", half / "checkpoint-5")
    (half / "checkpoint-7").mkdir()  # broken off while it was written
    shutil.copy(folder / "checkpoint-5" / "model.safetensors", half / "checkpoint-7")
    lines = (folder / "train_log.jsonl").read_text().splitlines(keepends=True)
    (half / "train_log.jsonl").write_text("".join(lines[:6]) + '{"step": 7, "lo')
    summary = train(base, data, half, max_steps=10, save_steps=5, resume=True)
    assert summary["resumed_from_step"] == 5
    assert_same_run(folder, half)
    assert not (half / "checkpoint-7").exists()


def test_resuming_with_accumulation_over_epochs(base, data, tmp_path):
    options = {"batch_size": 2, "grad_accum": 3, "epochs": 2, "save_steps": 5}  # 4 steps an epoch, the last one shorter
    train(base, data, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole" / "checkpoint-5", tmp_path / "half" / "checkpoint-5")
    train(base, data, tmp_path / "half", **options, resume=True)
    for a, b in zip(weights(tmp_path / "whole").values(), weights(tmp_path / "half").values(), strict=True):
        assert torch.equal(a, b)


def test_what_resuming_refuses_and_what_it_does_not(trained, base, data, tmp_path):
    folder, summary = trained
    again = train(base, data, folder, max_steps=10, save_steps=5, resume=True)
    assert again["loss"] == summary["loss"], "a finished run is not run again"
    shutil.copytree(folder / "checkpoint-5", tmp_path / "x" / "checkpoint-5")
    with pytest.raises(InputError, match=r"was made with lr 0\.003, not 0\.1"):
        train(base, data, tmp_path / "x", max_steps=10, lr=0.1, resume=True)
    assert train(base, data, tmp_path / "new", max_steps=1, resume=True)["resumed_from_step"] is None


def test_ctrl_c_saves_a_checkpoint_and_the_run_can_go_on(trained, base, data, tmp_path, monkeypatch, caplog):
    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == 3 and state.max_steps == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(callbacks.ProgressCallback, "on_step_begin", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        train(base, data, tmp_path / "x", max_steps=10)
    assert "--resume" in caplog.text
    assert (tmp_path / "x" / "checkpoint-4" / callbacks.RUN_FILE).is_file()
    assert not (tmp_path / "x" / "config.json").exists()
    monkeypatch.undo()
    train(base, data, tmp_path / "x", max_steps=10, resume=True)
    for a, b in zip(weights(trained[0]).values(), weights(tmp_path / "x").values(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_is_not_finite_stops_the_run(base, data, tmp_path):
    with pytest.raises(MarsError) as caught:
        train(base, data, tmp_path / "x", max_steps=20, lr=1e20, save_steps=1, warmup_ratio=0)
    assert "at step" in caught.value.message or "after step" in caught.value.message
    assert "--lr" in caught.value.hint
    assert caught.value.exit_code == 1
    assert not (tmp_path / "x" / "config.json").exists()
    with pytest.raises(MarsError):
        train(base, data, tmp_path / "y", max_steps=20, lr=1e20, warmup_ratio=0)
    assert not (tmp_path / "y").exists(), "a log without a checkpoint is of no use"


def test_force_leaves_nothing_of_the_earlier_run(base, data, tmp_path):
    train(base, data, tmp_path, max_steps=3, save_steps=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds results already"):
        train(base, data, tmp_path, max_steps=1)
    train(base, data, tmp_path, max_steps=1, objective="ar", force=True)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"mars", "mask_token_id", "pard_token"} & set(config)
    assert read_log(tmp_path / "train_log.jsonl")[-1]["loss_masked"] is None


def test_bfloat16_is_written_and_trained_from_float32_weights(base, data, tmp_path):
    train(base, data, tmp_path, max_steps=2, dtype="bfloat16", lr=1e-5, save_steps=1)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1").dtype == torch.float32


def test_memoriser(tmp_path):
    """Overfitted on four long answers, a model writes them exactly, nearly B tokens a forward, nothing verified."""
    rows = [
        {"question": name, "answer": " ".join(f"{name}{n * k % 17}" for n in range(12))}
        for k, name in enumerate(("ab", "cd", "ef", "gh"), start=2)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    model = make_model(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    base = save_model(tmp_path / "base", model)
    summary = train(base, data, tmp_path / "x", max_steps=150, lr=5e-3)
    log = read_log(tmp_path / "x" / "train_log.jsonl")
    assert summary["loss_masked"] < 0.1 < 1 < log[0]["loss_masked"]
    checkpoint = marscli.load(tmp_path / "x")
    engine = Engine(
        checkpoint.model,
        mask_token_id=checkpoint.mask_token_id,
        eos_token_ids=checkpoint.eos_token_ids,
        max_rows=4,
        context_length=512,
    )
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = checkpoint.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    params = DecodingParams(max_new_tokens=128, threshold=0.9, block_size=4, verify=False)
    answers = decode(engine, [Request(ids, params) for ids in prompts])
    texts = [checkpoint.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    assert texts == [row["answer"] for row in rows]
    assert min(len(answer.tokens) for answer in answers) >= 10 * 4
    assert sum(len(answer.tokens) for answer in answers) > 0.9 * 4 * sum(answer.forwards for answer in answers)
