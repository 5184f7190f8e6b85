"""Every file in examples/ and every command in their comments is understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from marscli import training
from marscli.cli.app import run
from marscli.training import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCELERATE = sorted(EXAMPLES.glob("accelerate_*.yaml"))
RECIPES = sorted(set(EXAMPLES.glob("*.yaml")) - set(ACCELERATE))
COMMANDS = [
    shlex.split(line)
    for path in RECIPES
    for line in re.findall(r"^#   (.*mars(?:cli)? train .*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


@pytest.fixture
def parsed(monkeypatch):
    """The config that a command line comes to; nothing is run."""
    seen = []
    monkeypatch.setattr(training, "train", lambda config, **options: seen.append(config))
    monkeypatch.setattr(launch, "is_wanted", lambda config: False)
    monkeypatch.chdir(EXAMPLES.parent)

    def parse(arguments):
        assert run(["train", *arguments]) == 0
        return seen.pop()

    return parse


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes(parsed, path):
    config = parsed(["--config", str(path)])
    assert config.objective == "mars"
    assert config.block_size == 4


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_in_the_recipes(parsed, command):
    assert Path(command[command.index("--config") + 1]).parts[0] == "examples"
    config = parsed(command[command.index("train") + 1 :])
    stage = "ar" if config.objective == "ar" else "mars"
    assert config.output_dir.name.endswith(f"-{stage}")
    assert config.model.endswith("-ar") == (stage == "mars"), "the second stage starts from the first"
    if command[0] == "accelerate":
        assert load_config_from_file(command[command.index("--config_file") + 1]).num_processes == 8


def test_there_are_recipes_and_each_has_two_stages():
    assert len(RECIPES) == 4
    assert len(COMMANDS) == 2 * len(RECIPES)


@pytest.mark.parametrize("name", ["paper_0.5b", "paper_7b"])
def test_the_papers_settings(parsed, name):
    config = parsed(["--config", str(EXAMPLES / f"{name}.yaml")])
    processes = 8  # of the 7B run in accelerate's own file
    assert config.batch_size * config.grad_accum * processes == 384
    assert (config.lr, config.warmup_ratio, config.epochs, config.max_length) == (5e-6, 0.03, 5, 512)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_configs(path):
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.mixed_precision) == (8, "bf16")
    if str(config.distributed_type).endswith("FSDP"):
        known = set(re.findall(r'"--(fsdp_\w+)"', accelerate_launch_source()))
        assert set(config.fsdp_config) <= known


def accelerate_launch_source():
    import accelerate.commands.launch

    return Path(accelerate.commands.launch.__file__).read_text(encoding="utf-8")
