"""A tiny chat model and rows of sums for whole training runs."""

from __future__ import annotations

import pytest

from tiny_chat import save_model, sums, write_rows


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "sums.jsonl", sums(20))
