"""Shared by all tests: one torch thread (tests run side by side), no network, and no settings of the machine's own."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("marscli", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.load_profile("marscli")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The second tier runs only where a model is named."""
    if not os.environ.get("MARS_TEST_MODEL"):
        skip = pytest.mark.skip(reason="set MARS_TEST_MODEL=DIR to run tests on the real 135M model")
        for item in items:
            if "real" in item.keywords:
                item.add_marker(skip)
