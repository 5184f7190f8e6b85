"""``mars train`` as users meet it: options, streams, exit codes, errors with file, line and hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marscli.cli.app import run
from marscli.errors import InputError
from marscli.training.config import TrainConfig
from tiny_chat import make_tokenizer, save_model, sums, write_rows


@pytest.fixture
def mars_train(base, tmp_path, capsys):
    """Run the command with a model, sums and an output folder, unless the test gives others."""

    def call(*arguments, model=base, data=None, output=tmp_path / "out"):
        data = data or write_rows(tmp_path / "sums.jsonl", sums(8))
        options = ["-m", model, "-d", data, "-o", output, "--max-steps", 2, "-b", 2, "--device", "cpu"]
        code = run(["train", *map(str, options), *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_run_keeps_stdout_clean(mars_train, tmp_path):
    code, out, err = mars_train("--learning_rate", "1e-3", "--grad-accum", 2, "--block-size", 3)
    assert (code, out) == (0, "")
    assert "saved to" in err
    assert "mask token: <|mask|> (id 3)" in err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    options = summary["meta"]["options"]
    assert (options["lr"], options["grad_accum"], options["block_size"]) == (1e-3, 2, 3)


def test_json_is_the_summary(mars_train, tmp_path):
    code, out, err = mars_train("--json", "--quiet", "--limit", 3)
    assert code == 0
    assert err == ""
    assert json.loads(out) == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert json.loads(out)["meta"]["partial"] is True


def test_options_from_a_file(base, tmp_path, capsys):
    data = write_rows(tmp_path / "sums.jsonl", [{"q": "Q", "a": "A"}, {"q": "Q"}])
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {base}\ndataset: [{data}]\noutput-dir: {tmp_path / 'out'}\nmax_steps: 1\nprompt-field: q\n"
        "response-field: a\nskip-bad-rows: true\nlr: 1e-3\nobjective: ar\ndevice: cpu\n"
    )
    assert run(["train", "--config", str(config), "--lr", "2e-3"]) == 0
    assert "rows left out: 1 (unknown keys)" in capsys.readouterr().err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["objective"] == "ar"
    assert summary["meta"]["options"]["lr"] == 2e-3
    assert summary["rows"]["dropped"] == {"unknown keys": 1}


def refused(result, message, hint, folder=None):
    code, out, err = result
    assert (code, out) == (2, "")
    lines = err.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert message in lines[-2]
    assert lines[-1].startswith("hint: ")
    assert hint in lines[-1]
    assert "Traceback" not in err
    if folder is not None:
        assert not folder.exists(), "nothing half-made stays"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            '{"question": "Q", "answer": "A"}\n{"text": "x"}\n',
            "{path}:2: keys found: text; keys expected:",
            "--skip-bad",
        ),
        ('{"question": "Q", "answer": "A"}\n{"question\n', "{path}:2: not a JSON line:", "--skip-bad-rows"),
        ("", "{path} is empty", "at least one row"),
        ('{"messages": [{"role": "user", "content": "Q"}]}\n', "{path}:1: no message has the role", "--skip-bad-rows"),
    ],
)
def test_bad_data(mars_train, tmp_path, text, message, hint):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    refused(mars_train(data=path), message.format(path=path), hint, tmp_path / "out")


def test_missing_things(mars_train, base, tmp_path):
    out = tmp_path / "out"
    refused(mars_train(data=tmp_path / "sum.jsonl"), "sum.jsonl: no such file", "Hub id", out)
    refused(mars_train(model=tmp_path / "nowhere"), "there is no such folder", "config.json", out)
    refused(mars_train("--max-length", 5), "no row is left", "--max-length", out)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((base / name).read_bytes())
    refused(mars_train(model=bare), "holds no tokenizer", "--tokenizer", out)
    code, _, _ = mars_train("--tokenizer", base, model=bare)
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "0"), "--block-size 0 is outside"),
        (("--block-size", "1"), "--block-size 1"),
        (("--objective", "mlm"), "--objective 'mlm'"),
        (("--dtype", "int8"), "--dtype 'int8'"),
        (("--lr", "0"), "--lr 0"),
        (("--lr", "nan"), "--lr nan"),
        (("--epochs", "-1"), "--epochs -1"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--warmup-ratio", "3"), "--warmup-ratio 3"),
        (("--ar-weight", "-1"), "--ar-weight -1"),
        (("--resume", "--force"), "--resume and --force"),
        (("--resume-from", "x", "--force"), "--resume-from and --force"),
        (("--resume-from", "x", "--resume"), "--resume and --resume-from"),
        (("--resume-from", "nowhere/checkpoint-5"), "no whole checkpoint (trainer_state.json is missing)"),
        (("--block-size", "33"), "--block-size 33 is outside 2 … 32"),
        (("--objective", "ar", "--distill"), "--distill has no meaning with --objective ar"),
        (("--eval-steps", "5"), "--eval-steps needs --eval-dataset"),
        (("--early-stopping", "2"), "--early-stopping needs --eval-dataset"),
        (("--eval-dataset", "gone.jsonl"), "--eval-dataset gone.jsonl: no such file"),
        (("--merge",), "--merge needs --lora-rank"),
        (("--lora-rank", "0"), "--lora-rank 0"),
        (("--lora-rank", "4", "--lora-alpha", "0"), "--lora-alpha 0"),
        (("--streaming", "--packing"), "--streaming and --packing"),
        (("--num-processes", "0"), "--num-processes 0"),
        (("--report-to", "newspaper"), "--report-to newspaper is unknown"),
        (("--report-to", "tensorboard"), "the package tensorboard is not installed"),
        (("--blok-size", "4"), "--blok-size"),
        (("--max-steps", "many"), "--max-steps"),
        (("--device", "tpu"), "--device tpu"),
        (("--seed", "-1"), "--seed -1"),
        (("--seed", "1" * 12), "--seed 1"),
    ],
)
def test_wrong_options(mars_train, tmp_path, arguments, message):
    refused(mars_train(*arguments), message, "", tmp_path / "out")


def test_templates(mars_train, tmp_path):
    plain = save_model(tmp_path / "plain", tokenizer=make_tokenizer(template=None))
    refused(mars_train("--chat-template", model=plain), "--chat-template", "instruction-tuned", tmp_path / "out")
    refused(mars_train("--system", "S", model=plain), "--system", "prompts", tmp_path / "out")
    code, _, err = mars_train(model=plain)
    assert code == 0
    assert "joined as they are" in err


def test_existing_results_are_not_overwritten(mars_train, base, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    refused(mars_train(), "holds results already", "--force")
    refused(mars_train(), "holds results already", "--resume")
    assert (out / "config.json").read_text() == "{}"
    refused(mars_train("--force", output=base), "is the folder of --model", "another folder")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a place where nobody may write")
def test_a_folder_that_cannot_be_written(mars_train):
    refused(mars_train(output="/proc/out"), "cannot write there", "permissions")


def test_the_command_has_the_configs_defaults():
    """One default a setting: the command's, the Python function's and the paper's."""
    import inspect

    from marscli.cli.train import train

    config = TrainConfig(model="m", dataset="d.jsonl", output_dir="o")
    parameters = inspect.signature(train).parameters
    for name, value in vars(config).items():
        if name not in ("model", "dataset", "output_dir"):
            assert parameters[name].default == value, name
    with pytest.raises(InputError):
        TrainConfig(model="m", dataset=[], output_dir="o")
