"""Several processes: the same run as one process with the same global batch; only one writes and speaks."""

from __future__ import annotations

import pytest
from tiny_runs import log_figures, train, weights
from torch.distributed.elastic.multiprocessing.api import ProcessFailure, RunProcsResult

import marscli
from marscli.errors import InputError, MarsError
from marscli.training import TrainConfig, launch


def test_two_processes_are_one_with_the_same_global_batch(base, data, tmp_path, capfd):
    train(base, data, tmp_path / "one", max_steps=4, batch_size=4, grad_accum=1, random_offset=True)
    capfd.readouterr()
    summary = train(
        base, data, tmp_path / "two", max_steps=4, batch_size=1, grad_accum=2, num_processes=2, random_offset=True
    )
    assert summary["processes"] == 2
    for a, b in zip(log_figures(tmp_path / "one"), log_figures(tmp_path / "two"), strict=True):
        assert a[:4] == pytest.approx(b[:4], abs=1e-5), "loss and both terms"
        assert a[4:] == b[4:]
    for (name, a), b in zip(weights(tmp_path / "one").items(), weights(tmp_path / "two").values(), strict=True):
        assert (a - b).abs().max() < 1e-4, name
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("saved to") == 1
    assert "4 steps of 4 examples on cpu in 2 processes" in err
    assert "warning" not in err.lower()


def test_what_a_failed_process_said_is_told(tmp_path):
    (tmp_path / "log").write_text("line\nerror: out of memory\nhint: less\n")

    def result(**codes):
        failures = {int(r[1]): ProcessFailure(int(r[1]), 1, code, "") for r, code in codes.items()}
        return RunProcsResult(failures=failures, stdouts={}, stderrs={1: str(tmp_path / "log")})

    with pytest.raises(MarsError, match=r"process 1 ended with code 1: error: out of memory | hint: less"):
        launch._fail(result(r1=1))
    for code, kind in ((2, InputError), (1, MarsError)):  # process 0 has said it on the terminal
        with pytest.raises(kind, match="the training processes") as caught:
            launch._fail(result(r0=code, r1=-15))
        assert caught.value.exit_code == code


def test_the_number_of_processes_launched(monkeypatch, base, data, tmp_path):
    config = TrainConfig(model=str(base), dataset=str(data), output_dir=tmp_path, num_processes=2)
    assert launch.is_wanted(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="4 processes were launched"):
        marscli.train(config)
